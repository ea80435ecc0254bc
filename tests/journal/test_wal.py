"""What the log does when it is opened, and when something fails. P2, P9, S0-34, S0-36, S1-26, S1-43, S2-25."""

from __future__ import annotations

import errno

import pytest
from rpcagent import errors
from rpcagent.journal import record
from rpcagent.journal.record import Item
from rpcagent.journal.wal import Wal, stranger_in

from .damage import clean_stop, cut_every_byte, flip_every_byte, lose_each_file
from .faulty import FaultyDisk
from .simdisk import SimDisk
from .story import open_log, replay

FIRST = "wal/0000000000000001.jsonl"


def item(number: int, size: int = 3) -> Item:
    return Item("run_1", number, 1, b'"%b"' % (b"x" * size))


def grown(count: int = 3) -> FaultyDisk:
    disk = FaultyDisk()
    wal = open_log(disk)
    for number in range(1, count + 1):
        wal.append([item(number)])
    wal.close()
    return disk


# Opening


def test_a_store_is_made_once_and_each_opening_counts() -> None:
    disk = SimDisk()
    wal = open_log(disk)
    assert (wal.store_id, wal.epoch, wal.last_seq, replay(wal)) == ("store-1", 1, 0, [])

    def never() -> str:
        raise AssertionError("the id of a store is drawn once")

    for epoch in (2, 3):
        wal = Wal.open(disk, draw_store_id=never, app="0.1.0", at="now")
        assert (wal.store_id, wal.epoch) == ("store-1", epoch)


def test_opening_and_closing_a_clean_store_changes_no_segment() -> None:
    disk = grown()
    before = disk.image()
    open_log(disk).close()
    after = disk.image()
    assert before.pop("HEAD") != after.pop("HEAD")
    assert before == after


def test_a_clean_store_opens_on_a_full_disk_and_takes_records_when_there_is_space_s1_26() -> None:
    disk = grown()
    disk.plan = {("write", "wal/"): errno.ENOSPC, ("create", ""): errno.ENOSPC}
    wal = open_log(disk)
    assert len(replay(wal)) == 3
    with pytest.raises(errors.StorageError):
        wal.append([item(4)])
    assert (wal.state, wal.errno) == ("full", "ENOSPC")
    disk.plan.clear()
    wal.append([item(4)])
    assert (wal.state, wal.errno) == ("ok", None)
    assert len(replay(open_log(disk))) == 4


@pytest.mark.parametrize("name", ["", "wal", "HEAD", FIRST])
@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO, errno.EMFILE])
def test_what_cannot_be_read_is_never_taken_for_empty_f027(name: str, code: int) -> None:
    disk = grown()
    before = disk.image()
    disk.read_error = {name: code}
    with pytest.raises(errors.StorageError) as caught:
        open_log(disk)
    assert caught.value.data == {"code": "STORAGE", "retryable": True, "errno": errno.errorcode[code]}
    disk.read_error = {}
    assert disk.image() == before
    assert len(replay(open_log(disk))) == 3


def test_a_segment_that_cannot_be_read_in_the_replay_is_an_error_not_an_end() -> None:
    image, _ = clean_stop()
    disk = SimDisk(image)
    wal = open_log(disk)
    disk.read_error = {FIRST: errno.EIO}
    with pytest.raises(errors.StorageError):
        list(wal.entries())


@pytest.mark.parametrize(
    "image",
    [
        {"notes.txt": b"mine"},
        {"LOCK": b"", "wal/notes.txt": b"mine"},
        {"HEAD": b"", "wal/": b""},
        {"runs/run_1/state.json": b""},
        {"tombstones/0000000000000001.bin": b"0123456789abcdef", "wal/": b""},
        {"checkpoint.json": b"", "wal/": b""},
        {"wal/0000000000000002.jsonl": b""},
    ],
)
def test_a_folder_with_other_things_in_it_is_refused_and_left_alone(image: dict[str, bytes]) -> None:
    disk = SimDisk(image)
    with pytest.raises(errors.StoreDamaged) as caught:
        open_log(disk)
    assert caught.value.details["file"] in {*image, "HEAD", "runs", "tombstones"}
    assert disk.calls == 0


