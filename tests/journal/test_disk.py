"""The real disk and the lock on a store. S0-36, F024, F027, F033, F035."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from typing import TYPE_CHECKING, Any

import pytest
from rpcagent import errors
from rpcagent.journal.disk import RealDisk, StoreLock
from rpcagent.journal.wal import Wal

from .story import Witness, as_item

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def take(path: Path) -> StoreLock:
    return StoreLock.take(path, since="2030-01-01T00:00:00Z")


def in_child(act: Callable[[], bool]) -> bool:
    """Whether `act` is true in a forked child. The child leaves at once, whatever happens."""
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(0 if act() else 1)
        finally:
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_folders_and_files_are_for_their_owner_only(tmp_path: Path) -> None:
    disk = RealDisk(tmp_path / "a" / "store")
    disk.mkdir("wal")
    disk.create("wal/x")
    assert [mode(tmp_path / p) for p in ("a", "a/store", "a/store/wal", "a/store/wal/x")] == [
        0o700,
        0o700,
        0o700,
        0o600,
    ]
    disk.close()


def test_what_is_written_reads_back_through_every_call_of_the_seam(tmp_path: Path) -> None:
    disk = RealDisk(tmp_path)
    disk.create("a")
    with pytest.raises(FileExistsError):
        disk.create("a")
    disk.write("a", 0, b"hello")
    disk.write("a", 5, b" world")
    disk.sync("a")
    disk.truncate("a", 8)
    disk.sync_full("a")
    disk.rename("a", "b")
    disk.syncdir("")
    disk.write("b", 8, b"!")
    assert disk.read("b") == b"hello wo!"
    assert disk.read_at("b", 6, 3) == b"wo!"
    assert (disk.exists("a"), disk.exists("b"), disk.names("")) == (False, True, ["b"])
    disk.unlink("b")
    assert disk.names("") == []
    with pytest.raises(FileNotFoundError):
        disk.read("b")
    disk.close()


def test_a_file_replaced_by_rename_is_written_in_its_new_form(tmp_path: Path) -> None:
    disk = RealDisk(tmp_path)
    for name in ("old", "new"):
        disk.create(name)
        disk.write(name, 0, name.encode())
    disk.rename("new", "old")
    disk.write("old", 3, b"!")
    assert disk.read("old") == b"new!"
    disk.close()


def descriptors() -> set[int]:
    found = set()
    for number in range(256):
        with contextlib.suppress(OSError):
            os.fstat(number)
            found.add(number)
    return found


def test_no_descriptor_is_inherited_and_none_stays_open(tmp_path: Path) -> None:
    before = descriptors()
    disk, lock = RealDisk(tmp_path), take(tmp_path)
    disk.create("a")
    disk.write("a", 0, b"x")
    for _ in range(3):
        disk.syncdir("")
    opened = descriptors() - before
    assert len(opened) == 3
    assert not any(os.get_inheritable(descriptor) for descriptor in opened)
    disk.close()
    lock.close()
    assert descriptors() == before


def test_a_log_goes_on_where_no_further_folder_can_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = descriptors()
    (tmp_path / "store").mkdir()
    (tmp_path / "link").symlink_to("store")
    disk = RealDisk(tmp_path / "link")
    wal = Wal.open(disk, draw_store_id=lambda: "s", app="0", at="now", segment_bytes=1_000)
    really = os.open

    def no_folder(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if os.path.isdir(path):
            raise OSError(errno.EMFILE, "Too many open files")
        return really(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", no_folder)
    witness = Witness()
    for _ in range(30):
        wal.append([witness.next(3)])
    assert wal.state == "ok"
    assert len(list((tmp_path / "store/wal").iterdir())) > 2
    wal.close()
    disk.close()
    assert descriptors() == before


def test_a_folder_that_took_the_place_of_another_is_the_one_that_is_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = RealDisk(tmp_path)
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_ino))
    disk.mkdir("wal")
    disk.syncdir("wal")
    (tmp_path / "wal").rename(tmp_path / "old")
    disk.mkdir("wal")
    disk.syncdir("wal")
    assert synced == [(tmp_path / name).stat().st_ino for name in ("old", "wal")]
    disk.close()


def test_a_short_write_goes_on_to_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = RealDisk(tmp_path)
    disk.create("a")
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: real(fd, data[:3], at))
    disk.write("a", 0, b"0123456789")
    assert disk.read("a") == b"0123456789"
    disk.close()


@pytest.mark.parametrize(("answers", "code"), [([4, OSError(errno.EDQUOT, "")], errno.EDQUOT), ([4, 0], errno.ENOSPC)])
def test_a_write_that_cannot_be_finished_says_what_happened_f024(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers: list[int | OSError], code: int
) -> None:
    disk = RealDisk(tmp_path)
    disk.create("a")
    left = iter(answers)

    def pwrite(*_: object) -> int:
        answer = next(left)
        if isinstance(answer, OSError):
            raise answer
        return answer

    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(OSError) as caught:
        disk.write("a", 0, b"0123456789")
    assert caught.value.errno == code
    disk.close()


def test_a_name_that_cannot_be_looked_at_is_not_taken_for_missing_f027(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = RealDisk(tmp_path)

    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, "no")

    monkeypatch.setattr(os, "lstat", refuse)
    with pytest.raises(PermissionError):
        disk.exists("HEAD")


def test_a_log_on_the_real_disk_is_there_after_a_restart(tmp_path: Path) -> None:
    witness = Witness()
    for epoch in (1, 2, 3):
        lock, disk = take(tmp_path), RealDisk(tmp_path)
        wal = Wal.open(disk, draw_store_id=lambda: "s", app="0", at="now", segment_bytes=600, lock=lock)
        assert wal.epoch == epoch
        assert [as_item(entry) for entry in wal.entries()] == witness.issued
        for size in (3, 200, 5):
            wal.append([witness.next(size), witness.next(size)])
        wal.close()
        disk.close()
        lock.close()
    assert mode(tmp_path / "HEAD") == mode(tmp_path / "LOCK") == 0o600


# The lock


def test_a_second_owner_is_refused_and_told_who_holds_the_store_s0_36(tmp_path: Path) -> None:
    lock = take(tmp_path)
    for _ in range(2):
        with pytest.raises(errors.StoreLocked) as caught:
            take(tmp_path)
        data = caught.value.data
        assert (data["pid"], data["since"], data["retryable"]) == (os.getpid(), "2030-01-01T00:00:00Z", True)
        assert data["host"]
    lock.close()
    take(tmp_path).close()


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"1",
        b"\0" * 64,
        b"garbage {",
        b'{"pid":1,"host":"gone","since":"2015-01-01T00:00:00Z"}\n',
        b'{"pid":[],"host":7,"since":null}',
        b"[" * 4096,
        b"\xff" * 10_000,
    ],
)
def test_what_stands_in_a_lock_file_decides_nothing_f035(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "LOCK").write_bytes(text)
    lock = take(tmp_path)
    (tmp_path / "LOCK").write_bytes(text)  # and while it is held, it only makes the message poorer
    with pytest.raises(errors.StoreLocked):
        take(tmp_path)
    lock.close()
    assert (tmp_path / "LOCK").exists()


def test_an_owner_notices_that_its_lock_file_was_removed_or_replaced(tmp_path: Path) -> None:
    lock = take(tmp_path)
    assert lock.held()
    (tmp_path / "LOCK").unlink()
    assert not lock.held()
    other = take(tmp_path)
    assert other.held()
    assert not lock.held()
    lock.close()
    assert not lock.held()
    other.close()


def test_a_lock_file_replaced_between_open_and_lock_is_taken_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = fcntl.flock, []

    def flock(descriptor: int, what: int) -> None:
        if not calls:
            (tmp_path / "LOCK").unlink()
        calls.append(what)
        real(descriptor, what)

    monkeypatch.setattr(fcntl, "flock", flock)
    lock = take(tmp_path)
    assert lock.held()
    assert len(calls) == 2
    assert not any(what & fcntl.LOCK_UN for what in calls)
    lock.close()
    assert len(calls) == 2, "a lock ends with its descriptor, never with an unlock"


def test_a_lock_file_that_keeps_being_replaced_is_an_error_not_a_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fcntl, "flock", lambda *_: (tmp_path / "LOCK").unlink())
    with pytest.raises(errors.StorageError):
        take(tmp_path)


def test_a_lock_that_is_a_link_or_cannot_be_opened_is_refused(tmp_path: Path) -> None:
    (tmp_path / "LOCK").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(errors.StorageError) as caught:
        take(tmp_path)
    assert caught.value.details["errno"] == "ELOOP"
    assert not (tmp_path / "elsewhere").exists()


def test_a_forked_child_can_neither_write_nor_free_the_lock_of_its_parent(tmp_path: Path) -> None:
    lock, disk = take(tmp_path), RealDisk(tmp_path)
    wal = Wal.open(disk, draw_store_id=lambda: "s", app="0", at="now", lock=lock)
    witness = Witness()
    wal.append([witness.next(3)])

    def child() -> bool:
        assert not lock.held()
        lock.close()
        for act in (
            lambda: wal.append([Witness().next(5)]),
            lambda: disk.write("HEAD", 0, b"x"),
            lambda: disk.read("HEAD"),
        ):
            try:
                act()
            except errors.StoragePoisoned:
                continue
            return False
        return True

    assert in_child(child)
    assert lock.held()
    with pytest.raises(errors.StoreLocked):
        take(tmp_path)
    wal.append([witness.next(3)])
    wal.close()
    disk.close()
    lock.close()


def test_a_forked_child_that_lives_on_does_not_keep_the_store_locked(tmp_path: Path) -> None:
    lock = take(tmp_path)
    said, say = os.pipe()
    hold, go = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(go)
        os.write(say, b"1")
        os.read(hold, 1)
        os._exit(0)
    assert os.read(said, 1) == b"1"
    lock.close()
    take(tmp_path).close()
    os.write(go, b"1")
    os.waitpid(pid, 0)
    for descriptor in (said, say, hold, go):
        os.close(descriptor)
