"""Bytes to frames and back: JSON lines, or LSP `Content-Length` headers, told apart by the first byte.

Knows: where a message starts and ends, how large it may be, and how to find the next one after a broken one.
Does not know: JSON-RPC, descriptors, the event loop. It does no I/O. It looks into a message in one case only: a last
line without a newline is a message if it is a whole JSON value.

The same bytes give the same frames however they are cut into chunks. Each byte is looked at once and copied once.
"""

from __future__ import annotations

import re
from enum import Enum
from typing import NamedTuple

import msgspec

FRAME_BYTES_MAX = 64 << 20
HEADER_BYTES_MAX = 8 << 10

PARSE_ERROR = -32700
INVALID_REQUEST = -32600


class Broken(NamedTuple):
    """Stands where a message should have been. It is to be answered once, as an error with id null."""

    code: int
    """The JSON-RPC number: -32700 (no message could be read) or -32600 (a message above the limit)."""
    reason: str
    """For a person. It never quotes the input."""


Frame = bytes | Broken


class Framing(Enum):
    UNDECIDED = "undecided"
    LINES = "lines"
    HEADERS = "headers"


class _Reading(Enum):
    """Where a stream with headers is."""

    HEADER = "header"
    BODY = "body"
    OVERSIZED = "oversized"
    LOST = "lost"


_BLANK = b" \t\r"
_HEADER_LINE = re.compile(rb"[A-Za-z0-9-]+[ \t]*:")
# No JSON text can hold a raw line end after these words: inside a string it would have to be escaped, and outside of
# one the words are no JSON. So this is a header wherever it stands, and that matters: bodies end without a newline, so
# after a wrong length the next header stands in the middle of a line.
_LENGTH_AT_END = re.compile(rb"content-length[ \t]*:[ \t]*([0-9]{1,15})[ \t]*\r?\Z", re.IGNORECASE)
_LENGTH_LINE_MAX = 64


