"""Which runs were deleted: 16 bytes a run, for ever, so that a late request for one is never taken for a new run.

Knows: the files of `tombstones/`, which of them count (those that the manifest names, with their count and sum), and how
they are kept few. Does not know: when a run is deleted, how a file gets on the disk, or the manifest.

A file is the sorted ids and nothing else, so it is looked up as it is: no more memory than its bytes, and none before the
first question.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from rpcagent import errors

if TYPE_CHECKING:
    from rpcagent.journal.disk import Disk

FOLDER = "tombstones"
ID_BYTES = 16
MOST_FILES = 8
"""More than these become one."""
_NAME = re.compile(r"(\d{16})\.bin")


class Named(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file as the manifest names it: `count` ids, and the SHA-256 of its bytes in hex. Any other content is damage."""

    name: str
    count: int
    sum: str


class Filed(NamedTuple):
    """A file to be made durable as `tombstones/<name>`, and the files that the next manifest names, this one among them."""

    name: str
    data: bytes
    named: list[Named]


def tombstone_id(run: str) -> bytes:
    """The id under which a deleted run is remembered."""
    return hashlib.blake2b(run.encode(), digest_size=ID_BYTES).digest()


def encode(ids: Iterable[bytes]) -> bytes:
    """The bytes of a file: each id once, sorted."""
    return b"".join(sorted(set(ids)))


def named(name: str, data: bytes) -> Named:
    """What a manifest says of a file with this content."""
    return Named(name, len(data) // ID_BYTES, hashlib.sha256(data).hexdigest())


def read(disk: Disk, file: Named) -> bytes:
    """The content of a named file. Raises StoreDamaged if it is another one or missing, StorageError if it cannot be read."""
    name = f"{FOLDER}/{file.name}"
    try:
        data = disk.read(name)
    except FileNotFoundError:
        raise _damaged(name, "the file is missing") from None
    except OSError as error:
        found = errors.name_of(error)
        raise errors.StorageError(f"{name} cannot be read ({found}).", errno=found) from error
    if len(data) != file.count * ID_BYTES:
        raise _damaged(name, f"it has {len(data)} bytes, and {file.count * ID_BYTES} were written")
    if hashlib.sha256(data).hexdigest() != file.sum:
        raise _damaged(name, "its content is not what was written")
    return data


class Tombstones:
    """The deleted runs of a store: those in the files that `named` lists, and those added since.

    The files are read at the first question. That raises StoreDamaged (file, offset, reason) or StorageError (try again),
    and so does every later question until they could be read. One thread may ask while another one files."""

    def __init__(self, disk: Disk, named: Iterable[Named] = ()) -> None:
        self._disk = disk
        self._named = list(named)
        self._files: list[bytes] | None = None
        self._pending: set[bytes] = set()
        self._changing = threading.Lock()  # the files are read as they are named, or after they are named otherwise

    def __contains__(self, run: object) -> bool:
        """Whether the run was deleted."""
        if not isinstance(run, str):
            return False
        ident = tombstone_id(run)
        # In this order: what is filed is in the files before it is taken out here.
        return ident in self._pending or any(_holds(data, ident) for data in self._read())

    def add(self, run: str) -> None:
        """The run is deleted. That lasts when a log record says so, or a file that the manifest names. May be repeated."""
        self._pending.add(tombstone_id(run))

    @property
    def pending(self) -> int:
        """How many tombstones stand in no file yet."""
        return len(self._pending)

    @property
    def named(self) -> list[Named]:
        """The files that count now."""
        return list(self._named)

    def next_file(self, existing: Iterable[str]) -> Filed | None:
        """A file of the pending tombstones, or of all where there would be more than `MOST_FILES`; None if none is pending.

        `existing`: the names that are in the folder, whatever they are; the new one is none of them. Changes nothing: if
        it does not become durable, the same is to be filed next time. Raises as a question does, where files are merged."""
        fresh = encode(list(self._pending))
        if not fresh:
            return None
        taken = [*existing, *(file.name for file in self._named)]
        number = 1 + max((int(found[1]) for name in taken if (found := _NAME.fullmatch(name))), default=0)
        name = f"{number:016d}.bin"
        if len(self._named) < MOST_FILES:
            return Filed(name, fresh, [*self._named, named(name, fresh)])
        merged = _merged([*self._read(), fresh])
        return Filed(name, merged, [named(name, merged)])

    def filed(self, file: Filed) -> None:
        """The manifest names this file now: what stands in it is not pending any more."""
        with self._changing:
            if self._files is not None:
                self._files = [file.data] if len(file.named) == 1 else [*self._files, file.data]
            self._named = file.named
        self._pending.difference_update([ident for ident in list(self._pending) if _holds(file.data, ident)])

    def leftovers(self, existing: Iterable[str]) -> list[str]:
        """Of the names in the folder those that may be deleted: tombstone files that do not count (any more)."""
        counting = {file.name for file in self._named}
        return sorted(name for name in existing if _NAME.fullmatch(name) and name not in counting)

    def _read(self) -> list[bytes]:
        files = self._files
        if files is None:
            with self._changing:
                files = self._files
                if files is None:
                    files = self._files = [read(self._disk, file) for file in self._named]
        return files


def _holds(data: bytes, ident: bytes) -> bool:
    at = _place(data, ident)
    return data[at : at + ID_BYTES] == ident


def _place(data: bytes, ident: bytes) -> int:
    """The offset of the first id that is not before `ident`, which may be a part of one."""
    low, high = 0, len(data) // ID_BYTES
    while low < high:
        middle = (low + high) // 2
        if data[middle * ID_BYTES : (middle + 1) * ID_BYTES] < ident:
            low = middle + 1
        else:
            high = middle
    return low * ID_BYTES


def _merged(files: list[bytes]) -> bytes:
    """All ids of sorted files. By their first byte, so that only a 256th of them stands in memory one by one."""
    parts = []
    starts = [0] * len(files)
    for first in range(256):
        ends = [_place(data, bytes([first + 1])) if first < 255 else len(data) for data in files]
        parts.append(
            encode(
                data[at : at + ID_BYTES]
                for data, start, end in zip(files, starts, ends, strict=True)
                for at in range(start, end, ID_BYTES)
            )
        )
        starts = ends
    return b"".join(parts)


def _damaged(file: str, reason: str) -> errors.StoreDamaged:
    return errors.StoreDamaged(f"{file} is damaged: {reason}.", file=file, offset=0, reason=reason)
