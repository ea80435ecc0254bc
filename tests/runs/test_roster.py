"""Runs that leave memory and come back: the same state, one reading, and what hinders it. F031, F032, F075."""

from __future__ import annotations

import random
from typing import Any

import anyio
import pytest
from rpcagent import errors
from rpcagent.runs import events as ev
from rpcagent.runs import roster
from rpcagent.runs.definition import Rule
from rpcagent.runs.engine import Actor
from rpcagent.runs.fold import apply
from rpcagent.runs.outcomes import AskedCall, ModelReply, NotDone, ToolReply
from rpcagent.runs.ports import Recorded
from rpcagent.runs.requests import CancelCommand, ResumeCommand, StepCommand
from rpcagent.runs.view import recovery_plan
from tests.sim import scenarios
from tests.sim.scenario import Scenario, play
from tests.sim.world import World

from .keeping import Life, Store, identity, shown, virtual

KINDS = ("end", "bank.pay", "kv.put", "fs.read", "tickets.close")


@pytest.fixture(autouse=True)
def no_resident_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roster, "RESIDENT", 0)


@pytest.mark.parametrize("scenario", (scenarios.A, *scenarios.OTHERS), ids=lambda s: s.name)
def test_a_run_that_was_parked_after_any_commit_comes_back_as_if_it_never_had_been(
    scenario: Scenario, monkeypatch: pytest.MonkeyPatch
):
    worlds: list[World] = []
    real = World.read_back

    def noting(world: World) -> None:
        worlds.append(world)
        real(world)

    monkeypatch.setattr(World, "read_back", noting)

    @virtual
    async def told() -> None:
        assert (await play(scenario)).broken == ()
        bodies = [record.body for record in worlds[0].log]
        run = worlds[0].log[0].run_id
        lived = None
        for count, body in enumerate(bodies, 1):
            lived = apply(lived, ev.decode(body), run)
            store = Store()
            store.epoch = 1
            async with store.life() as life:
                store.histories[run] = [Recorded(r.seq, r.count, r.body) for r in worlds[0].log[:count]]
                store.summaries[run] = roster.summary.summarise(lived, 1, "")
                assert await life.roster.bring_in(run)
                actor = life.roster.actors[run]
                assert actor.state == lived
                assert (actor.filed, actor.place, actor.tail) == (lived.last_seq, 1, [])

    told()


@virtual
async def test_two_requests_at_once_to_a_parked_run_read_it_once():
    store = Store()
    async with store.life() as life:
        run = await life.start("a", "bank.pay")
        await life.keeper.checkpoint()
        assert run in life.roster.parked
        found: list[Actor] = []

        async def find() -> None:
            found.append(await life.supervisor.find(run))

        async with anyio.create_task_group() as both:
            for _ in range(3):
                both.start_soon(find)
        assert store.reads == [run]
        assert len({id(actor) for actor in found}) == 1
        assert len(found) == 3
        assert life.overview() == life.truth()


@virtual
async def test_a_request_that_is_cancelled_while_a_run_is_read_leaves_others_able_to_read_it():
    store = Store()
    async with store.life() as life:
        run = await life.start("a", "bank.pay")
        await life.keeper.checkpoint()
        async with anyio.create_task_group() as both:
            first = anyio.CancelScope()

            async def cancelled() -> None:
                with first:
                    await life.supervisor.find(run)

            both.start_soon(cancelled)
            await anyio.wait_all_tasks_blocked()
            both.start_soon(life.supervisor.find, run)
            await anyio.wait_all_tasks_blocked()
            first.cancel()
        assert store.reads == [run, run]
        assert life.roster.at_hand(run) is not None
        assert life.overview() == life.truth()


