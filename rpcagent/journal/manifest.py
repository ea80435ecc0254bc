"""The bytes of checkpoint.json: how far the log is covered by the files of the runs, and one summary a live run. Pure.

Knows: its two kinds of lines, and that any changed byte is seen. Does not know: files, what a summary says, or how a
checkpoint is made (`checkpoint`). The file gets its name when it is whole and durable, so a bad byte is damage.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable

import msgspec

from rpcagent.journal import record, tail

FILE = "checkpoint.json"
FORMAT = 1
"""The format of this file, which is that of the store."""

_FIRST = re.compile(rb'\{"c":"[0-9a-f]{8}","k":"checkpoint","d":')
_RUN_LINE = re.compile(rb'\{"c":"[0-9a-f]{8}","k":"run","r":"([A-Za-z0-9_.-]{1,128})","d":')


class Base(msgspec.Struct, frozen=True):
    """A place in the log: the number of a record, its checksum, the first number of its batch."""

    seq: int
    checksum: int
    batch: int


class TombstoneFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file below tombstones/: how many ids it holds, and the SHA-256 of its bytes in hex."""

    name: str
    count: int
    sum: str


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """What the owner of the store says with a checkpoint. `places`: the next free place number; `ended`: how many runs
    ended how; `at`: RFC 3339, as the caller's clock said; `kid`: the key that payloads were sealed with then, empty for none:
    who cannot open what is under it must not write to the store."""

    store_id: str
    app: str
    epoch: int
    at: str
    places: int
    ended: dict[str, int]
    tombstones: tuple[TombstoneFile, ...] = ()
    kid: str = ""


class Manifest(Header, frozen=True, kw_only=True):
    """A whole checkpoint. All up to `base` is in the files of the runs; `live`: the summary of each live run."""

    base: Base
    live: dict[str, bytes] = {}


class _Wire(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True, omit_defaults=True):
    format: int
    store_id: str
    app: str
    epoch: int
    at: str
    seq: int
    checksum: str
    batch: int
    places: int
    ended: dict[str, int]
    tombstones: tuple[TombstoneFile, ...]
    live: int
    rest: str
    kid: str = ""


def encode(manifest: Manifest, lines: Iterable[tuple[str, bytes]]) -> bytes:
    """The file. `lines`: run and summary (one JSON value) of each live run, instead of `manifest.live`.

    Raises ValueError for a run that is named twice or has no name, and for a summary with a newline in it."""
    parts, seen = [], set()
    for run, summary in lines:
        if run in seen or not record.is_run(run) or b"\n" in summary:
            raise ValueError(f"a live run stands once, with a summary in one line: {run!r}")
        seen.add(run)
        parts.append(record.framed(b'"k":"run","r":"%b","d":%b}\n' % (run.encode(), summary))[0])
    rest = b"".join(parts)
    base = manifest.base
    wire = _Wire(
        FORMAT, manifest.store_id, manifest.app, manifest.epoch, manifest.at, base.seq, f"{base.checksum:08x}", base.batch,
        manifest.places, manifest.ended, manifest.tombstones, len(parts), f"{zlib.crc32(rest):08x}",
        manifest.kid,
    )  # fmt: skip
    return record.framed(b'"k":"checkpoint","d":%b}\n' % msgspec.json.encode(wire))[0] + rest


def decode(data: bytes) -> Manifest:
    """The manifest in `data`, all of it.

    Raises StoreDamaged (file, offset, reason), StoreTooNew for a later format or a shape that this version does not
    know."""
    end = data.find(b"\n") + 1 or len(data)
    first = data[:end]
    whole, found = record.checked(data, 0, end) is not None, _FIRST.match(first)
    if not whole or found is None:
        if whole or record.later_version(first):
            raise tail.unknown(FILE, first)
        raise tail.damaged(FILE, 0, "the first line of the manifest is bad")
    try:
        wire = msgspec.json.decode(first[found.end() : -2], type=_Wire)
        checksum, rest = int(wire.checksum, 16), int(wire.rest, 16)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise tail.unknown(FILE, first) from error
    if wire.format != FORMAT:
        raise tail.too_new(wire.format, FILE, 0, wire.app)
    live = _live(data, end)
    if len(live) != wire.live:
        raise tail.damaged(FILE, len(data), f"{len(live)} of {wire.live} live runs are named")
    if zlib.crc32(memoryview(data)[end:]) != rest:
        raise tail.damaged(FILE, end, "the lines of the runs are not those that were written")
    return Manifest(
        store_id=wire.store_id, app=wire.app, epoch=wire.epoch, at=wire.at, places=wire.places, ended=wire.ended,
        tombstones=wire.tombstones, base=Base(wire.seq, checksum, wire.batch), live=live,
        kid=wire.kid,
    )  # fmt: skip


def _live(data: bytes, offset: int) -> dict[str, bytes]:
    live: dict[str, bytes] = {}
    while offset < len(data):
        end = data.find(b"\n", offset) + 1
        if not end or record.checked(data, offset, end) is None:
            raise tail.damaged(FILE, offset, "a bad line of a live run")
        found = _RUN_LINE.match(data, offset, end)
        if found is None:
            raise tail.too_new(None, FILE, offset)
        run = found[1].decode()
        if run in live:
            raise tail.damaged(FILE, offset, "a run is named twice")
        live[run] = data[found.end() : end - 2]
        offset = end
    return live
