"""The steps of a checkpoint, and what stops it. S1-26, F027, F029, F033."""

from __future__ import annotations

import errno
import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rpcagent import errors
from rpcagent.journal import checkpoint, record, runfiles
from rpcagent.journal.checkpoint import Change, Checkpointer, read_manifest
from rpcagent.journal.manifest import Base, Header, TombstoneFile
from rpcagent.journal.record import Item
from rpcagent.journal.runfiles import Line, State
from rpcagent.journal.wal import Mark, Wal

from .checkpoint_story import Store, identity
from .faulty import FaultyDisk
from .simdisk import SimDisk


class Bench:
    """A log on a disk that fails on demand, and a checkpointer."""

    def __init__(self, lock: Any = None) -> None:
        self.disk = FaultyDisk()
        self.wal = Wal.open(self.disk, draw_store_id=lambda: "store-1", app="0", at="now")
        self.checkpointer = Checkpointer(self.disk, lock)

    def append(self, run: str, *firsts: int) -> None:
        self.wal.append([Item(run, first, 1, b'"%d"' % first) for first in firsts])

    def header(self, *files: TombstoneFile) -> Header:
        return Header(
            store_id="store-1", app="0", epoch=self.wal.epoch, at="now", places=9, ended={"failed": 1}, tombstones=files
        )

    def write(self, changes: Any = (), mark: Mark | None = None, **more: Any) -> int:
        header = more.pop("header", self.header())
        wanted = {"live": (), "deleted": (), "tombstone_file": None, "index": lambda: None} | more
        return self.checkpointer.write(mark or self.wal.mark(), header, changes, **wanted)


def lines(*firsts: int) -> list[Line]:
    return [Line(first, 1, b'"%d"' % first) for first in firsts]


def change(run: str, *firsts: int, summary: bytes = b"{}") -> Change:
    return Change(run, lines(*firsts), summary)


