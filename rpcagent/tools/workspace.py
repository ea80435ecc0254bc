"""Paths inside a workspace, opened without a way out of it.

Knows: how to walk a path component by component from the workspace's own descriptor, so that nothing that changes
meanwhile can lead elsewhere; and what is refused: `..`, symbolic links, the store, and what is neither file nor directory.
Does not know: tools, results, or what is done with the descriptors. Standard library only: the search process imports it.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path

PATH_BYTES = 4_096
TEMPORARY = (".rpcagent-", ".tmp")
"""Start and end of the names of files that are being written; they are never listed or searched."""


class Refused(Exception):
    """The path cannot be had. `kind` is a stable word, the message a sentence for a person and a model."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message


class Workspace:
    """A directory, and what may be opened below it. `store` is the daemon's own directory, which may never be. What a
    pattern of `hidden` matches, and all below it, is not to be shown."""

    def __init__(self, root: str, store: str | None = None, hidden: Sequence[str] = ()) -> None:
        self.root = root
        self.hidden = tuple(hidden)
        self.store = store
        self._real = os.path.realpath(root)
        self._store_real = os.path.realpath(store) if store is not None else None
        self._store = _identity(store) if store is not None else None

    def split(self, path: str) -> tuple[str, ...]:
        """The components of `path` below the workspace; none for the workspace itself. Raises Refused.

        `..` is refused wherever it stands: what a rule of policy matched must be what is opened.
        """
        try:
            size = len(path.encode())
        except UnicodeEncodeError:
            raise Refused("path_refused", "The path is not valid Unicode.") from None
        if size > PATH_BYTES or "\0" in path:
            raise Refused("path_refused", f"A path has no NUL and at most {PATH_BYTES} bytes.")
        if path.startswith("/"):
            path = self._below(path)
        parts = tuple(part for part in path.split("/") if part not in {"", "."})
        if ".." in parts:
            raise Refused("path_refused", "A path may not contain `..`.")
        return parts

    def _below(self, path: str) -> str:
        for base in (self.root.rstrip("/"), self._real.rstrip("/")):
            if path == base or path.startswith(base + "/"):
                return path[len(base) :]
        raise Refused("path_refused", "The path is outside of the workspace.")

    @contextmanager
    def directory(self, parts: tuple[str, ...], *, create: bool = False) -> Iterator[int]:
        """A descriptor of the directory, closed on leaving. `create` makes what is missing, durably."""
        descriptor = self._open_root()
        try:
            for place, part in enumerate(parts):
                below = self._enter(descriptor, part, "/".join(parts[: place + 1]), create=create)
                os.close(descriptor)
                descriptor = below
            yield descriptor
        finally:
            os.close(descriptor)

    @contextmanager
    def file(self, parts: tuple[str, ...]) -> Iterator[tuple[int, os.stat_result]]:
        """A readable descriptor of a regular file and its state, closed on leaving. Never blocks on a pipe or a device."""
        if not parts:
            raise Refused("not_a_file", "The workspace is a directory, not a file.")
        with self.directory(parts[:-1]) as parent:
            descriptor = open_regular(parent, parts[-1], "/".join(parts))
        try:
            yield descriptor, os.fstat(descriptor)
        finally:
            os.close(descriptor)

    def hides(self, parts: tuple[str, ...]) -> bool:
        """Whether the place, or one that it lies in, is hidden."""
        paths = ("/".join(parts[:count]) for count in range(1, len(parts) + 1)) if self.hidden else ()
        return any(fnmatchcase(path, pattern) for path in paths for pattern in self.hidden)

    def is_store(self, entry: os.stat_result) -> bool:
        return self._store is not None and (entry.st_dev, entry.st_ino) == self._store

    def _open_root(self) -> int:
        if self._store_real is not None and f"{self._real}/".startswith(f"{self._store_real.rstrip('/')}/"):
            raise Refused("path_refused", "The workspace lies inside of the daemon's store.")
        try:
            return os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            raise Refused("no_workspace", "The workspace is not there, or is no directory.") from None

    def _enter(self, parent: int, name: str, shown: str, *, create: bool) -> int:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            descriptor = os.open(name, flags, dir_fd=parent)
        except FileNotFoundError:
            if not create:
                raise Refused("not_found", f"There is no directory {shown!r}.") from None
            os.mkdir(name, dir_fd=parent)
            os.fsync(parent)
            descriptor = os.open(name, flags, dir_fd=parent)
        except OSError as error:
            raise _why_not(error, parent, name, shown, "a directory") from None
        if self.is_store(os.fstat(descriptor)):
            os.close(descriptor)
            raise Refused("path_refused", "The daemon's store is not open to tools.")
        return descriptor


def open_regular(parent: int, name: str, shown: str) -> int:
    """A readable descriptor of the regular file `name` in `parent`. Raises Refused. The caller closes it."""
    try:
        # Looked at first, because opening some devices is itself an effect; and again after, because it may have changed.
        if not stat.S_ISREG(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
            raise _wrong_kind(parent, name, shown, "a regular file")
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(name, flags, dir_fd=parent)
    except FileNotFoundError:
        raise Refused("not_found", f"There is no file {shown!r}.") from None
    except OSError as error:
        raise _why_not(error, parent, name, shown, "a regular file") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _wrong_kind(parent, name, shown, "a regular file")
    return descriptor


def readable(name: str) -> str:
    """A file's name as text; bytes that are no UTF-8 are shown as replacement characters."""
    return os.fsencode(name).decode("utf-8", "replace")


def is_temporary(name: str) -> bool:
    return name.startswith(TEMPORARY[0]) and name.endswith(TEMPORARY[1])


def _identity(path: str) -> tuple[int, int] | None:
    try:
        found = Path(path).stat()
    except OSError:
        return None
    return (found.st_dev, found.st_ino)


def _why_not(error: OSError, parent: int, name: str, shown: str, wanted: str) -> Refused:
    if isinstance(error, PermissionError):
        return Refused("not_permitted", f"{shown!r} may not be opened (permissions).")
    return _wrong_kind(parent, name, shown, wanted)


def _wrong_kind(parent: int, name: str, shown: str, wanted: str) -> Refused:
    try:
        mode = os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode
    except OSError:
        return Refused("path_refused", f"{shown!r} cannot be opened.")
    if stat.S_ISLNK(mode):
        return Refused("path_refused", f"{shown!r} is a symbolic link; links are not followed.")
    return Refused("path_refused", f"{shown!r} is not {wanted}.")