@virtual
async def test_a_run_that_cannot_be_read_just_now_is_refused_as_such_and_read_at_the_next_try():
    store = Store()
    async with store.life() as life:
        run = await life.start("a", "bank.pay")
        await life.keeper.checkpoint()
        store.faults = [errors.StorageError("too many open files", errno="EMFILE")]
        with pytest.raises(errors.StorageError) as refusal:
            await life.supervisor.find(run)
        assert refusal.value.data == {"code": "STORAGE", "retryable": True, "errno": "EMFILE"}
        assert life.overview() == life.truth()
        assert (await life.supervisor.find(run)).state == store.states()[run]
        assert store.calls[run] == 0
        await life.approve(run)
        assert life.supervisor.status_of(await life.settled(run)) == "completed"


@virtual
async def test_a_start_that_cannot_see_whether_its_run_is_in_files_begins_none():
    store = Store()
    async with store.life() as life:
        await life.start("a", "end")
        await life.keeper.checkpoint()
        store.faults = [errors.StorageError("EIO", errno="EIO")]
        with pytest.raises(errors.StorageError):
            await life.start("a", "end")
        before = len(store.log)
        await life.start("a", "end")
        assert len(store.log) == before


@virtual
async def test_the_timer_of_a_parked_run_that_cannot_be_read_is_tried_again():
    store = Store()
    rules = (Rule(do="ask", tool="bank.pay", expires_ms=60_000),)
    async with store.life() as life:
        run = await life.start("a", "bank.pay", rules=rules)
        await life.keeper.checkpoint()
        store.faults = [errors.StorageError("EIO", errno="EIO")] * 2
        await anyio.sleep(65)
        assert store.reads == [run] * 3
        assert life.supervisor.status_of(await life.settled(run)) == "completed"
        assert "ApprovalExpired" in [type(e).__name__ for e in store.events(run)]


@virtual
async def test_the_timer_of_a_parked_run_is_armed_again_at_a_start():
    store = Store()
    rules = (Rule(do="ask", tool="bank.pay", expires_ms=60_000),)
    async with store.life() as life:
        run = await life.start("a", "bank.pay", rules=rules)
        await life.keeper.checkpoint()
    async with store.life() as life:
        assert run in life.roster.parked
        assert store.reads == []
        await anyio.sleep(59)
        assert store.reads == []
        await anyio.sleep(2)
        assert store.reads == [run]
        assert store.states()[run].phase == "completed"


class Busy(Store):
    """The model asks for two reads at once: one that a person is asked about, and one that is told to come back."""

    async def complete(self, request: Any, emit: Any) -> ModelReply:
        if len(request.messages) > 1:
            return ModelReply(text="The end.")
        calls = [AskedCall(tool="fs.read", arguments={"op": op}, provider_id=op) for op in ("asked", "busy")]
        return ModelReply(calls=tuple(calls))

    async def call(self, request: Any) -> Any:
        self.calls[request.arguments["op"]] += 1
        if request.arguments["op"] == "busy" and self.calls["busy"] == 1:
            return NotDone(error=ev.Trouble(kind="rate_limit"), retry_after_ms=60_000)
        return ToolReply(result={"content": []})


@pytest.mark.parametrize("restart", [False, True])
@virtual
async def test_a_read_that_is_to_be_tried_again_is_so_while_another_one_waits_for_a_person_also_if_parked(
    restart: bool,
):
    store = Busy()
    rules = (Rule(do="ask", tool="fs.read", arguments={"op": "asked"}), Rule(do="allow", effect="read_only"))
    async with store.life() as life:
        run = await life.start("a", rules=rules)
        await life.settled(run)
        assert store.calls == {"busy": 1}
        await life.keeper.checkpoint()
        assert run in life.roster.parked
        if not restart:
            await anyio.sleep(61)
            assert store.calls == {"busy": 2}
    if restart:
        async with store.life() as life:
            assert store.reads == []
            await anyio.sleep(61)
            assert store.calls == {"busy": 2}


