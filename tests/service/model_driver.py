"""A typed client of the model server: starts it, sets its script and faults, waits, and reads its log.

Blocking, and everything bounded. The calls come from the log file, so they can be read while no server runs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from tests.service.model_server import read_log

ROOT = Path(__file__).resolve().parents[2]
START_S = 20.0
_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))

What = Literal["held", "calls", "gone", "ended"]


@dataclass(frozen=True)
class ModelCall:
    """One request as it arrived. `key`: right, wrong or none. `ended`: answered, gone (the caller closed it), or ""."""

    number: int
    at: float
    turn: int
    fault: str
    key: str
    ended: str
    body: dict[str, Any]

    @property
    def messages(self) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = self.body["messages"]
        return messages


class ModelServer:
    """`with ModelServer(tmp_path / "log", script=[...]) as server:`; or start() and stop(), also several times.

    `key`: the only one that it takes; None: it does not look.
    """

    def __init__(self, log: Path, script: Sequence[dict[str, Any]] = (), key: str | None = None) -> None:
        self.log = log
        self.port = 0
        self._script = list(script)
        self._key = key
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def start(self) -> Self:
        """Starts the process, on the port it had before if it had one. Returns when it accepts connections."""
        command = [sys.executable, "-m", "tests.service.model_server", "--port", str(self.port), "--log", str(self.log)]
        environment = {**os.environ, **({} if self._key is None else {"MODEL_SERVER_KEY": self._key})}
        self._process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()  # bounded: the process prints its port at once, or ends
        if not line:
            self.stop()
            raise AssertionError("the model server did not start")
        self.port = json.loads(line)["port"]
        self.script(self._script)
        return self

    def stop(self) -> None:
        """Kills the process and collects it. Its log stays."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait(START_S)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def script(self, turns: Sequence[dict[str, Any]]) -> None:
        """Turn n answers a request with n answers in its context."""
        self._script = list(turns)
        self._post("/control", {"script": self._script})

    def fault(self, name: str, *, times: int = 1, **members: Any) -> None:
        """For the next `times` calls; several faults come in the order they were set."""
        self._post("/control", {"fault": {"name": name, **members}, "times": times})

    def clear(self) -> None:
        """Takes away all faults that no call met yet."""
        self._post("/control", {"clear": True})

    def release(self) -> int:
        """Lets all held calls go on; returns how many."""
        released: int = self._post("/release", {})["released"]
        return released

    def wait(self, what: What, count: int = 1, timeout: float = 10.0) -> None:
        """Blocks until there are `count` held, arrived, ended or abandoned calls in all. AssertionError after `timeout` s."""
        query = f"http://127.0.0.1:{self.port}/wait?what={what}&count={count}&timeoutMs={round(timeout * 1_000)}"
        with _direct.open(query, timeout=timeout + 10) as answer:
            there: int = json.load(answer)["count"]
        assert there >= count, f"{there} of {count} {what} within {timeout} s"

    def calls(self) -> list[ModelCall]:
        """All calls so far, in order of arrival."""
        lines = read_log(self.log)
        ended = {line["number"]: line["how"] for line in lines if line["kind"] == "end"}
        return [
            ModelCall(
                number=line["number"],
                at=line["at"],
                turn=line["turn"],
                fault=line["fault"],
                key=line["key"],
                ended=ended.get(line["number"], ""),
                body=line["body"],
            )
            for line in lines
            if line["kind"] == "call"
        ]

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        headers = {"Content-Type": "application/json"}
        url = f"http://127.0.0.1:{self.port}{path}"
        request = urllib.request.Request(url, json.dumps(body).encode(), headers, method="POST")
        with _direct.open(request, timeout=10) as answer:
            value: dict[str, Any] = json.load(answer)
        return value
