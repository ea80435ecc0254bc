"""What the daemon of an example stands on: a log in memory, a clock, a workspace, and services behind HTTP.

Knows: how each is made to behave by the lines of an example (`disk`, `outside`, `given`). Every id, digest and time that
follows from it is the same in every run on every machine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import httpx
import msgspec
from rpcagent import errors
from rpcagent.runs.effects import LookUpAnswer, ToolSpec
from rpcagent.runs.outcomes import Failed, LookUp, Lost, NotDone, ToolReply
from rpcagent.runs.ports import Recorded, ToolRequest
from rpcagent.tools.http import Http
from rpcagent.tools.registry import Registry

BEGINNING = datetime(2026, 3, 1, 12, tzinfo=UTC)
STORE_ID = "sto_0f1e2d3c4b5a69788796a5b4"
STORE = "/home/ada/.local/state/rpcagent/5d41402abc4b2a76"
WORKSPACE = "/home/ada/project"
"""What the examples show in place of the folder of the test."""

LOOK_UP_ANSWERS: Sequence[LookUpAnswer] = ("found", "absent", "pending", "unsure")


class WorldClock:
    """Wall time: a fixed beginning, and the loop's own time since then."""

    def __init__(self) -> None:
        self._began = asyncio.get_running_loop().time()

    def now(self) -> datetime:
        return BEGINNING + timedelta(milliseconds=round((asyncio.get_running_loop().time() - self._began) * 1000))


class MemoryLog:
    """The journal port. It outlives the process; `opened` begins the next epoch. `state` is that of the disk below."""

    store_id = STORE_ID

    def __init__(self) -> None:
        self.records: list[tuple[str, Recorded]] = []
        self.ends: dict[str, int] = {}
        self.epoch = 0
        self.state = "ok"
        self.written = 0
        self.syncs = 0

    def opened(self) -> None:
        self.epoch += 1
        self.written, self.syncs = 0, 0

    async def append(self, run_id: str, epoch: int, expected_seq: int, count: int, body: bytes, **_: Any) -> Any:
        await anyio.lowlevel.checkpoint()
        if self.state == "full":
            raise errors.StorageError("The store takes no more (ENOSPC); nothing was recorded.", errno="ENOSPC")
        if self.state == "conflict" or self.ends.get(run_id, 0) != expected_seq:
            return "conflict"
        if epoch != self.epoch:
            return "fenced"
        self.ends[run_id] = expected_seq + count
        self.records.append((run_id, Recorded(expected_seq + 1, count, body)))
        self.written += len(body)
        self.syncs += 1
        return "ok"

    def damage(self, run_id: str) -> None:
        """The run's last record becomes one of a version that this one does not know."""
        place = max(n for n, (run, _) in enumerate(self.records) if run == run_id)
        record = self.records[place][1]
        commit = msgspec.json.decode(record.body)
        commit["events"][0]["type"] = "not_an_event"
        self.records[place] = (run_id, Recorded(record.first, record.count, msgspec.json.encode(commit)))

    def health(self) -> dict[str, Any]:
        return {
            "state": "full" if self.state == "full" else "ok",
            "errno": "ENOSPC" if self.state == "full" else None,
            "syncs": self.syncs,
            "records": self.syncs,
            "bytes": self.written,
            "waiting": 0,
        }


class Outside(Http):
    """The real HTTP adapter; what it reaches are the services of the example.

    `answers` holds for each `METHOD path` (a shell-style pattern) what is answered in turn, the last one for ever:
    `{afterMs?, status?, json?, text?, headers?}`, `{lost: true}` (the connection ends before an answer) or `{refused: true}`.
    """

    def __init__(self, now: Any) -> None:
        super().__init__(environ={}, now=now)
        self.answers: dict[str, list[dict[str, Any]]] = {}

    def _opened(self) -> httpx.AsyncClient:
        if self._client is None:
            self._client = httpx.AsyncClient(transport=httpx.MockTransport(self._answer), trust_env=False)
        return self._client

    async def _answer(self, request: httpx.Request) -> httpx.Response:
        said = self._next(f"{request.method} {request.url.path}")
        if said.get("refused"):
            raise httpx.ConnectError("refused", request=request)
        await anyio.sleep(said.get("afterMs", 0) / 1000)
        if said.get("lost"):
            raise httpx.ReadError("reset", request=request)
        headers = said.get("headers")
        if "text" in said:
            return httpx.Response(said.get("status", 200), text=said["text"], headers=headers)
        return httpx.Response(said.get("status", 200), json=said.get("json", {"ok": True}), headers=headers)

    def _next(self, asked: str) -> dict[str, Any]:
        for pattern, answers in self.answers.items():
            if fnmatchcase(asked, pattern) and answers:
                return answers.pop(0) if len(answers) > 1 else answers[0]
        return {"status": 404, "json": {"error": "not found"}}


class Relocated:
    """The tools port, with the workspace that the examples show in place of the folder where its files really are."""

    def __init__(self, tools: Registry, folder: Path) -> None:
        self._tools, self._folder = tools, folder

    async def call(self, request: ToolRequest) -> ToolReply | Failed | NotDone | Lost:
        return await self._tools.call(self._there(request))

    async def look_up(self, request: ToolRequest) -> LookUp:
        return await self._tools.look_up(self._there(request))

    def resolve(self, tools: list[str | dict[str, Any]]) -> tuple[ToolSpec, ...]:
        return self._tools.resolve(tools)

    def _there(self, request: ToolRequest) -> ToolRequest:
        if request.workspace != WORKSPACE:
            return request
        return msgspec.structs.replace(request, workspace=str(self._folder))
