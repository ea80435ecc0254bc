"""Checkpoints, parking and deletion at the same time as each other, and as those who ask. F031."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
from rpcagent import errors
from rpcagent.runs import events as ev
from rpcagent.runs import keeper, roster
from rpcagent.runs.definition import Rule
from rpcagent.runs.outcomes import LookUp
from rpcagent.runs.ports import Checkpoint
from rpcagent.runs.requests import ApproveCommand, CancelCommand
from rpcagent.runs.state import Approval

from .keeping import Life, Shelf, Store, virtual


@pytest.fixture(autouse=True)
def no_resident_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roster, "RESIDENT", 0)


async def ended(life: Life, key: str = "a") -> str:
    run = await life.start(key)
    await life.keeper.checkpoint()
    life.store.let_go.add(run)
    return run


@virtual
async def test_two_checkpoints_at_once_are_made_one_after_the_other():
    store = Store()
    async with store.life() as life:
        await life.start("a")
        await life.start("b", "bank.pay")
        async with anyio.create_task_group() as both:
            for _ in range(3):
                both.start_soon(life.keeper.checkpoint)
        assert (life.supervisor.tail_records, life.supervisor.tail_bytes) == (0, 0)
        assert life.keeper.ended == {"completed": 1}
        assert life.overview() == life.truth()


@pytest.mark.parametrize("first", ["collect", "checkpoint"])
@virtual
async def test_deletions_and_a_checkpoint_at_once_count_each_run_once(first: str):
    store = Store()
    async with store.life() as life:
        runs = [await ended(life, f"k{number}") for number in range(3)]
        await life.start("last")
        works = [life.keeper.collect, life.keeper.checkpoint]
        async with anyio.create_task_group() as both:
            for work in works if first == "collect" else reversed(works):
                both.start_soon(work)
        await life.keeper.checkpoint()
        assert dict(+life.keeper.ended) == {"completed": 1}
        assert store.graves == set(runs)
        assert store.manifest is not None
        assert dict(store.manifest.ended) == {"completed": 1}
    async with store.life() as life:
        assert life.overview() == ({"completed": 1}, [])


class Slow(Shelf):
    async def save(self, mark: Any, checkpoint: Checkpoint) -> None:
        await anyio.sleep(10)
        await super().save(mark, checkpoint)


@virtual
async def test_a_deletion_that_is_asked_for_during_a_checkpoint_counts():
    store = Store()
    async with store.life(Slow) as life:
        await ended(life)
        await life.start("b")
        async with anyio.create_task_group() as both:
            both.start_soon(life.keeper.checkpoint)
            await anyio.sleep(5)
            both.start_soon(life.keeper.collect)
        assert life.keeper.ended == {"completed": 1}
        await life.keeper.checkpoint()
    async with store.life() as life:
        assert life.overview() == ({"completed": 1}, [])


@virtual
async def test_a_request_during_a_deletion_waits_also_if_the_run_was_in_memory():
    store = Store()
    async with store.life() as life:
        run = await ended(life)
        await life.supervisor.find(run)
        told: list[str] = []

        async def ask() -> None:
            await anyio.sleep(0.0005)
            assert not isinstance(store.events(run)[-1], ev.RunDeleted)  # it is being written
            with pytest.raises(errors.KeyExpired) as refusal:
                await life.ask(run, "c", CancelCommand())
            told.append(refusal.value.code)

        async with anyio.create_task_group() as both:
            both.start_soon(life.keeper.collect)
            both.start_soon(ask)
        assert told == ["KEY_EXPIRED"]
        assert store.incidents == []


@virtual
async def test_a_deletion_that_the_log_refuses_ends_the_process_and_deletes_nothing():
    store = Store()
    async with store.life() as life:
        run = await ended(life)
        store.epoch += 1  # another process has opened it
        await life.keeper._attempt(life.keeper.collect)
        assert [type(error) for error in life.fatal] == [errors.StoragePoisoned] or life.keeper.trouble is not None
        assert not life.archive.deleted(run)
        assert life.keeper.deleted == []


@virtual
async def test_an_ended_run_that_is_recorded_again_is_counted_once():
    store = Store()
    async with store.life() as life:
        run = await life.start("a", "bank.pay")
        await life.ask(run, "c1", CancelCommand())
        await life.settled(run)
        for key in ("c2", "c3"):
            await life.keeper.checkpoint()
            assert life.keeper.ended == {"cancelled": 1}
            assert life.roster.actors == {}
            answer = await life.ask(run, key, CancelCommand())
            assert answer.decision == {"cancel": {"already": True}}
            assert life.overview() == ({"cancelled": 1}, [])
    async with store.life() as life:
        assert life.overview() == ({"cancelled": 1}, [])


@virtual
async def test_a_run_that_is_asked_for_while_others_are_parked_stays(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(keeper, "_SLICE", 2)
    store = Store()
    async with store.life() as life:
        runs = [await life.start(f"k{number}", "bank.pay") for number in range(4)]
        await life.keeper.checkpoint()
        actors = [await life.supervisor.find(run) for run in runs]
        async with anyio.create_task_group() as both:
            both.start_soon(life.keeper._park)
            both.start_soon(actors[3].changed)
            await anyio.wait_all_tasks_blocked()
            assert life.roster.actors.keys() == {runs[3]}
            actors[3].nudge()


class Unsure(Store):
    """A call never answers, and whoever looks is told to look again later."""

    looks = 0

    async def call(self, request: Any) -> Any:
        await anyio.sleep_forever()

    async def look_up(self, request: Any) -> LookUp:
        self.looks += 1
        return LookUp(answer="pending")


@virtual
async def test_a_held_run_that_looks_up_what_became_of_a_call_goes_on_doing_so_through_checkpoints():
    store = Unsure()
    async with store.life() as life:
        rules = (Rule(do="allow"),)
        run = await life.start("a", "tickets.close", wait_ms=1_000, recovery="confirm", rules=rules)
        await life.keeper.checkpoint()
    async with store.life() as life:
        seen = []
        for seconds in (5, 10, 20, 40):
            await anyio.sleep(seconds)
            seen.append(store.looks)
            await life.keeper.checkpoint()
        assert seen == sorted(set(seen))
        assert run not in life.roster.parked


def test_an_empty_history_is_no_state():
    with pytest.raises(ValueError, match="empty"):
        roster.replayed("run_x", [])


@virtual
async def test_a_run_that_left_memory_still_says_who_answered_its_question_and_what_closed_it_f065():
    store = Store()
    async with store.life() as life:
        answered, cancelled = await life.start("a", "bank.pay"), await life.start("b", "bank.pay")
        asked = {}
        for run in (answered, cancelled):
            actor = await life.supervisor.find(run)
            assert actor.state is not None
            [asked[run]] = actor.state.open_approvals()
        await life.ask(answered, "ada's", command(asked[answered], "allow"))
        await life.settled(answered)
        await life.ask(cancelled, "stop", CancelCommand())
        before = [await refusal(life, run, asked[run]) for run in (answered, cancelled)]
        assert [told["code"] for told in before] == ["ALREADY_DECIDED", "INVALID_STATE"]
        assert [told["clientRequestId"] for told in before] == ["ada's", "stop"]
        await life.keeper.checkpoint()
        assert life.roster.actors == {}
    async with store.life() as life:
        assert [await refusal(life, run, asked[run]) for run in (answered, cancelled)] == before
        assert sorted(store.reads) == sorted([answered, cancelled])


def command(question: Approval, decision: str) -> ApproveCommand:
    return ApproveCommand(approval_id=question.approval_id, digest=question.digest, decision=decision, decided_by="ada")


async def refusal(life: Life, run: str, question: Approval) -> dict[str, Any]:
    """Of an answer that comes too late."""
    with pytest.raises(errors.RpcAgentError) as refused:
        await life.ask(run, "late", command(question, "deny"))
    return refused.value.data
