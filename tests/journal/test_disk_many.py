"""The real disk with many files and folders: bounded descriptors, one sync for all. F024, F029."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from typing import TYPE_CHECKING

import pytest
from rpcagent import errors
from rpcagent.journal import disk as disks
from rpcagent.journal.disk import ALONE, KEPT, RealDisk

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

linux = pytest.mark.skipif(sys.platform != "linux", reason="a sync of a whole file system is only used on Linux")


def descriptors() -> set[int]:
    found = set()
    for number in range(1024):
        with contextlib.suppress(OSError):
            os.fstat(number)
            found.add(number)
    return found


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[RealDisk]:
    made = RealDisk(tmp_path)
    yield made
    made.close()


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Inodes, as they are synced one by one."""
    seen: list[int] = []
    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, name, lambda descriptor: seen.append(os.fstat(descriptor).st_ino))
    return seen


def grow(disk: RealDisk, count: int) -> tuple[list[str], list[str]]:
    disk.mkdir("runs")
    folders = [f"runs/r{number}" for number in range(count)]
    for folder in folders:
        disk.mkdir(folder)
        disk.create(f"{folder}/history.jsonl")
        disk.write(f"{folder}/history.jsonl", 0, folder.encode())
    return [f"{folder}/history.jsonl" for folder in folders], folders


def test_folders_in_folders_are_made_listed_and_removed(disk: RealDisk) -> None:
    files, folders = grow(disk, 2)
    assert (disk.names("runs"), disk.names(folders[0])) == (["r0", "r1"], ["history.jsonl"])
    assert (disk.size(files[0]), disk.read_at(files[0], 2, 100)) == (7, b"ns/r0")
    with pytest.raises(OSError) as caught:
        disk.rmdir(folders[0])
    assert caught.value.errno == errno.ENOTEMPTY
    disk.syncdir(folders[0])
    disk.unlink(files[0])
    disk.rmdir(folders[0])
    assert disk.names("runs") == ["r1"]
    for ask in (disk.size, disk.names, lambda name: disk.read_at(name, 0, 1)):
        with pytest.raises(FileNotFoundError):
            ask(folders[0])
    with pytest.raises(FileExistsError):
        disk.mkdir("runs/r1")


def test_many_files_keep_few_descriptors_and_read_and_write_as_ever(disk: RealDisk, tmp_path: Path) -> None:
    before = len(descriptors())
    files, folders = grow(disk, 3 * KEPT)
    assert len(descriptors()) - before <= KEPT
    for name in files:
        disk.write(name, disk.size(name), b"!")
    for folder in folders[: KEPT + 5]:
        disk.syncdir(folder)
    assert len(descriptors()) - before <= KEPT
    for name, folder in zip(files, folders, strict=True):
        assert disk.read(name) == disk.read_at(name, 0, 1000) == folder.encode() + b"!"
        assert (tmp_path / name).stat().st_size == len(folder) + 1


def test_reading_a_file_keeps_no_descriptor(disk: RealDisk, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"0123456789")
    before = descriptors()
    assert (disk.read_at("x", 3, 4), disk.read_at("x", 8, 4), disk.read_at("x", 20, 4)) == (b"3456", b"89", b"")
    assert descriptors() == before
    (tmp_path / "link").symlink_to("x")
    with pytest.raises(OSError) as caught:
        disk.read_at("link", 0, 1)
    assert caught.value.errno == errno.ELOOP


def test_few_names_are_synced_one_by_one_files_first(disk: RealDisk, tmp_path: Path, synced: list[int]) -> None:
    files, folders = grow(disk, ALONE // 2)
    disk.sync_many(files, folders)
    assert synced == [(tmp_path / name).stat().st_ino for name in (*files, *folders)]


@linux
def test_many_names_are_synced_at_once_where_the_file_system_tells_of_failures(
    disk: RealDisk, tmp_path: Path, synced: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    files, folders = grow(disk, ALONE)
    calls: list[int] = []
    for kind, expected in ((0xEF53, 1), (0x65735546, 0), (0x794C7630, 0), (0x6969, 0)):  # ext4; FUSE, overlay, NFS
        monkeypatch.setattr(
            disks,
            "_file_system_calls",
            lambda kind=kind: (lambda _: kind, lambda root: calls.append(os.fstat(root).st_ino)),
        )
        synced.clear()
        calls.clear()
        disk.sync_many(files, folders)
        assert calls == [tmp_path.stat().st_ino] * expected
        assert len(synced) == 0 if expected else len(files) + len(folders)


@linux
def test_the_sync_of_a_file_system_is_really_made_and_its_error_is_raised(
    disk: RealDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, folders = grow(disk, ALONE)
    disk.sync_many(files, folders)
    found = disks._file_system_calls()
    assert found is not None
    kind, syncfs = found
    assert kind(disk._open[""]) > 0
    with pytest.raises(OSError) as caught:
        syncfs(10_000)
    assert caught.value.errno == errno.EBADF

    def fail(_: int) -> None:
        raise OSError(errno.EIO, "write-back failed")

    monkeypatch.setattr(disks, "_file_system_calls", lambda: (lambda _: 0xEF53, fail))
    with pytest.raises(OSError, match="write-back failed"):
        disk.sync_many(files, folders)


@pytest.mark.parametrize(
    ("release", "at_once"),
    [
        ("6.18.44-x", True),
        ("5.8.0", True),
        ("5.10", True),
        ("5.7.19", False),
        ("4.18.0-553.el8", False),
        ("odd", False),
    ],
)
def test_kernels_that_did_not_tell_of_failures_are_not_asked(
    monkeypatch: pytest.MonkeyPatch, release: str, at_once: bool
) -> None:
    system = os.uname_result(("Linux", "node", release, "", ""))
    monkeypatch.setattr(os, "uname", lambda: system)
    disks._file_system_calls.cache_clear()
    try:
        assert (disks._file_system_calls() is not None) == (at_once and sys.platform == "linux")
    finally:
        disks._file_system_calls.cache_clear()


def test_a_failed_sync_of_one_of_many_is_raised_and_the_rest_is_not_tried(
    disk: RealDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disks, "_file_system_calls", lambda: None)
    files, folders = grow(disk, ALONE)
    tried: list[int] = []

    def fail(descriptor: int) -> None:
        tried.append(descriptor)
        if len(tried) == 3:
            raise OSError(errno.EIO, "sync failed")

    monkeypatch.setattr(os, "fdatasync", fail)
    with pytest.raises(OSError, match="sync failed"):
        disk.sync_many(files, folders)
    assert len(tried) == 3


def test_a_forked_child_syncs_nothing_of_its_parent(disk: RealDisk) -> None:
    files, folders = grow(disk, ALONE)
    disk.disarm()  # as in the child
    for some in (1, ALONE):
        with pytest.raises(errors.StoragePoisoned):
            disk.sync_many(files[:some], folders[:some])
