"""Deleted runs are remembered for ever: their files, what is damage in them, and how they stay few."""

from __future__ import annotations

import errno
import hashlib
import threading
import time
import tracemalloc

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from rpcagent import errors
from rpcagent.journal.tombstones import Filed, Named, Tombstones, encode, named, read, tombstone_id

FIRST = "0000000000000001.bin"


class Folder:
    """The part of a disk that is read from: contents by name, and the reads."""

    def __init__(self, files: dict[str, bytes] | None = None) -> None:
        self.files = files or {}
        self.reads: list[str] = []
        self.error: int | None = None

    def read(self, name: str) -> bytes:
        self.reads.append(name)
        if self.error is not None:
            raise OSError(self.error, "cannot be read")
        if name not in self.files:
            raise FileNotFoundError(errno.ENOENT, name)
        return bytes(memoryview(self.files[name]))  # a copy, as from a real disk

    def names(self) -> list[str]:
        return sorted(name.removeprefix("tombstones/") for name in self.files)

    def put(self, filed: Filed) -> None:
        assert f"tombstones/{filed.name}" not in self.files
        self.files[f"tombstones/{filed.name}"] = filed.data


def runs(count: int, start: int = 0) -> list[str]:
    return [f"run_{number}" for number in range(start, start + count)]


def filed(folder: Folder, tombstones: Tombstones) -> Filed:
    """A whole checkpoint, as far as tombstones are part of one."""
    file = tombstones.next_file(folder.names())
    assert file is not None
    folder.put(file)
    tombstones.filed(file)
    for name in tombstones.leftovers(folder.names()):
        del folder.files[f"tombstones/{name}"]
    return file


def one_file(count: int = 3) -> tuple[Folder, Named]:
    data = encode(tombstone_id(run) for run in runs(count))
    return Folder({f"tombstones/{FIRST}": data}), named(FIRST, data)


def damage(folder: Folder, file: Named) -> str:
    tombstones = Tombstones(folder, [file])
    reasons = set()
    for _ in range(2):  # it stays damage
        with pytest.raises(errors.StoreDamaged) as caught:
            assert "run_0" in tombstones
        assert (caught.value.details["file"], caught.value.details["offset"]) == (f"tombstones/{FIRST}", 0)
        reasons.add(caught.value.details["reason"])
    (reason,) = reasons
    return reason


# The file


def test_a_file_is_the_sorted_ids_and_nothing_else():
    ids = sorted(hashlib.blake2b(run.encode(), digest_size=16).digest() for run in ("run_a", "run_b", "run_c"))
    data = encode(tombstone_id(run) for run in ("run_b", "run_c", "run_a", "run_b"))
    assert data == b"".join(ids)
    assert named("x.bin", data) == Named("x.bin", 3, hashlib.sha256(data).hexdigest())
    assert msgspec.json.encode(named("x.bin", b"")) == (
        b'{"name":"x.bin","count":0,"sum":"e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"}'
    )


def test_a_file_flipped_at_any_bit_is_damage():
    folder, file = one_file()
    whole = folder.files[f"tombstones/{FIRST}"]
    for spot in range(len(whole) * 8):
        data = bytearray(whole)
        data[spot // 8] ^= 1 << spot % 8
        folder.files[f"tombstones/{FIRST}"] = bytes(data)
        assert damage(folder, file) == "its content is not what was written"


def test_a_file_cut_at_any_byte_is_damage():
    folder, file = one_file()
    whole = folder.files[f"tombstones/{FIRST}"]
    for size in range(len(whole)):
        folder.files[f"tombstones/{FIRST}"] = whole[:size]
        assert damage(folder, file) == f"it has {size} bytes, and 48 were written"


def test_a_longer_file_is_damage():
    folder, file = one_file()
    folder.files[f"tombstones/{FIRST}"] += bytes(16)
    assert damage(folder, file) == "it has 64 bytes, and 48 were written"


def test_a_missing_file_is_damage():
    folder, file = one_file()
    folder.files.clear()
    assert damage(folder, file) == "the file is missing"


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.EMFILE])
def test_a_file_that_cannot_be_read_now_is_asked_for_again(number: int):
    folder, file = one_file()
    folder.error = number
    tombstones = Tombstones(folder, [file])
    with pytest.raises(errors.StorageError) as caught:
        assert "run_0" in tombstones
    assert caught.value.details == {"errno": errno.errorcode[number]}
    folder.error = None
    assert "run_0" in tombstones
    assert read(folder, file) == folder.files[f"tombstones/{FIRST}"]


