"""The commit port. P2, S1-43, F029; syncs are counted, never timed."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from typing import TYPE_CHECKING, Any

import pytest
from rpcagent import errors
from rpcagent.journal.commit import DirectCommit, GroupCommit
from rpcagent.journal.wal import Wal

from .faulty import FaultyDisk
from .simdisk import SimDisk

if TYPE_CHECKING:
    from collections.abc import Coroutine


def log_on(disk: SimDisk) -> Wal:
    wal = Wal.open(disk, draw_store_id=lambda: "store-1", app="0", at="now")
    list(wal.entries())
    return wal


def run(story: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(30):
            await story

    asyncio.run(bounded())


def recorded(disk: SimDisk) -> list[tuple[str, int, int, bytes]]:
    return [(e.run, e.first, e.count, e.body) for e in Wal.open(disk, draw_store_id=str, app="0", at="now").entries()]


class GatedDisk(FaultyDisk):
    """Syncs of the log wait until they may go on."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()
        self.reached = threading.Event()

    def sync(self, name: str) -> None:
        self.reached.set()
        assert self.gate.wait(30)
        super().sync(name)


async def until(event: threading.Event) -> None:
    assert await asyncio.to_thread(event.wait, 30)


def test_a_lone_append_is_exactly_one_sync() -> None:
    async def story() -> None:
        wal = log_on(SimDisk())
        journal = GroupCommit(wal)
        for seq in range(5):
            before = wal.syncs
            assert await journal.append("a", 1, seq, 1, b"1") == "ok"
            assert wal.syncs == before + 1
        await journal.close()

    run(story())


def test_512_concurrent_appends_need_at_most_three_syncs_and_keep_their_order() -> None:
    disk = SimDisk()

    async def story() -> None:
        wal = log_on(disk)
        before = wal.syncs
        journal = GroupCommit(wal)
        answers = await asyncio.gather(*[journal.append(f"r{i}", 1, 0, 1, b"%d" % i) for i in range(512)])
        assert set(answers) == {"ok"}
        print("syncs for 512 appends:", wal.syncs - before)
        assert wal.syncs - before <= 3
        await journal.close()

    run(story())
    assert recorded(disk) == [(f"r{i}", 1, 1, b"%d" % i) for i in range(512)]


@pytest.mark.parametrize("writers", [1, 8, 64])
def test_records_per_sync_are_the_number_of_waiting_writers(writers: int) -> None:
    async def story() -> None:
        wal = log_on(SimDisk())
        before = wal.syncs
        journal = GroupCommit(wal)

        async def writer(name: str) -> None:
            for seq in range(20):
                await journal.append(name, 1, seq, 1, b"1")

        await asyncio.gather(*[writer(f"r{i}") for i in range(writers)])
        assert wal.syncs - before == 20
        assert wal.records == 20 * writers
        await journal.close()

    run(story())


def test_what_comes_while_a_sync_runs_shares_the_next_one_and_the_loop_never_waits() -> None:
    async def story() -> None:
        disk = GatedDisk()
        wal = log_on(disk)
        before = wal.syncs
        journal = GroupCommit(wal)
        disk.gate.clear()
        disk.reached.clear()
        waiting = [asyncio.ensure_future(journal.append("first", 1, 0, 1, b"1"))]
        await until(disk.reached)
        for i in range(50):
            waiting.append(asyncio.ensure_future(journal.append(f"r{i}", 1, 0, 1, b"1")))
            await asyncio.sleep(0)  # each in a tick of its own
        await asyncio.sleep(0)  # the last one is handed over at the end of its tick
        assert not any(future.done() for future in waiting)
        assert journal.health()["waiting"] == 51
        disk.gate.set()
        assert set(await asyncio.gather(*waiting)) == {"ok"}
        assert wal.syncs - before == 2
        assert journal.health()["waiting"] == 0
        await journal.close()

    run(story())


