"""The write-ahead log of one store: open it, replay it, append to it. Synchronous, no thread, no clock.

Knows: segments, HEAD, recovery, what to do about an error. Does not know: what a run or an event is (numbers and bytes),
who waits for a record (`commit`), or which file system it stands on (`disk`).

Fault model. A crash may come between any two calls to the disk, in recovery as well.
- Killed process: all that was written is there, whether it was synced or not. What was not synced may be lost later.
- Power cut: of all writes to a file since its last sync any subset is there, each whole, in part (any sectors) or as
  zeros; of all changes of names in a folder since its last sync any subset.
- A failed write leaves any part of it. It is undone (cut to the last good end, synced); then the log goes on.
- A failed sync: what was written may be lost although it can still be read, and a second sync would succeed without
  writing it. So nothing is acknowledged any more, by this process; the next one decides by what it finds. Lengths are
  the exception: a cut that a failed sync left in doubt is durable with the next sync of that file.
- A file that cannot be read (EIO, EACCES, EMFILE) is neither empty nor at its end: opening is refused.
- Damage: any bytes may have changed. What was acknowledged is never dropped, it is reported. Limit: after a power cut
  HEAD may lag behind (it is not synced with each batch), and damage in the very last batch then looks like a tear.
- One process writes. It holds the lock, and HEAD carries its epoch; both are looked at before each batch.

What makes that hold:
- A record is acknowledged after its sync. HEAD is written after that, so it never runs ahead.
- What is above the watermark after a start may stand in memory only, or in pages that a failed sync marked as clean.
  It is copied to a new segment (temporary name, sync, rename, sync of the folder) before anything is served.
- Nothing below the watermark is ever overwritten or cut; a segment is superseded by the next one from its first number.
- A segment has its first line, synced, before it has its name.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import re
from typing import TYPE_CHECKING, Literal

from rpcagent import errors
from rpcagent.journal import record, tail
from rpcagent.journal.record import Entry, Item

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from rpcagent.journal.disk import Disk, Fence

__all__ = ["Entry", "Item", "Wal"]

_FOLDER = "wal"
_SEGMENT = re.compile(r"(\d{16})\.jsonl")
_NO_HEAD = (b" " * (record.SLOT - 1) + b"\n") * 2
# All that may stand where a store is made.
_NO_STORE_YET = frozenset({"LOCK", _FOLDER, "blobs", "jobs", "trusted", "lost+found"})


def stranger_in(names: Iterable[str]) -> str | None:
    """The name that shows that a folder is no store and can become none; None where it may, or has a log of its own."""
    known = {"HEAD", _FOLDER}
    found = set(names)
    return None if found & known else min(found - _NO_STORE_YET, default=None)


class Wal:
    """An open log. `open` makes it; after any StoragePoisoned it never writes again."""

    store_id: str
    epoch: int
    """Count of openings, durable before `open` returns."""
    last_seq: int
    """Number of the last durable record."""
    run_ends: dict[str, int]
    """For each run in the log: the number of its last durable event."""
    dropped_tail_bytes: int
    """Bytes of a torn tail that this opening left behind."""

    def __init__(self, disk: Disk, *, app: str, segment_bytes: int, lock: Fence | None) -> None:
        """Use `open`."""
        self._disk = disk
        self._app = app
        self._segment_bytes = segment_bytes
        self._lock = lock
        self.state: Literal["ok", "full", "poisoned"] = "ok"
        self.errno: str | None = None
        self.syncs = 0  # of files and folders, all included
        self.records = 0  # appended by this process
        self.bytes_written = 0  # of the log, HEAD not included
        self.dropped_tail_bytes = 0
        self.run_ends = {}
        self._sealed: list[tuple[str, int]] = []  # segments that are complete: name, first number of the next
        self._unread: list[Entry] | None = []  # of the last segment, until replayed
        self._at = tail.Position()
        self._segment = ""
        self._size = 0
        self._head: record.Head | None = None
        self._head_bytes = b""  # as far as we know, to save reading it anew
        self._open_epoch = 0  # the highest that the log itself tells
        self._slot = 0  # the one to write next: never the one that holds the better watermark
        self._greeting: record.Opening | None = None

    @classmethod
    def open(
        cls,
        disk: Disk,
        *,
        draw_store_id: Callable[[], str],
        app: str,
        at: str,
        segment_bytes: int = 64 * 2**20,
        lock: Fence | None = None,
    ) -> Wal:
        """Opens the store, or makes one in an empty folder. All segments are checked; on return everything that
        `entries` will yield is durable, and so is the new epoch. `at` is a time for the record of this opening, which
        goes out with the first append: a clean store opens on a full disk, and a mere look changes no segment.

        Raises StoreDamaged (file, offset, reason; nothing was changed), StoreTooNew, StorageError where something could
        not be read or written (try again), StoragePoisoned where a sync failed."""
        wal = cls(disk, app=app, segment_bytes=segment_bytes, lock=lock)
        try:
            wal._recover(draw_store_id, at)
        except OSError as error:
            name = _name_of(error)
            raise errors.StorageError(f"The store cannot be opened ({name}); nothing was lost.", errno=name) from error
        return wal

    def entries(self) -> Iterator[Entry]:
        """All commits that were in the log when it was opened, oldest first. Once. Holds one segment in memory.

        Raises StorageError if a segment cannot be read, StoreDamaged if it changed since it was checked."""
        last, self._unread = self._unread, None
        if last is None:
            raise RuntimeError("the entries of a log can be read once")
        at = tail.Position()
        for name, until in self._sealed:
            try:
                data = self._disk.read(name)
            except OSError as error:
                found = _name_of(error)
                raise errors.StorageError(f"{name} cannot be read ({found}).", errno=found) from error
            yield from tail.scan(name, data, at, until, None).entries
        yield from last

    # Appending

    def append(self, items: Sequence[Item]) -> None:
        """One batch: one write, one sync. On return all items are durable, in this order.

        Raises StorageError (errno): nothing was recorded, a later append may succeed. StoragePoisoned: it is not known
        what was recorded, and this log writes no more."""
        if self.state == "poisoned":
            raise self.over()
        if not items:
            return
        try:
            self._append(items)
        except errors.StorageError:
            raise
        except BaseException:  # an interrupt, no memory: what stands in the file is not known
            self.poison("EINTR")
            raise

    def _append(self, items: Sequence[Item]) -> None:
        self._check_ownership()
        blob, at = self._encode(items)
        if self._size + len(blob) > self._segment_bytes and self._at.seq >= _first_of(self._segment):
            self._rotate()
        try:
            self._disk.write(self._segment, self._size, blob)
        except OSError as error:
            raise self._undo(error) from error
        self._sync(self._segment)
        self._size += len(blob)
        self._at = at
        self.last_seq = at.seq
        self.records += len(items)
        self.bytes_written += len(blob)
        for item in items:
            self.run_ends[item.run] = item.first + item.count - 1
        self.state, self.errno, self._greeting = "ok", None, None
        self._put_head()

    def close(self) -> None:
        """Makes the watermark durable and ends the log. What was appended is durable without it. Never raises for the
        disk: a lagging watermark is legal."""
        if self.state != "poisoned":
            try:
                self._disk.sync("HEAD")
                self.syncs += 1
            except OSError as error:
                self.errno = _name_of(error)
        self.state = "poisoned"
        for name in (self._segment, "HEAD", _FOLDER, ""):
            self._disk.release(name)

    def poison(self, name: str) -> errors.StoragePoisoned:
        """Ends all writing; returns what to raise. `name` is that of an errno."""
        self.state, self.errno = "poisoned", name
        return errors.StoragePoisoned(
            f"Writing to the store failed in a way that cannot be undone ({name}); what was not answered may or may not "
            "be recorded.",
            errno=name,
        )

    def over(self) -> errors.StoragePoisoned:
        """What every call gets once nothing is written any more."""
        return errors.StoragePoisoned("This log is closed; start again.", errno=self.errno)

    def _encode(self, items: Sequence[Item]) -> tuple[bytes, tail.Position]:
        seq, checksum = self._at.seq, self._at.checksum
        batch = seq + 1
        lines = []
        if self._greeting is not None:
            seq += 1
            line, checksum = record.open_line(seq, batch, checksum, self._greeting)
            lines.append(line)
        for item in items:
            seq += 1
            line, checksum = record.commit_line(seq, batch, checksum, item)
            lines.append(line)
        return b"".join(lines), tail.Position(seq, checksum, batch)

    def _check_ownership(self) -> None:
        if self._lock is not None and not self._lock.held():
            raise self.poison("ESTALE")
        try:
            seen = self._disk.read_at("HEAD", 0, 2 * record.SLOT)
        except OSError as error:
            raise self.poison(_name_of(error)) from error
        if seen == self._head_bytes:
            return
        head, _ = record.read_head(seen)
        if head is None or head.epoch != self.epoch:
            raise self.poison("ESTALE")

    def _undo(self, cause: OSError) -> errors.StorageError:
        """Nothing of the batch was synced, none of it acknowledged: back to the last good end."""
        try:
            self._disk.truncate(self._segment, self._size)
        except OSError as error:
            raise self.poison(_name_of(error)) from cause
        self._sync(self._segment)
        return self._full(cause)

    def _full(self, cause: OSError) -> errors.StorageError:
        self.state, self.errno = "full", _name_of(cause)
        return errors.StorageError(f"The store takes no more ({self.errno}); nothing was recorded.", errno=self.errno)

    def _sync(self, name: str, *, full: bool = False) -> None:
        try:
            (self._disk.sync_full if full else self._disk.sync)(name)
        except OSError as error:
            # Never again: the pages may be marked as clean by now, and a second sync would lie.
            raise self.poison(_name_of(error)) from error
        self.syncs += 1

    def _syncdir(self, folder: str) -> None:
        try:
            self._disk.syncdir(folder)
        except OSError as error:
            raise self.poison(_name_of(error)) from error
        self.syncs += 1

    def _rotate(self) -> None:
        done = self._segment
        try:
            self._make_segment(self._at, b"", self._at.seq)
        except OSError as error:
            raise self._full(error) from error
        self._disk.release(done)

    def _make_segment(self, before: tail.Position, lines: bytes, through: int) -> None:
        """The segment of the records after `before`, with `lines` in it; current, and durable under its name, on return.
        An OSError leaves the log as it was."""
        header = record.Header(record.FORMAT, "crc32", self.store_id, self._app, through)
        content = record.header_line(before.seq, before.checksum, header) + lines
        name = f"{_FOLDER}/{before.seq + 1:016d}.jsonl"
        draft = name + ".tmp"
        if self._disk.exists(draft):
            self._disk.unlink(draft)
        self._disk.create(draft)
        try:
            self._disk.write(draft, 0, content)
        except OSError:
            with contextlib.suppress(OSError):
                self._disk.unlink(draft)  # on a full disk every byte counts
            raise
        self._sync(draft, full=True)
        try:
            self._disk.rename(draft, name)
        except OSError as error:
            # Whether it has its name is not known. If it has, what the old segment takes from now on is superseded.
            raise self.poison(_name_of(error)) from error
        self._segment, self._size = name, len(content)
        self._syncdir(_FOLDER)
        self.bytes_written += len(content)

    def _put_head(self) -> None:
        """After the sync. A failure costs nothing but a lagging watermark: the same slot is tried next time, so that
        the other one stays good."""
        head = record.Head(self.epoch, self._at.seq, self._at.checksum)
        try:
            self._write_head(head)
        except OSError:
            self._head_bytes = b""  # no longer known; read and understood before the next batch

    def _write_head(self, head: record.Head) -> None:
        slot, known = record.head_slot(head), self._head_bytes[: 2 * record.SLOT].ljust(2 * record.SLOT)
        self._disk.write("HEAD", self._slot * record.SLOT, slot)
        self._head_bytes = slot + known[record.SLOT :] if self._slot == 0 else known[: record.SLOT] + slot
        self._slot ^= 1

    # Opening

    def _recover(self, draw_store_id: Callable[[], str], at: str) -> None:
        """May crash anywhere and be run again: each step leaves a store that the same steps open."""
        top = self._disk.names("")
        segments, drafts = self._segments() if _FOLDER in top else ([], [])
        has_head, epoch = "HEAD" in top, 0
        if segments:
            if has_head:
                self._head_bytes = self._disk.read("HEAD")
                self._head, place = record.read_head(self._head_bytes)
                self._slot = place ^ 1
                epoch = self._head.epoch if self._head else 0
            scan, data = self._check_segments(segments)
            epoch = max(epoch, self._open_epoch)
            self._settle(scan, data)
        else:
            self._refuse_what_is_no_store(top, drafts)
            self._found(draw_store_id, _FOLDER in top)
        for draft in drafts:
            if self._disk.exists(draft):
                self._disk.unlink(draft)
        self.last_seq = self._at.seq
        # The names found may be known to this machine only, left by a process that was killed before its folder sync.
        self._syncdir(_FOLDER)
        self._claim(epoch + 1, has_head)
        self._greeting = record.Opening(self.epoch, at)

    def _segments(self) -> tuple[list[tuple[str, int]], list[str]]:
        """Name and first number of each segment, in order; and the drafts of an interrupted start."""
        found, drafts = [], []
        for file in self._disk.names(_FOLDER):
            match = _SEGMENT.fullmatch(file.removesuffix(".tmp"))
            if match is None:
                continue  # not ours: neither read nor touched
            if file.endswith(".tmp"):
                drafts.append(f"{_FOLDER}/{file}")
            else:
                found.append((f"{_FOLDER}/{file}", int(match[1])))
        return sorted(found), drafts

    def _check_segments(self, segments: list[tuple[str, int]]) -> tuple[tail.Scan, bytes]:
        """Reads and checks all segments, one at a time. Returns the last one and its bytes."""
        if segments[0][1] != 1:
            raise tail.damaged(segments[0][0], 0, "the segments before this one are missing")
        for (name, first), (_, until) in itertools.pairwise(segments):
            self._check_segment(name, first, until)
            self._sealed.append((name, until))
        name, first = segments[-1]
        scan, data = self._check_segment(name, first, None)
        self._segment, self._size, self._unread = name, scan.end, scan.entries
        return scan, data

    def _check_segment(self, name: str, first: int, until: int | None) -> tuple[tail.Scan, bytes]:
        if first != self._at.seq + 1:
            raise tail.damaged(name, 0, f"record {self._at.seq + 1} is missing before it")
        data = self._disk.read(name)
        scan = tail.scan(name, data, self._at, until, self._head)
        store = scan.header.store_id
        if store != getattr(self, "store_id", store):
            raise tail.damaged(name, 0, "the segment belongs to another store")
        self.store_id = store
        self._open_epoch = max(self._open_epoch, scan.epoch)
        for entry in scan.entries:
            self.run_ends[entry.run] = entry.first + entry.count - 1
        return scan, data

    def _settle(self, scan: tail.Scan, data: bytes) -> None:
        """Whatever the last segment holds above the watermark gets a segment of its own, durable; a torn tail stays
        behind in the old one. The replay needs no second look: those entries are held in memory."""
        self.dropped_tail_bytes = scan.dropped
        if scan.end != scan.above or scan.dropped:
            old = self._segment
            self._make_segment(scan.before, data[scan.above : scan.end], self._at.seq)
            if old != self._segment:
                self._disk.release(old)

    def _refuse_what_is_no_store(self, top: list[str], drafts: list[str]) -> None:
        for name in top:
            if name == "HEAD":
                raise tail.damaged("HEAD", 0, "there is a watermark but no log: the segments are missing")
            if name not in _NO_STORE_YET:
                raise tail.damaged(name, 0, "the folder is not empty and is not a store: name an empty folder")
        strangers = set(self._disk.names(_FOLDER)) if _FOLDER in top else set()
        strangers -= {draft.removeprefix(_FOLDER + "/") for draft in drafts}
        for name in sorted(strangers):
            raise tail.damaged(f"{_FOLDER}/{name}", 0, "the folder is not empty and holds no segment")

    def _found(self, draw_store_id: Callable[[], str], has_folder: bool) -> None:
        self.store_id = draw_store_id()
        if not has_folder:
            self._disk.mkdir(_FOLDER)
        self._syncdir("")
        self._make_segment(self._at, b"", 0)

    def _claim(self, epoch: int, has_head: bool) -> None:
        """The new epoch and the present end of the log are in HEAD, durable. A process of an older epoch stops at its
        next batch."""
        self.epoch = epoch
        if not has_head:
            self._disk.create("HEAD")
        missing = _NO_HEAD[len(self._head_bytes) :]
        if missing:  # both slots get their space now, so that a full disk cannot hold the watermark back
            self._disk.write("HEAD", len(self._head_bytes), missing)
            self._head_bytes += missing
        self._write_head(record.Head(epoch, self._at.seq, self._at.checksum))
        self._sync("HEAD", full=True)
        self._syncdir("")


def _first_of(segment: str) -> int:
    return int(segment[len(_FOLDER) + 1 :].removesuffix(".jsonl"))


def _name_of(error: OSError) -> str:
    return errno.errorcode.get(error.errno or 0, "EIO")
