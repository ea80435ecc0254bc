"""A service of the tests as a process of its own on loopback: started, asked and stopped; everything bounded.

Knows: that it prints its port as one JSON line, and that its stdin is its life. Does not know: what any service does.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

ROOT = Path(__file__).resolve().parents[2]
START_S = 20.0
_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class ServiceProcess:
    """`with` starts and stops it; or start() and stop(), also several times."""

    module: ClassVar[str]
    name: ClassVar[str]

    def __init__(self, *arguments: str, environment: dict[str, str] | None = None) -> None:
        self.port = 0
        self._arguments = arguments
        self._environment = environment or {}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> Self:
        """Starts the process, on the port it had before if it had one. Returns when it accepts connections."""
        command = [sys.executable, "-m", self.module, "--port", str(self.port), *self._arguments]
        environment = {**os.environ, **self._environment}
        self._process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()  # bounded: the process prints its port at once, or ends
        if not line:
            self.stop()
            raise AssertionError(f"the {self.name} did not start")
        self.port = json.loads(line)["port"]
        return self

    def stop(self) -> None:
        """Kills the process and collects it. What it wrote stays."""
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

    def get(self, path: str, timeout: float) -> Any:
        """The JSON answer, within `timeout` seconds."""
        with _direct.open(self.url + path, timeout=timeout) as answer:
            return json.load(answer)

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), headers, method="POST")
        with _direct.open(request, timeout=10) as answer:
            value: dict[str, Any] = json.load(answer)
        return value
