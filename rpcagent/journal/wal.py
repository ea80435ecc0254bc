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
from typing import TYPE_CHECKING, Literal

import msgspec

from rpcagent import errors
from rpcagent.journal import opening, record, reserve, tail
from rpcagent.journal.opening import stranger_in
from rpcagent.journal.record import Entry, Item

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from rpcagent.journal.disk import Disk, Fence
    from rpcagent.journal.manifest import Base

__all__ = ["Entry", "Item", "Mark", "Wal", "stranger_in"]

_FOLDER = opening.FOLDER
_NO_HEAD = (b" " * (record.SLOT - 1) + b"\n") * 2


class Mark(msgspec.Struct, frozen=True):
    """A place in the log at which a segment begins: number, checksum and first number of the batch of the record before
    it. `ends`: for each run written since the mark before it, the number of its last event."""

    seq: int
    checksum: int
    batch: int
    ends: dict[str, int]


class Wal:
    """An open log. `open` makes it; after any StoragePoisoned it never writes again."""

    store_id: str
    epoch: int
    """Count of openings, durable before `open` returns."""
    last_seq: int
    """Number of the last durable record."""
    run_ends: dict[str, int]
    """For each run written since the last mark (without one: in the log): the number of its last durable event."""
    tail_bytes: int
    """Of the segments since the last mark (without one: since `base`): what an opening would read."""
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
        self.tail_bytes = 0
        self._base = tail.Position()  # where the replay began
        self._marked = 0  # number of the last record before the last mark
        self._sealed: list[tuple[str, int]] = []  # segments that are complete: name, first number of the next
        self._unread: list[Entry] | None = []  # of the last segment, until replayed
        self._at = tail.Position()
        self._segment = ""
        self._size = 0
        self._head_bytes = b""  # as far as we know, to save reading it anew
        self._format = record.FORMAT  # of the current segment
        self._slot = 0  # the one to write next: never the one that holds the better watermark
        self._greeting: record.Opening | None = None
        self._reserve = reserve.Reserve(disk, 0)

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
        base: Base | None = None,
        store_id: str | None = None,
        least_epoch: int = 0,
        reserve_bytes: int = 0,
    ) -> Wal:
        """Opens the store, or makes one in an empty folder. All segments are checked; on return everything that
        `entries` will yield is durable, and so is the new epoch. `at` is a time for the record of this opening, which
        goes out with the first append: a clean store opens on a full disk, and a mere look changes no segment.

        `base`, `store_id` and `least_epoch` (its `epoch`) are those of the manifest, where there is one: the log begins
        after `base`, and older segments, which a checkpoint did not get to delete, are deleted last. `reserve_bytes` of the
        disk are held for `append_outcomes`.

        Raises StoreDamaged (file, offset, reason; nothing was changed), StoreTooNew, StorageError where something could
        not be read or written (try again), StoragePoisoned where a sync failed."""
        wal = cls(disk, app=app, segment_bytes=segment_bytes, lock=lock)
        try:
            wal._recover(draw_store_id, at, base, store_id, least_epoch)
        except OSError as error:
            name = errors.name_of(error)
            raise errors.StorageError(f"The store cannot be opened ({name}); nothing was lost.", errno=name) from error
        wal._reserve = reserve.Reserve(disk, reserve_bytes)
        wal._reserve.take()
        return wal

    def entries(self) -> Iterator[Entry]:
        """All commits after `base` that were in the log when it was opened, oldest first. Once. Holds one segment in
        memory.

        Raises StorageError if a segment cannot be read, StoreDamaged if it changed since it was checked."""
        last, self._unread = self._unread, None
        if last is None:
            raise RuntimeError("the entries of a log can be read once")
        at = tail.Position(self._base.seq, self._base.checksum, self._base.batch)
        for name, until in self._sealed:
            try:
                data = self._disk.read(name)
            except OSError as error:
                found = errors.name_of(error)
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
        if self._reserve.spent and not self._reserve.restore():
            raise self._refuse()
        self._try(items, may_rotate=True)

    def append_outcomes(self, items: Sequence[Item]) -> None:
        """As `append`, where that found no room: into the space that is held in reserve. Until it is held again, the log
        stays full."""
        if self.state == "poisoned":
            raise self.over()
        self._reserve.give_back()  # what it held may have been given back before, and not be used up
        self._try(items, may_rotate=False)

    def _try(self, items: Sequence[Item], *, may_rotate: bool) -> None:
        try:
            self._append(items, may_rotate)
        except errors.StorageError:
            raise
        except BaseException:  # an interrupt, no memory: what stands in the file is not known
            self.poison("EINTR")
            raise

    def _append(self, items: Sequence[Item], may_rotate: bool) -> None:
        self._check_ownership()
        blob, at = self._encode(items)
        if may_rotate and self._size + len(blob) > self._segment_bytes and self._holds_records():
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
        self.tail_bytes += len(blob)
        for item in items:
            self.run_ends[item.run] = item.first + item.count - 1
        self._greeting = None
        if not self._reserve.spent:
            self.state, self.errno = "ok", None
        self._put_head()

    @property
    def tail_records(self) -> int:
        """Records since the last mark (without one: since `base`)."""
        return self._at.seq - self._marked

    def mark(self) -> Mark:
        """The present end of the log, for a checkpoint. On return a segment begins there, durable under its name, so that
        those before it can go once the checkpoint covers them. `run_ends`, `tail_bytes` and `tail_records` begin anew:
        who does not get the checkpoint done keeps `ends`. Where there is nothing to move, what room there is goes to the reserve.

        Raises StorageError (errno): there is no mark, the log goes on, try again. StoragePoisoned as `append`."""
        if self.state == "poisoned":
            raise self.over()
        before = self.state, self.errno
        try:
            self._check_ownership()
            # A segment of format 0 is closed even where it is empty: what follows a checkpoint says that it does.
            if self._holds_records() or self._format != record.FORMAT:
                self._rotate()
            elif self._reserve.spent and self._reserve.restore():
                self.state, self.errno = "ok", None  # there is room, and no checkpoint that needs it first
        except errors.StoragePoisoned:
            raise
        except errors.StorageError:
            self.state, self.errno = before  # who appends finds out for himself whether there is room
            raise
        except BaseException:
            self.poison("EINTR")
            raise
        ends, self.run_ends = self.run_ends, {}
        self.tail_bytes, self._marked = self._size, self._at.seq
        return Mark(self._at.seq, self._at.checksum, self._at.batch, ends)

    def close(self) -> None:
        """Makes the watermark durable and ends the log. What was appended is durable without it. Never raises for the
        disk: a lagging watermark is legal."""
        if self.state != "poisoned":
            try:
                self._disk.sync("HEAD")
                self.syncs += 1
            except OSError as error:
                self.errno = errors.name_of(error)
        self.state = "poisoned"
        for name in (self._segment, "HEAD", reserve.FILE, _FOLDER, ""):
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
            raise self.poison(errors.name_of(error)) from error
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
            raise self.poison(errors.name_of(error)) from cause
        self._sync(self._segment)
        return self._full(cause)

    def _full(self, cause: OSError) -> errors.StorageError:
        self.state, self.errno = "full", errors.name_of(cause)
        return self._refuse()

    def _refuse(self) -> errors.StorageError:
        return errors.StorageError(f"The store takes no more ({self.errno}); nothing was recorded.", errno=self.errno)

    def _sync(self, name: str, *, full: bool = False) -> None:
        try:
            (self._disk.sync_full if full else self._disk.sync)(name)
        except OSError as error:
            # Never again: the pages may be marked as clean by now, and a second sync would lie.
            raise self.poison(errors.name_of(error)) from error
        self.syncs += 1

    def _syncdir(self, folder: str) -> None:
        try:
            self._disk.syncdir(folder)
        except OSError as error:
            raise self.poison(errors.name_of(error)) from error
        self.syncs += 1

    def _holds_records(self) -> bool:
        return self._at.seq >= opening.first_of(self._segment)

    def _rotate(self) -> None:
        done = self._segment
        try:
            self._make_segment(self._at, b"", self._at.seq)
        except OSError as error:
            raise self._full(error) from error
        if done != self._segment:
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
            raise self.poison(errors.name_of(error)) from error
        self._segment, self._size, self._format = name, len(content), record.FORMAT
        self._syncdir(_FOLDER)
        self.bytes_written += len(content)
        self.tail_bytes += len(content)

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

    def _recover(
        self, draw_store_id: Callable[[], str], at: str, base: Base | None, store_id: str | None, least: int
    ) -> None:
        """May crash anywhere and be run again: each step leaves a store that the same steps open."""
        found = opening.look(self._disk, base, store_id)
        self._base, self._at, self.run_ends = found.base, found.at, found.run_ends
        self._marked = found.base.seq
        self._head_bytes, self._slot = found.head_bytes, found.slot
        epoch = max(found.epoch, least)
        if found.last is None:
            self._found(draw_store_id, found.has_folder)
        else:
            last = found.last
            self.store_id, self._sealed, self._unread = found.store_id, found.sealed, last.scan.entries
            self._segment, self._size, self._format = last.name, last.scan.end, last.scan.header.format
            self.tail_bytes = found.bytes
            self._settle(last.scan, last.data)
        for draft in found.drafts:
            if self._disk.exists(draft):
                self._disk.unlink(draft)
        self.last_seq = self._at.seq
        # The names found may be known to this machine only, left by a process that was killed before its folder sync.
        self._syncdir(opening.FOLDER)
        self._claim(epoch + 1, found.has_head)
        self._greeting = record.Opening(self.epoch, at)
        for leftover in found.leftovers:
            self._disk.unlink(leftover)

    def _settle(self, scan: tail.Scan, data: bytes) -> None:
        """Whatever the last segment holds above the watermark gets a segment of its own, durable; a torn tail stays
        behind in the old one. The replay needs no second look: those entries are held in memory."""
        self.dropped_tail_bytes = scan.dropped
        if scan.end != scan.above or scan.dropped:
            old = self._segment
            self._make_segment(scan.before, data[scan.above : scan.end], self._at.seq)
            if old != self._segment:
                self._disk.release(old)

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
