"""The check of a store, part by part. Changes nothing, also beside a daemon that owns the store, or that comes and goes.

Knows: in which order the parts are read, and that what looks wrong is told only when a later view (`views`) has not said that it
was deleted or moved on meanwhile. Does not know: what is wrong with the log (`loglook`) or with a run (`judging`), how it is shown
(`verify`), or how anything is put right (`repair`).
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec

from rpcagent import errors
from rpcagent.journal import access, blobs, manifest, reading, record, runfiles, seal, tombstones
from rpcagent.journal.disk import Disk
from rpcagent.runs import summary
from rpcagent.runs.summary import Summary
from rpcagent.upkeep import judging, ledger, loglook, views
from rpcagent.upkeep.deletions import Trouble
from rpcagent.upkeep.findings import REPAIR, TRY, Finding, Row, Tell
from rpcagent.upkeep.judging import Judged
from rpcagent.upkeep.place import Owner, Place, owner_of
from rpcagent.upkeep.stories import blobs_of
from rpcagent.upkeep.views import View


class Check:
    """One check of a store. `table`, `runs` (how many there are) and `store_id` are filled by `run`, which tells every finding once
    it is sure of it. `owner`: a process that owned the store when the check began, or ended."""

    def __init__(
        self, place: Place, tell: Tell, *, replay: bool = False, progress: Callable[[str], None] | None = None
    ) -> None:
        self.place = place
        self.owner: Owner | None = owner_of(place.store)
        self.store_id = ""
        self.table = {name: Row(name) for name in ("log", "manifest", "runs", "tombstones", "blobs", "index")}
        self.runs = 0
        self._disk: Disk = place.disk()
        self._tell = tell
        self._replay = replay
        self._progress = progress or (lambda _text: None)
        self._told: list[Finding] = []
        self._referenced: dict[str, list[str]] = {}  # digest: the runs that refer to it
        self._missing: list[str] = []  # digests
        self._unread_tails = 0  # sealed commits in the log that may refer to blobs
        self._shut: set[str] = set()  # ids of keys that payloads are sealed with and that were not given
        self._ended: dict[str, Summary] = {}
        self._suspects: dict[str, Judged] = {}

    def run(self) -> None:
        """Raises StorageError where something cannot be read, StoreTooNew, KeyUnusable."""
        try:
            self._modes()
            view = self._log()
            self._runs(view)
            self._blobs(view)
            self._settle(view)
            self._keys()
        finally:
            self.place.close()

    # Modes

    def _modes(self) -> None:
        for found in access.check_modes(self.place.store, whole=True):
            severity = "warning" if found.verdict == "open" else "damage"
            self._tell(Finding(severity=severity, what=access.advice(self.place.store, found), file=found.name or "."))  # type: ignore[arg-type]

    # The log

    def _log(self) -> View:
        """Manifest, log and tombstones of one moment. What an owner is changing may look damaged: then it is looked at again, and
        told when it looks so once more, or when nothing was changed."""
        told: list[Finding] = []
        before: set[str] = set()
        for view, still in views.looks(self._disk, self._look):
            told = [*self._told, *loglook.about(self._disk, view, owned=self.owner is not None)]
            bad = {finding.file for finding in told if finding.severity != "note"}
            if still or bad <= before:
                break
            before = bad
        for finding in told:
            self._tell(finding)
        self.store_id = view.store_id
        row = self.table["log"]
        row.files, row.bytes, row.records = len(view.log.segments), view.log.size, view.log.records
        row.runs = len(view.spans)
        if view.manifest is not None:
            with contextlib.suppress(FileNotFoundError):
                size = self._disk.size(manifest.FILE)
                self.table["manifest"] = Row("manifest", 1, size, runs=len(view.manifest.live))
            size = sum(map(len, view.graves))
            self.table["tombstones"] = Row("tombstones", len(view.graves), size, records=size // tombstones.ID_BYTES)
        return view

    def _look(self) -> View:
        self._told, self._referenced, self._unread_tails = [], {}, 0
        return views.look(self._disk, self.place.seal, self._record, tails=self._replay)

    def _again(self) -> View:
        return views.look(self._disk, self.place.seal, tails=self._replay)

    def _record(self, line: record.Line, body: bytes | None, trouble: Trouble) -> None:
        self._progress(f"the log: record {line.seq}")
        if body is not None:
            self._refers(line.run, blobs_of(body))
        elif isinstance(trouble, seal.KeyMissing):
            self._unread_tails += 1
            self._shut.add(trouble.details["kid"])
        elif trouble is not None:
            what = f"a sealed payload that cannot be opened: {trouble.details['reason']}"
            number = (line.seq, line.seq)
            self._told.append(
                Finding(severity="damage", what=what, records=number, runs=[line.run], remedy=TRY + REPAIR)
            )

    def _refers(self, run: str, digests: tuple[str, ...]) -> None:
        for digest in digests:
            self._referenced.setdefault(digest, []).append(run)

    # Runs

    def _runs(self, view: View) -> None:
        live = view.manifest.live if view.manifest else {}
        seen, row = set(), self.table["runs"]
        for run in self._folders():
            self._progress(f"runs: {row.runs} read, {row.bytes} bytes")
            if view.has_deleted(run):
                when = "at the next start" if view.is_buried(run) else "by the next checkpoint"
                what = f"files of a deleted run, taken away {when}"
                self._tell(Finding(severity="note", what=what, file=f"runs/{run}"))
                continue
            seen.add(run)
            self._run(view, run)
        others = {run for run in live.keys() | view.spans.keys() if not view.has_deleted(run)}
        for run in sorted(others - seen):
            self._run(view, run)
        self.runs = len(seen | others)

    def _folders(self) -> list[str]:
        return list(filter(runfiles.names_a_run, self._names(runfiles.FOLDER)))

    def _run(self, view: View, run: str) -> None:
        found = judging.judge(self._disk, view, run, replay=self._replay)
        if found.told or found.unlisted:
            self._suspects[run] = found
        if found.kid is not None and (self.place.ring is None or self.place.ring.get(found.kid) is None):
            self._shut.add(found.kid)
        if found.state is None or found.heads is None:
            return
        row, state = self.table["runs"], found.state
        row.files, row.bytes, row.records = row.files + 2, row.bytes + state.size, row.records + state.lines
        row.runs += 1
        self._refers(run, found.heads.blobs)
        if not found.heads.live:
            self._ended[run] = found.heads

    # Blobs

    def _blobs(self, view: View) -> None:
        row = self.table["blobs"]
        folder = self.place.store / "blobs"
        kept = blobs.Blobs(folder, view.sealing)
        there, sealed = set(), 0
        for name in self._names("blobs"):
            if len(name) != 64:
                continue
            self._progress(f"blobs: {row.files} read, {row.bytes} bytes")
            there.add(name)
            try:
                row.bytes += kept.size(name)
                for _ in kept.pieces(name):
                    pass
            except errors.NotFound:
                continue  # collected meanwhile
            except seal.KeyMissing as error:
                sealed += 1
                self._shut.add(error.details["kid"])
            except errors.StoreDamaged as error:
                whose = self._referenced.get(name, ["none does"])[-1]
                lost = "the output is lost; the run that refers to it is whole: "
                self._tell(loglook.of_damage(error, lost + whose))
            row.files += 1
        if sealed:
            what = f"the content of {sealed} sealed files was not compared with the SHA-256 that they are named by"
            self._tell(Finding(severity="note", what=what, file="blobs"))
        self._missing = [each for each in sorted(self._referenced.keys() - there) if not self._is_there(folder / each)]
        spare = len(there - self._referenced.keys())
        if spare and not self._unread_tails:
            what = f"{spare} files that no run refers to; the daemon takes them away in time"
            self._tell(Finding(severity="note", what=what, file="blobs"))

    def _is_there(self, path: Path) -> bool:
        with contextlib.suppress(FileNotFoundError):
            return bool(path.stat())
        return False

    # What a later view confirms

    def _settle(self, first: View) -> None:
        """Tells what is missing or wrong with runs, as far as it was not deleted or filed anew while it was read."""
        judged_by, index, stable = first, None, False
        view = views.look_after(self._disk, first, self._again)
        for _ in range(views.TRIES):
            if not view.is_filed_as(judged_by):
                self._judge_again(view)
                judged_by = view
            # Before the states: a checkpoint writes those first, so whatever stands in the index has ended by then.
            index = self._index()
            if view is not first:
                self._sweep(view)
            after = views.look_after(self._disk, view, self._again)
            stable, view = after.is_filed_as(view), after
            if stable:
                break
        self.owner = self.owner or owner_of(self.place.store)
        self._tell_suspects(view)
        for digest in self._missing:
            runs = [run for run in self._referenced[digest] if not view.has_deleted(run)]
            if runs:
                self._tell(Finding(
                    severity="damage", what=f"a large output is missing: {digest}", file=f"blobs/{digest}", runs=runs[-1:],
                    remedy="restore the file from a backup; nothing else can",
                ))  # fmt: skip
        if not stable:
            what = "the runs that have ended were not counted: checkpoints are made faster than they can be"
            self._tell(Finding(severity="note", what=what, file=runfiles.FOLDER))
            return
        ended = {run: heads for run, heads in self._ended.items() if not view.has_deleted(run)}
        self._count_ended(view, ended)
        if index is not None and self.owner is None:  # a copy of what is being written would be none
            self._compare_index(index, view, ended)

    def _judge_again(self, view: View) -> None:
        again = {run: judging.judge(self._disk, view, run, replay=self._replay)
                 for run in self._suspects if not view.has_deleted(run)}  # fmt: skip
        self._suspects = {run: found for run, found in again.items() if found.told or found.unlisted}

    def _sweep(self, view: View) -> None:
        """Takes in what has ended since it was read, or was not there."""
        for run in self._folders():
            if run in self._ended or view.has_deleted(run):
                continue
            with contextlib.suppress(errors.StoreDamaged, errors.StorageError, msgspec.DecodeError):
                state = runfiles.read_state(self._disk, run)
                heads = summary.decode(state.summary) if state is not None else None
                if heads is not None and not heads.live:
                    self._ended[run] = heads

    def _tell_suspects(self, view: View) -> None:
        self._suspects = {run: found for run, found in self._suspects.items() if not view.has_deleted(run)}
        for run, found in self._suspects.items():
            for finding in found.told:
                self._tell(finding)
            if found.unlisted and self.owner is None and run not in self._ended.keys() | view.spans.keys():
                what = "the run has not ended, and no list names it: it never goes on"
                remedy = "`rpcagent repair` names it"
                self._tell(Finding(severity="warning", what=what, file=f"runs/{run}", runs=[run], remedy=remedy))

    def _count_ended(self, view: View, ended: dict[str, Summary]) -> None:
        """Runs that have ended are in no list but the index, so only their number tells that one is gone. What a checkpoint that is
        under way or was interrupted has filed is counted by none yet, and the log tells which runs those are; nor is what an import
        that was cut off has left, which has a place that is free."""
        live = view.manifest.live if view.manifest else {}
        places = view.manifest.places if view.manifest else 0
        begun = {run for run, spans in view.spans.items() if spans.rows[0][0] == 1}
        have = Counter(
            heads.status
            for run, heads in ended.items()
            if run not in live and run not in begun and heads.place < places
        )
        # Damaged, and told as such: whatever they are, they are not missing.
        spare = sum(
            found.files_are_bad and run not in live and run not in ended for run, found in self._suspects.items()
        )
        for status, count in view.ended.items():
            gone = count - have[status]
            known = min(spare, max(0, gone))
            spare -= known
            if gone > known:
                counted = view.manifest.ended[status] if view.manifest else count
                what = f"{gone - known} {status} runs are missing: the manifest counts {counted}"
                self._tell(Finding(severity="damage", what=what, file=runfiles.FOLDER, remedy=TRY + REPAIR))

    # The index

    def _index(self) -> ledger.Rows | None:
        """None beside an owner, whose own process keeps it."""
        self.owner = self.owner or owner_of(self.place.store)
        return ledger.read(self.place.store) if self.owner is None else None

    def _compare_index(self, index: ledger.Rows, view: View, ended: dict[str, Summary]) -> None:
        # What has records that no checkpoint covers may be filed already, by one that was interrupted, and be in the index
        # or not.
        open_ones = view.spans.keys()
        rows = {run: row for run, row in index.rows.items() if not view.has_deleted(run)}
        ledger.compare(index, rows, ended, open_ones, self._tell, self.table["index"])

    def _keys(self) -> None:
        if self._shut:
            shown = ", ".join(sorted(self._shut))
            what = f"payloads sealed with {shown} were not opened; checksums and links hold for them as they are sealed"
            remedy = "to have them opened, name that key with --encryption-key or --old-encryption-key"
            self._tell(Finding(severity="note", what=what, remedy=remedy))

    def _names(self, folder: str) -> list[str]:
        try:
            return self._disk.names(folder)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise reading.unreadable(folder, error) from error
