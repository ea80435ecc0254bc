"""Real disks for tests, small and in trouble: system calls as strace sees them, file systems that are mounted for one test.

Knows: what must be there for each (strace and leave to trace, root and loop devices), and says what is missing; what was
mounted is unmounted whatever happens. Does not know: what a store is, beyond that it is a folder.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

CHANGES = (
    "pwrite64", "pwritev", "pwritev2", "write", "writev", "fdatasync", "fsync", "syncfs", "sync_file_range", "ftruncate",
    "truncate", "fallocate", "rename", "renameat", "renameat2", "unlink", "unlinkat", "rmdir", "link", "linkat", "mkdir",
    "mkdirat", "open", "openat", "creat",
)  # fmt: skip
OPENS = {"open", "openat", "creat"}
_LINE = re.compile(r"(\d+) +(\w+)\((.*)")
_OF_DESCRIPTOR = re.compile(r"\d+<(/[^>]*)>")
_OF_PATH = re.compile(r'"(/[^"]*)"')


@cache
def why_no_strace() -> str:
    """Empty where system calls can be traced and tampered with."""
    if shutil.which("strace") is None:
        return "strace is not installed"
    command = ["strace", "-o", "/dev/null", "-e", "inject=fdatasync:error=EIO:when=1", "true"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    return "" if done.returncode == 0 else f"strace cannot trace here: {done.stderr.strip()[-200:]}"


needs_strace = pytest.mark.skipif(bool(why_no_strace()), reason=why_no_strace())


@dataclass(frozen=True)
class SystemCall:
    """The `number`-th call of this name that one thread makes, of those that have to do with the path."""

    name: str
    path: str
    number: int

    def killing(self) -> list[str]:
        """What strace must be told: SIGKILL comes in its place."""
        inject = f"inject={self.name}:signal=KILL:when={self.number}"
        return ["-o", os.devnull, "-P", self.path, "-e", f"trace={self.name}", "-e", inject]


def recording(file: Path) -> list[str]:
    """What strace must be told to write down all calls that may change a disk."""
    return ["-o", str(file), "-s", "0", "-y", "-e", f"trace={','.join(CHANGES)}"]


def system_calls(record: Path, folder: Path, *, first_thread_only: bool = False) -> list[SystemCall]:
    """Those in the record that may have changed the folder or something in it, in order; where several threads make the
    n-th such call of theirs, the first to do so: it alone would meet what strace is told."""
    found: dict[SystemCall, None] = {}
    numbers: Counter[tuple[str, str, str]] = Counter()
    lines = [call for line in record.read_text().splitlines() if (call := _LINE.match(line)) is not None]
    for thread, name, arguments in (line.groups() for line in lines):
        path = _OF_DESCRIPTOR.match(arguments) or _OF_PATH.search(arguments)
        if path is None or not (path[1] == str(folder) or path[1].startswith(f"{folder}/")):
            continue
        numbers[thread, name, path[1]] += 1
        if first_thread_only and thread != lines[0][1]:
            continue
        if name not in OPENS or "O_CREAT" in arguments or name == "creat":
            found[SystemCall(name, path[1], numbers[thread, name, path[1]])] = None
    return list(found)


@contextlib.contextmanager
def tampered(pid: int, *arguments: str) -> Iterator[None]:
    """`with tampered(pid, "-e", "inject=pwrite64:error=EIO"):`; of all threads that the process has by now."""
    tracer = subprocess.Popen(["strace", "-f", "-o", os.devnull, "-p", str(pid), *arguments], stderr=subprocess.PIPE)
    assert tracer.stderr is not None
    with tracer.stderr as said:
        line = said.readline()  # bounded: it says that it is attached to all threads, or why not, and ends
        assert b"attached" in line, line
        try:
            yield
        finally:
            tracer.terminate()
            tracer.wait(20)


# File systems


def _run(*command: str | Path) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, f"{' '.join(map(str, command))}: {done.stderr.strip()}"


@contextlib.contextmanager
def mounted(place: Path, *arguments: str | Path) -> Iterator[Path]:
    """`mount ARGUMENTS PLACE`; the folder is made. Unmounted at the end, also where something on it is still open."""
    place.mkdir(parents=True, exist_ok=True)
    _run("mount", *arguments, place)
    try:
        yield place
    finally:
        done = subprocess.run(["umount", place], capture_output=True, timeout=60, check=False)
        if done.returncode != 0:
            _run("umount", "-l", place)


def remount(place: Path, options: str) -> None:
    _run("mount", "-o", options, place)


def tmpfs(place: Path, size: int) -> contextlib.AbstractContextManager[Path]:
    """A file system of `size` bytes in memory, with pages of 4 KiB."""
    return mounted(place, "-t", "tmpfs", "-o", f"size={size}", "tmpfs")


def image(file: Path, size: int) -> None:
    """An empty ext4 in a file."""
    with file.open("wb") as made:
        made.truncate(size)
    _run("mkfs.ext4", "-q", "-F", file)


def loop(place: Path, file: Path) -> contextlib.AbstractContextManager[Path]:
    return mounted(place, "-o", "loop", file)


@cache
def why_no_mounts() -> str:
    """Empty where this process may mount a tmpfs, and an ext4 from a file."""
    if os.geteuid() != 0:
        return "only root may mount"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            with tmpfs(folder / "tmpfs", 1 << 16):
                pass
            image(folder / "image", 4 << 20)
            with loop(folder / "ext4", folder / "image"):
                pass
        except (AssertionError, OSError) as error:
            return f"no mounts here: {error}"
    return ""


needs_mounts = pytest.mark.skipif(bool(why_no_mounts()), reason=why_no_mounts())


def until_stopped(pid: int, seconds: float = 30.0) -> None:
    """Returns when no thread of a process that got SIGSTOP runs any more; one that is in a sync comes to its end first."""
    end = time.monotonic() + seconds
    while any(_state(stat) not in {"T", "t"} for stat in Path(f"/proc/{pid}/task").glob("*/stat")):
        assert time.monotonic() < end, "it does not stop"
        time.sleep(0.001)


def _state(stat: Path) -> str:
    return stat.read_text().rpartition(")")[2].split()[0]