def named(data: bytes, name: str = "0000000000000001.bin") -> TombstoneFile:
    return TombstoneFile(name, len(data) // 16, hashlib.sha256(data).hexdigest())


def test_a_checkpoint_moves_the_log_into_the_files_of_runs_and_begins_it_anew() -> None:
    bench = Bench()
    bench.append("a", 1, 2)
    bench.append("b", 1)
    mark = bench.wal.mark()
    bench.append("a", 3)
    grave = identity("old")
    left = bench.write(
        [change("a", 1, 2, summary=b'{"at":2}'), change("b", 1)], mark, live=[("a", b'{"at":2}')],
        deleted=["old"], tombstone_file=("0000000000000001.bin", grave), header=bench.header(named(grave)),
    )  # fmt: skip
    assert left == 0
    assert sorted(bench.disk.image()) == [
        "HEAD", "checkpoint.json", "runs/", "runs/a/", "runs/a/history.jsonl", "runs/a/state.json", "runs/b/",
        "runs/b/history.jsonl", "runs/b/state.json", "tombstones/", "tombstones/0000000000000001.bin", "wal/",
        "wal/0000000000000005.jsonl",
    ]  # fmt: skip
    found = read_manifest(bench.disk)
    assert found is not None
    assert found.base == Base(mark.seq, mark.checksum, mark.batch) == Base(4, mark.checksum, 4)
    assert (found.live, found.ended, found.places, found.tombstones) == (
        {"a": b'{"at":2}'}, {"failed": 1}, 9, (named(grave),),
    )  # fmt: skip
    read = runfiles.read_bodies(bench.disk, "a", named=True)
    assert read is not None
    assert (read[0].summary, read[1]) == (b'{"at":2}', lines(1, 2))
    again = Wal.open(bench.disk, draw_store_id=str, app="0", at="now", base=found.base, store_id=found.store_id)
    assert [(entry.run, entry.first) for entry in again.entries()] == [("a", 3)]


def test_each_step_is_durable_before_the_next_one_begins() -> None:
    bench = Bench()
    bench.append("a", 1)
    mark = bench.wal.mark()
    bench.disk.log.clear()
    grave = identity("old")
    bench.write(
        [change("a", 1)], mark, deleted=["old"], tombstone_file=("0000000000000001.bin", grave),
        header=bench.header(named(grave)), index=lambda: bench.disk.log.append("index"),
    )  # fmt: skip
    assert bench.disk.log == [
        "mkdir runs", "mkdir runs/a", "create runs/a/history.jsonl", "write runs/a/history.jsonl",
        "sync runs/a/history.jsonl", "sync /", "sync runs/", "sync runs/a/",
        "create runs/a/state.json.tmp", "write runs/a/state.json.tmp", "sync runs/a/state.json.tmp",
        "rename runs/a/state.json", "sync runs/a/",
        "mkdir tombstones", "create tombstones/0000000000000001.bin", "write tombstones/0000000000000001.bin",
        "sync tombstones/0000000000000001.bin", "sync tombstones/", "sync /",
        "index",
        "create checkpoint.json.tmp", "write checkpoint.json.tmp", "sync checkpoint.json.tmp",
        "rename checkpoint.json", "sync /",
        "unlink wal/0000000000000001.jsonl",
    ] + [f"unlink runs/old/{name}" for name in ("state.json", "state.json.tmp", "history.jsonl")] + ["rmdir runs/old"]  # fmt: skip


def test_lines_that_the_history_holds_are_skipped_and_leftovers_behind_it_are_cut() -> None:
    bench = Bench()
    bench.append("a", 1, 2)
    bench.write([change("a", 1, 2)])
    state = runfiles.read_state(bench.disk, "a")
    assert state is not None
    bench.disk.write("runs/a/history.jsonl", state.size, b"left" * 500)
    bench.append("a", 3)
    bench.write([change("a", 1, 2, 3)])
    state = runfiles.read_state(bench.disk, "a")
    assert state is not None
    assert bench.disk.size("runs/a/history.jsonl") == state.size
    assert runfiles.read_bodies(bench.disk, "a", named=True) == (state, lines(1, 2, 3))


def test_a_new_summary_alone_rewrites_the_state_alone() -> None:
    bench = Bench()
    bench.append("a", 1)
    bench.write([change("a", 1)])
    before = runfiles.read_state(bench.disk, "a")
    mark = bench.wal.mark()
    bench.disk.log.clear()
    bench.write([change("a", summary=b'{"new":1}')], mark)
    assert not [call for call in bench.disk.log if "history" in call]
    after = runfiles.read_state(bench.disk, "a")
    assert before is not None
    assert after == State(last_seq=1, lines=1, size=before.size, chain=before.chain, summary=b'{"new":1}')


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ([change("a", 2)], "event 1 is missing"),
        ([change("a", 1, 3)], "event 2 is missing"),
        ([change("a", 1)], "its last event at the mark is 2, not 1"),
        ([change("a", 1, 2), change("a")], "changed twice"),
        ([Change("..", [], b"{}")], "no folder"),
        ([Change("a", [*lines(1), Line(2, 1, b"\n")], b"{}")], "event 2 is missing"),
        ([Change("a", lines(1, 2), b"{\n}")], "one line"),
    ],
)
def test_events_that_are_missing_or_too_many_are_refused_before_anything_is_written(
    changes: list[Change], reason: str
) -> None:
    bench = Bench()
    bench.append("a", 1, 2)
    mark = bench.wal.mark()
    before = bench.disk.image()
    with pytest.raises(ValueError, match=reason):
        bench.write(changes, mark)
    assert bench.disk.image().items() - {("runs/", b"")} == before.items()


def test_a_run_that_was_written_before_the_mark_and_has_no_change_stops_the_manifest() -> None:
    bench = Bench()
    bench.append("a", 1)
    bench.append("b", 1)
    with pytest.raises(ValueError, match="b has records before the mark and no change"):
        bench.write([change("a", 1)])
    assert read_manifest(bench.disk) is None
    # The next mark does not tell of it any more, and it is owed all the same.
    with pytest.raises(ValueError, match="b has records before the mark and no change"):
        bench.write([change("a", 1)])
    bench.write([change("a", 1), change("b", 1)])
    bench.write()


