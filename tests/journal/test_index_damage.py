"""No state of the file of the index is an error: it is used, made anew, or left for later."""

from __future__ import annotations

import errno
import os
import random
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest
from rpcagent import errors
from rpcagent.journal.index import Ended, Index, IndexUnusable
from rpcagent.journal.sqlite import translated

from .test_index import STATUSES, STORE, everything, made, row


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "index.sqlite"


def rebuilt(path: Path, through: int = 5, counts: dict[str, int] | None = None, store: str = STORE) -> bool:
    """Whether an opening made the file anew; what it holds then is row 7."""
    asked = []

    def rows() -> list[Ended]:
        asked.append(True)
        return [row(7)]

    with closing(
        Index.open_or_rebuild(path, rows, through, store, {"completed": 1} if counts is None else counts)
    ) as index:
        if asked:
            assert (everything(index), index.through, index.store_id) == ([row(7)], through, store)
        assert path.stat().st_mode & 0o777 == 0o600
    return bool(asked)


def test_a_good_index_is_opened_as_it_is(path: Path):
    made(path, [row(1)]).close()
    assert not rebuilt(path)
    assert not rebuilt(path, counts={"completed": 1, "failed": 0})
    with closing(Index(path)) as index:
        assert everything(index) == [row(1)]


def test_an_index_ahead_of_the_manifest_is_a_good_one(path: Path):
    made(path, [row(1), row(2)], through=9).close()
    assert not rebuilt(path, through=5, counts={"completed": 1})


@pytest.mark.parametrize(
    ("through", "counts", "store"),
    [(6, {"completed": 1}, STORE), (5, {"completed": 2}, STORE), (5, {}, STORE), (5, {"completed": 1}, "sto_2")],
    ids=["older than the manifest", "a run less", "a run more", "of another store"],
)
def test_an_index_that_does_not_fit_the_store_is_made_anew(
    path: Path, through: int, counts: dict[str, int], store: str
):
    made(path, [row(1)]).close()
    assert rebuilt(path, through, counts, store)
    assert not rebuilt(path, through, counts, store)


def test_an_index_that_lacks_a_damaged_run_is_made_anew_once(path: Path):
    counts = {"completed": 2, "failed": 1}
    assert rebuilt(path, counts=counts)
    assert not rebuilt(path, counts=counts)
    with closing(Index(path)) as index:
        index.update([row(8, status="failed")], (), 6, STORE)
    assert not rebuilt(path, 6, {"completed": 2, "failed": 2})
    assert rebuilt(path, 6, {"completed": 3, "failed": 2})


@pytest.mark.parametrize(
    "statement",
    [
        "PRAGMA user_version = 2",
        "PRAGMA application_id = 1",
        "DROP INDEX by_agent",
        "CREATE TABLE other (x)",
        "DROP TABLE about",
        "DELETE FROM about",
        "UPDATE about SET through = 'x'",
        "UPDATE about SET short = 'x'",
        "ALTER TABLE ended ADD COLUMN x",
        "DROP TRIGGER one_less",
    ],
)
def test_an_index_of_another_version_is_made_anew(path: Path, statement: str):
    made(path, [row(1)]).close()
    with closing(sqlite3.connect(path)) as database:
        database.execute(statement)
        database.commit()
    assert rebuilt(path)


@pytest.mark.parametrize("content", [b"", b"x", bytes(4096), b"SQLite format 3\0", b"SQLite format 3\0" + bytes(9000)])
def test_a_file_that_is_no_index_is_made_anew(path: Path, content: bytes):
    path.write_bytes(content)
    path.chmod(0o600)
    for name in ("index.sqlite-wal", "index.sqlite-shm", "index.sqlite-journal"):
        path.with_name(name).write_bytes(b"left over")
    assert rebuilt(path)
    assert os.listdir(path.parent) == ["index.sqlite"]


