"""One opened store: its log, its archive, its runs, and what keeps the log short. How they are put together, and in which order.

Knows: that the manifest is read before the log, the log before the runs, and that nothing is served before recovery is
durable. Does not know: the wire, or what models and tools there are.
"""

from __future__ import annotations

import contextlib
import gc
import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import anyio.to_thread

from rpcagent import __version__, errors
from rpcagent.journal import checkpoint, reading, reserve, seal, tail
from rpcagent.journal.archive import FileArchive
from rpcagent.journal.blobs import Blobs
from rpcagent.journal.commit import GroupCommit
from rpcagent.journal.disk import Fence, RealDisk
from rpcagent.journal.manifest import FILE, Manifest
from rpcagent.journal.record import Entry
from rpcagent.journal.sealed import SealedCommit
from rpcagent.journal.summaries import opened_summary
from rpcagent.journal.wal import Wal
from rpcagent.policy.retention import Retention
from rpcagent.runs.keeper import Keeper
from rpcagent.runs.ports import Archive, Clock, Journal, Recorded
from rpcagent.runs.supervisor import Supervisor

LATEST = datetime(9000, 1, 1, tzinfo=UTC)
"""No clock begins later, whatever a log says: every duration still fits behind it."""


class SystemClock:
    """Wall time at the start of the process, or the last instant the log knows where that is later, and from there on by
    a clock that no one can set and that goes on while the machine sleeps."""

    def __init__(self) -> None:
        self._base = datetime.now(UTC)
        self._began = _elapsed()

    def now(self) -> datetime:
        return self._base + timedelta(seconds=_elapsed() - self._began)

    def not_before(self, instant: datetime) -> None:
        ahead = min(instant, LATEST) - self.now()
        if ahead > timedelta(0):
            self._base += ahead


def _elapsed() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


def utc() -> str:
    """The wall clock, RFC 3339 to the millisecond."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


KEEP_ALL = Retention()


@dataclass
class Store:
    """`journal` is the log's own commit port, below any sealing."""

    journal: GroupCommit
    archive: FileArchive
    supervisor: Supervisor
    keeper: Keeper
    dropped_tail_bytes: int

    async def close(self) -> None:
        """Makes the watermark durable and gives all descriptors back."""
        await self.journal.close()
        self.archive.close()


Build = Callable[[Journal, Archive, Clock, Blobs], Supervisor]
"""The blobs are those of the archive: one object, so that none is collected while it is written again."""


async def open_store(
    folder: Path,
    lock: Fence | None,
    build: Build,
    *,
    sealing: Callable[[str], seal.Seal] = lambda _store_id: seal.Plain(),
    retention: Retention = KEEP_ALL,
    note: Callable[[str], None] = lambda _text: None,
) -> Store:
    """Reads the manifest and the log after it, and takes in all live runs. `build` makes the supervisor, `sealing` what opens
    payloads of the store with this id. The open pass is still to be made.

    Raises StoreDamaged, StoreTooNew, StorageError, StoragePoisoned as `Wal.open`; KeyMissing where no key opens a payload."""
    with contextlib.ExitStack() as undo:
        disk = RealDisk(folder)
        undo.callback(disk.close)
        manifest = checkpoint.read_manifest(disk)
        if manifest is not None:
            # Before anything is written: what came in would be in the clear, or under a key that this store does not know.
            sealing(manifest.store_id).require(manifest.kid)
        wal = _open_log(disk, manifest, lock)
        undo.callback(wal.close)
        opening = sealing(wal.store_id)
        records = _opened(wal.entries(), opening)
        undo.pop_all()
    journal = GroupCommit(wal)
    port: Any = journal if opening.kid is None else SealedCommit(journal, opening)
    blobs = Blobs(folder / "blobs", opening)
    archive = FileArchive(
        folder,
        journal,
        manifest,
        app=__version__,
        lock=lock,
        seal=opening,
        retention=retention,
        blobs=blobs,
        note=note,
    )
    clock = SystemClock()
    gc.disable()  # as in the command line: what is replayed stays
    try:
        supervisor = build(port, archive, clock, blobs)
        await archive.prepare()
        keeper = Keeper(supervisor)
        if manifest is not None:
            _take_in(supervisor, keeper, manifest, opening)
        await supervisor.replay(records)
        keeper.replayed()
    except BaseException:
        await journal.close()
        archive.close()
        raise
    finally:
        gc.freeze()
        gc.enable()
    if supervisor.known_until is not None:
        clock.not_before(supervisor.known_until)
    return Store(journal, archive, supervisor, keeper, wal.dropped_tail_bytes)


