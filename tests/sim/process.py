"""One life of the daemon in the simulation: the real supervisor over the world's ports, from its opening to its death."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta
from typing import Any, TypeVar

import anyio
import anyio.abc
from msgspec import Raw
from msgspec.structs import replace
from rpcagent.errors import RpcAgentError
from rpcagent.runs import events as ev
from rpcagent.runs.decide import Rules
from rpcagent.runs.definition import Rule
from rpcagent.runs.keeper import Keeper
from rpcagent.runs.ports import Recorded
from rpcagent.runs.supervisor import Answer, Subscriber, Supervisor

from .archive import CrashArchive, holes, overlooked
from .outside import Author, Service
from .world import World

GRACE_MS = 5_000
T = TypeVar("T")


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
    """Made at each start; `supervisor` answers once `world.alive` is set. `kept`: it makes a checkpoint after each commit."""

    def __init__(
        self,
        world: World,
        service: Service,
        author: Author,
        kind: type[Supervisor] = Supervisor,
        present: dict[str, tuple[Rule, ...]] | None = None,
        *,
        kept: bool = False,
    ) -> None:
        self.world = world
        self.kept = kept
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
            archive=CrashArchive(world) if kept else None,
        )
        self.keeper = Keeper(self.supervisor)
        self._recorded = anyio.Event()
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
        self._take_in()
        await supervisor.replay((r.run_id, Recorded(r.seq, r.count, r.body)) for r in world.log[world.files.cut :])
        self.keeper.replayed()
        self.clock.not_before(supervisor.known_until)
        await world.point("open pass: before")
        await supervisor.open()
        self._opened()
        world.alive.set()
        self.spawn(supervisor.keep_time)
        supervisor.begin()
        if self.kept:
            self.spawn(self._keep)

    def _take_in(self) -> None:
        """What the manifest says, as `store.open_store` does it."""
        manifest, supervisor = self.world.files.manifest, self.supervisor
        if manifest is None:
            return
        supervisor.known_until = manifest.at
        supervisor.roster.places = manifest.places
        self.keeper.ended.update(manifest.ended)
        supervisor.roster.counts.update(manifest.ended)
        for run_id, heads, body in manifest.live:
            supervisor.park(run_id, replace(heads, body=Raw(body)))

    async def _keep(self) -> None:
        """A checkpoint after each commit; one that is made during a checkpoint waits for its end."""
        while True:
            try:
                await self.keeper.checkpoint()
            except Exception as error:  # noqa: BLE001 - nothing may hinder it here
                self.world.breach(f"checkpoint: {type(error).__name__}: {error}")
            self._look_over("after a checkpoint")
            self._recorded = anyio.Event()
            if not self.supervisor.tail_records:
                await self._recorded.wait()

    def _look_over(self, when: str) -> None:
        if self.kept and not self.world.dead:
            for wrong in (*holes(self.world), *overlooked(self.world, self.supervisor)):
                self.world.breach(f"{when}: {wrong}")

    async def delete(self) -> bool:
        """Deletes what may go. Whether anything was due."""
        return bool(await self.keeper.collect())

    async def rest(self) -> None:
        """No run that is at rest stays in memory."""
        if self.kept and not self.world.dead:
            before = len(self.supervisor.actors)
            await self.keeper._park()
            if len(self.supervisor.actors) != before:
                self._look_over("at rest")

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
        for run_id, heads in self.supervisor.roster.parked.items():
            if heads.wake is not None and heads.wake <= self.clock.now():
                self.world.breach(f"{run_id} is due and was not looked at")
        self._look_over("after the open pass")

    def _committed(self, run_id: str, commit: ev.Commit) -> None:
        actor = self.supervisor.actors.get(run_id)
        self.world.committed(run_id, commit, actor.state if actor is not None else None)
        self._recorded.set()

    def _incident(self, error: BaseException, what: str) -> str:
        if not self.world.dead:
            self.world.breach(f"incident in {what}: {type(error).__name__}: {error}")
        return "incident"


class Died(Exception):
    """The connection broke before the answer came."""


async def call(world: World, process: Process, ask: Callable[[Process], Awaitable[T]]) -> T:
    """Sends one request over one connection. Raises Died where the process dies first, RpcAgentError as it refuses."""
    done = anyio.Event()
    answers: list[T] = []
    refusals: list[RpcAgentError] = []

    async def handle() -> None:
        try:
            answer = await ask(process)
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
    answer = answers[0]
    if isinstance(answer, Answer):
        world.seen(answer.actor.run_id, answer.actor.state, "answer")
    await process.rest()
    return answer
