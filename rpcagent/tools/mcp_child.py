"""A server's process: its descriptors, what it writes, what it is told, and its end.

Knows: pipes of which nobody else holds our ends, lines of a bounded size, and how a process group is ended. Does not
know: JSON, the protocol, or when a server is wanted.

The pipes are ours, not a library's, because two things must be known exactly: how much is held for a server that does
not read or does not stop writing, and whether a single byte of a request has left, which is the line between a call that
did nothing and one that nobody can tell about.

A process that ends is noticed before it is collected, so that its group can still be named when it is killed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import anyio
import anyio.lowlevel

READ_BYTES = 64 * 1024
LINE_BYTES = 8 * 1024 * 1024
LINE_HEAD = 256
FLOOD_BYTES = 64 * 1024 * 1024
"""Without an end of line, this is no server any more."""
UNASKED_BYTES = 4 * 1024 * 1024
"""What a server may write at full speed without answering anything; then it is read slowly, so that it takes no more of
the processor than it is worth. Within a line it is not: one without end is to be known soon."""
SLOWLY_S = 0.01
SLOWLY_MOST_S = 1.0
HELD_BYTES = 4 * 1024 * 1024
REPLY_BYTES = 64 * 1024
EXIT_POLL_S = 0.1
KILLED_S = 1.0
NOTE_BYTES = 2_048
NOTES_AT_ONCE = 50

_GUARD = str(Path(__file__).with_name("mcp_guard.py"))


class CannotStart(Exception):
    """There is no process. The text is for a person."""


class Overlong(NamedTuple):
    """A line of more than LINE_BYTES: how it began, and how long it was."""

    head: bytes
    size: int


class Flood(Exception):
    """More than FLOOD_BYTES without an end of line."""


class Lines:
    """Bytes into lines; holds at most one line, and of an overlong one its beginning only."""

    def __init__(self, most: int = LINE_BYTES, flood: int = FLOOD_BYTES) -> None:
        self._most, self._flood = most, flood
        self._parts: list[bytes] = []
        self._head = b""
        self._size = 0

    def feed(self, data: bytes) -> Iterator[bytes | Overlong]:
        """The lines that end in `data`. Raises Flood."""
        *ends, rest = data.split(b"\n")
        for end in ends:
            self._add(end)
            size, self._size = self._size, 0
            yield b"".join(self._parts) if size <= self._most else Overlong(self._head, size)
            self._parts, self._head = [], b""
        if rest:
            self._add(rest)

    def _add(self, part: bytes) -> None:
        self._size += len(part)
        if len(self._head) < LINE_HEAD:
            self._head += part[: LINE_HEAD - len(self._head)]
        if self._size <= self._most:
            self._parts.append(part)
        else:
            self._parts.clear()
        if self._size > self._flood:
            raise Flood


class _Frame:
    """`request`: its id, where somebody waits for an answer."""

    def __init__(self, data: bytes, request: int | None) -> None:
        self.rest = memoryview(data)
        self.request = request
        self.begun = False


class Outbox:
    """What the server is told, in order, written as far as it reads, and bounded."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._frames: deque[_Frame] = deque()
        self._held = 0
        self._begun: set[int] = set()
        self._work = anyio.Event()
        self._room = anyio.Event()
        self._room.set()
        self.broken = False

    async def put(self, data: bytes, request: int | None) -> bool:
        """Accepts a request, when there is room for it; the server need not have read it. False: nobody reads."""
        while self._held > HELD_BYTES and not self.broken:
            self._room = anyio.Event()
            await self._room.wait()
        return self._add(_Frame(data, request))

    def put_if_room(self, data: bytes, most: int = REPLY_BYTES) -> None:
        """Accepts what nobody waits for, or drops it."""
        if self._held <= most:
            self._add(_Frame(data, None))

    def taken_back(self, request: int) -> bool:
        """Whether not a byte of the request has left; then none ever will."""
        if request in self._begun:
            self._begun.discard(request)
            return False
        for frame in self._frames:
            if frame.request == request:
                self._frames.remove(frame)
                self._held -= len(frame.rest)
                break
        return True

    async def write(self) -> None:
        """Writes until nobody reads any more, or for as long as it is let."""
        while not self.broken:
            self._pump()
            if not self._frames:
                self._work = anyio.Event()
                await self._work.wait()
            elif not self.broken:
                await anyio.wait_writable(self._descriptor)

    def close(self) -> None:
        """What was not begun will never be."""
        self.broken = True
        self._frames.clear()
        self._held = 0
        self._room.set()
        self._work.set()

    def _add(self, frame: _Frame) -> bool:
        if self.broken:
            return False
        self._frames.append(frame)
        self._held += len(frame.rest)
        if self._frames[0] is frame:
            self._pump()
        self._work.set()
        return frame.begun or not self.broken

    def _pump(self) -> None:
        try:
            while self._frames:
                frame = self._frames[0]
                count = os.write(self._descriptor, frame.rest)
                if not frame.begun and frame.request is not None:
                    self._begun.add(frame.request)
                frame.begun = True
                frame.rest = frame.rest[count:]
                self._held -= count
                if not frame.rest:
                    self._frames.popleft()
        except BlockingIOError:
            pass
        except OSError:
            self.close()
        if self._held <= HELD_BYTES:
            self._room.set()