def test_a_store_is_made_beside_what_tells_nothing_of_a_log() -> None:
    beside = (
        "LOCK",
        "RESERVE",
        "trusted",
        "checkpoint.json.tmp",
        "index.sqlite",
        "index.sqlite-wal",
        "index.sqlite-shm",
    )
    image = dict.fromkeys((*beside, "blobs/x", "jobs/x", "runs/", "tombstones/", "lost+found/"), b"x")
    assert stranger_in(SimDisk(image).names("")) is None
    wal = open_log(SimDisk(image))
    assert (wal.epoch, wal.last_seq) == (1, 0)
    assert stranger_in(["index.sqlited"]) == "index.sqlited"
    assert stranger_in(["notes", "checkpoint.json"]) is None


def test_files_beside_the_segments_that_are_not_ours_are_neither_read_nor_removed() -> None:
    disk = SimDisk(grown().image() | {"wal/0000000000000001.jsonl.bak": b"mine", "wal/x.tmp": b"mine"})
    assert len(replay(open_log(disk))) == 3
    assert {"wal/0000000000000001.jsonl.bak", "wal/x.tmp"} <= set(disk.image())


def test_a_damaged_store_is_refused_with_file_and_offset_and_not_touched_s0_34() -> None:
    image, _ = clean_stop()
    content = bytearray(image[FIRST])
    content[300] ^= 1
    disk = SimDisk(image | {FIRST: bytes(content)})
    with pytest.raises(errors.StoreDamaged) as caught:
        open_log(disk)
    assert caught.value.details["file"] == FIRST
    assert content.rindex(b"\n", 0, 300) + 1 == caught.value.details["offset"]
    assert disk.calls == 0


def test_no_flipped_bit_changes_anything_silently_s0_34() -> None:
    tally = flip_every_byte()
    print(tally)
    assert tally.damages > 15_000
    assert tally.harmless <= 128 * 3  # only those in HEAD


def test_no_cut_of_any_file_after_a_clean_stop_goes_unseen_s2_25() -> None:
    tally = cut_every_byte()
    print(tally)
    assert tally.damages > 5_000
    assert tally.harmless <= 128


def test_without_a_watermark_the_log_cut_at_any_byte_opens_to_a_prefix_and_takes_records_s2_25() -> None:
    """As after a power cut that took HEAD's last writes: nothing proves that the tail was acknowledged."""
    image, witness = clean_stop()
    del image["HEAD"]
    last = max(image)
    content = image[last]
    begin = content.index(b"\n") + 1
    seen = set()
    for cut in range(begin, len(content) + 1):
        disk = SimDisk(image | {last: content[:cut]})
        wal = open_log(disk)
        got = replay(wal)
        assert got == witness.issued[: len(got)]
        assert wal.dropped_tail_bytes == cut - content.rindex(b"\n", 0, cut) - 1
        wal.append([Item("new", 1, 1, b"1")])
        assert replay(open_log(disk))[:-1] == got
        seen.add(len(got))
    assert len(seen) == content.count(b"\n") - content.count(b'"k":"open"')


def test_no_lost_file_goes_unseen_but_the_watermark_which_is_made_anew() -> None:
    assert lose_each_file().harmless == 1


def test_a_segment_of_another_store_is_refused() -> None:
    image, _ = clean_stop()
    other = {name: content.replace(b"store-1", b"store-2") for name, content in image.items()}
    assert other.keys() == image.keys()
    disk = SimDisk()
    strange = Wal.open(disk, draw_store_id=lambda: "store-2", app="0.1.0", at="now")
    strange.append([item(1)])
    with pytest.raises(errors.StoreDamaged):
        open_log(SimDisk(image | {FIRST: disk.image()[FIRST]}))


