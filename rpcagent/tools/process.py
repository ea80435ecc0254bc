"""One guarded process tree, as the daemon sees it: started, listened to, stopped.

Knows: the guard's words, two descriptors, and that nothing here may block the event loop for long or leave a descriptor or
a zombie behind. Does not know: what the output is for, or what a command means.

The guard is started with `subprocess.Popen` and watched through its socket, which ends with it: no thread, no signal
handler, no child watcher. Everything is finished when the guard is: by then nothing of the command is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import msgspec

from rpcagent.tools.guard import GRACE_S, KILL_S

PIECE_BYTES = 64 * 1024
STOP_S = GRACE_S + KILL_S + 1.0
"""How long the guard may take to stop a command, before it is taken to be stuck and is killed itself."""

_GUARD = str(Path(__file__).with_name("guard.py"))
_SAID_BYTES_MAX = 64 * 1024
_LAST_PIECES = 64


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """How it went. `errno`: it was never started. `status` None: nobody knows how it ended, and where `dispatched` is false
    as well, it was never started. `left`: processes that it left running, and that were stopped; `remaining`: those that
    could not be."""

    status: int | None
    errno: int | None
    dispatched: bool
    timed_out: bool
    took_ms: int
    left: int
    remaining: int


class _Said(msgspec.Struct, rename="camel"):
    """All that the guard has said so far, as one object."""

    ready: bool = False
    started: int | None = None
    errno: int | None = None
    ended: int | None = None
    ms: int = 0
    timed_out: bool = False
    left: int | None = None
    remaining: int = 0


class Running:
    """A command under way. To be made inside a running event loop, and always closed.

    `take` gets the output piece by piece; when it answers False the output is closed and the command stopped. Raises
    OSError where nothing was started.
    """

    def __init__(
        self,
        command: tuple[str, str],
        *,
        directory: int,
        environment: dict[str, str],
        limit_ms: int,
        take: Callable[[bytes], bool],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._take = take
        self._said = _Said()
        self._words = b""
        self._finished = anyio.Event()
        with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
            self._output, output = os.pipe()
            ours.callback(os.close, self._output)
            theirs.callback(os.close, output)
            self._control, control = socket.socketpair()
            ours.callback(self._control.close)
            theirs.callback(control.close)
            self._guard = subprocess.Popen(  # noqa: S603
                [sys.executable, "-I", "-S", _GUARD, str(limit_ms), str(directory), *command],
                stdin=control.fileno(),
                stdout=output,
                stderr=output,
                env=environment,
                pass_fds=(directory,),
                start_new_session=True,
            )
            ours.pop_all()
        os.set_blocking(self._output, False)
        self._control.setblocking(False)
        self._reading = True
        self._loop.add_reader(self._output, self._on_output)
        self._loop.add_reader(self._control, self._on_control)

    async def wait(self) -> Ended:
        """Returns when nothing is left of the command. Cancelled: stops it, and lets the cancellation through, unless the
        command had ended before."""
        try:
            await self._finished.wait()
        except anyio.get_cancelled_exc_class():
            if not self._finished.is_set():
                self._on_control()  # what the guard has said up to now
            known = self._said.ended is not None or self._said.errno is not None
            with anyio.CancelScope(shield=True):
                await self.stop()
                await self._take_leave()
            if not known:
                raise
        else:
            with anyio.CancelScope(shield=True):
                await self._take_leave()
        said = self._said
        return Ended(
            status=said.ended,
            errno=said.errno,
            dispatched=said.ready,
            timed_out=said.timed_out,
            took_ms=said.ms,
            left=said.left or 0,
            remaining=said.remaining,
        )

    async def stop(self) -> None:
        """Returns when nothing is left of it, as far as anyone can see to that, and soon."""
        self._ask_to_stop()
        with anyio.move_on_after(STOP_S):
            await self._finished.wait()

    def close(self) -> None:
        """Gives back all that is held. Where the guard is still there, that ends it and its command, at once."""
        self._end_output()
        self._loop.remove_reader(self._control)
        self._control.close()
        if self._guard.returncode is None:
            self._kill()
            self._guard.wait()

    async def _take_leave(self) -> None:
        """The rest of the output, and the guard's own end, which is a moment away once it has closed its socket."""
        for _ in range(_LAST_PIECES):  # bounded, for someone may hold the other end of the pipe who cannot be stopped
            if not self._reading or not self._on_output():
                break
        self._end_output()
        for _ in range(1_000):
            if not self._finished.is_set() or self._guard.poll() is not None:
                break
            await anyio.sleep(0.001)
        if self._said.left is None and self._said.errno is None:
            self._kill()

    def _on_output(self) -> bool:
        """Takes one piece. False: there is none now."""
        try:
            piece = os.read(self._output, PIECE_BYTES)
        except BlockingIOError:
            return False
        if not piece:
            self._end_output()
        elif not self._take(piece):
            self._end_output()  # the next write of whoever still writes is an error
            self._ask_to_stop()
        return True

    def _on_control(self) -> None:
        try:
            words = self._control.recv(_SAID_BYTES_MAX)
        except BlockingIOError:
            return
        except OSError:
            words = b""
        if not words:
            self._loop.remove_reader(self._control)
            self._finished.set()
            return
        *lines, self._words = (self._words + words).split(b"\n")
        for line in lines:
            for name, value in msgspec.json.decode(line, type=dict[str, Any]).items():
                setattr(self._said, _FIELDS[name], value)

    def _ask_to_stop(self) -> None:
        with contextlib.suppress(OSError):
            self._control.send(b"\n")

    def _end_output(self) -> None:
        if self._reading:
            self._reading = False
            self._loop.remove_reader(self._output)
            os.close(self._output)

    def _kill(self) -> None:
        """The guard is dead before its time, or stuck: what can be found without it is the command's group."""
        self._guard.kill()
        if self._said.started is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._said.started, signal.SIGKILL)


_FIELDS = {field.encode_name: field.name for field in msgspec.structs.fields(_Said)}