@virtual
async def test_a_question_that_expired_while_no_process_ran_is_closed_before_the_first_answer():
    store = Store()
    rules = (Rule(do="ask", tool="bank.pay", expires_ms=60_000),)
    async with store.life() as life:
        run = await life.start("a", "bank.pay", rules=rules)
        await life.keeper.checkpoint()
    await anyio.sleep(3_600)
    async with store.life():
        assert store.states()[run].open_approvals() == []


@virtual
async def test_a_stricter_policy_is_applied_at_the_next_start_to_a_run_that_was_parked():
    store = Store()
    async with store.life() as life:
        run = await life.start("a", "bank.pay")
        other = await life.start("b", "bank.pay", agent="b")
        await life.keeper.checkpoint()
        assert store.reads == []
    store.present = {"a": (Rule(do="deny", tool="bank.pay"),)}
    async with store.life() as life:
        assert store.reads == [run]  # the other one's policy did not change
        actor = await life.settled(run)
        assert store.calls[run] == 0
        assert life.supervisor.status_of(actor) == "completed"
        assert actor.state is not None
        assert [s.status for s in actor.state.recent if s.kind == "tool_call"] == ["denied"]
        assert life.roster.parked.keys() == {other}
        await life.keeper.checkpoint()
    store.reads.clear()
    async with store.life():
        assert store.reads == []


@pytest.mark.parametrize("recovery", ["confirm", "manual"])
@virtual
async def test_a_run_with_a_gate_that_was_parked_is_shown_as_held_after_a_restart_with_the_same_plan(recovery: str):
    store = Store()
    async with store.life() as life:
        run = await life.start("a", "bank.pay", recovery=recovery)
        assert life.supervisor.status_of(await life.settled(run)) == "waiting"
        await life.keeper.checkpoint()
        assert run in life.roster.actors  # its summary would show it as held, which it is not in this opening
    async with store.life() as life:
        assert store.reads == []
        state = store.states()[run]
        view = life.view(run)
        assert (view["status"], view["resumeRequired"]) == ("ready", True)
        assert view["recoveryPlan"] == shown(recovery_plan(state))
        heads = life.roster.parked[run]
        assert roster.summary.view_of(bytes(heads.body)) == view
        assert life.overview() == life.truth()
        assert {"resume", "tool_call"} == {line["kind"] for line in life.roster.attention(9)}
        plan = recovery_plan(state)["planDigest"]
        await life.ask(run, "resume", ResumeCommand(plan_digest=plan))
        assert life.supervisor.status_of(await life.settled(run)) == "waiting"
        assert life.overview() == life.truth()
        await life.keeper.checkpoint()
        assert run in life.roster.actors
        await life.approve(run)
        assert life.supervisor.status_of(await life.settled(run)) == "completed"
        await life.keeper.checkpoint()
        assert run not in life.roster.actors


@virtual
async def test_a_cancelled_run_whose_payment_is_in_doubt_is_asked_about_for_ever_s_parked_or_not():
    store = Store()
    store.loses = True
    async with store.life() as life:
        run = await life.start("a", "bank.pay")
        await life.approve(run)
        assert life.supervisor.status_of(await life.settled(run)) == "waiting"
        await life.ask(run, "cancel", CancelCommand())
        assert life.supervisor.status_of(await life.settled(run)) == "cancelled"
        asked = life.overview()
        assert asked == life.truth()
        assert asked[0] == {"cancelled": 1}
        assert "unknown_outcome" in asked[1][0]
        await life.keeper.checkpoint()
        assert life.roster.actors == {}
        assert life.overview() == asked
    for _ in range(2):
        async with store.life() as life:
            assert life.overview() == asked
            assert store.reads == []
            await life.keeper.checkpoint()
    async with store.life() as life:
        await life.approve(run, "happened")
        assert life.overview() == ({"cancelled": 1}, [])
        await life.keeper.checkpoint()
        assert life.roster.parked == {}
        assert life.overview() == ({"cancelled": 1}, [])
        assert life.keeper.ended == {"cancelled": 1}
    async with store.life() as life:
        assert life.overview() == ({"cancelled": 1}, [])


