"""What the methods make of params that could cost something, over real runs and a journal in memory."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from rpcagent.ids import run_id as derived
from tests.scenarios.process import Life
from tests.scenarios.world import MemoryLog, Outside, WorldClock

pytestmark = pytest.mark.anyio
LIMIT_S = 30
NO_RUN = "run_" + "a" * 26
START = {"agent": {"model": {"script": [{"text": "done"}]}}, "input": "", "drive": "manual"}


class Daemon:
    def __init__(self, folder: Path, group: anyio.abc.TaskGroup) -> None:
        (folder / "workspace").mkdir()
        clock = WorldClock()
        self.log = MemoryLog()
        self.log.opened()
        self.out: list[Any] = []
        self.life = Life(
            folder=folder,
            log=self.log,
            outside=Outside(clock.now),
            clock=clock,
            limits={},
            send=lambda message: self.out.append(json.loads(message)),
            group=group,
        )

    async def call(self, method: str, **params: Any) -> Any:
        """The result, or the word of the error."""
        answer = await self.answer(method, **params)
        return answer["result"] if "result" in answer else answer["error"]["data"]["code"]

    async def answer(self, method: str, **params: Any) -> Any:
        request = {"jsonrpc": "2.0", "id": method, "method": method, "params": params}
        with anyio.fail_after(LIMIT_S):
            await self.life.feed(json.dumps(request).encode() + b"\n")
            await self.life.settled()
        [answer] = [one for one in self.out if one.get("id") == method]
        self.out.remove(answer)
        return answer


@pytest.fixture
async def daemon(tmp_path: Path) -> AsyncIterator[Daemon]:
    async with anyio.create_task_group() as group:
        daemon = Daemon(tmp_path, group)
        await daemon.life.open()
        yield daemon
        group.cancel_scope.cancel()


@pytest.mark.parametrize("place", ["9" * 30, "9" * 13, "9" * 5_000, "-1", "", "1.5", "\u0661", "x"])
async def test_a_cursor_with_a_place_that_is_none_is_invalid(daemon: Daemon, place: str) -> None:
    assert await daemon.call("list", cursor=f"{daemon.log.store_id}.{place}") == "CURSOR_INVALID"


async def test_a_cursor_beyond_the_last_run_gives_an_empty_page(daemon: Daemon) -> None:
    assert await daemon.call("list", cursor=f"{daemon.log.store_id}.999999999999") == {"runs": []}


async def test_only_runs_that_there_are_become_the_peers_own(daemon: Daemon) -> None:
    own = daemon.life.notifier._own
    named = {"runId": NO_RUN, "clientRequestId": "a"}
    for method, params in (
        ("status", {"runId": NO_RUN}),
        ("events", {"runId": NO_RUN}),
        ("step", named),
        ("resume", named),
        ("cancel", named),
    ):
        assert await daemon.call(method, **params) == "NOT_FOUND"
    assert await daemon.call("start", clientRequestId="a", **{**START, "agent": "no such agent"}) == "INVALID_PARAMS"
    daemon.log.state = "full"
    assert await daemon.call("start", clientRequestId="b", **START) == "STORAGE"
    assert own == set()
    daemon.log.state = "ok"
    run_id = (await daemon.call("start", clientRequestId="b", **START))["runId"]
    assert own == {run_id}


@pytest.mark.parametrize(
    ("method", "params"),
    [
        ("status", {"runId": NO_RUN}),
        ("status", {"clientRequestId": "never-sent"}),
        ("events", {"runId": NO_RUN}),
        ("cancel", {"runId": NO_RUN, "clientRequestId": "a"}),
    ],
)
async def test_where_a_run_is_not_there_the_answer_names_the_store_that_was_asked_s1_17(
    daemon: Daemon, method: str, params: dict[str, str]
) -> None:
    error = (await daemon.answer(method, **params))["error"]
    run_id = params.get("runId", derived(daemon.log.store_id, "", "never-sent"))
    assert error["data"] == {
        "code": "NOT_FOUND", "retryable": False, "runId": run_id, "storeId": daemon.log.store_id,
    }  # fmt: skip
    assert (await daemon.call("status"))["storeId"] == daemon.log.store_id
    assert error["message"].startswith("there is no such run in this store: is it the store in which the run began?")


async def test_a_start_that_is_the_peers_own_is_told_from_its_first_event(daemon: Daemon) -> None:
    await daemon.call("initialize", protocolVersion=1, capabilities={"events": "own"})
    run = (await daemon.call("start", clientRequestId="a", **START))["run"]
    assert [note["params"]["seq"] for note in daemon.out] == list(range(1, run["lastSeq"] + 1))


@pytest.mark.parametrize(
    ("name", "amount"), [("costUsd", 1e308), ("activeS", 1.1e9), ("tokens", 10**13), ("steps", 10**400)]
)
async def test_a_limit_beyond_all_use_is_refused_with_its_path(daemon: Daemon, name: str, amount: float) -> None:
    agent = {**START["agent"], "budget": {name: amount}}  # type: ignore[dict-item]
    for more in ({"budget": {name: amount}}, {"agent": agent}):
        assert await daemon.call("start", clientRequestId="a", **{**START, **more}) == "INVALID_PARAMS"
    extend = {"runId": NO_RUN, "approvalId": f"apr_{'a' * 26}_1", "digest": "", "decision": "extend"}
    answer = await daemon.call("approve", clientRequestId="a", **extend, extend={name: amount})
    assert answer == "INVALID_PARAMS"


async def test_the_largest_limits_add_up_to_numbers_that_can_be_shown(daemon: Daemon) -> None:
    budget = {"costUsd": 1e9, "activeS": 1e9, "tokens": 10**12}
    run_id = (await daemon.call("start", clientRequestId="a", **START, budget=budget))["runId"]
    assert (await daemon.call("status", runId=run_id))["budget"]["limits"]["costUsd"] == 1e9