@pytest.mark.parametrize("port", [GroupCommit, DirectCommit])
def test_an_old_epoch_is_fenced_and_another_last_event_is_a_conflict_and_neither_is_written(port: Any) -> None:
    disk = SimDisk()

    async def story() -> None:
        journal = port(log_on(disk))
        assert (journal.store_id, journal.epoch) == ("store-1", 1)
        assert await journal.append("a", 0, 0, 1, b"1") == "fenced"
        assert await journal.append("a", 2, 0, 1, b"1") == "fenced"
        assert await journal.append("a", 1, 0, 3, b"2") == "ok"
        assert await journal.append("a", 1, 0, 1, b"3") == "conflict"
        assert await journal.append("a", 1, 4, 1, b"3") == "conflict"
        assert await journal.append("a", 1, 3, 1, b"4") == "ok"
        assert await journal.append("b", 1, 7, 1, b"5") == "ok"  # a run that the log does not hold
        assert await journal.append("b", 1, 7, 1, b"5") == "conflict"
        await journal.close()
        again = port(log_on(disk))
        assert await again.append("a", 2, 3, 1, b"6") == "conflict"
        assert await again.append("a", 2, 4, 1, b"6") == "ok"
        await again.close()

    run(story())
    assert [body for *_, body in recorded(disk)] == [b"2", b"4", b"5", b"6"]


def test_of_twins_in_one_batch_the_first_is_recorded_and_a_chain_in_one_batch_is_whole() -> None:
    async def story() -> None:
        journal = GroupCommit(log_on(SimDisk()))
        calls = [("a", 0), ("a", 0), ("b", 0), ("b", 1), ("b", 2)]
        answers = await asyncio.gather(*[journal.append(name, 1, seq, 1, b"1") for name, seq in calls])
        assert answers == ["ok", "conflict", "ok", "ok", "ok"]
        await journal.close()

    run(story())


@pytest.mark.parametrize("port", [GroupCommit, DirectCommit])
def test_what_cannot_be_recorded_is_refused_alone(port: Any) -> None:
    async def story() -> None:
        journal = port(log_on(SimDisk()))
        answers = await asyncio.gather(
            journal.append("a", 1, 0, 1, b"1"),
            journal.append("b", 1, 0, 1, b"{"),
            journal.append("../c", 1, 0, 1, b"1"),
            return_exceptions=True,
        )
        assert [type(answer) for answer in answers] == [str, ValueError, ValueError]
        await journal.close()

    run(story())


def test_on_a_full_disk_each_waiter_is_told_and_the_next_call_tries_again_s1_26() -> None:
    disk = FaultyDisk()

    async def story() -> None:
        journal = GroupCommit(log_on(disk))
        disk.plan = {("write", "wal/"): errno.ENOSPC}
        answers = await asyncio.gather(
            *[journal.append(f"r{i}", 1, 0, 1, b"1") for i in range(4)], return_exceptions=True
        )
        assert [type(answer) for answer in answers] == [errors.StorageError] * 4
        assert len({id(answer) for answer in answers}) == 4
        assert {answer.data["errno"] for answer in answers if isinstance(answer, errors.StorageError)} == {"ENOSPC"}
        health = journal.health()
        assert (health["state"], health["errno"], health["records"]) == ("full", "ENOSPC", 0)
        disk.plan.clear()
        assert await journal.append("r0", 1, 0, 1, b"2") == "ok"
        assert journal.health()["state"] == "ok"
        await journal.close()

    run(story())
    assert [body for *_, body in recorded(disk)] == [b"2"]


def test_what_counts_on_a_refused_record_is_not_recorded_without_it() -> None:
    disk = GatedDisk()

    async def story() -> None:
        journal = GroupCommit(log_on(disk))
        await journal.append("z", 1, 0, 1, b"0")
        disk.gate.clear()
        disk.reached.clear()
        disk.plan = {("write", "wal/"): errno.ENOSPC}
        first = asyncio.ensure_future(journal.append("a", 1, 0, 1, b"1"))
        await until(disk.reached)  # the sync of its undo
        second = asyncio.ensure_future(journal.append("a", 1, 1, 1, b"2"))
        third = asyncio.ensure_future(journal.append("b", 1, 0, 1, b"3"))
        await asyncio.sleep(0)
        disk.plan = {}
        disk.gate.set()
        answers = await asyncio.gather(first, second, third, return_exceptions=True)
        assert type(answers[0]) is errors.StorageError
        assert answers[2] == "ok"
        await journal.close()

    run(story())
    assert [body for *_, body in recorded(disk)] in ([b"0", b"3"], [b"0", b"2", b"3"])


