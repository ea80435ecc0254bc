"""Figures of the log without an engine: how many appends a second, and how many share a sync, by number of writers.

Set beside bare appends, and beside SQLite, which gets one writer and as many inserts in a transaction as the log has writers.
"""

from __future__ import annotations

import asyncio
import statistics
import time

from rpcagent.journal.commit import GroupCommit
from rpcagent.journal.disk import RealDisk
from rpcagent.journal.wal import Wal
from tests.bench.floors import raw_appends, sqlite_appends
from tests.bench.peer import Scratch
from tests.bench.row import Row, Target, beside, measured

BODY = b'"%b"' % (b"x" * 180)
"""With its envelope a record of about 250 bytes."""
RECORD_BYTES = 250


def log_alone(scratch: Scratch, appends: int, rounds: int) -> list[Row]:
    rows = [_lone(scratch)]
    writers = (1, 8, 64, 512)
    rates: dict[int, list[float]] = {count: [] for count in writers}
    shared: dict[int, list[float]] = {count: [] for count in writers}
    sqlite: dict[int, list[float]] = {count: [] for count in writers}
    raw = []
    for _ in range(rounds):
        count = min(appends, 500)
        raw.append(count / raw_appends(scratch.fresh("raw"), count, RECORD_BYTES).wall)
        for number in writers:
            each = max(appends * min(number, 16) // number, 4)
            rate, per_sync = asyncio.run(_append(scratch, number, each))
            rates[number].append(rate)
            shared[number].append(per_sync)
            transactions = min(each, 500)
            took = sqlite_appends(scratch.fresh("sqlite"), transactions, RECORD_BYTES, number)
            sqlite[number].append(transactions * number / took.wall)
    for number in writers:
        many = Target(sign=">=", number=min(25_000, 100 * statistics.median(raw))) if number == writers[-1] else None
        rows.append(beside(f"log, {number} writers", "appends/s", rates[number], raw, many))
        batches = f"log, {number} writers, beside SQLite WAL FULL, {number} inserts a commit"
        rows.append(beside(batches, "appends/s", rates[number], sqlite[number]))
        least = Target(sign=">=", number=0.95 * number)
        rows.append(measured(f"log, {number} writers, records per sync", "", shared[number], least))
    return rows


async def _append(scratch: Scratch, writers: int, each: int) -> tuple[float, float]:
    journal = _open(scratch)
    before = journal.health()

    async def write(run: str) -> None:
        for place in range(each):
            assert await journal.append(run, journal.epoch, place, 1, BODY) == "ok"

    began = time.perf_counter()
    await asyncio.gather(*(write(f"run_{number}") for number in range(writers)))
    took = time.perf_counter() - began
    after = journal.health()
    await journal.close()
    return writers * each / took, (after["records"] - before["records"]) / (after["syncs"] - before["syncs"])


def _lone(scratch: Scratch) -> Row:
    async def syncs() -> int:
        journal = _open(scratch)
        before = journal.health()["syncs"]
        await journal.append("run_1", journal.epoch, 0, 1, BODY)
        seen: int = journal.health()["syncs"] - before
        await journal.close()
        return seen

    return Row(
        figure="log, syncs of a lone append",
        unit="",
        value=asyncio.run(syncs()),
        target=Target(sign="==", number=1),
        gate=True,
    )


def _open(scratch: Scratch) -> GroupCommit:
    disk = RealDisk(scratch.fresh("log"))
    return GroupCommit(Wal.open(disk, draw_store_id=lambda: "sto_bench", app="0", at="2030-01-01T00:00:00Z"))
