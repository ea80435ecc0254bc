"""Runs that were recorded, and of which not even the name is left: no other run begins in their place. P5, F032."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
from rpcagent import errors
from rpcagent.journal import manifest
from rpcagent.journal.checkpoint import Checkpointer
from rpcagent.policy.retention import Retention, RetentionRule
from rpcagent.runs import roster
from rpcagent.upkeep import importing
from tests.runs.on_disk import OnDisk
from tests.upkeep.commands import said

from .past_runs import folder, past, remove

pytestmark = pytest.mark.anyio
AT_ONCE = Retention((RetentionRule(after_ms=0),))


@pytest.fixture(autouse=True)
def no_resident_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roster, "RESIDENT", 0)


@pytest.fixture
def disk(tmp_path: Path) -> OnDisk:
    return OnDisk(tmp_path)


def nothing_left(path: Path) -> None:
    shutil.rmtree(path)


def only_its_folder_left(path: Path) -> None:
    for file in path.iterdir():
        file.unlink()


@pytest.mark.parametrize("settled", [True, False])
@pytest.mark.parametrize("harm", [nothing_left, only_its_folder_left])
async def test_where_a_run_and_the_index_are_gone_no_unknown_key_begins_a_run_until_it_is_back_f032(
    disk: OnDisk, harm: Callable[[Path], None], settled: bool
):
    """The lost one might be it, and its effects would be made again."""
    runs = await past(disk)
    kept = disk.folder.with_name("kept")
    shutil.copytree(folder(disk, runs[2]), kept)
    harm(folder(disk, runs[2]))
    remove(disk.folder / "index.sqlite")
    async with disk.life() as life:
        if settled:
            await life.archive.settle()
        for key in ("k2", "new"):
            with pytest.raises(errors.StoreDamaged) as refusal:
                await life.start(key)
            assert refusal.value.data == {
                "code": "STORE_DAMAGED", "retryable": False, "file": "runs", "offset": 0, "reason": "1 runs are missing",
            }  # fmt: skip
            with pytest.raises(errors.StoreDamaged):
                await life.supervisor.find(life.identity(key))
        assert await life.start("k3") == runs[3]
        await life.approve(life.identity("waits"))
        await life.keeper.checkpoint()
        with pytest.raises(errors.StoreDamaged):
            await life.start("new")
    assert [note for note in disk.notes if "1 runs of this store are missing" in note]
    shutil.copytree(kept, folder(disk, runs[2]), dirs_exist_ok=True)
    async with disk.life() as life:
        assert await life.start("k2") == runs[2]
        assert await life.start("new") == life.identity("new")


async def test_runs_that_no_manifest_counts_do_not_stand_for_a_lost_one(disk: OnDisk, monkeypatch: pytest.MonkeyPatch):
    """A checkpoint that was cut off before its manifest leaves files of runs that only the log knows."""
    runs = await past(disk)
    async with disk.life() as life:
        left = [await life.start(f"more{number}") for number in range(3)]
        monkeypatch.setattr(Checkpointer, "_write_manifest", full)
        with pytest.raises(errors.StorageError):
            await life.keeper.checkpoint()
        monkeypatch.undo()
    assert all((folder(disk, run) / "state.json").exists() for run in left)
    remove(disk.folder / "index.sqlite")
    async with disk.life() as life:
        await life.archive.settle()
        assert (life.archive.lost, await life.start("more1")) == (0, left[1])
    shutil.rmtree(folder(disk, runs[2]))
    remove(disk.folder / "index.sqlite")
    folder(disk, f"run_{'a' * 26}").touch()
    async with disk.life() as life:
        await life.archive.settle()
        assert life.archive.lost == 1


async def test_what_is_left_of_a_deleted_run_does_not_stand_for_a_lost_one(disk: OnDisk):
    [dead, *_] = await past(disk)
    disk.retention = AT_ONCE
    kept = disk.folder.with_name("kept")
    shutil.copytree(folder(disk, dead), kept)
    async with disk.life() as life:
        assert len(await life.keeper.tidy()) == 7
        new = await life.start("new")
        await life.keeper.checkpoint()
    shutil.copytree(kept, folder(disk, dead))
    shutil.rmtree(folder(disk, new))
    remove(disk.folder / "index.sqlite")
    async with disk.life() as life:
        await life.archive.learn()
        assert life.archive.lost == 1


async def test_runs_that_are_known_by_the_log_or_the_manifest_alone_are_not_lost(disk: OnDisk):
    """One that waits, and one whose deletion is in the log only: their folders and the index are gone."""
    runs = await past(disk)
    disk.retention = AT_ONCE
    async with disk.life() as life:
        assert len(await life.keeper.collect()) == 7
        waits = life.identity("waits")
    for run in (runs[0], waits):
        shutil.rmtree(folder(disk, run))
    remove(disk.folder / "index.sqlite")
    async with disk.life() as life:
        await life.archive.settle()
        assert life.archive.lost == 0
        with pytest.raises(errors.KeyExpired):
            await life.start("k0")
        with pytest.raises(errors.StoreDamaged) as refusal:
            await life.start("waits", "bank.pay")
        assert refusal.value.details["runs"] == [waits]
        await life.start("new")


async def test_a_run_that_is_lost_while_the_process_lives_never_begins_anew_f032(disk: OnDisk):
    """Its folder goes, and the index is made anew: it is known by the process alone."""
    runs = await past(disk)
    async with disk.life() as life:
        await life.archive.settle()
        shutil.rmtree(folder(disk, runs[2]))
        remove(disk.folder / "index.sqlite")
        life.archive._lookup._drop()
        assert [run for _, run, _ in await life.listed()] == [run for run in runs if run != runs[2]]
        for _ in range(2):
            with pytest.raises(errors.StoreDamaged) as refusal:
                await life.start("k2")
            assert refusal.value.details["runs"] == [runs[2]]
        new = await life.start("new")
        await life.keeper.checkpoint()
        assert life.supervisor.status_of(await life.supervisor.find(new)) == "completed"


@pytest.fixture
def there(tmp_path: Path) -> Path:
    place = tmp_path / "there"
    place.mkdir()
    return place


async def left_by_an_import(disk: OnDisk, there: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, list[str]]:
    """A whole run that has ended, with a place that no manifest has given away; and the runs of the past."""
    other, parcel = OnDisk(there), there / "parcel"
    [left, *_] = await past(other, 1)
    assert said("export", left, parcel, "--store", other.folder).code == 0
    runs = await past(disk)
    monkeypatch.setattr(importing.Taking, "_write_manifest", full)
    assert said("import", parcel, "--store", disk.folder).code == 5
    monkeypatch.undo()
    return left, runs


def told(disk: OnDisk) -> manifest.Manifest:
    return manifest.decode((disk.folder / "checkpoint.json").read_bytes())


async def test_what_an_import_that_was_cut_off_has_left_is_counted_by_the_next_process(
    disk: OnDisk, there: Path, monkeypatch: pytest.MonkeyPatch
):
    left, runs = await left_by_an_import(disk, there, monkeypatch)
    places = told(disk).places
    async with disk.life() as life:
        await life.keeper._settle()
        assert (dict(told(disk).ended), told(disk).places) == ({"completed": 8}, places + 1)
        assert (life.counts["completed"], life.archive.lost) == (8, 0)
        assert (places, left, "completed") in await life.listed()
        new = await life.start("new")
        assert life.roster.actors[new].place == places + 1
        await life.keeper.checkpoint()
    assert (dict(told(disk).ended), told(disk).places) == ({"completed": 9}, places + 2)
    shutil.rmtree(folder(disk, runs[2]))
    remove(disk.folder / "index.sqlite")
    async with disk.life() as life:
        await life.archive.learn()
        assert life.archive.lost == 1


async def test_what_an_import_has_left_is_counted_before_retention_lets_it_go(
    disk: OnDisk, there: Path, monkeypatch: pytest.MonkeyPatch
):
    left, runs = await left_by_an_import(disk, there, monkeypatch)
    disk.retention = AT_ONCE
    async with disk.life() as life:
        monkeypatch.setattr(Checkpointer, "_write_manifest", full)
        with pytest.raises(errors.StorageError):
            await life.keeper.tidy()
        monkeypatch.undo()
        assert not life.archive.deleted(left)
        assert all(life.archive.deleted(run) for run in runs)
        assert [due.run_id for due in await life.keeper.tidy()] == []
        assert dict(told(disk).ended) == {"completed": 1}
        assert [due.run_id for due in await life.keeper.tidy()] == [left]
        assert (dict(life.counts), dict(told(disk).ended)) == ({"waiting": 1}, {})


async def test_of_twins_that_come_before_it_is_known_which_runs_there_are_the_first_begins_the_run(disk: OnDisk):
    await past(disk)
    async with disk.life() as life:
        new, reached = life.identity("new"), list[int]()

        async def twin(number: int) -> None:
            assert await life.roster.reach(new, make=True) is life.roster.actors[new]
            reached.append(number)

        async with anyio.create_task_group() as group:
            for number in range(3):
                group.start_soon(twin, number)
        assert reached == [0, 1, 2]


async def test_a_new_run_is_asked_for_while_it_is_found_out_which_there_are(
    disk: OnDisk, monkeypatch: pytest.MonkeyPatch
):
    await past(disk)
    async with disk.life() as life:
        archive, ask = life.archive, life.archive._lookup.ask

        async def after_all_is_known(question: Any) -> Any:
            monkeypatch.undo()
            await archive.learn()
            return await ask(question)

        monkeypatch.setattr(archive._lookup, "ask", after_all_is_known)
        assert archive.may_hold(life.identity("new"))
        assert await life.start("new") == life.identity("new")
        assert life.supervisor.status_of(await life.supervisor.find(life.identity("new"))) == "completed"


def full(*_: Any) -> None:
    raise OSError(errno.ENOSPC, "no room")
