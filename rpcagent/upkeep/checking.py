"""The check of a store, part by part. Changes nothing, also beside a daemon that owns the store.

Knows: in which order the parts are read so that an owner who goes on writing is never taken for damage, and what each finding
means to a person. Does not know: how it is shown (`verify`), or how anything is put right (`repair`).
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from rpcagent import errors
from rpcagent.journal import access, blobs, manifest, opening, reading, record, runfiles, seal, tombstones
from rpcagent.journal.checkpoint import read_manifest
from rpcagent.journal.disk import Disk
from rpcagent.journal.manifest import Manifest
from rpcagent.journal.runfiles import Line, State
from rpcagent.runs import summary
from rpcagent.runs.summary import Summary
from rpcagent.upkeep import salvage
from rpcagent.upkeep.findings import Finding, Row, Tell
from rpcagent.upkeep.folding import Replay
from rpcagent.upkeep.ledger import check_index
from rpcagent.upkeep.place import Owner, Place, owner_of
from rpcagent.upkeep.stories import Spans, blobs_of, opened

TRIES = 5
_REPAIR = "`rpcagent repair --dry-run` says what can be kept"
_UNREAD = "mend what keeps it from being read (the disk, a link, the modes), and check again"
_TRY = "restore it from a backup; without one: "


class Check:
    """One check of a store. `table`, `runs` (how many there are) and `store_id` are filled by `run`, which tells every finding as it comes."""

    def __init__(
        self, place: Place, tell: Tell, *, replay: bool = False, progress: Callable[[str], None] | None = None
    ) -> None:
        self.place = place
        self.owner: Owner | None = owner_of(place.store)
        self.store_id = ""
        self.table = {name: Row(name) for name in ("log", "manifest", "runs", "tombstones", "blobs", "index")}
        self._disk: Disk = place.disk()
        self._tell = tell
        self._replay = replay
        self._progress = progress or (lambda _text: None)
        self._manifest: Manifest | None = None
        self._spans: dict[str, Spans] = {}
        self._tails: dict[str, list[Line]] = {}
        self._referenced: dict[str, str] = {}  # digest: a run that refers to it
        self._unread_tails = 0  # sealed commits in the log that may refer to blobs
        self._shut: set[str] = set()  # ids of keys that payloads are sealed with and that were not given
        self._ended: dict[str, Summary] = {}
        self._graves: list[bytes] = []
        self._seal: seal.Seal = seal.Plain()
        self._log_is_whole = True
        self.runs = 0
        self._told: list[Finding] = []
        self._unlisted = 0

    def run(self) -> None:
        """Raises StorageError where something cannot be read, StoreTooNew, KeyUnusable."""
        try:
            self._modes()
            self._log()
            self._tombstones()
            self._runs()
            self._blobs()
            self._index()
            self._keys()
        finally:
            self.place.close()

    def _damage(self, error: errors.StoreDamaged, remedy: str = _REPAIR, **more: Any) -> None:
        told = error.details
        file, offset = str(told.get("file", "")), told.get("offset")
        self._tell(
            Finding(
                severity="damage", what=str(told["reason"]), file=file, offset=offset, runs=told.get("runs", []),
                remedy=remedy, **more,
            )
        )  # fmt: skip

    # Modes

    def _modes(self) -> None:
        for found in access.check_modes(self.place.store, whole=True):
            severity = "warning" if found.verdict == "open" else "damage"
            self._tell(Finding(severity=severity, what=access.advice(self.place.store, found), file=found.name or "."))  # type: ignore[arg-type]

    # The log

    def _log(self) -> None:
        """Manifest and log of one moment. What an owner is changing may look damaged: then once more."""
        told: list[Finding] = []
        for attempt in range(TRIES):
            self._spans, self._tails = {}, {}
            self._referenced, self._unread_tails = {}, 0
            before = self._moment()
            try:
                told = self._read_log()
            except FileNotFoundError:
                continue
            damaged = any(finding.severity == "damage" for finding in told)
            moved = self._moment() != before
            if not (damaged and moved) and not (moved and self._manifest_changed(before)):
                break
            if attempt == TRIES - 1 and not damaged:
                raise reading.MovedOn("The store changes faster than it can be read.", errno="ESTALE")
        for finding in told:
            self._tell(finding)

    def _moment(self) -> tuple[bytes, bytes]:
        found = []
        for name in (manifest.FILE, "HEAD"):
            try:
                found.append(self._disk.read_at(name, 0, 16_384))
            except FileNotFoundError:
                found.append(b"")
            except OSError as error:
                raise reading.unreadable(name, error) from error
        return found[0], found[1]

    def _manifest_changed(self, before: tuple[bytes, bytes]) -> bool:
        return self._moment()[0] != before[0]

    def _read_log(self) -> list[Finding]:
        told: list[Finding] = []
        self._told = told
        base = None
        try:
            self._manifest = read_manifest(self._disk)
        except errors.StoreDamaged as error:
            self._manifest = None
            details = error.details
            told.append(Finding(
                severity="damage", what=str(details["reason"]), file=manifest.FILE, offset=details["offset"],
                remedy="`rpcagent repair` makes it anew from the files of the runs",
            ))  # fmt: skip
        else:
            base = self._manifest.base if self._manifest else None
        self.store_id = self._manifest.store_id if self._manifest else self._told_by_the_log()
        self._seal = self.place.seal(self.store_id)
        log = salvage.read_log(self._disk, base, self._record)
        row = self.table["log"]
        row.files, row.bytes, row.records = len(log.segments), log.size, log.records
        row.runs = len(self._spans)
        if self._manifest is not None:
            self.table["manifest"] = Row("manifest", 1, self._disk.size(manifest.FILE), runs=len(self._manifest.live))
        self._log_is_whole = not (log.damage or told)
        return told + self._about_log(log) + self._about_head(log)

    def _told_by_the_log(self) -> str:
        for name, _ in reading.segments_of(self._disk):
            header = salvage.segment_header(self._disk, name)
            if header is not None:
                return header[1].store_id
        return ""

    def _record(self, line: record.Line) -> None:
        self._progress(f"the log: record {line.seq}")
        if line.kind != record.COMMIT:
            return
        self._spans.setdefault(line.run, Spans()).add(line.seq, line.first, line.count)
        if self._replay:
            self._tails.setdefault(line.run, []).append(Line(line.first, line.count, line.body))
        try:
            body = opened(self._seal, line.run, Line(line.first, line.count, line.body))
        except seal.KeyMissing as error:
            self._unread_tails += 1
            self._shut.add(error.details["kid"])
        except errors.StoreDamaged as error:
            what = f"a sealed payload that cannot be opened: {error.details['reason']}"
            self._told.append(
                Finding(
                    severity="damage", what=what, records=(line.seq, line.seq), runs=[line.run], remedy=_TRY + _REPAIR
                )
            )
        else:
            self._referenced |= dict.fromkeys(blobs_of(body), line.run)

    def _about_log(self, log: salvage.Log) -> list[Finding]:
        told = []
        places = {(hole.file, hole.offset) for hole in log.holes if hole.missing}
        for error in log.damage:
            details = error.details
            if (details["file"], details["offset"]) not in places:
                told.append(Finding(
                    severity="damage", what=str(details["reason"]), file=details["file"], offset=details["offset"],
                    remedy=_TRY + _REPAIR,
                ))  # fmt: skip
        for hole in log.holes:
            if hole.missing:
                runs = sorted({each.run for each in hole.told if each.run and hole.first <= each.seq <= hole.last})
                told.append(Finding(
                    severity="damage", what=f"{hole.missing} acknowledged records cannot be read", file=hole.file,
                    offset=hole.offset, records=(hole.first, hole.last), runs=runs, remedy=_TRY + _REPAIR,
                ))  # fmt: skip
        strangers = log.store_ids - {self.store_id}
        if strangers:
            what = f"segments belong to another store ({', '.join(sorted(strangers))})"
            told.append(Finding(severity="damage", what=what, file=opening.FOLDER, remedy="restore it from a backup"))
        if self._manifest is None and not told and log.base.seq:
            what = "the log does not begin at record 1, and there is no manifest that says why"
            told.append(
                Finding(severity="damage", what=what, file=manifest.FILE, remedy="`rpcagent repair` makes it anew")
            )
        if self._manifest is None and not (told or log.segments or log.base.seq):
            for name in filter(self._names, (runfiles.FOLDER, tombstones.FOLDER)):  # as an opening refuses it
                what = "the files of runs are there but no log: the segments are missing"
                told.append(Finding(severity="damage", what=what, file=name, remedy=_TRY + _REPAIR))
        spare = "a leftover, deleted at the next start or repair"
        told += [Finding(severity="note", what=spare, file=name) for name in (*log.leftovers, *log.unfinished)]
        if log.unfinished:
            what = "a repair was cut off"
            told.append(
                Finding(severity="damage", what=what, file=log.unfinished[0], remedy="run `rpcagent repair` again")
            )
        if log.unconfirmed or log.torn_bytes:
            why = (
                "a daemon is writing it"
                if self.owner
                else "the process that wrote it was cut off; the next one decides"
            )
            what = f"{log.unconfirmed} records and {log.torn_bytes} bytes above the watermark are not confirmed: {why}"
            told.append(Finding(severity="note", what=what, file=log.segments[-1]))
        return told

    def _about_head(self, log: salvage.Log) -> list[Finding]:
        head, data = salvage.read_head(self._disk)
        if head is None:
            what = "the file is missing" if data is None else "neither of its slots is intact"
            remedy = "it is made anew at the next start; until then a cut at the end of the log cannot be seen"
            return [Finding(severity="warning", what=what, file="HEAD", remedy=remedy)]
        if self._manifest and head.seq == log.base.seq and head.checksum != log.base.checksum:
            what = "HEAD and the manifest name another line with the same number"
            return [Finding(severity="damage", what=what, file="HEAD", remedy=_REPAIR)]
        return []

    # Runs

    def _runs(self) -> None:
        live = self._manifest.live if self._manifest else {}
        row = self.table["runs"]
        seen = set()
        for run in self._names(runfiles.FOLDER):
            if not runfiles.names_a_run(run):
                continue
            self._progress(f"runs: {row.runs} read, {row.bytes} bytes")
            if self._buried(run):
                self._tell(
                    Finding(
                        severity="note", what="files of a deleted run, taken away at the next start", file=f"runs/{run}"
                    )
                )
                continue
            seen.add(run)
            self._run(run, run in live, row)
        for run in sorted((live.keys() | self._spans.keys()) - seen):
            if not self._buried(run):
                self._run(run, run in live, row)
        self.runs = len(seen | live.keys() | self._spans.keys())
        self._count_ended()

    def _run(self, run: str, named: bool, row: Row) -> None:
        """Beside an owner: what looks damaged is looked at again, since it may have been deleted or moved on."""
        caught: errors.StoreDamaged | None = None
        for _ in range(TRIES if self.owner else 1):
            try:
                self._judge(run, named, row)
            except errors.StoreDamaged as error:
                caught = error
                if self.owner and self._went_away(run):
                    return
                continue
            except errors.StorageError as error:
                self._tell(
                    Finding(severity="damage", what=error.message, file=f"runs/{run}", runs=[run], remedy=_UNREAD)
                )
            return
        assert caught is not None
        spans = self._spans.get(run)
        records = (spans.begins, spans.ends) if spans else None
        self._unlisted += not named
        self._damage(caught, _TRY + _REPAIR, records=records)

    def _went_away(self, run: str) -> bool:
        try:
            now = read_manifest(self._disk)
        except errors.StoreDamaged:
            return False
        return (
            now is not None and now != self._manifest and run not in now.live and not self._disk.exists(f"runs/{run}")
        )

    def _judge(self, run: str, named: bool, row: Row) -> None:
        state = runfiles.read_state(self._disk, run)
        if state is None and named:
            raise runfiles.damaged(
                run, runfiles.state_of(run), 0, "state.json is missing, and the manifest names the run"
            )
        folded = Replay(run, self._seal) if self._replay else None
        filed = 0
        if state is not None:
            prefix = salvage.read_history(self._disk, run, state.size, folded.line if folded else _nothing)
            counted = (prefix.lines, prefix.events, prefix.size, prefix.chain) if prefix else ()
            if counted != (state.lines, state.last_seq, state.size, state.chain):
                runfiles.read_bodies(self._disk, run, named=True)  # raises with the very place
            heads = self._summary(run, state)
            filed = state.last_seq
            row.files, row.bytes, row.records = row.files + 2, row.bytes + state.size, row.records + state.lines
            row.runs += 1
            self._referenced |= dict.fromkeys(heads.blobs, run)
            if not heads.live:
                self._ended[run] = heads
            self._compare(run, heads)
            if (
                heads.live
                and not named
                and run not in self._spans
                and self._manifest is not None
                and self.owner is None
            ):
                what = "the run has not ended, and no list names it: it never goes on"
                self._tell(
                    Finding(
                        severity="warning",
                        what=what,
                        file=f"runs/{run}",
                        runs=[run],
                        remedy="`rpcagent repair` names it",
                    )
                )
        spans = self._spans.get(run)
        end, gap = spans.after(filed) if spans else (filed, None)
        if gap is not None and self._log_is_whole:
            raise runfiles.damaged(run, "the log", 0, f"events {end + 1} to {gap - 1} are missing")
        if gap is not None and spans is not None:
            what = f"events {end + 1} to {gap - 1} of the run are missing"
            self._tell(
                Finding(
                    severity="damage", what=what, runs=[run], records=(spans.begins, spans.ends), remedy=_TRY + _REPAIR
                )
            )
        elif folded is not None:
            for line in self._tails.get(run, ()):
                if line.first > filed:
                    folded.line(line)
                    filed = line.first + line.count - 1  # it may have been recorded twice, by an interrupted checkpoint
            if folded.trouble is not None:
                self._tell(folded.trouble)

    def _summary(self, run: str, state: State) -> Summary:
        try:
            heads = summary.decode(state.summary)
        except msgspec.DecodeError as error:
            raise runfiles.damaged(run, runfiles.state_of(run), 0, f"its summary is none: {error}") from error
        with contextlib.suppress(ValueError):
            kid = seal.kid_of(bytes(heads.body))
            if kid is not None and (self.place.ring is None or self.place.ring.get(kid) is None):
                self._shut.add(kid)
        if heads.last_seq not in {state.last_seq, 0}:  # 0: of a run that could not be replayed
            reason = f"its summary is of event {heads.last_seq}, and the history ends at {state.last_seq}"
            raise runfiles.damaged(run, runfiles.state_of(run), 0, reason)
        return heads

    def _compare(self, run: str, heads: Summary) -> None:
        """The files may be ahead of the manifest, never behind it."""
        if self._manifest is None or run not in self._manifest.live:
            return
        try:
            named = summary.decode(self._manifest.live[run])
        except msgspec.DecodeError as error:
            raise runfiles.damaged(run, manifest.FILE, 0, f"its summary is none: {error}") from error
        if heads.last_seq and named.last_seq > heads.last_seq:
            reason = f"the manifest knows event {named.last_seq}, and its files end at {heads.last_seq}"
            raise runfiles.damaged(run, runfiles.state_of(run), 0, reason)

    def _count_ended(self) -> None:
        """Runs that have ended are in no list but the index, so only their number tells that one is gone."""
        if self._manifest is None:
            return
        have = Counter(heads.status for heads in self._ended.values())
        spare = self._unlisted  # damaged, and told as such: whatever they are, they are not missing
        now = self._manifest if self.owner is None else read_manifest(self._disk)
        for status, count in (now.ended if now else {}).items():
            gone = count - have[status] - min(spare, max(0, count - have[status]))
            spare -= max(0, count - have[status]) - max(0, gone)
            if gone > 0 and (self.owner is None or now == self._manifest):
                what = f"{gone} {status} runs are missing: the manifest counts {count}"
                self._tell(Finding(severity="damage", what=what, file=runfiles.FOLDER, remedy=_TRY + _REPAIR))

    # Tombstones

    def _tombstones(self) -> None:
        row = self.table["tombstones"]
        named = {each.name: each for each in self._manifest.tombstones} if self._manifest else {}
        for each in named.values():
            try:
                data = tombstones.read(self._disk, tombstones.Named(each.name, each.count, each.sum))
            except errors.StoreDamaged as error:
                if self.owner is None or read_manifest(self._disk) == self._manifest:
                    self._damage(error, "keys of deleted runs may be free again; " + _TRY + _REPAIR)
                continue
            self._graves.append(data)
            row.files, row.bytes, row.records = row.files + 1, row.bytes + len(data), row.records + each.count
        for name in self._names(tombstones.FOLDER):
            if name not in named and self.owner is None and self._manifest is not None:
                what = "not named in the manifest, deleted at the next start"
                self._tell(Finding(severity="note", what=what, file=f"{tombstones.FOLDER}/{name}"))

    def _buried(self, run: str) -> bool:
        ident = tombstones.tombstone_id(run)
        size = tombstones.ID_BYTES
        for data in self._graves:
            place = data.find(ident)
            while place >= 0 and place % size:
                place = data.find(ident, place + 1)
            if place >= 0:
                return True
        return False

    # Blobs

    def _blobs(self) -> None:
        row = self.table["blobs"]
        folder = self.place.store / "blobs"
        kept = blobs.Blobs(folder, self._seal)
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
                self._damage(
                    error,
                    "the output is lost; the run that refers to it is whole: "
                    + self._referenced.get(name, "none does"),
                )
            row.files += 1
        if sealed:
            what = f"the content of {sealed} sealed files was not compared with the SHA-256 that they are named by"
            self._tell(Finding(severity="note", what=what, file="blobs"))
        for digest, run in sorted(self._referenced.items()):
            if digest not in there and not self._is_there(folder / digest):
                self._tell(Finding(
                    severity="damage", what=f"a large output is missing: {digest}", file=f"blobs/{digest}", runs=[run],
                    remedy="restore the file from a backup; nothing else can",
                ))  # fmt: skip
        spare = len(there - self._referenced.keys())
        if spare and not self._unread_tails:
            what = f"{spare} files that no run refers to; the daemon takes them away in time"
            self._tell(Finding(severity="note", what=what, file="blobs"))

    def _is_there(self, path: Path) -> bool:
        with contextlib.suppress(FileNotFoundError):
            return bool(path.stat())
        return False

    def _index(self) -> None:
        if self.owner is not None:
            return  # its own process keeps it, and a copy of a moment would be none
        # What a checkpoint that was interrupted has filed stands in the log as well, and in the index after the next one.
        settled = {run: heads for run, heads in self._ended.items() if run not in self._spans}
        check_index(self.place.store, settled, self._ended, self._tell, self.table["index"])

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


def _nothing(_line: Line) -> None:
    pass
