"""The archive port over files: runs in folders of their own, the index of those that ended, tombstones.

Knows: which thread touches which file, and how a payload is opened and sealed on its way. Does not know: the formats
(`runfiles`, `manifest`, `tombstones`, `index`), the order of a checkpoint (`checkpoint`), or when one is due.

Two threads at most work for it: one saves, one reads, and neither waits for the other. Each has a disk and an index of its
own, and the event loop waits for neither.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import anyio
import anyio.to_thread
import msgspec
from msgspec import Raw
from msgspec.structs import replace

from rpcagent import errors
from rpcagent.journal import runfiles, seal
from rpcagent.journal.blobs import GRACE_S, Blobs
from rpcagent.journal.checkpoint import Change, Checkpointer
from rpcagent.journal.disk import Fence, RealDisk
from rpcagent.journal.ended import ended_row, rows_of, uncounted
from rpcagent.journal.index import Ended, Index
from rpcagent.journal.known import Known
from rpcagent.journal.lookup import Lookup
from rpcagent.journal.manifest import Header, Manifest, TombstoneFile
from rpcagent.journal.runfiles import Line, State
from rpcagent.journal.summaries import decoded, opened_summary
from rpcagent.journal.tombstones import Named, Tombstones
from rpcagent.journal.trim import trim
from rpcagent.journal.wal import Mark
from rpcagent.policy.retention import Retention, due
from rpcagent.runs import summary
from rpcagent.runs.ports import Checkpoint, Due, Recorded, T
from rpcagent.runs.summary import Summary

PAGE_BYTES = 1 << 20


class Marking(Protocol):
    """What the archive asks of the commit port."""

    store_id: str
    epoch: int

    async def append(self, run_id: str, epoch: int, expected_seq: int, count: int, body: bytes) -> Any: ...
    async def mark(self) -> Mark: ...


class FileArchive:
    """`folder` is the store; `manifest` the one that it was opened with. `looking`: another process owns it, or
    it can only be read, so that nothing is written. `note` tells of an index that had to be made anew,
    and of runs that should be there and are not."""

    def __init__(
        self,
        folder: Path,
        journal: Marking,
        manifest: Manifest | None,
        *,
        app: str,
        lock: Fence | None,
        seal: seal.Seal,
        retention: Retention,
        blobs: Blobs,
        note: Callable[[str], None],
        looking: bool = False,
    ) -> None:
        self._folder = folder
        self._journal = journal
        self._app = app
        self._seal = seal
        self._retention = retention
        self._blobs = blobs
        self._note = note
        self._looking = looking
        self._ended: Mapping[str, int] = manifest.ended if manifest is not None else {}
        self._any = manifest is not None
        self._saving, self._reading = anyio.CapacityLimiter(1), anyio.CapacityLimiter(1)
        self._writer, self._reader = RealDisk(folder), RealDisk(folder)
        self._checkpointer = Checkpointer(self._writer, lock)
        named = manifest.tombstones if manifest is not None else ()
        self._tombstones = Tombstones(self._writer, [Named(f.name, f.count, f.sum) for f in named])
        self._found = replace(manifest, live={}) if manifest is not None else None
        self._live = len(manifest.live) if manifest is not None else 0
        self._known: Known | None = None if self._any else Known(())
        self._lookup = Lookup(
            folder, manifest.base.seq if manifest is not None else 0, journal.store_id, self._ended, filed=self._filed,
            note=note, saving=self._saving, reading=self._reading, looking=looking,
        )  # fmt: skip
        self._learning = anyio.Lock()
        self._in_log: tuple[Collection[str], Collection[str]] = ((), ())
        self._places = manifest.places if manifest is not None else 1
        self._empty: set[str] = set()  # folders of runs without a state, of which nothing else tells
        self._uncounted: dict[str, Summary] = {}
        self.lost: int | None = None if self._any else 0

    async def prepare(self) -> None:
        """Reads the tombstones. Raises StoreDamaged, StorageError."""
        if self._any or self._exists(runfiles.FOLDER):  # a new store is spared the thread
            await anyio.to_thread.run_sync(self._prepare, limiter=self._saving)

    def _prepare(self) -> None:
        if self._any:
            "" in self._tombstones  # noqa: B015 - read now, so that no later question touches the disk
        elif self._names(runfiles.FOLDER):
            self.lost = None  # a checkpoint or an import was cut off before there was a manifest

    def replayed(self, begun: Collection[str], named: Collection[str]) -> None:
        self._in_log = begun, named

    async def learn(self) -> None:
        """As the port says; from then on a new run needs no look at the disk."""

        def look(index: Index) -> tuple[list[str], list[str]]:
            return index.runs(), index.runs(self._places)

        async with self._learning:
            if self.lost is not None:
                return
            try:
                ended = await self._lookup.ask(look) if self._any else ([], [])
            except errors.StorageError:
                ended = None
            async with self._lookup.changing:
                await anyio.to_thread.run_sync(self._learn, ended, limiter=self._saving)

    def _learn(self, ended: tuple[list[str], list[str]] | None) -> None:
        begun, named = map(set, self._in_log)
        indexed, beyond = map(set, ended or ((), ()))
        names = indexed.union(filter(runfiles.names_a_run, self._names(runfiles.FOLDER)))
        # No manifest counts a folder without a state, nor what a checkpoint or an import filed before it was cut off.
        strays = {run for run in names - indexed - named if not self._exists(runfiles.state_of(run))}
        dead = (
            {run for run in names if run in self._tombstones}
            if (self._tombstones.named or self._tombstones.pending)
            else set()
        )
        unsure = (names - indexed | beyond) - named - begun - strays - dead
        fresh = dict(uncounted(self._writer, unsure, self._places))
        there = names - begun - strays - dead - fresh.keys() | named
        lost = max(0, self._live + sum(self._ended.values()) - len(there))
        if fresh and not self._looking:
            rows = list(rows_of(self._writer, fresh, self._note))
            self._lookup.update(lambda: rows, (), self._lookup.through, self._ended)
        if lost and ended is None:
            raise errors.StorageError(
                "it is not known which runs there are: their index cannot be used now", errno="EIO"
            )
        if lost:
            self._note(
                f"{lost} runs of this store are missing: until they are back, or given up with `rpcagent repair`, no other can "
                "begin; `rpcagent verify` tells more"
            )
        # Also those without files: the key of one that lost them must not begin a fresh run.
        self._known, self.lost, self._in_log = Known(names), lost, ((), ())
        self._empty, self._uncounted = strays, fresh

    @property
    def uncounted(self) -> bool:
        return bool(self._uncounted)

    def adopt(self) -> list[Summary]:
        uncounted, self._uncounted = self._uncounted, {}
        return list(uncounted.values())

    def _exists(self, name: str) -> bool:
        try:
            return self._writer.exists(name)
        except NotADirectoryError:
            return False
        except OSError as error:
            found = errors.name_of(error)
            raise errors.StorageError(f"{name} cannot be looked at ({found}).", errno=found) from error

    async def settle(self) -> None:
        """What need not be done before the first answer: learns which runs have files, and deletes what a crash did not let the
        last checkpoint delete. Raises StorageError, StoreDamaged."""
        if self.lost is None:
            await self.learn()
        await anyio.to_thread.run_sync(self._settle, limiter=self._saving)

    def _settle(self) -> None:
        if self._found is not None:
            self._checkpointer.sweep(self._found)
            self._found = None
            trim()  # the manifest was read whole

    def close(self) -> None:
        self._lookup.close()
        self._writer.close()
        self._reader.close()

    # Questions that need no disk

    @property
    def any_held(self) -> bool:
        return self._any or bool(self._tombstones.pending)

    @property
    def retains_all(self) -> bool:
        return not self._retention.rules

    def may_hold(self, run_id: str) -> bool:
        return (self._any or self.lost is None) and (self._known is None or run_id in self._known)

    def _had_files(self, run_id: str) -> bool:
        """In this process, whatever became of them and of the index since."""
        return self._known is not None and run_id in self._known and run_id not in self._empty

    def deleted(self, run_id: str) -> bool:
        return run_id in self._tombstones

    def bury(self, run_id: str) -> None:
        self._tombstones.add(run_id)

    # Reading

    async def read(
        self, run_id: str, fold: Callable[[Iterator[bytes]], T], *, least: int = 0
    ) -> tuple[T, Summary] | None:
        if not least and not self.may_hold(run_id):
            return None
        # A run whose files are gone, or older than they should be, must not be taken for one that never was, or never went so
        # far: its effects would be made again.
        if not least:
            row = await self._lookup.ask(lambda index: index.find(run_id)) if self._any else None
            if row is not None:
                least = max(1, decoded(run_id, row.summary).last_seq)
            elif self._had_files(run_id):
                least = 1
        return await self._off_loop(self._read, run_id, least, fold)

    def _read(self, run_id: str, least: int, fold: Callable[[Iterator[bytes]], T]) -> tuple[T, Summary] | None:
        history = runfiles.history_of(run_id)
        try:
            # What an interrupted checkpoint leaves of a first history is in the log as well, and then nobody asks here.
            named = least > 0 or self._reader.exists(history)
            found = runfiles.read_bodies(self._reader, run_id, named)
        finally:
            self._reader.release(history)
        if found is None:
            return None
        state, lines = found
        if state.last_seq < least:
            reason = f"the files end at event {state.last_seq}, and event {least} was recorded"
            raise runfiles.damaged(run_id, runfiles.state_of(run_id), 0, reason)
        return fold(self._opened(run_id, line) for line in lines), self._heads(run_id, state)

    def _opened(self, run_id: str, line: Line) -> bytes:
        return self._seal.open(seal.record_context(run_id, line.first), line.body)

    def _heads(self, run_id: str, state: State) -> Summary:
        return opened_summary(self._seal, run_id, state.summary)

    async def heads(self, run_id: str) -> Summary | None:
        row = await self._lookup.ask(lambda index: index.find(run_id))
        return opened_summary(self._seal, run_id, row.summary) if row is not None else None

    async def records(self, run_id: str, after_seq: int) -> list[Recorded]:
        return await self._off_loop(self._records, run_id, after_seq)

    def _records(self, run_id: str, after_seq: int) -> list[Recorded]:
        state = runfiles.read_state(self._reader, run_id)
        if state is None:
            raise runfiles.damaged(run_id, runfiles.state_of(run_id), 0, "state.json is missing")
        try:
            lines = runfiles.read_page(self._reader, run_id, state, after_seq, PAGE_BYTES)
        finally:
            self._reader.release(runfiles.history_of(run_id))
        return [Recorded(line.first, line.count, self._opened(run_id, line)) for line in lines]

    async def ended(
        self, place: int, limit: int, *, namespace: str | None, agent: str | None, statuses: Collection[str]
    ) -> list[tuple[str, Summary]]:
        if not self._any:
            return []

        def page(index: Index) -> list[tuple[str, Summary]]:
            found: list[Ended] = []
            begin = place
            while len(found) < limit:
                wanted = limit - len(found)
                rows = index.page(begin, wanted, namespace=namespace, agent=agent, statuses=statuses)
                # One that was deleted leaves the index at the next checkpoint only.
                found += [row for row in rows if row.run not in self._tombstones]
                if len(rows) < wanted:
                    break
                begin = rows[-1].place + 1
            return [(row.run, self._listed(row)) for row in found]

        return await self._lookup.ask(page)

    def _listed(self, row: Ended) -> Summary:
        """Heads are readable without a key, so a run that none opens is no reason to show no other."""
        try:
            return opened_summary(self._seal, row.run, row.summary)
        except (errors.Incompatible, errors.StoreDamaged) as error:
            heads = decoded(row.run, row.summary)
            view = {"runId": row.run, "status": heads.status, "lastSeq": heads.last_seq, "damaged": error.message}
            return replace(heads, body=Raw(msgspec.json.encode({"view": view, "attention": []})))

    async def due(self, now: datetime) -> list[Due]:
        if not self._any or not self._retention.rules:
            return []

        if self.lost is None:
            await self.learn()  # while the manifest still counts what goes now
        horizon = self._retention.horizon(now)
        if horizon is None:
            return []

        def look(rows: Iterable[Ended]) -> list[Due]:
            gone = due(rows, now, self._retention)
            return [found for one in gone if (found := self._due(one.run, one.reason)) is not None]

        try:
            return await self._lookup.ask(lambda index: look(index.expired(horizon)))
        except errors.StoragePoisoned:
            raise
        except errors.StorageError:
            # A disk that is full to the last byte has no room for the index either, and what goes now makes room. What
            # this does not find is kept, and lets no other run seem older than it is.
            return await anyio.to_thread.run_sync(lambda: look(self._filed()), limiter=self._saving)

    def _due(self, run_id: str, reason: str) -> Due | None:
        """The index only proposes: what the run's own files say counts. What cannot be read is kept."""
        try:
            state = runfiles.read_state(self._reader, run_id)
            heads = decoded(run_id, state.summary) if state is not None else None
        except (errors.StoreDamaged, errors.StorageError, errors.Incompatible):
            return None
        if state is None or heads is None or heads.ended_at is None or heads.unresolved:
            return None
        if heads.place >= self._places:
            return None  # no manifest counts it yet
        return Due(run_id=run_id, heads=heads, reason=reason, size=state.size)

    async def remove(self, run_ids: Sequence[str]) -> None:
        await anyio.to_thread.run_sync(self._checkpointer.remove, run_ids, limiter=self._saving)

    async def collect_blobs(self, referenced: Collection[str], oldest_step_s: float) -> int:
        def look(index: Index) -> set[str] | None:
            missing = sum(index.counts().values()) < sum(self._ended.values())
            # What no manifest counts yet could stand for one that is missing.
            return None if missing or index.runs(self._places) else set(index.blobs())

        ended = await self._lookup.ask(look) if self._any else set()
        if ended is None or self.lost is None:
            return 0  # the files of some runs are damaged, and what they refer to is not known
        needed = {*referenced, *ended}
        grace_s = max(GRACE_S, oldest_step_s)
        work = partial(self._blobs.collect, needed, now=time.time(), grace_s=grace_s)
        return len(await anyio.to_thread.run_sync(work, limiter=self._saving))

    # The files of the runs

    def _filed(self, note: Callable[[str], None] = lambda _text: None) -> Iterator[Ended]:
        """The ended runs as their own files tell, in no order."""
        names = filter(runfiles.names_a_run, self._names(runfiles.FOLDER))
        kept = (run for run in names if run not in self._tombstones)
        return rows_of(self._reader if self._looking else self._writer, kept, note)

    # Saving

    async def free_bytes(self) -> int | None:
        return await anyio.to_thread.run_sync(self._free_bytes, limiter=self._saving)

    def _free_bytes(self) -> int | None:
        with contextlib.suppress(OSError):
            found = os.statvfs(self._folder)
            return found.f_bavail * found.f_frsize
        return None

    async def mark(self) -> Mark:
        return await self._journal.mark()

    async def carry(self, run_id: str, records: Sequence[Recorded]) -> None:
        for record in records:
            body = self._seal.seal(seal.record_context(run_id, record.first), record.body)
            answer = await self._journal.append(run_id, self._journal.epoch, record.first - 1, record.count, body)
            if answer != "ok":
                raise errors.StoragePoisoned(f"the log answers {answer} to records of a damaged run")

    async def save(self, mark: Any, checkpoint: Checkpoint) -> None:
        async with self._lookup.changing:
            await anyio.to_thread.run_sync(self._save, mark, checkpoint, limiter=self._saving)

    def _save(self, mark: Mark, checkpoint: Checkpoint) -> None:
        graves = self._tombstones.next_file(self._names("tombstones"))
        named = graves.named if graves is not None else self._tombstones.named
        header = Header(
            store_id=self._journal.store_id,
            app=self._app,
            epoch=self._journal.epoch,
            at=checkpoint.at.astimezone(UTC).isoformat().replace("+00:00", "Z"),
            places=checkpoint.places,
            ended=dict(checkpoint.ended),
            tombstones=tuple(TombstoneFile(file.name, file.count, file.sum) for file in named),
            kid=self._seal.kid or "",
        )
        self._checkpointer.write(
            replace(mark, ends={run: end for run, end in mark.ends.items() if run not in checkpoint.carried}),
            header,
            self._changes(checkpoint),
            ((run_id, self._sealed(run_id, heads, body)) for run_id, heads, body in checkpoint.live),
            checkpoint.deleted,
            (graves.name, graves.data) if graves is not None else None,
            lambda: self._update_index(mark.seq, checkpoint),
        )
        if graves is not None:
            self._tombstones.filed(graves)
        if self._known is not None:
            self._known.add(one.run_id for one in checkpoint.filed)
            self._empty.difference_update(one.run_id for one in checkpoint.filed)
        self._ended, self._places, self._any = header.ended, header.places, True
        self._lookup.covers(mark.seq, header.ended)
        trim()  # of what the checkpoint before let go

    def _changes(self, checkpoint: Checkpoint) -> Iterator[Change]:
        for one in checkpoint.filed:
            lines = [
                Line(r.first, r.count, self._seal.seal(seal.record_context(one.run_id, r.first), r.body))
                for r in one.records
            ]
            yield Change(one.run_id, lines, self._sealed(one.run_id, one.heads, one.body))

    def _sealed(self, run_id: str, heads: Summary, body: bytes) -> bytes:
        return summary.encode(heads, self._seal.seal(seal.summary_context(run_id, heads.last_seq), body))

    def _update_index(self, through: int, checkpoint: Checkpoint) -> None:
        rows = [one for one in checkpoint.filed if not one.heads.live]
        if rows or checkpoint.deleted or self._any:  # else nothing has ended yet, and there is nothing to find
            self._lookup.update(lambda: self._new_rows(rows), checkpoint.deleted, through, checkpoint.ended)

    def _new_rows(self, filed: Iterable[Any]) -> Iterator[Ended]:
        for one in filed:
            state = runfiles.read_state(self._writer, one.run_id)
            if state is not None and (row := ended_row(one.run_id, state, one.heads)) is not None:
                yield row

    def _names(self, folder: str) -> list[str]:
        try:
            return self._writer.names(folder)
        except FileNotFoundError:
            return []
        except OSError as error:
            name = errors.name_of(error)
            raise errors.StorageError(f"The names in {folder} cannot be read ({name}).", errno=name) from error

    async def _off_loop(self, work: Callable[..., T], *args: Any) -> T:
        return await anyio.to_thread.run_sync(work, *args, limiter=self._reading)
