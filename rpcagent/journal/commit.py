"""The commit port: many writers, one batch at a time.

Knows: who waits for which record, and how an answer gets back to the event loop. Does not know: bytes on disk (`wal`).

Writers of one loop tick share a batch. One thread takes all batches that are queued, writes them as one, and wakes the
loop once. While it syncs, the next batch fills: records per sync come out as the number of waiting writers.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import threading
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from rpcagent import errors
from rpcagent.journal.record import Item

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rpcagent.journal.wal import Mark, Wal

Outcome = Literal["ok", "fenced", "conflict"]
_Answer = Outcome | errors.StorageError
_Waiter = tuple[Item, "asyncio.Future[Outcome]"]
_Marker = asyncio.Future["Mark"]


class GroupCommit:
    """The port over one dedicated thread. The thread alone uses `wal` from now on."""

    def __init__(self, wal: Wal) -> None:
        self.store_id = wal.store_id
        self.epoch = wal.epoch
        self._wal = wal
        self._pid = os.getpid()
        self._waiting = 0
        self._batch: list[_Waiter] = []
        self._queue: queue.SimpleQueue[list[_Waiter] | _Marker | None] = queue.SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed: asyncio.Future[None] | None = None
        self._untold: dict[str, int] = {}  # ends of runs, of marks whose callers were cancelled
        # A daemon: a process that ends without `close` must not hang, and the log is made for that.
        self._thread = threading.Thread(target=self._work, name="rpcagent-journal", daemon=True)
        self._thread.start()

    async def append(
        self, run_id: str, epoch: int, expected_seq: int, count: int, body: bytes, *, outcome: bool = False
    ) -> Outcome:
        """Records `count` events of a run after its event `expected_seq`; `body` is one JSON value without a newline.
        `outcome`: on a full disk it may use what is held in reserve.

        `ok`: durable. `fenced`: `epoch` is not that of this opening; nothing was recorded. `conflict`: the last event of
        the run is another one; nothing was recorded. A run that the log does not hold is taken as it comes.

        A cancelled call leaves its record on its way: it will be durable, or not, as if the call had been killed.
        Raises ValueError for a body or a name that cannot be recorded, StorageError (nothing was recorded, try again),
        StoragePoisoned (not known; for good, and for every later call)."""
        item = Item(run_id, expected_seq + 1, count, body, outcome)
        self._refuse_if_over()
        if epoch != self.epoch:
            return "fenced"
        loop = self._loop = asyncio.get_running_loop()
        future: asyncio.Future[Outcome] = loop.create_future()
        self._batch.append((item, future))
        self._waiting += 1
        if len(self._batch) == 1:
            loop.call_soon(self._flush)  # runs after all that are ready now have had their turn
        return await future

    async def mark(self) -> Mark:
        """`Wal.mark`, after all that was handed over before this call and before all that comes later.

        Raises StorageError (there is no mark, try again), StoragePoisoned. What a cancelled call would have told, the
        next one tells."""
        self._refuse_if_over()
        loop = self._loop = asyncio.get_running_loop()
        marker: _Marker = loop.create_future()
        self._flush()
        self._queue.put(marker)
        return await marker

    @property
    def tail(self) -> tuple[int, int]:
        """Bytes and records of the log since the last mark (without one: since it was opened from its checkpoint)."""
        return self._wal.tail_bytes, self._wal.tail_records

    def health(self) -> dict[str, Any]:
        """state: ok, full (the last batch was undone; each call tries again) or poisoned; errno: a name, or None;
        syncs, records, bytes: of this process; waiting: calls that have no answer yet."""
        return {**_health(self._wal), "waiting": self._waiting}

    async def close(self) -> None:
        """Writes what is waiting, makes the watermark durable, ends the thread. Calls after it get StoragePoisoned."""
        if self._closed is None:
            loop = self._loop = asyncio.get_running_loop()
            self._closed = loop.create_future()
            self._flush()
            self._queue.put(None)
        await asyncio.shield(self._closed)
        self._thread.join()  # its last act was to say so

    def _refuse_if_over(self) -> None:
        if self._wal.state == "poisoned":
            raise self._wal.over()
        if self._closed is not None:
            raise errors.StoragePoisoned("The journal is closed.", errno=None)
        if os.getpid() != self._pid:
            raise errors.StoragePoisoned("A forked child must not use the store of its parent.", errno="EBADF")

    def _flush(self) -> None:
        if self._batch:
            batch, self._batch = self._batch, []
            self._queue.put(batch)

    def _work(self) -> None:
        over = False
        while not over:
            waiters: list[_Waiter] = []
            handed = self._queue.get()
            while isinstance(handed, list):
                waiters += handed
                try:
                    handed = self._queue.get_nowait()
                except queue.Empty:
                    break
            if waiters:
                self._tell(self._resolve, waiters, _record(self._wal, [item for item, _ in waiters]))
            if isinstance(handed, asyncio.Future):
                self._tell(self._resolve_mark, handed, _mark(self._wal))
            over = handed is None
        try:
            self._wal.close()
        finally:
            self._tell(self._resolve_closed)

    def _tell(self, callback: Any, *args: Any) -> None:
        assert self._loop is not None  # whoever queued something has set it
        with contextlib.suppress(RuntimeError):  # the loop is gone, and with it all who waited
            self._loop.call_soon_threadsafe(callback, *args)

    def _resolve(self, waiters: list[_Waiter], answers: list[_Answer]) -> None:
        self._waiting -= len(waiters)
        for (_, future), answer in zip(waiters, answers, strict=True):
            _settle(future, answer)

    def _resolve_mark(self, marker: _Marker, answer: Mark | errors.StorageError) -> None:
        if not isinstance(answer, errors.StorageError):
            ends = self._untold | answer.ends
            self._untold = ends if marker.done() else {}
            answer = msgspec.structs.replace(answer, ends=ends)
        _settle(marker, answer)

    def _resolve_closed(self) -> None:
        if self._closed is not None and not self._closed.done():
            self._closed.set_result(None)


class DirectCommit:
    """The same port without a thread: the batch is the call, durable inside it. For simulators and tools."""

    def __init__(self, wal: Wal) -> None:
        self.store_id = wal.store_id
        self.epoch = wal.epoch
        self._wal = wal

    async def append(
        self, run_id: str, epoch: int, expected_seq: int, count: int, body: bytes, *, outcome: bool = False
    ) -> Outcome:
        """As `GroupCommit.append`. Never suspends."""
        item = Item(run_id, expected_seq + 1, count, body, outcome)
        if self._wal.state == "poisoned":
            raise self._wal.over()
        if epoch != self.epoch:
            return "fenced"
        answer = _record(self._wal, [item])[0]
        if isinstance(answer, str):
            return answer
        raise answer

    async def mark(self) -> Mark:
        """As `GroupCommit.mark`. Never suspends."""
        answer = _mark(self._wal)
        if isinstance(answer, errors.StorageError):
            raise answer
        return answer

    @property
    def tail(self) -> tuple[int, int]:
        """As `GroupCommit.tail`."""
        return self._wal.tail_bytes, self._wal.tail_records

    def health(self) -> dict[str, Any]:
        """As `GroupCommit.health`."""
        return {**_health(self._wal), "waiting": 0}

    async def close(self) -> None:
        """Makes the watermark durable."""
        self._wal.close()


def _record(wal: Wal, items: Sequence[Item]) -> list[_Answer]:
    """One answer for each item. The order of the items is the order in the log; an item that counts on one before it in
    the same batch is fine, and fails with it."""
    ends: dict[str, int] = {}
    answers: list[_Answer] = []
    fresh = []
    for item in items:
        end = ends.get(item.run)
        if end is None:
            end = wal.run_ends.get(item.run)
        if end is not None and end != item.first - 1:
            answers.append("conflict")
            continue
        ends[item.run] = item.first + item.count - 1
        fresh.append(item)
        answers.append("ok")
    try:
        wal.append(fresh)
    except errors.StoragePoisoned as error:
        return [error] * len(items)
    except errors.StorageError as error:
        return _outcomes_alone(wal, items, answers, error)
    except Exception as cause:  # noqa: BLE001 - a fault of ours must leave nobody waiting, and nothing acknowledged
        return [_fault(wal, cause)] * len(items)
    return answers


def _outcomes_alone(
    wal: Wal, items: Sequence[Item], answers: list[_Answer], error: errors.StorageError
) -> list[_Answer]:
    """There is no room. What has happened outside is recorded from the reserve; all others are told."""
    chosen = [item.outcome and answer == "ok" for item, answer in zip(items, answers, strict=True)]
    blocked = {item.run for item, choose in zip(items, chosen, strict=True) if not choose}
    chosen = [choose and item.run not in blocked for item, choose in zip(items, chosen, strict=True)]
    if not any(chosen):
        return [error] * len(items)
    try:
        wal.append_outcomes([item for item, choose in zip(items, chosen, strict=True) if choose])
    except errors.StorageError as again:
        return [again] * len(items)
    except Exception as cause:  # noqa: BLE001 - as above
        return [_fault(wal, cause)] * len(items)
    return ["ok" if choose else error for choose in chosen]


def _mark(wal: Wal) -> Mark | errors.StorageError:
    try:
        return wal.mark()
    except errors.StorageError as error:
        return error
    except Exception as cause:  # noqa: BLE001 - as above
        return _fault(wal, cause)


def _fault(wal: Wal, cause: Exception) -> errors.StoragePoisoned:
    poisoned = wal.poison("EIO")
    poisoned.__cause__ = cause
    return poisoned


def _settle(future: asyncio.Future[Any], answer: Any) -> None:
    """On the loop. A future that was cancelled has its end."""
    if future.done():
        return
    if isinstance(answer, errors.StorageError):
        # One exception each: a shared one would collect the traceback of all who raise it.
        future.set_exception(_copy(answer))
    else:
        future.set_result(answer)


def _copy(error: errors.StorageError) -> errors.StorageError:
    again = type(error)(error.message, **error.details)
    again.__cause__ = error
    return again


def _health(wal: Wal) -> dict[str, Any]:
    return {
        "state": wal.state, "errno": wal.errno, "syncs": wal.syncs, "records": wal.records, "bytes": wal.bytes_written,
    }  # fmt: skip
