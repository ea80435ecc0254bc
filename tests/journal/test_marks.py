"""A log that begins after a checkpoint, and the marks that checkpoints are made at. S0-34, S1-26, S2-25, F029."""

from __future__ import annotations

import errno
from typing import Any

import pytest
from rpcagent import errors
from rpcagent.journal import record, tail
from rpcagent.journal.manifest import Base
from rpcagent.journal.record import Item
from rpcagent.journal.wal import Mark, Wal

from .faulty import FaultyDisk
from .simdisk import SimDisk


def item(run: str, first: int, size: int = 3) -> Item:
    return Item(run, first, 1, b'"%b"' % (b"x" * size))


def begin(disk: SimDisk, base: Base | None = None, **more: Any) -> Wal:
    return Wal.open(disk, draw_store_id=lambda: "store-1", app="0", at="now", segment_bytes=900, base=base, **more)


def base_of(mark: Mark) -> Base:
    return Base(mark.seq, mark.checksum, mark.batch)


def marked() -> tuple[FaultyDisk, Mark]:
    """Three records, a mark, then two more batches. As after a checkpoint whose step 8 did not happen."""
    disk = FaultyDisk()
    wal = begin(disk)
    wal.append([item("a", 1), item("b", 1)])
    mark = wal.mark()
    wal.append([item("a", 2)])
    wal.append([item("c", 1)])
    wal.close()
    return disk, mark


def entries(wal: Wal) -> list[tuple[str, int]]:
    return [(entry.run, entry.first) for entry in wal.entries()]


def test_a_mark_begins_a_segment_and_tells_what_was_written_since_the_last_one() -> None:
    disk = SimDisk()
    wal = begin(disk)
    assert wal.mark() == Mark(0, 0, 0, {})
    assert disk.names("wal") == ["0000000000000001.jsonl"]
    wal.append([item("a", 1), item("b", 1)])
    wal.append([item("a", 2)])
    first = wal.mark()
    assert (first.seq, first.batch, first.ends) == (4, 4, {"a": 2, "b": 1})
    assert disk.names("wal") == ["0000000000000001.jsonl", "0000000000000005.jsonl"]
    assert b'"through":4' in disk.read("wal/0000000000000005.jsonl")
    assert wal.run_ends == {}
    calls = len(disk.log)
    assert wal.mark() == Mark(first.seq, first.checksum, first.batch, {})
    assert disk.log[calls:] == []
    wal.append([item("b", 2)])
    assert wal.mark().ends == {"b": 2}


def test_the_segment_of_a_mark_is_durable_under_its_name_before_the_mark_is_told() -> None:
    disk = SimDisk()
    wal = begin(disk)
    wal.append([item("a", 1)])
    disk.log.clear()
    wal.mark()
    name = "wal/0000000000000003.jsonl"
    assert disk.log == [f"create {name}.tmp", f"write {name}.tmp", f"sync {name}.tmp", f"rename {name}", "sync wal/"]


def test_what_a_replay_would_read_is_counted_from_the_last_mark_and_from_the_base() -> None:
    disk = SimDisk()
    wal = begin(disk)
    for number in range(1, 20):
        wal.append([item("a", number, 90)])
    assert wal.tail_records == 20  # and the opening
    assert wal.tail_bytes == sum(disk.size(f"wal/{name}") for name in disk.names("wal"))
    mark = wal.mark()
    wal.append([item("a", 20)])
    wal.append([item("a", 21)])
    last = f"wal/{disk.names('wal')[-1]}"
    assert (wal.tail_records, wal.tail_bytes) == (2, disk.size(last))
    again = begin(disk, base_of(mark))
    assert (again.tail_records, again.tail_bytes) == (2, disk.size(last))
    whole = begin(SimDisk(disk.image() | {f"wal/{mark.seq + 1:016d}.jsonl": disk.read(last)}), base_of(mark))
    assert whole.tail_records == 2


def test_a_log_begins_after_its_base_and_older_segments_go_when_the_recovery_is_durable() -> None:
    disk, mark = marked()
    disk.log.clear()
    wal = begin(disk, base_of(mark), store_id="store-1")
    assert entries(wal) == [("a", 2), ("c", 1)]
    assert wal.run_ends == {"a": 2, "c": 1}
    assert disk.names("wal") == ["0000000000000004.jsonl"]
    assert disk.log[-2:] == ["sync /", "unlink wal/0000000000000001.jsonl"]
    wal.append([item("a", 3)])
    assert entries(begin(disk, base_of(mark))) == [("a", 2), ("c", 1), ("a", 3)]


def test_leftovers_of_older_segments_are_neither_read_nor_missed() -> None:
    disk, mark = marked()
    image = disk.image()
    for left in (b"", b"rot", b"\0" * 100):
        wal = begin(SimDisk(image | {"wal/0000000000000001.jsonl": left}), base_of(mark))
        assert entries(wal) == [("a", 2), ("c", 1)]
    assert image.pop("wal/0000000000000001.jsonl")
    image["wal/0000000000000002.jsonl"] = b"of another time"
    assert entries(begin(SimDisk(image), base_of(mark))) == [("a", 2), ("c", 1)]


@pytest.mark.parametrize("there", [(), ("0000000000000001.jsonl",), ("0000000000000005.jsonl",)])
def test_a_log_without_the_segment_that_follows_the_checkpoint_is_damaged(there: tuple[str, ...]) -> None:
    disk, mark = marked()
    image = {name: data for name, data in disk.image().items() if not name.endswith(".jsonl")}
    image |= {f"wal/{name}": disk.read("wal/0000000000000004.jsonl") for name in there}
    empty = SimDisk(image)
    with pytest.raises(errors.StoreDamaged) as caught:
        begin(empty, base_of(mark))
    assert caught.value.details == {
        "file": "wal/0000000000000004.jsonl", "offset": 0,
        "reason": "the segment that follows the checkpoint is missing",
    }  # fmt: skip
    assert empty.calls == 0


