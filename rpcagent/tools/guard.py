"""The program that stands between the daemon and one shell command: it starts the command, and outlives it.

Knows: how to find every process that came from the command and to end it, and that it must do so when the time is up, when
the daemon asks, and when the daemon is gone, however it went. Does not know: what is printed (the command writes straight
into the daemon's pipe), results, or why. Standard library only, and little of it: it is started for every command.

Run as `guard.py LIMIT_MS CWD_FD SHELL COMMAND` with descriptor 0 one end of a socket pair, and 1 and 2 the command's output.
It says JSON lines on the socket: `{"ready"}` before anything is started, `{"started": pid}` just before the command is;
`{"errno"}` where it could not be; `{"ended": wait status, "ms", "timedOut"}` when the command itself has ended; at last
`{"left", "remaining"}`, when nothing of it is left. Any byte from the socket asks it to stop the command, and so does the
end of the socket.

Who dies by what:

- The command leads a session and process group of its own. It gets SIGTERM, and SIGKILL after a grace time.
- What it started is found through its parents. On Linux the guard adopts orphans (subreaper), so that neither another
  session, nor a second fork, nor the end of the command itself hides a process. Elsewhere only the group is found.
- The command dies with the guard (PDEATHSIG, Linux), so SIGKILL of the guard ends it as well; what the command started
  does not, and this is the one hole. Nor can what runs as another user (sudo) be ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import time
from typing import NoReturn

CONTROL = 0
LINGER_S = 0.3
"""How long what the command left running may go on after it: it may be about to end, with the last of the output."""
GRACE_S = 1.0
KILL_S = 2.0

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_SIGNALS_THAT_END = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


class _Guard:
    def __init__(self, limit_ms: int) -> None:
        self._limit_s = limit_ms / 1_000
        self._prctl = _find_prctl()
        self._adopts = self._prctl is not None and self._prctl(_PR_SET_CHILD_SUBREAPER, 1) == 0
        self._command = 0
        self._began = 0.0
        self._ended = self._timed_out = self._asked = self._deaf = False
        self._left = 0
        self._wake, wake = os.pipe()
        for end in (self._wake, wake):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        for number in _SIGNALS_THAT_END:
            signal.signal(number, signal.SIG_IGN)

    def run(self, directory: int, shell: str, command: str) -> None:
        self._tell(ready=True)
        errno = self._start(directory, shell, command)
        if errno:
            self._tell(errno=errno)
            return
        self._wait_for_end()
        if not self._ended or self._alive():
            self._stop()
        self._tell(left=self._left, remaining=len(self._family()) if self._alive() else 0)

    # Starting

    def _start(self, directory: int, shell: str, command: str) -> int:
        """Starts the command. 0, or the number of the error that kept it from being started."""
        trouble, report = os.pipe()
        try:
            os.fchdir(directory)
            os.close(directory)
            guard = os.getpid()
            self._began = time.monotonic()
            self._command = os.fork()
        except OSError as error:
            return error.errno or 1
        if not self._command:
            self._become(guard, shell, command, report)
        os.close(report)
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 1)  # the end of the output is the end of the command's copies
        os.dup2(null, 2)
        said = os.read(trouble, 16)
        os.close(trouble)
        return int(said) if said else 0

    def _become(self, guard: int, shell: str, command: str, report: int) -> NoReturn:
        """In the child: nothing of ours but the output is passed on, and no signal is ignored or held back.

        It says itself who it is, and before it is the command: were the guard to say it, the command could kill it first.
        """
        try:
            os.setsid()
            if self._prctl is not None:
                self._prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != guard:  # it died before that
                os._exit(127)
            self._tell(started=os.getpid())
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            for number in signal.valid_signals():
                if signal.getsignal(number) is signal.SIG_IGN:
                    signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, ())
            os.execv(shell, [shell, "-c", "--", command])  # noqa: S606
        except OSError as error:
            os.write(report, str(error.errno or 1).encode())
        finally:
            os._exit(127)

    # Waiting

    def _wait_for_end(self) -> None:
        """Returns when the command and all that came from it has ended, or has to be ended."""
        limit = self._began + self._limit_s
        while not self._asked:
            if self._ended and not self._alive():
                return
            in_time = self._listen(limit)
            if self._reap():
                limit = min(limit, time.monotonic() + LINGER_S)
            elif not in_time:
                break
        self._timed_out = not self._asked and not self._ended
        self._left = len(self._family()) if self._ended else 0

    def _listen(self, until: float) -> bool:
        """Waits for a child's end or for the daemon. False: the time is up."""
        left_s = until - time.monotonic()
        if left_s <= 0:
            return False
        heard, _, _ = select.select([self._wake] if self._deaf else [self._wake, CONTROL], (), (), left_s)
        if self._wake in heard:
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake, 4_096)
        if CONTROL in heard:
            self._asked = self._deaf = True
        return True

    def _reap(self) -> bool:
        """Takes leave of the dead. True: the command itself was among them."""
        command = False
        with contextlib.suppress(ChildProcessError):
            while (dead := os.waitpid(-1, os.WNOHANG))[0]:
                if dead[0] == self._command:
                    command = self._ended = True
                    took_ms = round((time.monotonic() - self._began) * 1_000)
                    self._tell(ended=dead[1], ms=took_ms, timedOut=self._timed_out)
        return command

    def _alive(self) -> bool:
        if self._adopts:
            try:
                os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return False
            return True
        try:
            os.killpg(self._command, 0)
        except ProcessLookupError:
            return not self._ended
        except PermissionError:
            pass
        return True

    # Ending

    def _stop(self) -> None:
        self._signal(signal.SIGTERM)
        self._signal(signal.SIGCONT)
        if self._gone_within(GRACE_S):
            return
        end = time.monotonic() + KILL_S
        while time.monotonic() < end:  # again and again: a process may have been born between the look and the signal
            self._signal(signal.SIGKILL)
            if self._gone_within(0.02):
                return

    def _gone_within(self, seconds: float) -> bool:
        until = time.monotonic() + seconds
        self._reap()
        while self._alive():
            if not self._listen(until):
                return False
            self._reap()
        return True

    def _signal(self, number: int) -> None:
        """To whole groups: that reaches also what is being forked at this very moment."""
        groups = {group for _, group in self._family()}
        if not self._adopts or not self._ended:
            groups.add(self._command)
        for group in groups - {os.getpgrp()}:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, number)

    def _family(self) -> list[tuple[int, int]]:
        """Process and group of all that came from the command and is not dead. Needs /proc; without it: nobody."""
        children: dict[int, list[tuple[int, int, bool]]] = {}
        try:
            names = [name for name in os.listdir("/proc") if name.isdigit()]  # noqa: PTH208  (starts quicker)
        except OSError:
            return []
        for name in names:
            try:
                with open(f"/proc/{name}/stat", "rb") as stream:  # noqa: PTH123
                    state, parent, in_group = stream.read().rpartition(b")")[2].split()[:3]
            except (OSError, ValueError):  # gone meanwhile
                continue
            children.setdefault(int(parent), []).append((int(name), int(in_group), state in b"ZX"))
        found: list[tuple[int, int]] = []
        todo = [os.getpid()]
        while todo:
            for process, group, dead in children.pop(todo.pop(), []):
                todo.append(process)
                if not dead:
                    found.append((process, group))
        return found

    def _tell(self, **said: object) -> None:
        with contextlib.suppress(OSError):  # the daemon is gone: its end of the socket says so as well
            os.write(CONTROL, json.dumps(said).encode() + b"\n")


class _Prctl:
    def __init__(self) -> None:
        import ctypes

        self._call = ctypes.CDLL(None).prctl

    def __call__(self, option: int, value: int) -> int:
        return int(self._call(option, value, 0, 0, 0))


def _find_prctl() -> _Prctl | None:
    if sys.platform != "linux":
        return None
    try:
        return _Prctl()
    except (ImportError, OSError, AttributeError):
        return None


def main(limit_ms: str, directory: str, shell: str, command: str) -> None:
    _Guard(int(limit_ms)).run(int(directory), shell, command)


if __name__ == "__main__":
    main(*sys.argv[1:])
