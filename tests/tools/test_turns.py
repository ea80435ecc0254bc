"""How many calls of a kind go on at once, and what a call that waits has done: nothing."""

from __future__ import annotations

import resource
from typing import Any

import anyio
import pytest
from rpcagent.runs.effects import ToolSpec
from rpcagent.runs.events import Trouble
from rpcagent.runs.outcomes import Failed, ToolReply
from rpcagent.tools.registry import Registry
from rpcagent.tools.turns import Turns
from tests.tools.calls import builtin, inline, request_for

pytestmark = pytest.mark.anyio

LOOKUP = {"url": "http://127.0.0.1:1/", "found": "x"}
HTTP = inline(http={"url": "http://127.0.0.1:1/"}, effect="reconcilable", lookup=LOOKUP)


class Outside:
    """Every adapter in one: holds each call until it is let go, and counts those that it has."""

    def __init__(self) -> None:
        self.go = anyio.Event()
        self.inside = 0
        self.most = 0
        self.begun = 0

    async def call(self, request: Any) -> Any:
        self.begun += 1
        self.inside += 1
        self.most = max(self.most, self.inside)
        try:
            await self.go.wait()
        finally:
            self.inside -= 1
        return ToolReply(result="done")

    async def ask(self, request: Any) -> Any:
        await self.call(request)


def registry_over(outside: Outside) -> Registry:
    servers: Any = {"files": outside, "shell": outside}
    http: Any = outside
    return Registry(servers=servers, http=http, turns=Turns(searches=2, commands=3, requests=4))


@pytest.mark.parametrize(
    ("spec", "most"), [(builtin("files.search"), 2), (builtin("shell.run"), 3), (HTTP, 4), (builtin("files.read"), 9)]
)
async def test_calls_of_a_kind_take_turns_over_all_runs(spec: ToolSpec, most: int) -> None:
    outside = Outside()
    registry = registry_over(outside)
    async with anyio.create_task_group() as group:
        for _ in range(9):
            group.start_soon(registry.call, request_for(spec, {}))
        await anyio.wait_all_tasks_blocked()
        assert outside.inside == most
        outside.go.set()
    assert (outside.begun, outside.most) == (9, most)


async def test_look_ups_and_calls_over_http_take_turns_together() -> None:
    outside = Outside()
    registry = registry_over(outside)
    async with anyio.create_task_group() as group:
        for ask in (registry.call, registry.look_up) * 4:
            group.start_soon(ask, request_for(HTTP, {}))
        await anyio.wait_all_tasks_blocked()
        assert outside.inside == 4
        outside.go.set()
    assert (outside.begun, outside.most) == (8, 4)


async def test_a_call_that_is_cancelled_before_its_turn_was_not_dispatched_and_takes_no_turn_away() -> None:
    outside = Outside()
    registry = registry_over(outside)
    request = request_for(builtin("files.search"), {})
    async with anyio.create_task_group() as group:
        for _ in range(2):
            group.start_soon(registry.call, request)
        await anyio.wait_all_tasks_blocked()
        with anyio.move_on_after(0) as scope:
            await registry.call(request)
        assert (scope.cancelled_caught, outside.begun) == (True, 2)
        outside.go.set()
    assert await registry.call(request) == ToolReply(result={"content": [{"type": "text", "text": "done"}]})


async def test_the_time_limit_of_a_call_counts_from_its_turn() -> None:
    outside = Outside()
    registry = registry_over(outside)
    slow = builtin("files.search")
    quick = ToolSpec(name="files.search", effect="read_only", timeout_ms=1)
    outcomes: list[Any] = []

    async def call(spec: ToolSpec) -> None:
        outcomes.append(await registry.call(request_for(spec, {})))

    async with anyio.create_task_group() as group:
        for spec in (slow, slow):
            group.start_soon(call, spec)
        await anyio.wait_all_tasks_blocked()
        group.start_soon(call, quick)
        await call(ToolSpec(name="files.read", effect="read_only", timeout_ms=20))  # twenty times its limit
        assert outcomes == [Failed(error=Trouble(kind="timeout", message="No answer within 20 ms."))]
        group.cancel_scope.cancel()

    outside = Outside()
    error = Trouble(kind="timeout", message="No answer within 1 ms.")
    assert await registry_over(outside).call(request_for(quick, {})) == Failed(error=error)


def test_requests_leave_most_descriptors_to_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit, most in ((256, 64), (1_048_576, 512), (resource.RLIM_INFINITY, 512)):
        monkeypatch.setattr(resource, "getrlimit", lambda _what, limit=limit: (limit, limit))
        assert Turns()._most["requests"] == most
