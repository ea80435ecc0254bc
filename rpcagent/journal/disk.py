"""The seam to the file system, and the lock on a store. The only file of the journal that knows descriptors.

Knows: how to write all of it or say what failed, how to make a name durable, how to make many durable at once, who owns
the store. Does not know: what the bytes mean, or what to do about an error: every OSError goes up as it came.

Descriptors are never inherited. A forked child shares them all the same, so it is disarmed: its copies are closed
(never unlocked: an unlock in the child would take the lock from the parent), and every call in it fails.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import os
import resource
import socket
import stat
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from rpcagent import errors

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

KEPT, LEAST_KEPT = 64, 8
"""Descriptors that a disk keeps open at most: an eighth of what the process may have, within these bounds. Above, the one
opened first is closed, and opened anew when it is used."""
ALONE = 16
"""Up to so many names are synced one by one; above, the whole file system at once, where that is known to be safe."""

_LOCK_TRIES = 10  # the file is never unlinked by us; someone who keeps doing it gets an error, not a loop


class NotSynced(OSError):
    """There was no descriptor to sync a file with: no sync was begun, so none has failed, and it can be tried again."""


class Disk(Protocol):
    """Names are relative to the store; a folder is `""` (the store), `"wal"`, `"runs/run_1"`. Every call may raise
    OSError, and FileNotFoundError only where a name is really not there. Nothing but `sync`, `sync_full`, `syncdir` and
    `sync_many` makes anything durable. A raised sync means: what was written since the last one may or may not last, and
    must not be synced again."""

    def names(self, folder: str) -> list[str]: ...
    def exists(self, name: str) -> bool: ...
    def read(self, name: str) -> bytes: ...
    def read_at(self, name: str, offset: int, size: int) -> bytes:
        """`size` bytes, fewer only where the file ends."""

    def size(self, name: str) -> int: ...

    def create(self, name: str) -> None:
        """A new, empty file of mode 0600; FileExistsError if there is one."""

    def write(self, name: str, offset: int, data: bytes) -> None:
        """All of `data`, or OSError; then any part of it may stand in the file."""

    def truncate(self, name: str, size: int) -> None: ...
    def sync(self, name: str) -> None:
        """The content, and its length, are durable."""

    def sync_full(self, name: str) -> None:
        """Content and all attributes are durable."""

    def rename(self, old: str, new: str) -> None:
        """Within one folder; replaces `new`. Durable after `syncdir`."""

    def unlink(self, name: str) -> None: ...
    def mkdir(self, name: str) -> None:
        """Mode 0700; FileExistsError if there is one. Durable after `syncdir` of the folder it is in."""

    def rmdir(self, name: str) -> None:
        """An empty folder. Durable after `syncdir` of the folder it is in."""

    def syncdir(self, folder: str) -> None:
        """The names in `folder` are durable. Once it was called, it needs no new descriptor for as long as the folder stays
        and few other names are used."""

    def sync_many(self, files: Sequence[str], folders: Sequence[str]) -> None:
        """As `sync` of each file, then `syncdir` of each folder; more may become durable. Raises for any of them, and
        then it is not known of any."""

    def release(self, name: str) -> None:
        """No more calls for this file are expected: its descriptor may go."""


class Fence(Protocol):
    """Whether this process still owns the store."""

    def held(self) -> bool: ...


def make_store_folder(path: Path) -> None:
    """The folder and its missing parents, mode 0700; their names are durable on return."""
    missing = []
    while not path.exists():
        missing.append(path)
        path = path.parent
    for folder in reversed(missing):
        with contextlib.suppress(FileExistsError):  # another process may be starting on the same store
            folder.mkdir(mode=0o700)
        _sync_folder(folder.parent)


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class RealDisk:
    """The files below `path`, which is made if it is missing. Keeps the descriptors of what it wrote and synced last.

    For one thread at a time; a disk that is only read from may be shared by many. A file that was written, closed (it was
    not among the last ones) and opened again still tells an error of its write-back with its sync: Linux reports one that
    nobody has seen to whoever syncs the file next."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._open: dict[str, int] = {}
        self._most = max(LEAST_KEPT, min(KEPT, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 8))
        self._forked = False
        make_store_folder(self.path)
        # From now on: a sync of the file system through this descriptor tells of every failed write since.
        self._open[""] = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        _armed.add(self)

    def names(self, folder: str) -> list[str]:
        return sorted(os.listdir(self._at(folder)))  # noqa: PTH208 - names, not paths

    def exists(self, name: str) -> bool:
        # Not Path.exists: that takes some errors for an absence.
        try:
            os.lstat(self._at(name))
        except FileNotFoundError:
            return False
        return True

    def read(self, name: str) -> bytes:
        with os.fdopen(_opened(self._at(name), os.O_RDONLY), "rb") as file:
            return file.read()

    def read_at(self, name: str, offset: int, size: int) -> bytes:
        descriptor = self._open.get(name)
        if descriptor is not None:
            return _read_all(descriptor, offset, size)
        descriptor = _opened(self._at(name), os.O_RDONLY)
        try:
            return _read_all(descriptor, offset, size)
        finally:
            _close_quietly([descriptor])

    def size(self, name: str) -> int:
        return os.lstat(self._at(name)).st_size

    def create(self, name: str) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._keep(name, os.open(self._at(name), flags, 0o600))

    def write(self, name: str, offset: int, data: bytes) -> None:
        descriptor = self._descriptor(name)
        done = os.pwrite(descriptor, data, offset)
        if done == len(data):
            return
        with memoryview(data) as rest:
            # A short write is the file system running out of something. Going on brings out what.
            while done < len(data):
                more = os.pwrite(descriptor, rest[done:], offset + done)
                if more == 0:
                    raise OSError(errno.ENOSPC, "the file takes no more bytes")
                done += more

    def truncate(self, name: str, size: int) -> None:
        os.ftruncate(self._descriptor(name), size)

    def sync(self, name: str) -> None:
        _data_sync(self._to_sync(name))

    def sync_full(self, name: str) -> None:
        _full_sync(self._to_sync(name))

    def rename(self, old: str, new: str) -> None:
        os.rename(self._at(old), self._at(new))  # noqa: PTH104
        self.release(new)
        if old in self._open:
            self._open[new] = self._open.pop(old)

    def unlink(self, name: str) -> None:
        os.unlink(self._at(name))  # noqa: PTH108
        self.release(name)

    def mkdir(self, name: str) -> None:
        os.mkdir(self._at(name), 0o700)  # noqa: PTH102

    def rmdir(self, name: str) -> None:
        os.rmdir(self._at(name))  # noqa: PTH106
        self.release(name)

    def syncdir(self, folder: str) -> None:
        """Its descriptor stays open: with a process out of descriptors, a name must still become durable."""
        path = self._at(folder)
        if folder in self._open and not os.path.samestat(os.stat(path), os.fstat(self._open[folder])):  # noqa: PTH116
            self.release(folder)  # another folder is in its place
        if folder not in self._open:
            try:
                self._keep(folder, os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
            except OSError as error:
                raise NotSynced(error.errno, error.strerror) from error
        os.fsync(self._open[folder])

    def sync_many(self, files: Sequence[str], folders: Sequence[str]) -> None:
        if len(files) + len(folders) > ALONE:
            root = self._open.get("")
            at_once = _sync_of_all(root) if root is not None else None
            if at_once is not None:
                self._at("")  # not in a forked child
                at_once()
                return
        for name in files:
            self.sync(name)
        for folder in folders:
            self.syncdir(folder)

    def release(self, name: str) -> None:
        descriptor = self._open.pop(name, None)
        if descriptor is not None:
            _close_quietly([descriptor])  # what counts was synced; a close has nothing to tell

    def close(self) -> None:
        """Closes all descriptors. Makes nothing durable."""
        for name in list(self._open):
            self.release(name)

    def _at(self, name: str) -> str:
        if self._forked:
            raise errors.StoragePoisoned("A forked child must not use the store of its parent.", errno="EBADF")
        return os.path.join(self.path, name)  # noqa: PTH118 - in the hot path

    def _descriptor(self, name: str) -> int:
        found = self._open.get(name)
        if found is None:
            found = _opened(self._at(name), os.O_RDWR)
            self._keep(name, found)
        return found

    def _to_sync(self, name: str) -> int:
        try:
            return self._descriptor(name)
        except OSError as error:
            raise NotSynced(error.errno, error.strerror) from error

    def _keep(self, name: str, descriptor: int) -> None:
        self._open[name] = descriptor
        while len(self._open) > self._most:
            self.release(next(other for other in self._open if other != ""))

    def disarm(self) -> None:
        self._forked = True
        _close_quietly(self._open.values())
        self._open.clear()


class StoreLock:
    """The one owner of a store: a kernel lock (flock) on its file LOCK, taken before anything is read.

    The kernel alone decides. What stands in the file (pid, host, since) is only for the message of the next one, and may
    be wrong, garbage or missing. The file is never unlinked; the lock ends with its descriptor, so also with the process.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path = path
        self._descriptor: int | None = descriptor
        _armed.add(self)

    @classmethod
    def take(cls, folder: Path | str, *, since: str) -> StoreLock:
        """Does not wait. `since` is a time for the message (RFC 3339).

        Raises StoreLocked (pid, host, since of the owner, null where not known), StorageError if the file cannot be
        opened or locked."""
        path = Path(folder) / "LOCK"
        try:
            make_store_folder(path.parent)
            for _ in range(_LOCK_TRIES):
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    told = _lock_text(descriptor)
                    os.close(descriptor)
                    raise errors.StoreLocked("Another process owns this store.", **told) from None
                except BaseException:
                    os.close(descriptor)
                    raise
                if _same_file(path, descriptor):
                    _write_lock_text(descriptor, since)
                    return cls(path, descriptor)
                os.close(descriptor)  # we locked a file that someone has just replaced
        except OSError as error:
            name = errors.name_of(error)
            raise errors.StorageError(f"The store cannot be locked ({name}).", errno=name) from error
        raise errors.StorageError("The lock file keeps changing.", errno="ESTALE")

    def held(self) -> bool:
        """Whether the file that others would lock is still the one that we hold. Cheap: two stat calls."""
        if self._descriptor is None:
            return False
        try:
            return _same_file(self._path, self._descriptor)
        except OSError:
            return False

    def close(self) -> None:
        """Gives the store up. By closing only: an explicit unlock would also free what a forked child shares."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def disarm(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            _close_quietly([descriptor])


def _same_file(path: Path, descriptor: int) -> bool:
    try:
        there = os.lstat(path)
    except FileNotFoundError:
        return False
    here = os.fstat(descriptor)
    return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)


