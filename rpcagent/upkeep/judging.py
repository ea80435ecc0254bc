"""One run of a store: whether its files are what a view of manifest and log demands of them.

Knows: what is damage of a run, and that its files may be ahead of the manifest, never behind. Does not know: whether it was
deleted meanwhile, which only a later view can tell (`checking`). Counts nothing and tells nothing, so it may be asked twice.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

import msgspec

from rpcagent import errors
from rpcagent.journal import manifest, runfiles, seal
from rpcagent.journal.disk import Disk
from rpcagent.journal.runfiles import Line, State
from rpcagent.runs import summary
from rpcagent.runs.summary import Summary
from rpcagent.upkeep import salvage
from rpcagent.upkeep.findings import REPAIR, TRY, Finding
from rpcagent.upkeep.folding import Replay
from rpcagent.upkeep.loglook import of_damage
from rpcagent.upkeep.views import View

_UNREAD = "mend what keeps it from being read (the disk, a link, the modes), and check again"


@dataclass
class Judged:
    """What the files of a run are, and what is wrong with them. `files_are_bad`: they are no files of a run that could be
    counted. `kid`: the key of its summary. `may_be_deleted`: what is wrong may be a deletion that nobody here can read.
    `unlisted`: it has not ended, and nothing names it as far as the view goes."""

    state: State | None = None
    heads: Summary | None = None
    told: list[Finding] = field(default_factory=list)
    files_are_bad: bool = False
    kid: str | None = None
    may_be_deleted: bool = False
    unlisted: bool = False


def judge(disk: Disk, view: View, run: str, *, replay: bool) -> Judged:
    """Raises StoreTooNew."""
    found = Judged()
    folded = Replay(run, view.sealing) if replay else None
    try:
        filed = _files(disk, view, run, found, folded)
        _records(view, run, found, filed, folded)
    except errors.StoreDamaged as error:
        spans = view.spans.get(run)
        found.files_are_bad = True
        if not _is_named(view, run) and run in view.deletions.sealed and _is_gone(disk, run):
            found.may_be_deleted = True
            found.told = [_may_be_deleted(run, view.deletions.sealed[run])]
        else:
            found.told.append(of_damage(error, TRY + REPAIR, records=(spans.begins, spans.ends) if spans else None))
    except errors.StorageError as error:
        found.files_are_bad = True
        found.told.append(
            Finding(severity="damage", what=error.message, file=f"runs/{run}", runs=[run], remedy=_UNREAD)
        )
    return found


def _is_named(view: View, run: str) -> bool:
    return view.manifest is not None and run in view.manifest.live


def _is_gone(disk: Disk, run: str) -> bool:
    """As a deletion leaves it, which takes its files away one by one; a power cut may bring any of them back."""
    try:
        return not (disk.exists(runfiles.state_of(run)) and disk.exists(runfiles.history_of(run)))
    except OSError:
        return False


def _may_be_deleted(run: str, kid: str) -> Finding:
    what = f"it has no files, and its last record, sealed with {kid}, may be its deletion"
    remedy = "name that key with --encryption-key or --old-encryption-key to be told; a daemon that has it knows"
    return Finding(severity="warning", what=what, file=runfiles.folder_of(run), runs=[run], remedy=remedy)


def _files(disk: Disk, view: View, run: str, found: Judged, folded: Replay | None) -> int:
    """Up to which event they go."""
    state = runfiles.read_state(disk, run)
    if state is None:
        if _is_named(view, run):
            reason = "state.json is missing, and the manifest names the run"
            raise runfiles.damaged(run, runfiles.state_of(run), 0, reason)
        return 0
    prefix = salvage.read_history(disk, run, state.size, folded.line if folded else _nothing)
    counted = (prefix.lines, prefix.events, prefix.size, prefix.chain) if prefix else ()
    if counted != (state.lines, state.last_seq, state.size, state.chain):
        runfiles.read_bodies(disk, run, named=True)  # raises with the very place
    heads = _summary(run, state)
    found.state, found.heads = state, heads
    with contextlib.suppress(ValueError):
        found.kid = seal.kid_of(bytes(heads.body))
    _compare(view, run, heads)
    found.unlisted = heads.live and view.manifest is not None and not _is_named(view, run) and run not in view.spans
    return state.last_seq


def _records(view: View, run: str, found: Judged, filed: int, folded: Replay | None) -> None:
    spans = view.spans.get(run)
    end, gap = spans.after(filed) if spans else (filed, None)
    if gap is not None and not (view.log.damage or view.manifest_damage):
        raise runfiles.damaged(run, "the log", 0, f"events {end + 1} to {gap - 1} are missing")
    if gap is not None and spans is not None:
        what, records = f"events {end + 1} to {gap - 1} of the run are missing", (spans.begins, spans.ends)
        found.told.append(Finding(severity="damage", what=what, runs=[run], records=records, remedy=TRY + REPAIR))
    elif folded is not None:
        for line in view.tails.get(run, ()):
            if line.first > filed:
                folded.line(line)
                filed = line.first + line.count - 1  # it may have been recorded twice, by an interrupted checkpoint
        if folded.trouble is not None:
            found.told.append(folded.trouble)


def _summary(run: str, state: State) -> Summary:
    try:
        heads = summary.decode(state.summary)
    except msgspec.DecodeError as error:
        raise runfiles.damaged(run, runfiles.state_of(run), 0, f"its summary is none: {error}") from error
    if heads.last_seq not in {state.last_seq, 0}:  # 0: of a run that could not be replayed
        reason = f"its summary is of event {heads.last_seq}, and the history ends at {state.last_seq}"
        raise runfiles.damaged(run, runfiles.state_of(run), 0, reason)
    return heads


def _compare(view: View, run: str, heads: Summary) -> None:
    """The files may be ahead of the manifest, never behind it."""
    if view.manifest is None or run not in view.manifest.live:
        return
    try:
        named = summary.decode(view.manifest.live[run])
    except msgspec.DecodeError as error:
        raise runfiles.damaged(run, manifest.FILE, 0, f"its summary is none: {error}") from error
    if heads.last_seq and named.last_seq > heads.last_seq:
        reason = f"the manifest knows event {named.last_seq}, and its files end at {heads.last_seq}"
        raise runfiles.damaged(run, runfiles.state_of(run), 0, reason)


def _nothing(_line: Line) -> None:
    pass
