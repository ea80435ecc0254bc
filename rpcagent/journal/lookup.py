"""What is asked of ended runs, and which index answers: the one in the store, as its owner keeps it or as it stands, or one of our
own where that is of no use.

Knows: on which thread the index is opened, made anew, read and written, and who waits for whom. Does not know: SQL (`index`),
what stands in the files of a run (`ended`), or what is asked.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import anyio
import anyio.to_thread

from rpcagent import errors
from rpcagent.journal.index import FILE_NAME, Ended, Index, IndexUnusable, set_aside
from rpcagent.journal.looking import Private, index_to_look
from rpcagent.runs.ports import T

Note = Callable[[str], None]


class Lookup:
    """`through`, `store_id` and `counts` are those of the manifest, as in `Index.open_or_rebuild`. `filed` gives the ended runs as
    their own files tell, and tells `note` which it leaves out. `looking`: nothing may be written.

    The limiters are one thread each: `saving` writes, `reading` reads, and neither waits for the other. Whoever holds `changing`
    keeps the index from being opened or dropped."""

    def __init__(
        self,
        folder: Path,
        through: int,
        store_id: str,
        counts: Mapping[str, int],
        *,
        filed: Callable[[Note], Iterator[Ended]],
        note: Note,
        saving: anyio.CapacityLimiter,
        reading: anyio.CapacityLimiter,
        looking: bool,
    ) -> None:
        self._folder, self._store_id = folder, store_id
        self.through, self._counts = through, counts
        self._filed, self._note = filed, note
        self._saving, self._reading, self._looking = saving, reading, looking
        self._written: Index | None = None
        self._read: Index | None = None
        self.changing, self._using = anyio.Lock(), threading.Lock()

    async def ask(self, question: Callable[[Index], T]) -> T:
        """The answer of the index, which is made anew where its file is of no use. Raises StorageError."""
        if self._looking:
            try:
                return await anyio.to_thread.run_sync(self._asked, question, limiter=self._reading)
            except (IndexUnusable, errors.StorageError):
                return await anyio.to_thread.run_sync(self._asked_files, question, limiter=self._reading)
        for attempt in range(2):
            if self._written is None:  # else nobody waits for a checkpoint that is being saved
                async with self.changing:
                    if self._written is None:
                        await anyio.to_thread.run_sync(self._open, attempt > 0, limiter=self._saving)
            try:
                return await anyio.to_thread.run_sync(self._asked, question, limiter=self._reading)
            except IndexUnusable:
                async with self.changing:
                    await anyio.to_thread.run_sync(self._drop, limiter=self._saving)
        raise errors.StorageError("the index of ended runs cannot be used", errno="EIO")

    def update(
        self, rows: Callable[[], Iterable[Ended]], removed: Iterable[str], through: int, counts: Mapping[str, int]
    ) -> None:
        """As `Index.update`, on the thread that saves, while `changing` is held; `counts`: how many there are in files then.
        Raises StorageError, StoragePoisoned."""
        for anew in (False, True):
            index = self._written or self._open(anew, counts)
            try:
                index.update(rows(), removed, through, self._store_id)
            except IndexUnusable:
                if anew:
                    raise errors.StorageError("the index of ended runs cannot be written", errno="EIO") from None
                self._drop()
            else:
                return

    def covers(self, through: int, counts: Mapping[str, int]) -> None:
        """There is a new manifest."""
        self.through, self._counts = through, counts

    def close(self) -> None:
        """Gives the files up."""
        for index in (self._written, self._read):
            if index is not None:
                index.close()

    def _asked(self, question: Callable[[Index], T]) -> T:
        with self._using:
            if self._read is None:
                self._read = self._open_to_read()
            found = question(self._read)
            if not self._read.unchanged():
                raise IndexUnusable("it was written while it was read")
            return found

    def _open_to_read(self) -> Index:
        if self._looking:
            return index_to_look(self._folder, self.through, self._store_id, self._counts)
        return Index(self._folder / FILE_NAME)

    def _asked_files(self, question: Callable[[Index], T]) -> T:
        """From now on by an index of our own, made of what the files of the runs say."""
        with self._using:
            if not isinstance(self._read, Private):
                if self._read is not None:
                    self._read.close()
                self._read = None
                self._read = Private.of(self._filed(self._note), self.through, self._store_id)
            return question(self._read)

    def _drop(self) -> None:
        with self._using:
            self.close()
            self._written = self._read = None

    def _open(self, anew: bool, counts: Mapping[str, int] | None = None) -> Index:
        """`counts`: how many there are in files, where a checkpoint has filed more than the last manifest knows."""
        path = self._folder / FILE_NAME
        for done in set_aside(path):
            self._note(done)
        if not anew:
            try:
                self._written = Index.open_or_rebuild(path, _unfit, self.through, self._store_id, self._counts)
            except _Unfit:
                pass
            else:
                return self._written
        known = self._counts if counts is None else counts
        self._written = Index.rebuild(path, self._rows, self.through, self._store_id, known)
        return self._written

    def _rows(self) -> Iterator[Ended]:
        if sum(self._counts.values()):
            self._note("the index of ended runs is made anew")
        yield from self._filed(self._note)


class _Unfit(Exception):
    """There is no index that could be used as it is."""


def _unfit() -> Iterable[Ended]:
    raise _Unfit
