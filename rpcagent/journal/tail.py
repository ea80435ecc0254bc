"""Where a segment ends, and whether that is a torn tail or damage. Pure.

Knows: the rules by which bytes that are no next record are judged, as a table. Does not know: files; it is given the
bytes of one segment and where the log stands before it.

A batch is one write and one sync, so after a crash any of its sectors may be there or not, in any order: a bad line
followed by intact lines of the SAME batch is a legal tear. A line of any other batch behind it is not: that batch was
only written after this one had been synced.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import msgspec

from rpcagent import errors
from rpcagent.journal import record

Outcome = Literal["clean", "torn", "damaged"]
Cell = bool | None  # True: must, False: must not, None: no matter
_CANDIDATES_A_LINE = 64  # more starts than this in one stretch were made on purpose; the limit keeps the search linear


class Facts(NamedTuple):
    """What is known of the place where the next record, number x, should begin."""

    header: bool  # the first line of the segment is expected here
    end: bool  # no byte is left
    intact: bool  # a line with the right checksum stands here, but it is not x
    sealed: bool  # a later segment exists, and it begins after x
    acknowledged: bool  # x is at or below the watermark
    beyond: bool  # further on stands an intact line that is not of the batch of x


class Row(NamedTuple):
    label: str
    cells: tuple[Cell, Cell, Cell, Cell, Cell, Cell]  # in the order of Facts
    outcome: Outcome
    reason: str


M, N, X = True, False, None
TABLE: tuple[Row, ...] = (
    #             header end intact sealed acked beyond
    Row("no header", (M, X, X, X, X, X), "damaged", "the first line of the segment is not a segment header"),
    Row("end", (N, M, X, N, N, X), "clean", ""),
    Row("cut segment", (N, M, X, M, X, X), "damaged", "the segment ends before the next one begins"),
    Row("cut log", (N, M, X, N, M, X), "damaged", "the log ends before what was acknowledged"),
    Row("stranger", (N, N, M, X, X, X), "damaged", "an intact line that does not follow the one before it"),
    Row("bad, sealed", (N, N, N, M, X, X), "damaged", "a bad line in a segment that another one follows"),
    Row("bad, acknowledged", (N, N, N, N, M, X), "damaged", "a bad line in what was acknowledged"),
    Row("bad, beyond", (N, N, N, N, N, M), "damaged", "a bad line before a later batch"),
    Row("torn", (N, N, N, N, N, N), "torn", ""),
)


def fitting(facts: Facts) -> list[Row]:
    """All rows that fit. It is always exactly one; the tests go through every combination."""
    return [row for row in TABLE if all(c is None or c is f for c, f in zip(row.cells, facts, strict=True))]


def classify(facts: Facts) -> Row:
    return fitting(facts)[0]


@dataclass(slots=True)
class Position:
    """The last record before a place in the log: number, checksum, first number of its batch."""

    seq: int = 0
    checksum: int = 0
    batch: int = 0


@dataclass(slots=True)
class Scan:
    """What one segment holds. `end`: its good bytes. `above`: where the lines above the watermark begin, `before`: the
    last record before that place. `dropped`: bytes of a torn tail. `epoch`: the highest of its `open` records, else 0."""

    header: record.Header
    end: int
    above: int
    before: Position
    dropped: int = 0
    epoch: int = 0
    entries: list[record.Entry] = field(default_factory=list)


def scan(name: str, data: bytes, at: Position, until: int | None, head: record.Head | None) -> Scan:
    """Reads one segment and moves `at` to its last record. `until` is the first number of the next segment (what stands
    there is superseded by it), None for the last one. Linear in `data`.

    Raises StoreDamaged with file, offset and reason; StoreTooNew for a format, a kind or a shape of a later version."""
    header, offset = _read_header(name, data, at)
    watermark = max(head.seq if head else 0, header.through)
    result = Scan(header=header, end=offset, above=offset, before=Position(at.seq, at.checksum, at.batch))
    entries, last = result.entries, until - 1 if until is not None else -1
    while at.seq != last:
        end = data.find(b"\n", offset) + 1
        line = record.decode(data, offset, end) if end else None
        if line is None or not _follows(line, at):
            _judge(name, data, offset, at, line, until, watermark)
            result.dropped = len(data) - offset
            break
        seq, checksum = line.seq, line.checksum
        at.seq, at.checksum, at.batch = seq, checksum, line.batch
        if line.kind == record.COMMIT:
            entries.append(record.Entry(seq, line.run, line.first, line.count, line.body))
        else:
            result.epoch = max(result.epoch, _opening(name, offset, line).epoch)
        if head and seq == head.seq and checksum != head.checksum:
            raise damaged(name, offset, "HEAD names another line with this number")
        offset = end
        if seq == watermark:
            result.above = end
            result.before = Position(seq, checksum, line.batch)
    result.end = offset
    return result


def damaged(name: str, offset: int, reason: str) -> errors.StoreDamaged:
    return errors.StoreDamaged(
        f"The store is damaged: {name}, byte {offset}: {reason}. Nothing was changed.",
        file=name, offset=offset, reason=reason,
    )  # fmt: skip


def too_new(found: int | None, name: str, offset: int, app: str | None = None) -> errors.StoreTooNew:
    """`app`: the version that wrote it, where that can be read."""
    who, what = (f"rpcagent {app}", f"rpcagent {app} or later") if app else ("a later version", "a later version")
    return errors.StoreTooNew(
        f"The store was written by {who} ({name}, byte {offset}): install {what}. Nothing was changed.",
        format=found, supported=list(record.FORMATS),
    )  # fmt: skip


def unknown(name: str, line: bytes) -> errors.StoreTooNew:
    """For a first line that no version up to ours has written."""
    later = record.later_version(line)
    return too_new(later.format, name, 0, later.app) if later else too_new(None, name, 0)


def _follows(line: record.Line, at: Position) -> bool:
    return (
        line.seq == at.seq + 1
        and line.previous == at.checksum
        and line.batch in (line.seq, at.batch)
        and line.kind in (record.COMMIT, record.OPEN)
    )


def _read_header(name: str, data: bytes, at: Position) -> tuple[record.Header, int]:
    end = data.find(b"\n") + 1 or len(data)
    line = record.decode(data, 0, end)
    if line is None or line.kind != record.SEGMENT:
        if record.later_version(data[:end]) is not None or (line is not None and not line.kind):
            raise unknown(name, data[:end])
        # One cell decides; the others cannot matter.
        row = classify(Facts(True, not data, line is not None, False, False, False))
        raise damaged(name, 0, row.reason)
    try:
        header = msgspec.json.decode(line.body, type=record.Header)
    except msgspec.DecodeError as error:
        raise unknown(name, data[:end]) from error
    if header.format not in record.FORMATS or header.crc != "crc32":
        raise too_new(header.format, name, 0, header.app)
    if line.seq != at.seq or line.previous != at.checksum:
        raise damaged(name, 0, "the segment does not continue the one before it")
    return header, end


def _opening(name: str, offset: int, line: record.Line) -> record.Opening:
    try:
        return msgspec.json.decode(line.body, type=record.Opening)
    except msgspec.DecodeError as error:
        raise too_new(None, name, offset) from error


def _judge(
    name: str, data: bytes, offset: int, at: Position, line: record.Line | None, until: int | None, watermark: int
) -> None:
    """Raises unless what stands at `offset` is the end of the log or a torn tail."""
    if line is not None and not line.kind:
        raise too_new(None, name, offset)
    sealed, acknowledged, end = until is not None, at.seq + 1 <= watermark, offset == len(data)
    # Only looked for where it decides.
    beyond = not (end or sealed or acknowledged or line is not None) and stands_beyond(data, offset, at)
    row = classify(Facts(False, end, line is not None, sealed, acknowledged, beyond))
    if row.outcome == "damaged":
        raise damaged(name, offset, f"{row.reason} (record {at.seq + 1})")


def stands_beyond(data: bytes, offset: int, at: Position) -> bool:
    """Whether an intact line stands after `offset` that is not of the torn batch: one that starts after record x, or is
    not after x itself (then it stands where no write of ours can have put it)."""
    expected = at.seq + 1
    newline = tries = 0
    for found in record.CANDIDATE.finditer(data, offset + 1):
        start = found.start()
        if start >= newline:
            newline = data.find(b"\n", start) + 1
            tries = 0
            if not newline:
                return False
        tries += 1
        line = record.decode(data, start, newline) if tries <= _CANDIDATES_A_LINE else None
        if line is not None and not (line.seq > expected and line.batch in (at.batch, expected)):
            return True
    return False
