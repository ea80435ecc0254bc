"""What an opening finds in a store, before it changes anything.

Knows: which folder is a store, which segments count, what HEAD says; reads and checks all of the log that counts. Does
not know: how to write (`wal` settles what is found here), or what is in a commit.

With a checkpoint the log begins after the record that the manifest names, in the segment that was begun there. That one
had its name, durable, before the manifest had its own: if it is missing, it was lost. Older segments are leftovers.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from rpcagent.journal import manifest, record, runfiles, tail

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rpcagent.journal.disk import Disk

FOLDER = "wal"
TOMBSTONES = "tombstones"
_SEGMENT = re.compile(r"(\d{16})\.jsonl")
# All that may stand where a store is made. The index, its journal files included, tells nothing of its own.
_NO_STORE_YET = frozenset({"LOCK", "RESERVE", FOLDER, "blobs", "jobs", "trusted", "lost+found", manifest.FILE + ".tmp"})
_EMPTY_YET = frozenset({runfiles.FOLDER, TOMBSTONES})
_INDEX = "index.sqlite"


class Last(NamedTuple):
    """The last segment: what it holds, and its bytes."""

    name: str
    scan: tail.Scan
    data: bytes


@dataclass
class Found:
    """A store as it is. `last` is None where there is none yet. `base`: the record before the first one that counts,
    `at`: the last record. `leftovers`: segments that the checkpoint covers. `bytes`: of the segments that were read."""

    base: tail.Position
    at: tail.Position
    has_folder: bool = False
    has_head: bool = False
    head: record.Head | None = None
    head_bytes: bytes = b""
    slot: int = 0  # of HEAD, the one to write next: never the one that holds the better watermark
    epoch: int = 0  # the highest that HEAD or the log tells
    store_id: str = ""
    sealed: list[tuple[str, int]] = field(default_factory=list)  # complete segments: name, first number of the next
    last: Last | None = None
    run_ends: dict[str, int] = field(default_factory=dict)
    leftovers: list[str] = field(default_factory=list)
    drafts: list[str] = field(default_factory=list)  # of segments, left by an interrupted start
    bytes: int = 0


def stranger_in(names: Iterable[str]) -> str | None:
    """The name that shows that a folder is no store and can become none; None where it may, or has a log of its own."""
    found = set(names)
    if found & {"HEAD", FOLDER, manifest.FILE}:
        return None
    return min((name for name in found if not _may_stand(name)), default=None)


def first_of(segment: str) -> int:
    """The first record number of a segment, from its name."""
    return int(segment[len(FOLDER) + 1 :].removesuffix(".jsonl"))


def look(disk: Disk, base: manifest.Base | None, store_id: str | None) -> Found:
    """Reads all of the log that counts. Changes nothing. `base` and `store_id` are those of the manifest.

    Raises StoreDamaged (file, offset, reason), StoreTooNew, any OSError as it came."""
    start = (base.seq, base.checksum, base.batch) if base else (0, 0, 0)
    found = Found(tail.Position(*start), tail.Position(*start))
    top = disk.names("")
    found.has_folder, found.has_head = FOLDER in top, "HEAD" in top
    segments = _segments(disk, found) if found.has_folder else []
    if not segments and base is None:
        _refuse_what_is_no_store(disk, top, found.drafts)
        return found
    if base is None and manifest.FILE in top:
        raise ValueError("the store has a checkpoint: its log is opened with what that says")
    if found.has_head:
        found.head_bytes = disk.read("HEAD")
        found.head, place = record.read_head(found.head_bytes)
        found.slot = place ^ 1
    if base and found.head and found.head.seq == base.seq and found.head.checksum != base.checksum:
        raise tail.damaged("HEAD", 0, "HEAD and the manifest name another line with the same number")
    found.store_id = store_id or ""
    found.leftovers = [name for name, first in segments if first <= found.base.seq]
    _check_segments(disk, found, segments[len(found.leftovers) :])
    found.epoch = max(found.epoch, found.head.epoch if found.head else 0)
    return found


def _may_stand(name: str) -> bool:
    return name in _NO_STORE_YET or name in _EMPTY_YET or name == _INDEX or name.startswith(_INDEX + "-")


def _segments(disk: Disk, found: Found) -> list[tuple[str, int]]:
    """Name and first number of each segment, in order. Notes the drafts of an interrupted start."""
    segments = []
    for file in disk.names(FOLDER):
        match = _SEGMENT.fullmatch(file.removesuffix(".tmp"))
        if match is None:
            continue  # not ours: neither read nor touched
        if file.endswith(".tmp"):
            found.drafts.append(f"{FOLDER}/{file}")
        else:
            segments.append((f"{FOLDER}/{file}", int(match[1])))
    return sorted(segments)


def _check_segments(disk: Disk, found: Found, segments: list[tuple[str, int]]) -> None:
    first = found.base.seq + 1
    if not segments or segments[0][1] != first:
        missing = f"{FOLDER}/{first:016d}.jsonl"
        if found.base.seq:
            raise tail.damaged(missing, 0, "the segment that follows the checkpoint is missing")
        raise tail.damaged(segments[0][0] if segments else missing, 0, "the segments before this one are missing")
    for (name, begin), (_, until) in itertools.pairwise(segments):
        _check_segment(disk, found, name, begin, until)
        found.sealed.append((name, until))
    name, begin = segments[-1]
    found.last = _check_segment(disk, found, name, begin, None)


def _check_segment(disk: Disk, found: Found, name: str, first: int, until: int | None) -> Last:
    if first != found.at.seq + 1:
        raise tail.damaged(name, 0, f"record {found.at.seq + 1} is missing before it")
    data = disk.read(name)
    scan = tail.scan(name, data, found.at, until, found.head)
    if found.store_id and scan.header.store_id != found.store_id:
        raise tail.damaged(name, 0, "the segment belongs to another store")
    found.store_id = scan.header.store_id
    found.epoch = max(found.epoch, scan.epoch)
    found.bytes += len(data)
    for entry in scan.entries:
        found.run_ends[entry.run] = entry.first + entry.count - 1
    return Last(name, scan, data)


def _refuse_what_is_no_store(disk: Disk, top: list[str], drafts: list[str]) -> None:
    for name, what in (("HEAD", "watermark"), (manifest.FILE, "checkpoint")):
        if name in top:
            raise tail.damaged(name, 0, f"there is a {what} but no log: the segments are missing")
    for name in top:
        if not _may_stand(name):
            raise tail.damaged(name, 0, "the folder is not empty and is not a store: name an empty folder")
        if name in _EMPTY_YET and disk.names(name):
            raise tail.damaged(name, 0, "the files of runs are there but no log: the segments are missing")
    strangers = set(disk.names(FOLDER)) if FOLDER in top else set()
    strangers -= {draft.removeprefix(FOLDER + "/") for draft in drafts}
    for name in sorted(strangers):
        raise tail.damaged(f"{FOLDER}/{name}", 0, "the folder is not empty and holds no segment")
