"""What `rigged_daemon` can be told about its disk and its clock: when to die, what fails, what is slow, what time it is.

Knows: the seam to the file system (`RealDisk`), and that every method of it that is not known to only read may change the
disk. Does not know: what a test makes of it. Each rig leaves the rest of the daemon as it is.

`--calls FILE`: a line for each mutating call, before it. `--kill-before N`: SIGKILL instead of the N-th of them.
`--fail CALL:ERRNO[:PREFIX]` with `--while FILE`: as long as FILE is there, such a call on a name that begins with PREFIX
fails; of a write, half of the data is in the file by then. `--no-sync CALL`: it makes nothing durable, and nobody is told.
`--fill FOLDER`: each end of the log is met once by a file system without room: FOLDER, on the same one, gets a file that
takes all that is left. `--retry MS`: what could not be recorded, opened, or moved, is tried again after so long.
`--segment-bytes N`: a segment of the log takes no more. `--checkpoint-every N`: the log is moved to the files of runs when it
has so many records. `--tidy-every MS`: what retention lets go is deleted so often, and
a daemon with nothing to do moves all it has. `--slow-sync MS`: each sync of a log segment takes so much longer.
`--wall-clock FILE`: the wall clock is off by the seconds that stand in FILE, as often as that changes.
`--store-id ID`: a new store gets this one, and so all names in it are known beforehand.
`--trace JSON`: strace with these arguments is attached before the store is touched; with `--trace-open` after it was opened.
"""

from __future__ import annotations

import argparse
import ctypes
import errno
import itertools
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from datetime import datetime, timedelta, tzinfo
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rpcagent import daemon, store
from rpcagent.journal.commit import GroupCommit
from rpcagent.journal.disk import RealDisk
from rpcagent.journal.wal import Wal
from rpcagent.runs import engine, keeper

READS = {"names", "exists", "read", "read_at", "size", "release", "close", "disarm"}
LOG = "wal/"
FILLER = "filler"

Call = Callable[..., Any]
_kept: list[Any] = []


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--calls", type=Path)
    parser.add_argument("--kill-before", type=int)
    parser.add_argument("--fail", action="append", default=[])
    parser.add_argument("--while", dest="marker", type=Path)
    parser.add_argument("--no-sync", action="append", default=[])
    parser.add_argument("--fill", type=Path)
    parser.add_argument("--retry", type=int, metavar="MS")
    parser.add_argument("--segment-bytes", type=int)
    parser.add_argument("--checkpoint-every", type=int, metavar="RECORDS")
    parser.add_argument("--tidy-every", type=float, metavar="MS")
    parser.add_argument("--slow-sync", type=float, metavar="MS")
    parser.add_argument("--wall-clock", type=Path)
    parser.add_argument("--store-id")
    parser.add_argument("--trace", type=json.loads)
    parser.add_argument("--trace-open", action="store_true")


def set_up(options: argparse.Namespace) -> None:
    """The rigs that nearest to the disk come first; the one that counts and kills is around them all."""
    for name in options.no_sync:
        _wrap(name, lambda _original, *_args: None)
    if options.slow_sync is not None:
        slow_sync(options.slow_sync)
    for what in options.fail:
        fail(options.marker, *what.split(":"))
    if options.fill is not None:
        fill(options.fill)
    if options.retry is not None:
        assert engine.RETRY_WRITE_MS > 0 and daemon.LOCK_RETRY_S > 0
        engine.RETRY_WRITE_MS, daemon.LOCK_RETRY_S = options.retry, options.retry / 1_000
        assert keeper.AGAIN_S > 0
        keeper.AGAIN_S = options.retry / 1_000
    if options.checkpoint_every is not None:
        assert keeper.TAIL_RECORDS > 0
        keeper.TAIL_RECORDS = options.checkpoint_every
    if options.tidy_every is not None:
        assert min(keeper.IDLE_S, keeper.TIDY_S, keeper.FIRST_TIDY_S) > 0
        keeper.IDLE_S = keeper.TIDY_S = keeper.FIRST_TIDY_S = options.tidy_every / 1_000
        keeper.IDLE_RECORDS = 1
    if options.segment_bytes is not None:
        defaults = Wal.open.__func__.__kwdefaults__  # type: ignore[attr-defined]
        assert "segment_bytes" in defaults
        defaults["segment_bytes"] = options.segment_bytes
    if options.calls is not None or options.kill_before is not None:
        count(options.calls, options.kill_before)
    if options.wall_clock is not None:
        shift_clock(options.wall_clock)
    if options.store_id is not None:
        store.secrets = SimpleNamespace(token_hex=lambda _bytes: options.store_id)  # type: ignore[assignment]
    if options.trace is not None:
        trace(options.trace, opened=options.trace_open)