def test_a_missing_index_is_made_anew_whatever_lies_beside_it(path: Path):
    index = made(path, [row(1), row(2)])
    wal = path.with_name("index.sqlite-wal").read_bytes()
    index.close()
    path.unlink()
    path.with_name("index.sqlite-wal").write_bytes(wal)
    assert rebuilt(path)


def test_a_cut_index_is_made_anew_now_or_when_it_shows(path: Path):
    rows = [row(place, summary=bytes(900)) for place in range(20)]
    made(path, rows).close()
    whole = path.read_bytes()
    for size in sorted({*range(0, len(whole), 4096), *range(512, len(whole), 4096)}):
        path.write_bytes(whole[:size])
        index = Index.open_or_rebuild(path, lambda: rows, 5, STORE, {"completed": 20})
        try:
            assert everything(index) == rows, size
        except IndexUnusable:
            index.close()
            index = Index.rebuild(path, lambda: rows, 5, STORE)
            assert everything(index) == rows, size
        index.close()


@pytest.mark.parametrize("text", [b"TRIGGER one_less", b"TABLE totals", b"INDEX by_agent"])
def test_an_index_whose_tables_are_no_text_is_made_anew(path: Path, text: bytes):
    made(path, [row(1)]).close()
    whole = path.read_bytes()
    for byte in (b"\xa0", b"\0", b"("):
        path.write_bytes(whole.replace(text, byte + text[1:]))
        assert rebuilt(path)


@pytest.mark.parametrize("old_ends_first", [True, False])
def test_an_index_that_is_still_open_and_a_new_one_in_its_place_leave_each_other_alone(
    path: Path, old_ends_first: bool
):
    rows = [row(place) for place in range(2_000)]
    old = made(path, rows)
    new = Index.rebuild(path, lambda: [row(7)], 9, STORE)
    new.update([row(8)], (), 10, STORE)
    assert (everything(old), old.through) == (rows, 5)
    old.update((), [row(1_999).run], 6, STORE)
    assert (everything(new), new.through) == ([row(7), row(8)], 10)
    assert everything(old) == rows[:-1]
    for index in (old, new) if old_ends_first else (new, old):
        index.close()
    with closing(Index(path)) as index:
        assert (everything(index), index.through) == ([row(7), row(8)], 10)


def test_a_rebuild_that_is_cut_short_begins_anew(path: Path):
    def cut() -> Iterator[Ended]:
        yield row(1)
        raise errors.StorageError("now not", errno="EMFILE")

    with pytest.raises(errors.StorageError):
        Index.open_or_rebuild(path, cut, 5, STORE, {"completed": 2})
    assert rebuilt(path)


def test_a_file_that_cannot_be_opened_now_is_not_thrown_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "index.sqlite"
    made(path, [row(1)]).close()

    def full(*_: object, **__: object) -> object:
        error = sqlite3.OperationalError("unable to open database file")
        error.sqlite_errorcode = sqlite3.SQLITE_CANTOPEN
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(sqlite3, "connect", full)
        with pytest.raises(errors.StorageError) as caught:
            rebuilt(path)
    assert caught.value.details == {"errno": "EIO"}
    assert not rebuilt(path)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("SQLITE_IOERR_FSYNC", errors.StoragePoisoned),
        ("SQLITE_IOERR_DIR_FSYNC", errors.StoragePoisoned),
        ("SQLITE_IOERR_WRITE", errors.StorageError),
        ("SQLITE_BUSY", errors.StorageError),
        ("SQLITE_IOERR_SHORT_READ", IndexUnusable),
        ("SQLITE_CORRUPT_INDEX", IndexUnusable),
        ("SQLITE_READONLY", IndexUnusable),
    ],
)
def test_trouble_with_the_disk_and_trouble_with_the_file_are_told_apart(
    path: Path, monkeypatch: pytest.MonkeyPatch, name: str, expected: type[Exception]
):
    class Sick:
        in_transaction = False

        def execute(self, *_: object) -> object:
            error = sqlite3.OperationalError(name)
            error.sqlite_errorcode = getattr(sqlite3, name)
            raise error

    with closing(made(path)) as index:
        monkeypatch.setattr(index, "_database", Sick())
        for call in (index.counts, lambda: index.update((), (), 6, STORE), lambda: list(index.blobs())):
            with pytest.raises(expected) as caught:
                call()
            assert type(caught.value) is expected
        monkeypatch.undo()


