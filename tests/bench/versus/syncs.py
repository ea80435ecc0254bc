"""How often processes ask the kernel to make something durable, counted by strace from outside.

The word of a system about itself is not taken for it. Without strace nothing is counted.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

CALLS = ("fsync", "fdatasync", "syncfs", "sync_file_range", "msync")
ATTACH_S = 10


class Counted:
    """`syncs` is set when the block of `counted` has ended; None: not counted."""

    syncs: int | None = None


@contextlib.contextmanager
def counted(pids: Sequence[int], report: Path) -> Iterator[Counted]:
    """Counts the calls of these processes, all their threads and what they start, while the block runs. `report` is a file
    that is written and removed."""
    seen = Counted()
    strace = shutil.which("strace")
    if strace is None:
        yield seen
        return
    command = [strace, "-f", "-c", "-e", f"trace={','.join(CALLS)}", "-o", str(report)]
    for pid in pids:
        command += ["-p", str(pid)]
    tracer = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        if _attached(tracer, pids):
            yield seen
            tracer.send_signal(signal.SIGINT)
            tracer.wait()
            seen.syncs = syncs_in(report.read_text())
        else:
            yield seen
    finally:
        tracer.kill()
        tracer.wait()
        report.unlink(missing_ok=True)


def _attached(tracer: subprocess.Popen[bytes], pids: Sequence[int]) -> bool:
    """Waits until every thread of the processes is traced. False: this user may not trace, or not in time."""
    until = time.monotonic() + ATTACH_S
    while tracer.poll() is None and time.monotonic() < until:
        threads = [thread for pid in pids for thread in Path(f"/proc/{pid}/task").iterdir()]
        if all("TracerPid:\t0\n" not in (thread / "status").read_text() for thread in threads):
            return True
        time.sleep(0.01)
    return False


def syncs_in(report: str) -> int:
    """The sum of the calls in what `strace -c` writes: `% time, seconds, usecs/call, calls, [errors,] syscall`."""
    rows = [line.split() for line in report.splitlines()]
    return sum(int(row[3]) for row in rows if row and row[-1] in CALLS)
