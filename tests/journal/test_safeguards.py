"""Each safeguard, taken away, makes a check fail: proof that the checks can see what they are for. P2, P9, F023, F029."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

import pytest
from rpcagent.journal import record, tail
from rpcagent.journal.wal import Wal

from . import story
from .damage import flip_every_byte
from .simdisk import SimDisk

if TYPE_CHECKING:
    from collections.abc import Callable


class NoLogSync(SimDisk):
    """Acknowledges before the sync: a sync of a segment does nothing."""

    def sync(self, name: str) -> None:
        if not name.startswith("wal/"):
            super().sync(name)

    def sync_full(self, name: str) -> None:
        super().sync(name)


class NoFolderSync(SimDisk):
    def syncdir(self, folder: str) -> None:
        pass


class NoWalFolderSync(SimDisk):
    def syncdir(self, folder: str) -> None:
        if folder == "":
            super().syncdir(folder)


class NoDraftSync(SimDisk):
    """A new segment gets its name before its content is durable."""

    def sync_full(self, name: str) -> None:
        if not name.endswith(".tmp"):
            super().sync(name)


class RetriedSync(SimDisk):
    def sync(self, name: str) -> None:
        try:
            super().sync(name)
        except OSError:
            super().sync(name)


class NoUndo(SimDisk):
    def truncate(self, name: str, size: int) -> None:
        pass


class UnsyncedUndo(SimDisk):
    """The cut is made but not made durable."""

    cut = False

    def truncate(self, name: str, size: int) -> None:
        super().truncate(name, size)
        self.cut = True

    def sync(self, name: str) -> None:
        if self.cut:
            self.cut = False
        else:
            super().sync(name)


class NoCopy(Wal):
    """The usual way: cut the torn tail, trust what stands before it, go on in the same file."""

    def _settle(self, scan: tail.Scan, data: bytes) -> None:
        if scan.dropped:
            self._disk.truncate(self._segment, scan.end)
            self._sync(self._segment)


class NamesTrustedOnOpen(Wal):
    """An opening relies on the names it sees, though the process before it may have been killed before they were durable."""

    def _syncdir(self, folder: str) -> None:
        in_recovery = hasattr(self, "last_seq") and not hasattr(self, "epoch")
        if not in_recovery:
            super()._syncdir(folder)


class NoFence(Wal):
    def _check_ownership(self) -> None:
        pass


class PastAFailedSync(Wal):
    """A failed sync is an error like any other: answered, forgotten."""

    def _sync(self, name: str, *, full: bool = False) -> None:
        try:
            self._disk.sync(name)
        except OSError:
            self.syncs += 1


class HeadFirst(Wal):
    """The watermark is written before the sync that makes it true."""

    def _sync(self, name: str, *, full: bool = False) -> None:
        if name == self._segment:
            _, at = self._encode_again
            self._at, before = at, self._at
            self._put_head()
            self._at = before
        super()._sync(name, full=full)

    def _encode(self, items):
        self._encode_again = super()._encode(items)
        return self._encode_again


def crash(kind: type[Wal], disk: type[SimDisk]) -> None:
    story.crash_everywhere(kind, disk, cap=40)


def failed_sync(kind: type[Wal], disk: type[SimDisk]) -> None:
    story.fail_each_sync(kind, disk)


def full(kind: type[Wal], disk: type[SimDisk]) -> None:
    story.full_at_each_write(kind, disk)


@pytest.mark.parametrize(
    ("kind", "disk", "check"),
    [
        (Wal, NoLogSync, crash),
        (Wal, NoFolderSync, crash),
        (Wal, NoWalFolderSync, crash),
        (Wal, NoDraftSync, crash),
        (NoCopy, SimDisk, crash),
        (NoCopy, SimDisk, failed_sync),
        (NamesTrustedOnOpen, SimDisk, crash),
        (HeadFirst, SimDisk, crash),
        (Wal, RetriedSync, failed_sync),
        (PastAFailedSync, SimDisk, failed_sync),
        (Wal, NoUndo, full),
        (Wal, UnsyncedUndo, full),
    ],
)
def test_without_this_safeguard_a_record_is_lost_or_a_legal_disk_refused(
    kind: type[Wal], disk: type[SimDisk], check: Callable[[type[Wal], type[SimDisk]], None]
) -> None:
    with pytest.raises(AssertionError):
        check(kind, disk)


def test_without_the_fence_two_owners_ruin_the_log() -> None:
    disk, witness = SimDisk(), story.Witness()
    old = story.open_log(disk, NoFence)
    new = story.open_log(disk)
    new.append([witness.next(30), witness.next(40)])
    old.append([story.Witness().next(10)])
    with pytest.raises(AssertionError):
        story.must_hold(disk.killed(), witness)


def test_without_the_watermark_damage_to_the_last_batch_goes_unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "read_head", lambda _: (None, 1))
    with pytest.raises(AssertionError, match="silent"):
        flip_every_byte()


def test_without_the_rule_of_the_later_batch_and_the_watermark_much_more_goes_unseen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tail, "stands_beyond", lambda *_: False)
    monkeypatch.setattr(record, "read_head", lambda _: (None, 1))
    with pytest.raises(AssertionError, match="silent"):
        flip_every_byte()


def test_the_rule_that_any_later_intact_line_means_damage_refuses_legal_disks(monkeypatch: pytest.MonkeyPatch) -> None:
    def any_line(data: bytes, offset: int, _: tail.Position) -> bool:
        return any(
            record.decode(data, found.start(), data.find(b"\n", found.start()) + 1)
            for found in record.CANDIDATE.finditer(data, offset + 1)
        )

    monkeypatch.setattr(tail, "stands_beyond", any_line)
    with pytest.raises(AssertionError, match="a legal disk was refused"):
        story.crash_everywhere()


def test_without_the_table_row_for_tears_every_torn_tail_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = tuple(row._replace(outcome="damaged") if row.label == "torn" else row for row in tail.TABLE)
    monkeypatch.setattr(tail, "TABLE", rows)
    with pytest.raises(AssertionError, match="a legal disk was refused"):
        story.crash_everywhere()


def test_the_failing_sync_of_the_model_is_the_real_one() -> None:
    """The model itself: what a failed sync dropped reads well, and is not written by the next sync."""
    disk = SimDisk(fail_sync=frozenset({1}))
    disk.create("HEAD")
    disk.write("HEAD", 0, b"x")
    with pytest.raises(OSError) as caught:
        disk.sync("HEAD")
    assert caught.value.errno == errno.EIO
    disk.sync("HEAD")
    disk.syncdir("")
    assert disk.read("HEAD") == b"x"
    assert {image["HEAD"] for image in disk.after_cut()} == {b"", b"x", b"\0"}
