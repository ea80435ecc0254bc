"""Figures of memory: a process that has nothing to do, and what each run that waits for a person adds to it."""

from __future__ import annotations

from pathlib import Path

from tests.bench.past import wait_until_moved
from tests.bench.peer import CALLS_AT_ONCE, Daemon, Scratch
from tests.bench.row import Row, Target

FIRST = 20
"""Runs that are there before the memory is taken for the first time: they pay for what is loaded once."""


def resident(scratch: Scratch, runs: int) -> list[Row]:
    """The runs wait for an approval: small ones, with one question and no history. In the process that began them, once it
    has nothing left to do; and in the next one on the same store, beside one on a store with few runs."""
    few, many = scratch.fresh("few"), scratch.fresh("many")
    with Daemon(scratch, few) as daemon:
        daemon.call("status")
        idle = daemon.resident_kb()
        _start_waiting(daemon, 0, FIRST)
        daemon.close()
    with Daemon(scratch, many) as daemon:
        _start_waiting(daemon, 0, FIRST)
        before = daemon.resident_kb()
        _start_waiting(daemon, FIRST, FIRST + runs)
        wait_until_moved(many)
        after = daemon.resident_kb()
        assert daemon.call("status")["counts"]["waiting"] == FIRST + runs
        daemon.close()
    next_each = (_after_restart(scratch, many, FIRST + runs) - _after_restart(scratch, few, FIRST)) / runs
    most = Target(sign="<=", number=2)
    some = f"{runs:,} of them"
    return [
        Row(figure="resident, idle", unit="MB", value=idle / 1024, target=Target(sign="<=", number=60)),
        Row(figure=f"resident per waiting run, {some}", unit="KB", value=(after - before) / runs, target=most),
        Row(figure=f"resident per waiting run, {some}, after a restart", unit="KB", value=next_each, target=most),
    ]


def _after_restart(scratch: Scratch, store: Path, runs: int) -> int:
    """KB, once `status` has counted them."""
    with Daemon(scratch, store) as daemon:
        assert daemon.call("status")["counts"]["waiting"] == runs
        seen = daemon.resident_kb()
        daemon.close()
    return seen


def _start_waiting(daemon: Daemon, first: int, end: int) -> None:
    call = {"tool": "files.write", "arguments": {"path": "out.txt", "content": "x"}}
    agent = {"name": "asks", "tools": ["files.write"], "model": {"script": [{"calls": [call]}, {"text": "done"}]}}
    for start in range(first, end, CALLS_AT_ONCE):
        numbers = range(start, min(start + CALLS_AT_ONCE, end))
        for number in numbers:
            daemon.send("start", clientRequestId=f"wait-{number}", agent=agent, input="go", waitMs=60_000)
        for _ in numbers:
            run = daemon.result()["run"]
            assert run["status"] == "waiting", run
