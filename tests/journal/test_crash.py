"""Every crash point, in the life of a store and in its recovery. P2, P9, S2-25, S1-43, F019, F029."""

from __future__ import annotations

import errno
import random

import pytest
from rpcagent import errors
from rpcagent.journal.record import Item

from .faulty import FaultyDisk
from .simdisk import Crash
from .story import as_item, crash_everywhere, crash_in_recovery, fail_each_sync, full_at_each_write, open_log


def test_whatever_a_crash_leaves_opens_and_keeps_all_that_was_acknowledged() -> None:
    points, disks = crash_everywhere()
    print(f"crash points {points}, disks {disks}")
    assert points > 100
    assert disks > 4000


def test_a_crash_inside_recovery_is_recovered_from_in_the_same_way() -> None:
    points, disks = crash_in_recovery()
    print(f"crash points in recovery {points}, disks {disks}")
    assert points > 2000
    assert disks > 10_000


def test_after_a_failed_sync_nothing_is_acknowledged_and_a_restart_keeps_what_was_f029() -> None:
    disks = fail_each_sync()
    print(f"disks after a failed sync {disks}")
    assert disks > 700


def test_a_write_that_stops_half_way_is_undone_and_a_crash_around_the_undo_loses_nothing_f019() -> None:
    refusals, disks = full_at_each_write()
    print(f"refused batches {refusals}, disks {disks}")
    assert refusals > 20
    assert disks > 2000


LIVES, GENERATIONS = 300, 8


@pytest.mark.parametrize("block", range(4))
def test_over_many_crashes_failures_and_restarts_in_a_row_no_acknowledged_record_is_lost(block: int) -> None:
    """Random lives: what one generation leaves, the next one starts on."""
    restarts = 0
    for seed in range(block * LIVES // 4, (block + 1) * LIVES // 4):
        rng = random.Random(seed)
        disk = FaultyDisk()
        kept: list[Item] = []  # acknowledged, or found by a restart, which serves it
        doubt: list[Item] = []  # handed over, no answer
        serial = 0
        for _ in range(GENERATIONS):
            disk.crash_at = disk.calls + rng.randrange(1, 60)
            try:
                wal = open_log(disk)
                got = [as_item(entry) for entry in wal.entries()]
                assert got[: len(kept)] == kept, f"seed {seed}"
                assert got[len(kept) :] == doubt[: len(got) - len(kept)], f"seed {seed}"
                kept, doubt, restarts = got, [], restarts + 1
                for _ in range(rng.randrange(12)):
                    disk.plan = rng.choice(
                        [{}] * 12 + [{("write", "wal/"): errno.ENOSPC}, {("write", "HEAD"): errno.EIO}]
                    )
                    if rng.random() < 0.05:
                        disk.fail_sync = frozenset({disk.syncs + rng.randrange(1, 4)})
                    serial += 1
                    doubt = [
                        Item(f"r{serial}", n + 1, 1, b'"%b"' % (b"x" * rng.choice((1, 40, 40, 300))))
                        for n in range(rng.randrange(1, 5))
                    ]
                    try:
                        wal.append(doubt)
                    except errors.StoragePoisoned:
                        break
                    except errors.StorageError:
                        doubt = []
                        continue
                    kept, doubt = kept + doubt, []
                if rng.random() < 0.5:
                    wal.close()
            except (Crash, errors.StoragePoisoned):
                pass
            disk.plan = {}
            if rng.random() < 0.3:
                disk.killed()
            else:
                disk = FaultyDisk(rng.choice(list(disk.after_cut(seed=seed, cap=20))))
    print(f"{LIVES // 4} lives, {restarts} restarts")
    assert restarts > LIVES
