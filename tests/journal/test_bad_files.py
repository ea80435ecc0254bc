"""Files of a store that are old, lost, strange or unreadable: what they tell is not believed, one bad run stops itself alone, and
nothing that was done is done again. F031, F032."""

from __future__ import annotations

import gc
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
from rpcagent import errors
from rpcagent import store as stores
from rpcagent.journal import disk as disks
from rpcagent.journal import record, runfiles, seal
from rpcagent.journal.blobs import Blobs
from rpcagent.keys import Key, KeyRing
from rpcagent.policy.retention import Retention, RetentionRule
from rpcagent.runs import roster
from rpcagent.runs.outcomes import ToolReply
from rpcagent.upkeep.collecting import _idle
from tests.runs.on_disk import Life, OnDisk
from tests.upkeep.commands import said

from .past_runs import folder

pytestmark = pytest.mark.anyio
AT_ONCE = Retention((RetentionRule(after_ms=0),))
Break = Callable[[Path], object]


@pytest.fixture(autouse=True)
def no_resident_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roster, "RESIDENT", 0)


@pytest.fixture
def disk(tmp_path: Path) -> OnDisk:
    return OnDisk(tmp_path)


async def past(disk: OnDisk, count: int = 3) -> list[str]:
    """Runs that have ended, in files, k0 after one call; and one that waits."""
    async with disk.life() as life:
        runs = [await life.start("k0", "kv.put")]
        runs += [await life.start(f"k{number}") for number in range(1, count)]
        await life.start("waits", "bank.pay")
        await life.keeper.checkpoint()
        assert life.roster.actors == {}
    return runs


def without_index(disk: OnDisk) -> None:
    for path in disk.folder.glob("index*"):
        path.unlink()


async def refuses(life: Life, key: str) -> dict[str, Any]:
    with pytest.raises(errors.StoreDamaged) as caught:
        await life.start(key)
    return caught.value.details


