"""The bytes of the journal: one JSON line a record, and the slots of HEAD. Pure.

Knows: the envelope of a line, its checksum and its links, and how HEAD is laid out. Does not know: files, order,
what a bad line means (`tail`), or what is inside a payload: that is one JSON value, copied as it came.

The checksum is the first member and has a fixed width, so a reader checks a line without parsing it, and the whole line
is still plain JSON. The order of the members is part of the format: reading is the exact inverse of writing, by one
regular expression over the envelope, so that the nesting of a payload can never make a good record unreadable.
"""

from __future__ import annotations

import re
import zlib
from typing import Any

import msgspec

FORMAT = 1
"""The format this version writes. A later one is refused, never guessed at."""

FORMATS = (0, FORMAT)
"""The formats this version reads. The lines of a segment are the same in both; format 1 has files beside the log."""

SEGMENT, OPEN, COMMIT = "seg", "open", "commit"
_PREFIX = 16  # of `{"c":"xxxxxxxx",`: what follows is under the checksum
_LINE = re.compile(
    rb'\{"c":"[0-9a-f]{8}","q":(\d{1,19}),"b":(\d{1,19}),"p":"([0-9a-f]{8})","k":"(?:'
    rb'(commit)","r":"([A-Za-z0-9_.-]{1,128})","s":(\d{1,19}),"n":(\d{1,19})|(seg|open)"),"d":'
)
_RUN = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_APP = re.compile(r"[A-Za-z0-9_.+!-]{1,40}")
_json = msgspec.json.Decoder(msgspec.Raw)

# Where a line may begin inside a stretch that is no line. The byte before it is never one that precedes a nested object
# in JSON, so a payload that holds such objects yields no candidates, and the search stays linear.
CANDIDATE = re.compile(rb'(?<![:,\[ \t\r])\{"c":"[0-9a-f]{8}","q":')


class Entry(msgspec.Struct, frozen=True, gc=False):
    """A recorded commit: `count` events of `run`, the first of which has number `first`. `body` is a JSON value."""

    seq: int
    run: str
    first: int
    count: int
    body: bytes


class Item(msgspec.Struct, frozen=True):
    """A commit to be recorded. `outcome`: on a full disk it may use what is held in reserve. Raises ValueError if it could
    not be read back as it is."""

    run: str
    first: int
    count: int
    body: bytes
    outcome: bool = False

    def __post_init__(self) -> None:
        if _RUN.fullmatch(self.run) is None:
            raise ValueError("run must be 1 to 128 of A-Z a-z 0-9 . _ -")
        if self.first < 1 or self.count < 1:
            raise ValueError("first and count start at 1")
        if b"\n" in self.body:
            raise ValueError("body must not hold a raw newline")
        try:
            _json.decode(self.body)
            if not self.body.isascii():
                self.body.decode()
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ValueError("body must be a single JSON value in UTF-8") from error


class Line(msgspec.Struct, frozen=True, gc=False):
    """A line whose checksum is right. `kind` is empty if its shape is not one of this version."""

    checksum: int
    seq: int
    batch: int
    previous: int
    kind: str
    run: str
    first: int
    count: int
    body: bytes


_FOREIGN = Line(0, 0, 0, 0, "", "", 0, 0, b"")


class Header(msgspec.Struct, frozen=True, rename="camel"):
    """What the first line of a segment says. `through`: all lines up to it were synced before the file got its name."""

    format: int
    crc: str
    store_id: str
    app: str
    through: int


class Opening(msgspec.Struct, frozen=True):
    """The payload of an `open` record: the count of openings, and when, as the caller's clock said."""

    epoch: int
    at: str


def is_run(name: str) -> bool:
    """Whether a run may have this name in a file of its own or in a manifest: not one that leads elsewhere as a folder."""
    return _RUN.fullmatch(name) is not None and name not in {".", ".."}


def framed(tail: bytes) -> tuple[bytes, int]:
    """The line whose members after `c` are `tail` (with the closing brace and the newline), and its checksum."""
    checksum = zlib.crc32(tail)
    return b'{"c":"%08x",%b' % (checksum, tail), checksum


