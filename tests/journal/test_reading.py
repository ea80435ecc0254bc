"""A reader beside an owner who writes, begins segments, makes checkpoints and dies: what it sees was true at one moment."""

from __future__ import annotations

from pathlib import Path

import pytest
from rpcagent import errors
from rpcagent.journal import reading, record, runfiles
from rpcagent.journal.disk import RealDisk
from rpcagent.journal.manifest import Base
from rpcagent.journal.wal import Wal

from .checkpoint_story import Store, Witness
from .simdisk import SimDisk

RUNS = ("a", "b", "c")


class Owner:
    """The process that owns the store."""

    def __init__(self) -> None:
        self.disk, self.witness = SimDisk(), Witness()
        self.store = Store(self.disk)
        self.turn = 0
        self.record(5)
        self.record(9)

    def record(self, size: int) -> None:
        self.store.append([self.witness.next(run, size) for run in RUNS])

    def act(self) -> None:
        """In turn: a checkpoint, after which segments go; so many records that a segment is begun; a new owner after a kill."""
        self.turn += 1
        if self.turn % 3 == 1:
            self.store.checkpoint()
        elif self.turn % 3 == 2:
            for _ in range(4):
                self.record(60)
        else:
            self.store = Store(self.disk)

    def story(self) -> dict[str, list[tuple[int, bytes]]]:
        issued = self.witness.issued
        return {run: [(item.first, item.body) for item in issued if item.run == run] for run in RUNS}


class Beside:
    """The disk as a reader sees it. Before its read number `at`, from 0, and every `step`-th after that, the owner acts."""

    def __init__(self, owner: Owner, at: int, step: int = 10**9) -> None:
        self.owner, self.at, self.step, self.reads = owner, at, step, 0

    def __getattr__(self, name):
        call = getattr(self.owner.disk, name)
        if name not in {"names", "exists", "read", "read_at", "size"}:
            raise AssertionError(f"a reader calls {name}")

        def reading_call(*args):
            if self.reads >= self.at and (self.reads - self.at) % self.step == 0:
                self.owner.act()
            self.reads += 1
            return call(*args)

        return reading_call


def story(disk, snapshot, entries):
    """Of each run all that the reader finds, by the rule of a start: what the files hold is skipped."""
    found = {}
    live = set(snapshot.manifest.live) if snapshot.manifest else set()
    for run in RUNS:
        held = reading.read_run(disk, run, named=run in live)
        lines = list(held[1]) if held else []
        end = lines[-1].first + lines[-1].count - 1 if lines else 0
        for entry in entries:
            if entry.run == run and entry.first + entry.count - 1 > end:
                assert entry.first == end + 1, "there is a hole"
                lines.append(runfiles.Line(entry.first, entry.count, entry.body))
                end = entry.first + entry.count - 1
        found[run] = [(line.first, line.body) for line in lines]
    return found


def test_a_view_is_one_of_a_single_moment_whatever_the_owner_does_at_whichever_read():
    quiet = Beside(Owner(), 10**9)
    story(quiet, *reading.read_all(quiet))
    assert quiet.reads > 10
    for at in range(quiet.reads):
        for turn in range(3):
            owner = Owner()
            owner.turn = turn
            before = owner.story()
            disk = Beside(owner, at)
            found = story(disk, *reading.read_all(disk))
            after = owner.story()
            for run in RUNS:
                assert before[run] <= found[run] == after[run][: len(found[run])], (at, turn, run)


def test_a_view_of_a_store_that_never_rests_is_whole_or_says_that_it_moved_on():
    whole = 0
    for step in range(4, 24):
        owner = Owner()
        disk = Beside(owner, 1, step)
        try:
            found = story(disk, *reading.read_all(disk))
        except reading.MovedOn as error:
            assert error.data == {"code": "STORAGE", "retryable": True, "errno": "ESTALE"}
            continue
        whole += 1
        for run in RUNS:
            assert found[run] == owner.story()[run][: len(found[run])]
    assert whole > 5


def test_what_stands_above_the_watermark_is_counted_and_not_shown():
    owner = Owner()
    owner.record(7)
    head = owner.disk.read("HEAD")
    confirmed = owner.story()
    owner.record(7)
    owner.disk.write("HEAD", 0, head)  # as if the last batch had been written, and not yet confirmed
    name = "wal/0000000000000008.jsonl"
    owner.disk.write(name, owner.disk.size(name), b'{"c":"0000')
    snapshot, entries = reading.read_all(owner.disk)
    assert story(owner.disk, snapshot, entries) == confirmed
    assert (snapshot.unconfirmed, snapshot.torn_bytes, snapshot.records, snapshot.end.seq) == (3, 10, 10, 10)
    assert owner.disk.read(name)[: snapshot.counted].count(b"\n") == 4  # the header, and three records
    assert [line.seq for line in reading.Follower(owner.disk).poll()] == list(range(1, 11))