@virtual
async def test_a_run_with_damaged_files_is_shown_as_damaged_and_all_others_go_on_f032():
    store = Store()
    async with store.life() as life:
        bad = await life.start("a", "bank.pay")
        good = await life.start("b", "bank.pay")
        await life.keeper.checkpoint()
    store.damaged[bad] = errors.StoreDamaged("a line is bad", runs=[bad], file="f", offset=7)
    async with store.life() as life:
        assert life.overview()[0] == {"waiting": 2}  # nobody has looked
        with pytest.raises(errors.StoreDamaged) as refusal:
            await life.ask(bad, "c", CancelCommand())
        assert refusal.value.details["reason"] == "a line is bad"
        assert life.overview()[0] == {"waiting": 1, "damaged": 1}
        assert {"runId": bad, "kind": "damaged"} in life.roster.attention(9)
        await life.approve(good)
        assert life.supervisor.status_of(await life.settled(good)) == "completed"
        await life.keeper.checkpoint()
        assert life.keeper.made == 1
        assert life.overview()[0] == {"completed": 1, "damaged": 1}
    assert [run for run, _, _ in store.manifest.live] == [bad]  # type: ignore[union-attr]
    store.damaged.clear()
    async with store.life() as life:  # repaired
        assert life.overview() == life.truth()


@virtual
async def test_an_ended_run_with_damaged_files_is_counted_once_and_keeps_its_place():
    store = Store()
    async with store.life() as life:
        bad = await life.start("a")
        await life.start("b")
        await life.keeper.checkpoint()
    store.damaged[bad] = errors.StoreDamaged("a line is bad", runs=[bad])
    async with store.life() as life:
        assert (await life.supervisor.find(bad)).failed is store.damaged[bad]
        assert sum(life.overview()[0].values()) == 2
        await life.start("c")
        await life.keeper.checkpoint()
        assert life.keeper.made == 1
    store.damaged.clear()
    async with store.life() as life:
        assert life.overview() == ({"completed": 3}, [])


@virtual
async def test_what_the_log_holds_of_a_run_with_damaged_files_is_carried_on_and_all_others_are_filed_f032():
    store = Store()
    async with store.life() as life:
        bad = await life.start("a", "bank.pay")
        await life.keeper.checkpoint()
        await life.approve(bad)
        await life.settled(bad)
    cut = store.cut
    store.damaged[bad] = errors.StoreDamaged("a line is bad", runs=[bad])
    async with store.life() as life:
        assert life.overview()[0] == {"damaged": 1}
        good = await life.start("b")
        assert life.supervisor.status_of(await life.settled(good)) == "completed"
        for made in (1, 2):
            await life.keeper._attempt(life.keeper.checkpoint)
            assert (life.keeper.made, life.keeper.trouble) == (made, None)
        assert life.supervisor.tail_records == 0  # what cannot be moved does not ask for another checkpoint
    assert store.cut > cut
    assert {run for run, _ in store.log[store.cut :]} == {bad}
    async with store.life() as life:
        assert life.overview()[0] == {"damaged": 1, "completed": 1}
    store.damaged.clear()
    async with store.life() as life:  # repaired: nothing is lost
        assert life.overview() == life.truth() == ({"completed": 2}, [])


@virtual
async def test_a_live_run_whose_files_are_gone_is_damaged_and_never_begun_again():
    store = Store()
    async with store.life() as life:
        run = await life.start("a", "bank.pay")
        await life.keeper.checkpoint()
    del store.histories[run]
    async with store.life() as life:
        with pytest.raises(errors.StoreDamaged):
            await life.start("a", "bank.pay")
        assert life.overview()[0] == {"damaged": 1}
        assert store.calls[run] == 0