def _write_lock_text(descriptor: int, since: str) -> None:
    text = msgspec.json.encode({"pid": os.getpid(), "host": socket.gethostname(), "since": since}) + b"\n"
    with contextlib.suppress(OSError):  # a full disk must not keep the owner out
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, text, 0)


def _lock_text(descriptor: int) -> dict[str, Any]:
    told: dict[str, Any] = {"pid": None, "host": None, "since": None}
    with contextlib.suppress(OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        found = msgspec.json.decode(os.pread(descriptor, 4096, 0))
        if isinstance(found, dict):
            told = {key: value if isinstance(value := found.get(key), int | str) else None for key in told}
    return told


def _opened(path: str, flags: int) -> int:
    """A regular file, never what stands in its place: a pipe would hold its reader up for ever, a link lead elsewhere."""
    descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no regular file")
    return descriptor


def _read_all(descriptor: int, offset: int, size: int) -> bytes:
    data = os.pread(descriptor, size, offset)
    while len(data) < size:  # the kernel gives at most 2 GiB at once
        more = os.pread(descriptor, size - len(data), offset + len(data))
        if not more:
            break
        data += more
    return data


# A sync of a whole file system tells of failed writes since Linux 5.8, and only file systems that keep the books
# themselves do so for sure: not those that stand on others (overlay), in another process (FUSE) or on another machine.
_SYNCFS_SINCE = (5, 8)
_KNOWN_TO_TELL = frozenset({0xEF53, 0x58465342, 0x9123683E, 0xF2F52010, 0x01021994})  # ext, xfs, btrfs, f2fs, tmpfs


def _sync_of_all(root: int) -> Callable[[], None] | None:
    """What makes all of the file system of the folder `root` durable, raising OSError; None if it may not be used."""
    calls = _file_system_calls()
    if calls is None:
        return None
    kind, syncfs = calls
    return functools.partial(syncfs, root) if kind(root) in _KNOWN_TO_TELL else None


@functools.cache
def _file_system_calls() -> tuple[Callable[[int], int], Callable[[int], None]] | None:
    """What kind of file system an open folder is on, and syncfs; None on a platform without. Loaded at first use."""
    system = os.uname()
    if system.sysname != "Linux" or _numbers(system.release) < _SYNCFS_SINCE:
        return None
    import ctypes

    try:
        library = ctypes.CDLL(None, use_errno=True)
        fstatfs, sync = library.fstatfs, library.syncfs
    except (OSError, AttributeError):
        return None

    def kind(descriptor: int) -> int:
        told = ctypes.create_string_buffer(512)
        if fstatfs(descriptor, told) != 0:
            return 0
        return ctypes.c_long.from_buffer(told).value & 0xFFFFFFFF

    def syncfs(descriptor: int) -> None:
        if sync(descriptor) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))

    return kind, syncfs


def _numbers(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in release.split("-", maxsplit=1)[0].split(".")[:2] if part.isdigit())


def _data_sync(descriptor: int) -> None:
    full = getattr(fcntl, "F_FULLFSYNC", None)
    if full is not None:  # macOS: fsync leaves the data in the cache of the drive
        fcntl.fcntl(descriptor, full)
    else:
        os.fdatasync(descriptor)


def _full_sync(descriptor: int) -> None:
    full = getattr(fcntl, "F_FULLFSYNC", None)
    if full is not None:
        fcntl.fcntl(descriptor, full)
    else:
        os.fsync(descriptor)


def _close_quietly(descriptors: Any) -> None:
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)


_armed: weakref.WeakSet[RealDisk | StoreLock] = weakref.WeakSet()


def _disarm_all() -> None:
    for owner in list(_armed):
        owner.disarm()


os.register_at_fork(after_in_child=_disarm_all)
