"""A view of a store that another process may own and write meanwhile. Takes no lock, writes nothing, claims nothing.

Knows: what is acknowledged, and how a view is one of a single moment although the owner appends, begins segments, makes
checkpoints and deletes. Does not know: what a body or a summary says, or what is to be done about damage.

- The manifest is read before the log, and looked at again after it: if it changed, all is read anew. So the log that was
  read is the one that goes on where this very manifest ends.
- A record counts up to the watermark. HEAD is written after the sync of what it confirms, and never runs ahead.
- The files of a run are read after the log: they may be further than the manifest, never behind it. Records that stand in
  both are skipped by their numbers, as at a start. What a state.json counts of a history is never rewritten.
- What the owner is changing can look damaged for a moment. Damage is what is found twice with nothing changed in between.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import msgspec

from rpcagent import errors
from rpcagent.journal import checkpoint, manifest, opening, record, runfiles, tail
from rpcagent.journal.manifest import Manifest
from rpcagent.journal.record import Entry
from rpcagent.journal.runfiles import Line, State

if TYPE_CHECKING:
    from rpcagent.journal.disk import Disk

TRIES = 20
_FIRST_LINE = 16_384  # more than the first line of a manifest has; its `rest` covers all others
_PIECE = 1 << 20
_SEGMENT = re.compile(r"(\d{16})\.jsonl")

T = TypeVar("T")


class MovedOn(errors.StorageError):
    """The owner changed the store faster than it could be read. Try again."""


@dataclass
class Snapshot:
    """The acknowledged part of a store at one moment. `end`: the last acknowledged record. `unconfirmed`: intact records
    above it, `torn_bytes`: what stands behind those. `segments`: the files that hold the log, oldest first; of the last one
    `counted` bytes are acknowledged. `epoch`: the highest that HEAD or the log tells; 0 and no `store_id`: there is no log."""

    manifest: Manifest | None
    store_id: str
    epoch: int
    head: record.Head | None
    base: tail.Position
    end: tail.Position
    segments: list[str]
    counted: int
    unconfirmed: int
    torn_bytes: int
    records: int
    size: int
    _disk: Disk
    _sealed: list[tuple[str, int]]
    _last: list[Entry]

    def entries(self) -> Iterator[Entry]:
        """All acknowledged commits after the manifest, in the order of the log; holds one segment in memory. Raises MovedOn
        where a segment is gone meanwhile; StorageError."""
        at = tail.Position(self.base.seq, self.base.checksum, self.base.batch)
        for name, until in self._sealed:
            try:
                data = self._disk.read(name)
            except FileNotFoundError:
                raise _moved() from None
            except OSError as error:
                raise unreadable(name, error) from error
            yield from tail.scan(name, data, at, until, None).entries
        for entry in self._last:
            if entry.seq > self.end.seq:
                return
            yield entry


def read_store(disk: Disk) -> Snapshot:
    """Reads and checks the manifest and all of the log behind it.

    Raises StoreDamaged, StoreTooNew, StorageError where something cannot be read, MovedOn."""
    seen: tuple[str, object] | None = None
    trouble: errors.RpcAgentError = _moved()
    for _ in range(TRIES):
        before = _moment(disk)
        try:
            found = _look(disk)
        except errors.StoreDamaged as error:
            here = (str(error), before)
            if seen == here and _moment(disk) == before:
                raise
            seen, trouble = here, error
            continue
        except (FileNotFoundError, ValueError):  # a name that was listed is gone, or a manifest came
            continue
        except OSError as error:
            raise unreadable("the log", error) from error
        if _moment(disk)[0] == before[0]:
            return found
    raise trouble


def read_all(disk: Disk) -> tuple[Snapshot, list[Entry]]:
    """As `read_store`, with its entries, of the same moment."""
    return again(lambda: _with_entries(disk))


def again(work: Callable[[], T]) -> T:
    """What `work` returns, which is done anew where the store moved on under it. Raises MovedOn after some tries."""
    for _ in range(TRIES):
        try:
            return work()
        except MovedOn:
            continue
    raise _moved()


def read_run(disk: Disk, run: str, *, named: bool) -> tuple[State, list[Line]] | None:
    """The state of a run and what it counts of its history, each line checked; None if it has no files. `named`: the
    manifest or the index names it. Raises as `runfiles.read_bodies`; a run that is deleted meanwhile comes out as MovedOn."""
    try:
        return runfiles.read_bodies(disk, run, named)
    except errors.StoreDamaged:
        if named and not _folder_is_there(disk, run):
            raise _moved() from None
        raise


class Follower:
    """Reads the shared log record by record, as far as it is acknowledged, for as long as it grows.

    `seq`: the last record that was read, or passed over."""

    def __init__(self, disk: Disk, after: int = 0) -> None:
        self.seq = after
        self._disk = disk
        self._segment = ""
        self._offset = 0

    def poll(self) -> Iterator[record.Line | range]:
        """What is new: records in order, and as a range of numbers what a checkpoint took away before it was read. Raises
        StoreDamaged, StoreTooNew, StorageError."""
        stalled = 0
        while stalled < TRIES:
            watermark, segments = self._survey()
            if not segments:
                return
            until = self._segment_for(segments)
            if (first := segments[0][1]) > self.seq + 1:
                yield range(self.seq + 1, first)
                self.seq = first - 1
            before = self.seq
            try:
                yield from self._read(min(watermark, until))
            except FileNotFoundError:
                continue  # a checkpoint deleted it
            except OSError as error:
                raise unreadable(self._segment, error) from error
            if self.seq >= watermark:
                return
            stalled = 0 if self.seq > before else stalled + 1
        raise tail.damaged(self._segment, self._offset, f"record {self.seq + 1} is acknowledged and not there")

    def _segment_for(self, segments: list[tuple[str, int]]) -> int:
        """Turns to the segment of the next record; returns its last number: what stands there beyond is superseded."""
        place = max((i for i, (_, first) in enumerate(segments) if first <= self.seq + 1), default=0)
        if segments[place][0] != self._segment:
            self._segment, self._offset = segments[place][0], 0
        return segments[place + 1][1] - 1 if place + 1 < len(segments) else sys.maxsize

    def _survey(self) -> tuple[int, list[tuple[str, int]]]:
        head = record.read_head(_bytes_of(self._disk, "HEAD", 2 * record.SLOT))[0]
        segments = segments_of(self._disk)
        watermark = head.seq if head is not None else 0
        if segments:
            name = segments[-1][0]
            watermark = max(watermark, _through(_bytes_of(self._disk, name, _PIECE)), segments[-1][1] - 1)
        return watermark, segments

    def _read(self, watermark: int) -> Iterator[record.Line]:
        """The records of the present segment up to `watermark`, as far as they are there."""
        piece = _PIECE
        while self.seq < watermark:
            origin, start = self._offset, 0
            data = self._disk.read_at(self._segment, origin, piece)
            while self.seq < watermark and (end := data.find(b"\n", start) + 1):
                line, header = record.decode(data, start, end), origin + start == 0
                if line is not None and not line.kind:
                    raise tail.too_new(None, self._segment, origin + start)
                if line is None or (not header and line.seq > self.seq + 1):
                    return  # not there yet, or damaged: whoever asks again finds out
                start, self._offset = end, origin + end
                if not header and line.seq > self.seq:
                    self.seq = line.seq
                    yield line
            if not start and len(data) < piece:
                return
            piece = piece if start else 2 * piece  # doubles over a long line


def segments_of(disk: Disk) -> list[tuple[str, int]]:
    """Name and first number of each segment, oldest first. Raises StorageError."""
    try:
        names = disk.names(opening.FOLDER)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise unreadable(opening.FOLDER, error) from error
    return sorted((f"{opening.FOLDER}/{name}", int(found[1])) for name in names if (found := _SEGMENT.fullmatch(name)))


def unreadable(name: str, error: OSError) -> errors.StorageError:
    """What to raise where `name` cannot be read: that says nothing about what is there."""
    found = errors.name_of(error)
    return errors.StorageError(f"{name} cannot be read ({found}).", errno=found)


def _moved() -> MovedOn:
    return MovedOn("The store changed while it was read; give the same command again.", errno="ESTALE")


def _moment(disk: Disk) -> tuple[bytes, bytes]:
    """What the manifest and HEAD say at this moment."""
    return _bytes_of(disk, manifest.FILE, _FIRST_LINE), _bytes_of(disk, "HEAD", 2 * record.SLOT)


def _bytes_of(disk: Disk, name: str, size: int) -> bytes:
    """Its first bytes; none where it is not there. Raises StorageError."""
    try:
        return disk.read_at(name, 0, size)
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise unreadable(name, error) from error


def _look(disk: Disk) -> Snapshot:
    told = checkpoint.read_manifest(disk)
    found = opening.look(disk, told.base if told else None, told.store_id if told else None)
    base = tail.Position(found.base.seq, found.base.checksum, found.base.batch)
    epoch = max(found.epoch, told.epoch if told else 0)
    if found.last is None:
        return Snapshot(told, "", epoch, found.head, base, base, [], 0, 0, 0, 0, 0, disk, [], [])
    scan = found.last.scan
    confirmed = scan.before
    return Snapshot(
        manifest=told,
        store_id=found.store_id,
        epoch=epoch,
        head=found.head,
        base=base,
        end=confirmed,
        segments=[*(name for name, _ in found.sealed), found.last.name],
        counted=scan.above,
        unconfirmed=found.at.seq - confirmed.seq,
        torn_bytes=scan.dropped,
        records=confirmed.seq - base.seq,
        size=found.bytes,
        _disk=disk,
        _sealed=found.sealed,
        _last=scan.entries,
    )


def _with_entries(disk: Disk) -> tuple[Snapshot, list[Entry]]:
    found = read_store(disk)
    return found, list(found.entries())


def _folder_is_there(disk: Disk, run: str) -> bool:
    try:
        return disk.exists(runfiles.folder_of(run))
    except OSError as error:
        raise unreadable(runfiles.folder_of(run), error) from error


def _through(data: bytes) -> int:
    """Up to where the header of a segment, which begins `data`, says that all is acknowledged."""
    end = data.find(b"\n") + 1
    line = record.decode(data, 0, end) if end else None
    if line is None or line.kind != record.SEGMENT:
        return 0
    try:
        return msgspec.json.decode(line.body, type=record.Header).through
    except msgspec.DecodeError:
        return 0
