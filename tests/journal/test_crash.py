"""Every crash point, in the life of a store and in its recovery. P2, P9, S2-25, S1-43, F019, F029."""

from __future__ import annotations

from .story import crash_everywhere, crash_in_recovery, fail_each_sync, full_at_each_write


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
