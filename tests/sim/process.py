"""One life of the daemon in the simulation: the real supervisor over the world's ports, from its opening to its death."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta
from typing import Any

import anyio
import anyio.abc
from rpcagent.errors import RpcAgentError
from rpcagent.runs import events as ev
from rpcagent.runs.decide import Rules
from rpcagent.runs.definition import Rule
from rpcagent.runs.ports import Recorded
from rpcagent.runs.supervisor import Answer, Subscriber, Supervisor

from .outside import Author, Service
from .world import World

GRACE_MS = 5_000


class ProcessClock:
    """As the real one: it begins no earlier than the last instant that the log knows, and then only goes on."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._ahead = timedelta(0)

    def now(self) -> datetime:
        return self._world.now() + self._ahead

    def not_before(self, instant: datetime | None) -> None:
        if instant is not None:
            self._ahead += max(timedelta(0), instant - self.now())


class OpenLog:
    """The journal port of one opening."""

    def __init__(self, world: World) -> None:
        self.store_id = world.store_id
        self.epoch = world.epoch
        self._world = world

    async def append(self, run_id: str, epoch: int, expected_seq: int, count: int, body: bytes, **_: Any) -> Any:
        return await self._world.append(run_id, epoch, expected_seq, count, body)

    def health(self) -> dict[str, Any]:
        return {"state": "ok"}


class Process:
    """Made at each start; `supervisor` answers once `world.alive` is set."""

    def __init__(
        self,
        world: World,
        service: Service,
        author: Author,
        kind: type[Supervisor] = Supervisor,
        present: dict[str, tuple[Rule, ...]] | None = None,
    ) -> None:
        self.world = world
        self.clock = ProcessClock(world)
        self._tasks: anyio.abc.TaskGroup | None = None
        self.supervisor = kind(
            journal=OpenLog(world),
            clock=self.clock,
            model=author,
            tools=service,
            rules=Rules(epoch=world.epoch, present=present or {}),
            spawn=self.spawn,
            incident=self._incident,
            fatal=lambda error: world.breach(f"fatal: {error}"),
            grace_ms=GRACE_MS,
        )
        self.supervisor.subscriber = Subscriber(committed=self._committed, delta=lambda *_: None)

    def spawn(self, job: Callable[..., Any], *args: Any) -> None:
        assert self._tasks is not None
        self._tasks.start_soon(job, *args)

    async def live(self) -> None:
        """From the opening to the crash; then all tasks are dropped, and whatever they still try reaches nothing."""
        async with anyio.create_task_group() as tasks:
            self._tasks = tasks
            tasks.start_soon(self._serve)
            await self.world.died.wait()
            tasks.cancel_scope.cancel()

    async def _serve(self) -> None:
        world, supervisor = self.world, self.supervisor
        world.read_back()
        await supervisor.replay((r.run_id, Recorded(r.seq, r.count, r.body)) for r in world.log)
        self.clock.not_before(supervisor.known_until)
        await world.point("open pass: before")
        await supervisor.open()
        self._opened()
        world.alive.set()
        self.spawn(supervisor.keep_time)
        supervisor.begin()

    def _opened(self) -> None:
        """Before any answer: no intent without an outcome stands as if somebody performed it, no due question is open."""
        for actor in self.supervisor.actors.values():
            state = actor.state
            assert state is not None
            self.world.seen(actor.run_id, state, "after the open pass")
            for step in state.steps.values():
                if step.status == "started" and not step.interrupted:
                    self.world.breach(f"{step.step_id} stands as started after an opening")
                if step.status == "started" and step.effect == "at_most_once" and step.kind == "tool_call":
                    self.world.breach(f"{step.step_id} is in doubt and no question is asked")
            for approval in state.approvals.values():
                if approval.expires_at is not None and approval.expires_at <= self.clock.now() and not state.ended:
                    self.world.breach(f"{approval.approval_id} is due and still {approval.status}")

    def _committed(self, run_id: str, commit: ev.Commit) -> None:
        self.world.committed(run_id, commit, self.supervisor.actors[run_id].state)

    def _incident(self, error: BaseException, what: str) -> str:
        if not self.world.dead:
            self.world.breach(f"incident in {what}: {type(error).__name__}: {error}")
        return "incident"


class Died(Exception):
    """The connection broke before the answer came."""


async def call(world: World, process: Process, ask: Callable[[Supervisor], Awaitable[Answer]]) -> Answer:
    """Sends one request over one connection. Raises Died where the process dies first, RpcAgentError as it refuses."""
    done = anyio.Event()
    answers: list[Answer] = []
    refusals: list[RpcAgentError] = []

    async def handle() -> None:
        try:
            answer = await ask(process.supervisor)
            await world.point("answer: before it is delivered")
            answers.append(answer)
        except RpcAgentError as refusal:
            await world.point("refusal: before it is delivered")
            refusals.append(refusal)
        done.set()

    process.spawn(handle)
    died = world.died
    async with anyio.create_task_group() as either:

        async def first(event: anyio.Event) -> None:
            await event.wait()
            either.cancel_scope.cancel()

        either.start_soon(first, died)
        either.start_soon(first, done)
    if refusals:
        raise refusals[0]
    if not answers:
        raise Died
    with contextlib.suppress(AttributeError):
        state = answers[0].actor.state
        world.seen(answers[0].actor.run_id, state, "answer")
    return answers[0]