def test_what_is_acknowledged_after_the_mark_may_be_filed_with_it_and_has_no_change_the_next_time() -> None:
    bench = Bench()
    bench.append("a", 1)
    mark = bench.wal.mark()
    bench.append("a", 2)
    bench.write([change("a", 1, 2)], mark)
    assert bench.wal.run_ends == {"a": 2}
    bench.append("b", 1)
    bench.write([change("b", 1)])
    found = read_manifest(bench.disk)
    assert found is not None
    assert found.base.seq == bench.wal.last_seq
    read = runfiles.read_bodies(bench.disk, "a", named=True)
    assert read is not None
    assert read[1] == lines(1, 2)


def test_a_mark_without_a_segment_is_refused() -> None:
    bench = Bench()
    bench.append("a", 1)
    with pytest.raises(ValueError, match="no segment begins at the mark"):
        bench.write([change("a", 1)], Mark(1, 0, 1, {"a": 1}))


STEPS = (
    ("create", "runs/a/history"), ("write", "runs/a/history"), ("write", "runs/a/state"), ("rename", "runs/a/state"),
    ("write", "tombstones/"), ("write", "checkpoint"), ("rename", "checkpoint"), ("mkdir", "runs"),
)  # fmt: skip


@pytest.mark.parametrize("step", STEPS, ids=" ".join)
def test_a_write_that_fails_leaves_the_store_as_it_was_and_the_next_checkpoint_succeeds_s1_26(
    step: tuple[str, str],
) -> None:
    bench = Bench()
    bench.append("a", 1)
    grave = identity("old")
    more = {"deleted": ["old"], "tombstone_file": ("0000000000000001.bin", grave), "header": bench.header(named(grave))}
    bench.disk.plan = {step: errno.ENOSPC}
    with pytest.raises(errors.StorageError) as caught:
        bench.write([change("a", 1)], **more)
    assert caught.value.data == {"code": "STORAGE", "retryable": True, "errno": "ENOSPC"}
    assert read_manifest(bench.disk) is None
    bench.disk.plan = {}
    bench.append("a", 2)
    assert bench.write([change("a", 1, 2)], **more) == 0
    assert runfiles.read_bodies(bench.disk, "a", named=True) is not None
    assert not [name for name in bench.disk.image() if name.endswith(".tmp")]


SYNCS = (
    ("sync", "runs/a/history"), ("sync", "runs/a/state"), ("syncdir", "runs"), ("syncdir", "runs/a"),
    ("sync", "tombstones/"), ("syncdir", "tombstones"), ("sync", "checkpoint"), ("syncdir", ""),
)  # fmt: skip


@pytest.mark.parametrize("step", SYNCS, ids=" ".join)
def test_a_sync_that_fails_ends_all_checkpoints_of_this_process_f029(step: tuple[str, str]) -> None:
    bench = Bench()
    bench.append("a", 1)
    grave = identity("old")
    more = {"deleted": ["old"], "tombstone_file": ("0000000000000001.bin", grave), "header": bench.header(named(grave))}
    mark = bench.wal.mark()
    bench.disk.plan = {step: errno.EIO}
    with pytest.raises(errors.StoragePoisoned) as caught:
        bench.write([change("a", 1)], mark, **more)
    assert caught.value.data == {"code": "STORAGE", "retryable": False, "errno": "EIO"}
    bench.disk.plan = {}
    bench.disk.log.clear()
    with pytest.raises(errors.StoragePoisoned):
        bench.write([change("a", 1)], mark, **more)
    assert bench.disk.log == []


def test_a_process_of_an_older_epoch_or_without_its_lock_makes_no_checkpoint_f033() -> None:
    class Lock:
        mine = True

        def held(self) -> bool:
            return self.mine

    old, lock = Bench(), Lock()
    old.append("a", 1)
    mark = old.wal.mark()
    header = old.header()
    Wal.open(old.disk, draw_store_id=str, app="0", at="now").close()
    other = Bench(lock)
    other_mark = other.wal.mark()
    lock.mine = False
    for bench, at, what in ((old, mark, header), (other, other_mark, other.header())):
        before = bench.disk.image()
        with pytest.raises(errors.StoragePoisoned) as caught:
            bench.write([change("a", 1)], at, header=what)
        assert caught.value.details["errno"] == "ESTALE"
        assert bench.disk.image() == before


