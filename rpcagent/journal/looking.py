"""The index of ended runs for a process that may write nothing into the store: another owns it, or it can only be read.

Knows: when the file in the store is of use to such a process as it stands, and what it asks where it is not. Does not know:
SQL (`index`), or how the runs are read (`ended`).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rpcagent.journal.access import why_read_only
from rpcagent.journal.index import FILE_NAME, Ended, Index, IndexUnusable
from rpcagent.journal.sqlite import connection, translated

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Iterable, Mapping


def index_to_look(folder: Path, through: int, store_id: str, counts: Mapping[str, int]) -> Index:
    """The index as the owner of the store keeps it, or left it; the arguments are those of `Index.is_of`.

    Raises IndexUnusable where there is none for this store, StorageError where it cannot be read."""
    path = folder / FILE_NAME
    if not path.exists():
        raise IndexUnusable("there is none")
    index = Frozen(path) if why_read_only(folder) else Index(path)
    fits = False
    try:
        fits = index.is_of(through, store_id, counts)
    finally:
        if not fits:
            index.close()
    if not fits:
        raise IndexUnusable("it does not belong to what is looked at")
    return index


class Frozen(Index):
    """The file as it stands, read without any other beside it and without a lock: for a folder in which nothing can be written.
    Sound where the file holds all there is, and for as long as it is `unchanged`. Raises IndexUnusable where it does not."""

    def _connected(self) -> sqlite3.Connection:
        for suffix in ("-wal", "-journal"):
            if self.path.with_name(self.path.name + suffix).exists():
                raise IndexUnusable("it was not closed: a part of it stands in another file")
        self._seen = self._state()
        return connection(f"{self.path.absolute().as_uri()}?mode=ro&immutable=1", uri=True)

    def _prepare(self) -> None:
        self._database.execute("PRAGMA cell_size_check = ON")
        self._check()

    def unchanged(self) -> bool:
        with translated():
            return self._state() == self._seen

    def _state(self) -> tuple[int, ...]:
        found = self.path.stat()
        return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


class Private(Index):
    """One that no other process sees, and of which nothing stays: in memory, and beyond some pages in a file without a name
    where the system has its temporary ones."""

    def __init__(self) -> None:
        super().__init__("")

    @classmethod
    def of(cls, rows: Iterable[Ended], through: int, store_id: str) -> Private:
        """With these rows. Raises as `Index.update`, and what `rows` raises."""
        index = cls()
        try:
            index.update(rows, (), through, store_id)
        except BaseException:
            index.close()
            raise
        return index

    def _connected(self) -> sqlite3.Connection:
        return connection("")
