"""Runs one scenario through its crashes, and checks at the end what must hold whatever happened on the way."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from unittest.mock import patch

import anyio
import anyio.abc
import msgspec
from rpcagent.runs import roster
from rpcagent.runs.definition import Budget, Definition, Drive, ModelSettings, Recovery, Rule
from rpcagent.runs.state import RunState, Step
from rpcagent.runs.supervisor import Supervisor

from .client import Client, Truth
from .outside import TOOLS, Author, Habits, Service, Turn
from .process import Process
from .world import MOST_SECONDS, Plan, World

UNDISTURBED = Plan()
ALLOW = (Rule(do="allow", effect="idempotent"), Rule(do="allow", effect="reconcilable"))


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """What is run, what the client does, and how it may end. `drama` is the client's part, from the run's id to its
    last status. `undone`: operations that may have been left out (denied, cancelled, abandoned). `others`: scripts of the
    agents of other runs."""

    name: str
    script: tuple[Turn, ...]
    drama: Callable[[Client, str], Awaitable[str]]
    ends: frozenset[str] = frozenset({"completed"})
    rules: tuple[Rule, ...] = ALLOW
    budget: Budget = Budget()
    drive: Drive = "auto"
    recovery: Recovery = "auto"
    habits: Habits = Habits()
    undone: frozenset[str] = frozenset()
    others: dict[str, tuple[Turn, ...]] = {}
    most_seconds: float = MOST_SECONDS

    def definition(self, agent: str = "") -> Definition:
        return Definition(
            agent=agent or self.name,
            model=ModelSettings(max_output_tokens=100, retry_for_ms=3_600_000),
            tools=TOOLS,
            rules=self.rules,
            budget=self.budget,
        )


class Ending(msgspec.Struct, frozen=True, kw_only=True):
    """`points[n]`: what the n-th process passed, in order."""

    status: str
    broken: tuple[str, ...]
    points: tuple[tuple[str, ...], ...]
    commits: int
    effects: dict[str, int]
    unknown: dict[str, str]
    asked: int
    seconds: float


async def play(
    scenario: Scenario,
    plan: Plan = UNDISTURBED,
    told: Truth = "happened",
    kind: type[Supervisor] = Supervisor,
    *,
    kept: bool = False,
) -> Ending:
    """One scenario from its first request to its end, through all crashes of the plan. `kept`: each process makes a
    checkpoint after every commit, and keeps no run at rest in memory."""
    world = World(plan)
    service = Service(world, scenario.habits)
    author = Author(world, scenario.script, scenario.others)
    alive: list[Process] = []
    client = Client(world, service, lambda: alive[-1], told)
    status = "stuck"

    async def lives() -> None:
        while True:
            world.opened()
            alive.append(Process(world, service, author, kind, kept=kept))
            await alive[-1].live()

    async def client_side() -> None:
        nonlocal status
        run = await client.start("start-1", scenario.definition(), scenario.drive, scenario.recovery)
        status = await scenario.drama(client, run)
        state = world.durable[run] if run in world.deleted else await client.state(run)
        _check(scenario, client, world, state, status)
        world.over.set()

    async def to_the_end(tasks: anyio.abc.TaskGroup) -> None:
        await world.over.wait()
        world.dead = True
        tasks.cancel_scope.cancel()

    try:
        with (
            anyio.move_on_after(scenario.most_seconds),
            patch.object(roster, "RESIDENT", 0 if kept else roster.RESIDENT),
        ):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(lives)
                tasks.start_soon(client_side)
                tasks.start_soon(to_the_end, tasks)
    except* Exception as errors:  # noqa: BLE001 - whatever it is, the engine or its supervisor did not hold
        world.breach(f"ended by {errors.exceptions!r}")
    if status == "stuck":
        world.breach("the scenario never came to its end")
    return Ending(
        status=status,
        broken=tuple(world.broken),
        points=tuple(tuple(passed) for passed in world.points),
        commits=world.acknowledged,
        effects=dict(service.effects),
        unknown=client.unknown_answers,
        asked=sum(author.asked.values()),
        seconds=anyio.current_time() - world.began,
    )


def _check(scenario: Scenario, client: Client, world: World, state: RunState, status: str) -> None:
    if status not in scenario.ends:
        world.breach(f"ended as {status}")
    steps = {s.step_id: s for s in (*state.recent, *state.steps.values())}
    for step in steps.values():
        if step.kind == "tool_call" and step.effect != "read_only":
            _check_effect(scenario, client, world, step, status)
    for step_id, attempt in world.doubts:
        step = steps.get(step_id)
        if step is None or step.effect != "at_most_once" or step.kind != "tool_call":
            continue
        asked = any(
            a.kind == "unknown_outcome" and a.step_id == step_id and a.subject["attempt"] == attempt
            for a in (*state.approvals.values(), *state.closed.values())
        )
        if not asked:
            world.breach(f"{step_id}: attempt {attempt} was in doubt and nobody was asked")
    if status == "completed":
        unsettled = [s.step_id for s in steps.values() if not s.settled]
        if unsettled or state.step_request is not None or state.approvals:
            world.breach(f"completed with {unsettled}, {state.step_request}, {list(state.approvals)}")
        if state.output != scenario.script[-1].text:
            world.breach(f"completed with output {state.output!r}")


def _check_effect(scenario: Scenario, client: Client, world: World, step: Step, status: str) -> None:
    """The outside's truth against what the log says."""
    op = step.arguments["op"]
    done = client.service.effects[op]
    if done > 1:
        world.breach(f"{op} happened {done} times")
    if step.status == "completed" and done != 1:
        world.breach(f"{op} is recorded as completed and happened {done} times")
    if step.status in {"denied", "not_started"} and done != 0:
        world.breach(f"{op} is {step.status} and happened")
    if step.key is not None and client.service.keys.get(op, step.key) != step.key:
        world.breach(f"{op} was called with another key than that of its step")
    abandoned = client.told == "abandon" and step.status == "unknown"
    if status == "completed" and done != 1 and op not in scenario.undone and not abandoned:
        world.breach(f"the run completed and {op} happened {done} times")
