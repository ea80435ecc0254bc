"""What can still be read of files that are damaged: records of the log behind a bad place, the intact beginning of a history.

Knows: how to find the next intact line, what is missing before it, and whose records those were as far as the damaged bytes
tell. Does not know: what is done about it (`plan`), what a body says.

A store is opened by the strict rules of the journal. These here are for what those refuse, and for nothing else.
"""

from __future__ import annotations

import re
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from rpcagent import errors
from rpcagent.journal import record, runfiles, tail
from rpcagent.journal.disk import Disk
from rpcagent.journal.manifest import Base
from rpcagent.journal.reading import segments_of, unreadable
from rpcagent.journal.runfiles import Line

REPAIRED = "+repair"
"""Ends the `app` of a segment that a repair has made. One that no manifest leads to is left over from a repair that was cut
off."""

_CANDIDATES = 64  # more starts than this in one bad line were made on purpose
_TOLD = re.compile(
    rb'"q":(\d{1,19}),"b":\d{1,19},"p":"[0-9a-f]{8}","k":"(?:commit","r":"([A-Za-z0-9_.-]{1,128})","s":(\d{1,19}),"n":(\d{1,19})|open")'
)
_HEAD_OF_LINE = 200  # bytes within which the members before the body of a history line end
_PIECE = 1 << 20
_SHOWN = 1 << 20


class Told(NamedTuple):
    """What a damaged line says that it was, which may be wrong: record `seq`; of no run: an opening."""

    seq: int
    run: str
    first: int
    events: int


class Hole(NamedTuple):
    """A place that is not as it was written. Records `first` to `last` are missing; none are where `last` is lower. `sure`:
    nothing can be missing, the lines around it follow each other."""

    file: str
    offset: int
    first: int
    last: int
    sure: bool
    told: tuple[Told, ...] = ()

    @property
    def missing(self) -> int:
        return max(0, self.last - self.first + 1)


@dataclass
class Log:
    """What was found of a log. `end`: the last record that is there. `damage`: what an opening would complain about, first of
    each segment. `unconfirmed`: intact records above the watermark. `unfinished`: segments of a repair that was cut off."""

    base: tail.Position
    end: tail.Position
    head: record.Head | None
    store_ids: set[str] = field(default_factory=set)
    epoch: int = 0
    watermark: int = 0
    segments: list[str] = field(default_factory=list)
    leftovers: list[str] = field(default_factory=list)
    unfinished: list[str] = field(default_factory=list)
    damage: list[errors.StoreDamaged] = field(default_factory=list)
    holes: list[Hole] = field(default_factory=list)
    records: int = 0
    size: int = 0
    unconfirmed: int = 0
    torn_bytes: int = 0
    top: int = 0
    """The highest number that any file tells of."""


def read_head(disk: Disk) -> tuple[record.Head | None, bytes | None]:
    """The better slot that is intact, and the bytes; None where there is no file. Raises StorageError."""
    try:
        data = disk.read("HEAD")
    except FileNotFoundError:
        return None, None
    except OSError as error:
        raise unreadable("HEAD", error) from error
    return record.read_head(data)[0], data


def read_log(disk: Disk, base: Base | None, on_record: Callable[[record.Line], None]) -> Log:
    """Goes through all of the log, whatever its state, and gives every intact record that counts to `on_record`, in order.
    One segment is in memory. `base`: that of the manifest, where it is known.

    Raises StoreTooNew, StorageError; FileNotFoundError where a segment goes away meanwhile."""
    head, _ = read_head(disk)
    named = segments_of(disk)
    log = Log(tail.Position(), tail.Position(), head)
    headers = {name: segment_header(disk, name) for name, _ in named}
    after = base.seq if base else 0
    log.leftovers = [name for name, first in named if base and first <= after]
    counted = [each for each in named if each[0] not in log.leftovers]
    counted = _without_unfinished(counted, headers, base, log)
    if base is not None:
        log.base = tail.Position(base.seq, base.checksum, base.batch)
    elif counted:
        log.base = _before(counted[0], headers)
    log.end = tail.Position(log.base.seq, log.base.checksum, log.base.batch)
    last = headers[counted[-1][0]] if counted else None
    log.watermark = max(head.seq if head else 0, last[1].through if last else 0, log.base.seq)
    log.top = max(log.watermark, *(first - 1 for _, first in named), 0)
    for place, (name, first) in enumerate(counted):
        until = counted[place + 1][1] if place + 1 < len(counted) else None
        _read_segment(disk, log, name, first, until, headers[name], on_record)
    log.segments = [name for name, _ in counted]
    if log.end.seq < log.watermark or (base is not None and not counted):
        _missing_end(log, counted, after, head_is_known=head is not None)
    log.top = max(log.top, log.end.seq)
    return log