@pytest.mark.parametrize("port", [GroupCommit, DirectCommit])
def test_after_a_failed_sync_all_waiters_and_all_later_calls_are_refused_for_good_f029(port: Any) -> None:
    async def story() -> None:
        disk = FaultyDisk()
        journal = port(log_on(disk))
        disk.plan = {("sync", "wal/"): errno.EIO}
        answers = await asyncio.gather(
            *[journal.append(f"r{i}", 1, 0, 1, b"1") for i in range(4)], return_exceptions=True
        )
        assert [type(answer) for answer in answers] == [errors.StoragePoisoned] * 4
        disk.plan.clear()
        disk.log.clear()
        for _ in range(2):
            with pytest.raises(errors.StoragePoisoned):
                await journal.append("r9", 1, 0, 1, b"1")
        assert (journal.health()["state"], journal.health()["errno"]) == ("poisoned", "EIO")
        await journal.close()
        assert disk.log == []

    run(story())


def test_a_fault_of_ours_in_the_writer_leaves_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        wal = log_on(SimDisk())
        journal = GroupCommit(wal)

        def broken(_: object) -> None:
            raise RuntimeError("ours")

        monkeypatch.setattr(wal, "append", broken)
        with pytest.raises(errors.StoragePoisoned):
            await journal.append("a", 1, 0, 1, b"1")
        assert journal.health()["state"] == "poisoned"
        await journal.close()

    run(story())


def test_a_cancelled_waiter_does_not_cancel_its_record() -> None:
    disk = GatedDisk()

    async def story() -> None:
        journal = GroupCommit(log_on(disk))
        disk.gate.clear()
        disk.reached.clear()
        calls = [asyncio.ensure_future(journal.append(name, 1, 0, 1, b"1")) for name in ("a", "b")]
        early = asyncio.ensure_future(journal.append("c", 1, 0, 1, b"1"))
        await asyncio.sleep(0)
        early.cancel()  # still in the open batch, or just handed over
        await until(disk.reached)
        calls[0].cancel()
        await asyncio.sleep(0)
        disk.gate.set()
        assert await calls[1] == "ok"
        assert calls[0].cancelled()
        assert early.cancelled()
        await journal.close()

    run(story())
    assert [name for name, *_ in recorded(disk)] == ["a", "b", "c"]


def test_close_writes_what_waits_makes_the_watermark_durable_and_ends_the_thread() -> None:
    disk = SimDisk()

    async def story() -> None:
        journal = GroupCommit(log_on(disk))
        waiting = [asyncio.ensure_future(journal.append(f"r{i}", 1, 0, 1, b"1")) for i in range(3)]
        await asyncio.sleep(0)
        await asyncio.gather(journal.close(), journal.close())
        assert [await call for call in waiting] == ["ok"] * 3
        with pytest.raises(errors.StoragePoisoned):
            await journal.append("a", 1, 0, 1, b"1")
        await journal.close()

    threads = threading.active_count()
    run(story())
    assert threading.active_count() == threads
    assert disk.log[-1] == "sync HEAD"
    assert list(disk.after_cut()) == [disk.image()]


def test_a_loop_that_is_gone_stops_nothing() -> None:
    disk = SimDisk()
    wal = log_on(disk)
    journal = GroupCommit(wal)

    async def leave() -> None:
        asyncio.ensure_future(journal.append("a", 1, 0, 1, b"1"))  # noqa: RUF006
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    async def come_back() -> None:
        assert await journal.append("b", 1, 0, 1, b"1") == "ok"
        await journal.close()

    run(leave())
    run(come_back())
    assert [name for name, *_ in recorded(disk)] == ["a", "b"]


