"""`rpcagent import`: a run out of a file into a store that no daemon owns.

Knows: what is refused, and the order in which a run comes to be. Does not know: the bytes of the file (`parcel`).

The run goes into files of its own, as a checkpoint would have put it there, and not into the log: a log takes a batch, of which a
crash may keep the first records, and the first records of a run are a run that goes on. The order, each step durable before
the next one begins: the large outputs; history.jsonl; state.json, with which the run is there, whole; the manifest, which
names it where it has not ended, and counts it where it has; the index. A crash before state.json leaves a folder that means
nothing. One after it leaves a run that is whole and that no list shows; the same import goes on from there. One that has ended
is recognised by its place, which is free as the manifest tells, and counted by whoever writes the next manifest.
"""

from __future__ import annotations

import argparse
import contextlib
import secrets
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

from rpcagent import __version__, errors
from rpcagent.batch import exits
from rpcagent.batch.desk import Desk
from rpcagent.batch.faults import Mistake
from rpcagent.ids import is_run_id
from rpcagent.journal import access, blobs, manifest, reading, runfiles, seal, tombstones
from rpcagent.journal.disk import Disk, RealDisk, StoreLock
from rpcagent.journal.ended import ended_row, uncounted
from rpcagent.journal.index import FILE_NAME, Index, IndexUnusable
from rpcagent.journal.manifest import Base, Manifest
from rpcagent.journal.reading import Snapshot
from rpcagent.journal.record import Entry
from rpcagent.journal.runfiles import Line, State
from rpcagent.journal.wal import Wal
from rpcagent.runs import events as ev
from rpcagent.runs import summary
from rpcagent.runs.fold import apply
from rpcagent.runs.state import RunState
from rpcagent.runs.summary import Summary
from rpcagent.runs.view import run_status
from rpcagent.upkeep import parcel
from rpcagent.upkeep.blob import FOLDER
from rpcagent.upkeep.deletions import deletions_in
from rpcagent.upkeep.place import Place

AHEAD = timedelta(days=1)
MOST_EPOCH = 10**9
"""What an imported run may say of time and of openings: both become the store's own."""
_DRAFT = ".tmp"


class Parcel(NamedTuple):
    """A file that was read to its end: all of it is as it was written."""

    head: parcel.Head
    lines: list[Line]
    state: RunState


def command(desk: Desk, place: Place, options: argparse.Namespace) -> int:
    """Exit code 0: the run is in the store, durable."""
    found = read(options.file)
    lock = StoreLock.take(place.store, since=_now())
    try:
        access.secure(place.store)
        take = Taking(place.store, place)
        take.check(found, take_over=options.take_over)
        take.take(found, options.file)
    finally:
        lock.close()
    if desk.as_json:
        told = {
            "runId": found.head.run_id,
            "status": found.head.status,
            "lastSeq": found.head.last_seq,
            "from": found.head.store_id,
        }
        desk.fact({"imported": told})
        return exits.DONE
    desk.tell(
        f"{found.head.run_id}: {found.head.status}, {found.head.last_seq} events, from {found.head.store_id}", "good"
    )
    if not found.state.ended:
        desk.say(
            "From now on it lives here. The store that it came from must never be opened again with this run in it.",
            "ask",
        )
    return exits.DONE


def read(path: Path) -> Parcel:
    """Reads all of the file, and folds the run. Raises StoreDamaged, StoreTooNew, Mistake for events that cannot follow each
    other, OSError."""
    with path.open("rb") as stream:
        reader = parcel.Reader(str(path), stream)
        lines: list[Line] = []
        given: set[str] = set()
        for item in reader.items():
            if isinstance(item, Line):
                lines.append(item)
            else:
                given.add(item[0])
    run = reader.head.run_id
    state: RunState | None = None
    try:
        for line in lines:
            state = apply(state, ev.decode(line.body), run)
    except ev.WrittenLater as error:
        raise errors.StoreTooNew(f"{path}: {error}.", format=None, supported=[parcel.FORMAT]) from error
    except Exception as error:
        raise Mistake(f"{path}: its events do not follow each other: {error}", code="STORE_DAMAGED") from error
    if state is None or state.run_id != run:
        raise Mistake(f"{path} holds no event", code="STORE_DAMAGED")
    _check_head(path, reader.head, state)
    if missing := set(state.blobs) - given:
        raise Mistake(
            f"{path}: {len(missing)} large outputs that the run refers to are not in it", code="STORE_DAMAGED"
        )
    return Parcel(reader.head, lines, state)