def _without_unfinished(
    segments: list[tuple[str, int]], headers: dict[str, _Header | None], base: Base | None, log: Log
) -> list[tuple[str, int]]:
    """A repair begins a log of its own, behind all numbers that were taken, and names it in the manifest last."""
    made = [h is not None and h[1].app.endswith(REPAIRED) for h in (headers[name] for name, _ in segments)]
    begin = next((place for place, one in enumerate(made) if one), len(segments))
    is_first = begin == 0 or (base is not None and begin < len(segments) and segments[begin][1] == base.seq + 1)
    if is_first or not all(made[begin:]):
        return segments
    log.unfinished = [name for name, _ in segments[begin:]]
    return segments[:begin]


def _before(segment: tuple[str, int], headers: dict[str, _Header | None]) -> tail.Position:
    """Where the log stood before a segment, by its own first line."""
    found, first = headers[segment[0]], segment[1]
    return tail.Position(first - 1, found[0].previous if found else 0, first - 1)


def _missing_end(log: Log, counted: list[tuple[str, int]], after: int, *, head_is_known: bool) -> None:
    name = counted[-1][0] if counted else f"wal/{after + 1:016d}.jsonl"
    if not counted:
        log.damage.append(tail.damaged(name, 0, "the segments of the log are missing"))
        if log.end.seq >= log.watermark and not head_is_known:
            # They were there, and nothing tells how much stood in them.
            log.holes.append(Hole(name, 0, log.end.seq + 1, log.end.seq + 1, sure=False))
    if log.end.seq < log.watermark and (not log.holes or log.holes[-1].last < log.watermark):
        log.holes.append(Hole(name, 0, log.end.seq + 1, log.watermark, sure=False))


_Header = tuple[record.Line, record.Header]


def segment_header(disk: Disk, name: str) -> _Header | None:
    """The first line of a segment; None where it is bad. Raises StoreTooNew, StorageError."""
    try:
        data = disk.read_at(name, 0, 4096)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise unreadable(name, error) from error
    end = data.find(b"\n") + 1
    line = record.decode(data, 0, end) if end else None
    if line is None:
        later = record.later_version(data[:end])
        if later is not None:
            raise tail.too_new(later.format, name, 0, later.app)
        return None
    try:
        found = msgspec.json.decode(line.body, type=record.Header)
    except msgspec.DecodeError:
        return None
    return (line, found) if line.kind == record.SEGMENT else None


def _read_segment(
    disk: Disk,
    log: Log,
    name: str,
    first: int,
    until: int | None,
    header: _Header | None,
    on_record: Callable[[record.Line], None],
) -> None:
    try:
        data = disk.read(name)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise unreadable(name, error) from error
    log.size += len(data)
    if header is not None:
        log.store_ids.add(header[1].store_id)
    if first > log.end.seq + 1:
        log.damage.append(tail.damaged(name, 0, f"record {log.end.seq + 1} is missing before it"))
        if not log.holes or log.holes[-1].last < first - 1:
            log.holes.append(Hole(name, 0, log.end.seq + 1, first - 1, sure=False))
        log.end = _before((name, first), {name: header})
    before = tail.Position(log.end.seq, log.end.checksum, log.end.batch)
    try:
        scan = tail.scan(name, data, log.end, until, log.head)
    except errors.StoreDamaged as error:
        log.damage.append(error)
        log.end = before
        _salvage(log, name, data, until, on_record)
        return
    log.torn_bytes, log.unconfirmed = scan.dropped, max(0, log.end.seq - scan.before.seq) if until is None else 0
    log.epoch = max(log.epoch, scan.epoch)
    start, seq = data.find(b"\n") + 1, before.seq
    while seq < log.end.seq:
        end = data.find(b"\n", start) + 1
        line = record.decode(data, start, end)
        assert line is not None  # it was scanned
        seq, start = line.seq, end
        log.records += 1
        on_record(line)


