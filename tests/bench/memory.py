"""Figures of memory: a process that has nothing to do, and what each run that waits for a person adds to it."""

from __future__ import annotations

from tests.bench.peer import Daemon, Scratch
from tests.bench.row import Row, Target


def resident(scratch: Scratch, runs: int) -> list[Row]:
    """The runs wait for an approval: small ones, with one question and no history."""
    with Daemon(scratch, scratch.fresh("memory")) as daemon:
        daemon.call("status")
        idle = daemon.resident_kb()
        _start_waiting(daemon, 0, 20)
        before = daemon.resident_kb()
        _start_waiting(daemon, 20, 20 + runs)
        after = daemon.resident_kb()
        assert daemon.call("status")["counts"]["waiting"] == 20 + runs
        daemon.close()
    return [
        Row(figure="resident, idle", unit="MB", value=idle / 1024, target=Target(sign="<=", number=60)),
        Row(figure=f"resident per waiting run, {runs:,} of them", unit="KB", value=(after - before) / runs,
            target=Target(sign="<=", number=2)),
    ]  # fmt: skip


def _start_waiting(daemon: Daemon, first: int, end: int) -> None:
    call = {"tool": "files.write", "arguments": {"path": "out.txt", "content": "x"}}
    agent = {"name": "asks", "tools": ["files.write"], "model": {"script": [{"calls": [call]}, {"text": "done"}]}}
    for number in range(first, end):
        run = daemon.call("start", clientRequestId=f"wait-{number}", agent=agent, input="go", waitMs=30_000)["run"]
        assert run["status"] == "waiting", run
