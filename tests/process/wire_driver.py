"""The daemon as a subprocess, and its wire line by line: for tests that must see, or send, exactly what is on it.

Knows: pipes, signals, JSON-RPC ids, and the types of results. Every wait has an end, and what is not a frame on standard
output fails the test that reads it. Does not retry, restart or invent keys; that is what a client is for.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import msgspec
from rpcagent.rpc.results import NOTIFICATIONS, RESULTS

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 30.0

SERVE = (sys.executable, "-m", "rpcagent", "serve")
RIGGED = (sys.executable, "-m", "tests.process.rigged_daemon")


class Refused(Exception):
    """An answer that is an error. `code` is the word in `error.data`."""

    def __init__(self, error: dict[str, Any]) -> None:
        super().__init__(error)
        self.number: int = error["code"]
        self.message: str = error["message"]
        self.data: dict[str, Any] = error.get("data", {})
        self.code: str = self.data.get("code", "")


class Daemon:
    """`with Daemon(store) as daemon:`; at the end it is killed if it still runs. `rig`: what `rigged_daemon` is told, with
    its reports on a pipe of their own; without it the ordinary program runs."""

    def __init__(
        self,
        store: Path,
        *options: str,
        rig: tuple[str, ...] = (),
        workspace: Path | None = None,
        stderr: int | None = None,
        log: Path | None = None,
        before_exec: Callable[[], None] | None = None,
    ) -> None:
        self.store = store
        self.notes: list[dict[str, Any]] = []
        self.sent: dict[Any, str] = {}
        self._answers: dict[Any, dict[str, Any]] = {}
        self._ids = itertools.count(1)
        self._buffer = b""
        self._reports = b""
        command = [*(RIGGED if rig else SERVE), *rig, "--store", str(store)]
        command += ["--workspace", str(workspace or store.parent), *options]
        self._report_fd = -1
        passed: tuple[int, ...] = ()
        if rig:
            self._report_fd, theirs = os.pipe()
            command[len(RIGGED) : len(RIGGED)] = ["--report-fd", str(theirs)]
            passed = (theirs,)
        self.log = log or store.parent / f"{store.name}.log"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as written:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=written if stderr is None else stderr,
                pass_fds=passed,
                preexec_fn=before_exec,  # noqa: PLW1509 - the tests have one thread
                bufsize=0,
            )
        for descriptor in passed:
            os.close(descriptor)

    @property
    def pid(self) -> int:
        return self.process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    # Out

    def send(self, method: str, **params: Any) -> int:
        """Writes one request; returns its id."""
        ident, line = self.request(method, **params)
        self.write(line)
        return ident

    def request(self, method: str, **params: Any) -> tuple[int, bytes]:
        """A request that is not written yet, so that several can leave in one write."""
        ident = next(self._ids)
        self.sent[ident] = method
        message: dict[str, Any] = {"jsonrpc": "2.0", "id": ident, "method": method}
        if params:
            message["params"] = params
        return ident, json.dumps(message).encode() + b"\n"

    def write(self, data: bytes) -> None:
        """All of it, while the daemon takes it; reads what it says meanwhile, so that neither waits for the other."""
        assert self.process.stdin is not None
        descriptor = self.process.stdin.fileno()
        view, end = memoryview(data), time.monotonic() + WAIT_S
        while view:
            readable, writable, _ = select.select([self._out()], [descriptor], [], _left(end))
            assert readable or writable, "the daemon takes no input"
            if writable:
                view = view[os.write(descriptor, view[: select.PIPE_BUF]) :]
            elif not self._fill(0):
                raise AssertionError("the daemon ended while it was written to")

    # In

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """The result. Raises Refused where the answer is an error."""
        return self.result(self.send(method, **params))

    def result(self, ident: int, timeout: float = WAIT_S) -> dict[str, Any]:
        answer = self.answer(ident, timeout)
        if "error" in answer:
            raise Refused(answer["error"])
        result: dict[str, Any] = answer["result"]
        return result

    def refusal(self, ident: int) -> str:
        """The word of the error that the request was answered with."""
        answer = self.answer(ident)
        assert "error" in answer, f"expected a refusal, got {answer}"
        word: str = answer["error"]["data"]["code"]
        return word

    def answer(self, ident: int | None, timeout: float = WAIT_S) -> dict[str, Any]:
        """The answer with this id, whatever else comes before it."""
        end = time.monotonic() + timeout
        while ident not in self._answers:
            self.take(self.message(_left(end)))
        return self._answers.pop(ident)

    def message(self, timeout: float = WAIT_S) -> Any:
        """The next message, whatever it is. AssertionError where none comes in time, or the daemon ends."""
        end = time.monotonic() + timeout
        while b"\n" not in self._buffer:
            if not self._fill(_left(end)):
                raise AssertionError(f"the daemon ended ({self.process.wait(WAIT_S)}): {self.log.read_text()[-2_000:]}")
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)

    def until(
        self, run_id: str, condition: Callable[[dict[str, Any]], bool], timeout: float = WAIT_S
    ) -> dict[str, Any]:
        """The status of the run when it meets the condition; looked at again after each event of any run. The daemon must
        have been asked for them: `listen`."""
        end = time.monotonic() + timeout
        while not condition(shown := self.call("status", runId=run_id)):
            self.take(self.message(_left(end)))
        return shown

    def once(self, condition: Callable[[dict[str, Any]], bool], timeout: float = WAIT_S) -> dict[str, Any]:
        """The health of the daemon when it meets the condition; asked for at most 50 times a second."""
        end = time.monotonic() + timeout
        while not condition(health := self.call("status")):
            assert time.monotonic() < end, health
            select.select([self._out()], [], [], 0.02)
        return health

    def once_not(self, code: str, method: str = "status", timeout: float = WAIT_S, **params: Any) -> dict[str, Any]:
        """The answer of a method, asked again (at most 20 times a second) as long as it is refused with this word."""
        end = time.monotonic() + timeout
        while True:
            try:
                return self.call(method, **params)
            except Refused as refusal:
                assert refusal.code == code, refusal
                assert refusal.data["retryable"] is True
                assert time.monotonic() < end, f"still {code}"
            select.select([self._out()], [], [], 0.05)

    def listen(self) -> dict[str, Any]:
        return self.call("initialize", protocolVersion=1, capabilities={"events": "all"})

    def rest(self) -> bytes:
        """Everything up to the end of its output, as bytes that were not looked at."""
        end = time.monotonic() + WAIT_S
        while self._fill(_left(end)):
            pass
        data, self._buffer = self._buffer, b""
        return data

    def throw_away(self, lines: int) -> None:
        """Takes so many lines out of the pipe without reading what they say: the client died before it could."""
        end = time.monotonic() + WAIT_S
        while self._buffer.count(b"\n") < lines:
            assert self._fill(_left(end)), "the daemon ended"
        self._buffer = b""

    def reports(self, count: int) -> list[dict[str, Any]]:
        """The next reports of a rigged daemon: what is parked where."""
        end = time.monotonic() + WAIT_S
        while self._reports.count(b"\n") < count:
            assert select.select([self._report_fd], [], [], _left(end))[0], f"{self._reports!r} is all that is parked"
            data = os.read(self._report_fd, 65_536)
            assert data, f"the daemon ended: {self.log.read_text()[-2_000:]}"
            self._reports += data
        lines = self._reports.split(b"\n")
        self._reports = b"\n".join(lines[count:])
        return [json.loads(line) for line in lines[:count]]

    # Ends

    def kill(self) -> None:
        """SIGKILL, and collects it. What it wrote before stays readable with `rest` only until then."""
        self.process.kill()
        self.process.wait(WAIT_S)
        self._close()

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def end_input(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()

    def exit_code(self, timeout: float = WAIT_S) -> int:
        """Waits until it ends by itself."""
        return self.process.wait(timeout)

    def stop(self) -> int:
        """End of input, and the exit code."""
        self.end_input()
        self.rest()
        return self.exit_code()

    def _close(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        if self._report_fd >= 0:
            os.close(self._report_fd)
            self._report_fd = -1

    def _out(self) -> int:
        assert self.process.stdout is not None
        return self.process.stdout.fileno()

    def _fill(self, timeout: float) -> bool:
        """False: the end of its output."""
        assert select.select([self._out()], [], [], timeout)[0], "the daemon says nothing"
        data = os.read(self._out(), 1 << 20)
        self._buffer += data
        return bool(data)

    def take(self, message: Any) -> None:
        for one in message if isinstance(message, list) else [message]:
            assert one["jsonrpc"] == "2.0", one
            if "method" in one:
                msgspec.convert(one["params"], NOTIFICATIONS[one["method"]])
                self.notes.append(one)
                continue
            method = self.sent.get(one["id"])
            if "result" in one and method is not None:
                msgspec.convert(one["result"], RESULTS[method])
            self._answers[one["id"]] = one


def _left(end: float) -> float:
    return max(end - time.monotonic(), 0.0)


@contextlib.contextmanager
def refused(code: str) -> Iterator[list[Refused]]:
    """`with refused("STALE_DIGEST") as caught:`; the refusal is caught[0] afterwards."""
    caught: list[Refused] = []
    try:
        yield caught
    except Refused as refusal:
        caught.append(refusal)
    assert [one.code for one in caught] == [code]
