"""The test's side of the fault MCP server: its configuration, its faults, its truth, and what it tells. All bounded."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import anyio
from rpcagent.runs.effects import ToolSpec
from rpcagent.runs.outcomes import LookUp, ToolReply
from rpcagent.tools.mcp import McpServers
from rpcagent.tools.registry import Registry
from tests.service.counting import read_truth
from tests.tools.calls import KEY, request_for

ROOT = Path(__file__).resolve().parents[2]
EVENT_S = 20.0
SECRET = 'se"cret\\of-ünusual shape'
TOOLS = {
    "read": {"effect": "read_only", "timeoutMs": 30_000},
    "find": {"effect": "read_only", "hidden": True},
    "charge_once": {"effect": "idempotent", "keyArgument": "idempotency_key"},
    "charge_findable": {
        "effect": "reconcilable",
        "lookup": {
            "tool": "find",
            "arguments": {"operation": "{operation}"},
            "found": "status == 'done'",
            "absent": "status == 'none'",
        },
    },
}


class McpFaultServer:
    """One folder of truth, faults and events, over all lives of the server."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "faults").mkdir(parents=True)
        os.mkfifo(folder / "events")
        os.mkfifo(folder / "releases")
        self._events = os.open(folder / "events", os.O_RDWR | os.O_NONBLOCK)
        self._releases = os.open(folder / "releases", os.O_RDWR | os.O_NONBLOCK)
        self._buffer = b""
        self._heard: list[dict[str, Any]] = []
        self._faults = 0

    def close(self) -> None:
        os.close(self._events)
        os.close(self._releases)

    def config(self, **members: Any) -> dict[str, Any]:
        command = [sys.executable, "-m", "tests.service.mcp_server", str(self.folder)]
        env = {"PYTHONPATH": str(ROOT), **members.pop("env", {})}
        return {"command": command, "env": env, **members}

    def fault(self, name: str, at: str = "after_effect", arg: Any = None, *, always: bool = False) -> None:
        """For the next time that the server comes to `at`: `start`, `list`, `before_effect` or `after_effect`."""
        self._faults += 1
        fault = {"name": name, "at": at, "arg": arg, "always": always}
        (self.folder / "faults" / f"{self._faults:04}").write_text(json.dumps(fault))

    def release(self, count: int = 1) -> None:
        os.write(self._releases, b"x" * count)

    async def event(self, name: str) -> dict[str, Any]:
        """The next event of that name, also one that is past; AssertionError when none comes."""
        with anyio.move_on_after(EVENT_S):
            while True:
                for place, event in enumerate(self._heard):
                    if event["event"] == name:
                        return self._heard.pop(place)
                await anyio.wait_readable(self._events)
                self._take()
        raise AssertionError(f"no event {name!r} within {EVENT_S} s; there were: {self._heard}")

    def events(self, name: str) -> list[dict[str, Any]]:
        """All of that name that have happened and that `event` did not return."""
        self._take()
        return [event for event in self._heard if event["event"] == name]

    def calls(self) -> list[dict[str, Any]]:
        return [line for line in read_truth(self.folder / "truth") if line["kind"] == "call"]

    def effects(self) -> dict[str, int]:
        """Effects by tool."""
        return dict(Counter(line["path"] for line in read_truth(self.folder / "truth") if line["kind"] == "effect"))

    def _take(self) -> None:
        try:
            self._buffer += os.read(self._events, 1 << 20)
        except BlockingIOError:
            return
        *lines, self._buffer = self._buffer.split(b"\n")
        self._heard += [json.loads(line) for line in lines]


class World:
    """One fault server, and a registry in front of it."""

    def __init__(self, folder: Path) -> None:
        self.server = McpFaultServer(folder / "server")
        self.workspace = folder / "workspace"
        self.workspace.mkdir()
        self.notes: list[str] = []
        self.faults: list[Exception] = []
        self.registry = self.new_registry()
        self.specs: dict[str, ToolSpec] = {}

    def new_registry(self, **options: Any) -> Registry:
        environ = {"PATH": os.environ["PATH"], "T_TOKEN": SECRET, "DAEMONS_OWN": "x"}
        servers = McpServers(environ, lambda _server, line: self.notes.append(line), **options)
        return Registry(mcp=servers, on_fault=lambda error, _request: self.faults.append(error))

    async def resolve(self, **members: Any) -> None:
        config = self.server.config(**{"tools": TOOLS, "env": {"TOKEN": "${T_TOKEN}"}, **members})
        specs = await self.registry.resolve_mcp("t", config, str(self.workspace), "$.agent.mcp.t")
        self.specs = {spec.name.removeprefix("t."): spec for spec in specs}

    async def call(self, tool: str, timeout_ms: int = 20_000, key: str = KEY, **arguments: Any) -> Any:
        spec = self.specs[tool]
        spec = ToolSpec(**{f: getattr(spec, f) for f in spec.__struct_fields__} | {"timeout_ms": timeout_ms})
        arguments = {"operation": "o1", **arguments}
        return await self.registry.call(request_for(spec, arguments, workspace=str(self.workspace), key=key))

    async def look_up(self, tool: str, **arguments: Any) -> LookUp:
        arguments = {"operation": "o1", **arguments}
        return await self.registry.look_up(request_for(self.specs[tool], arguments, workspace=str(self.workspace)))


def said(tool: str, effects: int) -> dict[str, Any]:
    return {"tool": tool, "operation": "o1", "effects": effects, "status": "done" if effects else "none"}


def structured(outcome: Any) -> Any:
    assert isinstance(outcome, ToolReply), outcome
    return outcome.result["structuredContent"]
