"""Contents too large for a record, each in a file named by its SHA-256: written once, shared, verified on every read.

Knows: how a content becomes durable under its digest before anyone refers to it, how a damaged one is told from a whole
one, and how to take away what nobody refers to. Does not know: who refers to it, nor what it is; the caller counts.

- A file is written under a temporary name, synced, renamed to its digest, and the folder is synced. A name of 64 hex digits
  therefore always has its whole content, at any instant and after any power cut.
- A content that is there already is replaced by the same content: that needs no trust in the old file, mends one that the
  disk has damaged, and makes the file young again, so that a collection that runs now leaves it.
- With a key, what is on disk is sealed, and a content is in memory until it is kept. The digest is that of the content, so
  that it is shared all the same. What was written before there was a key stays readable: its digest vouches for it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import secrets
import stat
import threading
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from rpcagent import errors
from rpcagent.journal.disk import Disk, RealDisk
from rpcagent.journal.seal import MAGIC, Seal, blob_context

BYTES_MAX = 64 * 1024 * 1024
"""Of one content."""
GRACE_S = 3_600.0
PIECE_BYTES = 1024 * 1024

_SEALED_BYTES_MAX = BYTES_MAX + 64 * 1024
_DIGEST = re.compile(r"[0-9a-f]{64}")
_TEMPORARY = re.compile(r"\.blob-[0-9a-f]{32}\.tmp")


class Blobs:
    """The contents in `folder`, which is made when the first one is written. May be used from several threads. Without a
    `seal`, or with one that has no key, contents are written as they are; then one that is sealed cannot be read."""

    def __init__(self, folder: Path, seal: Seal | None = None, *, disk: Disk | None = None) -> None:
        self.folder = folder
        self._seal = seal
        self._disk = disk
        self._lock = threading.Lock()  # a file is not collected between its being seen as old and its being renewed

    def create(self) -> Writer:
        """Begins a content. Raises OSError."""
        if self._disk is None:
            self._disk = RealDisk(self.folder)
        name = f".blob-{secrets.token_hex(16)}.tmp"
        self._disk.create(name)
        return Writer(self._disk, name, self._lock, self._seal if self._seal and self._seal.kid else None)

    def read(self, digest: str) -> bytes:
        """The whole content, verified. Raises as `pieces` does."""
        return b"".join(self.pieces(digest))

    def pieces(self, digest: str) -> Iterator[bytes]:
        """The content in pieces, in bounded memory where it is not sealed. The last piece comes only when the whole is
        verified: who has reached the end has the right content, and damage never looks like a whole one.

        Raises NotFound (details: digest); StoreDamaged (file, offset, reason); KeyMissing (kid, context) where it is sealed
        with another key; StorageError where it cannot be read now.
        """
        with self._reading(digest), self._at(digest).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size > _SEALED_BYTES_MAX:
                raise _damaged(self._name(digest), f"it has {size} bytes, more than any blob")
            if file.peek(len(MAGIC)).startswith(MAGIC):
                content = self._opened(digest, file.read(_SEALED_BYTES_MAX))
                yield from self._verified(digest, iter((content,)))
            else:
                yield from self._verified(digest, iter(lambda: file.read(PIECE_BYTES), b""))

    def size(self, digest: str) -> int:
        """The bytes that it takes on disk. Raises NotFound, StorageError."""
        with self._reading(digest):
            return self._at(digest).stat().st_size

    def collect(
        self,
        referenced: Collection[str] | Callable[[], Collection[str]],
        *,
        now: float,
        grace_s: float = GRACE_S,
        dry_run: bool = False,
    ) -> list[tuple[str, int]]:
        """Deletes the blobs that are not among the `referenced` digests, and what was left half-written, where they are
        older than `grace_s`. Returns the names of the files that went, with their bytes; `dry_run`: that would go.

        `now` is the wall clock (`time.time()`), by which files are dated. An output is written before the commit that
        refers to it: `grace_s` must be longer than any step has been under way. Of a deletion that a crash cuts short the
        rest is found again. Raises StorageError.
        """
        gone = []
        try:
            names = sorted(os.listdir(self.folder))  # noqa: PTH208 - names, not paths
            needed = referenced() if callable(referenced) else referenced  # after the names: none of them came later
            for name in names:
                if name in needed or not (_DIGEST.fullmatch(name) or _TEMPORARY.fullmatch(name)):
                    continue
                with self._lock, contextlib.suppress(FileNotFoundError):
                    found = self._at(name).lstat()
                    if not stat.S_ISREG(found.st_mode) or now - found.st_mtime < grace_s:
                        continue
                    if not dry_run:
                        self._at(name).unlink()
                    gone.append((name, found.st_size))
        except FileNotFoundError:
            return []  # nothing was ever written
        except OSError as error:
            raise _storage(error, "Blobs cannot be collected") from error
        return gone

    def _opened(self, digest: str, raw: bytes) -> bytes:
        if self._seal is None or hashlib.sha256(raw).hexdigest() == digest:
            return raw  # a plain content may begin like a sealed one
        try:
            return self._seal.open_bytes(blob_context(digest), raw)
        except errors.StoreDamaged as error:
            raise _damaged(self._name(digest), error.details["reason"]) from None

    def _verified(self, digest: str, pieces: Iterator[bytes]) -> Iterator[bytes]:
        counted = hashlib.sha256()
        held = b""
        for piece in pieces:
            counted.update(piece)
            if held:
                yield held
            held = piece
        if counted.hexdigest() != digest:
            raise _damaged(self._name(digest), "its content does not have the SHA-256 that it is named by")
        yield held

    @contextlib.contextmanager
    def _reading(self, digest: str) -> Iterator[None]:
        missing = errors.NotFound(f"This store has no blob {digest}.", digest=digest)
        if not _DIGEST.fullmatch(digest):
            raise missing
        try:
            yield
        except FileNotFoundError:
            raise missing from None
        except OSError as error:
            raise _storage(error, f"The blob {digest} cannot be read") from error

    def _at(self, name: str) -> Path:
        return self.folder / name

    def _name(self, digest: str) -> str:
        return f"{self.folder.name}/{digest}"


class Writer:
    """One content on its way. To be ended by `keep` or `drop`, by any thread; its calls do not overlap."""

    def __init__(self, disk: Disk, name: str, lock: threading.Lock, seal: Seal | None) -> None:
        self._disk = disk
        self._name = name
        self._lock = lock
        self._seal = seal
        self._plain = bytearray()
        self._size = 0
        self._hash = hashlib.sha256()
        self._there = True

    def write(self, data: bytes) -> None:
        """Raises OSError; then the content can only be dropped."""
        if self._size + len(data) > BYTES_MAX:
            raise OSError(errno.EFBIG, "a blob does not get larger")
        if self._seal is not None:
            self._plain += data
        else:
            self._disk.write(self._name, self._size, data)
        self._size += len(data)
        self._hash.update(data)

    def keep(self) -> str:
        """The digest. On return the content is durable under it. Waits for the disk. Raises OSError: it is dropped, as far
        as the disk still can; what stood under the digest before is whole."""
        digest = self._hash.hexdigest()
        try:
            if self._seal is not None:
                self._disk.write(self._name, 0, self._seal.seal_bytes(blob_context(digest), bytes(self._plain)))
            self._disk.sync_full(self._name)
            self._disk.release(self._name)
            with self._lock:
                self._disk.rename(self._name, digest)
                self._there = False
                self._disk.syncdir("")
        finally:
            self.drop()
        return digest

    def drop(self) -> None:
        """Takes away what is not kept. Does nothing after `keep`, and nothing twice. Raises nothing: what cannot be deleted
        now is collected later."""
        self._plain.clear()
        if self._there:
            self._disk.release(self._name)
            with contextlib.suppress(OSError):
                self._disk.unlink(self._name)


def _damaged(file: str, reason: str) -> errors.StoreDamaged:
    return errors.StoreDamaged(f"{file} is damaged: {reason}.", file=file, offset=0, reason=reason)


def _storage(error: OSError, what: str) -> errors.StorageError:
    name = errors.name_of(error)
    return errors.StorageError(f"{what} ({name}).", errno=name)