async def look_at_store(
    folder: Path, build: Build, *, sealing: Callable[[str], seal.Seal], note: Callable[[str], None]
) -> Store:
    """As `open_store`, for a store that another process owns or that can only be read: what is acknowledged at this moment.
    Claims and writes nothing, and can record nothing. Raises StoreDamaged, StoreTooNew, StorageError, KeyMissing."""
    disk = _disk_to_look(folder)
    try:
        found, entries = await anyio.to_thread.run_sync(reading.read_all, disk)
    finally:
        disk.close()
    opening = sealing(found.store_id)
    if found.manifest is not None:
        opening.require(found.manifest.kid)
    journal: Any = Unwritable(found.store_id, found.epoch)
    blobs = Blobs(folder / "blobs", opening)
    archive = FileArchive(
        folder,
        journal,
        found.manifest,
        app=__version__,
        lock=None,
        seal=opening,
        retention=KEEP_ALL,
        blobs=blobs,
        note=note,
        looking=True,
    )
    try:
        supervisor = build(journal, archive, SystemClock(), blobs)
        await archive.prepare()
        keeper = Keeper(supervisor)
        if found.manifest is not None:
            _take_in(supervisor, keeper, found.manifest, opening)
        await supervisor.replay(_opened(entries, opening))
    except BaseException:
        archive.close()
        raise
    return Store(journal, archive, supervisor, keeper, 0)


def _disk_to_look(folder: Path) -> RealDisk:
    try:
        if not folder.exists():
            raise errors.StorageError(f"there is no store at {folder}", retryable=False, errno="ENOENT")
        return RealDisk(folder)
    except OSError as error:
        raise reading.unreadable(str(folder), error) from error


class Unwritable:
    """The log of a store that is only looked at."""

    def __init__(self, store_id: str, epoch: int) -> None:
        self.store_id, self.epoch = store_id, epoch

    async def append(self, *_: Any, **__: Any) -> Any:
        raise errors.StorageError("this is only a look at the store", errno="EROFS")

    def health(self) -> dict[str, Any]:
        """As that of a log that has written nothing."""
        return {"state": "ok", "errno": None, "syncs": 0, "records": 0, "bytes": 0, "waiting": 0}

    async def close(self) -> None:
        """There is nothing to close."""


def _open_log(disk: RealDisk, manifest: Manifest | None, lock: Fence | None) -> Wal:
    return Wal.open(
        disk,
        draw_store_id=lambda: "sto_" + secrets.token_hex(12),
        app=__version__,
        at=utc(),
        lock=lock,
        base=manifest.base if manifest is not None else None,
        store_id=manifest.store_id if manifest is not None else None,
        least_epoch=manifest.epoch if manifest is not None else 0,
        reserve_bytes=reserve.BYTES,
    )


def _opened(entries: Iterable[Entry], opening: seal.Seal) -> list[tuple[str, Recorded]]:
    return [
        (e.run, Recorded(e.first, e.count, opening.open(seal.record_context(e.run, e.first), bytes(e.body))))
        for e in entries
    ]


def _take_in(supervisor: Supervisor, keeper: Keeper, manifest: Manifest, opening: seal.Seal) -> None:
    try:
        supervisor.known_until = datetime.fromisoformat(manifest.at).astimezone(UTC)
    except (ValueError, OverflowError) as error:
        raise tail.too_new(None, FILE, 0, manifest.app) from error
    supervisor.roster.places = manifest.places
    keeper.ended.update(manifest.ended)
    supervisor.roster.counts.update(manifest.ended)
    for run_id, raw in manifest.live.items():
        supervisor.park(run_id, opened_summary(opening, run_id, raw))
