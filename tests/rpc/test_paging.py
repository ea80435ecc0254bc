"""`list` and `events` over what is in memory and what is in files, while runs start, end, are parked and deleted. S1, F031."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import anyio
import msgspec
import pytest
from rpcagent import errors
from rpcagent.rpc import methods, wire
from rpcagent.rpc.notify import elements
from rpcagent.runs import events as ev
from rpcagent.runs import roster
from rpcagent.runs.requests import CancelCommand
from tests.runs.keeping import Life, Store, shown, virtual


@pytest.fixture(autouse=True)
def no_resident_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roster, "RESIDENT", 0)
    monkeypatch.setattr(methods, "_CHUNK", 2)


def context(life: Life, current: str | None = None) -> Any:
    notifier = SimpleNamespace(names=lambda _run: None)
    return SimpleNamespace(supervisor=life.supervisor, notifier=notifier, current=lambda _pinned: current)


async def page(life: Life, **params: Any) -> dict[str, Any]:
    """One answer of `list`, as it is on the wire."""
    asked = msgspec.convert(params, wire.ListParams)
    found: dict[str, Any] = shown(await methods.list_runs(context(life), asked))
    return found


async def pages(life: Life, **params: Any) -> list[dict[str, Any]]:
    """The runs of all pages."""
    runs: list[dict[str, Any]] = []
    cursor: str | None = None
    while True:
        found = await page(life, **params, **({"cursor": cursor} if cursor is not None else {}))
        runs += found["runs"]
        before, cursor = cursor, found.get("nextCursor")
        if cursor is None:
            return runs
        assert before is None or place(cursor) > place(before)


def place(cursor: str) -> int:
    return int(cursor.rpartition(".")[2])


async def crowd(life: Life) -> list[str]:
    """Runs of all kinds, some in files alone, some parked, some in memory."""
    runs = []
    for number in range(4):
        for does in ("end", "bank.pay", "kv.put"):
            namespace = "n" if number % 2 else ""
            runs.append(await life.start(f"{does}{number}", does, agent=f"a{number % 3}", namespace=namespace))
        if number % 2:
            await life.keeper.checkpoint()
    await life.supervisor.find(runs[1])
    await life.supervisor.find(runs[0])
    return runs


@pytest.mark.parametrize("limit", [1, 2, 3, 5, 50])
@virtual
async def test_pages_hold_every_run_once_in_the_order_of_their_beginnings(limit: int):
    store = Store()
    async with store.life() as life:
        runs = await crowd(life)
        for _ in range(2):
            found = await pages(life, limit=limit)
            assert [run["runId"] for run in found] == runs
            assert found == [life.view(run) for run in runs]
            await life.keeper.checkpoint()
    async with store.life() as life:
        store.reads.clear()
        assert await pages(life, limit=limit) == [life.view(run) for run in runs]
        assert store.reads == []


FILTERS: list[dict[str, Any]] = [
    {"namespace": "n"},
    {"namespace": ""},
    {"agent": "a1"},
    {"status": ["waiting"]},
    {"status": ["completed"]},
    {"status": ["completed", "waiting"]},
    {"status": ["failed"]},
    {"agent": "a0", "status": ["completed"], "namespace": "n"},
    {"openApprovals": True},
    {"openApprovals": True, "namespace": "n"},
    {"agent": "no such agent"},
]


def fits(view: dict[str, Any], filters: dict[str, Any]) -> bool:
    return (
        filters.get("namespace") in {None, view["namespace"]}
        and filters.get("agent") in {None, view["agent"]}
        and (not filters.get("status") or view["status"] in filters["status"])
        and (not filters.get("openApprovals") or bool(view["openApprovals"]))
    )


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@virtual
async def test_a_filter_means_the_same_in_memory_and_in_files(filters: dict[str, Any]):
    store = Store()
    async with store.life() as life:
        runs = await crowd(life)
        expected = [view for view in map(life.view, runs) if fits(view, filters)]
        for limit in (1, 3, 50):
            assert await pages(life, limit=limit, **filters) == expected
        await life.keeper.checkpoint()
        for limit in (1, 3, 50):
            assert await pages(life, limit=limit, **filters) == expected
    async with store.life() as life:
        assert await pages(life, limit=2, **filters) == expected


@virtual
async def test_runs_at_one_place_are_given_together_and_once():
    store = Store()
    async with store.life() as life:
        runs = [await life.start(key) for key in "abcde"]
        for run in runs[2:4]:
            life.roster.actors[run].place = life.roster.actors[runs[1]].place
        for limit in (1, 2, 3):
            given = [run["runId"] for run in await pages(life, limit=limit)]
            assert (given[0], sorted(given[1:4]), given[4:]) == (runs[0], sorted(runs[1:4]), runs[4:])


@virtual
async def test_open_questions_of_parked_runs_are_shown_whole():
    store = Store()
    async with store.life() as life:
        runs = [await life.start(f"k{number}", "bank.pay") for number in range(3)]
        before = await page(life, openApprovals=True)
        assert [approval["runId"] for approval in before["approvals"]] == runs
        assert before["approvals"][0]["subject"]["tool"] == "bank.pay"
        await life.keeper.checkpoint()
        assert await page(life, openApprovals=True) == before
    async with store.life() as life:
        assert await page(life, openApprovals=True) == before


@virtual
async def test_a_run_that_only_waits_for_resume_asks_no_question():
    store = Store()
    async with store.life() as life:
        gate = await life.start("a", "end", drive="manual", recovery="confirm")
        asks = await life.start("b", "bank.pay")
        await life.keeper.checkpoint()
    async with store.life() as life:
        for _ in range(2):
            found = await page(life, openApprovals=True)
            assert [run["runId"] for run in found["runs"]] == [asks]
            await life.supervisor.find(gate)


@virtual
async def test_a_cancelled_run_in_doubt_is_listed_once_with_its_question_wherever_it_is():
    store = Store()
    store.loses = True
    async with store.life() as life:
        run = await life.start("a", "bank.pay")
        await life.approve(run)
        await life.settled(run)
        await life.ask(run, "c", CancelCommand())
        await life.settled(run)
        before = await page(life, openApprovals=True)
        assert [one["kind"] for one in before["approvals"]] == ["unknown_outcome"]
        await life.keeper.checkpoint()
        assert await page(life, openApprovals=True) == before
        assert [one["runId"] for one in await pages(life)] == [run]
        await life.approve(run, "happened")
        for _ in range(2):
            assert await page(life, openApprovals=True) == {"runs": [], "approvals": []}
            assert [one["runId"] for one in await pages(life)] == [run]
            await life.keeper.checkpoint()


@virtual
async def test_a_deleted_run_is_not_listed_from_the_moment_of_its_deletion():
    store = Store()
    async with store.life() as life:
        runs = [await life.start(f"k{number}") for number in range(6)]
        await life.keeper.checkpoint()
        store.let_go |= set(runs[:5])
        await life.keeper.collect()
        assert [run["runId"] for run in await pages(life, limit=2)] == runs[5:]
        with pytest.raises(errors.NotFound) as refusal:
            await methods.status(context(life), wire.StatusParams(run_id=runs[0]))
        assert refusal.value.details == {"runId": runs[0], "deleted": True, "storeId": "store"}
        await life.keeper.checkpoint()
        assert [run["runId"] for run in await pages(life, limit=2)] == runs[5:]
    async with store.life() as life:
        assert [run["runId"] for run in await pages(life, limit=2)] == runs[5:]


@pytest.mark.parametrize("does", ["end", "bank.pay"])
@virtual
async def test_a_run_that_is_in_files_alone_is_compared_with_the_present_agent_as_any_other_s4_77(does: str):
    store = Store()
    async with store.life() as life:
        run = await life.start("a", does)
        await life.keeper.checkpoint()
        assert run not in life.roster.actors
        pinned = store.states()[run].definition_digest
        for current, differs in ((pinned, False), ("sha256:0", True), (None, None)):
            answer = await methods.status(context(life, current), wire.StatusParams(run_id=run))
            told = {"pinned": pinned, "contextVersion": 1, "current": current, "differs": differs}
            assert answer["definition"] == told
        assert (store.reads, store.calls[run]) == ([run], 0)


@pytest.mark.parametrize("seed", range(25))
def test_while_runs_begin_end_are_parked_and_deleted_no_page_repeats_or_misses_one(seed: int):
    @virtual
    async def told() -> None:
        draw = random.Random(seed)
        store = Store()
        async with store.life() as life:
            at_first = await crowd(life)
            gone: set[str] = set()
            found: list[str] = []
            cursor: str | None = None
            while True:
                more = {"cursor": cursor} if cursor is not None else {}
                answer = await page(life, limit=draw.choice([1, 2, 3]), **more)
                found += [run["runId"] for run in answer["runs"]]
                assert not gone & {run["runId"] for run in answer["runs"]}
                assert all(run["lastSeq"] <= len(store.events(run["runId"])) for run in answer["runs"])
                if (cursor := answer.get("nextCursor")) is None:
                    break
                gone |= await _disturb(store, life, draw)
        assert len(found) == len(set(found))
        assert [run for run in found if run in at_first] == [r for r in at_first if r in set(found)]
        assert set(at_first) - gone <= set(found)

    told()


async def _disturb(store: Store, life: Life, draw: random.Random) -> set[str]:
    """Something happens between two pages. Returns what was deleted."""
    states = store.states()
    match draw.randrange(5):
        case 0:
            await life.start(f"new{draw.random()}", draw.choice(["end", "bank.pay"]))
        case 1:
            waiting = [run for run, state in states.items() if state.open_approvals()]
            if waiting:
                run = draw.choice(waiting)
                await life.approve(run)
                await life.settled(run)
        case 2:
            await life.keeper.checkpoint()
        case 3:
            await life.supervisor.find(draw.choice(list(states)))
        case _:
            store.let_go |= {run for run, state in states.items() if state.ended and draw.random() < 0.3}
            return {due.run_id for due in await life.keeper.collect()}
    return set()


@virtual
async def test_list_and_a_checkpoint_at_the_same_time_miss_no_run_and_repeat_none():
    store = Store()
    async with store.life() as life:
        runs = await crowd(life)
        for _ in range(3):
            runs += [await life.start(f"k{len(runs)}"), await life.start(f"k{len(runs)}x", "bank.pay")]
            found: list[list[dict[str, Any]]] = []

            async def look(into: list[list[dict[str, Any]]]) -> None:
                for _ in range(20):
                    into.append(await pages(life, limit=3))
                    await anyio.sleep(0.0002)

            async with anyio.create_task_group() as both:
                both.start_soon(look, found)
                both.start_soon(life.keeper.checkpoint)
            assert [[run["runId"] for run in one] for one in found] == [runs] * 20


# Events


@virtual
async def test_a_run_that_leaves_memory_after_the_index_has_answered_is_listed_all_the_same():
    store = Store()
    async with store.life() as life:
        runs = [await life.start(f"k{number}") for number in range(3)]
        for run in runs:
            await life.settled(run)
        archive = life.supervisor.archive
        look = archive.ended

        async def slowly(*args: Any, **filters: Any) -> Any:
            found = await look(*args, **filters)
            await life.keeper.checkpoint()
            return found

        archive.ended = slowly  # type: ignore[method-assign]
        assert [run["runId"] for run in (await page(life))["runs"]] == runs
        assert runs[0] not in life.supervisor.actors


async def told_in_parts(life: Life, run: str, after: int, limit: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    while True:
        params = wire.EventsParams(run_id=run, after_seq=after, limit=limit)
        answer = shown(await methods.events(context(life), params))
        assert len(answer["events"]) <= limit
        found += answer["events"]
        if not answer["events"]:
            assert after == answer["lastSeq"]
            return found
        after = answer["events"][-1]["seq"]


def all_events(store: Store, run: str) -> list[dict[str, Any]]:
    whole: list[dict[str, Any]] = shown(
        [e for known, record in store.log if known == run for e in elements(run, ev.decode(record.body))]
    )
    return whole


@virtual
async def test_events_across_files_and_memory_are_the_whole_sequence_from_everywhere():
    store = Store()
    async with store.life() as life:
        run = await life.start("a", "bank.pay")
        await life.keeper.checkpoint()
        await life.approve(run)
        await life.settled(run)
        for _ in range(2):
            actor = await life.supervisor.find(run)
            whole = all_events(store, run)
            assert [event["seq"] for event in whole] == list(range(1, len(whole) + 1))
            for after in range(len(whole) + 1):
                for limit in (1, 2, 3, 500):
                    assert await told_in_parts(life, run, after, limit) == whole[after:]
            with pytest.raises(errors.CursorInvalid) as refusal:
                await methods.events(context(life), wire.EventsParams(run_id=run, after_seq=len(whole) + 1))
            assert refusal.value.details == {"lastSeq": len(whole)}
            if actor.tail:
                assert 0 < actor.filed < len(whole)
                await life.keeper.checkpoint()
        assert life.roster.parked == {}


@virtual
async def test_events_of_a_run_that_is_filed_while_they_are_read_are_the_whole_sequence():
    store = Store()
    async with store.life() as life:
        run = await life.start("a", "bank.pay")
        await life.keeper.checkpoint()
        await life.approve(run)
        await life.settled(run)
        found: list[list[dict[str, Any]]] = []

        async def read() -> None:
            for _ in range(20):
                found.append(await told_in_parts(life, run, 0, 2))
                await anyio.sleep(0.0002)

        async with anyio.create_task_group() as both:
            both.start_soon(read)
            both.start_soon(life.keeper.checkpoint)
        assert found == [all_events(store, run)] * 20
