"""Daemons that are forked from a process that has everything imported: real processes, real files, without the start of Python.

For tests that start hundreds of them. What runs is `rigged_daemon`, with or without a rig. A daemon has a session of its own
pipes and its exit code, and dies by SIGKILL like any other; only its parent is the nursery, not the test.

    with Nursery() as nursery, nursery.daemon(store, rig=("--kill-before", "7")) as daemon:
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import itertools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn, Self

from tests.process.wire_driver import ROOT, WAIT_S, Daemon

MOST_BYTES = 1 << 20
IMPORTED_LATE = (
    "anyio._backends._asyncio", "h11", "httpcore", "httpcore._backends.anyio", "httpx", "jmespath", "jsonschema",
    "rpcagent.models.assembly", "rpcagent.models.chat", "rpcagent.models.scripted", "rpcagent.tools.http", "sqlite3",
)  # fmt: skip
"""By a daemon, at the first call that needs it. To know it beforehand only saves time."""


class Nursery:
    """The process that forks. It ends with this object, or with the test's process, whichever is first."""

    def __init__(self) -> None:
        self._mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-m", "tests.process.nursery", str(theirs.fileno())]
            self._process = subprocess.Popen(command, cwd=ROOT, pass_fds=(theirs.fileno(),))
        self._one_at_a_time = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._mine.close()
        self._process.wait(WAIT_S)

    def daemon(self, store: Path, *options: str, rig: tuple[str, ...] = (), log: Path | None = None) -> Daemon:
        """As `Daemon(store, *options, rig=rig, log=log)`, with the folder of its log as its workspace."""
        return ForkedDaemon(self, store, *options, rig=rig, log=log)

    def fork(self, argv: list[str], descriptors: tuple[int, ...]) -> None:
        """Standard input, output and error of the new process, and where its pid and its exit code are written."""
        with self._one_at_a_time:
            socket.send_fds(self._mine, [json.dumps(argv).encode()], descriptors)


class ForkedDaemon(Daemon):
    """A `Daemon` whose process is a fork."""

    def __init__(self, nursery: Nursery, store: Path, *options: str, rig: tuple[str, ...], log: Path | None) -> None:
        self.store = store
        self.notes: list[dict[str, Any]] = []
        self.sent: dict[Any, str] = {}
        self._answers: dict[Any, dict[str, Any]] = {}
        self._ids = itertools.count(1)
        self._buffer = self._reports = b""
        self._report_fd = -1
        self.log = log or store.parent / f"{store.name}.log"
        command = [*rig, "--store", str(store), "--workspace", str(self.log.parent), *options]
        self.process: Any = _Forked(nursery, command, self.log)


class _Forked:
    """As much of `subprocess.Popen` as a `Daemon` needs."""

    def __init__(self, nursery: Nursery, argv: list[str], log: Path) -> None:
        their_in, my_out = os.pipe()
        my_in, their_out = os.pipe()
        self._told, their_news = os.pipe()
        their_log = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        given = (their_in, their_out, their_log, their_news)
        nursery.fork(argv, given)
        for descriptor in given:
            os.close(descriptor)
        self.stdin = os.fdopen(my_out, "wb", buffering=0)
        self.stdout = os.fdopen(my_in, "rb", buffering=0)
        self.returncode: int | None = None
        self._news = b""
        self.pid = int(self._line(WAIT_S))

    def _line(self, timeout: float) -> bytes:
        end = time.monotonic() + timeout
        while b"\n" not in self._news:
            if not select.select([self._told], [], [], max(end - time.monotonic(), 0))[0]:
                raise subprocess.TimeoutExpired("a forked daemon", timeout)
            data = os.read(self._told, 100)
            assert data, "the nursery ended"
            self._news += data
        line, _, self._news = self._news.partition(b"\n")
        return line

    def wait(self, timeout: float) -> int:
        if self.returncode is None:
            self.returncode = int(self._line(timeout))
            os.close(self._told)
        return self.returncode

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


# The process that forks


def _be(argv: list[str], descriptors: list[int]) -> NoReturn:
    """The child: a daemon, and nothing of the nursery."""
    from tests.process import rigged_daemon

    for number in range(3):
        os.dup2(descriptors[number], number)
    os.closerange(3, 1_000)
    reports = os.open(os.devnull, os.O_WRONLY)
    code = 1
    try:
        code = rigged_daemon.main(["--report-fd", str(reports), *argv])
    except BaseException:  # noqa: BLE001 - nothing above it must run in the child
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _collect(alive: dict[int, tuple[int, int]], pidfd: int) -> None:
    pid, news = alive.pop(pidfd)
    _, status = os.waitpid(pid, 0)
    with contextlib.suppress(OSError):  # nobody waits any more
        os.write(news, b"%d\n" % os.waitstatus_to_exitcode(status))
    os.close(news)
    os.close(pidfd)


def _share_a_tls_context() -> None:
    """It takes longer to make than all else that a daemon does, and no service of these tests speaks TLS."""
    transport = importlib.import_module("httpx._transports.default")
    context = transport.create_ssl_context()
    transport.create_ssl_context = lambda *_args, **_named: context


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    for name in ("tests.process.rigged_daemon", "rpcagent.daemon", *IMPORTED_LATE):
        importlib.import_module(name)
    _share_a_tls_context()
    gc.freeze()
    alive: dict[int, tuple[int, int]] = {}
    while True:
        ready, _, _ = select.select([control, *alive], [], [])
        for pidfd in ready:
            if pidfd in alive:
                _collect(alive, pidfd)
        if control not in ready:
            continue
        message, descriptors, _, _ = socket.recv_fds(control, MOST_BYTES, 4)
        if not message:
            return
        pid = os.fork()
        if pid == 0:
            _be(json.loads(message), descriptors)
        news = descriptors.pop()
        for descriptor in descriptors:
            os.close(descriptor)
        alive[os.pidfd_open(pid)] = (pid, news)
        os.write(news, b"%d\n" % pid)


if __name__ == "__main__":
    main()
