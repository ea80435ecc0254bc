"""A typed client of the counting service: starts it, sets its faults, waits until a call is parked, reads its truth.

Blocking, and everything bounded. The counts come from the truth file, so they can be read while no service runs.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tests.service.counting import read_truth
from tests.service.process import ServiceProcess

Point = Literal["before_effect", "after_effect"]


@dataclass(frozen=True)
class Counts:
    """Calls and effects that reached the service, by path, and effects by idempotency key and by operation."""

    calls: dict[str, int] = field(default_factory=dict)
    effects: dict[str, int] = field(default_factory=dict)
    calls_by_key: dict[str, int] = field(default_factory=dict)
    effects_by_key: dict[str, int] = field(default_factory=dict)
    effects_by_operation: dict[str, int] = field(default_factory=dict)


class CountingService(ServiceProcess):
    """`with CountingService(tmp_path / "truth") as service:`; or start() and stop(), also several times on one truth."""

    module, name = "tests.service.counting", "counting service"

    def __init__(self, truth: Path) -> None:
        super().__init__("--truth", str(truth))
        self.truth = truth

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
        self.post("/control", {"point": point, "action": action, "times": times, **match})

    def clear(self) -> None:
        """Takes away all faults that no call met yet."""
        self.post("/control", {"clear": True})

    def park(self, point: Point, *, times: int = 1, path: str | None = None) -> None:
        """The next call hangs at `point` until release()."""
        self.fault(point, "hang", times=times, path=path)

    def wait_parked(
        self, timeout: float = 10.0, *, point: Point = "after_effect", count: int = 1
    ) -> list[dict[str, Any]]:
        """Blocks until `count` calls are parked at `point`; returns them. `timeout` in seconds: AssertionError after it."""
        query = f"/wait?point={point}&count={count}&timeoutMs={round(timeout * 1_000)}"
        parked: list[dict[str, Any]] = self.get(query, timeout + 10)["parked"]
        assert len(parked) >= count, f"{len(parked)} of {count} calls came to {point} within {timeout} s"
        return parked

    def release(self, point: Point | None = None) -> int:
        """Lets all parked calls (at `point`) go on; returns how many."""
        released: int = self.post("/release", {} if point is None else {"point": point})["released"]
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
