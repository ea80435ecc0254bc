"""The real daemon as a child process, and the children that are its floors: how they are spawned, asked and ended.

Knows: pipes, JSON lines, and what the kernel says a process used. A client here is blocking and as thin as possible, the
same one for the daemon and for its floors, so that what it costs is on both sides of a ratio.

Bytecode is cached in the scratch folder, for the daemon and the floors alike, whatever the environment says: a user's
installation has it, and compiling would hide what is measured.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

STATUS = b'{"jsonrpc":"2.0","id":1,"method":"status"}\n'
ROOT = Path(__file__).resolve().parents[2]

CALLS_AT_ONCE = 500
"""Fewer than the calls that may wait."""


class Scratch:
    """A folder for everything that the bench leaves behind, on the file system that is measured."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.workspace = folder / "workspace"
        self.workspace.mkdir()
        (self.workspace / "note.txt").write_text("a short file\n")
        self._drawn = 0
        dropped = {"PYTHONDONTWRITEBYTECODE", "PYTHONUNBUFFERED", "RPCAGENT_STORE"}
        self.environment = {name: value for name, value in os.environ.items() if name not in dropped}
        self.environment["PYTHONPYCACHEPREFIX"] = str(folder / "bytecode")

    def fresh(self, name: str) -> Path:
        """A path that nothing has used."""
        self._drawn += 1
        return self.folder / f"{self._drawn}-{name}"


class Peer:
    """A child that answers lines with lines. `asked` is when it was spawned, by the clock of `time.perf_counter`. What it
    says on standard error goes to the file `errors`, else nowhere."""

    def __init__(self, scratch: Scratch, command: list[str], errors: Path | None = None) -> None:
        with open(errors or os.devnull, "ab") as said:
            self.asked = time.perf_counter()
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=said,
                bufsize=0,
                env=scratch.environment,
                cwd=ROOT,
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._to, self._from = self._process.stdin.fileno(), self._process.stdout.fileno()
        self._held = b""
        self.received = 0
        """Bytes that it has said."""
        self.cpu_s = 0.0
        """What the whole process used, once it has ended."""

    @property
    def pid(self) -> int:
        return self._process.pid

    def write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self._to, view) :]

    def line(self) -> bytes:
        """The next line. Raises EOFError where the child has ended."""
        while b"\n" not in self._held:
            self._read()
        line, _, self._held = self._held.partition(b"\n")
        return line

    def lines(self, count: int) -> int:
        """Waits for at least one line, takes all that are there, at most `count`; how many."""
        while not (found := self._held.count(b"\n")):
            self._read()
        taken = min(found, count)
        self._held = b"" if taken == found and self._held.endswith(b"\n") else self._held.split(b"\n", taken)[taken]
        return taken

    def _read(self) -> None:
        data = os.read(self._from, 1 << 20)
        if not data:
            raise EOFError(f"the child ended with {self._process.poll()}")
        self.received += len(data)
        self._held += data

    def ask(self, message: bytes) -> bytes:
        self.write(message)
        return self.line()

    def cpu_now_s(self) -> float:
        """User and system time of all threads so far."""
        tasks = Path(f"/proc/{self.pid}/task")
        return sum(int((task / "schedstat").read_bytes().split()[0]) for task in tasks.iterdir()) / 1e9

    def resident_kb(self) -> int:
        status = Path(f"/proc/{self.pid}/status").read_text()
        return int(status.partition("VmRSS:")[2].split()[0])

    def kill(self) -> None:
        """Nothing where it has ended."""
        self._process.kill()
        self._end()

    def close(self) -> None:
        """End of input; waits for the child to end by itself."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._end()

    def _end(self) -> None:
        if self._process.returncode is None:
            _, code, usage = os.wait4(self.pid, 0)
            self._process.returncode = os.waitstatus_to_exitcode(code)
            self.cpu_s = usage.ru_utime + usage.ru_stime
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()


class Daemon(Peer):
    """`rpcagent serve` on a store."""

    def __init__(self, scratch: Scratch, store: Path) -> None:
        script = Path(sys.executable).with_name("rpcagent")
        program = [str(script)] if script.exists() else [sys.executable, "-m", "rpcagent"]
        super().__init__(scratch, [*program, "serve", "--store", str(store), "--workspace", str(scratch.workspace)])
        self._calls = 0

    def call(self, method: str, **params: Any) -> Any:
        """The result. Raises AssertionError for an error; notifications in between are dropped."""
        self.send(method, **params)
        return self.result()

    def send(self, method: str, **params: Any) -> None:
        self._calls += 1
        self.write(_encode({"jsonrpc": "2.0", "id": self._calls, "method": method, "params": params}))

    def result(self) -> Any:
        answer = self.answer(lambda message: "id" in message)
        assert "result" in answer, answer
        return answer["result"]

    def answer(self, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        while True:
            message: dict[str, Any] = json.loads(self.line())
            if wanted(message):
                return message

    def journal(self) -> dict[str, Any]:
        counts: dict[str, Any] = self.call("status")["journal"]
        return counts


def _encode(message: dict[str, Any]) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def reading_agent(turns: int) -> dict[str, Any]:
    """An agent whose scripted model reads the same small file once a turn, then says that it is done: `turns` model calls
    and `turns` tool calls, and one model call more."""
    turn = {"text": "", "calls": [{"tool": "files.read", "arguments": {"path": "note.txt"}}]}
    return {
        "name": "bench",
        "tools": ["files.read"],
        "model": {"script": [*[turn] * turns, {"text": "done"}]},
        "policy": {"rules": [{"do": "allow"}]},
    }


NO_LIMITS = {"steps": None, "attempts": None, "repeats": None}
"""Of the budget: a run may be as long as the figure needs it."""