def test_damage_is_told_with_its_place_and_never_as_a_store_that_moved_on():
    owner = Owner()
    name = "wal/0000000000000001.jsonl"
    content = owner.disk.read(name)
    owner.disk.write(name, content.index(b'"q":3') + 4, b"9")
    with pytest.raises(errors.StoreDamaged) as caught:
        reading.read_store(owner.disk)
    assert caught.value.details == {
        "file": name,
        "offset": content.index(b'{"c"', content.index(b'"q":2')),
        "reason": "a bad line in what was acknowledged (record 3)",
    }


def test_damage_is_told_beside_an_owner_that_goes_on_writing():
    owner = Owner()
    owner.turn = 1
    owner.disk.write("wal/0000000000000001.jsonl", 300, b"?")
    with pytest.raises(errors.StoreDamaged):
        reading.read_store(Beside(owner, 3, 3))


def test_a_folder_without_a_log_is_an_empty_view():
    snapshot, entries = reading.read_all(SimDisk())
    assert (snapshot.store_id, snapshot.manifest, snapshot.end.seq, entries) == ("", None, 0, [])


def test_what_cannot_be_read_is_neither_missing_nor_damaged():
    owner = Owner()
    owner.store.checkpoint()
    for name in ("HEAD", "checkpoint.json", "wal", "wal/0000000000000008.jsonl"):
        owner.disk.read_error = {name: 13}
        with pytest.raises(errors.StorageError) as caught:
            reading.read_store(owner.disk)
        assert caught.value.details["errno"] == "EACCES", name


def numbers(follower):
    return [each if isinstance(each, range) else each.seq for each in follower.poll()]


def test_a_follower_gets_each_record_once_over_rotation_restart_and_checkpoint():
    owner = Owner()
    follower = reading.Follower(owner.disk)
    got, segments = numbers(follower), set()
    for _ in range(7):
        owner.record(200)
        got += numbers(follower)
        owner.act()
        got += numbers(follower)
        segments.update(name for name, _ in reading.segments_of(owner.disk))
    assert len(segments) > 5
    last = record.read_head(owner.disk.read("HEAD"))[0]
    assert last is not None
    assert got == list(range(1, last.seq + 1))
    assert numbers(follower) == []


def test_a_follower_that_was_too_late_says_which_records_a_checkpoint_took():
    owner = Owner()
    follower = reading.Follower(owner.disk)
    numbers(follower)
    owner.record(5)
    owner.store.checkpoint()
    owner.record(5)
    assert numbers(follower) == [range(8, 11), 11, 12, 13]


def test_a_follower_gets_each_record_once_whatever_the_owner_does_at_whichever_read():
    for at in range(24):
        for turn in range(3):
            owner = Owner()
            owner.turn = turn
            follower = reading.Follower(Beside(owner, at, 5))
            got = []
            for each in [*follower.poll(), *follower.poll()]:
                got += each if isinstance(each, range) else [each.seq]
            assert got == list(range(1, follower.seq + 1)), (at, turn)
            assert follower.seq >= 7


def test_a_follower_reads_a_line_that_is_longer_than_a_piece(tmp_path: Path):
    disk = RealDisk(tmp_path)
    wal = Wal.open(disk, draw_store_id=lambda: "sto_1", app="1", at="now")
    long = b'"%b"' % (b"x" * (3 << 20))
    wal.append([record.Item("a", 1, 1, long), record.Item("a", 2, 1, b"2")])
    lines = list(reading.Follower(disk).poll())
    assert [(line.seq, line.kind, len(line.body)) for line in lines] == [
        (1, "open", 22), (2, "commit", len(long)), (3, "commit", 1),
    ]  # fmt: skip
    assert reading.read_store(disk).base.seq == Base(0, 0, 0).seq


def test_a_follower_stops_at_damage_in_what_was_acknowledged():
    owner = Owner()
    content = owner.disk.read("wal/0000000000000001.jsonl")
    owner.disk.write("wal/0000000000000001.jsonl", content.index(b'"q":3') + 4, b"9")
    follower = reading.Follower(owner.disk)
    with pytest.raises(errors.StoreDamaged) as caught:
        list(follower.poll())
    assert caught.value.details["reason"] == "record 3 is acknowledged and not there"


def test_a_follower_passes_over_what_the_next_segment_supersedes():
    owner = Owner()
    owner.record(200)
    owner.record(200)
    (old, _), (_, first), *_ = reading.segments_of(owner.disk)
    stray, _ = record.commit_line(first, first, 0, record.Item("stray", 1, 1, b"1"))
    owner.disk.write(old, owner.disk.size(old), stray)
    assert "stray" not in {line.run for line in reading.Follower(owner.disk).poll() if not isinstance(line, range)}
