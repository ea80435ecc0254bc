"""The seams of the store: what stands behind the ports of log and archive, in files or in memory, changes nothing of what a
run records or of how it goes on. S2-21.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rpcagent import store as stores
from rpcagent.journal import reading
from rpcagent.journal.disk import RealDisk
from rpcagent.runs.decide import Rules
from rpcagent.runs.ports import Recorded
from rpcagent.runs.supervisor import Supervisor
from tests.runs.on_disk import Life, OnDisk, within_limits

pytestmark = pytest.mark.anyio

RUNS = {"talks": "end", "reads": "fs.read", "puts": "kv.put", "asks": "bank.pay"}
Log = list[tuple[str, Recorded]]


class Noon:
    """A clock that stands."""

    def now(self) -> datetime:
        return datetime(2031, 1, 1, 12, tzinfo=UTC)

    def not_before(self, instant: datetime) -> None:
        assert instant <= self.now()


class ListLog:
    """The port of the log, over a list."""

    def __init__(self, log: Log, epoch: int) -> None:
        self.store_id, self.epoch, self.log = "sto_x", epoch, log

    async def append(self, run_id: str, epoch: int, expected_seq: int, count: int, body: bytes, **_: Any) -> Any:
        assert epoch == self.epoch
        assert expected_seq == max((one.last for run, one in self.log if run == run_id), default=0)
        self.log.append((run_id, Recorded(expected_seq + 1, count, body)))
        return "ok"

    def health(self) -> dict[str, Any]:
        return {"state": "ok"}


@asynccontextmanager
async def in_memory(acting: OnDisk, log: Log, epoch: int) -> AsyncIterator[Life]:
    """A process over lists, and its runs as the list has them."""
    async with within_limits() as group:
        supervisor = Supervisor(
            journal=ListLog(log, epoch), clock=Noon(), model=acting, tools=acting, rules=Rules(epoch=epoch),
            spawn=group.start_soon, incident=acting._incident, fatal=acting._fatal,
        )  # fmt: skip
        await supervisor.replay(list(log))
        await supervisor.open()
        supervisor.begin()
        yield Life(SimpleNamespace(supervisor=supervisor, keeper=None, archive=supervisor.archive))  # type: ignore[arg-type]
        group.cancel_scope.cancel()


async def first(life: Life) -> dict[str, str]:
    return {key: await life.start(key, does) for key, does in RUNS.items()}


async def second(life: Life, runs: dict[str, str]) -> dict[str, str]:
    """A person answers; then all have ended."""
    await life.approve(runs["asks"])
    return {key: life.supervisor.status_of(await life.supervisor.find(run)) for key, run in runs.items()}


async def test_the_same_runs_leave_the_same_bytes_and_go_on_alike_in_files_and_in_memory_s2_21(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(stores, "secrets", SimpleNamespace(token_hex=lambda _bytes: "x"))
    monkeypatch.setattr(stores, "SystemClock", Noon)
    log: Log = []
    for name in ("lists", "files"):
        (tmp_path / name).mkdir()
    lists, files = OnDisk(tmp_path / "lists"), OnDisk(tmp_path / "files")
    async with in_memory(lists, log, 1) as life:
        runs = await first(life)
    async with in_memory(lists, log, 2) as life:
        ended = await second(life, runs)
    async with files.life() as life:
        assert await first(life) == runs
        await life.keeper.checkpoint()
    async with files.life() as life:
        assert await second(life, runs) == ended == dict.fromkeys(RUNS, "completed")
        told = {run: await life.archive.records(run, 0) for run in runs.values()}
    disk = RealDisk(files.folder)
    _, entries = reading.read_all(disk)
    disk.close()
    for entry in entries:
        told[entry.run].append(Recorded(entry.first, entry.count, bytes(entry.body)))
    assert told == {run: [one for name, one in log if name == run] for run in runs.values()}
    assert {runs["asks"]} == {entry.run for entry in entries}
    assert files.calls == lists.calls == {runs["reads"]: 1, runs["puts"]: 1, runs["asks"]: 1}
