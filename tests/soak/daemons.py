"""The daemons that the soak kills: forks of the real one, with thresholds so small that checkpoints, parking and deletion
never rest.

Knows: how a daemon is made and ended, and what to plant in it. Does not know: what is asked of it.
As a program it is the process that forks them: `python -m tests.soak.daemons DESCRIPTOR [BUG ...]`.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from rpcagent.journal import archive
from rpcagent.journal.tombstones import Tombstones
from rpcagent.runs import roster
from rpcagent.runs.keeper import Keeper
from rpcagent.runs.ports import Filed
from rpcagent.runs.summary import Summary
from tests.process import nursery
from tests.process.wire_driver import ROOT, WAIT_S

IMPORTED_LATE = ("cryptography.hazmat.primitives.ciphers.aead",)


GRACE_S = 5.0
"""How long a large output stays to which no run refers. Much longer than a collection takes, however busy the machine is."""


class Gone(Exception):
    """The daemon ended, and with it what was asked last."""


class Forge(nursery.Nursery):
    """A nursery whose daemons keep no run at rest in memory; `planted`: the names of bugs that they have."""

    def __init__(self, planted: tuple[str, ...] = ()) -> None:
        self._mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-m", "tests.soak.daemons", str(theirs.fileno()), *planted]
            self._process = subprocess.Popen(command, cwd=ROOT, pass_fds=(theirs.fileno(),))
        self._one_at_a_time = threading.Lock()

    def life(self, store: Path, *options: str, rig: tuple[str, ...] = (), log: Path) -> Life:
        return Life(self, store, *options, rig=rig, log=log)


class Life(nursery.ForkedDaemon):
    """A daemon that may be gone at any moment: whatever is asked of it then raises Gone."""

    def write(self, data: bytes) -> None:
        try:
            super().write(data)
        except OSError as error:
            if error.errno == errno.EPIPE:
                raise Gone from error
            raise

    def end(self) -> int:
        """In order, by the end of its input; its exit code."""
        self.end_input()
        return self.exit_code()

    def _fill(self, timeout: float) -> bool:
        if not super()._fill(timeout):
            raise Gone
        return True


class Killer:
    """`with Killer(pid, seconds):` SIGKILL after that time, wherever the process is then."""

    def __init__(self, pid: int, delay: float) -> None:
        self._process = os.pidfd_open(pid)
        self._timer = threading.Timer(delay, self._kill)
        self._timer.daemon = True

    def __enter__(self) -> None:
        self._timer.start()

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        self._timer.join(WAIT_S)
        os.close(self._process)

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._process, signal.SIGKILL)


# Bugs


def _forget_tombstones() -> None:
    """What was deleted stands in no file: once the log is cut, its key is free again."""
    Tombstones.next_file = lambda _self, _existing: None  # type: ignore[method-assign]


def _forget_the_live() -> None:
    """The manifest names only the live runs that have something new."""
    original = Keeper._live

    def live(keeper: Keeper, filed: list[Filed]) -> tuple[tuple[str, Summary, bytes], ...]:
        fresh = {one.run_id for one in filed}
        return tuple(row for row in original(keeper, filed) if row[0] in fresh)

    Keeper._live = live  # type: ignore[method-assign]


PLANTED: dict[str, Callable[[], None]] = {
    "tombstones are not kept": _forget_tombstones,
    "summaries lack live runs": _forget_the_live,
}


def main() -> None:
    roster.RESIDENT = 0
    archive.GRACE_S = GRACE_S
    for name in sys.argv[2:]:
        PLANTED[name]()
    for name in IMPORTED_LATE:
        importlib.import_module(name)
    nursery.main()


if __name__ == "__main__":
    main()
