"""What a session holds in memory while its peer does not read: one answer more than there was room for."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from typing import Any

import msgspec
import pytest
from rpcagent.rpc.dispatch import Dispatcher, Method, Session

pytestmark = pytest.mark.anyio
LIMIT_S = 30


class Params(msgspec.Struct):
    size: int = 1


class Deaf:
    """A peer that reads only when it is told to; there is room while nothing waits for it."""

    def __init__(self, **limits: int) -> None:
        self.unread: list[bytes] = []
        self.executed = 0
        self.tasks: list[asyncio.Task[None]] = []
        self.reads = asyncio.Event()
        methods = {
            "inline": Method(Params, self.work, mutating=False, inline=True),
            "task": Method(Params, self.work, mutating=True, inline=False),
        }
        dispatcher = Dispatcher(methods, on_incident=lambda _e, _m: "")
        self.session = Session(dispatcher, None, self.unread.append, self.spawn, room=self.room, **limits)

    async def room(self) -> None:
        while self.unread:
            await self.reads.wait()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self.tasks.append(asyncio.create_task(work))

    async def work(self, _: Any, params: Params) -> str:
        self.executed += 1
        return "x" * params.size

    async def read(self) -> Any:
        """One message, when everything that can go on without it has come to rest."""
        await self.rest()
        message = self.unread.pop(0)
        self.reads.set()
        self.reads = asyncio.Event()
        return json.loads(message)

    async def rest(self) -> None:
        for _ in range(100):
            await asyncio.sleep(0)


def call(method: str, ident: int, size: int = 1) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": ident, "method": method, "params": {"size": size}}


async def test_no_inline_request_is_executed_before_there_is_room_for_its_answer_p10() -> None:
    peer = Deaf()
    feeding = asyncio.create_task(peer.session.feed([json.dumps(call("inline", n)).encode() for n in range(64)]))
    for n in range(64):
        assert (await peer.read())["id"] == n
        assert peer.executed == n + 1
    async with asyncio.timeout(LIMIT_S):
        await feeding


async def test_answers_of_started_requests_are_sent_one_by_one_as_there_is_room_p10() -> None:
    peer = Deaf()
    await peer.session.feed([json.dumps(call("task", n)).encode() for n in range(64)])
    for n in range(64):
        await peer.rest()
        assert (peer.executed, len(peer.unread)) == (64, 1)
        assert (await peer.read())["id"] == n
    async with asyncio.timeout(LIMIT_S):
        await asyncio.gather(*peer.tasks)


async def test_a_batch_goes_on_only_while_there_is_room_p10() -> None:
    peer = Deaf()
    batch = json.dumps([call("inline", n) for n in range(3)]).encode()
    await peer.session.feed([batch] * 10)
    await peer.rest()
    assert (len(peer.unread), peer.executed) == (1, 3 + 9)  # the first item of each has its place in the order
    for _ in range(10):
        assert [answer["id"] for answer in await peer.read()] == [0, 1, 2]
    async with asyncio.timeout(LIMIT_S):
        await asyncio.gather(*peer.tasks)


async def test_items_of_a_batch_beyond_the_bytes_that_all_batches_may_hold_are_refused_and_not_executed_p10() -> None:
    peer = Deaf(max_batch_bytes=1_000)
    await peer.session.feed([json.dumps([call("inline", n, 600) for n in range(4)]).encode()])
    answers = await peer.read()
    assert [answer["id"] for answer in answers] == [0, 1, 2, 3]
    assert ["result" in answer for answer in answers] == [True, True, False, False]
    assert answers[2]["error"]["data"] == {"code": "OVERLOADED", "retryable": True, "limit": "maxBatchBytes"}
    assert peer.executed == 2
    await peer.session.feed([json.dumps([call("inline", 7, 600)]).encode()])
    assert "result" in (await peer.read())[0]  # what was sent is not held any more
