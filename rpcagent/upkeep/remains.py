"""What the intact lines of a damaged manifest still say.

Knows: that a line is intact by its own checksum, whatever the others are. Does not know: what is made of it (`damage`).
"""

from __future__ import annotations

import msgspec

from rpcagent import errors
from rpcagent.journal import checkpoint, manifest, record
from rpcagent.journal.disk import Disk
from rpcagent.journal.manifest import Base, Manifest


def manifest_or_remains(disk: Disk) -> tuple[Manifest | None, bool]:
    """The manifest and True; what is left of a damaged one and False. None, True: there is none."""
    try:
        return checkpoint.read_manifest(disk), True
    except errors.StoreDamaged:
        return _remains(disk.read(manifest.FILE)), False


class _First(msgspec.Struct, rename="camel"):
    store_id: str
    app: str
    epoch: int
    at: str
    seq: int
    checksum: str
    batch: int
    places: int
    ended: dict[str, int]
    kid: str = ""


class _Line(msgspec.Struct):
    k: str
    d: msgspec.Raw
    r: str = ""


def _remains(data: bytes) -> Manifest | None:
    """What the intact lines of a damaged manifest say; None if the first one is not intact."""
    first: _First | None = None
    live: dict[str, bytes] = {}
    start = 0
    while start < len(data):
        end = data.find(b"\n", start) + 1 or len(data)
        if record.checked(data, start, end) is not None:
            try:
                line = msgspec.json.decode(data[start:end], type=_Line)
                if line.k == "checkpoint":
                    first = msgspec.json.decode(line.d, type=_First)
                elif line.k == "run" and record.is_run(line.r):
                    live[line.r] = bytes(line.d)
            except msgspec.DecodeError:
                pass
        start = end
    if first is None:
        return None
    base = Base(first.seq, int(first.checksum, 16), first.batch)
    return Manifest(
        store_id=first.store_id, app=first.app, epoch=first.epoch, at=first.at, places=first.places, ended=first.ended,
        base=base, live=live, kid=first.kid,
    )  # fmt: skip
