"""One daemon process and the wire to it, from start to reaping.

Knows: JSON-RPC framing, which answer belongs to which call, and how to end a process for certain. Does not know: methods,
keys, or whether anything is worth asking twice; a connection that is lost stays lost.

The daemon's input is written without blocking, under a deadline; its output is read by one thread, always, so that
neither side can wait for the other for ever.
"""

from __future__ import annotations

import json
import logging
import os
import select
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import IO, Any

from rpcagent_client.errors import (
    ClientClosed,
    ClientError,
    ConnectionLost,
    DaemonNotStarted,
    DeadlineExceeded,
    ProtocolError,
    RpcError,
)

READ_BYTES = 256 << 10
LINE_BYTES_MAX = 256 << 20
"""Far above what the daemon sends; it only keeps a program that is not the daemon from filling the memory."""
QUOTED_CHARACTERS = 200
TERM_S = 2.0
REAP_S = 5.0
EXIT_CODE_S = 1.0
WRITE_SLICE_S = 0.2

Notify = Callable[[str, dict[str, Any]], None]

log = logging.getLogger("rpcagent_client")


class Connection:
    """Starts `command`. `notify(method, params)` is called on the reader thread, in wire order, before any later answer.

    Raises DaemonNotStarted.
    """

    def __init__(
        self, command: Sequence[str], *, env: Mapping[str, str] | None, stderr: int | IO[Any] | None, notify: Notify
    ) -> None:
        self.greeted = False
        self._notify = notify
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._pending: dict[int, Future[Any]] = {}
        self._next_id = 1
        self._lost: Callable[[], ClientError] | None = None
        self._wake_read, self._wake_write = os.pipe()
        try:
            # A session of its own: Ctrl-C in a terminal is the caller's to handle, and the daemon then ends in order.
            self._process = subprocess.Popen(
                list(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=env,
                bufsize=0,
                start_new_session=True,
            )
        except OSError as error:
            os.close(self._wake_read)
            os.close(self._wake_write)
            raise DaemonNotStarted(f"{command[0]!r} cannot be started: {error.strerror}") from error
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        os.set_blocking(self._stdin.fileno(), False)
        self._reader = threading.Thread(target=self._read, name=f"rpcagent-{self.pid}", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Nothing has shown yet that the daemon is gone."""
        return self._lost is None and self._process.poll() is None

    # Calling

    def call(self, method: str, params: Mapping[str, Any], deadline: float) -> Any:
        """The result. `deadline` is an instant of `time.monotonic`. Raises RpcError, ConnectionLost, ProtocolError,
        DeadlineExceeded (a late answer is then dropped) or ClientClosed."""
        if threading.current_thread() is self._reader:
            raise RuntimeError("a callback runs on the thread that reads answers, so it cannot wait for one")
        future: Future[Any] = Future()
        with self._lock:
            if self._lost is not None:
                raise self._lost()
            ident = self._next_id
            self._next_id += 1
            self._pending[ident] = future
        try:
            message = {"jsonrpc": "2.0", "id": ident, "method": method, "params": params}
            self._send(json.dumps(message, separators=(",", ":")).encode() + b"\n", deadline)
            return future.result(max(deadline - time.monotonic(), 0))
        except DeadlineExceeded:
            raise
        except TimeoutError:
            raise DeadlineExceeded(f"no answer to {method} in time") from None
        finally:
            with self._lock:
                self._pending.pop(ident, None)

    def _send(self, line: bytes, deadline: float) -> None:
        if not self._writing.acquire(timeout=max(deadline - time.monotonic(), 0)):
            raise DeadlineExceeded("the daemon does not read its input")
        sent = 0
        try:
            while sent < len(line):
                sent += self._write_some(memoryview(line)[sent:], deadline)
        except (BrokenPipeError, ValueError):  # ValueError: closed by `close` on another thread
            raise self._gone() from None
        finally:
            if 0 < sent < len(line):
                # Half a line was written: whatever came after it would be read as its rest.
                self._lose(self._cut_short)
            self._writing.release()

    def _write_some(self, rest: memoryview, deadline: float) -> int:
        try:
            return os.write(self._stdin.fileno(), rest)
        except BlockingIOError:
            left = deadline - time.monotonic()
            if left <= 0:
                raise DeadlineExceeded("the daemon does not read its input") from None
            if self._lost is not None:
                raise self._lost() from None
            room = select.poll()
            room.register(self._stdin.fileno(), select.POLLOUT)
            room.poll(min(left, WRITE_SLICE_S) * 1000)
            return 0

    def _gone(self) -> ClientError:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(EXIT_CODE_S)
        code = self._process.returncode
        what = "the daemon closed its side" if code is None else f"the daemon ended with exit code {code}"
        return ConnectionLost(f"{what} before it answered", code, self.pid)

    def _cut_short(self) -> ClientError:
        return ConnectionLost("a request was cut short, so that the wire can carry no other", None, self.pid)

    # Reading

    def _read(self) -> None:
        lost: Callable[[], ClientError] = self._gone
        try:
            self._read_lines()
        except ProtocolError as error:
            text = str(error)
            lost = lambda: ProtocolError(text)  # noqa: E731  (a new exception for each thread that raises it)
        finally:
            self._lose(lost)
            self._stdout.close()
            os.close(self._wake_read)

    def _read_lines(self) -> None:
        """Until the end of output, or until `end` says that nothing more will come: a grandchild may hold it open."""
        source = self._stdout.fileno()
        ready = select.poll()
        ready.register(source, select.POLLIN)
        ready.register(self._wake_read, select.POLLIN)
        pieces: list[bytes] = []
        size = 0
        while any(fd == source for fd, _ in ready.poll()):
            chunk = os.read(source, READ_BYTES)
            if not chunk:
                return  # what is left without its newline was cut off by the end of the process
            *lines, rest = chunk.split(b"\n")
            for line in lines:
                self._received(b"".join((*pieces, line)))
                pieces, size = [], 0
            pieces.append(rest)
            size += len(rest)
            if size > LINE_BYTES_MAX:
                raise ProtocolError(f"the daemon wrote a line of more than {LINE_BYTES_MAX} bytes")

    def _received(self, line: bytes) -> None:
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            message = None
        match message:
            case {"method": str(method), "params": dict(params)} if "id" not in message:
                self._notified(method, params)
            case {"id": int(ident), "error": {"code": int(number), "message": str(text), **rest}}:
                data = rest.get("data")
                data = data if isinstance(data, dict) else {}
                self._answered(ident, RpcError(number, str(data.get("code", "")), text, data), line)
            case {"id": int(ident), "result": result}:
                self._answered(ident, result, line)
            case _:
                raise ProtocolError(f"the daemon wrote what is no answer to us: {_quoted(line)}")

    def _answered(self, ident: int, answer: Any, line: bytes) -> None:
        with self._lock:
            future = self._pending.pop(ident, None)
            if future is None and not 0 < ident < self._next_id:
                raise ProtocolError(f"the daemon answered what was never asked: {_quoted(line)}")
        if future is None:
            return  # the caller's time ran out before
        if isinstance(answer, RpcError):
            future.set_exception(answer)
        else:
            future.set_result(answer)

    def _notified(self, method: str, params: dict[str, Any]) -> None:
        try:
            self._notify(method, params)
        except Exception:
            # The caller's fault must not cost the caller its answers.
            log.exception("the callback for %s raised", method)

    def _lose(self, error: Callable[[], ClientError]) -> None:
        """From here on every call fails, the waiting ones first. The first reason stands."""
        made = error()
        with self._lock:
            if self._lost is None:
                self._lost = error
            pending, self._pending = self._pending, {}
        for future in pending.values():
            if not future.done():
                future.set_exception(made if len(pending) == 1 else error())

    # Ending

    def end(self, grace: float, *, closed: bool = False) -> int | None:
        """Ends the process and reaps it: end of input, then within `grace` seconds SIGTERM, then SIGKILL. Idempotent.

        Returns the exit code. `closed`: calls that wait get ClientClosed at once instead of whatever comes.
        """
        if closed:
            self._lose(lambda: ClientClosed("the client was closed"))
        if grace > 0 and self._writing.acquire(timeout=TERM_S):
            try:
                self._stdin.close()
            finally:
                self._writing.release()
            if not self._reaped(grace):
                self._process.terminate()
                self._reaped(TERM_S)
        if self._process.poll() is None:
            self._process.kill()
            self._reaped(REAP_S)
        self._stop_reading()
        with self._writing:  # whoever was at it has seen by now that the connection is lost
            self._stdin.close()
        return self._process.returncode

    def strike(self) -> None:
        """SIGKILL, and nothing else. Where it has been reaped, nothing."""
        self._process.kill()

    def _reaped(self, seconds: float) -> bool:
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _stop_reading(self) -> None:
        with self._lock:
            wake, self._wake_write = self._wake_write, -1
        if wake >= 0:
            os.close(wake)  # the reader sees the end of it after everything that is in the pipe
        if threading.current_thread() is not self._reader:
            self._reader.join(REAP_S)


def _quoted(line: bytes) -> str:
    text = line[: QUOTED_CHARACTERS * 4].decode("utf-8", "replace")
    return repr(text[:QUOTED_CHARACTERS]) + (
        "..." if len(text) > QUOTED_CHARACTERS or len(line) > len(text) * 4 else ""
    )
