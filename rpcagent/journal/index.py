"""The index of ended runs: one SQLite file, for lists and for retention. The only file of the journal that knows SQL.

Knows: how to find ended runs by place, namespace, agent and status without reading the others, and when its file is of no
use. Does not know: what a summary says, or what is true: that stands in `runs/*/state.json`, from which a new index is
made at any time. So a file that is damaged, of another store or of another version is never an error, only work.

SQLite checks its pages by no checksum. Every row has one of its own, because runs are deleted by what stands here: a row
that comes out is the row that went in. A row that a damaged page hides is missed by a page or by `expired`, which does no
harm; `blobs`, by which content is deleted, counts.

SQLite is imported by the first `Index`, so a process that opens none does not pay for it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import stat
import zlib
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from rpcagent import errors
from rpcagent.journal.sqlite import IndexUnusable, connection, translated

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

__all__ = ["Ended", "Index", "IndexUnusable", "page_query"]

FILE_NAME = "index.sqlite"
VERSION = 1
"""Of the tables and of what stands in them. A file with another one is made anew."""
_APPLICATION = 0x72706169
_KEPT_WAL_BYTES = 4 * 1024 * 1024
_SHRINK_BYTES = 1024 * 1024
_FETCH = 256
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MS = timedelta(milliseconds=1)

_COLUMNS = (
    "id INTEGER PRIMARY KEY, run TEXT NOT NULL UNIQUE, place INTEGER NOT NULL, status TEXT NOT NULL, "
    "namespace TEXT NOT NULL, agent TEXT NOT NULL, labels TEXT NOT NULL, started TEXT NOT NULL, ended TEXT NOT NULL, "
    "ended_ms INTEGER, bytes INTEGER NOT NULL, blobs TEXT NOT NULL, unresolved INTEGER NOT NULL, "
    "summary_crc INTEGER NOT NULL, crc INTEGER NOT NULL, summary BLOB NOT NULL"
)
_ONE_MORE = "INSERT INTO totals VALUES (new.status, 1) ON CONFLICT (status) DO UPDATE SET n = n + 1"
# Each index ends with the place, so a page is a range of it. No status given means each status in turn: there are few.
_SCHEMA = (
    "CREATE TABLE about (one INTEGER PRIMARY KEY, through INTEGER NOT NULL, store TEXT NOT NULL, short TEXT NOT NULL)",
    "CREATE TABLE totals (status TEXT PRIMARY KEY, n INTEGER NOT NULL) WITHOUT ROWID",
    f"CREATE TABLE ended ({_COLUMNS})",
    "CREATE INDEX by_place ON ended (place)",
    "CREATE INDEX by_end ON ended (ended_ms, place)",
    "CREATE INDEX by_status ON ended (status, place)",
    "CREATE INDEX by_namespace ON ended (namespace, status, place)",
    "CREATE INDEX by_agent ON ended (agent, status, place)",
    "CREATE INDEX by_namespace_agent ON ended (namespace, agent, status, place)",
    f"CREATE TRIGGER one_more AFTER INSERT ON ended BEGIN {_ONE_MORE}; END",
    "CREATE TRIGGER one_less AFTER DELETE ON ended BEGIN UPDATE totals SET n = n - 1 WHERE status = old.status; END",
)
_HEADS = ", ".join(
    f"ended.{name}"
    for name in (
        "run", "place", "status", "namespace", "agent", "labels", "started", "ended", "ended_ms", "bytes", "blobs",
        "unresolved", "summary_crc", "crc",
    )
)  # fmt: skip
_INSERT = f"INSERT INTO ended ({_HEADS.replace('ended.', '')}, summary) VALUES ({', '.join('?' * 15)})"  # noqa: S608
_labels = msgspec.json.Decoder(dict[str, str])
_counts = msgspec.json.Decoder(dict[str, int])
_digests = msgspec.json.Decoder(tuple[str, ...])
_encoder = msgspec.json.Encoder()
_Bytes = bytes


class Ended(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """An ended run as lists and retention need it. Times are RFC 3339 texts, `bytes` is the length of its history,
    `blobs` are the digests that it refers to. `unresolved`: the outcome of a step is still unknown."""

    run: str
    place: int
    status: str
    namespace: str
    agent: str
    labels: dict[str, str]
    started_at: str
    ended_at: str
    bytes: int
    blobs: tuple[str, ...]
    unresolved: bool
    summary: _Bytes


class Index:
    """The file at `path`, which is made if it is missing. For one thread at a time; another thread has an object of its
    own, and neither waits for the other.

    Every call raises IndexUnusable, or StorageError where the file may be good and cannot be read or written now."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        with translated():
            self._database = self._connected()
        try:
            with translated():
                self._prepare()
        except BaseException:
            self.close()
            raise

    @classmethod
    def open_or_rebuild(
        cls,
        path: Path | str,
        rows: Callable[[], Iterable[Ended]],
        through: int,
        store_id: str,
        counts: Mapping[str, int],
    ) -> Index:
        """The index that covers the log of this store at least up to `through`; made from `rows()` if the file does not.

        `counts`: how many ended runs of each status the manifest knows at `through`. A file that covers exactly as much
        must have as many, but for those that `rows()` did not give either when it was made: a damaged run must not cost this
        work each time. One that is ahead of the manifest may differ."""
        with contextlib.suppress(IndexUnusable):
            index = cls(path)
            try:
                if index.is_of(through, store_id, counts):
                    return index
            except BaseException:
                index.close()
                raise
            index.close()
        return cls.rebuild(path, rows, through, store_id, counts)

    @classmethod
    def rebuild(
        cls,
        path: Path | str,
        rows: Callable[[], Iterable[Ended]],
        through: int,
        store_id: str,
        counts: Mapping[str, int] | None = None,
    ) -> Index:
        """A new file in place of whatever is there. Durable on return. An Index that is still open goes on with the old one.

        What `rows` raises goes up; the next `open_or_rebuild` begins anew then."""
        _remove(Path(path))
        index = cls(path)
        try:
            index.update(rows(), (), through, store_id)
            index._accept(counts if counts is not None else index.counts())
        except BaseException:
            index.close()
            raise
        return index

    @property
    def through(self) -> int:
        """The number of the last log record that is covered; 0 if it is new."""
        return self._about()[0]

    @property
    def store_id(self) -> str:
        """Of the store that it belongs to; empty if it is new."""
        return self._about()[1]

    def update(self, rows: Iterable[Ended], removed: Iterable[str], through: int, store_id: str) -> None:
        """Puts each of `rows` in place of what the index says of its run, and takes out the runs `removed`. All of it and
        `through` are durable on return, or nothing has changed. May be repeated.

        Raises StorageError (nothing was recorded, a later update may succeed), StoragePoisoned where a sync failed."""
        delete, deleted = "DELETE FROM ended WHERE run = ?", False
        with translated():
            self._database.execute("BEGIN IMMEDIATE")
        try:
            for row in rows:  # what this raises is no error of the file
                with translated():
                    self._database.execute(delete, (row.run,))
                    self._database.execute(_INSERT, _values(row))
            for run in removed:
                deleted = True
                with translated():
                    self._database.execute(delete, (run,))
            with translated():
                self._database.execute("UPDATE about SET through = ?, store = ?", (through, store_id))
                self._database.execute("COMMIT")
        except BaseException:
            self._undo()
            raise
        if deleted:
            self._shrink()

    def page(
        self, place: int, limit: int, *, namespace: str | None, agent: str | None, statuses: Collection[str]
    ) -> list[Ended]:
        """The first `limit` runs at `place` or after it, by place. None, and no statuses: any. Takes time by `limit`, not
        by how many runs there are or how few of them match."""
        present = self.counts()
        wanted = [status for status in present if status in statuses] if statuses else list(present)
        if not wanted:
            return []
        no_filter = namespace is None and agent is None and len(wanted) == len(present)
        query, values = page_query(place, limit, namespace, agent, None if no_filter else wanted)
        with translated():
            found = [_row(each) for each in self._database.execute(query, values)]
        return sorted(found, key=lambda row: (row.place, row.run))

    def find(self, run: str) -> Ended | None:
        """The row of a run, if it has ended."""
        with translated():
            query = f"SELECT {_HEADS}, summary FROM ended WHERE run = ?"  # noqa: S608 - of constants
            found = self._database.execute(query, (run,)).fetchone()
            return None if found is None else _row(found)

    def runs(self, place: int = 0) -> list[str]:
        """All runs that have ended, at `place` or after it, in no order."""
        with translated():
            return [run for (run,) in self._database.execute("SELECT run FROM ended WHERE place >= ?", (place,))]

    def counts(self) -> dict[str, int]:
        """How many runs there are of each status that any run has."""
        with translated():
            return dict(self._database.execute("SELECT status, n FROM totals WHERE n <> 0 ORDER BY status").fetchall())

    def expired(self, ended_by: datetime) -> Iterator[Ended]:
        """The runs that ended at `ended_by` or before, the oldest first, with an empty `summary`. To the millisecond: it
        may give runs that ended within the same one. A run without a readable `ended_at` never comes.

        Other calls of this object may be made before it is at its end, except `update`."""
        query = f"SELECT {_HEADS} FROM ended WHERE ended_ms <= ? ORDER BY ended_ms, place"  # noqa: S608 - of constants
        with translated():
            cursor = self._database.execute(query, ((ended_by - _EPOCH) // _MS,))
        with contextlib.closing(cursor):
            while True:
                with translated():
                    some = [_row(values) for values in cursor.fetchmany(_FETCH)]
                if not some:
                    return
                yield from some

    def blobs(self) -> Iterator[str]:
        """The digests that any run refers to, each once, sorted. Reads all rows, and holds all digests."""
        found: set[str] = set()
        seen = 0
        with translated():
            self._database.execute("BEGIN")
            try:
                total = sum(self.counts().values())
                query = f"SELECT {_HEADS} FROM ended NOT INDEXED"  # noqa: S608 - of constants
                for values in self._database.execute(query):
                    found.update(_row(values).blobs)
                    seen += 1
            finally:
                self._undo()
        if seen != total:
            raise IndexUnusable(f"{seen} of {total} rows can be read")
        return iter(sorted(found))

    def unchanged(self) -> bool:
        """Whether what it answered since it was opened counts."""
        return True

    def close(self) -> None:
        """Gives the file up. What counts was made durable before."""
        import sqlite3

        with contextlib.suppress(sqlite3.Error):
            self._database.close()

    def _connected(self) -> sqlite3.Connection:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        # Only a file that is not there is opened by us: the close of any descriptor drops the locks that SQLite holds.
        with contextlib.suppress(FileExistsError):
            os.close(os.open(self.path, flags, 0o600))
        if strange := [path.name for path in files_of(self.path) if is_strange(path)]:
            raise IndexUnusable(f"{strange[0]} is no file")
        return connection(str(self.path))

    def _prepare(self) -> None:
        """Makes the tables in an empty file; raises IndexUnusable for a file with others."""
        execute = self._database.execute
        execute("PRAGMA synchronous = FULL")
        execute("PRAGMA cell_size_check = ON")
        execute(f"PRAGMA journal_size_limit = {_KEPT_WAL_BYTES}")
        if not self._schema():
            # Readers and the writer do not wait for each other then. Where the file system has no shared memory, the
            # mode stays as it is, and they do.
            execute("PRAGMA journal_mode = WAL")
            execute("BEGIN IMMEDIATE")
            try:
                if not self._schema():
                    for statement in _SCHEMA:
                        execute(statement)
                    execute(f"PRAGMA application_id = {_APPLICATION}")
                    execute(f"PRAGMA user_version = {VERSION}")
                    execute("INSERT INTO about VALUES (1, 0, '', '{}')")
                execute("COMMIT")
            except BaseException:
                self._undo()
                raise
        self._check()

    def _check(self) -> None:
        execute = self._database.execute
        version = execute("PRAGMA user_version").fetchone()[0]
        if execute("PRAGMA application_id").fetchone()[0] != _APPLICATION or version != VERSION:
            raise IndexUnusable(f"this is no index of version {VERSION}")
        if self._schema() != set(_SCHEMA):
            raise IndexUnusable("its tables are not those of this version")

    def _schema(self) -> set[str]:
        return {sql for (sql,) in self._database.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL")}

    def _shrink(self) -> None:
        """Where more than half of the file is free, it is written anew: less than what was deleted since the last time. Readers
        go on beside it, and a crash leaves the file as it was. What cannot be done now is left to a later deletion."""
        try:
            with translated():
                if self._wastes_room():
                    self._database.execute("VACUUM")
                    self._database.execute("PRAGMA wal_checkpoint(PASSIVE)")
        except errors.StoragePoisoned:
            raise
        except errors.StorageError:
            with contextlib.suppress(errors.StorageError), translated():  # what it took so far is given back
                self._database.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def _wastes_room(self) -> bool:
        def ask(name: str) -> Any:
            return self._database.execute(f"PRAGMA {name}").fetchone()[0]

        free, pages, size = ask("freelist_count"), ask("page_count"), ask("page_size")
        if free * size < _SHRINK_BYTES or 2 * free < pages:
            return False
        disk = os.statvfs(self.path.parent)
        used = (pages - free) * size  # it goes through a temporary file, and through the log of SQLite
        # In another mode than this one readers would have to wait.
        return bool(disk.f_bavail * disk.f_frsize >= 4 * used and ask("journal_mode") == "wal")

    def _about(self) -> tuple[int, str, dict[str, int]]:
        with translated():
            found = self._database.execute("SELECT through, store, short FROM about").fetchall()
        with contextlib.suppress(ValueError):  # another number of rows, or of another kind
            ((through, store, short),) = msgspec.convert(found, list[tuple[int, str, str]])
            return through, store, _counts.decode(short)
        raise IndexUnusable("it does not say what it covers")

    def is_of(self, through: int, store_id: str, counts: Mapping[str, int]) -> bool:
        """Whether it covers the log of this store up to `through`, and has as many rows as `open_or_rebuild` says."""
        covered, store, short = self._about()
        if store != store_id or covered < through:
            return False
        return covered > through or self._short_of(counts) == short

    def _accept(self, counts: Mapping[str, int]) -> None:
        with translated():
            short = _encoder.encode(self._short_of(counts)).decode()
            self._database.execute("UPDATE about SET short = ?", (short,))

    def _short_of(self, counts: Mapping[str, int]) -> dict[str, int]:
        """By status, how many runs there should be more (or, below 0, fewer)."""
        have = self.counts()
        return {status: n for status in {*counts, *have} if (n := counts.get(status, 0) - have.get(status, 0))}

    def _undo(self) -> None:
        import sqlite3

        if self._database.in_transaction:
            with contextlib.suppress(sqlite3.Error):  # the file is as it was, whether or not this can be said to SQLite
                self._database.execute("ROLLBACK")


def page_query(
    place: int, limit: int, namespace: str | None, agent: str | None, statuses: Collection[str] | None
) -> tuple[str, list[Any]]:
    """The SQL of a page and its values. Each status is a range of one index, cut at `limit`; rows are read for the first
    `limit` of all of them only. A hit without a row comes out empty, so that it is noticed."""
    given = [(name, value) for name, value in (("namespace", namespace), ("agent", agent)) if value is not None]
    if statuses is None and not given:
        ranges = ["SELECT id, place FROM ended WHERE place >= ? ORDER BY place LIMIT ?"]
        values: list[Any] = [place, limit]
    else:
        where = "".join(f"{column} = ? AND " for column, _ in given)
        one = f"SELECT id, place FROM ended WHERE {where}status = ? AND place >= ? ORDER BY place LIMIT ?"  # noqa: S608
        ranges, values = [], []
        for status in statuses or ():
            ranges.append(f"SELECT * FROM ({one})")  # noqa: S608
            values += [*(value for _, value in given), status, place, limit]
    hits = " UNION ALL ".join(ranges)
    query = f"SELECT {_HEADS}, ended.summary FROM (SELECT id FROM ({hits}) ORDER BY place LIMIT ?) AS hit LEFT JOIN ended ON ended.id = hit.id"  # noqa: S608
    return query, [*values, limit]


def files_of(path: Path) -> list[Path]:
    """All names that may belong to the index at `path`, itself first."""
    return [path.with_name(path.name + suffix) for suffix in ("", "-wal", "-shm", "-journal")]


def is_strange(path: Path) -> bool:
    """Whether something stands there that is no file, so that none can be made."""
    try:
        return not stat.S_ISREG(path.lstat().st_mode)
    except FileNotFoundError:
        return False


def set_aside(path: Path) -> list[str]:
    """Gives the names of the index at `path` free of what is no file. It loses nothing: an empty folder is removed, all else
    renamed within the folder. Returns what was done, for the log. Raises StorageError."""
    done: list[str] = []
    with translated():
        for name in filter(is_strange, files_of(path)):
            with contextlib.suppress(OSError):  # it is no folder, or something is in it
                name.rmdir()
                done.append(f"{name.name} was an empty folder, which is removed")
                continue
            numbers = (name.with_name(f"{name.name}.aside-{n}") for n in itertools.count(1))
            aside = next(free for free in numbers if not os.path.lexists(free))
            name.rename(aside)
            done.append(f"{name.name} was no file of the index; it is {aside.name} now")
    return done


def _remove(path: Path) -> None:
    """The file goes first: beside a new one, SQLite takes the others for leftovers, which they are. They go all the same, since
    whoever still has the old file open has them in memory."""
    set_aside(path)
    with translated():
        for name in files_of(path):
            name.unlink(missing_ok=True)


def _values(row: Ended) -> tuple[Any, ...]:
    """What stands in the columns, in the order of `_HEADS`, and the summary."""
    heads = (
        row.run,
        row.place,
        row.status,
        row.namespace,
        row.agent,
        _encoder.encode(row.labels).decode(),
        row.started_at,
        row.ended_at,
        _milliseconds(row.ended_at),
        row.bytes,
        _encoder.encode(row.blobs).decode(),
        int(row.unresolved),
        zlib.crc32(row.summary),
    )
    return (*heads, zlib.crc32(_encoder.encode(heads)), row.summary)


def _row(values: tuple[Any, ...]) -> Ended:
    """The row that was put in; IndexUnusable if these values are not those of one. Without the summary it is empty."""
    heads, checksum, summary = values[:13], values[13], values[14:]
    if zlib.crc32(_encoder.encode(heads)) != checksum or any(zlib.crc32(found) != heads[12] for found in summary):
        raise IndexUnusable("a row is not what was put in")
    return Ended(
        run=heads[0],
        place=heads[1],
        status=heads[2],
        namespace=heads[3],
        agent=heads[4],
        labels=_labels.decode(heads[5]),
        started_at=heads[6],
        ended_at=heads[7],
        bytes=heads[9],
        blobs=_digests.decode(heads[10]),
        unresolved=bool(heads[11]),
        summary=summary[0] if summary else b"",
    )


def _milliseconds(text: str) -> int | None:
    """Since 1970. None for a text that is no instant: such a run is never found to be old."""
    try:
        return (datetime.fromisoformat(text) - _EPOCH) // _MS
    except (ValueError, TypeError):  # no time, or one without its offset
        return None
