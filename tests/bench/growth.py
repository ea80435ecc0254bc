"""Figures of a store that grows: bytes kept and bytes written for a step, with all that a checkpoint writes.

A record of the log alone is the same length at any step; what is moved into the files of a run, and written anew at each
checkpoint, must be so as well.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import NamedTuple

from tests.bench.past import size_of, wait_until_moved
from tests.bench.peer import NO_LIMITS, Daemon, Scratch, reading_agent
from tests.bench.row import Row, Target, beside

PLACES = (100, 1_000, 1_980)
AROUND = 10
FLAT = Target(sign="<=", number=1.05, of="ratio")


class Seen(NamedTuple):
    """At some moment: records acknowledged; bytes handed to the kernel by the process, but for its answers, and with the
    bytes of the log, which are written once more when they are moved; bytes of all files of the store."""

    records: int
    written: int
    kept: int


def growth(scratch: Scratch, turns: int) -> list[Row]:
    """One run, without its first record, which has the whole script in it. Written: by quarters of it, the first left out,
    in which that record is moved. Kept: at the end."""
    store = scratch.fresh("growth")
    with Daemon(scratch, store) as daemon:
        seen = _samples(daemon, store, turns)
        wait_until_moved(store)
        rows = _lines_rows(_history(store))
        full, steps = size_of(store), turns * 2 + 1
        daemon.close()
    begun = next(each for each in seen if each.records)
    kept = (full - begun.kept) / max(seen[-1].records - begun.records, 1)
    rows.append(Row(figure=f"bytes kept a step, {steps:,} steps, all files", unit="B", value=kept))
    second, last = _written(seen, 1, 2), _written(seen, 3, 4)
    most = Target(sign="<=", number=1.1, of="ratio")
    rows.append(beside("bytes written a step, all files, last quarter beside the second", "B", [last], [second], most))
    return rows


def _samples(daemon: Daemon, store: Path, turns: int) -> list[Seen]:
    """From before the run to its end."""
    seen = [_now(daemon, store)]
    run = daemon.call("start", clientRequestId="grow", agent=reading_agent(turns), input="go", budget=NO_LIMITS)[
        "runId"
    ]
    while daemon.call("status")["counts"] != {"completed": 1}:
        seen.append(_now(daemon, store))
        time.sleep(0.02)
    assert daemon.call("status", runId=run)["budget"]["spent"]["steps"] == turns * 2 + 1
    return [*seen, _now(daemon, store)]


def _now(daemon: Daemon, store: Path) -> Seen:
    records = daemon.journal()["records"]
    counts = Path(f"/proc/{daemon.pid}/io").read_text().split()
    written = int(counts[counts.index("wchar:") + 1]) - daemon.received + size_of(store / "wal")
    return Seen(records, written, size_of(store))


def _written(seen: list[Seen], begin: int, end: int) -> float:
    """Bytes a record between two quarters of the records, by the nearest samples."""
    most = seen[-1].records
    a, b = (min(seen, key=lambda s: abs(s.records - most * part / 4)) for part in (begin, end))
    return (b.written - a.written) / max(b.records - a.records, 1)


def _history(store: Path) -> list[int]:
    """The length of each record of the only run, in its order: in its history, and in the log behind that."""
    lengths: dict[int, int] = {}
    for path in [*(store / "wal").glob("*.jsonl"), *store.glob("runs/*/history.jsonl")]:
        for line in path.read_bytes().splitlines(keepends=True):
            record = json.loads(line)
            if "s" in record:
                lengths[record["s"]] = len(line)
    return [lengths[first] for first in sorted(lengths)]


def _lines_rows(history: list[int]) -> list[Row]:
    """Set beside what is around the fiftieth."""

    def around(step: int) -> float:
        window = history[step - AROUND : step + AROUND]
        return sum(window) / len(window)

    first = around(50)
    return [
        Row(figure=f"bytes kept a step, at step {place:,}", unit="B", value=around(place), floor=first,
            ratio=around(place) / first, target=FLAT)
        for place in PLACES
        if place + AROUND < len(history)
    ]  # fmt: skip
