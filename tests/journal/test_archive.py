"""Runs in files behind the archive port: the index made anew, damage of one run, deletion, and nobody who waits. F031, F032."""

from __future__ import annotations

import errno
import shutil
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
from rpcagent import errors
from rpcagent.journal import known as knowledge
from rpcagent.journal import seal
from rpcagent.journal.index import IndexUnusable
from rpcagent.journal.known import Known
from rpcagent.keys import Key, KeyRing
from rpcagent.policy.retention import Retention, RetentionRule
from rpcagent.runs import roster
from rpcagent.runs.summary import view_of
from tests.runs.on_disk import OnDisk

from .past_runs import folder, past, remove

pytestmark = pytest.mark.anyio
AT_ONCE = Retention((RetentionRule(after_ms=0),))


@pytest.fixture(autouse=True)
def no_resident_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roster, "RESIDENT", 0)


@pytest.fixture
def disk(tmp_path: Path) -> OnDisk:
    return OnDisk(tmp_path)


async def test_what_is_filed_is_read_back_byte_for_byte(disk: OnDisk):
    async with disk.life() as life:
        run = await life.start("k", "bank.pay", labels={"x": "y"})
        actor = life.roster.actors[run]
        records, state = list(actor.tail), actor.state
        await life.keeper.checkpoint()
        assert await life.archive.records(run, 0) == records
        assert await life.archive.records(run, records[0].last) == records[1:]
        assert await life.archive.records(run, records[-1].last) == []
        found = await life.archive.read(run, list)
        assert found is not None
        assert found[0] == [record.body for record in records]
        assert (found[1].status, found[1].labels, found[1].last_seq) == ("waiting", {"x": "y"}, records[-1].last)
        assert view_of(bytes(found[1].body))["runId"] == run
        assert (await life.supervisor.find(run)).state == state


async def test_what_is_filed_is_sealed_where_a_key_is_given(disk: OnDisk):
    disk.sealing = lambda store_id: seal.AesGcm(KeyRing(Key(b"k" * 32)), store_id)
    async with disk.life() as life:
        ended = await life.start("secret", labels={"stays": "readable"})
        waits = await life.start("waits", "bank.pay")
        await life.keeper.checkpoint()
    async with disk.life() as life:
        [(_, heads)] = await life.archive.ended(0, 9, namespace=None, agent=None, statuses=())
        assert view_of(bytes(heads.body))["output"] == "The end."
        assert view_of(bytes(life.roster.parked[waits].body))["openApprovals"] != []
        await life.approve(waits)
        await life.keeper.checkpoint()
        records = await life.archive.records(ended, 0)
        assert b"The end." in records[-1].body
    for path in disk.folder.rglob("*"):
        assert not path.is_file() or b"The end." not in path.read_bytes(), path
    assert b"readable" in (folder(disk, ended) / "state.json").read_bytes()
    disk.sealing = lambda store_id: seal.Plain()
    with pytest.RaisesGroup(seal.KeyMissing, flatten_subgroups=True):
        async with disk.life():
            pass


def garbage(path: Path) -> None:
    remove(path)
    path.write_bytes(b"no index at all" * 500)


def of_another_store(path: Path) -> None:
    with sqlite3.connect(path) as database:
        database.execute("UPDATE about SET store = 'sto_other'")
    database.close()


def older(path: Path) -> None:
    with sqlite3.connect(path) as database:
        database.execute("UPDATE about SET through = through - 1")
        database.execute("DELETE FROM ended")
    database.close()


def rows_are_missing(path: Path) -> None:
    with sqlite3.connect(path) as database:
        database.execute("DELETE FROM ended WHERE place = 3")
    database.close()


def cut(path: Path) -> None:
    remove(Path(f"{path}-wal"))
    with path.open("r+b") as file:
        file.truncate(5_000)


@pytest.mark.parametrize("harm", [remove, garbage, of_another_store, older, rows_are_missing, cut])
async def test_an_index_that_is_of_no_use_is_made_anew_with_the_same_list(disk: OnDisk, harm: Callable[[Path], None]):
    runs = await past(disk)
    async with disk.life() as life:
        before = await life.listed()
    assert before == [(place, run, "completed") for place, run in enumerate(runs, 1)]
    harm(disk.folder / "index.sqlite")
    async with disk.life() as life:
        assert await life.listed() == before
        new = await life.start("new")
        await life.keeper.checkpoint()
        assert await life.listed() == [*before, (9, new, "completed")]
    assert disk.notes == ["the index of ended runs is made anew"]
    async with disk.life() as life:
        assert await life.listed() == [*before, (9, new, "completed")]
        assert life.counts == {"completed": 8, "waiting": 1}
    assert len(disk.notes) == 1


