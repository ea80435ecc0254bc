"""A checkpoint: what the log holds of each run goes into the files of the run, then the log up to there is deleted.

Knows: the order of the steps and what is durable after each; what is left over from one that was interrupted. Does not
know: what a summary or an event says, when a checkpoint is due, what the index is. Synchronous: for a worker thread, with
a disk of its own; the log goes on meanwhile.

The log is the truth until the manifest has its name: a crash or an error before that leaves files that are ahead of the
manifest. The replay skips what they hold, and the next checkpoint goes on from them. So for each run of a checkpoint
every step is durable before the next one begins, and the manifest comes after all of them:

1. history.jsonl: what stands behind the counted bytes is cut, the new lines are appended;
2. the histories and the folders are synced;
3. state.json.tmp is written and synced;
4. it is renamed to state.json, and the folder is synced;
5. a new file of tombstones, if runs are deleted, is written and synced, its folder too;
6. the index is brought up to date, in a transaction of its own;
7. checkpoint.json.tmp is written, synced, renamed to checkpoint.json, and the folder is synced;
8. segments that the manifest covers, folders of deleted runs and files that it no longer names are deleted.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from rpcagent import errors
from rpcagent.journal import manifest, opening, record, runfiles, tail
from rpcagent.journal.disk import NotSynced
from rpcagent.journal.manifest import Base, Header, Manifest
from rpcagent.journal.runfiles import Line, State

if TYPE_CHECKING:
    from rpcagent.journal.disk import Disk, Fence
    from rpcagent.journal.wal import Mark

SLICE_RUNS = 500
SLICE_BYTES = 8 << 20
"""Runs and bytes of bodies that steps 1 to 4 take at once: this bounds what is held in memory."""

_DRAFT = ".tmp"
_WRITE = 1 << 20
_ID = 16  # bytes of a deleted run in a file of tombstones
_TOMBSTONES = re.compile(r"\d{16}\.bin")
_SEGMENT = re.compile(r"\d{16}\.jsonl")


class Change(msgspec.Struct, frozen=True):
    """What is new of a run: lines that may begin with some that its history holds already, and its summary now."""

    run: str
    lines: list[Line]
    summary: bytes


class _Step(msgspec.Struct, frozen=True):
    """A change, checked against what the files hold: the lines to append, and the state before and after."""

    run: str
    before: State
    after: State
    blob: list[bytes]


def read_manifest(disk: Disk) -> Manifest | None:
    """None if there is none. Raises StoreDamaged, StoreTooNew, StorageError where it cannot be read."""
    try:
        data = disk.read(manifest.FILE)
    except FileNotFoundError:
        return None
    except OSError as error:
        found = errors.name_of(error)
        raise errors.StorageError(f"{manifest.FILE} cannot be read ({found}).", errno=found) from error
    return manifest.decode(data)


class Checkpointer:
    """Makes the checkpoints of one process, one at a time. After any StoragePoisoned it makes no more."""

    def __init__(self, disk: Disk, lock: Fence | None = None) -> None:
        self._disk = disk
        self._lock = lock
        self._owed: dict[str, int] = {}  # ends of runs that marks told and no manifest covers yet
        self._poisoned: str | None = None

    def write(
        self,
        mark: Mark,
        header: Header,
        changes: Iterable[Change],
        live: Iterable[tuple[str, bytes]],
        deleted: Sequence[str],
        tombstone_file: tuple[str, bytes] | None,
        index: Callable[[], None],
    ) -> int:
        """Makes the checkpoint at `mark`: on return the log begins there. `changes`: each run with records that its files do
        not hold, up to its end at `mark` or beyond it (never with a record that is not acknowledged: the log might lose
        it), and each whose summary changed; taken in slices. `live`: run and summary of all live runs. `deleted`: runs
        that the new file of tombstones holds. `index` is step 6.

        Returns how many names step 8 could not delete; a later `sweep` tries again.
        Raises StorageError (errno): the store opens as before, try again with a new mark. StoragePoisoned: a sync failed,
        or another process owns the store; nothing more may be written. StoreDamaged: the files of a run in `changes`.
        ValueError for events that are missing or of a run that is in `deleted` too; nothing of that slice was written, and
        no manifest."""
        if self._poisoned:
            raise self._poison(self._poisoned)
        self._owed |= mark.ends
        try:
            self._check(mark, header, tombstone_file)
            done = set(deleted)
            for part in _slices(changes):
                self._write_runs([self._prepare(change, done) for change in part])
            self._settle_owed(done)
            if tombstone_file is not None:
                self._write_tombstones(*tombstone_file)
            index()
            self._write_manifest(mark, header, live)
        except OSError as error:
            name = errors.name_of(error)
            raise errors.StorageError(f"The checkpoint cannot be made ({name}).", errno=name) from error
        self._owed.clear()
        with contextlib.suppress(errors.StorageError):
            return self._delete(mark.seq, header, deleted)
        return 1

    def sweep(self, found: Manifest | None = None) -> int:
        """Step 8 of the last checkpoint, after an opening: what a crash did not let happen. `found`: its manifest, where it
        was read already; its live runs do not count. Returns how many names could not be deleted.

        Raises StoreDamaged (a file of tombstones is not the one that the manifest names), StorageError where something
        cannot be read."""
        found = found or read_manifest(self._disk)
        if found is None:
            return 0
        try:
            dead = self._dead(found)
        except OSError as error:
            name = errors.name_of(error)
            raise errors.StorageError(f"The tombstones cannot be read ({name}).", errno=name) from error
        return self._delete(found.base.seq, found, dead)

    # Steps 1 to 4

    def _check(self, mark: Mark, header: Header, tombstone_file: tuple[str, bytes] | None) -> None:
        self._check_ownership(header.epoch)
        if not self._disk.exists(f"{opening.FOLDER}/{mark.seq + 1:016d}.jsonl"):
            raise ValueError("no segment begins at the mark")
        if tombstone_file is None:
            return
        name, data = tombstone_file
        named = manifest.TombstoneFile(name, len(data) // _ID, hashlib.sha256(data).hexdigest())
        present = read_manifest(self._disk)
        if named not in header.tombstones or (present and name in {file.name for file in present.tombstones}):
            raise ValueError("a file of tombstones is new, and named with its count and sum")

    def _check_ownership(self, epoch: int) -> None:
        if self._lock is not None and not self._lock.held():
            raise self._poison("ESTALE")
        head, _ = record.read_head(self._disk.read_at("HEAD", 0, 2 * record.SLOT))
        if head is None or head.epoch != epoch:
            raise self._poison("ESTALE")

    def _prepare(self, change: Change, done: set[str]) -> _Step:
        run = change.run
        if run in done:
            raise ValueError(f"{run} is changed twice, or changed and deleted")
        done.add(run)
        before = runfiles.read_state(self._disk, run) or runfiles.empty(run)
        event, chain, blob = before.last_seq, before.chain, []
        for line in change.lines:
            last = line.first + line.count - 1
            if last <= before.last_seq:
                continue
            if line.first != event + 1 or line.count < 1 or b"\n" in line.body:
                raise ValueError(f"{run}: event {event + 1} is missing before event {line.first}")
            data, chain = runfiles.history_line(chain, line)
            blob.append(data)
            event = last
        if event < self._owed.get(run, 0):
            raise ValueError(f"{run}: its last event at the mark is {self._owed[run]}, not {event}")
        size = before.size + sum(map(len, blob))
        after = State(last_seq=event, lines=before.lines + len(blob), size=size, chain=chain, summary=change.summary)
        return _Step(run, before, after, blob)

    def _settle_owed(self, done: set[str]) -> None:
        """Runs with records before the mark and no change: their files hold them already. They do since the last checkpoint,
        which took what was recorded after its mark, or since one of an earlier process, which may have been killed before
        the names were durable."""
        folders = []
        for run in sorted(self._owed.keys() - done):
            state = runfiles.read_state(self._disk, run)
            if state is None or state.last_seq < self._owed[run]:
                raise ValueError(f"{run} has records before the mark and no change")
            folders.append(runfiles.folder_of(run))
        if folders:
            self._sync_many([], ["", runfiles.FOLDER, *folders])

    def _write_runs(self, steps: list[_Step]) -> None:
        if not self._disk.exists(runfiles.FOLDER):
            self._disk.mkdir(runfiles.FOLDER)
        states = [(runfiles.state_of(step.run), runfiles.encode_state(step.run, step.after)) for step in steps]
        folders = [runfiles.folder_of(step.run) for step in steps]
        for step, folder in zip(steps, folders, strict=True):
            if not self._disk.exists(folder):
                self._disk.mkdir(folder)
            self._append(step)
        # Also what is there already: the process that made it may have been killed before it was durable.
        histories = [runfiles.history_of(step.run) for step in steps if step.blob or not step.before.lines]
        self._sync_many(histories, ["", runfiles.FOLDER, *folders])
        for name, data in states:
            self._write_new(name + _DRAFT, data)
        self._sync_many([name + _DRAFT for name, _ in states], [])
        for name, _ in states:
            self._disk.rename(name + _DRAFT, name)
        self._sync_many([], folders)

    def _append(self, step: _Step) -> None:
        name, offset = runfiles.history_of(step.run), step.before.size
        if self._disk.exists(name):
            size = self._disk.size(name)
            if size < offset:
                raise runfiles.cut(step.run, size)
            if size > offset:
                self._disk.truncate(name, offset)
        elif offset:
            raise runfiles.lost(step.run)
        else:
            self._disk.create(name)
        for piece in _pieces(step.blob):
            self._disk.write(name, offset, piece)
            offset += len(piece)

    # Steps 5 and 7

    def _write_tombstones(self, name: str, data: bytes) -> None:
        folder = opening.TOMBSTONES
        if not self._disk.exists(folder):
            self._disk.mkdir(folder)
        self._write_new(f"{folder}/{name}", data)
        self._sync_many([f"{folder}/{name}"], [folder, ""])

    def _write_manifest(self, mark: Mark, header: Header, live: Iterable[tuple[str, bytes]]) -> None:
        base = Base(mark.seq, mark.checksum, mark.batch)
        members = {name: getattr(header, name) for name in Header.__struct_fields__}
        draft = manifest.FILE + _DRAFT
        self._write_new(draft, manifest.encode(Manifest(**members, base=base), live))
        self._sync_many([draft], [])
        self._check_ownership(header.epoch)
        self._disk.rename(draft, manifest.FILE)
        self._sync_many([], [""])

    def _write_new(self, name: str, data: bytes) -> None:
        """A file of its own, also where one is left over: nothing of that can shine through."""
        if self._disk.exists(name):
            self._disk.unlink(name)
        self._disk.create(name)
        self._disk.write(name, 0, data)

    def _sync_many(self, files: Sequence[str], folders: Sequence[str]) -> None:
        try:
            self._disk.sync_many(files, folders)
        except NotSynced:
            raise  # no descriptor was left: the steps before count for nothing, and are done again
        except OSError as error:
            # Never again: the pages may be marked as clean by now, and a second sync would lie.
            raise self._poison(errors.name_of(error)) from error

    def _poison(self, name: str) -> errors.StoragePoisoned:
        self._poisoned = name
        return errors.StoragePoisoned(f"A checkpoint failed in a way that cannot be tried again ({name}).", errno=name)

    # Step 8

    def _delete(self, through: int, header: Header, dead: Iterable[str]) -> int:
        """Deletes what no longer counts. What fails is counted, not raised: it is left over as after a crash."""
        failed = 0
        for name in self._leftovers(through, {file.name for file in header.tombstones}):
            failed += not self._gone(self._disk.unlink, name)
        return failed + self.remove(dead)

    def remove(self, dead: Iterable[str]) -> int:
        """Deletes the files of runs whose deletion is in the log. Returns how many names could not be deleted."""
        failed = 0
        for run in dead:
            folder = runfiles.folder_of(run)
            # Without its state a run is no run, whatever else is left of it.
            for name in (runfiles.state_of(run), runfiles.state_of(run) + _DRAFT, runfiles.history_of(run)):
                failed += not self._gone(self._disk.unlink, name)
            failed += not self._gone(self._disk.rmdir, folder)
        return failed

    def _leftovers(self, through: int, named: set[str]) -> Iterator[str]:
        for file in self._names(opening.FOLDER):
            # A draft belongs to the log, which may be making it now.
            if _SEGMENT.fullmatch(file) and int(file[:16]) <= through:
                yield f"{opening.FOLDER}/{file}"
        for file in self._names(opening.TOMBSTONES):
            if _TOMBSTONES.fullmatch(file) and file not in named:
                yield f"{opening.TOMBSTONES}/{file}"
        if manifest.FILE + _DRAFT in self._names(""):
            yield manifest.FILE + _DRAFT

    def _dead(self, found: Manifest) -> list[str]:
        """Runs that are deleted and have a folder all the same."""
        if not found.tombstones:
            return []
        graves = [self._tombstones(file) for file in found.tombstones]
        return [run for run in self._names(runfiles.FOLDER) if record.is_run(run) and _buried(run, graves)]

    def _tombstones(self, file: manifest.TombstoneFile) -> list[bytes]:
        name = f"{opening.TOMBSTONES}/{file.name}"
        try:
            data = self._disk.read(name)
        except FileNotFoundError:
            raise tail.damaged(name, 0, "the file of tombstones is missing") from None
        if len(data) != _ID * file.count or hashlib.sha256(data).hexdigest() != file.sum:
            raise tail.damaged(name, 0, "the tombstones are not those that the manifest names")
        return [data[place : place + _ID] for place in range(0, len(data), _ID)]

    def _names(self, folder: str) -> list[str]:
        try:
            return self._disk.names(folder)
        except FileNotFoundError:
            return []
        except OSError as error:
            found = errors.name_of(error)
            raise errors.StorageError(f"The names in {folder} cannot be read ({found}).", errno=found) from error

    def _gone(self, delete: Callable[[str], None], name: str) -> bool:
        try:
            delete(name)
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return True


def _slices(changes: Iterable[Change]) -> Iterator[list[Change]]:
    part: list[Change] = []
    size = 0
    for change in changes:
        part.append(change)
        size += sum(len(line.body) for line in change.lines)
        if len(part) >= SLICE_RUNS or size >= SLICE_BYTES:
            yield part
            part, size = [], 0
    if part:
        yield part


def _pieces(lines: list[bytes]) -> Iterator[bytes]:
    """The lines, joined to pieces of a size that is worth a call."""
    held: list[bytes] = []
    size = 0
    for line in lines:
        held.append(line)
        size += len(line)
        if size >= _WRITE:
            yield b"".join(held)
            held, size = [], 0
    if held:
        yield b"".join(held)


def _buried(run: str, graves: list[list[bytes]]) -> bool:
    identity = hashlib.blake2b(run.encode(), digest_size=_ID).digest()
    for grave in graves:
        place = bisect_left(grave, identity)
        if place < len(grave) and grave[place] == identity:
            return True
    return False
