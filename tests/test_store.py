"""A store from its opening to a kill and the next opening, with real files and thousands of runs. S0-26, F031."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from rpcagent import errors
from rpcagent.journal import disk as disks
from rpcagent.runs import roster
from rpcagent.runs.view import run_status
from tests.runs.on_disk import Life, OnDisk

pytestmark = pytest.mark.anyio
RUNS = 3_000
BYTES_OF_A_WAITING_RUN = 2_048


class Names:
    """The names of files that any RealDisk reads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.read: list[str] = []
        for method in ("read", "read_at"):
            monkeypatch.setattr(disks.RealDisk, method, self._noting(getattr(disks.RealDisk, method)))

    def _noting(self, real: Any) -> Any:
        def noting(disk: disks.RealDisk, name: str, *rest: Any) -> Any:
            self.read.append(name)
            return real(disk, name, *rest)

        return noting

    @property
    def of_runs(self) -> set[str]:
        return {name.split("/")[1] for name in self.read if name.startswith("runs/")}


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Names:
    return Names(monkeypatch)


async def begin(life: Life, keys: Iterator[str], does: str) -> list[str]:
    """Many at once, as they come in one batch of requests."""
    runs: list[str] = []

    async def some() -> None:
        for key in keys:
            runs.append(await life.start(key, does))

    async with anyio.create_task_group() as group:
        for _ in range(256):
            group.start_soon(some)
    return runs


async def test_what_was_acknowledged_is_there_after_a_kill_before_and_after_a_checkpoint(tmp_path: Path):
    disk = OnDisk(tmp_path)
    async with disk.life() as life:
        ended, waits = await life.start("a"), await life.start("b", "bank.pay")
        states = {run: (await life.supervisor.find(run)).state for run in (ended, waits)}
    for checkpoint in (False, True, False, True):
        async with disk.life() as life:
            assert life.counts == {"completed": 1, "waiting": 1}
            for run, state in states.items():
                found = (await life.supervisor.find(run)).state
                assert found == state
            assert await life.start("a") == ended
            if checkpoint:
                await life.keeper.checkpoint()
                assert life.supervisor.tail_records == 0
    async with disk.life() as life:
        await life.approve(waits)
        later = await life.start("c")
    async with disk.life() as life:
        assert life.counts == {"completed": 3}
        assert life.supervisor.tail_records > 0
        await life.keeper.checkpoint()
        assert [run for _, run, _ in await life.listed()] == [ended, waits, later]
    assert disk.calls == {waits: 1}
    assert disk.incidents == disk.notes == []


async def test_a_start_reads_the_history_of_no_run_that_has_ended_or_only_waits(tmp_path: Path, names: Names):
    disk = OnDisk(tmp_path)
    async with disk.life() as life:
        ended = [await life.start(f"k{number}") for number in range(5)]
        waits = [await life.start(f"w{number}", "bank.pay") for number in range(5)]
        await life.keeper.checkpoint()
        await life.approve(waits[0])
    names.read.clear()
    async with disk.life() as life:
        assert names.of_runs == {waits[0]}  # it has records that no checkpoint covers
        assert life.counts == {"completed": 6, "waiting": 4}
        await life.archive.settle()
        assert [run for _, run, _ in await life.listed()] == ended
        assert names.of_runs == {waits[0]}
        await life.supervisor.find(ended[3])
        assert names.of_runs == {waits[0], ended[3]}


async def test_a_run_that_was_under_way_is_read_at_a_start_and_goes_on(tmp_path: Path, names: Names):
    disk = OnDisk(tmp_path)
    async with disk.life() as life:
        going = anyio.Event()

        async def never(_request: Any) -> Any:
            going.set()
            await anyio.sleep_forever()

        disk.call = never  # type: ignore[method-assign]
        run = await life.start("a", "kv.put", wait_ms=0)
        await going.wait()
        await life.keeper.checkpoint()
        assert life.store.archive.may_hold(run)
    del disk.call  # type: ignore[method-assign]
    names.read.clear()
    async with disk.life() as life:
        assert names.of_runs == {run}
        assert life.supervisor.status_of(await life.settled(run)) == "completed"
    assert disk.calls == {run: 1}


async def test_a_manifest_that_is_damaged_closes_the_store_and_changes_nothing(tmp_path: Path):
    disk = OnDisk(tmp_path)
    async with disk.life() as life:
        await life.start("a")
        await life.keeper.checkpoint()
    path = disk.folder / "checkpoint.json"
    path.write_bytes(path.read_bytes()[:-2] + b"x\n")
    before = {each: each.read_bytes() for each in disk.folder.rglob("*") if each.is_file()}
    with pytest.raises(ExceptionGroup) as told:
        async with disk.life():
            pass
    [refusal] = told.value.exceptions
    assert isinstance(refusal, errors.StoreDamaged)
    assert refusal.details["file"] == "checkpoint.json"
    assert {each: each.read_bytes() for each in disk.folder.rglob("*") if each.is_file()} == before


async def test_thousands_of_runs_are_few_in_memory_small_while_they_wait_and_all_there_after_a_kill(
    tmp_path: Path, names: Names
):
    disk = OnDisk(tmp_path)
    async with disk.life() as life:
        for number in range(0, RUNS, 1_000):
            await begin(life, iter([f"e{number + each}" for each in range(500)]), "end")
            await begin(life, iter([f"w{number + each}" for each in range(500)]), "bank.pay")
            await life.keeper.checkpoint()
            assert len(life.roster.actors) <= roster.RESIDENT
        assert life.counts == {"completed": RUNS // 2, "waiting": RUNS // 2}
        assert len(life.roster.parked) >= RUNS // 2 - roster.RESIDENT
    names.read.clear()
    gc.unfreeze()
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        async with disk.life() as life:
            gc.collect()
            each = (tracemalloc.get_traced_memory()[0] - before) / (RUNS // 2)
            tracemalloc.stop()
            assert each <= BYTES_OF_A_WAITING_RUN, f"{each:.0f} bytes for each waiting run"
            assert names.of_runs == set()
            assert len(life.roster.parked) == RUNS // 2
            assert life.counts == {"completed": RUNS // 2, "waiting": RUNS // 2}
            assert len(life.roster.attention(10_000)) == RUNS // 2
            await life.archive.settle()
            assert len(await life.listed()) == RUNS // 2
            for key in ("e0", "w0", f"e{RUNS - 501}", f"w{RUNS - 501}"):
                run = life.identity(key)
                assert await life.start(key, "bank.pay" if key[0] == "w" else "end") == run
                state = (await life.supervisor.find(run)).state
                assert state is not None
                assert run_status(state, -1, busy=False) == ("waiting" if key[0] == "w" else "completed")
            assert len(life.roster.actors) == 4
            await life.approve(life.identity("w7"))
            await life.keeper.checkpoint()
            assert life.counts == {"completed": RUNS // 2 + 1, "waiting": RUNS // 2 - 1}
    finally:
        tracemalloc.stop()
