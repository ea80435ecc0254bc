"""Figures of memory: a process that has nothing to do, and what each run that waits for a person adds to it."""

from __future__ import annotations

from pathlib import Path

from tests.bench.past import wait_until_moved
from tests.bench.peer import CALLS_AT_ONCE, Daemon, Scratch
from tests.bench.row import Row, Target

FIRST = 20
"""Runs that are there before the memory is taken for the first time: they pay for what is loaded once."""


def resident(scratch: Scratch, runs: int) -> list[Row]:
    """The runs wait for an approval: small ones, with one question and no history. Taken when the process has nothing left
    to do: after `runs` that began in one go, with what it keeps of that peak; after as many again, which find that room
    there; and in the next process on the same store, beside one on a store with few runs."""
    few, many = scratch.fresh("few"), scratch.fresh("many")
    with Daemon(scratch, few) as daemon:
        daemon.call("status")
        idle = daemon.resident_kb()
        _start_waiting(daemon, 0, FIRST)
        daemon.close()
    with Daemon(scratch, many) as daemon:
        taken, begun = [], 0
        for end in (FIRST, FIRST + runs, FIRST + 2 * runs):
            _start_waiting(daemon, begun, end)
            wait_until_moved(many)
            begun = end
            assert daemon.call("status")["counts"]["waiting"] == begun
            taken.append(daemon.resident_kb())
        daemon.close()
    first, second, third = taken
    next_each = (_after_restart(scratch, many, begun) - _after_restart(scratch, few, FIRST)) / (begun - FIRST)
    figures = [
        (f"{runs:,} begun in one go", (second - first) / runs),
        (f"{runs:,} more", (third - second) / runs),
        (f"{2 * runs:,} after a restart", next_each),
    ]
    most = Target(sign="<=", number=2)
    return [
        Row(figure="resident, idle", unit="MB", value=idle / 1024, target=Target(sign="<=", number=60)),
        *(Row(figure=f"resident per waiting run, {of}", unit="KB", value=kb, target=most) for of, kb in figures),
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
