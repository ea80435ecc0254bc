"""What a checkpoint moves, what it may not lose when it fails, and the deletion of runs. F031, F075."""

from __future__ import annotations

import anyio
import pytest
from rpcagent import errors
from rpcagent.runs import events as ev
from rpcagent.runs import keeper, roster
from rpcagent.runs.definition import Rule
from rpcagent.runs.requests import CancelCommand
from rpcagent.runs.summary import summarise

from .keeping import Life, Shelf, Store, identity, virtual

NO_ROOM = errors.StorageError("no space", errno="ENOSPC")


@pytest.fixture(autouse=True)
def no_resident_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roster, "RESIDENT", 0)


@virtual
async def test_a_checkpoint_moves_all_records_and_a_start_after_it_reads_none():
    store = Store()
    async with store.life() as life:
        runs = [await life.start("a"), await life.start("b", "bank.pay")]
        assert life.supervisor.tail_records == len(store.log) > 2
        assert life.supervisor.tail_bytes == sum(len(record.body) for _, record in store.log)
        await life.keeper.checkpoint()
        assert (life.supervisor.tail_records, life.supervisor.tail_bytes) == (0, 0)
        assert life.roster.actors == {}
    assert store.cut == len(store.log)
    assert {run: [r for known, r in store.log if known == run] for run in runs} == store.histories
    assert store.manifest is not None
    assert dict(store.manifest.ended) == {"completed": 1}
    assert store.manifest.places == 3
    [(run, heads, body)] = store.manifest.live
    assert (run, (heads, body)) == (runs[1], summarise(store.states()[run], 2, life.supervisor.policy("a")))
    async with store.life() as life:
        assert life.supervisor.tail_records == 0
        assert store.reads == []
        assert life.overview() == life.truth() == ({"completed": 1, "waiting": 1}, life.overview()[1])


@virtual
async def test_what_is_recorded_while_a_checkpoint_is_saved_stays_in_the_log_and_in_memory():
    store = Store()

    class Slow(Shelf):
        async def save(self, mark, checkpoint):  # type: ignore[no-untyped-def]
            await anyio.sleep(10)
            await super().save(mark, checkpoint)

    async with store.life(Slow) as life:
        run = await life.start("a", "bank.pay")
        async with anyio.create_task_group() as both:
            both.start_soon(life.keeper.checkpoint)
            await anyio.sleep(1)
            await life.approve(run)
            await life.settled(run)
            new = await life.start("b", "bank.pay")
            assert store.manifest is None  # neither waited for it
        assert set(life.roster.actors) == {run, new}
        late = [record for known, record in store.log[store.cut :] if known == run]
        assert life.roster.actors[run].tail == late
        assert late[0].first == life.roster.actors[run].filed + 1
        assert life.supervisor.tail_records == len(store.log) - store.cut
        assert life.overview() == life.truth()
    async with store.life() as life:
        assert life.overview() == life.truth()
        assert store.states()[run] == (await life.supervisor.find(run)).state


@virtual
async def test_a_checkpoint_that_finds_no_room_changes_nothing_and_the_next_one_does_all_of_it():
    store = Store()
    async with store.life() as life:
        ended = await life.start("a")
        await life.keeper.checkpoint()
        await life.start("b", "bank.pay")
        third = await life.start("c")
        store.no_manifest = NO_ROOM
        for _ in range(2):
            await life.keeper._attempt(life.keeper.checkpoint)
            assert life.keeper.health()["trouble"] == "ENOSPC"
            assert life.keeper.ended == {"completed": 1}
            assert life.supervisor.tail_records == len(store.log) - store.cut
            assert life.overview() == life.truth()
        assert third in life.roster.actors
        assert ended not in life.roster.actors
        store.no_manifest = None
        await life.keeper._attempt(life.keeper.checkpoint)
        assert "trouble" not in life.keeper.health()
        assert life.keeper.health()["made"] == 2
        assert life.keeper.ended == {"completed": 2}
        assert life.overview() == life.truth()


@virtual
async def test_a_run_that_ended_in_an_interrupted_checkpoint_is_counted_by_the_next_one():
    store = Store()
    async with store.life() as life:
        run = await life.start("a", "bank.pay")
        await life.keeper.checkpoint()
        await life.approve(run)
        await life.settled(run)
        store.no_manifest = NO_ROOM
        await life.keeper._attempt(life.keeper.checkpoint)
    store.no_manifest = None
    async with store.life() as life:
        assert life.overview() == ({"completed": 1}, [])
        await life.keeper.checkpoint()
        assert life.overview() == ({"completed": 1}, [])
        assert life.roster.parked == {}
    async with store.life() as life:
        assert life.overview() == ({"completed": 1}, [])
        assert store.reads == [run] * 2  # by the approval, and by the replay