class Notes:
    """Lines that a server writes for people: given on as they come, but never faster than anybody would read them."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._left = NOTES_AT_ONCE
        self.dropped = 0
        self.last = ""

    def add(self, line: bytes | Overlong) -> None:
        raw = line.head if isinstance(line, Overlong) else line
        text = raw[:NOTE_BYTES].decode("utf-8", "replace").rstrip()
        if not text:
            return
        self.last = text
        if self._left <= 0:
            self.dropped += 1
            return
        self._left -= 1
        self._tell(text)

    async def refill(self) -> None:
        """Once a second; what was left out meanwhile is counted in a line of its own."""
        while True:
            await anyio.sleep(1.0)
            dropped, self.dropped = self.dropped, 0
            self._left = NOTES_AT_ONCE
            if dropped:
                self._tell(f"[{dropped} more lines]")


class Child:
    """One process, leader of its own group and session, with a watcher that outlives neither it nor us for long."""

    def __init__(self, command: tuple[str, ...], env: Mapping[str, str], folder: str) -> None:
        """Starts it. Blocks for some milliseconds. Raises CannotStart."""
        program = os.path.join(folder, command[0]) if os.sep in command[0] else command[0]  # noqa: PTH118
        if shutil.which(program, path=env.get("PATH")) is None:
            raise CannotStart(f"there is no program {command[0]!r} that can be run")
        theirs_in, self._input = os.pipe2(os.O_CLOEXEC)
        self.output, theirs_out = os.pipe2(os.O_CLOEXEC)
        self.errors, theirs_err = os.pipe2(os.O_CLOEXEC)
        lifeline, self._lifeline = os.pipe2(os.O_CLOEXEC)
        theirs = (theirs_in, theirs_out, theirs_err, lifeline)
        self._ours = [self._input, self.output, self.errors, self._lifeline]
        for descriptor in self._ours:
            os.set_blocking(descriptor, False)
        try:
            self._process = subprocess.Popen(  # noqa: S603  (the command is the caller's own)
                [sys.executable, "-I", "-S", _GUARD, str(lifeline), *command],
                stdin=theirs_in,
                stdout=theirs_out,
                stderr=theirs_err,
                pass_fds=(lifeline,),
                cwd=folder,
                env=dict(env),
                start_new_session=True,
            )
        except OSError as error:
            self._close_all()
            raise CannotStart(f"no process could be made in {folder}: {os.strerror(error.errno or 0)}") from None
        finally:
            for descriptor in theirs:
                os.close(descriptor)
        self.pid = self._process.pid
        self._exited = anyio.Event()

    @property
    def input(self) -> int:
        return self._input

    def how_it_ended(self) -> str:
        """`exit code 3` or `signal 9`; empty while it goes on. Only before `close`."""
        end = _end_of(self.pid)
        if end is None:
            return ""
        return f"{'exit code' if end.si_code == os.CLD_EXITED else 'signal'} {end.si_status}"

    async def exited(self) -> None:
        """Returns when the process has ended; it is not collected yet."""
        if self._exited.is_set():
            return
        try:
            watch = os.pidfd_open(self.pid)
        except OSError:
            while _end_of(self.pid) is None:  # noqa: ASYNC110  (this kernel tells nobody)
                await anyio.sleep(EXIT_POLL_S)
        else:
            try:
                await anyio.wait_readable(watch)
            finally:
                os.close(watch)
        self._exited.set()

    def end_input(self) -> None:
        """Tells the server that nothing more will come."""
        if self._input in self._ours:
            self._ours.remove(self._input)
            os.close(self._input)

    async def stop(self, input_s: float, term_s: float) -> None:
        """Ends the process and all of its group: by the end of its input, then asked, then killed. Nothing may read or
        write the descriptors any more, except that someone should go on emptying them."""
        try:
            self.end_input()
            with anyio.move_on_after(input_s):
                await self.exited()
            if not self._exited.is_set():
                self._signal(signal.SIGTERM)
                with anyio.move_on_after(term_s):
                    await self.exited()
        finally:
            self._signal(signal.SIGKILL)
            with anyio.CancelScope(shield=True), anyio.move_on_after(KILLED_S):
                await self.exited()

    def close(self) -> None:
        """Collects the process, if it has ended, and releases the descriptors; that kills whatever is left."""
        self._signal(signal.SIGKILL)
        self._process.poll()
        self._close_all()

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        if self._process.returncode is None:  # once it is collected, its number may be another's
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)

    def _close_all(self) -> None:
        for descriptor in self._ours:
            os.close(descriptor)
        self._ours.clear()


def _end_of(pid: int) -> os.waitid_result | None:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)


async def read_lines(descriptor: int, lines: Lines, heard: Callable[[bytes | Overlong], bool]) -> None:
    """Gives each line to `heard`, which says whether it was asked for, until the end or for as long as it is let.

    Raises Flood.
    """
    unasked, owed_s = 0, 0.0
    while True:
        await anyio.wait_readable(descriptor)
        data = _read(descriptor)
        if data is None:
            continue
        if not data:
            return
        unasked += len(data)
        owed_s += SLOWLY_S if unasked > UNASKED_BYTES else 0.0
        ended = False
        for line in lines.feed(data):
            ended = True
            if heard(line):
                unasked, owed_s = 0, 0.0
        if ended and owed_s:
            await anyio.sleep(min(owed_s, SLOWLY_MOST_S))
            owed_s = 0.0


def read_rest(descriptor: int, lines: Lines, heard: Callable[[bytes | Overlong], bool]) -> None:
    """What an ended process had still written; whoever inherited its pipe is not waited for. Raises Flood."""
    left = LINE_BYTES
    while left > 0 and (data := _read(descriptor)):
        left -= len(data)
        for line in lines.feed(data):
            heard(line)


async def discard(descriptor: int) -> None:
    """Empties the pipe, so that a server which is to end is not held up by what it still wants to say."""
    while _read(descriptor) != b"":
        await anyio.wait_readable(descriptor)
        await anyio.lowlevel.checkpoint()


def _read(descriptor: int) -> bytes | None:
    """None: there is nothing now; empty: there will be nothing any more."""
    try:
        return os.read(descriptor, READ_BYTES)
    except BlockingIOError:
        return None
    except OSError:
        return b""