def checked(data: bytes, start: int, end: int) -> int | None:
    """The checksum of the line `data[start:end]`, newline included; None if it or the frame of the line is wrong."""
    if data[end - 2 : end] != b"}\n" or data[start : start + 6] != b'{"c":"':
        return None
    checksum = zlib.crc32(data[start + _PREFIX : end])
    return checksum if data[start + 6 : start + _PREFIX] == b'%08x",' % checksum else None


def commit_line(seq: int, batch: int, previous: int, item: Item) -> tuple[bytes, int]:
    """The line and its checksum. The payload goes in as it is."""
    return framed(b'"q":%d,"b":%d,"p":"%08x","k":"commit","r":"%b","s":%d,"n":%d,"d":%b}\n' % (
        seq, batch, previous, item.run.encode(), item.first, item.count, item.body,
    ))  # fmt: skip


def _other_line(kind: bytes, seq: int, batch: int, previous: int, payload: Any) -> tuple[bytes, int]:
    body = msgspec.json.encode(payload)
    return framed(b'"q":%d,"b":%d,"p":"%08x","k":"%b","d":%b}\n' % (seq, batch, previous, kind, body))


def open_line(seq: int, batch: int, previous: int, opening: Opening) -> tuple[bytes, int]:
    """A numbered record like any other: its checksum is part of the chain."""
    return _other_line(b"open", seq, batch, previous, opening)


def header_line(last: int, previous: int, header: Header) -> bytes:
    """The first line of a segment. It has the number of the last line before it and is no link of the chain, so that
    lines can be copied into a new segment byte for byte."""
    return _other_line(b"seg", last, last, previous, header)[0]


def decode(data: bytes, start: int, end: int) -> Line | None:
    """The line `data[start:end]`, newline included; None if its checksum or its frame is wrong."""
    checksum = checked(data, start, end)
    if checksum is None:
        return None
    found = _LINE.match(data, start, end)
    if found is None:
        return _FOREIGN
    seq, batch, previous, commit, run, first, count, other = found.groups()
    body = data[found.end() : end - 2]
    if commit is not None:
        return Line(
            checksum, int(seq), int(batch), int(previous, 16), COMMIT, run.decode(), int(first), int(count), body
        )
    return Line(checksum, int(seq), int(batch), int(previous, 16), other.decode(), "", 0, 0, body)


class Later(msgspec.Struct, frozen=True):
    """A format that is not ours yet, and the version that wrote it, where the line tells."""

    format: int
    app: str | None


def later_version(line: bytes) -> Later | None:
    """What a first line says of itself if its format is later than ours. It is asked of lines that we cannot check: a
    later format may use another checksum, and `too new` is a better answer than `damaged`."""
    try:
        told = msgspec.json.decode(line)["d"]
        found, app = told["format"], told.get("app")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, KeyError, TypeError, AttributeError):
        return None
    if not isinstance(found, int) or found <= FORMAT:
        return None
    return Later(found, app if isinstance(app, str) and _APP.fullmatch(app) else None)


# HEAD: two slots, written in turn. One line of 64 bytes each, so that neither crosses a sector.

SLOT = 64
_SLOT_TEXT = 54
_HEAD = re.compile(rb"(\d{16}) ([0-9a-f]{8}) (\d{16}) {12}([0-9a-f]{8}) \n")


class Head(msgspec.Struct, frozen=True, order=True):
    """The acknowledged watermark: records up to `seq` were synced; `checksum` is that of the last one."""

    epoch: int
    seq: int
    checksum: int


def head_slot(head: Head) -> bytes:
    """Raises ValueError for a number that has no room in it."""
    if max(head.seq, head.epoch) >= 10**16:
        raise ValueError("a slot of HEAD has room for 16 digits")
    text = b"%016d %08x %016d" % (head.seq, head.checksum, head.epoch)
    text = text.ljust(_SLOT_TEXT)
    return text + b"%08x \n" % zlib.crc32(text)


def read_head(data: bytes) -> tuple[Head | None, int]:
    """The better one of the two slots that are intact, and which one it is. (None, 1) if neither is."""
    best, place = None, 1
    for index in (0, 1):
        slot = data[index * SLOT : (index + 1) * SLOT]
        found = _HEAD.fullmatch(slot)
        if found is None or int(found[4], 16) != zlib.crc32(slot[:_SLOT_TEXT]):
            continue
        head = Head(epoch=int(found[3]), seq=int(found[1]), checksum=int(found[2], 16))
        if best is None or head > best:
            best, place = head, index
    return best, place
