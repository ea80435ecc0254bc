"""The parts of a store, copied into a folder as of a single moment, while its owner goes on.

Knows: in which order the parts are copied, and how each run is cut to what the manifest counts. Does not know: how the copy is
checked, or gets its name (`backup`).

The manifest and the log behind it are read as one (`reading`). What was recorded later than they were read is in neither. The
files of runs may be further by then, or gone: of a run that has not ended exactly as many lines are copied as its summary in
the manifest counts, with that summary; of one that has, all that its state counts. A run that was deleted meanwhile is left
out, and its tombstone is taken along. Of one that the log deletes nothing is copied but that. Blobs come last, so that all that runs refer to is there.
"""

from __future__ import annotations

import contextlib
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from rpcagent import errors
from rpcagent.batch.faults import Mistake
from rpcagent.journal import manifest, reading, record, runfiles, seal, tombstones
from rpcagent.journal.checkpoint import read_manifest
from rpcagent.journal.disk import Disk, RealDisk
from rpcagent.journal.manifest import Manifest
from rpcagent.journal.reading import MovedOn, Snapshot
from rpcagent.journal.runfiles import State
from rpcagent.runs import summary
from rpcagent.upkeep import salvage
from rpcagent.upkeep.blob import FOLDER as BLOBS
from rpcagent.upkeep.deletions import Deletions, deletions_in

PARTS = ("trusted",)
"""What is copied as it is, besides the store's own files."""
_PIECE = 1 << 20