@virtual
async def test_an_attention_list_stops_at_the_number_that_was_asked_for():
    store = Store()
    async with store.life() as life:
        for number in range(5):
            await life.start(f"k{number}", "bank.pay")
        await life.keeper.checkpoint()
        assert [len(life.roster.attention(most)) for most in (0, 1, 3, 9)] == [0, 1, 3, 5]


@virtual
async def test_the_runs_that_were_asked_for_last_stay_in_memory():
    roster.RESIDENT = 2  # the fixture puts it back
    store = Store()
    async with store.life() as life:
        runs = [await life.start(f"k{number}", "bank.pay") for number in range(5)]
        await life.supervisor.find(runs[0])
        await life.supervisor.find(runs[3])
        await life.keeper.checkpoint()
        assert set(life.roster.actors) == {runs[0], runs[3]}


async def _steps(store: Store, life: Life, draw: random.Random, count: int) -> None:
    """Some requests and checkpoints, in any order; after each of them what is shown is what the log says."""
    for _ in range(count):
        states = store.states()
        waiting = [run for run, state in states.items() if state.open_approvals()]
        what = draw.choice(
            ["start", "start", "approve", "approve", "checkpoint", "reach", "delete", "cancel", "no room"]
        )
        if what == "start":
            drive = draw.choice(["auto", "auto", "manual"])
            recovery = draw.choice(["auto", "auto", "confirm", "manual"])
            store.loses = draw.random() < 0.3
            key = f"k{draw.randrange(12)}"
            try:
                await life.start(key, draw.choice(KINDS), drive=drive, recovery=recovery)
            except errors.KeyExpired:
                assert identity(key) not in states
        elif what == "approve" and waiting:
            run = draw.choice(waiting)
            state = states[run]
            if state.held(store.epoch):
                await life.ask(run, f"r{draw.random()}", ResumeCommand(plan_digest=recovery_plan(state)["planDigest"]))
            else:
                await life.approve(run, draw.choice(state.open_approvals()[0].choices[:2]), f"k{draw.random()}")
        elif what == "cancel" and (going := [run for run, state in states.items() if not state.ended]):
            await life.ask(draw.choice(going), f"c{draw.random()}", CancelCommand())
        elif what == "reach" and states:
            run = draw.choice(list(states))
            assert (await life.supervisor.find(run)).state == states[run]
            if states[run].drive == "manual" and not states[run].ended and not states[run].held(store.epoch):
                try:
                    await life.ask(run, f"s{draw.random()}", StepCommand(), 1_000)
                except errors.RpcAgentError as refusal:
                    assert refusal.code in {"RUN_BUSY", "APPROVAL_REQUIRED", "UNKNOWN_OUTCOME", "INVALID_STATE"}
        elif what == "delete":
            store.let_go |= {run for run, state in states.items() if state.ended and draw.random() < 0.5}
            for due in await life.keeper.collect():
                assert states[due.run_id].ended
        elif what in {"checkpoint", "no room"}:
            store.no_manifest = errors.StorageError("no space", errno="ENOSPC") if what == "no room" else None
            await life.keeper._attempt(life.keeper.checkpoint)
            assert life.keeper.trouble == ("ENOSPC" if what == "no room" else None)
        await anyio.sleep(1)
        assert life.overview() == life.truth(), what
        for run, state in store.states().items():
            heads = life.roster.parked.get(run)
            if heads is not None:
                assert roster.summary.view_of(bytes(heads.body)) == life.view(run)
            elif (actor := life.roster.actors.get(run)) is not None:
                assert actor.state == state
            else:
                assert state.ended


@pytest.mark.parametrize("seed", range(30))
def test_counts_and_questions_are_those_of_a_count_from_scratch_after_any_sequence(seed: int):
    @virtual
    async def told() -> None:
        draw = random.Random(seed)
        store = Store()
        for _ in range(5):
            async with store.life() as life:
                await anyio.sleep(1)
                assert life.overview() == life.truth()
                await _steps(store, life, draw, 14)
            assert store.incidents == []

    told()
