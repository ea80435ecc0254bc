"""The process's standard input and output as a stream of frames: claimed, bounded, and never blocking the event loop.

Knows: descriptors, what each kind of them can do (pipe, socket, terminal, regular file, null device), and how much may
be held in memory while the peer does not read. Does not know: what a frame says.

Written for asyncio on POSIX. `O_NONBLOCK` belongs to an open file description, which the parent and our siblings share,
so it is never set on what we were given: a pipe is opened anew, a socket is asked per call, all else gets a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import queue
import select
import socket
import stat
import threading
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    from rpcagent.transport.framing import Frame, Framer

READ_BYTES = 256 << 10
HIGH_BYTES = 4 << 20
PATIENCE_S = 5.0
FRAMES_PER_RECV = 64
_INBOX_FRAMES_MAX = 4096
_INBOX_BYTES_MAX = 4 << 20
_JOIN_BYTES = 256 << 10
_FIRST_PRIVATE_FD = 3


class Claimed(NamedTuple):
    """Private, close-on-exec duplicates of what were descriptors 0 and 1."""

    read: int
    write: int


def claim() -> Claimed:
    """Take the wire away from descriptors 0 and 1: call it once, before the event loop and before code of others.

    Afterwards 0 is the null device and 1 is standard error, for us and for every child: a stray print cannot put a
    byte between two frames, and a child cannot read the peer's next request. A closed descriptor counts as null.
    """
    read = _duplicate(0, os.O_RDONLY)
    write = _duplicate(1, os.O_WRONLY)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    try:
        os.dup2(2, 1)
    except OSError:
        os.dup2(null, 1)
    if null > 2:
        os.close(null)
    return Claimed(read, write)


def _duplicate(fd: int, flags: int) -> int:
    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _FIRST_PRIVATE_FD)
    except OSError:
        null = os.open(os.devnull, flags)
        try:
            return fcntl.fcntl(null, fcntl.F_DUPFD_CLOEXEC, _FIRST_PRIVATE_FD)
        finally:
            if null != fd:
                os.close(null)


class Wire:
    """One connection. To be made inside a running event loop; all methods belong to that loop's thread.

    Memory is bounded: while more than `high_bytes` wait for the peer to read, nothing more is read from it, `recv` gives
    nothing out, and `room` does not return. A peer that pipelines more than that without reading holds itself up, not us.
    Once it has ended its input there is an end to that: a peer that then takes nothing for `patience_s` is gone.
    """

    def __init__(
        self, claimed: Claimed, framer: Framer, *, high_bytes: int = HIGH_BYTES, patience_s: float = PATIENCE_S
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._framer = framer
        self._high = high_bytes
        self._patience_s = patience_s
        self._taken = 0
        self._inbox: deque[Frame] = deque()
        self._inbox_bytes = 0
        self._queue: deque[bytes] = deque()
        self._head = memoryview(b"")  # what is being written; its sent part is cut off
        self.out_bytes = 0
        """Bytes accepted by `send` that the operating system has not taken yet."""
        self.eof = False
        """The peer has said all it will say. Frames may still wait in `recv`."""
        self.dead = False
        """The peer has closed its reading end: what is sent from now on is dropped. Not an error: work goes on."""
        self._closed = self._congested = self._flush_planned = self._writing = False
        self._input = asyncio.Event()
        self._room = asyncio.Event()
        self._empty = asyncio.Event()
        self._room.set()
        self._empty.set()
        self._reader = _open_reader(self._loop, claimed.read, self._on_bytes)
        self._writer = _open_writer(self._loop, claimed.write)

    # -- reading

    async def recv(self) -> list[Frame]:
        """The next frames, in order and at most `FRAMES_PER_RECV`; [] at the end of input, and from then on."""
        if self._inbox:
            await asyncio.sleep(0)  # a peer that pipelines must not keep all others from their turn
        while not self._closed:
            await self.room()
            if self._inbox or self.eof:
                break
            self._input.clear()
            await self._input.wait()
        count = min(len(self._inbox), FRAMES_PER_RECV)
        frames = [self._inbox.popleft() for _ in range(count)]
        self._inbox_bytes -= _bytes_in(frames)
        self._balance()
        return frames

    def _on_bytes(self, data: bytes) -> None:
        if data:
            frames = self._framer.feed(data)
        else:
            self.eof = True
            frames = self._framer.finish()
        self._inbox.extend(frames)
        self._inbox_bytes += _bytes_in(frames)
        self._balance()
        self._input.set()

    def _balance(self) -> None:
        """Hold the reader while there is too much of anything. The lower mark keeps it from going on and off."""
        if self.out_bytes > self._high:
            self._congested = True
            self._room.clear()
        elif self._congested and self.out_bytes <= self._high // 2:
            self._congested = False
            self._room.set()
        if not self.eof and not self._closed:
            full = len(self._inbox) > _INBOX_FRAMES_MAX or self._inbox_bytes > _INBOX_BYTES_MAX
            self._reader.hold(self._congested or full)

    # -- writing

    async def room(self) -> None:
        """Wait until there is room for one more message. Who is let in first may fill it again: all look anew."""
        while self._congested and not self._closed:
            taken = self._taken
            try:
                async with asyncio.timeout(self._patience_s):
                    await self._room.wait()
            except TimeoutError:
                if self._taken == taken and (self.eof or self._reader.at_end()):
                    self._peer_gone()

    def send(self, message: bytes) -> None:
        """Queue one message. Messages of one turn of the loop leave in as few writes as possible, in order."""
        if self.dead or self._closed:
            return
        data = self._framer.encode(message)
        self._queue.append(data)
        self.out_bytes += len(data)
        self._empty.clear()
        if self.out_bytes > self._high and not self._congested:
            self._balance()
        if not self._flush_planned:
            self._flush_planned = True
            self._loop.call_soon(self._planned_flush)

    def flush(self) -> None:
        """Write now what the peer takes now. Needed only to save the wait for the next turn of the loop."""
        if not self._writing and self.out_bytes and not self._closed:
            self._writing = True
            self._pump()

    async def drained(self) -> None:
        """Wait until the operating system has taken all of it, or the peer is gone."""
        self.flush()
        await self._empty.wait()

    def close(self) -> None:
        """Stop reading and writing at once and release the descriptors. What was not drained is lost."""
        if self._closed:
            return
        self._closed = True
        self._reader.close()
        self._writer.close()
        self._drop_output()
        self._room.set()
        self._input.set()

    def _planned_flush(self) -> None:
        self._flush_planned = False
        self.flush()

    def _pump(self) -> None:
        """Write until all is out or the peer takes no more; the writer calls again when it does."""
        if self._closed:
            return
        try:
            while self.out_bytes:
                if not self._head:
                    self._head = memoryview(self._next_head())
                count = self._writer.write(self._head, self._on_written)
                if count is None:
                    self._balance()
                    return
                self._took(count)
        except OSError:
            self._peer_gone()
        else:
            self._all_out()

    def _on_written(self, count: int | None) -> None:
        """The writer can go on; `count` bytes were written meanwhile, or None: it failed."""
        if self._closed:
            return
        if count is None:
            self._peer_gone()
            return
        self._took(count)
        self._balance()
        self._pump()

    def _took(self, count: int) -> None:
        self._head = self._head[count:]
        self.out_bytes -= count
        self._taken += count

    def _next_head(self) -> bytes:
        first = self._queue.popleft()
        parts, size = [first], len(first)
        while self._queue and size + len(self._queue[0]) <= _JOIN_BYTES:
            parts.append(self._queue.popleft())
            size += len(parts[-1])
        return first if len(parts) == 1 else b"".join(parts)

    def _peer_gone(self) -> None:
        self.dead = True
        self._drop_output()

    def _drop_output(self) -> None:
        self._queue.clear()
        self._head = memoryview(b"")
        self.out_bytes = 0
        self._all_out()

    def _all_out(self) -> None:
        self._writing = False
        self._writer.idle()
        self._empty.set()
        self._balance()


def _bytes_in(frames: list[Frame]) -> int:
    return sum(len(frame) for frame in frames if isinstance(frame, bytes))


# -- descriptors that block: one thread each


class _Blocking:
    """Runs blocking calls in order on one thread. The thread is a daemon: a call that never returns delays no exit."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, daemon=True).start()

    def call(self, work: Callable[[], Callable[[], None]]) -> None:
        """Run `work` on the thread, and what it returns on the loop."""

        def both() -> None:
            then = work()
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits for it
                self._loop.call_soon_threadsafe(then)

        self._calls.put(both)

    def stop(self, last: Callable[[], None]) -> None:
        """Run `last` after all calls, and end."""
        self._calls.put(last)
        self._calls.put(None)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call()