def _check_head(path: Path, head: parcel.Head, state: RunState) -> None:
    """Whatever the sums say, a file may have been made by anybody. Raises Mistake."""
    if not is_run_id(head.run_id):
        raise Mistake(f"{path}: {head.run_id!r} is no id of a run", code="STORE_DAMAGED")
    shown = run_status(state, summary.NEXT_OPENING, busy=False)
    if (head.status, head.last_seq) != (shown, state.last_seq):
        raise Mistake(f"{path}: its head says {head.status} at event {head.last_seq}; the events say {shown} at {state.last_seq}",
                      code="STORE_DAMAGED")  # fmt: skip
    if state.last_at > datetime.now(UTC) + AHEAD:
        raise Mistake(
            f"{path}: its last event is of {state.last_at:%Y-%m-%d}, and the clock of the store would follow it",
            "mend the clock of this machine if it is behind", code="INVALID_STATE",
        )  # fmt: skip
    if not 0 <= state.released_epoch < MOST_EPOCH:
        raise Mistake(f"{path}: {state.released_epoch} is no count of openings", code="STORE_DAMAGED")


class Taking:
    """A store that is to take a run in. The caller holds its lock. `disk`: another one than the folder's own, for tests."""

    def __init__(self, store: Path, place: Place, disk: Disk | None = None) -> None:
        self._store, self._place = store, place
        self._disk: Disk = disk if disk is not None else RealDisk(store)
        self._snapshot, self._entries = self._opened()
        self._cut_off: dict[str, Summary] = {}

    def _opened(self) -> tuple[Snapshot, list[Entry]]:
        found, entries = reading.read_all(self._disk)
        if not found.store_id:  # there is no store yet: it is made as a daemon makes it
            Wal.open(
                self._disk, draw_store_id=lambda: "sto_" + secrets.token_hex(12), app=__version__, at=_now()
            ).close()
            found, entries = reading.read_all(self._disk)
        return found, entries

    def check(self, found: Parcel, *, take_over: bool) -> None:
        """Raises Mistake, KeyExpired, KeyMissing where the run may not come in; nothing was written then."""
        run = found.head.run_id
        named = self._snapshot.manifest.tombstones if self._snapshot.manifest else ()
        graves = tombstones.Tombstones(self._disk, [tombstones.Named(f.name, f.count, f.sum) for f in named])
        mine = [entry for entry in self._entries if entry.run == run]
        if run in graves or run in deletions_in(mine, self._place.seal(self._snapshot.store_id)).status:
            raise errors.KeyExpired("this store has deleted the run, and its id is never used again", runId=run)
        if mine or self._is_listed(run):
            raise Mistake(
                f"the run {run} is in this store already", "`rpcagent show` tells how it stands", code="INVALID_STATE"
            )
        if not found.state.ended and not take_over:
            raise Mistake(
                f"the run has not ended ({found.head.status}): imported, it would go on here, and act with the same keys as the "
                "original",
                "if the original never goes on, because its store is gone or is never opened again, say so with --take-over",
                code="INVALID_STATE",
            )
        held = runfiles.read_state(self._disk, run)
        if held is not None and held.last_seq != found.head.last_seq:
            raise Mistake(f"another state of the run {run} is in this store", code="INVALID_STATE")
        kid = self._sealed_with()
        if kid is not None and self._place.ring is None:
            raise seal.KeyMissing(
                f"This store is encrypted, with the key {kid}. Name it with --encryption-key.", kid=kid, context=run
            )

    def _is_listed(self, run: str) -> bool:
        told = self._snapshot.manifest
        if told is not None and run in told.live:
            return True
        state = runfiles.read_state(self._disk, run)
        if state is None or summary.decode(state.summary).live:
            return False
        # A run that has ended and has a place below the next free one was filed, or was taken in to the end.
        return told is not None and summary.decode(state.summary).place < told.places

    def _sealed_with(self) -> str | None:
        bodies = [entry.body for entry in self._entries[:1]]
        bodies += (
            [bytes(summary.decode(raw).body) for raw in list(self._snapshot.manifest.live.values())[:1]]
            if self._snapshot.manifest
            else []
        )
        return next((kid for body in bodies if (kid := seal.kid_of(body)) is not None), None)

    def take(self, found: Parcel, path: Path) -> None:
        """All of it, durable on return. May be repeated after a crash. Raises StorageError, OSError."""
        sealing = self._place.seal(self._snapshot.store_id)
        self._keep_blobs(path, sealing)
        told = self._snapshot.manifest
        self._cut_off = self._uncounted(found.head.run_id)
        place = self._next_place()
        heads, body = summary.summarise(found.state, place, "")
        raw = summary.encode(heads, sealing.seal(seal.summary_context(found.head.run_id, heads.last_seq), body))
        state = self._write_files(found, raw, sealing)
        self._write_manifest(found, heads, raw, told)
        self._index(found.head.run_id, state, heads)

    def _uncounted(self, run: str) -> dict[str, Summary]:
        """What imports that were cut off have left, but for this run."""
        told = self._snapshot.manifest
        others = {run, *(told.live if told is not None else ()), *(entry.run for entry in self._entries)}
        try:
            names = [name for name in self._disk.names(runfiles.FOLDER) if runfiles.names_a_run(name)]
        except FileNotFoundError:
            return {}
        places = told.places if told is not None else 1
        return dict(uncounted(self._disk, (name for name in names if name not in others), places))

    def _next_place(self) -> int:
        """Beyond every place that is taken. Most runs that only the log holds get theirs at the next start, from the one after
        this on; those of a checkpoint that was interrupted have theirs in their files."""
        told = self._snapshot.manifest
        taken = [told.places - 1 if told is not None else 0, *(heads.place for heads in self._cut_off.values())]
        for run in dict.fromkeys(entry.run for entry in self._entries):
            state = runfiles.read_state(self._disk, run)
            if state is not None:
                taken.append(summary.decode(state.summary).place)
        return max(taken) + 1

    def _keep_blobs(self, path: Path, sealing: seal.Seal) -> None:
        kept = blobs.Blobs(self._store / FOLDER, sealing)
        with path.open("rb") as stream:
            for item in parcel.Reader(str(path), stream).items():
                if isinstance(item, Line):
                    continue
                writer = kept.create()
                writer.write(item[1])
                writer.keep()

    def _write_files(self, found: Parcel, raw: bytes, sealing: seal.Seal) -> State:
        run, disk = found.head.run_id, self._disk
        state, parts = runfiles.empty(run), []
        chain, size = state.chain, 0
        for line in found.lines:
            sealed = Line(line.first, line.count, sealing.seal(seal.record_context(run, line.first), line.body))
            data, chain = runfiles.history_line(chain, sealed)
            parts.append(data)
            size += len(data)
        state = State(last_seq=found.head.last_seq, lines=len(parts), size=size, chain=chain, summary=raw)
        folder, history, name = runfiles.folder_of(run), runfiles.history_of(run), runfiles.state_of(run)
        for each in (runfiles.FOLDER, folder):
            if not disk.exists(each):
                disk.mkdir(each)
        # What an import that was cut off has left counts only with its state; that is replaced last.
        if disk.exists(name):
            disk.unlink(name)
            disk.syncdir(folder)
        self._new(history, b"".join(parts))
        disk.sync_many([history], [folder, runfiles.FOLDER, ""])
        self._new(name + _DRAFT, runfiles.encode_state(run, state))
        disk.sync_full(name + _DRAFT)
        disk.rename(name + _DRAFT, name)
        disk.syncdir(folder)
        return state

    def _write_manifest(self, found: Parcel, heads: Summary, raw: bytes, told: Manifest | None) -> None:
        if told is None:
            told = Manifest(
                store_id=self._snapshot.store_id, app=__version__, epoch=self._snapshot.epoch, at=_now(), places=1, ended={},
                base=Base(0, 0, 0),
            )  # fmt: skip
        ended = Counter(told.ended) + Counter(each.status for each in self._cut_off.values())
        live = dict(told.live)
        if heads.live:
            live[found.head.run_id] = raw
        else:
            ended[heads.status] += 1
        members = {name: getattr(told, name) for name in told.__struct_fields__ if name != "live"}
        # The next opening must not pass for the one in which the run was released: that was one of another store.
        epoch = max(told.epoch, self._snapshot.epoch, found.state.released_epoch)
        kid = self._place.seal(told.store_id).kid or told.kid
        after = Manifest(**members | {"ended": dict(ended), "places": heads.place + 1, "epoch": epoch, "kid": kid})
        self._new(manifest.FILE + _DRAFT, manifest.encode(after, live.items()))
        self._disk.sync_full(manifest.FILE + _DRAFT)
        self._disk.rename(manifest.FILE + _DRAFT, manifest.FILE)
        self._disk.syncdir("")

    def _index(self, run: str, state: State, heads: Summary) -> None:
        path = self._store / FILE_NAME
        row = ended_row(run, state, heads)
        if row is None or not path.exists():
            return  # it is made anew at the next start, by the number of runs that have ended
        with contextlib.suppress(IndexUnusable):
            index = Index(path)
            index.update([row], (), index.through, self._snapshot.store_id)
            index.close()

    def _new(self, name: str, data: bytes) -> None:
        if self._disk.exists(name):
            self._disk.unlink(name)
        self._disk.create(name)
        self._disk.write(name, 0, data)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
