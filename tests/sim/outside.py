"""What lies outside: a service with its own truth that survives every crash, and a model that reads a script.

The service has one tool for each effect class. It counts what was done for each logical operation (`op` in the
arguments) and for each idempotency key, and checks at the moment it is touched that it may be.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import anyio
import msgspec
from rpcagent.ids import digest_of
from rpcagent.runs.effects import ToolSpec
from rpcagent.runs.events import Trouble, Usage
from rpcagent.runs.outcomes import AskedCall, Failed, LookUp, Lost, ModelReply, NotDone, ToolReply
from rpcagent.runs.ports import ModelRequest, ToolRequest

from .world import World

READ = ToolSpec(name="fs.read", effect="read_only")
PUT = ToolSpec(name="kv.put", effect="idempotent")
CLOSE = ToolSpec(name="tickets.close", effect="reconcilable")
PAY = ToolSpec(name="bank.pay", effect="at_most_once")
TOOLS = (READ, PUT, CLOSE, PAY)


class Turn(msgspec.Struct, frozen=True):
    """One answer of the model. `calls` are (tool, op); `limited`: so many attempts are told to come back in a minute."""

    text: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    limited: int = 0


class Habits(msgspec.Struct, frozen=True):
    """How the service behaves. `slow`: seconds an operation takes before its effect. `loses`: operations whose first
    reply is lost on the way, after the effect; `drops`: whose first request is lost, before it."""

    slow: dict[str, float] = {}
    loses: frozenset[str] = frozenset()
    drops: frozenset[str] = frozenset()


class Service:
    """The Tools port, and the truth about what happened. The part in `World` is asked before anything is done."""

    def __init__(self, world: World, habits: Habits) -> None:
        self.world = world
        self.habits = habits
        self.effects: Counter[str] = Counter()
        self.by_key: dict[str, str] = {}
        self.keys: dict[str, str] = {}
        self.attempts: dict[str, int] = {}
        self.reads: Counter[str] = Counter()
        self.look_ups = 0
        self.touched: list[str] = []

    async def call(self, request: ToolRequest) -> ToolReply | Failed | NotDone | Lost:
        op = request.arguments["op"]
        effect = request.spec.effect
        await self.world.point(f"{effect}: before the effect")
        self._may_touch(request)
        if op in self.habits.slow:
            await anyio.sleep(self.habits.slow[op])
            await self.world.point(f"{effect}: half-way")
        first = self.attempts.get(op, 0) == 0
        self.attempts[op] = self.attempts.get(op, 0) + 1
        if first and op in self.habits.drops:
            return Lost(reason="connection_lost")
        self._do(request, op)
        await self.world.point(f"{effect}: after the effect, before the reply")
        if first and op in self.habits.loses:
            return Lost(reason="timeout")
        return ToolReply(result=result_of(op))

    def _do(self, request: ToolRequest, op: str) -> None:
        if request.spec.effect == "read_only":
            self.reads[op] += 1
            return
        if self.keys.setdefault(op, request.key) != request.key:
            self.world.breach(f"{op} came with two keys")
        if request.spec.effect == "idempotent" and request.key in self.by_key:
            return  # that is its contract
        self.effects[op] += 1
        self.by_key[request.key] = op
        if self.effects[op] > 1:
            self.world.breach(f"{op} happened {self.effects[op]} times")

    async def look_up(self, request: ToolRequest) -> LookUp:
        await self.world.point("look-up: before")
        state = self.world.durable[request.run_id]
        if state.held(self.world.epoch) and state.recovery == "manual":
            self.world.breach("a held run with manual recovery looked up")
        self.look_ups += 1
        op = request.arguments["op"]
        answer = LookUp(answer="found", result=result_of(op)) if request.key in self.by_key else LookUp(answer="absent")
        await self.world.point("look-up: answered")
        return answer

    def _may_touch(self, request: ToolRequest) -> None:
        world = self.world
        self.touched.append(request.step_id)
        state = world.durable.get(request.run_id)
        if request.spec.effect != "read_only" and (request.step_id, request.attempt) not in world.intents:
            world.breach(f"{request.step_id} acts before its intent is durable")
        if state is None or state.held(world.epoch):
            world.breach(f"{request.step_id} acts while its run waits for resume")
        elif state.phase != "active" and state.last_at < world.now():
            world.breach(f"{request.step_id} begins in phase {state.phase}")


def result_of(op: str) -> dict[str, Any]:
    return {"content": [{"type": "text", "text": f"done {op}"}]}


class Author:
    """The Model port: turn n of the script for a context with n answers in it. Checks every context it is shown. `others`:
    scripts of other agents than that of the scenario."""

    def __init__(
        self, world: World, script: tuple[Turn, ...], others: dict[str, tuple[Turn, ...]] | None = None
    ) -> None:
        self.world = world
        self.script = script
        self.others = others or {}
        self.hashes: dict[str, str] = {}
        self.contexts: dict[str, bytes] = {}
        self.asked: Counter[str] = Counter()

    async def complete(
        self, request: ModelRequest, emit: Callable[[str], None]
    ) -> ModelReply | NotDone | Failed | Lost:
        await self.world.point("model: before it is asked")
        self._check(request)
        script = self.others.get(request.definition.agent, self.script)
        turn = script[sum(m.role == "assistant" for m in request.messages)]
        self.asked[request.step_id] += 1
        emit(turn.text)
        await anyio.sleep(0.01)
        await self.world.point("model: answered")
        if self.asked[request.step_id] <= turn.limited:
            return NotDone(error=Trouble(kind="rate_limit"), retry_after_ms=60_000)
        calls = tuple(AskedCall(tool=tool, arguments={"op": op}, provider_id="same") for tool, op in turn.calls)
        return ModelReply(text=turn.text, calls=calls, usage=Usage(input_tokens=7, output_tokens=3, cost_usd=0.01))

    def _check(self, request: ModelRequest) -> None:
        world = self.world
        state = world.durable.get(request.run_id)
        if (request.step_id, request.attempt) not in world.intents:
            world.breach(f"{request.step_id} is asked before its intent is durable")
        if request.step_id in world.accepted:
            world.breach(f"{request.step_id} is asked again after its answer was accepted")
        if state is None or state.held(world.epoch):
            world.breach("the model is asked while the run waits for resume")
        bytes_of_it = msgspec.json.encode(request.messages)
        if self.contexts.setdefault(request.step_id, bytes_of_it) != bytes_of_it:
            world.breach(f"{request.step_id}: another context at another attempt")
        if self.hashes.setdefault(request.step_id, request.request_hash) != request.request_hash:
            world.breach(f"{request.step_id}: another request hash at another attempt")
        chain = digest_of(request.definition)
        for message in request.messages:
            chain = digest_of([chain, message])
        if chain != request.request_hash:
            world.breach(f"{request.step_id}: the request hash is not that of the request")
        problem = pairing(request)
        if problem:
            world.breach(f"{request.step_id}: {problem}")


def pairing(request: ModelRequest) -> str:
    """Each call has exactly one result, right after its answer and in call order; else what is wrong."""
    owed: list[str] = []
    for message in request.messages:
        if message.role == "tool":
            if not owed or owed.pop(0) != message.step_id or message.result is None:
                return "a result stands where none or another one is owed"
            continue
        if owed:
            return f"{len(owed)} calls without a result"
        owed = [call.step_id for call in message.calls]
    return f"{len(owed)} calls without a result at the end" if owed else ""