@virtual
async def test_a_checkpoint_after_a_poisoned_log_ends_the_process():
    store = Store()
    async with store.life() as life:
        await life.start("a")
        store.no_manifest = errors.StoragePoisoned("sync failed", errno="EIO")
        await life.keeper._attempt(life.keeper.checkpoint)
        assert life.fatal == [store.no_manifest]


@virtual
async def test_a_fault_in_a_checkpoint_is_shown_and_the_log_kept():
    store = Store()
    async with store.life() as life:
        run = await life.start("a", "bank.pay")
        store.no_manifest = ZeroDivisionError()  # type: ignore[assignment]
        await life.keeper._attempt(life.keeper.checkpoint)
        assert life.keeper.trouble == "a fault of the daemon; incident inc_1 in the log"
        assert store.incidents == ["ZeroDivisionError"]
        await life.approve(run)
        assert life.supervisor.status_of(await life.settled(run)) == "completed"


@virtual
async def test_a_record_that_is_before_the_mark_and_not_yet_published_holds_the_checkpoint_up():
    store = Store()
    async with store.life() as life:
        run = await life.start("a", "bank.pay")
        actor = life.roster.actors[run]
        unseen = actor.tail.pop()
        await life.keeper._attempt(life.keeper.checkpoint)
        assert life.keeper.trouble == "EAGAIN"
        assert store.manifest is None
        actor.tail.append(unseen)
        store.marked = 0
        await life.keeper.checkpoint()
        assert store.manifest is not None


@virtual
async def test_a_run_with_a_fault_of_the_daemon_is_filed_and_read_again_at_the_next_start():
    store = Store()
    async with store.life() as life:
        run = await life.start("a", "bank.pay")
        actor = life.roster.actors[run]
        actor._stop(ZeroDivisionError(), [])
        await life.keeper.checkpoint()
        assert run in life.roster.actors
        assert life.overview()[0] == {"damaged": 1}
    async with store.life() as life:
        assert store.reads == [run]
        assert life.overview() == life.truth()
        assert life.overview()[0] == {"waiting": 1}
        await life.keeper.checkpoint()
        assert life.roster.parked.keys() == {run}


@virtual
async def test_a_run_whose_first_commit_is_refused_leaves_no_trace():
    store = Store()
    async with store.life() as life:
        store.refuse = NO_ROOM
        with pytest.raises(errors.StorageError):
            await life.start("a")
        assert life.overview() == ({}, [])
        store.refuse = None
        await life.keeper.checkpoint()
        assert life.roster.actors == {}
        assert store.histories == {}
        await life.start("a")
        assert life.overview() == ({"completed": 1}, [])


# Keeping


def _unwarned(free: int) -> None:
    raise AssertionError(f"{free} bytes are left")


