"""Safeguards of a checkpoint, each taken away: what the checks of `checkpoint_story` must catch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from msgspec.structs import replace
from rpcagent.journal import opening, runfiles
from rpcagent.journal.checkpoint import Checkpointer
from rpcagent.journal.runfiles import Line, State
from rpcagent.journal.tail import Position
from rpcagent.journal.wal import Wal

from . import checkpoint_damage as damage
from . import checkpoint_story as story
from .simdisk import SimDisk


class SomeSyncs(SimDisk):
    """Syncs of many names leave some out."""

    def left_out(self, name: str, files: Sequence[str]) -> bool:
        """Each kind says which."""
        return False

    def sync_many(self, files: Sequence[str], folders: Sequence[str]) -> None:
        kept = [name for name in files if not self.left_out(name, files)]
        super().sync_many(kept, [name for name in folders if not self.left_out(name + "/", files)])


class NoHistorySync(SomeSyncs):
    def left_out(self, name: str, files: Sequence[str]) -> bool:
        return name.endswith("history.jsonl")


class NoStateSync(SomeSyncs):
    def left_out(self, name: str, files: Sequence[str]) -> bool:
        return name.endswith("state.json.tmp")


class NoManifestSync(SomeSyncs):
    def left_out(self, name: str, files: Sequence[str]) -> bool:
        return name == "checkpoint.json.tmp"


class NoTombstoneSync(SomeSyncs):
    def left_out(self, name: str, files: Sequence[str]) -> bool:
        return name.endswith(".bin")


class NoTombstoneFolderSync(SomeSyncs):
    def left_out(self, name: str, files: Sequence[str]) -> bool:
        return name == "tombstones/"


class NoFolderSync(SomeSyncs):
    def left_out(self, name: str, files: Sequence[str]) -> bool:
        return name.endswith("/")


class NoSyncOfFoldersOfRuns(SomeSyncs):
    """The names of the folders of runs, in runs/, are not made durable."""

    def left_out(self, name: str, files: Sequence[str]) -> bool:
        return name == "runs/"


class NoSyncOfStateNames(SomeSyncs):
    """state.json is renamed, and the manifest does not wait for its name."""

    def left_out(self, name: str, files: Sequence[str]) -> bool:
        return name.startswith("runs/") and name != "runs/" and name.endswith("/") and not files


class NoSyncOfManifestName(SomeSyncs):
    """checkpoint.json is renamed, and the segments do not wait for its name."""

    def left_out(self, name: str, files: Sequence[str]) -> bool:
        return name == "/" and not files


class ManifestFirst(Checkpointer):
    """The manifest does not wait for the states."""

    def write(self, mark, header, changes, live, deleted, tombstone_file, index) -> int:
        live = list(live)
        self.early = (mark, header, live)
        return super().write(mark, header, changes, live, deleted, tombstone_file, index)

    def _write_runs(self, steps) -> None:
        self._write_manifest(*self.early)
        super()._write_runs(steps)


class SegmentsFirst(Checkpointer):
    """Segments are deleted before the manifest has its name."""

    def _write_manifest(self, mark, header, live) -> None:
        self._delete(mark.seq, header, ())
        super()._write_manifest(mark, header, live)


class FoldersFirst(Checkpointer):
    """The folders of deleted runs are deleted before the manifest names their tombstones."""

    def write(self, mark, header, changes, live, deleted, tombstone_file, index) -> int:
        self._delete(0, header, deleted)
        return super().write(mark, header, changes, live, deleted, tombstone_file, index)


class AppendsAtTheEnd(Checkpointer):
    """Leftovers are not cut: new lines go to the end of the file, wherever that is."""

    def _append(self, step) -> None:
        name = runfiles.history_of(step.run)
        if not self._disk.exists(name):
            self._disk.create(name)
        self._disk.write(name, self._disk.size(name), b"".join(step.blob))


class NothingWhereNothingIsNew(Checkpointer):
    """A run whose files look as they should is passed over, though its names may not be durable."""

    def _write_runs(self, steps) -> None:
        super()._write_runs([step for step in steps if step.before != step.after])


class TrustsNamesOfAnEarlierProcess(Checkpointer):
    """A run with records before the mark, all of which its files hold, is passed over."""

    def _settle_owed(self, done) -> None:
        pass


class MovesAll(Checkpointer):
    """Appends what the history holds already: no look at the event numbers."""

    def _prepare(self, change, done):
        before = runfiles.read_state(self._disk, change.run) or runfiles.empty(change.run)
        lines = [Line(before.last_seq + 1 + 2 * i, 2, line.body) for i, line in enumerate(change.lines)]
        self._owed[change.run] = before.last_seq + 2 * len(lines)
        return super()._prepare(
            type(change)(change.run, lines, story.summary_of(change.run, self._owed[change.run])), done
        )


class PastAFailedSync(Checkpointer):
    """A failed sync is an error like any other: answered, tried again."""

    def _sync_many(self, files, folders) -> None:
        try:
            self._disk.sync_many(files, folders)
        except OSError:
            self._disk.sync_many(files, folders)


class MarkedWhereItStands(Wal):
    """A mark begins no segment: the checkpoint covers a part of one."""

    def _holds_records(self) -> bool:
        return False


def with_checkpoints(kind: type[Checkpointer], store: type[story.Store] = story.Store) -> type[story.Store]:
    return type(f"With{kind.__name__}", (store,), {"checkpoints": kind})


def with_log(kind: type[Wal]) -> type[story.Store]:
    return type(f"With{kind.__name__}", (story.Store,), {"log": kind})


class ReplaysAll(story.Store):
    """The replay does not skip what the history holds."""

    def is_held(self, run: str, line: Line) -> bool:
        return False


class ReadsFromTheStart(story.Store):
    """The position of the manifest is not where the log begins."""

    def open_log(self, found) -> Wal:
        seen = opening.look

        def look(disk, base, store_id):
            return seen(disk, None, store_id)

        opening.look = look
        try:
            return super().open_log(found)
        finally:
            opening.look = seen


class TakesAMissingSegmentForAnEmptyLog(damage.Indexed):
    """The position of the manifest is no watermark: a log that is not there after it is begun anew."""

    def open_log(self, found) -> Wal:
        seen = opening.look

        def look(disk, base, store_id):
            if base and not disk.exists(f"wal/{base.seq + 1:016d}.jsonl"):
                place = (base.seq, base.checksum, base.batch)
                return opening.Found(Position(*place), Position(*place), has_folder=True, has_head=disk.exists("HEAD"))
            return seen(disk, base, store_id)

        opening.look = look
        try:
            return super().open_log(found)
        finally:
            opening.look = seen


class TrustsTheLengthOfAHistory(story.Store):
    """What stands behind the counted bytes is read too."""

    def _load(self, live: set[str]) -> None:
        seen = runfiles.decode_state

        def decode(run: str, data: bytes) -> State:
            state = seen(run, data)
            return replace(state, size=max(state.size, self.disk.size(runfiles.history_of(run))))

        runfiles.decode_state = decode
        try:
            super()._load(live)
        finally:
            runfiles.decode_state = seen


Check = Callable[..., object]


def crash(kind: type[story.Store], disk: type[SimDisk]) -> None:
    """a crash at each call"""
    story.crash_everywhere(kind, disk, cap=4, shapes=24)


def failed_sync(kind: type[story.Store], disk: type[SimDisk]) -> None:
    """each sync fails"""
    story.fail_each_sync(kind, disk)


def lost_file(kind: type[story.Store], disk: type[SimDisk]) -> None:
    """each file is lost"""
    damage.lose_each_file(kind)


class Mutant(NamedTuple):
    name: str
    kind: type[story.Store]
    disk: type[SimDisk]
    check: Check

    def caught(self) -> str | None:
        """By what; None if it was not."""
        try:
            self.check(self.kind, self.disk)
        except (AssertionError, ValueError) as error:
            return str(error).partition("\n")[0]
        return None


MUTANTS = (
    Mutant("no sync of histories", story.Store, NoHistorySync, crash),
    Mutant("no sync of states", story.Store, NoStateSync, crash),
    Mutant("no sync of folders", story.Store, NoFolderSync, crash),
    Mutant("no sync of runs/", story.Store, NoSyncOfFoldersOfRuns, crash),
    Mutant("no sync of the names of states", story.Store, NoSyncOfStateNames, crash),
    Mutant("no sync of the manifest", story.Store, NoManifestSync, crash),
    Mutant("no sync of the name of the manifest", story.Store, NoSyncOfManifestName, crash),
    Mutant("no sync of tombstones", story.Store, NoTombstoneSync, crash),
    Mutant("no sync of tombstones/", story.Store, NoTombstoneFolderSync, crash),
    Mutant("manifest before states", with_checkpoints(ManifestFirst), SimDisk, crash),
    Mutant("segments deleted before the manifest", with_checkpoints(SegmentsFirst), SimDisk, crash),
    Mutant("folders deleted before the manifest", with_checkpoints(FoldersFirst), SimDisk, crash),
    Mutant("no cut of leftovers", with_checkpoints(AppendsAtTheEnd), SimDisk, crash),
    Mutant("a run that looks right is passed over", with_checkpoints(NothingWhereNothingIsNew), SimDisk, crash),
    Mutant("a run without news is passed over", with_checkpoints(TrustsNamesOfAnEarlierProcess, story.Eager), SimDisk, crash),
    Mutant("no skip by event number, checkpoint", with_checkpoints(MovesAll), SimDisk, crash),
    Mutant("no skip by event number, replay", ReplaysAll, SimDisk, crash),
    Mutant("a failed sync is tried again", with_checkpoints(PastAFailedSync), SimDisk, failed_sync),
    Mutant("a mark begins no segment", with_log(MarkedWhereItStands), SimDisk, crash),
    Mutant("the log is read from its start", ReadsFromTheStart, SimDisk, crash),
    Mutant("leftovers of a history are read", TrustsTheLengthOfAHistory, SimDisk, crash),
    Mutant("the position is no watermark", TakesAMissingSegmentForAnEmptyLog, SimDisk, lost_file),
)  # fmt: skip