def test_a_torn_tail_is_reported_once_kept_aside_and_never_fused_with_what_comes_f019() -> None:
    disk = grown()
    torn = b'{"c":"0000'
    disk = FaultyDisk(disk.image() | {FIRST: disk.image()[FIRST] + torn})
    wal = open_log(disk)
    assert (wal.dropped_tail_bytes, len(replay(wal))) == (len(torn), 3)
    wal.append([item(4)])
    assert disk.image()[FIRST].endswith(torn)
    again = open_log(disk)
    assert (again.dropped_tail_bytes, len(replay(again))) == (0, 4)


def test_records_above_the_watermark_are_copied_before_they_are_served() -> None:
    disk = grown()
    stale = disk.image()["HEAD"]
    wal = open_log(disk)
    wal.append([item(4)])
    disk = FaultyDisk(disk.image() | {"HEAD": stale})
    disk.log.clear()
    wal = open_log(disk)
    assert len(replay(wal)) == 4
    new = "wal/0000000000000005.jsonl"  # records 1 to 4: an opening and three commits
    steps = [f"create {new}.tmp", f"write {new}.tmp", f"sync {new}.tmp", f"rename {new}", "sync wal/"]
    assert disk.log[: len(steps)] == steps


def test_the_entries_can_be_read_once() -> None:
    wal = open_log(grown())
    list(wal.entries())
    with pytest.raises(RuntimeError):
        list(wal.entries())


def test_the_last_event_of_each_run_is_known_after_a_start() -> None:
    disk = SimDisk()
    wal = open_log(disk)
    wal.append([Item("a", 1, 2, b"1"), Item("b", 1, 1, b"1"), Item("a", 3, 1, b"1")])
    assert wal.run_ends == open_log(disk).run_ends == {"a": 3, "b": 1}


# Appending


def test_a_lone_append_is_one_write_one_sync_then_the_watermark() -> None:
    disk = FaultyDisk()
    wal = open_log(disk)
    wal.append([item(1)])
    syncs = wal.syncs
    disk.log.clear()
    wal.append([item(2)])
    assert wal.syncs == syncs + 1
    assert disk.log == [f"write {FIRST}", f"sync {FIRST}", "write HEAD"]


def test_the_watermark_names_exactly_what_is_durable_after_each_append() -> None:
    disk = SimDisk()
    wal = open_log(disk)
    for number in range(1, 30):
        wal.append([item(number, 60), Item("other", number, 1, b"1")])
        head, _ = record.read_head(disk.read("HEAD"))
        last = disk.names("wal")[-1]
        line = disk.read(f"wal/{last}").splitlines(keepends=True)[-1]
        assert head == record.Head(wal.epoch, wal.last_seq, int(line[6:14], 16))
        assert wal.last_seq == 2 * number + 1


def test_an_empty_batch_writes_nothing() -> None:
    disk = grown()
    wal = open_log(disk)
    disk.log.clear()
    wal.append([])
    assert disk.log == []


def test_segments_are_filled_in_turn_and_replayed_in_order() -> None:
    disk = SimDisk()
    wal = open_log(disk)
    for number in range(1, 40):
        wal.append([item(number, 50)])
    assert len(disk.names("wal")) > 5
    assert replay(open_log(disk)) == [item(number, 50) for number in range(1, 40)]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO])
def test_a_failed_write_is_undone_and_a_later_append_succeeds(code: int) -> None:
    disk = grown()
    wal = open_log(disk)
    disk.plan = {("write", "wal/"): code}
    disk.log.clear()
    with pytest.raises(errors.StorageError) as caught:
        wal.append([item(4)])
    assert not isinstance(caught.value, errors.StoragePoisoned)
    assert caught.value.data == {"code": "STORAGE", "retryable": True, "errno": errno.errorcode[code]}
    assert disk.log == [f"truncate {FIRST}", f"sync {FIRST}"]
    disk.plan.clear()
    wal.append([item(4)])
    assert len(replay(open_log(disk))) == 4


def test_a_segment_that_cannot_be_made_refuses_the_batch_and_leaves_the_log_as_it_was() -> None:
    disk = FaultyDisk()
    wal = open_log(disk)
    wal.append([item(1, 800)])
    for call in ("create", "write"):
        disk.plan = {(call, "wal/0000000000000003"): errno.ENOSPC}
        with pytest.raises(errors.StorageError):
            wal.append([item(2, 800)])
        assert wal.state == "full"
        assert disk.names("wal") == ["0000000000000001.jsonl"]
    disk.plan.clear()
    wal.append([item(2, 800)])
    assert len(replay(open_log(disk))) == 2


