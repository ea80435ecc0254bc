"""A typed client of the counting service: starts it, sets its faults, waits until a call is parked, reads its truth.

Blocking, and everything bounded. The counts come from the truth file, so they can be read while no service runs.
"""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from tests.service.counting import read_truth

Point = Literal["before_effect", "after_effect"]
ROOT = Path(__file__).resolve().parents[2]
START_S = 20.0
_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True)
class Counts:
    """Calls and effects that reached the service, by path, and effects by idempotency key and by operation."""

    calls: dict[str, int] = field(default_factory=dict)
    effects: dict[str, int] = field(default_factory=dict)
    calls_by_key: dict[str, int] = field(default_factory=dict)
    effects_by_key: dict[str, int] = field(default_factory=dict)
    effects_by_operation: dict[str, int] = field(default_factory=dict)


class CountingService:
    """`with CountingService(tmp_path / "truth") as service:`; or start() and stop(), also several times on one truth."""

    def __init__(self, truth: Path) -> None:
        self.truth = truth
        self.port = 0
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> Self:
        """Starts the process, on the port it had before if it had one. Returns when it accepts connections."""
        command = [sys.executable, "-m", "tests.service.counting", "--port", str(self.port), "--truth", str(self.truth)]
        self._process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()  # bounded: the process prints its port at once, or ends
        if not line:
            self.stop()
            raise AssertionError("the counting service did not start")
        self.port = json.loads(line)["port"]
        return self

    def stop(self) -> None:
        """Kills the process and collects it. Its truth stays."""
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

    def fault(
        self,
        point: Point,
        action: str,
        *,
        times: int = 1,
        path: str | None = None,
        operation: str | None = None,
        key: str | None = None,
    ) -> None:
        """For the next `times` calls that match: `hang`, `drop`, `delay:MS`, `error:STATUS`, `error:STATUS:RETRY_AFTER`."""
        match = {"path": path, "operation": operation, "key": key}
        self._post("/control", {"point": point, "action": action, "times": times, **match})

    def clear(self) -> None:
        """Takes away all faults that no call met yet."""
        self._post("/control", {"clear": True})

    def park(self, point: Point, *, times: int = 1, path: str | None = None) -> None:
        """The next call hangs at `point` until release()."""
        self.fault(point, "hang", times=times, path=path)

    def wait_parked(
        self, timeout: float = 10.0, *, point: Point = "after_effect", count: int = 1
    ) -> list[dict[str, Any]]:
        """Blocks until `count` calls are parked at `point`; returns them. `timeout` in seconds: AssertionError after it."""
        query = f"/wait?point={point}&count={count}&timeoutMs={round(timeout * 1_000)}"
        with _direct.open(self.url + query, timeout=timeout + 10) as answer:
            parked: list[dict[str, Any]] = json.load(answer)["parked"]
        assert len(parked) >= count, f"{len(parked)} of {count} calls came to {point} within {timeout} s"
        return parked

    def release(self, point: Point | None = None) -> int:
        """Lets all parked calls (at `point`) go on; returns how many."""
        released: int = self._post("/release", {} if point is None else {"point": point})["released"]
        return released

    def counts(self) -> Counts:
        calls: Counter[str] = Counter()
        effects: Counter[str] = Counter()
        calls_by_key: Counter[str] = Counter()
        by_key: Counter[str] = Counter()
        by_operation: Counter[str] = Counter()
        for line in read_truth(self.truth):
            called = line["kind"] == "call"
            (calls if called else effects)[line["path"]] += 1
            if line["key"] is not None:
                (calls_by_key if called else by_key)[line["key"]] += 1
            if line["operation"] is not None and not called:
                by_operation[str(line["operation"])] += 1
        return Counts(dict(calls), dict(effects), dict(calls_by_key), dict(by_key), dict(by_operation))

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), headers, method="POST")
        with _direct.open(request, timeout=10) as answer:
            value: dict[str, Any] = json.load(answer)
        return value