def test_an_owner_that_loses_the_store_in_a_checkpoint_writes_no_manifest_f033() -> None:
    bench = Bench()
    bench.append("a", 1)
    mark, header = bench.wal.mark(), bench.header()

    def taken_over() -> None:
        Wal.open(bench.disk, draw_store_id=str, app="0", at="now").close()

    with pytest.raises(errors.StoragePoisoned):
        bench.write([change("a", 1)], mark, header=header, index=taken_over)
    assert read_manifest(bench.disk) is None


def test_what_is_not_of_the_store_and_what_the_log_is_making_stays_where_it_is() -> None:
    bench = Bench()
    bench.append("a", 1)
    mark = bench.wal.mark()
    strangers = ("wal/0000000000000001.jsonl.bak", "wal/0000000000000009.jsonl.tmp", "notes.tmp", "runs/notes")
    bench.disk.mkdir("runs")
    for name in strangers:
        bench.disk.create(name)
    assert bench.write([change("a", 1)], mark) == 0
    assert bench.checkpointer.sweep() == 0
    assert set(strangers) <= set(bench.disk.image())


@pytest.mark.parametrize("wrong", ["count", "sum", "name", "again"])
def test_a_file_of_tombstones_is_new_and_named_with_its_count_and_sum(wrong: str) -> None:
    bench = Bench()
    grave = identity("old")
    right = named(grave)
    if wrong == "again":
        bench.write(tombstone_file=(right.name, grave), header=bench.header(right))
    file = {
        "count": TombstoneFile(right.name, 2, right.sum),
        "sum": TombstoneFile(right.name, 1, "0" * 64),
        "name": TombstoneFile("0000000000000002.bin", 1, right.sum),
        "again": right,
    }[wrong]
    with pytest.raises(ValueError, match="is new, and named"):
        bench.write(tombstone_file=(right.name, grave), header=bench.header(file))


def test_a_failing_index_stops_the_manifest_and_keeps_its_own_error() -> None:
    bench = Bench()
    bench.append("a", 1)

    def fail() -> None:
        raise RuntimeError("of the index")

    with pytest.raises(RuntimeError, match="of the index"):
        bench.write([change("a", 1)], index=fail)
    assert read_manifest(bench.disk) is None
    assert bench.write([change("a", 1)]) == 0


def test_a_damaged_run_stops_the_checkpoint_and_is_named_and_nothing_of_it_is_touched() -> None:
    bench = Bench()
    bench.append("a", 1)
    bench.write([change("a", 1)])
    good = bench.disk.image()
    for name, data in (("state.json", b"rot"), ("history.jsonl", b"")):
        bench.append("a", 2)
        bench.disk.unlink(f"runs/a/{name}")
        bench.disk.create(f"runs/a/{name}")
        bench.disk.write(f"runs/a/{name}", 0, data)
        with pytest.raises(errors.StoreDamaged) as caught:
            Checkpointer(bench.disk).write(
                bench.wal.mark(), bench.header(), [change("a", 2)], (), (), None, lambda: None
            )
        assert (caught.value.details["runs"], caught.value.details["file"]) == (["a"], f"runs/a/{name}")
        bench = Bench()
        bench.append("a", 1)
        bench.write([change("a", 1)])
        assert bench.disk.image() == good


def test_what_cannot_be_deleted_is_counted_and_deleted_by_a_later_sweep() -> None:
    bench = Bench()
    bench.append("old", 1)
    bench.write([change("old", 1)], live=[("old", b"{}")])
    grave = identity("old")
    mark = bench.wal.mark()
    bench.disk.plan = {("unlink", "runs/old/history"): errno.EIO, ("unlink", "wal/"): errno.EACCES}
    left = bench.write(
        (), mark, deleted=["old"], tombstone_file=("0000000000000001.bin", grave), header=bench.header(named(grave))
    )
    assert left == 2  # the history, and the folder that is not empty
    bench.disk.plan = {}
    assert Checkpointer(bench.disk).sweep() == 0
    assert not [name for name in bench.disk.image() if name.startswith("runs/old")]


def test_a_sweep_of_a_store_without_a_checkpoint_does_nothing() -> None:
    bench = Bench()
    bench.append("a", 1)
    before = bench.disk.image()
    assert bench.checkpointer.sweep() == 0
    assert bench.disk.image() == before


