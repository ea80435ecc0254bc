"""Disk space that is held for outcomes: when the disk is full, what has happened outside can still be recorded.

Knows: how the space is taken, given back and taken again. Does not know: what an outcome is, or what is written into the space
(`wal`). Nothing depends on what stands in the file.

It is kept in order: once it was given back, nothing else is recorded before it is whole again, or new work would use it up.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rpcagent.journal.disk import Disk

FILE = "RESERVE"
BYTES = 256 << 10
"""Of outcomes, which are 64 KiB at most by the limits of the tools, and a few hundred bytes as a rule."""

_LINE = b"." * 63 + b"\n"


class Reserve:
    """`size` in bytes; 0 holds nothing. `spent`: it was given back, and is not whole yet."""

    def __init__(self, disk: Disk, size: int) -> None:
        self._disk = disk
        self._size = size
        self._held = False
        self.spent = False
        self.syncs = 0

    def take(self) -> None:
        """At an opening. Where there is no room for it, the log does without."""
        if self._size:
            self._held = self._is_whole() or self._fill()

    def give_back(self) -> bool:
        """Its space is free on return. False: it holds none."""
        if not self._held:
            return False
        self._held, self.spent = False, True
        try:
            self._disk.truncate(FILE, 0)
            self._sync()  # some file systems free the space only then
        except OSError:
            return False
        return True

    def restore(self) -> bool:
        """Whether it is whole again."""
        if self._fill():
            self._held, self.spent = True, False
        return self._held

    def _is_whole(self) -> bool:
        try:
            return self._disk.exists(FILE) and self._disk.size(FILE) >= self._size
        except OSError:
            return False

    def _fill(self) -> bool:
        try:
            if not self._disk.exists(FILE):
                self._disk.create(FILE)
            self._disk.write(FILE, 0, (_LINE * (self._size // len(_LINE) + 1))[: self._size])
            self._sync()
        except OSError:
            with contextlib.suppress(OSError):
                self._disk.truncate(FILE, 0)  # what it could not hold must not be missing elsewhere
            return False
        return True

    def _sync(self) -> None:
        self._disk.sync_full(FILE)
        self.syncs += 1
