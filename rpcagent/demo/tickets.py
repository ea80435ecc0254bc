"""The demonstration's side of the ticket service: starts it, tells it when to hold a call, and reads its truth."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

ANSWER_S = 40.0
END_S = 5.0

Point = Literal["before", "after"]


class Tickets:
    """The service, for as long as the context. `ledger` is its own file; the daemon knows nothing of it."""

    def __init__(self, ledger: Path) -> None:
        self._ledger = ledger
        self._process = subprocess.Popen(  # noqa: S603
            [sys.executable, "-P", "-m", "rpcagent.demo.ticket_service", str(ledger)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self._port = 0

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def hold(self, tool: str, ticket: str, point: Point) -> None:
        """The next such call is not answered: it waits `before` or `after` its effect, until it is dropped."""
        self._ask("POST", "/holds", {"operation": _operation(tool), "ticket": ticket, "point": point})

    def wait_held(self) -> None:
        """Returns when the call is there. From then on the outside knows what the daemon has not recorded."""
        self._ask("GET", "/held")

    def drop(self) -> None:
        """Lets go of the held call, whose caller is dead, without an answer."""
        self._ask("POST", "/drop", {})

    def effects_of_key(self, key: str) -> int:
        """How often a call with this idempotency key took effect: what a person would look up in the service's books."""
        return sum(line["kind"] == "effect" and line["key"] == key for line in self.lines())

    def counts(self, kind: Literal["call", "effect"]) -> Counter[tuple[str, str]]:
        """How many, by ticket and tool."""
        return Counter(
            (line["ticket"], f"tickets.{line['operation']}") for line in self.lines() if line["kind"] == kind
        )

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._ledger.read_text().splitlines()]

    def __enter__(self) -> Self:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self.__exit__(None, None, None)
            raise RuntimeError("the ticket service did not start")
        self._port = int(line)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """The end of its input ends it, this process's death included."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> None:
        connection = HTTPConnection("127.0.0.1", self._port, timeout=ANSWER_S)
        try:
            connection.request(method, path, None if body is None else json.dumps(body))
            response = connection.getresponse()
            answer = response.read()
        except (OSError, HTTPException) as error:
            raise RuntimeError(f"the ticket service does not answer: {error}") from error
        finally:
            connection.close()
        if response.status != 200:
            raise RuntimeError(f"the ticket service: {answer.decode('utf-8', 'replace')}")


def _operation(tool: str) -> str:
    return tool.partition(".")[2]
