"""A connection to SQLite, and what its errors mean.

Knows: which trouble is the disk's and may pass, and which is the file's. Does not know: what the file holds (`index`).

SQLite is imported by the first connection, so a process that makes none does not pay for it.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from rpcagent import errors

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Iterator

_BUSY_S = 5.0  # a writer and a reader do not wait for each other; this is for what else may hold the file


class IndexUnusable(Exception):
    """The file is damaged, foreign or of another version. Nothing is lost: `Index.rebuild` makes it anew."""


def connection(name: str, *, uri: bool = False) -> sqlite3.Connection:
    """As all that read or write an index have it: one statement is one transaction, in any thread."""
    import sqlite3

    return sqlite3.connect(name, timeout=_BUSY_S, isolation_level=None, check_same_thread=False, uri=uri)


@contextlib.contextmanager
def translated() -> Iterator[None]:
    """Errors of SQLite and of the system as those that `Index` promises."""
    import sqlite3

    try:
        yield
    except sqlite3.ProgrammingError:
        raise  # a fault of ours
    except sqlite3.Error as error:
        raise _meaning(error) from error
    except UnicodeDecodeError as error:  # damaged text, or a complaint that quotes it
        raise IndexUnusable("its text is none") from error
    except OSError as error:
        name = errors.name_of(error)
        raise errors.StorageError(f"The index cannot be opened ({name}).", errno=name) from error


def _meaning(error: sqlite3.Error) -> Exception:
    """Trouble around the file, which may pass, or trouble with the file, which does not. What is neither known is the file's:
    to make it anew needs only time."""
    import sqlite3

    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT)
    if code in {sqlite3.SQLITE_IOERR_FSYNC, sqlite3.SQLITE_IOERR_DIR_FSYNC}:
        return errors.StoragePoisoned("A sync of the index failed.", errno="EIO")
    if code in {sqlite3.SQLITE_IOERR_SHORT_READ, sqlite3.SQLITE_IOERR_DATA, sqlite3.SQLITE_IOERR_CORRUPTFS}:
        return IndexUnusable(str(error))
    if code == sqlite3.SQLITE_IOERR_SHMSIZE:  # all that it does is to make the file longer
        return errors.StorageError("There is no room to open the index.", errno="ENOSPC")
    name = {
        sqlite3.SQLITE_FULL: "ENOSPC",
        sqlite3.SQLITE_IOERR: "EIO",
        sqlite3.SQLITE_CANTOPEN: "EIO",
        sqlite3.SQLITE_PERM: "EACCES",
        sqlite3.SQLITE_AUTH: "EACCES",
        sqlite3.SQLITE_BUSY: "EAGAIN",
        sqlite3.SQLITE_LOCKED: "EAGAIN",
        sqlite3.SQLITE_PROTOCOL: "EAGAIN",
    }.get(code & 0xFF)
    if name is None:
        return IndexUnusable(str(error))
    return errors.StorageError(f"The index cannot be used now ({name}).", errno=name)
