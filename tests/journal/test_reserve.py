"""What is held for a full disk: outcomes take it, nothing else does, and `status` tells the truth all the while. S1-26, F025."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from rpcagent import errors
from rpcagent.journal.disk import Disk, RealDisk
from rpcagent.journal.record import Item
from rpcagent.journal.wal import Wal

from .simdisk import SimDisk
from .story import replay

HELD = 1_000


class SmallDisk(SimDisk):
    """Of `room` bytes. `watch` is told of each write."""

    room = 1 << 30

    def __init__(self) -> None:
        super().__init__()
        self.watch: Callable[[str], None] = lambda _name: None

    def write(self, name: str, offset: int, data: bytes) -> None:
        self.watch(name)
        used = sum(map(len, self.image().values()))
        more = offset + len(data) - self.size(name)
        if more > 0 and used + more > self.room:
            super().write(name, offset, data[: max(0, self.room - used)])
            raise OSError(errno.ENOSPC, "no room")
        super().write(name, offset, data)

    def fill(self) -> None:
        self.room = sum(map(len, self.image().values()))


def opened(disk: Disk) -> Wal:
    return Wal.open(disk, draw_store_id=lambda: "store-1", app="0.1.0", at="now", reserve_bytes=HELD)


def item(number: int, size: int = 3) -> Item:
    return Item("run_1", number, 1, b'"%b"' % (b"x" * size))


@pytest.fixture
def disk() -> SmallDisk:
    return SmallDisk()


@pytest.fixture
def full(disk: SmallDisk) -> Wal:
    """A log with one record that has met the full disk."""
    log = opened(disk)
    log.append([item(1)])
    disk.fill()
    with pytest.raises(errors.StorageError):
        log.append([item(2, 100)])
    return log


def test_outcomes_are_recorded_where_nothing_else_is_and_are_there_after_a_kill_f025(
    disk: SmallDisk, full: Wal
) -> None:
    full.append_outcomes([item(2, 100), item(3)])
    full.append_outcomes([item(4, 100)])
    with pytest.raises(errors.StorageError) as caught:
        full.append([item(5)])
    assert caught.value.data == {"code": "STORAGE", "retryable": True, "errno": "ENOSPC"}
    assert (full.state, full.errno) == ("full", "ENOSPC")
    assert replay(opened(disk.killed())) == [item(1), item(2, 100), item(3), item(4, 100)]


def test_a_log_that_lives_on_its_reserve_is_full_at_every_moment_s1_26(disk: SmallDisk, full: Wal) -> None:
    seen = set()
    disk.watch = lambda name: seen.add((name, full.state, full.errno))
    full.append_outcomes([item(2, 100)])
    assert seen == {("wal/0000000000000001.jsonl", "full", "ENOSPC"), ("HEAD", "full", "ENOSPC")}
    assert (full.state, full.errno) == ("full", "ENOSPC")


def test_once_there_is_room_the_reserve_is_whole_before_anything_new_is_recorded_s1_26(
    disk: SmallDisk, full: Wal
) -> None:
    full.append_outcomes([item(2, 100)])
    disk.room += 50  # for a new record, but not for what was held
    with pytest.raises(errors.StorageError):
        full.append([item(3)])
    assert (disk.size("RESERVE"), full.state) == (0, "full")
    disk.room = 1 << 20
    full.append([item(3)])
    assert (disk.size("RESERVE"), full.state, full.errno) == (HELD, "ok", None)


def test_a_mark_of_an_empty_log_holds_the_reserve_again_and_one_with_records_leaves_room_to_its_checkpoint(
    disk: SmallDisk, full: Wal
) -> None:
    full.append_outcomes([item(2, 100)])
    disk.room += HELD + 500
    full.mark()
    assert (disk.size("RESERVE"), full.state) == (0, "full")
    full.mark()
    assert (disk.size("RESERVE"), full.state, full.errno) == (HELD, "ok", None)


def test_outcomes_beyond_the_reserve_are_refused_and_nothing_of_them_is_recorded(disk: SmallDisk, full: Wal) -> None:
    with pytest.raises(errors.StorageError):
        full.append_outcomes([item(2, 3 * HELD)])
    assert (full.state, full.errno) == ("full", "ENOSPC")
    full.append_outcomes([item(2, 100)])
    assert replay(opened(disk.killed())) == [item(1), item(2, 100)]


def test_a_store_that_is_opened_on_a_full_disk_takes_its_reserve_over(disk: SmallDisk, full: Wal) -> None:
    again = opened(disk.killed())
    with pytest.raises(errors.StorageError):
        again.append([item(2, 100)])
    again.append_outcomes([item(2, 100)])
    assert replay(opened(disk.killed())) == [item(1), item(2, 100)]


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc")
def test_a_closed_log_has_given_all_its_descriptors_back(tmp_path: Path) -> None:
    before = os.listdir("/proc/self/fd")
    disk = RealDisk(tmp_path)
    log = opened(disk)
    log.append([item(1)])
    log.close()
    assert os.listdir("/proc/self/fd") == before