class Copy:
    """One attempt. `sealing`: what opens payloads of the store with this id. `make` raises MovedOn or FileNotFoundError where the
    owner was faster."""

    def __init__(
        self, store: Path, disk: Disk, dest: Path, sealing: Callable[[str], seal.Seal] = lambda _store_id: seal.Plain()
    ) -> None:
        self._store, self._disk, self._dest = store, disk, dest
        self._sealing = sealing
        self._seal: seal.Seal = seal.Plain()
        self._deletions = Deletions()
        self._files: list[Path] = []
        self._ended: dict[str, str] = {}
        self._held: set[str] = set()  # runs that are in the copy

    def make(self) -> Snapshot:
        self._dest.mkdir(mode=0o700)
        with contextlib.closing(RealDisk(self._dest)) as dest:  # before the first write: its sync tells of all of them
            snapshot = self._fill()
            self._sync(dest)
        return snapshot

    def _fill(self) -> Snapshot:
        snapshot = reading.read_store(self._disk)
        if not snapshot.store_id:
            raise Mistake(f"{self._store} has no log", code="NOT_FOUND")
        self._seal = self._sealing(snapshot.store_id)
        self._deletions = deletions_in(snapshot.entries(), self._seal)
        checksum = self._log(snapshot)
        told = snapshot.manifest
        if told is not None:
            self._runs(snapshot, told)
            self._manifest(snapshot, told)
        self._head(snapshot, checksum)
        self._blobs()
        for part in PARTS:
            if (self._store / part).is_file():
                self._write(part, (self._store / part).read_bytes())
        self._write("LOCK", b"")
        return snapshot

    def _log(self, snapshot: Snapshot) -> int:
        """Returns the checksum of the last record."""
        for name in snapshot.segments:
            data = self._disk.read(name)
            self._write(name, data if name != snapshot.segments[-1] else data[: snapshot.counted])
        return snapshot.end.checksum

    def _head(self, snapshot: Snapshot, checksum: int) -> None:
        slot = record.head_slot(record.Head(snapshot.epoch, snapshot.end.seq, checksum))
        self._write("HEAD", slot + b" " * (record.SLOT - 1) + b"\n")

    # Runs

    def _runs(self, snapshot: Snapshot, told: Manifest) -> None:
        for run, raw in told.live.items():
            try:
                self._live_run(run, raw)
            except errors.StoreDamaged as error:
                self._broken(run, error)
        begun = {entry.run for entry in snapshot.entries() if entry.first == 1}
        self._held |= begun
        passed = told.live.keys() | begun | self._deletions.status.keys()
        for run in self._names(runfiles.FOLDER):
            if runfiles.names_a_run(run) and run not in passed:
                try:
                    self._ended_run(run, told)
                except errors.StoreDamaged as error:
                    self._broken(run, error)

    def _live_run(self, run: str, raw: bytes) -> None:
        """As the manifest counts it, whatever its files have come to since."""
        last = summary.decode(raw).last_seq
        state = runfiles.read_state(self._disk, run)
        if state is None:
            raise MovedOn(f"{run} was deleted, or its state is missing", errno="ESTALE")
        self._held.add(run)
        if last in {0, state.last_seq}:  # 0: of a run that cannot be replayed
            self._files_of(run, state)
            return
        kept = _cut(self._disk, run, state, last)
        self._files_of(run, State(last_seq=last, lines=kept.lines, size=kept.size, chain=kept.chain, summary=raw))

    def _ended_run(self, run: str, told: Manifest) -> None:
        state = runfiles.read_state(self._disk, run)
        if state is None:
            return  # deleted, or no run yet
        heads = summary.decode(state.summary)
        if heads.place >= told.places:
            return  # begun after the manifest
        if not heads.live:
            self._ended[run] = heads.status
        try:
            self._files_of(run, state)
        except FileNotFoundError:  # deleted while it was copied
            self._leave_out(run)
            return
        self._held.add(run)

    def _leave_out(self, run: str) -> None:
        shutil.rmtree(self._dest / runfiles.folder_of(run), ignore_errors=True)

    def _broken(self, run: str, _error: errors.StoreDamaged) -> None:
        """The files of a run that are damaged are copied as they are: the check of the copy tells."""
        for name in self._names(runfiles.folder_of(run)):
            path = f"{runfiles.folder_of(run)}/{name}"
            (self._dest / path).unlink(missing_ok=True)
            self._write(path, self._disk.read(path))

    def _files_of(self, run: str, state: State) -> None:
        """What `state` counts of the history, and `state`."""
        history = runfiles.history_of(run)
        path = self._path(history)
        with path.open("xb") as out:
            path.chmod(0o600)
            offset = 0
            while offset < state.size:
                data = self._disk.read_at(history, offset, min(_PIECE, state.size - offset))
                if not data:
                    raise runfiles.cut(run, offset)
                out.write(data)
                offset += len(data)
        self._files.append(path)
        self._write(runfiles.state_of(run), runfiles.encode_state(run, state))

    def _manifest(self, snapshot: Snapshot, told: Manifest) -> None:
        """With the tombstones of now: whatever was deleted while the files were copied is among them, or deleted by the log of
        now; then it must have been copied before."""
        fresh = reading.read_store(self._disk)
        now = fresh.manifest or told
        named = [tombstones.Named(file.name, file.count, file.sum) for file in now.tombstones]
        for file in named:
            try:
                data = tombstones.read(self._disk, file)
            except errors.StoreDamaged:
                if read_manifest(self._disk) != now:
                    raise MovedOn("tombstones were put together", errno="ESTALE") from None
                raise
            self._write(f"{tombstones.FOLDER}/{file.name}", data)
        since = self._deleted_since(fresh)
        graves = tombstones.Tombstones(self._disk, named) if now != told else frozenset[str]()
        deleted = self._deletions.status
        under_way = [run for run in (*told.live, *(entry.run for entry in snapshot.entries())) if run not in deleted]
        if since - self._held or any(run in graves for run in under_way):
            raise MovedOn("a run was deleted that is under way in the copy, or not in it", errno="ESTALE")
        ended = told.ended if now == told else self._counted(told, now, graves)
        members = {name: getattr(told, name) for name in told.__struct_fields__ if name != "live"}
        after = Manifest(**members | {"ended": ended, "tombstones": now.tombstones, "kid": self._kid(told)})
        lines = ((run, self._summary(run, raw)) for run, raw in told.live.items())
        self._write(manifest.FILE, manifest.encode(after, lines))

    def _counted(self, told: Manifest, now: Manifest, graves: tombstones.Tombstones | frozenset[str]) -> dict[str, int]:
        """What `told` counts, less what was buried since; so a run that is lost, or damaged, is counted as before. A replay takes
        those off itself that the log deletes."""
        gone = [run for run in self._ended if run in graves]
        buried = sum(file.count for file in now.tombstones) - sum(file.count for file in told.tombstones)
        if buried != len(gone) + sum(run in graves for run in self._deletions.status):
            raise MovedOn("runs were deleted before they were seen", errno="ESTALE")
        return dict(Counter(told.ended) - Counter(self._ended[run] for run in gone))

    def _deleted_since(self, fresh: Snapshot) -> set[str]:
        """Runs that had files when the copy was begun, and that the log of now deletes, or may delete."""
        now = deletions_in(fresh.entries(), self._seal)
        before = self._deletions
        return (now.status.keys() | now.sealed.keys()) - before.status.keys() - before.sealed.keys()

    def _summary(self, _run: str, raw: bytes) -> bytes:
        return raw

    def _kid(self, told: Manifest) -> str:
        return told.kid

    def _blobs(self) -> None:
        for name in self._names(BLOBS):
            if len(name) != 64:
                continue
            with contextlib.suppress(FileNotFoundError):  # nobody referred to it any more
                self._blob(name)

    def _blob(self, digest: str) -> None:
        with (self._store / BLOBS / digest).open("rb") as found:
            path = self._path(f"{BLOBS}/{digest}")
            with path.open("xb") as out:
                path.chmod(0o600)
                shutil.copyfileobj(found, out, _PIECE)
            self._files.append(path)

    # Files

    def _write(self, name: str, data: bytes) -> None:
        path = self._path(name)
        with path.open("xb") as out:
            path.chmod(0o600)
            out.write(data)
        self._files.append(path)

    def _path(self, name: str) -> Path:
        path = self._dest / name
        missing = []
        folder = path.parent
        while not folder.is_dir():
            missing.append(folder)
            folder = folder.parent
        for each in reversed(missing):
            each.mkdir(mode=0o700)
        return path

    def _names(self, folder: str) -> Iterator[str]:
        try:
            yield from self._disk.names(folder)
        except FileNotFoundError:
            return

    def _sync(self, dest: RealDisk) -> None:
        names = [str(path.relative_to(self._dest)) for path in self._files]
        folders = {str(Path(name).parent) for name in names} | {runfiles.FOLDER}
        there = [folder for folder in sorted(folders) if folder != "." and (self._dest / folder).is_dir()]
        dest.sync_many(names, [*there, ""])


def _cut(disk: Disk, run: str, state: State, last: int) -> salvage.Prefix:
    """How much of a history goes up to event `last`. Raises StoreDamaged where no commit ends there."""
    found = salvage.read_history(disk, run, state.size, lambda _line: None, upto=last)
    if found is None:
        raise MovedOn(f"{run} was deleted", errno="ESTALE")
    if found.events != last:
        raise runfiles.damaged(run, runfiles.history_of(run), found.size, f"no commit ends at event {last}")
    return found
