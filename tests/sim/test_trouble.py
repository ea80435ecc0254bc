"""Trouble with the log and with adapters: what is told, what stops, and what goes on."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import anyio
import pytest
from rpcagent import errors
from rpcagent.ids import run_id
from rpcagent.runs import events as ev
from rpcagent.runs.decide import Rules
from rpcagent.runs.definition import Definition, Rule
from rpcagent.runs.outcomes import AskedCall, LookUp, ModelReply, ToolReply
from rpcagent.runs.ports import Recorded
from rpcagent.runs.requests import Ask, CancelCommand
from rpcagent.runs.supervisor import Answer, Supervisor

from .loop import run
from .outside import TOOLS
from .world import BEGINNING

WAIT_S = 3_600
DEFINITION = Definition(agent="a", tools=TOOLS, rules=(Rule(do="allow"),))
CANCEL = Ask(key="c", method="cancel", fingerprint="f", command=CancelCommand())


class Rig:
    """A supervisor over ports that do as each test says. `answers` are what the log says to each append in turn."""

    store_id = "s"
    epoch = 1

    def __init__(
        self, *answers: Any, tool: str = "bank.pay", breaks: int = 0, slow: float = 0, thinks: float = 0
    ) -> None:
        self.answers = list(answers)
        self.slow = slow
        self.thinks = thinks
        self.back = timedelta(0)
        self.bodies: list[tuple[str, bytes]] = []
        self.tool = tool
        self.breaks = breaks
        self.calls = 0
        self.fatal: list[errors.StoragePoisoned] = []
        self.incidents: list[str] = []

    async def append(self, run: str, epoch: int, expected_seq: int, count: int, body: bytes, **_: Any) -> Any:
        answer = self.answers.pop(0) if self.answers else "ok"
        if isinstance(answer, Exception):
            raise answer
        if answer == "ok":
            self.bodies.append((run, body))
        return answer

    def health(self) -> dict[str, Any]:
        return {}

    def now(self) -> Any:
        return BEGINNING + timedelta(seconds=anyio.current_time()) - self.back

    async def complete(self, request: Any, emit: Callable[[str], None]) -> ModelReply:
        first = len(request.messages) == 1
        await anyio.sleep(self.thinks)
        return ModelReply(text="end", calls=(AskedCall(tool=self.tool, arguments={}),) if first else ())

    async def call(self, request: Any) -> ToolReply:
        self.calls += 1
        await anyio.sleep(self.slow)
        if self.calls <= self.breaks:
            raise ZeroDivisionError("secret words of an adapter")
        return ToolReply(result={})

    async def look_up(self, request: Any) -> LookUp:
        raise ZeroDivisionError

    def incident(self, error: BaseException, what: str) -> str:
        self.incidents.append(type(error).__name__)
        return f"inc_{len(self.incidents)}"

    def supervisor(self, spawn: Callable[..., Any]) -> Supervisor:
        return Supervisor(
            journal=self, clock=self, model=self, tools=self, rules=Rules(epoch=1), spawn=spawn,
            incident=self.incident, fatal=self.fatal.append,
        )  # fmt: skip


def started(key: str = "k") -> ev.RunStarted:
    return ev.RunStarted(
        client_request_id=key, namespace="", fingerprint="f", definition=DEFINITION, input="go", epoch=1
    )


def questions(answer: Answer) -> list[str]:
    state = answer.actor.state
    return [a.kind for a in state.open_approvals()] if state is not None else []


def within(rig: Rig, told: Callable[[Supervisor], Awaitable[None]]) -> None:
    """Runs `told` with a supervisor, in bounded virtual time."""

    async def main() -> None:
        with anyio.fail_after(WAIT_S):
            async with anyio.create_task_group() as tasks:
                supervisor = rig.supervisor(tasks.start_soon)
                tasks.start_soon(supervisor.keep_time)
                await told(supervisor)
                tasks.cancel_scope.cancel()

    run(main)


@pytest.mark.parametrize("poison", [errors.StoragePoisoned("sync failed", errno="EIO"), "fenced"])
def test_after_a_poisoned_log_every_request_is_refused_at_once_and_none_waits_for_ever_f029(poison: Any):
    rig = Rig("ok", poison)

    async def told(supervisor: Supervisor) -> None:
        answer = await supervisor.start(started(), 0)
        run = answer.actor.run_id
        while not rig.fatal:
            await answer.actor.changed()
        for _ in range(2):
            with pytest.raises(errors.StoragePoisoned):
                await supervisor.submit(run, CANCEL, 0)
            with pytest.raises(errors.StoragePoisoned):
                await supervisor.start(started(), 0)

    within(rig, told)
    assert rig.calls == 0
    assert len(rig.fatal) == 1


def test_a_log_that_knows_other_events_stops_that_run_and_no_other():
    rig = Rig("ok", "conflict")

    async def told(supervisor: Supervisor) -> None:
        first = await supervisor.start(started(), 0)
        while first.actor.failed is None:
            await first.actor.changed()
        assert supervisor.status_of(first.actor) == "damaged"
        with pytest.raises(errors.StoreDamaged):
            await supervisor.submit(first.actor.run_id, CANCEL, 0)
        second = await supervisor.start(started("other"), WAIT_S * 1000)
        assert supervisor.status_of(second.actor) == "completed"

    within(rig, told)
    assert rig.incidents == ["IllegalTransition"]


def test_a_start_that_could_not_be_recorded_leaves_nothing_behind_and_its_key_may_come_again_f019():
    rig = Rig(errors.StorageError("no space", errno="ENOSPC"))

    async def told(supervisor: Supervisor) -> None:
        with pytest.raises(errors.StorageError) as refusal:
            await supervisor.start(started(), 0)
        assert refusal.value.data == {"code": "STORAGE", "retryable": True, "errno": "ENOSPC"}
        with pytest.raises(errors.NotFound):
            await supervisor.find(run_id("s", "", "k"))
        assert supervisor.roster.counts == {}
        answer: Answer = await supervisor.start(started(), WAIT_S * 1000)
        assert (answer.replayed, supervisor.status_of(answer.actor)) == (False, "completed")

    within(rig, told)


def test_an_outcome_that_cannot_be_written_is_kept_and_written_first_t9():
    full = errors.StorageError("no space", errno="ENOSPC")
    rig = Rig("ok", "ok", full, full, full)

    async def told(supervisor: Supervisor) -> None:
        answer = await supervisor.start(started(), WAIT_S * 1000)
        assert supervisor.status_of(answer.actor) == "completed"

    within(rig, told)
    kinds = [type(e).__name__ for _, body in rig.bodies for e in ev.decode(body).events]
    assert kinds.count("ToolCompleted") == 1
    assert "StepUnknown" not in kinds
    assert rig.calls == 1


@pytest.mark.parametrize(
    ("tool", "calls", "status"),
    [
        ("fs.read", 2, "completed"),
        ("kv.put", 2, "completed"),
        ("bank.pay", 1, "waiting"),
        ("tickets.close", 1, "waiting"),
    ],
)
def test_what_an_adapter_raises_is_an_outcome_that_nobody_knows(tool: str, calls: int, status: str):
    rig = Rig(tool=tool, breaks=1)

    async def told(supervisor: Supervisor) -> None:
        answer = await supervisor.start(started(), 0)
        while supervisor.status_of(answer.actor) != status or (status == "waiting" and not questions(answer)):
            await answer.actor.changed()

    within(rig, told)
    assert rig.calls == calls
    assert set(rig.incidents) == {"ZeroDivisionError"}
    assert b"secret words" not in b"".join(body for _, body in rig.bodies)


def test_a_run_that_cannot_be_replayed_is_shown_as_damaged_and_the_others_go_on():
    rig = Rig()

    async def told(supervisor: Supervisor) -> None:
        bad = Recorded(1, 1, b'{"seq":1,"at":"2026-03-01T12:00:00Z","events":[{"type":"run_paused"}]}')
        await supervisor.replay([("run_bad", bad)])
        await supervisor.open()
        supervisor.begin()
        with pytest.raises(errors.StoreDamaged) as refusal:
            await supervisor.submit("run_bad", CANCEL, 0)
        assert refusal.value.details["runs"] == ["run_bad"]
        answer = await supervisor.start(started(), WAIT_S * 1000)
        assert supervisor.status_of(answer.actor) == "completed"
        assert supervisor.roster.counts["damaged"] == 1

    within(rig, told)


def test_twins_of_a_start_in_flight_are_one_run_and_one_answer():
    rig = Rig()

    async def told(supervisor: Supervisor) -> None:
        answers: list[Answer] = []

        async def one() -> None:
            answers.append(await supervisor.start(started(), 0))

        async with anyio.create_task_group() as twins:
            for _ in range(5):
                twins.start_soon(one)
        assert {a.actor.run_id for a in answers} == {run_id("s", "", "k")}
        assert all(a.decision == {"runId": run_id("s", "", "k")} for a in answers)

    within(rig, told)
    kinds = [type(e).__name__ for _, body in rig.bodies for e in ev.decode(body).events]
    assert kinds.count("RunStarted") == 1


def test_a_step_of_allowed_calls_costs_one_sync():
    rig = Rig(tool="kv.put")

    async def told(supervisor: Supervisor) -> None:
        await supervisor.start(started(), WAIT_S * 1000)

    within(rig, told)
    assert len(rig.bodies) == 4  # start and the model's intent, the call's intent, the next model call, the end


@pytest.mark.parametrize(
    ("tool", "slow", "thinks", "seconds", "step", "unresolved"),
    [
        ("bank.pay", 0, 1_000, 0, "withdrawn", 0),
        ("fs.read", 1_000, 0, 0, "withdrawn", 0),
        ("bank.pay", 3, 0, 2, "completed", 0),
        ("bank.pay", 1_000, 0, 5, "unknown", 1),
        ("kv.put", 1_000, 0, 5, "unknown", 1),
    ],
)
def test_a_cancel_drops_what_only_reads_and_gives_an_effect_the_grace_time(
    tool: str, slow: float, thinks: float, seconds: float, step: str, unresolved: int
):
    rig = Rig(tool=tool, slow=slow, thinks=thinks)

    async def told(supervisor: Supervisor) -> None:
        actor = (await supervisor.start(started(), 0)).actor
        await anyio.sleep(1)
        asked = anyio.current_time()
        await supervisor.submit(actor.run_id, CANCEL, 0)
        assert supervisor.status_of(actor) in {"running", "cancelled"}
        while supervisor.status_of(actor) != "cancelled":
            await actor.changed()
        assert anyio.current_time() - asked == pytest.approx(seconds, abs=0.1)
        assert actor.state is not None
        assert [s.status for s in actor.state.steps.values()][-1] == step
        assert len(actor.state.unresolved) == unresolved

    within(rig, told)


def test_a_clock_that_jumps_back_does_not_turn_back_the_time_of_a_run():
    rig = Rig(slow=10)

    async def told(supervisor: Supervisor) -> None:
        answer = await supervisor.start(started(), 0)
        rig.back = timedelta(days=1)
        while supervisor.status_of(answer.actor) != "completed":
            await answer.actor.changed()

    within(rig, told)
    times = [ev.decode(body).at for _, body in rig.bodies]
    assert len(times) == 4
    assert times == sorted(times)


def test_the_earlier_of_two_waits_of_a_run_wakes_it():
    rig = Rig()

    async def told(supervisor: Supervisor) -> None:
        answer = await supervisor.start(started(), WAIT_S * 1000)
        woken: list[float] = []
        answer.actor.post = lambda _: woken.append(anyio.current_time())  # type: ignore[method-assign]
        began = anyio.current_time()
        for seconds in (60, 10, 40):
            supervisor.published(answer.actor, None, rig.now() + timedelta(seconds=seconds))
        await anyio.sleep(100)
        assert woken[0] - began == pytest.approx(10, abs=0.1)
        assert any(w - began == pytest.approx(60, abs=0.1) for w in woken)

    within(rig, told)