class Framer:
    """Reads one stream of bytes, and writes in the framing that the peer chose.

    `frame_bytes_max` bounds one message (without its line end or header). More than that is never held in memory.
    """

    def __init__(self, frame_bytes_max: int = FRAME_BYTES_MAX) -> None:
        self.framing = Framing.UNDECIDED
        self._max = frame_bytes_max
        self._held = bytearray()  # the message (or header line) that is not yet whole
        self._dropping = False  # lines: inside an oversized line that has been reported
        self._reading = _Reading.HEADER
        self._need: int | None = None  # headers: length of the body, as announced
        self._left = 0  # headers: bytes of the body still to come
        self._header_bytes = 0

    def feed(self, data: bytes) -> list[Frame]:
        """What became whole with these bytes, in order. Never raises."""
        if not data:
            return []
        if self.framing is Framing.UNDECIDED:
            self.framing = Framing.HEADERS if data[:1] in b"Cc" else Framing.LINES
        return self._feed_lines(data) if self.framing is Framing.LINES else self._feed_headers(data)

    def finish(self) -> list[Frame]:
        """End of input: the last line, if it lacks only its newline. Half a message is answered and never executed."""
        held, self._held = bytes(self._held), bytearray()
        cut = Broken(PARSE_ERROR, "the input ended in the middle of a message")
        if self.framing is Framing.HEADERS:
            open_message = self._reading is _Reading.BODY or (
                self._reading is _Reading.HEADER and (self._header_bytes > 0 or not _is_blank(held))
            )
            self._reading, self._need, self._header_bytes = _Reading.HEADER, None, 0
            return [cut] if open_message else []
        dropping, self._dropping = self._dropping, False
        if dropping or _is_blank(held):
            return []
        return [held] if _is_whole(held) else [cut]

    def encode(self, message: bytes) -> bytes:
        """The message as it goes on the wire. It must not contain byte 0x0A (JSON without indentation never does)."""
        if self.framing is Framing.HEADERS:
            return b"Content-Length: %d\r\n\r\n%b" % (len(message), message)
        return message + b"\n"

    # -- lines

    def _feed_lines(self, data: bytes) -> list[Frame]:
        frames: list[Frame] = []
        lines = data.split(b"\n")
        tail = lines.pop()
        if lines and (self._held or self._dropping):
            self._hold(lines[0], frames)
            if self._dropping:
                del lines[0]
            else:
                lines[0] = bytes(self._held)
            self._held, self._dropping = bytearray(), False
        for line in lines:
            if len(line) > self._max:
                frames.append(self._oversized())
            elif not _is_blank(line):
                frames.append(line)
        if tail:
            self._hold(tail, frames)
        return frames

    def _hold(self, part: bytes, frames: list[Frame]) -> None:
        if self._dropping:
            return
        if len(self._held) + len(part) > self._max:
            # Reported now, not at the newline: the peer may be waiting for the answer before it goes on.
            self._held, self._dropping = bytearray(), True
            frames.append(self._oversized())
        else:
            self._held += part

    def _oversized(self) -> Broken:
        return Broken(INVALID_REQUEST, f"the message is larger than {self._max} bytes")

    # -- headers

    def _feed_headers(self, data: bytes) -> list[Frame]:
        frames: list[Frame] = []
        at, end = 0, len(data)
        while at < end:
            if self._reading is _Reading.BODY:
                at = self._body(data, at, frames)
            elif self._reading is _Reading.OVERSIZED:
                step = min(self._left, end - at)
                at += step
                self._left -= step
                if not self._left:
                    self._reading = _Reading.HEADER
            else:
                newline = data.find(b"\n", at)
                if newline < 0:
                    self._part_of_line(data[at:], frames)
                    break
                line = bytes(self._held) + data[at:newline]
                self._held = bytearray()
                at = newline + 1
                self._line(line, frames)
        return frames

    def _body(self, data: bytes, at: int, frames: list[Frame]) -> int:
        stop = min(at + self._left, len(data))
        self._left -= stop - at
        if self._left:
            self._held += memoryview(data)[at:stop]
            return stop
        if self._held:
            self._held += memoryview(data)[at:stop]
            frames.append(bytes(self._held))
            self._held = bytearray()
        else:
            frames.append(data[at:stop])
        self._reading = _Reading.HEADER
        return stop

    def _part_of_line(self, part: bytes, frames: list[Frame]) -> None:
        self._held += part
        if self._reading is _Reading.HEADER and self._header_bytes + len(self._held) > HEADER_BYTES_MAX:
            self._lose(frames, f"the header is larger than {HEADER_BYTES_MAX} bytes")
        if self._reading is _Reading.LOST:
            del self._held[:-_LENGTH_LINE_MAX]

    def _line(self, line: bytes, frames: list[Frame]) -> None:
        if self._reading is _Reading.LOST:
            self._look_for_header(line)
        elif self._header_bytes + len(line) > HEADER_BYTES_MAX:
            self._lose(frames, f"the header is larger than {HEADER_BYTES_MAX} bytes")
            self._look_for_header(line)
        elif _is_blank(line):
            self._end_of_header(frames)
        elif fault := self._header_line(line):
            self._lose(frames, fault)
            if not _HEADER_LINE.match(line):
                self._look_for_header(line)

    def _header_line(self, line: bytes) -> str | None:
        """Take one header; the fault, if it is none. Headers other than the length are ignored."""
        if not _HEADER_LINE.match(line):
            return "the header has a line that is no header"
        self._header_bytes += len(line) + 1
        if line[:14].lower() != b"content-length":
            return None
        found = _LENGTH_AT_END.match(line)
        if not found:
            return "Content-Length is no number"
        need = int(found[1])
        if self._need not in (None, need):
            return "two different Content-Length headers"
        self._need = need
        return None

    def _end_of_header(self, frames: list[Frame]) -> None:
        if not self._header_bytes:
            return  # a blank line between two messages; many hand-written clients send one
        need, self._need, self._header_bytes = self._need, None, 0
        if need is None:
            self._lose(frames, "the header has no Content-Length")
        elif need > self._max:
            frames.append(self._oversized())
            self._reading, self._left = _Reading.OVERSIZED, need
        elif need:
            self._reading, self._left = _Reading.BODY, need
        else:
            frames.append(b"")

    def _lose(self, frames: list[Frame], reason: str) -> None:
        frames.append(Broken(PARSE_ERROR, f"{reason}; input is dropped up to the next Content-Length header"))
        self._reading, self._need, self._header_bytes = _Reading.LOST, None, 0

    def _look_for_header(self, line: bytes) -> None:
        # Only the end of the line, so that it makes no difference whether the line came in one chunk or in many.
        found = _LENGTH_AT_END.search(line[-_LENGTH_LINE_MAX:])
        if found:
            self._reading, self._need = _Reading.HEADER, int(found[1])
            self._header_bytes = len(found[0]) + 1


def _is_blank(line: bytes) -> bool:
    return not line or (line[0] in _BLANK and not line.strip(_BLANK))


def _is_whole(line: bytes) -> bool:
    """A proper prefix of a JSON object or array is never a JSON value, so a whole one was not cut."""
    try:
        msgspec.json.decode(line, type=msgspec.Raw)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return False
    return True
