"""The index of a store that may not be written: as it stands where that is sound, else one of our own."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

import anyio
import pytest
from rpcagent import store as stores
from rpcagent.journal import looking, seal
from rpcagent.journal.index import FILE_NAME, Ended, Index, IndexUnusable
from rpcagent.journal.looking import Frozen, Private, index_to_look
from rpcagent.runs.decide import Rules
from rpcagent.runs.supervisor import Supervisor
from tests.runs.on_disk import OnDisk

from .test_index import STORE, everything, made, row

ONE = {"completed": 1}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / FILE_NAME


def test_an_index_that_was_closed_is_read_as_it_stands_and_nothing_comes_beside_it(path: Path):
    made(path, [row(1)]).close()
    before = path.stat()
    with closing(Frozen(path)) as index:
        assert (everything(index), index.find(row(1).run), index.counts()) == ([row(1)], row(1), ONE)
        assert index.unchanged()
        assert os.listdir(path.parent) == [FILE_NAME]
    assert (path.stat().st_mtime_ns, path.stat().st_size) == (before.st_mtime_ns, before.st_size)


def test_an_index_that_was_not_closed_is_not_read_without_the_rest_of_it(path: Path):
    with closing(made(path, [row(1)])), pytest.raises(IndexUnusable, match="was not closed"):
        Frozen(path)


def test_an_index_that_its_owner_writes_into_meanwhile_says_so(path: Path):
    made(path, [row(1)]).close()
    with closing(Frozen(path)) as index:
        assert everything(index) == [row(1)]
        with closing(Index(path)) as owner:
            owner.update([row(2)], (), 6, STORE)
        assert not index.unchanged()


def test_only_the_index_of_this_store_that_is_as_far_as_its_manifest_is_looked_at(
    path: Path, monkeypatch: pytest.MonkeyPatch
):
    with pytest.raises(IndexUnusable, match="there is none"):
        index_to_look(path.parent, 5, STORE, {})
    assert os.listdir(path.parent) == []
    made(path, [row(1)]).close()
    for closed, kind in (("", Index), ("EROFS", Frozen)):
        monkeypatch.setattr(looking, "why_read_only", lambda _folder, closed=closed: closed)
        for fits in ((5, STORE, ONE), (4, STORE, {})):
            with closing(index_to_look(path.parent, *fits)) as index:
                assert (type(index), everything(index)) == (kind, [row(1)])
        for other in ((6, STORE, ONE), (5, "sto_2", ONE), (5, STORE, {"completed": 2})):
            with pytest.raises(IndexUnusable, match="does not belong"):
                index_to_look(path.parent, *other)


def test_an_index_of_our_own_leaves_nothing_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    rows = [row(place, summary=bytes(2_000)) for place in range(3_000)]
    with closing(Private.of(rows, 5, STORE)) as index:
        assert (everything(index), index.through, index.store_id) == (rows, 5, STORE)
    assert os.listdir(tmp_path) == []


# The archive


def looks(journal: Any, archive: Any, clock: Any, _blobs: Any) -> Supervisor:
    def never(*_: Any) -> Any:
        raise AssertionError("nothing goes on in a store that is looked at")

    outside: Any = None
    return Supervisor(
        journal=journal, archive=archive, clock=clock, model=outside, tools=outside,
        rules=Rules(epoch=journal.epoch, draining=True), spawn=never, incident=never, fatal=never,
    )  # fmt: skip


@pytest.mark.anyio
@pytest.mark.parametrize("closed", ["", "EROFS"])
@pytest.mark.parametrize("left", ["good", "missing", "bad", "written meanwhile", "gone meanwhile", "a folder"])
async def test_whatever_the_index_is_like_a_look_finds_each_run_and_touches_none_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, closed: str, left: str
):
    disk = OnDisk(tmp_path)
    async with disk.life() as life:
        runs = [await life.start(f"k{number}") for number in range(7)]
        await life.keeper.checkpoint()
    file = disk.folder / FILE_NAME
    Index(file).close()  # the copy was made while it was open
    if left in {"missing", "a folder"}:
        file.unlink()
    if left == "a folder":
        file.mkdir()
    if left == "bad":
        file.write_bytes(file.read_bytes()[:100] + bytes(50_000))
    monkeypatch.setattr(looking, "why_read_only", lambda _folder: closed)
    before = sorted(os.listdir(disk.folder))
    told: list[str] = []
    used: list[Index | None] = []
    store = await stores.look_at_store(disk.folder, looks, sealing=lambda _id: seal.Plain(), note=told.append)
    try:
        for _ in range(2):
            page = await store.archive.ended(0, 100, namespace=None, agent=None, statuses=())
            assert [run for run, _ in page] == runs
            heads = await store.archive.heads(runs[3])
            assert heads is not None
            assert heads.status == "completed"
            if left == "written meanwhile":
                with closing(Index(file)) as owner:
                    owner.update([row(90)], (), owner.through, owner.store_id)
                    owner.update((), [row(90).run], owner.through, owner.store_id)
            elif left == "gone meanwhile":
                file.unlink(missing_ok=True)
            used.append(store.archive._lookup._read)
        meanwhile = left.endswith("meanwhile")
        own = left in {"missing", "bad", "a folder"}
        assert [isinstance(index, Private) for index in used] == [own, own or (meanwhile and bool(closed))]
        assert (used[0] is used[1]) is not (meanwhile and bool(closed))  # made once
    finally:
        await store.close()
    assert told == []
    if left != "gone meanwhile":  # then something of it is left by whoever took it away
        assert sorted(os.listdir(disk.folder)) == before


@pytest.mark.anyio
async def test_many_who_ask_at_once_wait_for_one_index_of_our_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    disk = OnDisk(tmp_path)
    async with disk.life() as life:
        runs = [await life.start(f"k{number}") for number in range(5)]
        await life.keeper.checkpoint()
    (disk.folder / FILE_NAME).unlink()
    made_of: list[list[str]] = []
    original = Private.of

    def of(rows: Iterable[Ended], through: int, store_id: str) -> Private:
        held = list(rows)
        made_of.append(sorted(one.run for one in held))
        return original(held, through, store_id)

    monkeypatch.setattr(Private, "of", of)
    store = await stores.look_at_store(disk.folder, looks, sealing=lambda _id: seal.Plain(), note=lambda _text: None)
    try:
        async with anyio.create_task_group() as group:
            for run in runs:
                group.start_soon(store.archive.heads, run)
    finally:
        await store.close()
    assert made_of == [sorted(runs)]
