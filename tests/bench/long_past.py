"""Figures of a store with a long past: what a start costs, what a list of all its runs costs, and what both hold in memory."""

from __future__ import annotations

import json
import statistics
import time
from typing import Any

from tests.bench.past import size_of, store_with_past
from tests.bench.peer import STATUS, Daemon, Scratch
from tests.bench.row import Row, Target, beside


def start_up(scratch: Scratch, runs: int, records: int, rounds: int) -> list[Row]:
    """CPU time of the whole process from spawn to the answer of `status`, which counts every run."""
    store = store_with_past(scratch, runs, records)
    with_past, without = [], []
    for _ in range(rounds):
        without.append(_cpu_to_answer(Daemon(scratch, scratch.fresh("empty")), {}))
        with_past.append(_cpu_to_answer(Daemon(scratch, store), {"completed": runs}))
    some = f"{runs * records:,} records of {runs:,} ended runs"
    most = Target(sign="<=", number=1)
    row = beside(f"CPU from spawn to status, {some}", "s", with_past, without, most)
    log = Row(figure="of that store: bytes in the log", value=size_of(store / "wal") / 2**20, unit="MB")
    return [row, log, Row(figure="of that store: bytes in all", value=size_of(store) / 2**20, unit="MB")]


def _cpu_to_answer(daemon: Daemon, counts: dict[str, int]) -> float:
    with daemon:
        answer = daemon.ask(STATUS)
        used = daemon.cpu_now_s()
        assert json.loads(answer)["result"]["counts"] == counts
        daemon.close()
    return used


def list_all(scratch: Scratch, runs: int, records: int, page: int) -> list[Row]:
    """Every page of `list`, once, with `page` runs each: the time of a page at the end beside that of a page at the beginning, and the memory."""
    store = store_with_past(scratch, runs, records)
    with Daemon(scratch, store) as daemon:
        daemon.call("status")
        before = daemon.resident_kb() / 1024
        took, resident, seen = _pages(daemon, page)
        daemon.close()
    assert seen == runs, seen
    tenth = max(len(took) // 10, 1)
    some = f"{runs:,} ended runs"
    after_first = statistics.median(resident[:tenth])
    pages = beside(
        f"list, a page of {page}, the last tenth of {some} beside the first",
        "ms",
        [statistics.median(took[-tenth:])],
        [statistics.median(took[:tenth])],
        Target(sign="<=", number=1.5, of="ratio"),
    )
    memory = beside(
        f"resident while {some} are listed, most beside the first tenth",
        "MB",
        [max(resident)],
        [after_first],
        Target(sign="<=", number=1.1, of="ratio"),
    )
    whole = Row(figure=f"list, all of {some}", value=sum(took) / 1e3, unit="s")
    return [pages, whole, Row(figure=f"resident with {some}, before", value=before, unit="MB"), memory]


def _pages(daemon: Daemon, limit: int) -> tuple[list[float], list[float], int]:
    """Milliseconds of each page, resident MB after each, and the number of runs."""
    took, resident, seen = [], [], 0
    cursor: dict[str, Any] = {}
    while True:
        began = time.perf_counter()
        page = daemon.call("list", limit=limit, **cursor)
        took.append((time.perf_counter() - began) * 1e3)
        resident.append(daemon.resident_kb() / 1024)
        seen += len(page["runs"])
        if page.get("nextCursor") is None:
            return took, resident, seen
        cursor = {"cursor": page["nextCursor"]}
