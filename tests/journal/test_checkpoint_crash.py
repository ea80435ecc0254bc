"""Every crash point of a store with checkpoints and deletions, and proof that the checks see what they are for. P2, P9, S2-25.

The sweeps are larger in `python -m tests.journal.sweep`; the crash points are all here."""

from __future__ import annotations

import pytest

from . import checkpoint_story as story
from .checkpoint_damage import Indexed, clean_stop, cut_every_byte, flip_every_byte, killed, lose_each_file
from .checkpoint_mutants import MUTANTS, Mutant

KINDS = pytest.mark.parametrize("kind", [story.Store, story.Eager])


@KINDS
def test_whatever_a_crash_leaves_of_a_checkpoint_opens_with_all_that_was_acknowledged_and_nothing_that_was_deleted(
    kind: story.Open,
) -> None:
    tally = story.crash_everywhere(kind)
    print(tally)
    assert tally.points > 250
    assert len(tally.seen) > 1000


@KINDS
def test_a_crash_in_what_comes_after_a_crash_is_recovered_from_in_the_same_way(kind: story.Open) -> None:
    tally = story.crash_in_recovery(kind, every=29)
    print(tally)
    assert tally.points > 700
    assert len(tally.seen) > 400


@KINDS
def test_after_a_failed_sync_of_a_checkpoint_a_restart_keeps_what_was_acknowledged_f029(kind: story.Open) -> None:
    tally = story.fail_each_sync(kind, cap=1)
    print(tally)
    assert tally.points > 100
    assert len(tally.seen) > 350


@KINDS
def test_a_checkpoint_on_a_full_disk_is_refused_and_made_when_there_is_space_s1_26(kind: story.Open) -> None:
    tally = story.full_at_each_write(kind, after=1)
    print(tally)
    assert tally.refusals > 40
    assert len(tally.seen) > 250


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.name.replace(" ", "_") for mutant in MUTANTS])
def test_without_this_safeguard_of_a_checkpoint_a_check_fails(mutant: Mutant) -> None:
    assert mutant.caught() is not None


@pytest.mark.parametrize("stop", [clean_stop, killed])
def test_no_flipped_bit_in_a_store_with_checkpoints_changes_anything_silently_s0_34(stop) -> None:
    image = stop()
    tally = flip_every_byte(image, bits=(0, 6))
    print(tally)
    counted = sum(len(data) for name, data in image.items() if name != "HEAD" and not name.endswith(".tmp"))
    leftover = 70 if stop is killed else 0  # behind what state.json counts
    assert tally.refused == 2 * (counted - leftover)
    assert tally.harmless == tally.damages - tally.refused


@pytest.mark.parametrize("stop", [clean_stop, killed])
def test_no_cut_of_any_file_of_a_store_with_checkpoints_goes_unseen_s2_25(stop) -> None:
    image = stop()
    tally = cut_every_byte(image)
    print(tally)
    # In a HEAD that is cut one slot is left, a draft is never read, a history may lose what does not count.
    spare = 128 + (len(image["runs/a/state.json.tmp"]) + 70 if stop is killed else 0)
    assert tally.harmless <= spare


def test_no_lost_file_of_a_store_with_checkpoints_goes_unseen_but_the_watermark() -> None:
    assert lose_each_file(Indexed).harmless == 1
