"""A copy of a store in which every payload is under one key, or under none.

Knows: where payloads stand, and that numbers, ids and links to them stay while lines, checksums and chains are made anew. Does
not know: which parts a copy has, and of which moment it is (`copying`).

What is written never was on this disk under another key: each payload is opened and sealed on its way. What does not open is
no payload that could be carried over, so damage of a record or a run ends the copy; a large output whose content is lost is
left out, and told.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec

from rpcagent import errors
from rpcagent.journal import blobs, manifest, opening, reading, record, runfiles, seal, tail, tombstones
from rpcagent.journal.checkpoint import read_manifest
from rpcagent.journal.disk import Disk
from rpcagent.journal.manifest import Manifest
from rpcagent.journal.reading import MovedOn, Snapshot
from rpcagent.journal.runfiles import Line, State
from rpcagent.runs import summary
from rpcagent.upkeep import salvage
from rpcagent.upkeep.blob import FOLDER as BLOBS
from rpcagent.upkeep.copying import Copy
from rpcagent.upkeep.findings import Finding

_BLOB = "the output is lost, and was left out; the run that refers to it is whole"


class Unsealing(seal.Plain):
    """A seal that opens with the keys of `opens`, and seals nothing."""

    def __init__(self, opens: seal.Seal) -> None:
        self._opens = opens

    def open(self, context: str, sealed: bytes) -> bytes:
        return self._opens.open(context, sealed)

    def open_bytes(self, context: str, sealed: bytes) -> bytes:
        return self._opens.open_bytes(context, sealed)

    def require(self, kid: str) -> None:
        self._opens.require(kid)


class Resealing(Copy):
    """As `Copy`. `sealing`: what opens all payloads of the store with this id, and what they are under in the copy. `lost`:
    the outputs that were left out.

    `make` raises KeyMissing where a key is missing, StoreDamaged where a payload does not open."""

    def __init__(self, store: Path, disk: Disk, dest: Path, sealing: Callable[[str], seal.Seal]) -> None:
        super().__init__(store, disk, dest, sealing)
        self.lost: list[Finding] = []

    def _log(self, snapshot: Snapshot) -> int:
        at = snapshot.base.checksum
        for place, name in enumerate(snapshot.segments):
            data, rest = self._disk.read(name), snapshot.segments[place + 1 :]
            last = opening.first_of(rest[0]) - 1 if rest else snapshot.end.seq
            lines, at = self._segment(name, data, last, at)
            self._write(name, lines)
        return at

    def _segment(self, name: str, data: bytes, last: int, previous: int) -> tuple[bytes, int]:
        """Its records up to number `last`, behind one with the checksum `previous`; and the checksum of the last of them."""
        first, end = _line(name, data, 0)
        header = msgspec.json.decode(first.body, type=record.Header)
        # To an earlier version sealed payloads would be damage: it must not open this.
        header = msgspec.structs.replace(header, format=record.FORMAT)
        lines, seq = [record.header_line(first.seq, previous, header)], first.seq
        while seq < last:
            found, end = _line(name, data, end)
            seq = found.seq
            if found.kind == record.COMMIT:
                body = self._anew(seal.record_context(found.run, found.first), found.body)
                item = record.Item(found.run, found.first, found.count, body)
                line, previous = record.commit_line(seq, found.batch, previous, item)
            else:
                opened = msgspec.json.decode(found.body, type=record.Opening)
                line, previous = record.open_line(seq, found.batch, previous, opened)
            lines.append(line)
        return b"".join(lines), previous

    def _files_of(self, run: str, state: State) -> None:
        chain, size = zlib.crc32(run.encode()), 0
        path = self._path(runfiles.history_of(run))
        with path.open("xb") as out:
            path.chmod(0o600)

            def on_line(line: Line) -> None:
                nonlocal chain, size
                body = self._anew(seal.record_context(run, line.first), line.body)
                written, chain = runfiles.history_line(chain, Line(line.first, line.count, body))
                size += out.write(written)

            found = salvage.read_history(self._disk, run, state.size, on_line)
        if found is None:
            raise FileNotFoundError(runfiles.history_of(run))
        counted = (state.lines, state.last_seq, state.size, state.chain)
        if (found.lines, found.events, found.size, found.chain) != counted:
            raise runfiles.damaged(run, runfiles.history_of(run), found.size, "the history is not as state.json says")
        self._files.append(path)
        after = State(
            last_seq=state.last_seq,
            lines=state.lines,
            size=size,
            chain=chain,
            summary=self._summary(run, state.summary),
        )
        self._write(runfiles.state_of(run), runfiles.encode_state(run, after))

    def _broken(self, run: str, error: errors.StoreDamaged) -> None:
        now = read_manifest(self._disk)
        named = [tombstones.Named(file.name, file.count, file.sum) for file in now.tombstones] if now else []
        try:
            deleted = run in tombstones.Tombstones(self._disk, named)
        except errors.StoreDamaged:
            if read_manifest(self._disk) != now:
                raise MovedOn("tombstones were put together", errno="ESTALE") from None
            raise
        if not deleted and run in self._deleted_since(reading.read_store(self._disk)):
            raise MovedOn(f"{run} was deleted", errno="ESTALE") from error
        if not deleted:
            raise error
        self._leave_out(run)

    def _summary(self, run: str, raw: bytes) -> bytes:
        heads = summary.decode(raw)
        return summary.encode(heads, self._anew(seal.summary_context(run, heads.last_seq), bytes(heads.body)))

    def _kid(self, _told: Manifest) -> str:
        return self._seal.kid or ""

    def _blob(self, digest: str) -> None:
        try:
            content = blobs.Blobs(self._store / BLOBS, self._seal).read(digest)
        except errors.NotFound:
            return
        except errors.StoreDamaged as error:
            what = str(error.details["reason"])
            self.lost.append(Finding(severity="damage", what=what, file=f"{BLOBS}/{digest}", remedy=_BLOB))
            return
        sealed = self._seal.seal_bytes(seal.blob_context(digest), content) if self._seal.kid else content
        self._write(f"{BLOBS}/{digest}", sealed)

    def _anew(self, context: str, payload: bytes) -> bytes:
        found = seal.reseal(self._seal, context, payload)
        return payload if found is None else found


def check_payloads(store: Path, disk: Disk, sealing: Callable[[str], seal.Seal]) -> None:
    """Opens every payload of a store that nobody writes, and makes sure that it is under the key of `sealing`, or under none.

    Raises StoreDamaged, KeyMissing: then it must not be used in place of one that has other keys."""
    snapshot = reading.read_store(disk)
    seals = sealing(snapshot.store_id)

    def check(context: str, payload: bytes) -> None:
        _expect(context, seal.kid_of(payload), seals.kid)
        seals.open(context, payload)

    def check_line(run: str, line: Line) -> None:
        check(seal.record_context(run, line.first), line.body)

    def check_summary(run: str, raw: bytes) -> None:
        heads = summary.decode(raw)
        check(seal.summary_context(run, heads.last_seq), bytes(heads.body))

    if snapshot.manifest is not None:
        _expect(manifest.FILE, snapshot.manifest.kid or None, seals.kid)
    for entry in snapshot.entries():
        check(seal.record_context(entry.run, entry.first), entry.body)
    for run, raw in snapshot.manifest.live.items() if snapshot.manifest else ():
        check_summary(run, raw)
    for run in disk.names(runfiles.FOLDER) if disk.exists(runfiles.FOLDER) else ():
        state = runfiles.read_state(disk, run)
        assert state is not None  # a copy has no folder without one
        check_summary(run, state.summary)
        salvage.read_history(disk, run, None, partial(check_line, run))
    for digest in disk.names(BLOBS) if disk.exists(BLOBS) else ():
        raw = disk.read(f"{BLOBS}/{digest}")
        is_plain = hashlib.sha256(raw).hexdigest() == digest  # whatever it begins like
        _expect(seal.blob_context(digest), None if is_plain else seal.kid_of_bytes(raw), seals.kid)
        blobs.Blobs(store / BLOBS, seals).read(digest)


def _expect(context: str, found: str | None, wanted: str | None) -> None:
    if found != wanted:
        reason = f"it is under {found or 'no key'}, and should be under {wanted or 'none'}"
        raise errors.StoreDamaged(f"The copy cannot be used ({context}): {reason}.", context=context, reason=reason)


def _line(name: str, data: bytes, start: int) -> tuple[record.Line, int]:
    end = data.find(b"\n", start) + 1
    found = record.decode(data, start, end) if end else None
    if found is None:  # it was intact when the log was read
        raise tail.damaged(name, start, "a bad line")
    return found, end