@virtual
async def test_a_daemon_makes_a_checkpoint_when_the_log_is_long_and_when_it_has_nothing_to_do(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(keeper, "TAIL_RECORDS", 20)
    monkeypatch.setattr(keeper, "IDLE_RECORDS", 5)
    store = Store()
    async with store.life() as life, anyio.create_task_group() as group:
        group.start_soon(life.keeper.keep, _unwarned)
        await life.start("a")
        await anyio.sleep(keeper.IDLE_S * 3)
        assert life.keeper.made == 0  # too little
        for number in range(3):
            await life.start(f"b{number}")
        assert life.keeper.made == 0
        await anyio.sleep(keeper.IDLE_S * 2)
        assert life.keeper.made == 1  # enough for a daemon that has nothing to do
        for number in range(20):
            await life.start(f"c{number}")
        assert life.keeper.made > 1
        assert life.overview() == life.truth()
        group.cancel_scope.cancel()


@virtual
async def test_a_checkpoint_that_failed_is_tried_again_without_any_new_record():
    store = Store()
    async with store.life() as life, anyio.create_task_group() as group:
        life.keeper._records = 1
        store.no_manifest = NO_ROOM
        await life.start("a")
        group.start_soon(life.keeper.keep, _unwarned)
        await anyio.sleep(100)
        assert life.keeper.made == 0
        store.no_manifest = None
        await anyio.sleep(100)
        assert life.keeper.made == 1
        group.cancel_scope.cancel()


# Deletion


async def _ended(life: Life, key: str = "a") -> str:
    run = await life.start(key)
    await life.keeper.checkpoint()
    life.store.let_go.add(run)
    return run


@virtual
async def test_a_deleted_run_is_gone_for_those_who_look_and_its_key_is_never_taken_again():
    store = Store()
    async with store.life() as life:
        run = await _ended(life)
        other = await life.start("b")
        await life.keeper.checkpoint()
        [due] = await life.keeper.collect()
        assert (due.run_id, due.reason, due.heads.status) == (run, "asked for", "completed")
        assert life.overview() == ({"completed": 1}, [])
        for _ in range(2):
            for ask in (life.start("a"), life.supervisor.find(run), life.ask(run, "c", CancelCommand())):
                with pytest.raises(errors.KeyExpired) as refusal:
                    await ask
                assert refusal.value.data == {"code": "KEY_EXPIRED", "retryable": False, "runId": run}
            with pytest.raises(errors.KeyExpired):
                await life.supervisor.started("", "a", "f", 0)
            await life.keeper.checkpoint()
        assert store.histories.keys() == {other}
    last = store.events(run)[-1]
    assert (type(last), last.status, last.reason) == (ev.RunDeleted, "completed", "asked for")
    for _ in range(2):
        async with store.life() as life:
            assert life.overview() == ({"completed": 1}, [])
            with pytest.raises(errors.KeyExpired):
                await life.start("a")
            await life.keeper.checkpoint()


@virtual
async def test_a_deletion_that_only_the_log_tells_is_finished_by_the_next_process():
    store = Store()
    async with store.life() as life:
        run = await _ended(life)
        await life.keeper.collect()
    assert store.histories.keys() == {run}
    async with store.life() as life:
        assert life.supervisor.buried == [(run, "completed")]
        assert life.overview() == ({}, [])
        with pytest.raises(errors.KeyExpired):
            await life.start("a")
        assert await life.keeper.collect() == []
        await life.keeper.checkpoint()
    assert store.histories == {}
    assert store.graves == {run}
    assert store.manifest is not None
    assert dict(store.manifest.ended) == {}


@virtual
async def test_a_request_that_comes_during_a_deletion_waits_for_it_and_is_told_that_the_key_expired():
    store = Store()
    async with store.life() as life:
        run = await _ended(life)
        told: list[str] = []

        async def ask(key: str) -> None:
            await anyio.sleep(0.0005)
            assert not isinstance(store.events(run)[-1], ev.RunDeleted)  # it is being written
            try:
                await (life.start("a") if key == "start" else life.supervisor.find(run))
            except errors.RpcAgentError as refusal:
                told.append(refusal.code)

        async with anyio.create_task_group() as both:
            both.start_soon(life.keeper.collect)
            both.start_soon(ask, "start")
            both.start_soon(ask, "find")
        assert told == ["KEY_EXPIRED"] * 2
        assert store.reads == []


@virtual
async def test_a_request_that_came_before_a_deletion_is_answered_and_the_run_stays():
    store = Store()
    async with store.life() as life:
        run = await _ended(life)
        actor = await life.supervisor.find(run)
        async with anyio.create_task_group() as both:
            both.start_soon(actor.changed)
            await anyio.wait_all_tasks_blocked()
            assert await life.keeper.collect() == []
            actor.nudge()
        assert [due.run_id for due in await life.keeper.collect()] == [run]


@virtual
async def test_a_deletion_that_cannot_be_recorded_leaves_the_run_as_it_was():
    store = Store()
    async with store.life() as life:
        run = await _ended(life)
        store.refuse = NO_ROOM
        with pytest.raises(errors.StorageError):
            await life.keeper.collect()
        assert life.overview() == ({"completed": 1}, [])
        assert life.roster.actors == {}
        store.refuse = None
        assert (await life.supervisor.find(run)).state == store.states()[run]
        assert life.overview() == ({"completed": 1}, [])
        assert [due.run_id for due in await life.keeper.collect()] == [run]
        assert life.overview() == ({}, [])


@virtual
async def test_a_run_with_records_that_are_in_no_file_is_not_deleted():
    store = Store()
    store.loses = True
    async with store.life() as life:
        run = await life.start("a", "bank.pay")
        await life.approve(run)
        await life.settled(run)
        await life.ask(run, "c", CancelCommand())
        await life.settled(run)
        await life.approve(run, "abandon")
        await life.settled(run)
        await life.keeper.checkpoint()
        store.let_go.add(run)
        actor = await life.supervisor.find(run)
        actor.tail.append(store.histories[run][-1])
        assert await life.keeper.collect() == []
        actor.tail.clear()
        assert [due.run_id for due in await life.keeper.collect()] == [run]


@virtual
async def test_a_deletion_and_a_checkpoint_do_not_meet():
    store = Store()
    async with store.life() as life:
        runs = [await life.start(f"k{number}") for number in range(5)]
        await life.keeper.checkpoint()
        store.let_go |= set(runs)
        async with anyio.create_task_group() as both:
            both.start_soon(life.keeper.collect)
            both.start_soon(life.keeper.checkpoint)
            both.start_soon(life.keeper.collect)
        assert [type(e) for run in runs for e in store.events(run)].count(ev.RunDeleted) == 5
        await life.keeper.checkpoint()
        assert life.overview() == ({}, [])
        assert store.histories == {}
        assert life.keeper.deleted == []
    assert identity("k0") in store.graves


@virtual
async def test_a_run_that_begins_while_a_checkpoint_gathers_keeps_its_place_after_a_kill(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(keeper, "_SLICE", 2)
    store = Store()
    async with store.life() as life:
        for number in range(20):
            await life.start(f"k{number}", "bank.pay")
        real = keeper.anyio.lowlevel.checkpoint

        async def slowly() -> None:
            await real()
            await anyio.sleep(0.01)

        monkeypatch.setattr(keeper.anyio.lowlevel, "checkpoint", slowly)
        async with anyio.create_task_group() as both:
            both.start_soon(life.keeper.checkpoint)
            await anyio.sleep(0.005)
            late = await life.start("late", "bank.pay")
        monkeypatch.undo()
        place = life.roster.actors[late].place
        assert store.manifest is not None
        assert late not in store.histories
    async with store.life() as life:
        assert life.roster.actors[late].place == place == 21
        assert await life.start("next") in life.roster.actors
        assert life.roster.actors[identity("next")].place == 22


@virtual
async def test_a_damaged_run_stays_so_in_the_manifest_until_a_start_could_read_it():
    store = Store()
    async with store.life() as life:
        run = await life.start("a", "bank.pay")
        life.roster.actors[run]._stop(ZeroDivisionError(), [])
        for number in range(3):
            await life.start(f"k{number}")
            await life.keeper.checkpoint()
            assert store.manifest is not None
            [(known, heads, _)] = store.manifest.live
            assert (known, heads.status, heads.hot) == (run, "damaged", True)


@virtual
async def test_a_run_in_doubt_that_ended_is_read_once_after_a_change_of_policy_and_not_at_each_start():
    store = Store()
    store.loses = True
    async with store.life() as life:
        run = await life.start("a", "bank.pay")
        await life.approve(run)
        await life.settled(run)
        await life.ask(run, "c", CancelCommand())
        await life.settled(run)
        await life.keeper.checkpoint()
    store.present = {"a": (Rule(do="deny"),)}
    store.reads.clear()
    for reads in ([run], [run], [run]):
        async with store.life() as life:
            assert store.reads == reads
            await life.keeper.checkpoint()
            assert life.overview() == life.truth()


@virtual
async def test_a_deletion_waits_for_those_who_read_the_run():
    store = Store()
    async with store.life() as life:
        run = await _ended(life)
        found: list[str] = []

        async def find() -> None:
            found.append((await life.supervisor.find(run)).run_id)

        async with anyio.create_task_group() as both:
            both.start_soon(find)
            await anyio.sleep(0.0005)
            both.start_soon(life.keeper.collect)
        assert found == [run]
        assert isinstance(store.events(run)[-1], ev.RunDeleted)
        assert life.overview() == ({}, [])
        assert life.roster.actors == {}


@virtual
async def test_a_damaged_run_that_has_ended_is_not_deleted_once_it_is_known_as_damaged():
    store = Store()
    async with store.life() as life:
        run = await _ended(life)
        store.damaged[run] = errors.StoreDamaged("a line is bad", runs=[run])
        await life.supervisor.find(run)
        await life.keeper.checkpoint()
        assert await life.keeper.collect() == []
        assert life.overview()[0] == {"damaged": 1}
