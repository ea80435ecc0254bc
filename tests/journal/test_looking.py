"""The index of a store that may not be written: as it stands where that is sound, else one of our own."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

import pytest
from rpcagent.journal import looking
from rpcagent.journal.index import FILE_NAME, Index, IndexUnusable
from rpcagent.journal.looking import Frozen, Private, index_to_look

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