def _wrap(name: str, around: Callable[..., Any]) -> None:
    """`around(original, disk, *arguments)` in place of the method."""
    original: Call = getattr(RealDisk, name)

    def wrapped(disk: RealDisk, *args: Any, **named: Any) -> Any:
        return around(original, disk, *args, **named)

    setattr(RealDisk, name, wrapped)


def mutating() -> list[str]:
    """All methods of the seam that may change the disk: also those that come later."""
    return [name for name, found in vars(RealDisk).items() if callable(found) and not name.startswith("_")
            and name not in READS]  # fmt: skip


def count(calls: Path | None, kill_before: int | None) -> None:
    numbers = itertools.count(1)
    told = os.open(calls, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600) if calls else -1

    def counted(name: str) -> Callable[..., Any]:
        def around(original: Call, disk: RealDisk, *args: Any, **named: Any) -> Any:
            number = next(numbers)
            if told >= 0:
                os.write(told, f"{name} {args[0] if args else ''}\n".encode())
            if number == kill_before:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(disk, *args, **named)

        return around

    for name in mutating():
        _wrap(name, counted(name))


def fail(marker: Path, call: str, code: str, prefix: str = "") -> None:
    number: int = getattr(errno, code)

    def around(original: Call, disk: RealDisk, name: Any, *args: Any) -> Any:
        names = [name] if isinstance(name, str) else [*name, *args[0]]  # or files, and folders
        if not any(one.startswith(prefix) for one in names) or not marker.exists():
            return original(disk, name, *args)
        if call == "write":
            offset, data = args
            original(disk, name, offset, data[: len(data) // 2])
        raise OSError(number, "as told")

    _wrap(call, around)


def fill(folder: Path) -> None:
    met: set[tuple[str, int]] = set()
    filler, draft = folder / FILLER, folder / f"{FILLER}.tmp"

    def around(original: Call, disk: RealDisk, name: str, offset: int, data: bytes) -> None:
        if not (name.startswith(LOG) and name.endswith(".jsonl")) or (name, offset) in met:
            original(disk, name, offset, data)
            return
        # While nobody has made room since an end before, this one is not met: it has its turn when it is tried again.
        again = filler.exists()
        take_all(draft)
        try:
            original(disk, name, offset, data)
        finally:
            if again:
                draft.unlink()
            else:
                met.add((name, offset))
                draft.rename(filler)  # whoever sees it by its name knows that the write was tried

    _wrap("write", around)


def take_all(filler: Path) -> int:
    """Writes the file until the file system takes no more; returns its size in bytes."""
    descriptor = os.open(filler, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    size = 0
    try:
        for block in (1 << 20, 1 << 12, 1 << 8, 1):
            zeros = bytes(block)
            while True:
                try:
                    size += os.write(descriptor, zeros)
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                    break
    finally:
        os.close(descriptor)
    return size


def slow_sync(milliseconds: float) -> None:
    def around(original: Call, disk: RealDisk, name: str) -> None:
        if name.startswith(LOG):
            time.sleep(milliseconds / 1_000)
        original(disk, name)

    _wrap("sync", around)


def shift_clock(file: Path) -> None:
    def off() -> float:
        return float(file.read_text())

    class Shifted(datetime):
        fromisoformat = datetime.fromisoformat  # type: ignore[assignment]

        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
            return datetime.now(tz) + timedelta(seconds=off())

    true_time = time.time
    store.datetime = Shifted  # type: ignore[misc]
    time.time = lambda: true_time() + off()


def trace(arguments: list[str], *, opened: bool) -> None:
    if not opened:
        _attach(arguments)
        return
    original: Call = GroupCommit.__init__

    def begin(journal: GroupCommit, *args: Any, **named: Any) -> None:
        _attach(arguments)
        original(journal, *args, **named)

    GroupCommit.__init__ = begin  # type: ignore[method-assign]


def _attach(arguments: list[str]) -> None:
    ctypes.CDLL(None).prctl(0x59616D61, -1, 0, 0, 0)  # PR_SET_PTRACER: a child may, also where that needs leave
    tracer = subprocess.Popen(
        ["strace", "-f", "-p", str(os.getpid()), *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    assert tracer.stderr is not None
    line = tracer.stderr.readline()  # bounded: it says that it is attached, or why not, and ends
    if b"attached" not in line:
        raise AssertionError(f"strace: {line!r}")
    _kept.append(tracer)  # and with it the pipe that it may write to