def _wait_for(fd: int, event: int) -> None:
    """Block until a descriptor that someone else has made non-blocking is ready."""
    poll = select.poll()
    poll.register(fd, event)
    poll.poll()


# -- reading


class _PolledReader:
    """Pipe, socket, terminal: read when there is something."""

    def __init__(self, loop: asyncio.AbstractEventLoop, fd: int, on_bytes: Callable[[bytes], None]) -> None:
        self._loop, self._fd, self._on_bytes = loop, fd, on_bytes
        self._held = False
        loop.add_reader(fd, self._ready)

    def _ready(self) -> None:
        try:
            data = os.read(self._fd, READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:  # EIO: the other end of a terminal has gone; ECONNRESET: of a socket
            data = b""
        if not data:
            self._loop.remove_reader(self._fd)
        self._on_bytes(data)

    def hold(self, held: bool) -> None:
        if held and not self._held:
            self._loop.remove_reader(self._fd)
        elif self._held and not held:
            self._loop.add_reader(self._fd, self._ready)
        self._held = held

    def at_end(self) -> bool:
        """The peer has closed its end, whatever is still to be read."""
        poll = select.poll()
        poll.register(self._fd, getattr(select, "POLLRDHUP", 0))
        return bool(poll.poll(0))

    def close(self) -> None:
        self._loop.remove_reader(self._fd)
        os.close(self._fd)


class _ThreadReader:
    """Regular file, null device: the kernel does not tell when they can be read."""

    def __init__(self, loop: asyncio.AbstractEventLoop, fd: int, on_bytes: Callable[[bytes], None]) -> None:
        self._fd, self._on_bytes = fd, on_bytes
        self._thread = _Blocking(loop)
        self._held = self._reading = self._closed = False
        self._read()

    def _read(self) -> None:
        self._reading = True
        self._thread.call(self._blocking_read)

    def _blocking_read(self) -> Callable[[], None]:
        while True:
            try:
                data = os.read(self._fd, READ_BYTES)
            except BlockingIOError:
                _wait_for(self._fd, select.POLLIN)
                continue
            except OSError:
                data = b""
            return lambda: self._got(data)

    def _got(self, data: bytes) -> None:
        if self._closed:
            return
        self._reading = False
        self._on_bytes(data)
        if data:
            self.hold(self._held)

    def hold(self, held: bool) -> None:
        self._held = held
        if not held and not self._reading:
            self._read()

    def at_end(self) -> bool:
        """Nobody is there who could go on writing."""
        return True

    def close(self) -> None:
        self._closed = True
        self._thread.stop(lambda: os.close(self._fd))


def _open_reader(
    loop: asyncio.AbstractEventLoop, fd: int, on_bytes: Callable[[bytes], None]
) -> _PolledReader | _ThreadReader:
    try:
        return _PolledReader(loop, fd, on_bytes)
    except OSError:
        return _ThreadReader(loop, fd, on_bytes)


# -- writing


class _PolledWriter:
    """A pipe through a description of our own, or a socket with a flag per call."""

    def __init__(self, loop: asyncio.AbstractEventLoop, fd: int, sock: socket.socket | None) -> None:
        self._loop, self._fd, self._sock = loop, fd, sock
        self._armed = False

    def write(self, data: memoryview, then: Callable[[int | None], None]) -> int | None:
        """Bytes written now; or None, and `then` is called when more can be written. Raises OSError: nobody reads."""
        try:
            if self._sock is not None:
                return self._sock.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            return os.write(self._fd, data)
        except (BlockingIOError, InterruptedError):
            if not self._armed:
                self._armed = True
                self._loop.add_writer(self._fd, then, 0)
            return None

    def idle(self) -> None:
        if self._armed:
            self._armed = False
            self._loop.remove_writer(self._fd)

    def close(self) -> None:
        self.idle()
        if self._sock is not None:
            self._sock.close()
        else:
            os.close(self._fd)


class _ThreadWriter:
    """Terminal, regular file, whatever else: written by a thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, fd: int) -> None:
        self._fd = fd
        self._thread = _Blocking(loop)

    def write(self, data: memoryview, then: Callable[[int | None], None]) -> int | None:
        self._thread.call(lambda: self._blocking_write(data, then))
        return None

    def _blocking_write(self, data: memoryview, then: Callable[[int | None], None]) -> Callable[[], None]:
        while True:
            try:
                count: int | None = os.write(self._fd, data)
            except BlockingIOError:
                _wait_for(self._fd, select.POLLOUT)
                continue
            except OSError:
                count = None
            return lambda: then(count)

    def idle(self) -> None:
        """Nothing is armed between two calls."""

    def close(self) -> None:
        self._thread.stop(lambda: os.close(self._fd))


def _open_writer(loop: asyncio.AbstractEventLoop, fd: int) -> _PolledWriter | _ThreadWriter:
    mode = os.fstat(fd).st_mode
    if stat.S_ISSOCK(mode):
        return _PolledWriter(loop, fd, socket.socket(fileno=fd))
    if stat.S_ISFIFO(mode):
        with contextlib.suppress(OSError):  # not Linux, or the reader is gone already: the thread finds out
            own = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.close(fd)
            return _PolledWriter(loop, own, None)
    return _ThreadWriter(loop, fd)