async def test_an_index_that_goes_bad_while_it_is_in_use_is_made_anew(disk: OnDisk, monkeypatch: pytest.MonkeyPatch):
    await past(disk)
    async with disk.life() as life:
        before = await life.listed()

        def unusable(*_: Any, **__: Any) -> Any:
            raise IndexUnusable("a page is bad")

        monkeypatch.setattr(life.archive._lookup._read, "page", unusable)
        garbage(disk.folder / "index.sqlite")
        assert await life.listed() == before
        assert disk.notes == ["the index of ended runs is made anew"]


async def test_an_index_is_not_made_anew_at_each_start_for_a_run_that_is_damaged(disk: OnDisk):
    runs = await past(disk)
    (folder(disk, runs[2]) / "state.json").write_bytes(b"{}\n")
    remove(disk.folder / "index.sqlite")
    for _ in range(3):
        async with disk.life() as life:
            assert [run for _, run, _ in await life.listed()] == runs[:2] + runs[3:]
            assert life.counts == {"completed": 7, "waiting": 1}
    assert disk.notes == [
        "the index of ended runs is made anew",
        f"run {runs[2]} is not listed: its files cannot be used; `rpcagent verify` tells more",
    ]


def no_folder(path: Path) -> None:
    shutil.rmtree(path)


def no_state(path: Path) -> None:
    (path / "state.json").unlink()


def no_history(path: Path) -> None:
    (path / "history.jsonl").unlink()


def cut_history(path: Path) -> None:
    with (path / "history.jsonl").open("r+b") as file:
        file.truncate(100)


