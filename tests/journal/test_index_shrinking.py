"""The file of the index becomes small again after many deletions: at no cost for others, and whatever happens meanwhile."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import pytest
from rpcagent import errors
from rpcagent.journal import index as indexes
from rpcagent.journal.index import Ended, Index

from .test_index import STORE, everything, made, never, row

MANY, KEPT = 20_000, 100
ROWS = [row(place, blobs=(f"{place:064x}",), summary=b"s" * 500) for place in range(MANY)]
GONE = [one.run for one in ROWS[:-KEPT]]
LEFT = ROWS[-KEPT:]
COUNTS = {"completed": KEPT}
SMALL = 200_000


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("full") / "index.sqlite"
    made(path, ROWS).close()
    return path


@pytest.fixture
def path(full: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(full, tmp_path / full.name))


def right(index: Index, rows: list[Ended], through: int) -> None:
    assert (everything(index), index.through, index.store_id) == (rows, through, STORE)
    assert index.counts() == {"completed": len(rows)}
    assert [one.run for one in index.expired(datetime(2040, 1, 1, tzinfo=UTC))] == [one.run for one in rows]
    assert list(index.blobs()) == [blob for one in rows for blob in one.blobs]
    assert index.find(rows[0].run) == rows[0]
    assert index.find(GONE[0]) is None


def test_a_file_from_which_most_was_deleted_is_small_again_and_says_the_same(path: Path):
    assert path.stat().st_size > 10_000_000
    with closing(Index(path)) as index:
        index.update((), GONE, 6, STORE)
        right(index, LEFT, 6)
        assert path.stat().st_size < SMALL  # also while it is open
        index.update([row(MANY)], [LEFT[0].run], 7, STORE)
    with closing(Index.open_or_rebuild(path, never, 7, STORE, COUNTS)) as index:
        assert everything(index) == [*LEFT[1:], row(MANY)]
    assert os.listdir(path.parent) == [path.name]
    assert path.stat().st_size < SMALL


def statements(index: Index, work: Callable[[], None]) -> list[str]:
    seen: list[str] = []
    index._database.set_trace_callback(seen.append)
    work()
    index._database.set_trace_callback(None)
    return seen


def test_an_update_that_deletes_nothing_or_little_asks_for_no_more_than_before(path: Path):
    with closing(Index(path)) as index:
        filed = statements(index, lambda: index.update([row(MANY)], (), 6, STORE))
        assert [one for one in filed if one.startswith(("PRAGMA", "VACUUM"))] == []
        few = statements(index, lambda: index.update((), GONE[: MANY // 3], 7, STORE))
        assert "VACUUM" not in few
        assert "VACUUM" in statements(index, lambda: index.update((), GONE, 8, STORE))
        assert "VACUUM" not in statements(index, lambda: index.update((), [LEFT[0].run], 9, STORE))


def test_a_file_that_is_small_anyway_is_left_as_it_is(tmp_path: Path):
    with closing(made(tmp_path / "index.sqlite", ROWS[:500])) as index:
        assert "VACUUM" not in statements(index, lambda: index.update((), GONE[:499], 6, STORE))
        assert everything(index) == [ROWS[499]]


def test_a_reader_in_the_middle_of_the_rows_goes_on_while_the_file_is_made_small(path: Path):
    with closing(Index(path)) as index, closing(Index(path)) as reader:
        old = reader.expired(datetime(2040, 1, 1, tzinfo=UTC))
        assert next(old).place == 0
        index.update((), GONE, 6, STORE)
        assert [one.place for one in old] == list(range(1, MANY))  # as it was when it began
        right(reader, LEFT, 6)
    assert path.stat().st_size < SMALL


def test_where_readers_would_have_to_wait_or_there_is_no_room_the_file_stays_long(
    path: Path, monkeypatch: pytest.MonkeyPatch
):
    size = path.stat().st_size
    with closing(Index(path)) as index:
        index._database.execute("PRAGMA journal_mode = DELETE")
        index.update((), GONE[1:], 6, STORE)
        index._database.execute("PRAGMA journal_mode = WAL")
        with monkeypatch.context() as patch:
            patch.setattr(indexes.os, "statvfs", lambda _path: SimpleNamespace(f_bavail=20, f_frsize=4096))
            index.update((), GONE[:1], 7, STORE)
        assert path.stat().st_size == size
        right(index, LEFT, 7)
        index.update((), GONE[:1], 8, STORE)
        assert path.stat().st_size < SMALL


class Refusing:
    """A database that has no room, or whose sync fails, for one statement."""

    def __init__(self, real: sqlite3.Connection, code: int) -> None:
        self._real, self._code = real, code
        self.seen: list[str] = []

    @property
    def in_transaction(self) -> bool:
        return self._real.in_transaction

    def execute(self, statement: str, *values: object) -> sqlite3.Cursor:
        self.seen.append(statement)
        if statement == "VACUUM":
            error = sqlite3.OperationalError("no")
            error.sqlite_errorcode = self._code
            raise error
        return self._real.execute(statement, *values)


def test_trouble_with_the_shrinking_does_not_undo_the_update_and_a_failed_sync_is_told(
    path: Path, monkeypatch: pytest.MonkeyPatch
):
    with closing(Index(path)) as index:
        refusing = Refusing(index._database, sqlite3.SQLITE_FULL)
        monkeypatch.setattr(index, "_database", refusing)
        index.update((), GONE, 6, STORE)
        assert refusing.seen[-1] == "PRAGMA wal_checkpoint(TRUNCATE)"
        assert path.with_name("index.sqlite-wal").stat().st_size == 0
        refusing._code = sqlite3.SQLITE_IOERR_FSYNC
        with pytest.raises(errors.StoragePoisoned):
            index.update((), GONE, 7, STORE)
        monkeypatch.undo()
        right(index, LEFT, 7)


KILLED_IN_THE_MIDDLE = """
import os, signal, sys
from tests.journal.test_index import STORE, row
from rpcagent.journal.index import Index

index = Index(sys.argv[1])
database = index._database
beats = iter(range(int(sys.argv[2])))

def beat():
    if next(beats, None) is None:
        os.kill(os.getpid(), signal.SIGKILL)

database.set_trace_callback(lambda said: database.set_progress_handler(beat, 10) if said == "VACUUM" else None)
index.update((), [row(place).run for place in range(int(sys.argv[3]))], 6, STORE)
"""


@pytest.mark.parametrize("beats", [0, 30, 100, 200])
def test_a_kill_while_the_file_is_made_small_leaves_a_good_one(path: Path, tmp_path: Path, beats: int):
    command = [sys.executable, "-c", KILLED_IN_THE_MIDDLE, str(path), str(beats), str(MANY - KEPT)]
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    environment = os.environ | {"SQLITE_TMPDIR": str(scratch)}
    done = subprocess.run(command, cwd=Path(__file__).parents[2], env=environment, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    assert os.listdir(scratch) == []
    with closing(Index.open_or_rebuild(path, never, 6, STORE, COUNTS)) as index:
        right(index, LEFT, 6)
        index.update((), [LEFT[0].run], 7, STORE)
        assert path.stat().st_size < SMALL
        right(index, LEFT[1:], 7)