@pytest.mark.parametrize(
    "plan",
    [
        {("sync", "wal/"): errno.EIO},
        {("write", "wal/"): errno.ENOSPC, ("truncate", "wal/"): errno.EIO},
        {("write", "wal/"): errno.ENOSPC, ("sync", "wal/"): errno.EIO},
        {("read_at", "HEAD"): errno.EIO},
    ],
)
def test_a_failed_sync_and_a_failed_undo_end_the_log_for_good_f029(plan: dict[tuple[str, str], int]) -> None:
    disk = grown()
    wal = open_log(disk)
    disk.plan = plan
    with pytest.raises(errors.StoragePoisoned) as caught:
        wal.append([item(4)])
    assert caught.value.data["retryable"] is False
    tried = list(disk.failed)
    disk.plan = {}
    disk.log.clear()
    for _ in range(2):
        with pytest.raises(errors.StoragePoisoned):
            wal.append([item(4)])
    wal.close()
    assert disk.log == []
    assert len([call for call in tried if call.startswith("sync")]) <= 1


@pytest.mark.parametrize("call", ["rename", "syncdir", "sync"])
def test_a_new_segment_whose_name_is_in_doubt_ends_the_log(call: str) -> None:
    disk = FaultyDisk()
    wal = open_log(disk)
    wal.append([item(1, 800)])
    disk.plan = {(call, "wal"): errno.EIO}
    with pytest.raises(errors.StoragePoisoned):
        wal.append([item(2, 800)])
    assert wal.state == "poisoned"
    assert len(replay(open_log(FaultyDisk(disk.image())))) == 1


def test_a_watermark_that_cannot_be_written_fails_no_durable_commit() -> None:
    disk = grown()
    wal = open_log(disk)
    disk.plan = {("write", "HEAD"): errno.ENOSPC}
    wal.append([item(4)])
    wal.append([item(5)])
    disk.plan.clear()
    wal.append([item(6)])
    wal.append([item(7)])
    assert len(replay(open_log(disk))) == 7


def test_an_interrupt_in_the_middle_of_a_write_ends_the_log() -> None:
    class Interrupted(SimDisk):
        def write(self, name: str, offset: int, data: bytes) -> None:
            if b'"stop"' in data:
                raise KeyboardInterrupt
            super().write(name, offset, data)

    wal = open_log(Interrupted())
    with pytest.raises(KeyboardInterrupt):
        wal.append([Item("a", 1, 1, b'"stop"')])
    with pytest.raises(errors.StoragePoisoned):
        wal.append([item(1)])


# Ownership


def test_a_process_of_an_older_epoch_writes_nothing_more_f033() -> None:
    disk = SimDisk()
    old = open_log(disk)
    old.append([item(1)])
    new = open_log(disk)
    new.append([item(2)])
    before = disk.image()
    with pytest.raises(errors.StoragePoisoned) as caught:
        old.append([item(2)])
    assert caught.value.details["errno"] == "ESTALE"
    assert disk.image() == before
    new.append([item(3)])
    assert len(replay(open_log(disk))) == 3


def test_an_owner_whose_lock_file_was_replaced_writes_nothing_more() -> None:
    class Lock:
        mine = True

        def held(self) -> bool:
            return self.mine

    disk, lock = SimDisk(), Lock()
    wal = Wal.open(disk, draw_store_id=lambda: "s", app="0", at="now", lock=lock)
    wal.append([item(1)])
    lock.mine = False
    before = disk.image()
    with pytest.raises(errors.StoragePoisoned):
        wal.append([item(2)])
    assert disk.image() == before


def test_a_closed_log_takes_nothing() -> None:
    wal = open_log(SimDisk())
    wal.close()
    wal.close()
    with pytest.raises(errors.StoragePoisoned):
        wal.append([item(1)])
