"""A repair on a simulated disk: what is kept, what is closed or buried, and that a crash at any call changes nothing of it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import UTC, datetime
from typing import NamedTuple

import pytest
from rpcagent.journal import manifest, reading, record, runfiles, seal, tombstones
from rpcagent.journal.checkpoint import read_manifest
from rpcagent.runs import events as ev
from rpcagent.runs.fold import apply
from rpcagent.upkeep import damage, mending
from rpcagent.upkeep.repair import Plan
from tests.journal.simdisk import Crash, SimDisk

from .stores import Owner, commits, folded, runs

NOW = datetime(2031, 4, 2, tzinfo=UTC)
Image = dict[str, bytes]


@functools.cache
def chosen() -> tuple[str, ...]:
    """Live runs, and runs that end in each way."""
    return (*runs("active")[-4:], *runs("completed")[-3:], *runs("failed")[:1], *runs("cancelled")[:1])


@functools.cache
def whole() -> Image:
    """Three segments behind a manifest; files of seven runs; one deleted; one that is in the log only."""
    disk = SimDisk()
    owner = Owner(disk, segment=8_000)
    late = chosen()[1]
    first, rest = [], []
    for run in [run for run in chosen() if run != late]:
        mine = commits(run)
        filed = len(mine) if run in (*chosen()[4:6], chosen()[7]) else (len(mine) + 1) // 2
        first += mine[:filed]
        rest += mine[filed:]
    gone = chosen()[4]
    owner.record(first).checkpoint().checkpoint([gone])
    rest = [*commits(late), *rest]
    rest.sort(key=lambda item: item.first)  # so that the records of the runs stand between each other
    owner.record(rest, batch=1)
    owner.close()
    return disk.image()


def originals() -> dict[str, list[bytes]]:
    return {run: [item.body for item in commits(run)] for run in chosen() if run != chosen()[4]}


class Held(NamedTuple):
    bodies: dict[str, list[bytes]]
    buried: set[bytes]


def held(disk: SimDisk) -> Held:
    """All that a daemon would find, by the strict rules: damage of anything raises. Of a copy: an opening writes."""
    disk = SimDisk(disk.image())
    manifest = read_manifest(disk)
    entries = list(Owner(disk).wal_entries)
    live = manifest.live if manifest else {}
    bodies: dict[str, list[bytes]] = {}
    names = [
        name for name in (disk.names("runs") if disk.exists("runs") else ()) if disk.exists(runfiles.state_of(name))
    ]
    ends = {}
    for run in {*names, *live}:
        found = runfiles.read_bodies(disk, run, run in live)
        assert found is not None
        bodies[run], ends[run] = [line.body for line in found[1]], found[0].last_seq
    for entry in entries:
        if entry.first > ends.get(entry.run, 0):
            assert entry.first == ends.get(entry.run, 0) + 1, f"a hole in {entry.run}"
            ends[entry.run] = entry.first + entry.count - 1
            bodies.setdefault(entry.run, []).append(entry.body)
    graves = set()
    for file in manifest.tombstones if manifest else ():
        data = tombstones.read(disk, tombstones.Named(file.name, file.count, file.sum))
        graves |= {data[at : at + 16] for at in range(0, len(data), 16)}
    gone = {run for run in bodies if tombstones.tombstone_id(run) in graves}
    return Held({run: found for run, found in bodies.items() if run not in gone}, graves)


def surveyed(disk: SimDisk) -> tuple[damage.Found, Plan]:
    found = damage.survey(disk, {})
    damage.decide(disk, found, seal.Plain(), NOW)
    return found, Plan(found, index_is_bad=False)


def mended(disk: SimDisk, stamp: str = "now") -> Plan:
    found, plan = surveyed(disk)
    if not plan.empty:
        mending.mend(disk, found, stamp=stamp, now=NOW, report=b"{}\n", index=lambda _through: None)
    return plan


def judge(got: Held, *, lost: bool, free: bool = False) -> dict[str, int]:
    """What is there of each run is a beginning of what was, and a run that is not whole never goes on. Returns how many
    commits each run lost. `free`: it was told that a run may be gone without a trace."""
    missing = {}
    for run, bodies in originals().items():
        if tombstones.tombstone_id(run) in got.buried:
            assert run not in got.bodies
            missing[run] = len(bodies)
            continue
        mine = got.bodies.get(run, [])
        kept = next(
            (n for n, (a, b) in enumerate(zip(mine, bodies, strict=False)) if a != b), min(len(mine), len(bodies))
        )
        extra = mine[kept:]
        state = folded(mine, run)  # a legal history, to the end
        if kept < len(bodies) or extra:
            missing[run] = len(bodies) - kept
            if state is None:
                assert free, f"the key of {run} is free"
                continue
            assert state.ended, f"{run} lost events and goes on"
            assert len(extra) <= 1
        if extra:
            [event] = ev.decode(extra[0]).events
            assert isinstance(event, ev.RunFailed | ev.RunCancelled)
            assert folded(bodies[:kept], run).ended is False
    assert got.bodies.keys() <= originals().keys()
    assert tombstones.tombstone_id(chosen()[4]) in got.buried or lost
    return missing


# Damages: each changes an image, and says what must have become of it


def _segment(image: Image, place: int) -> str:
    return sorted(name for name in image if name.startswith("wal/") and name.endswith(".jsonl"))[place]


def _line(content: bytes, number: int) -> tuple[int, int]:
    lines = content.splitlines(keepends=True)
    start = sum(map(len, lines[:number]))
    return start, start + len(lines[number])


def _put(content: bytes, place: int, data: bytes) -> bytes:
    return content[:place] + data + content[place + len(data) :]


def body_of_a_record(image: Image) -> None:
    name = _segment(image, 0)
    _, end = _line(image[name], 3)
    image[name] = _put(image[name], end - 10, b"?")


def head_of_a_record(image: Image) -> None:
    name = _segment(image, 0)
    start, _ = _line(image[name], 3)
    image[name] = _put(image[name], start + 30, b"~" * 30)


def three_records_as_zeros(image: Image) -> None:
    name = _segment(image, 0)
    start, end = _line(image[name], 2)[0], _line(image[name], 4)[1]
    image[name] = _put(image[name], start, bytes(end - start))


def newline_between_records(image: Image) -> None:
    name = _segment(image, 0)
    image[name] = _put(image[name], _line(image[name], 2)[1] - 1, b" ")


def header_of_a_segment(image: Image) -> None:
    image[_segment(image, 1)] = _put(image[_segment(image, 1)], 20, b"!")


def whole_segment_gone(image: Image) -> None:
    del image[_segment(image, 1)]


def last_segment_cut(image: Image) -> None:
    name = _segment(image, -1)
    image[name] = image[name][: _line(image[name], 1)[1]]


def no_segment(image: Image) -> None:
    for name in [name for name in image if name.endswith(".jsonl") and name.startswith("wal/")]:
        del image[name]


def manifest_gone(image: Image) -> None:
    del image["checkpoint.json"]


def manifest_head(image: Image) -> None:
    image["checkpoint.json"] = _put(image["checkpoint.json"], 40, b"~")


def manifest_line(image: Image) -> None:
    start, _ = _line(image["checkpoint.json"], 2)
    image["checkpoint.json"] = _put(image["checkpoint.json"], start + 60, b"~")


def _filed(image: Image, run: str) -> str:
    assert f"runs/{run}/state.json" in image
    return f"runs/{run}"


def state_of_a_live_run(image: Image) -> None:
    name = _filed(image, chosen()[0]) + "/state.json"
    image[name] = _put(image[name], 50, b"~")


def state_of_an_ended_run(image: Image) -> None:
    name = _filed(image, chosen()[7]) + "/state.json"
    image[name] = _put(image[name], 50, b"~")


def state_gone(image: Image) -> None:
    del image[_filed(image, chosen()[2]) + "/state.json"]


def history_line(image: Image) -> None:
    name = _filed(image, chosen()[2]) + "/history.jsonl"
    image[name] = _put(image[name], _line(image[name], 1)[0] + 70, b"~")


def history_cut(image: Image) -> None:
    name = _filed(image, chosen()[5]) + "/history.jsonl"
    image[name] = image[name][: len(image[name]) // 2]


def history_gone(image: Image) -> None:
    del image[_filed(image, chosen()[3]) + "/history.jsonl"]


def run_gone(image: Image) -> None:
    for name in [name for name in image if name.startswith(_filed(image, chosen()[0]))]:
        del image[name]


def tombstone(image: Image) -> None:
    name = next(name for name in image if name.startswith("tombstones/") and name.endswith(".bin"))
    image[name] += b"\0" * 16


def tombstones_gone(image: Image) -> None:
    del image[next(name for name in image if name.startswith("tombstones/") and name.endswith(".bin"))]


def head_gone(image: Image) -> None:
    del image["HEAD"]


def head_is_garbage(image: Image) -> None:
    image["HEAD"] = b"\0" * 128


def head_names_another_line(image: Image) -> None:
    found = record.read_head(image["HEAD"])[0]
    assert found is not None
    image["HEAD"] = record.head_slot(record.Head(found.epoch, found.seq, found.checksum ^ 1)) * 2


def manifest_and_a_state(image: Image) -> None:
    manifest_gone(image)
    state_of_a_live_run(image)


def everything_at_once(image: Image) -> None:
    for each in (three_records_as_zeros, manifest_head, history_line, state_of_an_ended_run, tombstone, head_gone):
        each(image)


HARMLESS: tuple[Callable[[Image], None], ...] = (
    header_of_a_segment, manifest_gone, manifest_head, manifest_line, state_of_a_live_run,
    head_gone, head_is_garbage,
)  # fmt: skip
LOSSES: tuple[Callable[[Image], None], ...] = (
    body_of_a_record, head_of_a_record, three_records_as_zeros, newline_between_records, whole_segment_gone, last_segment_cut,
    no_segment, state_of_an_ended_run, state_gone, history_line, history_cut, history_gone, run_gone, tombstone, tombstones_gone,
    head_names_another_line, manifest_and_a_state, everything_at_once,
)  # fmt: skip


def damaged(harm: Callable[[Image], None]) -> Image:
    image = dict(whole())
    harm(image)
    assert image != whole()
    return image


def test_a_whole_store_has_nothing_to_repair_and_holds_what_was_recorded():
    disk = SimDisk(whole())
    assert mended(disk).empty
    assert disk.calls == 0
    assert judge(held(disk), lost=False) == {}


@pytest.mark.parametrize("harm", [*HARMLESS, *LOSSES], ids=lambda harm: harm.__name__)
def test_a_repaired_store_opens_and_no_run_is_in_a_state_that_it_was_not_in(harm):
    disk = SimDisk(damaged(harm))
    plan = mended(disk)
    assert not plan.empty
    free = any("its key is free again" in loss for loss in plan.losses)
    missing = judge(held(disk), lost=harm in LOSSES, free=free)
    assert plan.loses or missing == {}, "something was given up without being told"
    told = {run.name for some in plan.runs.values() for run in some if run.loses}
    assert set(missing) <= told or free
    assert mended(disk, "again").empty, "the repair is not complete"
    owner = Owner(disk)
    owner.record(commits(runs("completed")[5])).checkpoint().close()
    assert len(held(disk).bodies[runs("completed")[5]]) == len(commits(runs("completed")[5]))


@pytest.mark.parametrize("harm", HARMLESS, ids=lambda harm: harm.__name__)
def test_what_can_be_made_anew_loses_nothing(harm):
    disk = SimDisk(damaged(harm))
    plan = mended(disk)
    assert not plan.loses, plan.lines()
    assert judge(held(disk), lost=False) == {}


def fates(harm) -> dict[str, str]:
    plan = mended(SimDisk(damaged(harm)))
    return {run.name: fate for fate, some in plan.runs.items() for run in some}


def test_a_record_whose_body_is_damaged_costs_its_own_run_only():
    [(run, fate)] = fates(body_of_a_record).items()
    assert fate == "closed"
    assert run in chosen()


def test_a_record_of_nobody_knows_whom_closes_each_run_that_may_have_lost_it():
    found = fates(three_records_as_zeros)
    assert len(found) > 1
    assert set(found.values()) == {"closed"}


def test_a_run_that_goes_on_behind_an_unknown_record_has_lost_nothing_and_is_left_alone():
    disk = SimDisk(damaged(head_of_a_record))
    whose = [entry.run for entry in reading.read_all(SimDisk(whole()))[1]][2]
    found, plan = surveyed(disk)
    hole = found.unowned[0]
    touched = {run.name for some in plan.runs.values() for run in some}
    for run in found.runs.values():
        if run.spans.ends > hole.last and run.gap is None and run.name != whose:
            assert run.name not in touched


def test_a_run_whose_beginning_is_lost_is_buried_and_its_files_are_kept_apart():
    image = damaged(history_gone)
    disk = SimDisk(image)
    run = chosen()[3]
    assert fates(history_gone)[run] == "buried"
    mended(disk)
    assert disk.read(f"damaged/now/runs/{run}/state.json") == image[f"runs/{run}/state.json"]
    assert not disk.exists(f"runs/{run}")
    assert tombstones.tombstone_id(run) in held(disk).buried


def test_all_that_is_touched_is_copied_first():
    image = damaged(everything_at_once)
    disk = SimDisk(image)
    mended(disk)
    after = disk.image()
    check_copies(after, image)


def check_copies(after: Image, image: Image) -> None:
    for name, content in image.items():
        if not name.endswith("/") and after.get(name) != content:
            assert after[f"damaged/now/{name}"] == content, name


CRASHED = (three_records_as_zeros, manifest_gone, history_line, history_gone, everything_at_once)


@pytest.mark.parametrize("harm", CRASHED, ids=lambda harm: harm.__name__)
def test_a_repair_that_is_killed_at_any_call_can_be_run_again_and_comes_to_the_same(harm):
    whole_one = SimDisk(damaged(harm))
    mended(whole_one)
    expected = judge(held(whole_one), lost=True)
    for point in range(whole_one.calls):
        disk = SimDisk(damaged(harm), crash_at=point)
        with pytest.raises(Crash):
            mended(disk)
        disk.killed()
        mended(disk, "again")
        assert judge(held(disk), lost=True) == expected, point
        assert mended(disk, "once-more").empty, point


@pytest.mark.parametrize("harm", CRASHED, ids=lambda harm: harm.__name__)
def test_a_power_cut_at_any_call_of_a_repair_leaves_what_can_be_repaired(harm):
    whole_one = SimDisk(damaged(harm))
    mended(whole_one)
    expected = judge(held(whole_one), lost=True)
    cuts = 0
    for point in range(whole_one.calls + 1):
        disk = SimDisk(damaged(harm), crash_at=point)
        if point < whole_one.calls:
            with pytest.raises(Crash):
                mended(disk)
        else:
            mended(disk)
        for image in disk.after_cut(seed=point, cap=2, shapes=3):
            cuts += 1
            if image.get("checkpoint.json") != damaged(harm).get("checkpoint.json"):
                check_copies(image, damaged(harm))
            after = SimDisk(image)
            mended(after, "again")
            assert judge(held(after), lost=True) == expected, point
            assert mended(after, "once-more").empty, point
    assert cuts > whole_one.calls


def test_a_full_disk_leaves_the_store_as_it_was_until_there_is_room():
    count = SimDisk(damaged(three_records_as_zeros))
    mended(count)
    for point in range(0, count.calls, 3):
        disk = SimDisk(damaged(three_records_as_zeros), fail_write=frozenset({point}))
        try:
            mended(disk)
        except damage.errors.StorageError as error:
            assert error.details["errno"] == "ENOSPC"
        mended(disk.killed(), "again")
        judge(held(disk), lost=True)
        assert mended(disk, "once-more").empty


def test_a_closed_run_says_why_and_where():
    disk = SimDisk(damaged(body_of_a_record))
    mended(disk)
    [run] = fates(body_of_a_record)
    bodies = held(disk).bodies[run]
    state = None
    for body in bodies:
        state = apply(state, ev.decode(body), run)
    assert (state.phase, state.error.kind) == ("failed", "store_damaged")
    assert state.error.message == (
        f"this store was damaged and repaired: what the run did after event {state.last_seq - 1} may be lost, so it does not "
        "go on"
    )


def test_the_epoch_and_the_places_never_go_back():
    for harm in (manifest_gone, everything_at_once):
        before = read_manifest(SimDisk(whole()))
        disk = SimDisk(damaged(harm))
        mended(disk)
        after = read_manifest(disk)
        assert after.epoch >= before.epoch
        assert after.places >= max(before.places - 1, 1)
        assert Owner(disk).wal.epoch > before.epoch


def test_a_live_run_that_no_list_names_is_named_again_and_loses_nothing():
    disk = SimDisk()
    alone, other = chosen()[:2]
    Owner(disk).record([*commits(alone), *commits(other)]).checkpoint().close()
    told = read_manifest(disk)
    members = {name: getattr(told, name) for name in told.__struct_fields__}
    lines = [(run, raw) for run, raw in told.live.items() if run != alone]
    disk = SimDisk(disk.image() | {"checkpoint.json": manifest.encode(manifest.Manifest(**members), lines)})
    plan = mended(disk)
    assert (plan.loses, plan.runs) == (False, {})
    assert set(read_manifest(disk).live) == {alone, other}
    assert {run: bodies == originals()[run] for run, bodies in held(disk).bodies.items()} == {alone: True, other: True}
    assert mended(disk, "again").empty