@pytest.mark.parametrize("wrong", ["seq", "checksum", "store"])
def test_a_base_of_another_log_is_damage(wrong: str) -> None:
    disk, mark = marked()
    base = Base(mark.seq, mark.checksum ^ (wrong == "checksum"), mark.batch)
    if wrong == "seq":
        base = Base(mark.seq + 1, mark.checksum, mark.batch)
    calls = disk.calls
    with pytest.raises(errors.StoreDamaged):
        begin(disk, base, store_id="store-2" if wrong == "store" else "store-1")
    assert disk.calls == calls


def test_a_watermark_that_names_another_record_than_the_manifest_is_damage() -> None:
    disk = FaultyDisk()
    wal = begin(disk)
    wal.append([item("a", 1)])
    mark = wal.mark()
    image = disk.image() | {"HEAD": record.head_slot(record.Head(1, mark.seq, mark.checksum ^ 1)) + b" " * 64}
    with pytest.raises(errors.StoreDamaged, match="HEAD and the manifest"):
        begin(SimDisk(image), base_of(mark))


def test_a_watermark_before_the_base_is_only_late() -> None:
    disk, mark = marked()
    image = disk.image() | {"HEAD": record.head_slot(record.Head(1, 1, 7)) + b" " * 64}
    assert entries(begin(SimDisk(image), base_of(mark))) == [("a", 2), ("c", 1)]


def test_without_its_watermark_a_log_takes_the_epoch_of_the_manifest_for_the_least() -> None:
    disk, mark = marked()
    image = disk.image()
    del image["HEAD"]
    assert begin(SimDisk(image), base_of(mark), least_epoch=8).epoch == 9


def test_a_checkpointed_log_is_not_opened_without_its_base() -> None:
    disk, _ = marked()
    with pytest.raises(ValueError, match="has a checkpoint"):
        begin(SimDisk(disk.image() | {"checkpoint.json": b""}))


def test_a_log_that_is_full_gives_no_mark_and_one_when_there_is_space_s1_26() -> None:
    disk = FaultyDisk()
    wal = begin(disk)
    wal.append([item("a", 1)])
    for call in ("create", "write"):
        disk.plan = {(call, "wal/0000000000000003"): errno.ENOSPC}
        with pytest.raises(errors.StorageError) as caught:
            wal.mark()
        assert caught.value.data == {"code": "STORAGE", "retryable": True, "errno": "ENOSPC"}
        assert wal.run_ends == {"a": 1}
    disk.plan = {}
    wal.append([item("a", 2)])
    assert wal.mark().ends == {"a": 2}


@pytest.mark.parametrize("call", ["sync", "syncdir", "rename"])
def test_a_mark_whose_segment_is_in_doubt_ends_the_log_f029(call: str) -> None:
    disk = FaultyDisk()
    wal = begin(disk)
    wal.append([item("a", 1)])
    disk.plan = {(call, "wal"): errno.EIO}
    with pytest.raises(errors.StoragePoisoned):
        wal.mark()
    disk.plan = {}
    for again in (wal.mark, lambda: wal.append([item("a", 2)])):
        with pytest.raises(errors.StoragePoisoned):
            again()


def test_a_process_of_an_older_epoch_gets_no_mark_f033() -> None:
    disk = SimDisk()
    old = begin(disk)
    old.append([item("a", 1)])
    begin(disk)
    with pytest.raises(errors.StoragePoisoned) as caught:
        old.mark()
    assert caught.value.details["errno"] == "ESTALE"


def test_a_torn_tail_behind_a_base_is_left_behind_as_ever() -> None:
    disk, mark = marked()
    name = "wal/0000000000000004.jsonl"
    torn = SimDisk(disk.image() | {name: disk.read(name) + b'{"c":"0000'})
    wal = begin(torn, base_of(mark))
    assert (wal.dropped_tail_bytes, entries(wal)) == (10, [("a", 2), ("c", 1)])
    wal.append([item("a", 3)])
    assert entries(begin(torn, base_of(mark))) == [("a", 2), ("c", 1), ("a", 3)]


def test_what_recovery_moved_counts_as_acknowledged_even_without_a_watermark() -> None:
    """Behind a base, with HEAD lost after the recovery: `through` of the new segment is what tells."""
    disk, mark = marked()
    stale = record.head_slot(record.Head(1, 1, 7)) + b" " * 64
    moved = SimDisk(disk.image() | {"HEAD": stale})
    begin(moved, base_of(mark))
    last = f"wal/{moved.names('wal')[-1]}"
    image = moved.image() | {last: moved.read(last)[:-1]}
    del image["HEAD"]
    with pytest.raises(errors.StoreDamaged, match="acknowledged"):
        begin(SimDisk(image), base_of(mark))


def test_without_through_what_recovery_moved_is_lost_unseen() -> None:
    class NoThrough(Wal):
        def _make_segment(self, before: tail.Position, lines: bytes, through: int) -> None:
            super()._make_segment(before, lines, 0)

    disk, mark = marked()
    moved = SimDisk(disk.image() | {"HEAD": record.head_slot(record.Head(1, 1, 7)) + b" " * 64})
    NoThrough.open(moved, draw_store_id=str, app="0", at="now", base=base_of(mark))
    last = f"wal/{moved.names('wal')[-1]}"
    image = moved.image() | {last: moved.read(last)[:-1]}
    del image["HEAD"]
    assert entries(begin(SimDisk(image), base_of(mark))) == [("a", 2)]
