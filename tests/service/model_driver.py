"""A typed client of the model server: starts it, sets its script and faults, waits, and reads its log.

Blocking, and everything bounded. The calls come from the log file, so they can be read while no server runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from tests.service.model_server import read_log
from tests.service.process import ServiceProcess

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


class ModelServer(ServiceProcess):
    """`with ModelServer(tmp_path / "log", script=[...]) as server:`; or start() and stop(), also several times.

    `key`: the only one that it takes; None: it does not look.
    """

    module, name = "tests.service.model_server", "model server"

    def __init__(self, log: Path, script: Sequence[dict[str, Any]] = (), key: str | None = None) -> None:
        super().__init__("--log", str(log), environment=None if key is None else {"MODEL_SERVER_KEY": key})
        self.log = log
        self._script = list(script)

    @property
    def base_url(self) -> str:
        return f"{self.url}/v1"

    def start(self) -> Self:
        super().start()
        self.script(self._script)
        return self

    def script(self, turns: Sequence[dict[str, Any]]) -> None:
        """Turn n answers a request with n answers in its context."""
        self._script = list(turns)
        self.post("/control", {"script": self._script})

    def fault(self, name: str, *, times: int = 1, **members: Any) -> None:
        """For the next `times` calls; several faults come in the order they were set."""
        self.post("/control", {"fault": {"name": name, **members}, "times": times})

    def clear(self) -> None:
        """Takes away all faults that no call met yet."""
        self.post("/control", {"clear": True})

    def release(self) -> int:
        """Lets all held calls go on; returns how many."""
        released: int = self.post("/release", {})["released"]
        return released

    def wait(self, what: What, count: int = 1, timeout: float = 10.0) -> None:
        """Blocks until there are `count` held, arrived, ended or abandoned calls in all. AssertionError after `timeout` s."""
        query = f"/wait?what={what}&count={count}&timeoutMs={round(timeout * 1_000)}"
        there: int = self.get(query, timeout + 10)["count"]
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
