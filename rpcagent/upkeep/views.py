"""A store as it is at one moment, whatever its state: its manifest, the log behind it, and which runs these say are deleted.

Knows: how to see that something was recorded or filed since, and how to look again until nothing was. Does not know: what
damage means (`checking`), or the files of runs.

Nothing is deleted before its deletion is in the log or in the tombstones of a manifest, and nobody records or makes a
checkpoint without changing what `moment_of` looks at. So what a view demands of a file, and a later view still does, was
missing in between because it is damaged. That holds whoever owned the store meanwhile; nobody needs to know.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from rpcagent import errors
from rpcagent.journal import manifest, reading, record, seal, tombstones
from rpcagent.journal.checkpoint import read_manifest
from rpcagent.journal.disk import Disk
from rpcagent.journal.manifest import Manifest
from rpcagent.journal.runfiles import Line
from rpcagent.upkeep import salvage
from rpcagent.upkeep.deletions import Deletions, Trouble, opened_or_not
from rpcagent.upkeep.stories import Spans

TRIES = 20
_FIRST_LINE = 16_384  # more than the first line of a manifest has; its `rest` covers all others

Moment = tuple[bytes, bytes, str, int]
OnRecord = Callable[[record.Line, bytes | None, Trouble], None]
"""A commit, and its body, or None and the reason where it cannot be opened."""


@dataclass
class View:
    """`manifest`: None where there is none, or where `manifest_damage` says that it is damaged. `tails`: what the log has of
    each run, where that was asked for."""

    moment: Moment
    manifest: Manifest | None
    manifest_damage: errors.StoreDamaged | None
    store_id: str
    sealing: seal.Seal
    log: salvage.Log
    spans: dict[str, Spans]
    deletions: Deletions
    tails: dict[str, list[Line]]
    graves: list[bytes] = field(default_factory=list)
    grave_damage: list[errors.StoreDamaged] = field(default_factory=list)

    def has_deleted(self, run: str) -> bool:
        """Whether the log or a tombstone says so."""
        return run in self.deletions.status or self.is_buried(run)

    def is_buried(self, run: str) -> bool:
        """Whether a tombstone says so."""
        return any(_stands_in(data, run) for data in self.graves)

    @property
    def is_damaged(self) -> bool:
        """It looks so; what an owner is changing may."""
        return bool(self.manifest_damage or self.log.damage or self.grave_damage)

    def is_filed_as(self, other: View) -> bool:
        """No checkpoint was made between the two."""
        return self.moment[0] == other.moment[0]

    @property
    def ended(self) -> Counter[str]:
        """How many runs that have ended must have files, by status: the manifest counts those too that the log deletes."""
        return Counter(self.manifest.ended if self.manifest else {}) - Counter(self.deletions.status.values())


def moment_of(disk: Disk) -> Moment:
    """Changes with each record and with each checkpoint. Raises StorageError."""
    segments = reading.segments_of(disk)
    last = segments[-1][0] if segments else ""
    try:
        size = disk.size(last) if last else 0
    except FileNotFoundError:
        size = -1
    except OSError as error:
        raise reading.unreadable(last, error) from error
    return _bytes_of(disk, manifest.FILE), _bytes_of(disk, "HEAD"), last, size


def look(
    disk: Disk, sealing_of: Callable[[str], seal.Seal], on_record: OnRecord | None = None, *, tails: bool = False
) -> View:
    """One look, which an owner may have disturbed. Raises FileNotFoundError where it did; StorageError, StoreTooNew,
    KeyUnusable."""
    moment = moment_of(disk)
    found, damage = None, None
    try:
        found = read_manifest(disk)
    except errors.StoreDamaged as error:
        damage = error
    store_id = found.store_id if found is not None else _told_by_the_log(disk)
    sealing = sealing_of(store_id)
    spans: dict[str, Spans] = {}
    deletions, kept = Deletions(), dict[str, list[Line]]()

    def note(line: record.Line) -> None:
        if line.kind != record.COMMIT:
            return
        spans.setdefault(line.run, Spans()).add(line.seq, line.first, line.count)
        each = Line(line.first, line.count, line.body)
        if tails:
            kept.setdefault(line.run, []).append(each)
        body, trouble = opened_or_not(sealing, line.run, each)
        deletions.note(line.run, line.first, line.count, body, trouble)
        if on_record is not None:
            on_record(line, body, trouble)

    log = salvage.read_log(disk, found.base if found else None, note)
    view = View(moment, found, damage, store_id, sealing, log, spans, deletions, kept)
    for file in found.tombstones if found else ():
        try:
            view.graves.append(tombstones.read(disk, tombstones.Named(file.name, file.count, file.sum)))
        except errors.StoreDamaged as error:
            view.grave_damage.append(error)
    return view


def looks(disk: Disk, once: Callable[[], View]) -> Iterator[tuple[View, bool]]:
    """What `once` sees, again and again, each time of one moment as far as the manifest goes, and whether nothing at all was
    changed meanwhile. Whoever is content with one stops. Raises MovedOn where there was none."""
    seen = False
    for _ in range(TRIES):
        try:
            view = once()
        except FileNotFoundError:
            continue
        now = moment_of(disk)
        if now[0] == view.moment[0]:
            seen = True
            yield view, now == view.moment
    if not seen:
        raise reading.MovedOn("The store changes faster than it can be read.", errno="ESTALE")


def look_after(disk: Disk, before: View, once: Callable[[], View]) -> View:
    """A view of now: `before` itself where nothing was changed since. Raises as `looks`."""
    if moment_of(disk) == before.moment:
        return before
    for view, still in looks(disk, once):
        if still or not view.is_damaged:
            break
    return view


def _told_by_the_log(disk: Disk) -> str:
    for name, _ in reading.segments_of(disk):
        header = salvage.segment_header(disk, name)
        if header is not None:
            return header[1].store_id
    return ""


def _stands_in(data: bytes, run: str) -> bool:
    ident, size = tombstones.tombstone_id(run), tombstones.ID_BYTES
    ids = range(0, len(data), size)
    place = bisect_left(ids, ident, key=lambda at: data[at : at + size])
    return data[place * size : (place + 1) * size] == ident


def _bytes_of(disk: Disk, name: str) -> bytes:
    try:
        return disk.read_at(name, 0, _FIRST_LINE)
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise reading.unreadable(name, error) from error
