"""What is left of a damaged store, and what is to become of each of its runs.

Knows: which records are certain, which runs lost some or may have, and the rule for those. Does not know: how anything is
written (`mending`), or what a person is told (`repair`).

The rule. A run keeps the unbroken row of its events from the first one on, and never less than it can have. Lost are events
behind a gap in that row, and events that something else tells of: a state, the manifest, the index. A run may have lost its
last events where records are missing of which nobody knows whose they were, unless a later record of it goes on where it had
ended, which proves that nothing was lost; or unless it had ended. What a run did in lost events is not known, so to let it go
on could do it twice: it is closed by an event, as `failed` (or `cancelled`, if that was under way). A run whose first event is
lost, or that cannot be closed because no key opens it, is buried: its id becomes a tombstone, so that its key stays taken. A run
that the log deletes is deleted, whatever is left of it or was lost before: where the log begins anew, its tombstone stands first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Literal

import msgspec

from rpcagent import errors
from rpcagent.journal import reading, record, runfiles, seal, tombstones
from rpcagent.journal.disk import Disk
from rpcagent.journal.index import Ended
from rpcagent.journal.manifest import Manifest
from rpcagent.journal.record import Item
from rpcagent.journal.runfiles import Line, State
from rpcagent.runs import events as ev
from rpcagent.runs import summary
from rpcagent.runs.fold import apply
from rpcagent.runs.ports import Recorded
from rpcagent.runs.state import RunState
from rpcagent.runs.supervisor import deletes
from rpcagent.upkeep import salvage
from rpcagent.upkeep.deletions import opened_or_not
from rpcagent.upkeep.remains import manifest_or_remains
from rpcagent.upkeep.stories import Spans, opened

Fate = Literal["kept", "moved", "closed", "buried", "deleted"]
"""kept: as it is. moved: out of its files, which are damaged, into the log; nothing is lost. closed: up to its last certain
event, and ended there. buried: its files go to `damaged/`, its key stays taken. deleted: the log says so;
its files, if any are left, go."""

EPOCHS_AHEAD = 1_000_000
"""Where both HEAD and the manifest are lost, nobody knows the epoch: it goes on beyond any that it can have reached."""

WHY = "this store was damaged and repaired: what the run did after event {last} may be lost, so it does not go on"


@dataclass
class Run:
    """What is known of one run. `state`: of files that are good. `prefix`: events at the intact beginning of a history whose
    state or end is not. `told`: the last event that anything names."""

    name: str
    state: State | None = None
    trouble: errors.StoreDamaged | None = None
    prefix: int = 0
    told: int = 0
    named: bool = False
    ended: bool = False  # as its files say
    live: bool = True  # as its files say: it stands in the manifest
    status: str = ""
    place: int = 0
    spans: Spans = field(default_factory=Spans)
    certain: int = 0
    doubt: bool = False
    gap: int | None = None
    fate: Fate = "kept"
    closing: bytes | None = None
    deletion: Line | None = None
    """Its last record, where that may be its deletion."""

    @property
    def loses(self) -> bool:
        return self.fate in {"closed", "buried"} or (self.certain < self.told and self.fate != "deleted")


@dataclass
class Found:
    """A store, as far as it can be read. `known`: the manifest, or what is left of it. `graves`: ids of tombstones, and
    whether some may be missing."""

    known: Manifest | None
    manifest_is_good: bool
    log: salvage.Log
    store_id: str
    epoch: int
    runs: dict[str, Run]
    graves: list[tombstones.Named]
    saved_graves: set[bytes]
    graves_lost: list[str]
    head_is_good: bool
    vanished: int = 0
    """Runs that had ended, of which there is no trace but that they were counted."""
    strays: list[str] = field(default_factory=list)
    """Runs that only a damaged line names."""

    @property
    def must_begin_anew(self) -> bool:
        """Whether the log must be written anew, behind a manifest of its own."""
        if self.unlisted:
            return True
        lost = self.known is None and self.log.base.seq > 0
        fates = any(run.fate not in {"kept", "deleted"} for run in self.runs.values())
        return (
            bool(lost or not self.manifest_is_good or self.log.damage or self.log.holes or self.graves_lost)
            or fates
            or self.vanished > 0
        )

    @property
    def unlisted(self) -> list[Run]:
        """Runs that are live and stand neither in the manifest nor in the log: nothing would ever wake them."""
        if self.known is None:
            return []
        return [
            run
            for run in self.runs.values()
            if run.state is not None and run.live and not run.named and not run.spans.rows
        ]

    @property
    def unowned(self) -> list[salvage.Hole]:
        """Holes of which nobody knows whose records are missing."""
        return [hole for hole in self.log.holes if not hole.sure and not _owned(hole, self.runs)]


def survey(disk: Disk, index: Mapping[str, Ended]) -> Found:
    """Reads all of the store. `index`: its rows, as far as they can be had.

    Raises StoreDamaged where nothing can be done (no store id, segments of two stores), StoreTooNew, StorageError."""
    known, good = manifest_or_remains(disk)
    spans: dict[str, Spans] = {}
    lasts: dict[str, Line] = {}

    def note(line: record.Line) -> None:
        if line.kind == record.COMMIT:
            spans.setdefault(line.run, Spans()).add(line.seq, line.first, line.count)
            lasts.pop(line.run, None)
            if line.count == 1 and line.first > 1:
                lasts[line.run] = Line(line.first, 1, line.body)

    log = salvage.read_log(disk, known.base if known else None, note)
    ids = log.store_ids | ({known.store_id} if known else set())
    if len(ids) != 1:
        what = (
            "nothing tells which store this is"
            if not ids
            else f"parts of several stores are in it: {', '.join(sorted(ids))}"
        )
        raise errors.StoreDamaged(
            f"This cannot be repaired: {what}. Restore a backup.", file="wal", offset=0, reason=what
        )
    named, saved, lost = _graves(disk, known if good else None)
    head, _ = salvage.read_head(disk)
    found = Found(
        known=known, manifest_is_good=good, log=log, store_id=ids.pop(), runs={}, graves=named, saved_graves=saved,
        graves_lost=lost, head_is_good=head is not None,
        epoch=_epoch(log, head, known, good),
    )  # fmt: skip
    for name in sorted(_names(disk, spans, known, index)):
        ident = tombstones.tombstone_id(name)
        if not _holds(disk, named, ident) and ident not in saved:
            found.runs[name] = _run(disk, name, spans.get(name, Spans()), known, index.get(name))
            found.runs[name].deletion = lasts.get(name)
    return found


def _epoch(log: salvage.Log, head: record.Head | None, known: Manifest | None, good: bool) -> int:
    """Not lower than any that the store had: a run would be taken for one that was released in the present opening."""
    found = max(log.epoch, head.epoch if head else 0, known.epoch if known else 0)
    unknown = head is None and not (known is not None and good) and (log.base.seq > 0 or not good)
    return found + EPOCHS_AHEAD if unknown else found


def _look_for_vanished(found: Found) -> None:
    """Runs that have ended are in no list but the index: without it only their number tells that some are gone. Then, and where
    the manifest is lost, a history without a state is taken for what is left of a run; else it is a leftover."""
    kept = [run for run in found.runs.values() if run.fate != "deleted"]
    # What a checkpoint or an import that was cut off has filed is counted by none.
    live = found.known.live if found.known is not None else {}
    places = found.known.places if found.known is not None else 0
    settled = [run for run in kept if run.name not in live and not _is_first(run.spans) and run.place < places]
    counted = Counter(run.status for run in settled if run.state is not None and not run.live)
    due = Counter(found.known.ended) if found.known is not None else Counter()
    due -= Counter(run.status for run in found.runs.values() if run.fate == "deleted")
    found.vanished = sum((due - counted).values())
    for run in kept:
        if run.state is None and run.trouble is None and run.prefix and not _is_first(run.spans):
            if found.vanished or found.known is None or not found.manifest_is_good:
                run.trouble = runfiles.damaged(run.name, runfiles.state_of(run.name), 0, "state.json is missing")
            else:
                run.prefix = run.certain = 0
        if run.state is None and (run.named or run.trouble is not None) and run.name not in live:
            found.vanished = max(0, found.vanished - 1)  # it is this one


def _graves(disk: Disk, known: Manifest | None) -> tuple[list[tombstones.Named], set[bytes], list[str]]:
    """The files of tombstones that are whole, ids that can be saved from others, and which files have lost some."""
    if known is None:
        return _all_graves(disk)
    whole, saved, lost = [], set(), []
    for file in known.tombstones:
        named = tombstones.Named(file.name, file.count, file.sum)
        try:
            tombstones.read(disk, named)
            whole.append(named)
        except errors.StoreDamaged:
            lost.append(file.name)
            try:
                saved |= _ids(disk.read(f"{tombstones.FOLDER}/{file.name}"))
            except FileNotFoundError:
                continue
    return whole, saved, lost


def _all_graves(disk: Disk) -> tuple[list[tombstones.Named], set[bytes], list[str]]:
    """Without a manifest: every id in every file. One that was not named yet is of a run that was deleted all the same."""
    saved: set[bytes] = set()
    lost = []
    try:
        names = disk.names(tombstones.FOLDER)
    except FileNotFoundError:
        names = []
    for name in names:
        data = disk.read(f"{tombstones.FOLDER}/{name}")
        ids = _ids(data)
        saved |= ids
        if tombstones.encode(ids) != data:
            lost.append(name)
    return [], saved, lost


def _ids(data: bytes) -> set[bytes]:
    size = tombstones.ID_BYTES
    return {data[at : at + size] for at in range(0, len(data) - size + 1, size)}


def _holds(disk: Disk, named: list[tombstones.Named], ident: bytes) -> bool:
    return any(ident in _ids(tombstones.read(disk, file)) for file in named)


def _names(disk: Disk, spans: Iterable[str], known: Manifest | None, index: Iterable[str]) -> set[str]:
    try:
        folders = {name for name in disk.names(runfiles.FOLDER) if runfiles.names_a_run(name)}
    except FileNotFoundError:
        folders = set()
    except OSError as error:
        raise reading.unreadable(runfiles.FOLDER, error) from error
    return folders | set(spans) | set(known.live if known else ()) | set(index)


def _run(disk: Disk, name: str, spans: Spans, known: Manifest | None, row: Ended | None) -> Run:
    live = known.live.get(name) if known else None
    run = Run(name, spans=spans, named=live is not None or row is not None)
    for raw in (live, row.summary if row is not None else None):
        if raw is not None:
            run.told = max(run.told, _last_of(raw))
    run.told = max([run.told, *(last for _, last in spans.rows)])
    try:
        run.state = _good_state(disk, name)
    except errors.StoreDamaged as error:
        run.trouble = error
    if run.state is not None:
        run.told = max(run.told, run.state.last_seq)
        heads = summary.decode(run.state.summary)
        run.ended, run.live = heads.ended_at is not None, heads.live
        run.status, run.place = heads.status, heads.place
        if not run.live:
            run.state = msgspec.structs.replace(
                run.state, summary=b"null"
            )  # most have ended: their summaries are not kept
        run.certain, run.gap = spans.after(run.state.last_seq)
        return run
    prefix = salvage.read_history(disk, name, None, _ignore)
    run.prefix = prefix.events if prefix is not None else 0
    if run.trouble is None and run.named and not _is_first(spans):
        run.trouble = runfiles.damaged(name, runfiles.state_of(name), 0, "state.json is missing")
    run.told = max(run.told, _counted(disk, name))
    run.certain, run.gap = spans.after(run.prefix)
    return run


def _is_first(spans: Spans) -> bool:
    return bool(spans.rows) and spans.rows[0][0] == 1


def _good_state(disk: Disk, name: str) -> State | None:
    """The state of a run whose files are all good. Raises StoreDamaged."""
    state = runfiles.read_state(disk, name)
    if state is None:
        return None
    prefix = salvage.read_history(disk, name, state.size, _ignore)
    if prefix is None or prefix[:4] != (state.lines, state.last_seq, state.size, state.chain):
        runfiles.read_bodies(disk, name, named=True)  # raises with the very place
    try:
        summary.decode(state.summary)
    except msgspec.DecodeError as error:
        raise runfiles.damaged(name, runfiles.state_of(name), 0, "its summary is none") from error
    return state


def _counted(disk: Disk, name: str) -> int:
    """The last event that a state tells of whose history is not what it says."""
    try:
        state = runfiles.read_state(disk, name)
    except errors.StoreDamaged:
        return 0
    return state.last_seq if state is not None else 0


def _last_of(raw: bytes) -> int:
    try:
        return summary.decode(raw).last_seq
    except msgspec.DecodeError:
        return 0


def _ignore(_line: Line) -> None:
    pass


# Fates


def decide(disk: Disk, found: Found, sealing: seal.Seal, now: datetime) -> None:
    """Fills in what becomes of each run. Raises StorageError."""
    for run in found.runs.values():
        if run.deletion is not None:
            _delete(run, run.deletion, sealing)
    _look_for_vanished(found)
    _lay_to(found)
    last = max((hole.first for hole in found.unowned), default=0)
    asked = []
    for run in found.runs.values():
        if run.fate == "deleted":
            continue
        # A later record that goes on where the run had ended proves that nothing of it was lost before.
        run.doubt |= bool(last) and run.spans.ends < last and not (run.ended and run.state is not None)
        run.doubt |= run.trouble is not None and not run.named and not run.spans.rows and run.told <= run.certain
        if run.certain == 0:
            run.fate = "buried" if run.told or run.named or run.trouble is not None else "kept"
        elif run.certain < run.told or run.doubt or run.gap is not None:
            asked.append(run)
        elif run.trouble is not None:
            run.fate = "moved"
    bodies = _bodies(disk, found, asked)
    for run in asked:
        _close(run, bodies[run.name], sealing, now)


def _delete(run: Run, last: Line, sealing: seal.Seal) -> None:
    """Where the log says so; nothing that its files say or that is lost before changes that."""
    body, _ = opened_or_not(sealing, run.name, last)
    found = deletes(Recorded(last.first, last.count, body)) if body is not None else None
    if found is not None:
        run.fate, run.status, run.certain = "deleted", found.status, last.first


def _owned(hole: salvage.Hole, runs: dict[str, Run]) -> bool:
    """Whether the damaged bytes tell of each missing record whose it was, and what they tell fits the runs that are known."""
    told = {each.seq: each for each in hole.told}
    ends: dict[str, int] = {}
    for seq in range(hole.first, hole.last + 1):
        each = told.get(seq)
        if each is None:
            return False
        if not each.run:
            continue  # an opening
        run = runs.get(each.run)
        if run is None and each.first != 1:
            return False
        end = ends.get(each.run, run.certain if run is not None else 0)
        if each.first != end + 1:
            return False
        ends[each.run] = end + each.events
    return hole.missing > 0


def _lay_to(found: Found) -> None:
    """Tells runs of the records that they certainly lost, and remembers ids that nothing but a damaged line knows."""
    for hole in found.log.holes:
        for each in hole.told:
            if not each.run or not hole.first <= each.seq <= hole.last:
                continue
            run = found.runs.get(each.run)
            if run is None:
                if record.is_run(each.run):
                    found.strays.append(each.run)
            elif each.first == run.certain + 1:
                run.told = max(run.told, each.first + each.events - 1)


def _bodies(disk: Disk, found: Found, asked: list[Run]) -> dict[str, list[Line]]:
    """All certain commits of these runs."""
    lines = {run.name: list(lines_of(disk, run)) for run in asked}
    ends = {run.name: run.state.last_seq if run.state is not None else run.prefix for run in asked}

    def note(line: record.Line) -> None:
        if line.run in ends and line.first == ends[line.run] + 1 and line.kind == record.COMMIT:
            ends[line.run] += line.count
            lines[line.run].append(Line(line.first, line.count, line.body))

    if asked:
        salvage.read_log(disk, found.known.base if found.known else None, note)
    return lines


def lines_of(disk: Disk, run: Run) -> Iterator[Line]:
    """What is certain of the history of a run."""
    kept: list[Line] = []
    salvage.read_history(disk, run.name, run.state.size if run.state is not None else None, kept.append)
    yield from kept


def _close(run: Run, lines: list[Line], sealing: seal.Seal, now: datetime) -> None:
    """Ends the run at its last certain event, if it has not ended there."""
    if run.state is not None and run.ended:
        return  # only evidence can have come later
    state: RunState | None = None
    try:
        for line in lines:
            state = apply(state, ev.decode(opened(sealing, run.name, line)), run.name)
    except Exception:  # noqa: BLE001 - sealed, of a later version, or no history at all: it can be kept apart only
        state = None
    if state is None:
        run.fate = "buried"
        return
    if state.ended:
        run.fate = "moved" if run.trouble is not None else "kept"
        return
    events = _ending(state)
    commit = ev.Commit(seq=state.last_seq + 1, at=max(now.astimezone(UTC), state.last_at), events=events)
    apply(state, commit, run.name)
    body = ev.encode(commit)
    run.fate, run.closing = "closed", sealing.seal(seal.record_context(run.name, commit.seq), body)


def _ending(state: RunState) -> tuple[ev.AnyEvent, ...]:
    unresolved = tuple(s.step_id for s in state.steps.values() if s.status == "unknown" and not s.abandoned)
    if state.phase == "cancelling":
        return (ev.RunCancelled(unresolved=unresolved),)
    trouble = ev.Trouble(kind="store_damaged", message=WHY.format(last=state.last_seq))
    return (ev.RunFailed(error=trouble, unresolved=unresolved),)


def closing_item(run: Run) -> Item | None:
    """The record that ends a run that is closed."""
    return None if run.closing is None else Item(run.name, run.certain + 1, 1, run.closing)