def replaced_by_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def one_byte_off(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[40] ^= 1
    path.write_bytes(data)


def another_shape(path: Path) -> None:
    """A right checksum around a summary that says its status otherwise, as a later version may."""
    data = path.read_bytes()
    run = path.parent.name
    state = runfiles.decode_state(run, data)
    summary = bytes(state.summary).replace(b'"status":"completed"', b'"status":{"a":"completed"}')
    assert summary != bytes(state.summary)
    path.write_bytes(record.framed(data[data.index(b",") + 1 :].replace(bytes(state.summary), summary))[0])


# Older than what is known


@pytest.mark.parametrize("lost", ["both files", "state.json"])
async def test_files_of_an_ended_run_that_end_before_what_the_index_knows_are_damage_and_it_is_not_asked_again(
    disk: OnDisk, tmp_path: Path, lost: str
):
    async with disk.life() as life:
        run = await life.start("two", "bank.pay")
        await life.keeper.checkpoint()
    shutil.copytree(folder(disk, run), tmp_path / "old")
    async with disk.life() as life:
        await life.approve(run)
        assert disk.calls[run] == 1
        await life.keeper.checkpoint()
    names = ["state.json"] if lost == "state.json" else ["state.json", "history.jsonl"]
    for name in names:
        shutil.copy(tmp_path / "old" / name, folder(disk, run) / name)
    async with disk.life() as life:
        details = await refuses(life, "two")
        assert (details["runs"], "was recorded" in details["reason"]) == ([run], True)
        assert life.roster.actors[run].state is None
        assert (disk.calls[run], life.counts) == (1, {"damaged": 1})
        await life.start("other")


async def test_the_key_of_a_run_whose_state_and_index_are_lost_begins_no_fresh_run(disk: OnDisk):
    [run, *_] = await past(disk)
    before = disk.calls[run]
    (folder(disk, run) / "state.json").unlink()
    without_index(disk)
    for settled in (False, True):
        async with disk.life() as life:
            if settled:
                await life.archive.settle()
            assert (await refuses(life, "k0"))["runs"] == [run]
            assert await life.start("k1") == life.identity("k1")
    assert (disk.calls[run], before) == (1, 1)


# Large outputs


class Printing(OnDisk):
    """Each call leaves a large output that is long past its grace time."""

    async def call(self, request: Any) -> ToolReply:
        writer = Blobs(self.folder / "blobs").create()
        writer.write(request.run_id.encode())
        digest = writer.keep()
        os.utime(self.folder / "blobs" / digest, (10**9, 10**9))
        self.calls[request.run_id] += 1
        return ToolReply(result={"content": []}, blobs=(digest,))


@pytest.mark.parametrize("index", ["kept", "lost"])
async def test_what_a_damaged_run_refers_to_is_not_collected(tmp_path: Path, index: str):
    disk = Printing(tmp_path)
    [run, *_] = await past(disk)
    stray = Blobs(disk.folder / "blobs").create()
    stray.write(b"nobody's")
    nobodys = stray.keep()
    os.utime(disk.folder / "blobs" / nobodys, (10**9, 10**9))
    sound = disk.folder
    [referred] = {path.name for path in (sound / "blobs").iterdir()} - {nobodys}
    one_byte_off(folder(disk, run) / "state.json")
    if index == "lost":
        without_index(disk)
    async with disk.life() as life:
        await life.keeper.tidy()
    left = {path.name for path in (disk.folder / "blobs").iterdir()}
    assert left == ({referred} if index == "kept" else {referred, nobodys})


async def test_a_content_that_a_step_keeps_while_it_is_collected_stays(disk: OnDisk, monkeypatch: pytest.MonkeyPatch):
    given: list[Blobs] = []
    real = Path.lstat
    seen, kept = threading.Event(), threading.Event()

    def slow(path: Path) -> os.stat_result:
        found = real(path)
        if path.name == digest:
            seen.set()
            kept.wait(0.3)  # with a lock of its own, the step would be done by then
        return found

    def keep() -> str:
        writer = given[0].create()
        writer.write(b"content")
        assert seen.wait(10)
        try:
            return writer.keep()
        finally:
            kept.set()

    def build(journal: Any, archive: Any, clock: Any, blobs: Blobs) -> Any:
        given.append(blobs)
        return _idle(journal, archive, clock, blobs)

    opened = await stores.open_store(disk.folder, None, build)
    try:
        writer = given[0].create()
        writer.write(b"content")
        digest = writer.keep()
        os.utime(disk.folder / "blobs" / digest, (10**9, 10**9))
        monkeypatch.setattr(Path, "lstat", slow)
        again: list[str] = []

        async def step() -> None:
            again.append(await anyio.to_thread.run_sync(keep))

        async with anyio.create_task_group() as group:
            group.start_soon(step)
            assert await opened.archive.collect_blobs(set(), 0) == 1
    finally:
        await opened.close()
    assert again == [digest]
    assert (disk.folder / "blobs" / digest).read_bytes() == b"content"


# What cannot be read, and what does not belong there


def stranger(name: bytes) -> Break:
    def break_(store: Path) -> None:
        descriptor = os.open(os.fsencode(store / "runs") + b"/" + name, os.O_CREAT | os.O_WRONLY, 0o600)
        os.close(descriptor)

    return break_


def of_an_ended_run(change: Callable[[Path], None]) -> Break:
    def break_(store: Path) -> None:
        for path in sorted((store / "runs").glob("*/state.json")):
            if b'"status":"completed"' in path.read_bytes():
                change(path)
                return
        raise AssertionError("no run has ended")

    return break_


BAD: dict[str, Break] = {
    "a hidden file": stranger(b".DS_Store"),
    "a file with the name of a run": stranger(b"run_" + b"b" * 26),
    "a name that is no text": stranger(b"caf\xe9"),
    "a folder in the place of a state": of_an_ended_run(replaced_by_a_folder),
    "a summary of another shape": of_an_ended_run(another_shape),
    "a state with a wrong byte": of_an_ended_run(one_byte_off),
}


@pytest.mark.parametrize("index", ["kept", "lost"])
@pytest.mark.parametrize("what", BAD)
async def test_one_bad_name_in_runs_stops_no_other_run_and_no_checkpoint_and_no_retention(
    disk: OnDisk, what: str, index: str
):
    runs = await past(disk)
    BAD[what](disk.folder)
    spoilt = 0 if what.startswith(("a hidden", "a file", "a name")) else 1
    if index == "lost":
        without_index(disk)
    async with disk.life() as life:
        await life.archive.settle()
        listed = {run for _, run, _ in await life.listed()}
        assert (listed <= set(runs), len(listed)) == (True, 3 if index == "kept" else 3 - spoilt)
        answers = []
        for number in range(3):
            try:
                answers.append(await life.start(f"k{number}"))
            except errors.RpcAgentError as error:
                assert error.code in {"STORE_DAMAGED", "STORAGE", "INCOMPATIBLE"}
        assert len(answers) == 3 - spoilt
        assert await life.start("fresh") == life.identity("fresh")
        await life.keeper.checkpoint()
        assert (life.supervisor.tail_records, life.counts["waiting"]) == (0, 1)
    disk.retention = AT_ONCE
    async with disk.life() as life:
        gone = await life.keeper.tidy()
        assert {one.run_id for one in gone} == {*answers, life.identity("fresh")}
        await life.start("one more")
    assert disk.incidents == []
    assert disk.calls[runs[0]] == 1


@pytest.mark.parametrize("made", ["a folder", "no database"])
async def test_an_index_that_cannot_be_used_does_not_stop_a_new_run(disk: OnDisk, made: str):
    await past(disk)
    without_index(disk)
    path = disk.folder / "index.sqlite"
    if made == "a folder":
        path.mkdir()
    else:
        path.write_bytes(b"x" * 9_000)
    async with disk.life() as life:
        await life.archive.settle()
        with anyio.fail_after(10):
            assert await life.start("fresh") == life.identity("fresh")
    assert disk.incidents == []


@pytest.mark.parametrize("name", ["runs", "tombstones"])
async def test_a_file_in_the_place_of_a_folder_is_named_and_is_no_fault_of_the_daemon(disk: OnDisk, name: str):
    async with disk.life() as life:
        await life.start("a")
        (disk.folder / name).write_bytes(b"")
        with pytest.raises(errors.StorageError) as caught:
            await life.keeper.checkpoint()
        assert caught.value.details["errno"] == "ENOTDIR"
        (disk.folder / name).unlink()
        await life.keeper.checkpoint()
        assert life.supervisor.tail_records == 0


async def test_a_link_is_not_followed_and_a_pipe_is_not_waited_for(tmp_path: Path):
    (tmp_path / "elsewhere").write_bytes(b"secret")
    store = disks.RealDisk(tmp_path / "store")
    (store.path / "link").symlink_to(tmp_path / "elsewhere")
    os.mkfifo(store.path / "pipe", 0o600)
    writer = os.open(store.path / "pipe", os.O_RDWR | os.O_NONBLOCK)  # so that nobody is held up in opening it
    try:
        for name in ("link", "pipe"):
            for ask in (
                lambda name=name: store.read_at(name, 0, 9),
                lambda name=name: store.write(name, 0, b"x"),
                lambda name=name: store.sync(name),
            ):
                with pytest.raises(OSError, match=r"regular file|symbolic links"):
                    ask()
        with pytest.raises(OSError, match="symbolic links"):
            store.read("link")
    finally:
        os.close(writer)
        store.close()
    assert (tmp_path / "elsewhere").read_bytes() == b"secret"


# A run that goes on by itself, and one with records that no file has


class Calling(OnDisk):
    """Calls do not come back while `held`."""

    held = False

    async def call(self, request: Any) -> ToolReply:
        self.calls[request.run_id] += 1
        while self.held:
            await anyio.sleep_forever()
        return ToolReply(result={"content": []})


async def test_a_run_under_way_whose_file_cannot_be_read_holds_no_other_up_and_goes_on_once_it_can(tmp_path: Path):
    disk = Calling(tmp_path)
    disk.held = True
    async with disk.life() as life:
        run = await life.start("hot", "kv.put", wait_ms=0)
        with anyio.fail_after(10):
            while not disk.calls[run]:
                await anyio.lowlevel.checkpoint()
        await life.start("waits", "bank.pay")
        await life.keeper.checkpoint()
    disk.held = False
    state = folder(disk, run) / "state.json"
    kept = state.read_bytes()
    replaced_by_a_folder(state)
    async with disk.life() as life:
        await life.start("other")
        assert (await life.supervisor.find(life.identity("waits"))).state is not None
        with pytest.raises(errors.StorageError):
            await life.supervisor.find(run)
        state = folder(disk, run) / "state.json"
        state.rmdir()
        state.write_bytes(kept)
        actor = await life.settled(run)
        assert actor.state is not None
        assert (life.supervisor.status_of(actor), disk.calls[run]) == ("completed", 2)
    assert disk.incidents == []


@pytest.mark.parametrize("change", [one_byte_off, replaced_by_a_folder, Path.unlink])
async def test_records_of_a_damaged_run_are_carried_along_and_hold_up_no_checkpoint(
    disk: OnDisk, change: Callable[[Path], None]
):
    async with disk.life() as life:
        run = await life.start("waits", "bank.pay")
        await life.keeper.checkpoint()
        state = (folder(disk, run) / "state.json").read_bytes()
        await life.approve(run)
        last = life.roster.actors[run].state.last_seq
    change(folder(disk, run) / "state.json")
    for number in range(3):
        async with disk.life() as life:
            ended = await life.start(f"k{number}")
            for _ in range(2):
                await life.keeper.checkpoint()
            assert life.supervisor.tail_records == 0
            assert sum(1 for _ in (disk.folder / "wal").iterdir()) == 1
            with pytest.raises(errors.RpcAgentError):
                await life.start("waits")
            assert await life.start(f"k{number}") == ended
    path = folder(disk, run) / "state.json"
    if path.is_dir():
        path.rmdir()
    path.write_bytes(state)
    async with disk.life() as life:
        actor = await life.settled(run)
        assert actor.state is not None
        assert (actor.state.phase, actor.state.last_seq, disk.calls[run]) == ("completed", last, 1)
        await life.keeper.checkpoint()
        assert life.counts == {"completed": 4}
    assert disk.incidents == []


async def test_a_checkpoint_that_is_cut_off_after_it_carried_records_along_leaves_each_of_them_once(
    disk: OnDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    async with disk.life() as life:
        run = await life.start("waits", "bank.pay")
        await life.keeper.checkpoint()
        state = (folder(disk, run) / "state.json").read_bytes()
        await life.approve(run)
        last = life.roster.actors[run].state.last_seq
    one_byte_off(folder(disk, run) / "state.json")

    async def cut(*_: object) -> None:
        raise errors.StorageError("no room", errno="ENOSPC")

    for _ in range(2):
        async with disk.life() as life:
            await life.start("other")
            with monkeypatch.context() as patch, pytest.raises(errors.StorageError):
                patch.setattr(life.archive, "save", cut)
                await life.keeper.checkpoint()
    (folder(disk, run) / "state.json").write_bytes(state)
    for words in (
        ["verify", "--replay"],
        ["export", run, tmp_path / "run.jsonl"],
        ["log", "--run", run],
        ["backup", tmp_path / "copy"],
    ):
        found = said(*words, "--store", disk.folder)
        assert (found.code, found.err if found.code else "") == (0, ""), words
    assert said("verify", "--replay", "--store", tmp_path / "copy").code == 0
    async with disk.life() as life:
        actor = await life.settled(run)
        assert actor.state is not None
        assert (actor.state.phase, actor.state.last_seq, disk.calls[run]) == ("completed", last, 1)
        await life.keeper.checkpoint()
        assert len(await life.archive.records(run, 0)) == len({r.first for r in await life.archive.records(run, 0)})
        assert life.counts == {"completed": 2}


async def test_retention_lets_a_run_go_whose_key_is_not_given_any_more(disk: OnDisk):
    old, new = Key(b"o" * 32), Key(b"n" * 32)
    for ring in (KeyRing(old), KeyRing(new, old)):
        disk.sealing = lambda store_id, ring=ring: seal.AesGcm(ring, store_id)
        async with disk.life() as life:
            await life.start(ring.kids[0])
            await life.keeper.checkpoint()
    disk.sealing = lambda store_id: seal.AesGcm(KeyRing(new), store_id)
    disk.retention = AT_ONCE
    async with disk.life() as life:
        assert {due.run_id for due in await life.keeper.tidy()} == {life.identity(old.kid), life.identity(new.kid)}
        assert life.counts == {}


# Openings that fail, starts that are refused


@pytest.mark.parametrize("open_", ["owner", "onlooker"])
async def test_an_opening_that_fails_leaves_no_descriptor(disk: OnDisk, open_: str):
    disk.sealing = lambda store_id: seal.AesGcm(KeyRing(Key(b"k" * 32)), store_id)
    async with disk.life() as life:
        await life.start("sealed")

    async def fails() -> None:
        with pytest.raises(seal.KeyMissing):
            if open_ == "owner":
                await stores.open_store(disk.folder, None, _idle)
            else:
                await stores.look_at_store(disk.folder, _idle, sealing=lambda _id: seal.Plain(), note=disk.notes.append)

    await fails()
    gc.collect()
    before = sorted(os.listdir("/proc/self/fd"))
    for _ in range(3):
        await fails()
    gc.collect()
    assert sorted(os.listdir("/proc/self/fd")) == before


async def test_a_start_that_is_refused_leaves_nothing_in_memory(disk: OnDisk, monkeypatch: pytest.MonkeyPatch):
    def no_room(*_: object) -> None:
        raise OSError(28, "no room")

    async with disk.life() as life:
        await life.start("a", "bank.pay")
        before = set(life.roster.actors)
        with monkeypatch.context() as patch:
            patch.setattr(disks.RealDisk, "write", no_room)
            for number in range(5):
                with pytest.raises(errors.StorageError):
                    await life.start(f"refused-{number}")
        assert set(life.roster.actors) == before
        assert await life.start("refused-0") == life.identity("refused-0")
