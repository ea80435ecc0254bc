"""One run as one file: the bytes of it, written and read back. Everything in it is under a checksum.

Knows: the lines of the file and their order, and that any changed, missing or added byte is seen. Does not know: stores.

The file, JSON lines as everywhere in a store, `c` first:

    {"c":"..","k":"export","d":{"format":1,"storeId":"..","runId":"..","app":"..","at":"..","lastSeq":N,"status":".."}}
    one line a commit, exactly as in history.jsonl, payloads in the clear
    {"c":"..","k":"blob","d":{"sha256":"..","bytes":N,"data":"<base64>"}}         one for each large output
    {"c":"..","k":"end","d":{"lines":L,"blobs":B,"sha256":"<hex of all bytes before this line>"}}
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import zlib
from collections.abc import Iterable, Iterator
from typing import IO

import msgspec

from rpcagent import errors
from rpcagent.journal import record, runfiles, tail
from rpcagent.journal.runfiles import Line
from rpcagent.upkeep.salvage import history_line

FORMAT = 1


class Head(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """What the file is about. `status`: how the run stands at its event `last_seq`; `at`: when it was written, RFC 3339."""

    format: int
    store_id: str
    run_id: str
    app: str
    at: str
    last_seq: int
    status: str


class _Blob(msgspec.Struct, forbid_unknown_fields=True):
    sha256: str
    bytes: int
    data: str


class _End(msgspec.Struct, forbid_unknown_fields=True):
    lines: int
    blobs: int
    sha256: str


class _Frame(msgspec.Struct, forbid_unknown_fields=True):
    c: str
    k: str
    d: msgspec.Raw


def write(out: IO[bytes], head: Head, lines: Iterable[Line], blobs: Iterable[tuple[str, bytes]]) -> tuple[int, int]:
    """All of the file; returns how many commits and blobs. Raises OSError."""
    counted = hashlib.sha256()

    def put(data: bytes) -> None:
        counted.update(data)
        out.write(data)

    put(_framed("export", head))
    chain, commits, contents = zlib.crc32(head.run_id.encode()), 0, 0
    for line in lines:
        data, chain = runfiles.history_line(chain, line)
        put(data)
        commits += 1
    for digest, content in blobs:
        put(_framed("blob", _Blob(digest, len(content), base64.b64encode(content).decode())))
        contents += 1
    out.write(_framed("end", _End(commits, contents, counted.hexdigest())))
    return commits, contents


def _framed(kind: str, payload: object) -> bytes:
    return record.framed(b'"k":"%b","d":%b}\n' % (kind.encode(), msgspec.json.encode(payload)))[0]


class Reader:
    """Reads a file from its beginning. `head` is there at once; `items` gives the rest, and has checked all of it at its end.

    Raises StoreDamaged (file, offset, reason) for what was changed or cut, StoreTooNew for a later format."""

    def __init__(self, name: str, stream: IO[bytes]) -> None:
        self._name, self._stream = name, stream
        self._offset = 0
        self._counted = hashlib.sha256()
        first = self._line()
        found = self._frame(first)
        if found is None or found.k != "export":
            later = record.later_version(first)
            if later is not None:
                raise tail.too_new(later.format, name, 0, later.app)
            raise self._damaged("it does not begin as the file of an exported run")
        try:
            told = msgspec.json.decode(found.d, type=dict[str, object]).get("format")
            if isinstance(told, int) and told > FORMAT:
                raise tail.too_new(told, name, 0)
            self.head = msgspec.json.decode(found.d, type=Head)
        except (msgspec.DecodeError, RecursionError) as error:
            raise tail.too_new(None, name, 0) from error
        if not record.is_run(self.head.run_id):
            raise self._damaged("its run has no name that a run may have")
        self._took(first)

    def items(self) -> Iterator[Line | tuple[str, bytes]]:
        """The commits in order, then digest and content of each blob. What is given is checked, but the file as a whole only
        when the last one was given: nothing may be made of it before."""
        chain, event, commits, contents = zlib.crc32(self.head.run_id.encode()), 0, 0, 0
        while True:
            data = self._line()
            line = history_line(data, chain, event + 1) if not contents else None
            if line is not None:
                commits, event, chain = commits + 1, event + line[0].count, line[1]
                yield line[0]
            else:
                frame = self._frame(data)
                if frame is None or frame.k not in {"blob", "end"}:
                    raise self._damaged("a bad line")
                if frame.k == "end":
                    self._end(frame, commits, contents, event)
                    return
                contents += 1
                yield self._blob(frame)
            self._took(data)

    def _line(self) -> bytes:
        data = self._stream.readline()
        if not data.endswith(b"\n"):
            raise self._damaged("the file ends before its last line")
        return data

    def _took(self, data: bytes) -> None:
        self._counted.update(data)
        self._offset += len(data)

    def _frame(self, data: bytes) -> _Frame | None:
        if record.checked(data, 0, len(data)) is None:
            return None
        try:
            return msgspec.json.decode(data, type=_Frame)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None

    def _blob(self, frame: _Frame) -> tuple[str, bytes]:
        try:
            told = msgspec.json.decode(frame.d, type=_Blob)
            content = base64.b64decode(told.data, validate=True)
        except (msgspec.DecodeError, binascii.Error, RecursionError) as error:
            raise self._damaged("a large output that is none") from error
        if len(content) != told.bytes or hashlib.sha256(content).hexdigest() != told.sha256:
            raise self._damaged("a large output is not what its digest says")
        return told.sha256, content

    def _end(self, frame: _Frame, commits: int, contents: int, event: int) -> None:
        try:
            told = msgspec.json.decode(frame.d, type=_End)
        except (msgspec.DecodeError, RecursionError) as error:
            raise self._damaged("its last line is none") from error
        if (told.lines, told.blobs, self.head.last_seq) != (commits, contents, event):
            raise self._damaged(f"it holds {commits} commits and {contents} outputs, not {told.lines} and {told.blobs}")
        if told.sha256 != self._counted.hexdigest() or self._stream.read(1):
            raise self._damaged("its bytes are not those that were written")

    def _damaged(self, reason: str) -> errors.StoreDamaged:
        return errors.StoreDamaged(
            f"{self._name} is damaged: byte {self._offset}: {reason}. Nothing was changed.",
            file=self._name, offset=self._offset, reason=reason,
        )  # fmt: skip