def test_a_disk_without_room_to_open_the_file_is_told_as_full():
    error = sqlite3.OperationalError("disk I/O error")
    error.sqlite_errorcode = sqlite3.SQLITE_IOERR_SHMSIZE
    with pytest.raises(errors.StorageError) as caught, translated():
        raise error
    assert caught.value.details == {"errno": "ENOSPC"}


def test_a_flipped_bit_never_shows_as_another_run_and_is_no_other_error(path: Path):
    rows = [row(place, status=STATUSES[place % 3], blobs=(f"{place:064x}",), summary=b"s" * 99) for place in range(30)]
    made(path, rows).close()
    whole = path.read_bytes()
    by_run = {each.run: each for each in rows}
    rng = random.Random(4)
    spots = [*range(100), *(rng.randrange(len(whole)) for _ in range(500))]
    noticed = 0
    for spot in spots:
        data = bytearray(whole)
        data[spot] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        try:
            with closing(Index(path)) as index:
                index._database.execute("PRAGMA synchronous = OFF")  # only to be quick
                found = everything(index)
                found += index.page(0, 100, namespace="", agent="fixer", statuses=("failed",))
                found += [each for run in by_run if (each := index.find(run)) is not None]
                old = list(index.expired(datetime(2040, 1, 1, tzinfo=UTC)))
                assert all(each == by_run[each.run] for each in found)
                assert all(each == msgspec.structs.replace(by_run[each.run], summary=b"") for each in old)
                index.update([row(3)], [row(4).run], 6, STORE)
                assert set(index.blobs()) >= {each.blobs[0] for each in rows if each.place not in {3, 4}}
        except IndexUnusable:
            noticed += 1
    assert noticed > 50


def test_a_folder_in_its_place_goes_where_it_is_empty_and_is_else_kept_under_another_name(tmp_path: Path):
    path = tmp_path / "index.sqlite"
    path.mkdir()
    assert rebuilt(path)
    assert os.listdir(tmp_path) == ["index.sqlite"]
    for number in (1, 2):
        path.unlink()
        path.mkdir()
        (path / "kept").write_text(f"{number}")
        assert rebuilt(path)
        assert not rebuilt(path)
    assert sorted(os.listdir(tmp_path)) == ["index.sqlite", "index.sqlite.aside-1", "index.sqlite.aside-2"]
    assert [(tmp_path / f"index.sqlite.aside-{number}" / "kept").read_text() for number in (1, 2)] == ["1", "2"]


def test_whoever_may_not_make_it_anew_leaves_what_stands_in_its_place_alone(path: Path):
    for name in ("index.sqlite", "index.sqlite-wal"):
        strange = path.with_name(name)
        os.mkfifo(strange)
        with pytest.raises(IndexUnusable, match=f"{name} is no file"):
            Index(path)
        assert strange.is_fifo()
        strange.unlink()


def test_what_cannot_be_set_aside_is_told_as_trouble_of_the_disk(path: Path, monkeypatch: pytest.MonkeyPatch):
    path.mkdir()
    (path / "kept").touch()

    def busy(*_: object) -> None:
        raise OSError(errno.EBUSY, "a file system is mounted on it")

    monkeypatch.setattr(Path, "rename", busy)
    with pytest.raises(errors.StorageError) as caught:
        rebuilt(path)
    assert caught.value.details == {"errno": "EBUSY"}
    assert (path / "kept").exists()