def test_in_a_forked_child_the_port_refuses_instead_of_waiting_for_a_thread_that_is_not_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def story() -> None:
        journal = GroupCommit(log_on(SimDisk()))
        with monkeypatch.context() as patch:
            patch.setattr(os, "getpid", lambda: -1)
            with pytest.raises(errors.StoragePoisoned):
                await journal.append("a", 1, 0, 1, b"1")
        await journal.close()

    run(story())


@pytest.mark.parametrize("port", [GroupCommit, DirectCommit])
def test_a_mark_comes_after_what_was_handed_over_before_it_and_before_what_comes_later(port: Any) -> None:
    disk = SimDisk()

    async def story() -> None:
        journal = port(log_on(disk))
        calls = [
            journal.append("a", 1, 0, 1, b"1"),
            journal.append("b", 1, 0, 1, b"2"),
            journal.mark(),
            journal.append("a", 1, 1, 1, b"3"),
            journal.mark(),
        ]
        one, two, first, three, second = await asyncio.gather(*calls)
        assert (one, two, three) == ("ok", "ok", "ok")
        assert (first.seq, first.ends) == (3, {"a": 1, "b": 1})
        assert (second.seq, second.ends) == (4, {"a": 2})
        assert journal.tail == (disk.size("wal/0000000000000005.jsonl"), 0)
        assert await journal.append("a", 1, 2, 1, b"4") == "ok"
        assert journal.tail == (disk.size("wal/0000000000000005.jsonl"), 1)
        await journal.close()

    run(story())
    assert [body for *_, body in recorded(disk)] == [b"1", b"2", b"3", b"4"]


@pytest.mark.parametrize("port", [GroupCommit, DirectCommit])
def test_a_mark_that_cannot_be_made_says_whether_to_try_again_s1_26_f029(port: Any) -> None:
    disk = FaultyDisk()

    async def story() -> None:
        journal = port(log_on(disk))
        await journal.append("a", 1, 0, 1, b"1")
        disk.plan = {("create", "wal/"): errno.ENOSPC}
        with pytest.raises(errors.StorageError) as caught:
            await journal.mark()
        assert caught.value.data == {"code": "STORAGE", "retryable": True, "errno": "ENOSPC"}
        disk.plan = {("syncdir", "wal"): errno.EIO}
        for _ in range(2):
            with pytest.raises(errors.StoragePoisoned):
                await journal.mark()
        with pytest.raises(errors.StoragePoisoned):
            await journal.append("a", 1, 1, 1, b"1")
        await journal.close()

    run(story())


def test_what_a_cancelled_mark_would_have_told_the_next_one_tells() -> None:
    disk = GatedDisk()

    async def story() -> None:
        journal = GroupCommit(log_on(disk))
        disk.gate.clear()
        disk.reached.clear()
        first = asyncio.ensure_future(journal.append("a", 1, 0, 1, b"1"))
        await asyncio.sleep(0)
        marks = [asyncio.ensure_future(journal.mark()) for _ in range(2)]
        await until(disk.reached)
        for mark in marks:
            mark.cancel()
        await asyncio.sleep(0)
        disk.gate.set()
        assert await first == "ok"
        assert await journal.append("b", 1, 0, 1, b"1") == "ok"
        told = await journal.mark()
        assert (told.seq, told.ends) == (3, {"a": 1, "b": 1})
        assert (await journal.mark()).ends == {}
        await journal.close()

    run(story())


def test_a_fault_of_ours_in_a_mark_leaves_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        wal = log_on(SimDisk())
        journal = GroupCommit(wal)

        def broken() -> None:
            raise RuntimeError("ours")

        monkeypatch.setattr(wal, "mark", broken)
        with pytest.raises(errors.StoragePoisoned):
            await journal.mark()
        assert journal.health()["state"] == "poisoned"
        await journal.close()

    run(story())