@pytest.mark.parametrize("data", [None, b"", b"0123456789abcdef", identity("x")])
def test_tombstones_that_are_not_those_of_the_manifest_are_damage_before_anything_is_deleted(
    data: bytes | None,
) -> None:
    bench = Bench()
    grave = identity("old")
    bench.write(tombstone_file=("0000000000000001.bin", grave), header=bench.header(named(grave)))
    image = bench.disk.image() | {"checkpoint.json.tmp": b""}
    del image["tombstones/0000000000000001.bin"]
    if data is not None:
        image["tombstones/0000000000000001.bin"] = data
    disk = SimDisk(image)
    with pytest.raises(errors.StoreDamaged) as caught:
        Checkpointer(disk).sweep()
    assert caught.value.details["file"] == "tombstones/0000000000000001.bin"
    assert disk.calls == 0


@pytest.mark.parametrize("name", ["checkpoint.json", "tombstones/0000000000000001.bin", "runs", "wal"])
def test_what_cannot_be_read_is_never_taken_for_missing_f027(name: str) -> None:
    bench = Bench()
    grave = identity("old")
    bench.append("a", 1)
    bench.write([change("a", 1)], tombstone_file=("0000000000000001.bin", grave), header=bench.header(named(grave)))
    before = bench.disk.image()
    bench.disk.read_error = {name: errno.EIO}
    with pytest.raises(errors.StorageError):
        bench.checkpointer.sweep()
    assert bench.disk.image() == before


def test_changes_are_taken_in_slices_so_that_memory_stays_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "SLICE_RUNS", 4)
    monkeypatch.setattr(checkpoint, "SLICE_BYTES", 1000)
    bench = Bench()
    names = [f"r{number:02d}" for number in range(10)]
    bench.wal.append([Item(name, 1, 1, b'"%b"' % (b"x" * 600)) for name in names])
    mark = bench.wal.mark()
    held: list[int] = []

    def changes() -> Any:
        for number, name in enumerate(names):
            held.append(number - sum("rename runs" in call for call in bench.disk.log))
            yield Change(name, [Line(1, 1, b'"%b"' % (b"x" * 600))], b"{}")

    assert bench.write(changes(), mark) == 0
    assert held == [0, 1] * 5  # two bodies are more than 1000 bytes
    assert read_manifest(bench.disk) is not None


def test_a_checkpoint_of_more_runs_than_descriptors_keeps_few_of_them_open(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("many_runs.py"), tmp_path, "1200"],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = [json.loads(line) for line in done.stdout.splitlines()]
    print(told)
    assert [line["left"] for line in told] == [0, 0]
    assert max(line["descriptors"] for line in told) < 100
    modes = {path.relative_to(tmp_path).parts[-1]: path.stat().st_mode & 0o777 for path in tmp_path.rglob("*")}
    assert {name: modes[name] for name in ("runs", "run_000000", "history.jsonl", "state.json", "checkpoint.json")} == {
        "runs": 0o700, "run_000000": 0o700, "history.jsonl": 0o600, "state.json": 0o600, "checkpoint.json": 0o600,
    }  # fmt: skip


def test_a_store_of_format_0_goes_on_in_format_1_at_its_next_segment_and_nothing_is_rewritten() -> None:
    disk = SimDisk()
    store = Store(disk)
    store.append([Item("a", 1, 2, b"1")])
    store.wal.close()
    image = disk.image()
    first = "wal/0000000000000001.jsonl"
    rest = image[first].partition(b"\n")[2]
    old = record.header_line(0, 0, record.Header(0, "crc32", "store-1", "0.1.0", 0)) + rest
    assert len(old) == len(image[first])
    disk = SimDisk(image | {first: old})
    store = Store(disk)
    store.append([Item("a", 3, 2, b"2")])
    assert disk.read(first).startswith(old)
    store.wal.mark()
    assert b'"format":1' in disk.read("wal/0000000000000005.jsonl")
    assert disk.read(first).startswith(old)
    again = Store(disk)
    assert [line.first for line in again.runs["a"]] == [1, 3]
    again.checkpoint()
    assert [line.first for line in Store(disk).runs["a"]] == [1, 3]
