"""Requests as the engine makes them, for the tests of the tools."""

from __future__ import annotations

from typing import Any

from rpcagent.runs.effects import ToolSpec
from rpcagent.runs.ports import ToolRequest
from rpcagent.tools.registry import Registry

KEY = "key_a"


def request_for(
    spec: ToolSpec, arguments: dict[str, Any], *, workspace: str | None = None, attempt: int = 1, key: str = KEY
) -> ToolRequest:
    return ToolRequest(
        run_id="run_a",
        step_id="stp_a_1",
        attempt=attempt,
        spec=spec,
        arguments=arguments,
        key=key,
        workspace=workspace,
    )


def builtin(name: str) -> ToolSpec:
    return Registry().resolve([name])[0]


def inline(**members: Any) -> ToolSpec:
    """An inline tool `t.do`, as a caller would give it."""
    return Registry().resolve([{"name": "t.do", **members}])[0]