# Asking


def test_no_file_is_read_before_the_first_question_and_each_only_once():
    folder, file = one_file()
    tombstones = Tombstones(folder, [file])
    tombstones.add("run_9")
    assert (folder.reads, "run_9" in tombstones, folder.reads) == ([], True, [])
    assert [run in tombstones for run in ("run_0", "run_1", "run_3", 0)] == [True, True, False, False]
    assert folder.reads == [f"tombstones/{FIRST}"]


def test_a_store_without_deletions_has_none():
    folder = Folder()
    assert "run_0" not in Tombstones(folder)
    assert Tombstones(folder).next_file([]) is None


class Remembering(RuleBasedStateMachine):
    """Beside a set of Python: membership is the same after any deletions, checkpoints, crashes and restarts."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Folder()
        self.tombstones = Tombstones(self.folder)
        self.manifest: list[Named] = []
        self.deleted: set[str] = set()
        self.logged: set[str] = set()

    @rule(numbers=st.lists(st.integers(0, 60), max_size=12))
    def delete(self, numbers: list[int]) -> None:
        for number in numbers:
            self.tombstones.add(f"run_{number}")
            self.deleted.add(f"run_{number}")
            self.logged.add(f"run_{number}")

    @rule(lasts=st.booleans())
    def checkpoint(self, lasts: bool) -> None:
        file = self.tombstones.next_file(self.folder.names())
        assert (file is None) == (self.tombstones.pending == 0)
        if file is None:
            return
        self.folder.put(file)
        if lasts:
            self.manifest = file.named
            self.tombstones.filed(file)
            self.logged.clear()
            assert self.tombstones.pending == 0

    @rule()
    def clean(self) -> None:
        for name in self.tombstones.leftovers([*self.folder.names(), "README"]):
            del self.folder.files[f"tombstones/{name}"]
        assert self.folder.names() == [file.name for file in self.manifest]

    @rule()
    def restart(self) -> None:
        self.tombstones = Tombstones(self.folder, self.manifest)
        for run in self.logged:
            self.tombstones.add(run)

    @invariant()
    def the_same_runs_are_deleted(self) -> None:
        assert {run for run in runs(61) if run in self.tombstones} == self.deleted
        assert self.tombstones.named == self.manifest
        assert len(self.manifest) <= 8


TestRemembering = Remembering.TestCase
TestRemembering.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


# Filing


def test_each_checkpoint_that_deletes_adds_a_file_and_the_ninth_makes_them_one():
    folder = Folder()
    tombstones = Tombstones(folder)
    for number in range(1, 9):
        for run in runs(3, number * 10):
            tombstones.add(run)
        file = filed(folder, tombstones)
        assert file.name == f"{number:016d}.bin"
        assert [each.count for each in file.named] == [3] * number
        assert tombstones.next_file(folder.names()) is None
    tombstones.add("run_90")
    tombstones.add("run_10")  # which stands in a file already
    file = filed(folder, tombstones)
    assert file.name == "0000000000000009.bin"
    assert file.named == [named(file.name, file.data)] == tombstones.named
    all_runs = [run for number in range(1, 9) for run in runs(3, number * 10)] + ["run_90"]
    assert file.data == encode(tombstone_id(run) for run in all_runs)
    assert file.named[0].count == 25
    assert folder.names() == [file.name]
    again = Tombstones(folder, tombstones.named)
    assert all(run in each for each in (tombstones, again) for run in all_runs)


def test_a_file_that_did_not_become_durable_is_filed_again_under_a_name_that_is_free():
    folder = Folder({"tombstones/0000000000000007.bin": b"left over", "tombstones/other": b""})
    tombstones = Tombstones(folder)
    tombstones.add("run_1")
    first = tombstones.next_file(folder.names())
    assert first is not None
    assert first.name == "0000000000000008.bin"
    assert (tombstones.pending, tombstones.named) == (1, [])
    folder.put(first)
    tombstones.add("run_2")
    second = tombstones.next_file(folder.names())
    assert second is not None
    assert (second.name, second.named[0].count) == ("0000000000000009.bin", 2)
    folder.put(second)
    tombstones.filed(second)
    assert tombstones.leftovers(folder.names()) == ["0000000000000007.bin", "0000000000000008.bin"]


def test_a_run_that_is_deleted_while_a_file_is_made_stays_pending():
    folder = Folder()
    tombstones = Tombstones(folder)
    tombstones.add("run_1")
    file = tombstones.next_file([])
    assert file is not None
    tombstones.add("run_2")
    folder.put(file)
    tombstones.filed(file)
    assert (tombstones.pending, "run_1" in tombstones, "run_2" in tombstones) == (1, True, True)


def test_a_damaged_file_is_never_merged_into_a_good_one():
    folder = Folder()
    tombstones = Tombstones(folder)
    for run in runs(8):
        tombstones.add(run)
        filed(folder, tombstones)
    folder.files[f"tombstones/{FIRST}"] = bytes(16)
    again = Tombstones(folder, tombstones.named)
    again.add("run_9")
    with pytest.raises(errors.StoreDamaged):
        again.next_file(folder.names())


def test_a_question_in_the_middle_of_a_merge_never_misses_a_run():
    folder = Folder()
    tombstones = Tombstones(folder)
    over = threading.Event()
    known = ["run_0"]
    missed: list[str] = []
    tombstones.add("run_0")

    def ask() -> None:
        while not over.is_set():
            missed.extend(run for run in list(known) if run not in tombstones)

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        for number in range(1, 300):
            tombstones.add(f"run_{number}")
            known.append(f"run_{number}")
            filed(folder, tombstones)
    finally:
        over.set()
        asking.join(timeout=30)
    assert missed == []


def test_a_first_question_while_files_change_their_names_reads_them_as_they_are_named():
    folder, file = one_file()
    reading, go = threading.Event(), threading.Event()
    plain = folder.read

    def slow(name: str) -> bytes:
        data = plain(name)
        reading.set()
        assert go.wait(30)
        return data

    folder.read = slow  # type: ignore[method-assign]
    tombstones = Tombstones(folder, [file])
    tombstones.add("run_9")
    asking = threading.Thread(target=lambda: "run_0" in tombstones)
    asking.start()
    assert reading.wait(30)
    more = tombstones.next_file(folder.names())
    assert more is not None
    folder.put(more)
    filing = threading.Thread(target=lambda: tombstones.filed(more))
    filing.start()
    filing.join(0.2)  # it has to wait; without that it would be done by now
    go.set()
    asking.join(30)
    filing.join(30)
    assert (tombstones.pending, "run_9" in tombstones, "run_0" in tombstones) == (0, True, True)


def test_a_million_tombstones_cost_their_bytes_and_little_time():
    folder = Folder()
    tombstones = Tombstones(folder)
    for part in range(8):
        data = encode(hashlib.blake2b(b"%d" % n, digest_size=16).digest() for n in range(part, 1_000_000, 8))
        name = f"{part + 1:016d}.bin"
        file = Filed(name, data, [*tombstones.named, named(name, data)])
        folder.put(file)
        tombstones.filed(file)
    tombstones = Tombstones(folder, tombstones.named)
    tombstones.add("new")
    tracemalloc.start()
    try:
        merged = filed(folder, tombstones)
        kept, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert merged.named[0].count == 1_000_001
    assert kept < 17e6
    assert most < 52e6  # what was read, the parts of what is written, and the whole of it
    begin = time.process_time()
    assert [str(n) in tombstones for n in range(1_000)] == [True] * 1_000
    assert [run in tombstones for run in runs(1_000)] == [False] * 1_000
    assert time.process_time() - begin < 1