def _salvage(log: Log, name: str, data: bytes, until: int | None, on_record: Callable[[record.Line], None]) -> None:
    """All intact lines of a segment that is damaged, and the holes between them."""
    at, found = log.end, len(log.holes)
    bad: int | None = None  # where the stretch begins that is no line
    for start, line in _lines(data, name):
        if until is not None and at.seq + 1 >= until:
            return
        if line is None or line.seq <= at.seq:
            bad = start if bad is None else bad
            continue
        linked = line.seq == at.seq + 1 and line.previous == at.checksum
        if bad is not None or not linked:
            where = start if bad is None else bad
            log.holes.append(Hole(name, where, at.seq + 1, line.seq - 1, linked, _told(data[where:start])))
        bad = None
        at.seq, at.checksum, at.batch = line.seq, line.checksum, line.batch
        log.records += 1
        if line.kind == record.OPEN:
            log.epoch = max(log.epoch, _epoch(line))
        on_record(line)
        log.unconfirmed += until is None and line.seq > log.watermark
    last = until - 1 if until is not None else log.watermark
    if at.seq < last:
        where = len(data) if bad is None else bad
        log.holes.append(Hole(name, where, at.seq + 1, last, sure=False, told=_told(data[where:])))
    elif bad is not None:
        log.torn_bytes = len(data) - bad
    if len(log.holes) == found and log.damage[-1].details["offset"]:
        # Two histories of one store in one place: HEAD names another line. Nobody knows what the other one held.
        log.holes.append(Hole(name, log.damage[-1].details["offset"], at.seq + 1, at.seq, sure=False))


def _lines(data: bytes, name: str) -> Iterator[tuple[int, record.Line | None]]:
    """The records of a segment, and None for each stretch between newlines, or a part of one, that is none."""
    start = 0
    while start < len(data):
        end = data.find(b"\n", start) + 1 or len(data)
        line = record.decode(data, start, end)
        if line is None:
            for tries, found in enumerate(record.CANDIDATE.finditer(data, start + 1, end)):
                line = record.decode(data, found.start(), end) if tries < _CANDIDATES else None
                if line is not None:
                    yield start, None
                    start = found.start()
                    break
        if line is not None and not line.kind:
            raise tail.too_new(None, name, start)
        is_header = line.kind == record.SEGMENT if line is not None else not start
        if not is_header:  # a bad one is a matter of its own: no record was in it
            yield start, line
        start = end


def _told(data: bytes) -> tuple[Told, ...]:
    return tuple(
        Told(int(seq), run.decode() if run else "", int(first or 0), int(events or 0))
        for seq, run, first, events in _TOLD.findall(data[:_SHOWN])
    )


def _epoch(line: record.Line) -> int:
    try:
        return msgspec.json.decode(line.body, type=record.Opening).epoch
    except msgspec.DecodeError:
        return 0


# Histories


class Prefix(NamedTuple):
    """The intact beginning of a history: how much of it there is. `whole`: nothing stands behind it."""

    lines: int
    events: int
    size: int
    chain: int
    whole: bool


class _HeadOfLine(msgspec.Struct, forbid_unknown_fields=True):
    c: str
    p: str
    s: int
    n: int


def read_history(
    disk: Disk, run: str, most: int | None, on_line: Callable[[Line], None], *, upto: int = sys.maxsize
) -> Prefix | None:
    """Goes through the first `most` bytes of a history (None: all) up to what is no intact line that follows, or to the line
    that has event `upto`; None if there is no file. One piece of the file, or one line, is in memory. Raises StorageError."""
    name = runfiles.history_of(run)
    chain, event, count, offset, held = zlib.crc32(run.encode()), 0, 0, 0, b""
    piece = _PIECE
    try:
        size = disk.size(name)
        most = size if most is None else min(most, size)
        while offset < most:
            held = disk.read_at(name, offset, min(piece, most - offset))
            start = 0
            while end := held.find(b"\n", start) + 1:
                found = history_line(held[start:end], chain, event + 1)
                if found is None:
                    return Prefix(count, event, offset + start, chain, whole=False)
                line, chain = found
                event, count, start = event + line.count, count + 1, end
                on_line(line)
                if event >= upto:
                    return Prefix(count, event, offset + end, chain, whole=False)
            if not start and len(held) < piece:
                return Prefix(count, event, offset, chain, whole=False)
            offset, piece = offset + start, piece if start else 2 * piece
    except FileNotFoundError:
        return None
    except OSError as error:
        raise unreadable(name, error) from error
    return Prefix(count, event, offset, chain, whole=offset == size)


def history_line(data: bytes, chain: int, first: int) -> tuple[Line, int] | None:
    """The line and its checksum, if it is exactly what would be written in this place."""
    head, _, rest = data.partition(b',"d":')
    if len(head) > _HEAD_OF_LINE or not rest.endswith(b"}\n"):
        return None
    try:
        told = msgspec.json.decode(head + b"}", type=_HeadOfLine)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    line = Line(told.s, told.n, rest[:-2])
    written, checksum = runfiles.history_line(chain, line)
    return (line, checksum) if written == data and line.first == first and line.count >= 1 else None
