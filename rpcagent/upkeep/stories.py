"""One run from its two places: what its files hold, and what the log holds behind that. And how a reader names it.

Knows: which records continue a run, which repeat what its files have, where one is missing; how a payload is opened. Does not
know: what is printed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from rpcagent import errors
from rpcagent.batch.faults import Mistake
from rpcagent.journal import reading, runfiles, seal, tombstones
from rpcagent.journal.disk import Disk
from rpcagent.journal.reading import Snapshot
from rpcagent.journal.record import Entry
from rpcagent.journal.runfiles import Line
from rpcagent.runs import events as ev
from rpcagent.runs.ports import Recorded
from rpcagent.runs.supervisor import deletes
from rpcagent.upkeep.deletions import deletions_in

_DIGEST = re.compile("[0-9a-f]{64}")
_MARKS = (b'"blobs"', b'"outputFile"')


@dataclass
class Spans:
    """Which events of a run the log holds: [first, last] of each unbroken row of records, in the order of the log, and the
    numbers of its first and last record."""

    rows: list[list[int]] = field(default_factory=list)
    begins: int = 0
    ends: int = 0

    def add(self, seq: int, first: int, count: int) -> None:
        self.begins = self.begins or seq
        self.ends = seq
        last = first + count - 1
        if self.rows and self.rows[-1][1] + 1 == first:
            self.rows[-1][1] = last
        else:
            self.rows.append([first, last])

    def after(self, event: int) -> tuple[int, int | None]:
        """Up to which event a run goes on that has `event` of them, and the first event behind a gap, if there is one."""
        for first, last in self.rows:
            if last <= event:
                continue
            if first > event + 1:
                return event, first
            event = last
        return event, None


@dataclass
class Story:
    """All acknowledged commits of a run, oldest first. `filed`: how many events of them its files hold. `numbers`: of those
    from the log, the number of the record, by first event."""

    run: str
    lines: list[Line]
    filed: int
    numbers: dict[int, int]

    @property
    def last(self) -> int:
        return self.lines[-1].first + self.lines[-1].count - 1 if self.lines else 0


def story_of(disk: Disk, snapshot: Snapshot, entries: Iterable[Entry], run: str, sealing: seal.Seal) -> Story:
    """Of a run that the log deletes, whose files may be gone, at least what the log has. Raises NotFound, StoreDamaged (of this
    run), StorageError, MovedOn."""
    mine = [entry for entry in entries if entry.run == run]
    named = snapshot.manifest is not None and run in snapshot.manifest.live
    found = deletions_in(mine, sealing)
    try:
        return _joined(disk, mine, run, named=named)
    except errors.StoreDamaged:
        if run in found.status or (run in found.sealed and not named):
            return _joined(None, mine, run, named=False)
        if _is_deleted(disk, run, sealing):
            raise reading.MovedOn(f"{run} was deleted while it was read", errno="ESTALE") from None
        raise


def _is_deleted(disk: Disk, run: str, sealing: seal.Seal) -> bool:
    """Whether it is by now."""
    snapshot, entries = reading.read_all(disk)
    named = snapshot.manifest.tombstones if snapshot.manifest else ()
    graves = tombstones.Tombstones(disk, [tombstones.Named(file.name, file.count, file.sum) for file in named])
    return run in deletions_in((entry for entry in entries if entry.run == run), sealing).status or run in graves


def _joined(disk: Disk | None, entries: Iterable[Entry], run: str, *, named: bool) -> Story:
    """`disk`: None where its files do not matter."""
    held = reading.read_run(disk, run, named=named) if disk is not None else None
    lines = list(held[1]) if held else []
    event = filed = held[0].last_seq if held else 0
    numbers = {}
    for entry in entries:
        if entry.first + entry.count - 1 <= event:
            continue  # a checkpoint that was interrupted has filed it, or has recorded it again
        if entry.first != event + 1 and disk is not None:
            raise runfiles.damaged(run, "the log", 0, f"event {event + 1} is missing before record {entry.seq}")
        event = entry.first + entry.count - 1
        numbers[entry.first] = entry.seq
        lines.append(Line(entry.first, entry.count, entry.body))
    if not lines:
        raise errors.NotFound(f"there is no run {run} in this store", runId=run)
    return Story(run, lines, filed, numbers)


def refuse_what_is_deleted(story: Story, sealing: seal.Seal) -> None:
    """Raises NotFound for a run of which the log says so; KeyMissing where it may."""
    last = story.lines[-1]
    if deletes(Recorded(last.first, last.count, opened(sealing, story.run, last))) is not None:
        raise errors.NotFound(f"the run {story.run} was deleted", runId=story.run)


def resolve(disk: Disk, entries: Iterable[Entry], name: str) -> str:
    """The run that is meant by an id or the beginning of one, with or without `run_`. Raises Mistake, StorageError."""
    try:
        known = {folder for folder in disk.names(runfiles.FOLDER) if runfiles.names_a_run(folder)}
    except FileNotFoundError:
        known = set()
    except OSError as error:
        raise reading.unreadable(runfiles.FOLDER, error) from error
    known.update(entry.run for entry in entries)
    if name in known:
        return name
    prefix = "run_" + name.removeprefix("run_")
    found = sorted(run for run in known if prefix != "run_" and run.startswith(prefix))
    if len(found) == 1:
        return found[0]
    if found:
        shown = ", ".join(found[:4]) + (", ..." if len(found) > 4 else "")
        raise Mistake(f"{name!r} may be any of {len(found)} runs: {shown}", "give more of the id")
    raise Mistake(
        f"there is no run {name!r} in this store",
        "`rpcagent runs --all` lists them; a key such as `list-1` is not known here: `rpcagent show KEY` tells the id",
        code="NOT_FOUND",
    )


def opened(sealing: seal.Seal, run: str, line: Line) -> bytes:
    """The body as it was recorded. Raises KeyMissing, StoreDamaged."""
    return sealing.open(seal.record_context(run, line.first), line.body)


def blobs_of(body: bytes) -> tuple[str, ...]:
    """The digests that a plain commit refers to; empty where it cannot be read."""
    if not any(mark in body for mark in _MARKS):
        return ()
    try:
        commit = ev.decode(body)
    except (msgspec.DecodeError, ev.WrittenLater):
        return ()
    return tuple(digest for event in commit.events for digest in _digests(event))


def _digests(event: ev.AnyEvent) -> tuple[str, ...]:
    """As the fold takes them: an event of before `blobs` names its output in the result, and so does one that came too late."""
    if not isinstance(event, ev.ToolCompleted | ev.LateOutcome):
        return ()
    if isinstance(event, ev.ToolCompleted) and event.blobs:
        return event.blobs
    content = (event.result or {}).get("structuredContent")
    digest = content.get("outputSha256") if isinstance(content, dict) and "outputFile" in content else None
    return (digest,) if isinstance(digest, str) and _DIGEST.fullmatch(digest) else ()