def changed_history(path: Path) -> None:
    data = bytearray((path / "history.jsonl").read_bytes())
    data[len(data) // 2] ^= 1
    (path / "history.jsonl").write_bytes(data)


HARMS = [no_folder, no_state, no_history, cut_history, changed_history]


@pytest.mark.parametrize("key", ["k2", "waits"])
@pytest.mark.parametrize("harm", HARMS)
async def test_a_run_that_lost_its_files_is_damaged_and_its_key_never_begins_a_fresh_one_f032(
    disk: OnDisk, harm: Callable[[Path], None], key: str
):
    runs = await past(disk)
    async with disk.life() as life:
        bad = life.identity(key)
    harm(folder(disk, bad))
    async with disk.life() as life:
        for settled in (False, True):
            if settled:
                await life.archive.settle()
            with pytest.raises(errors.StoreDamaged) as refusal:
                await life.start(key, "bank.pay" if key == "waits" else "end")
            assert refusal.value.details["runs"] == [bad]
        actor = await life.supervisor.find(bad)
        assert life.supervisor.status_of(actor) == "damaged"
        assert sum(life.counts.values()) == 8
        assert life.counts["damaged"] == 1
        assert {"runId": bad, "kind": "damaged"} in life.roster.attention(9)
        assert life.supervisor.status_of(await life.supervisor.find(runs[0])) == "completed"
        await life.start("new")
        await life.keeper.checkpoint()
    assert disk.calls == {}


async def test_a_lost_run_is_told_from_a_new_one_also_where_other_folders_are_left_over(disk: OnDisk):
    runs = await past(disk)
    shutil.rmtree(folder(disk, runs[2]))
    async with disk.life() as life:
        left = life.identity("new")
    folder(disk, left).mkdir(mode=0o700)  # of a first checkpoint that was interrupted
    async with disk.life() as life:
        await life.archive.settle()
        with pytest.raises(errors.StoreDamaged):
            await life.start("k2")
        assert await life.start("new") == left
        await life.keeper.checkpoint()
    async with disk.life() as life:
        assert life.supervisor.status_of(await life.supervisor.find(left)) == "completed"


@pytest.mark.parametrize("name", ["EMFILE", "EIO", "EACCES"])
@pytest.mark.parametrize("key", ["k2", "waits"])
async def test_a_run_that_cannot_be_read_just_now_is_neither_damaged_nor_missing(
    disk: OnDisk, name: str, key: str, monkeypatch: pytest.MonkeyPatch
):
    await past(disk)
    async with disk.life() as life:
        run = life.identity(key)

        def fail(path: str, *_: Any) -> bytes:
            raise OSError(getattr(errno, name), name, path)

        with monkeypatch.context() as broken:
            for method in ("read", "read_at"):
                broken.setattr(life.archive._reader, method, fail)
            before = life.counts
            for ask in (life.supervisor.find(run), life.start(key)):
                with pytest.raises(errors.StorageError) as refusal:
                    await ask
                assert refusal.value.data["retryable"] is True
                assert refusal.value.data["errno"] == name
            assert life.counts == before
        assert (await life.supervisor.find(run)).state is not None
        assert life.counts == before


async def test_nobody_who_looks_waits_for_a_checkpoint_that_is_being_saved(
    disk: OnDisk, monkeypatch: pytest.MonkeyPatch
):
    runs = await past(disk)
    async with disk.life() as life:
        listed = await life.listed()
        new = await life.start("new", "bank.pay")
        saving, go_on = threading.Event(), threading.Event()
        real = life.archive._checkpointer.write

        def slow(*args: Any) -> int:
            saving.set()
            assert go_on.wait(30)
            return real(*args)

        monkeypatch.setattr(life.archive._checkpointer, "write", slow)
        async with anyio.create_task_group() as group:
            group.start_soon(life.keeper.checkpoint)
            await anyio.to_thread.run_sync(saving.wait, 30)
            with anyio.fail_after(20):
                assert await life.listed() == listed
                assert life.supervisor.status_of(await life.supervisor.find(runs[0])) == "completed"
                assert await life.start("k1") == runs[1]
                await life.approve(new)
                await life.start("newer")
                await life.approve(life.identity("waits"))
            go_on.set()
        assert life.keeper.made == 1
        assert life.counts == {"completed": 10}


# Deletion


async def test_a_deleted_run_is_gone_from_the_list_at_once_and_from_the_disk_after_a_checkpoint(disk: OnDisk):
    runs = await past(disk)
    disk.retention = AT_ONCE
    async with disk.life() as life:
        await life.listed()
        assert [due.run_id for due in await life.keeper.collect()] == runs
        assert await life.listed() == []
        assert life.counts == {"waiting": 1}
        assert {path.name for path in (disk.folder / "runs").iterdir()} == {*runs, life.identity("waits")}
        with pytest.raises(errors.KeyExpired):
            await life.start("k0")
        await life.keeper.checkpoint()
        assert await life.listed() == []
        assert {path.name for path in (disk.folder / "runs").iterdir()} == {life.identity("waits")}
        await life.start("later")
        await life.keeper.checkpoint()
        assert len(list((disk.folder / "tombstones").iterdir())) == 1
        assert life.archive._tombstones.pending == 0
    disk.retention = Retention()
    for later in range(2):
        async with disk.life() as life:
            assert life.counts == {"waiting": 1, "completed": later + 1}
            for key in ("k0", "k6"):
                with pytest.raises(errors.KeyExpired):
                    await life.start(key)
            await life.start(f"new{later}")
            await life.keeper.checkpoint()


async def test_a_deletion_that_the_log_alone_tells_holds_after_a_kill_and_is_finished(disk: OnDisk):
    runs = await past(disk)
    disk.retention = AT_ONCE
    async with disk.life() as life:
        await life.keeper.collect()
    remove(disk.folder / "index.sqlite")
    async with disk.life() as life:
        assert life.counts == {"waiting": 1}
        assert await life.listed() == []
        for number in range(len(runs)):
            with pytest.raises(errors.KeyExpired):
                await life.start(f"k{number}")
        await life.keeper.checkpoint()
        assert {path.name for path in (disk.folder / "runs").iterdir()} == {life.identity("waits")}


async def test_a_page_is_full_also_where_most_of_the_index_is_deleted(disk: OnDisk):
    runs = await past(disk, 20)
    disk.retention = Retention((RetentionRule(label="keep"), RetentionRule(keep=2)))
    async with disk.life() as life:
        assert len(await life.keeper.collect()) == 18
        rows = await life.archive.ended(0, 2, namespace=None, agent=None, statuses=())
        assert [run for run, _ in rows] == runs[-2:]
        assert await life.archive.ended(rows[0][1].place + 1, 1, namespace=None, agent=None, statuses=()) == rows[1:]


# What is known without the disk


async def test_a_new_run_costs_no_look_at_the_disk_once_the_archive_has_settled(
    disk: OnDisk, monkeypatch: pytest.MonkeyPatch
):
    runs = await past(disk)
    async with disk.life() as life:
        assert all(life.archive.may_hold(run) for run in (*runs, life.identity("new")))
        await life.archive.settle()
        assert not life.archive.may_hold(life.identity("new"))
        assert all(life.archive.may_hold(run) for run in runs)
        monkeypatch.setattr(life.archive._lookup, "ask", None)
        new = await life.start("new")
        await life.keeper.checkpoint()
        assert life.archive.may_hold(new)


def test_a_set_of_runs_holds_all_that_were_added_however_many(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(knowledge, "_FRESH", 5)
    known = Known(f"run_{number}" for number in range(100))
    for number in range(100, 200):
        known.add([f"run_{number}"])
        assert f"run_{number}" in known
    assert all(f"run_{number}" in known for number in range(200))
    assert not any(f"run_{number}" in known for number in range(200, 1_000))
    assert 7 not in known
    assert len(known._fresh) <= 5


async def test_an_empty_archive_holds_nothing(disk: OnDisk):
    async with disk.life() as life:
        assert not life.archive.any_held
        assert not life.archive.may_hold(life.identity("k"))
        assert await life.listed() == []
        await life.archive.settle()
        assert await life.start("k") == life.identity("k")
    assert not (disk.folder / "index.sqlite").exists()
