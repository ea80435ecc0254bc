"""Requests as the engine makes them, for the tests of the tools."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from rpcagent.runs.effects import ToolSpec
from rpcagent.runs.events import Trouble
from rpcagent.runs.outcomes import Failed, Lost, NotDone, ToolReply
from rpcagent.runs.ports import ToolRequest
from rpcagent.tools.registry import Registry

KEY = "key_a"


def request_for(
    spec: ToolSpec,
    arguments: dict[str, Any],
    *,
    workspace: str | None = None,
    attempt: int = 1,
    key: str = KEY,
    hidden: tuple[str, ...] = (),
) -> ToolRequest:
    return ToolRequest(
        run_id="run_a",
        step_id="stp_a_1",
        attempt=attempt,
        spec=spec,
        arguments=arguments,
        key=key,
        workspace=workspace,
        hidden=hidden,
    )


def builtin(name: str) -> ToolSpec:
    return Registry().resolve([name])[0]


def inline(**members: Any) -> ToolSpec:
    """An inline tool `t.do`, as a caller would give it."""
    return Registry().resolve([{"name": "t.do", **members}])[0]


def sha(content: bytes | str) -> str:
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()


async def call(
    workspace: Path,
    tool: str,
    attempt: int = 1,
    store: Path | None = None,
    hidden: tuple[str, ...] = (),
    **arguments: Any,
) -> ToolReply | Failed | NotDone | Lost:
    registry = Registry(store=str(store) if store else None)
    request = request_for(builtin(f"files.{tool}"), arguments, workspace=str(workspace), attempt=attempt, hidden=hidden)
    return await registry.call(request)


async def ok(workspace: Path, tool: str, attempt: int = 1, **arguments: Any) -> dict[str, Any]:
    outcome = await call(workspace, tool, attempt, **arguments)
    assert isinstance(outcome, ToolReply), outcome
    return outcome.result


def failed(kind: str, message: str) -> Failed:
    return Failed(error=Trouble(kind=kind, message=message))


def everything_below(path: Path) -> dict[str, bytes | None]:
    return {
        str(p.relative_to(path)): p.read_bytes() if p.is_file() and not p.is_symlink() else None
        for p in sorted(path.rglob("*"))
    }
