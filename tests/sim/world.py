"""The world that survives crashes: the log on disk, the outside's truth, crash points, and what must never be seen.

A crash: from the crash point on, nothing that any task of the dead process does reaches the log, the outside or the
client; whatever it still tries, waits for ever. Then its tasks are dropped and a new process loads the log. So no
`finally`, no late report and no polite end of a task can have an effect, as with kill -9.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import anyio
import msgspec
from rpcagent.errors import StorageError
from rpcagent.runs import events as ev
from rpcagent.runs.fold import apply
from rpcagent.runs.ports import Checkpoint, Recorded
from rpcagent.runs.state import RunState
from rpcagent.runs.summary import Summary

BEGINNING = datetime(2026, 3, 1, 12, tzinfo=UTC)
MOST_SECONDS = 200_000.0
"""Longer than any scenario takes in virtual time; one that is not over by then is stuck."""
MOST_POINTS = 1_000
"""More than any process passes; one that passes more goes in circles."""


class Record(msgspec.Struct, frozen=True):
    run_id: str
    seq: int
    count: int
    epoch: int
    body: bytes


class Plan(msgspec.Struct, frozen=True):
    """`crashes[n]`: the number of the point at which the n-th process dies. `full`: numbers of the appends that fail for
    want of space. `back`: the wall clock is put back so far at each restart."""

    crashes: tuple[int, ...] = ()
    full: frozenset[int] = frozenset()
    back: timedelta = timedelta(0)


class Files:
    """What is on disk beside the log. The process replays the log from `cut` on, which only a new manifest moves; `marked` is
    where its last segment began."""

    def __init__(self) -> None:
        self.histories: dict[str, list[Recorded]] = {}
        self.summaries: dict[str, tuple[Summary, bytes]] = {}
        self.manifest: Checkpoint | None = None
        self.graves: set[str] = set()
        self.cut = self.marked = 0


class World:
    """`points[n]` names the points that the n-th process passed. `broken` collects every breach of an invariant."""

    store_id = "store-of-the-simulation"

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.log: list[Record] = []
        self.files = Files()
        self.writing = 0
        self.reads = 0
        self.let_go: set[str] = set()
        self.deleted: set[str] = set()
        self.acknowledged = 0
        self.epoch = 0
        self.points: list[list[str]] = []
        self.broken: list[str] = []
        self.dead = True
        self.died = anyio.Event()
        self.alive = anyio.Event()
        self.over = anyio.Event()
        self.appends = 0
        self.replayed: dict[str, RunState] = {}
        self.durable: dict[str, RunState] = {}
        self.published: dict[str, int] = {}
        self.intents: set[tuple[str, int]] = set()
        self.accepted: set[str] = set()
        self.approvals: dict[str, tuple[str, str | None]] = {}
        self.consumed: Counter[str] = Counter()
        self.doubts: set[tuple[str, int]] = set()
        self.decisions: dict[tuple[str, str], Any] = {}
        self.began = anyio.current_time()
        self.put_back = timedelta(0)

    # Time

    def now(self) -> datetime:
        return BEGINNING + timedelta(seconds=anyio.current_time() - self.began) - self.put_back

    def breach(self, text: str) -> None:
        if len(self.broken) < 20:
            self.broken.append(text)

    # Life and death

    def opened(self) -> None:
        """A process has taken the store."""
        self.dead = False
        self.writing = 0
        self.epoch += 1
        self.died = anyio.Event()
        self.points.append([])

    async def gate(self) -> None:
        """Lets only the living through."""
        if self.dead:
            await anyio.sleep_forever()

    async def point(self, name: str, before_death: Callable[[], None] | None = None) -> None:
        """A numbered place at which the process may die. `before_death` runs where it does."""
        await self.gate()
        passed = self.points[-1]
        passed.append(name)
        if len(passed) > MOST_POINTS:
            self.breach("goes in circles")
            self.over.set()
            await anyio.sleep_forever()
        lives = len(self.points)
        if lives <= len(self.plan.crashes) and self.plan.crashes[lives - 1] == len(passed):
            if before_death is not None:
                before_death()
            self.dead = True
            self.put_back += self.plan.back
            if self.alive.is_set():
                self.alive = anyio.Event()
            self.died.set()
            await anyio.sleep_forever()

    # The log

    async def append(self, run_id: str, epoch: int, expected_seq: int, count: int, body: bytes, **_: Any) -> str:
        await self.point("append: nothing written")
        self.appends += 1
        if self.appends in self.plan.full:
            raise StorageError("no space", errno="ENOSPC")
        if epoch != self.epoch:
            return "fenced"
        before = self.replayed.get(run_id)
        if (before.last_seq if before else 0) != expected_seq:
            return "conflict"
        record = Record(run_id, expected_seq + 1, count, epoch, body)
        self.log.append(record)
        self.writing += 1
        commit = ev.decode(body)
        if len(commit.events) != count or commit.seq != expected_seq + 1:
            self.breach(
                f"a record says seq {expected_seq + 1}, count {count}; it holds {commit.seq}, {len(commit.events)}"
            )
        self.replayed[run_id] = after = apply(before, commit, run_id)
        await anyio.sleep(0.001)  # the sync: whatever happens meanwhile shares the next commit

        def lost() -> None:
            self.log.remove(record)
            if before is None:
                del self.replayed[run_id]
            else:
                self.replayed[run_id] = before

        await self.point("append: written and lost", lost)
        await self.point("append: written, not acknowledged")
        self.writing -= 1
        self.acknowledge(run_id, before, after, commit)
        return "ok"

    def acknowledge(self, run_id: str, before: RunState | None, after: RunState, commit: ev.Commit) -> None:
        """What a reader of the acknowledged log knows from now on."""
        self.acknowledged += 1
        self.durable[run_id] = after
        for event in commit.events:
            match event:
                case ev.ToolStarted() | ev.ModelCallStarted():
                    self.intents.add((event.step_id, event.attempt))
                    if isinstance(event, ev.ToolStarted) and event.approval_id is not None:
                        self.consumed[event.approval_id] += 1
                        if self.consumed[event.approval_id] > 1:
                            self.breach(f"{event.approval_id} was consumed twice")
                case ev.ModelAnswered():
                    if event.step_id in self.accepted:
                        self.breach(f"{event.step_id} was answered twice")
                    self.accepted.add(event.step_id)
                case ev.AttemptInterrupted():
                    self.doubts.add((event.step_id, event.attempt))
                case ev.RunDeleted():
                    self.deleted.add(run_id)
                case _:
                    pass
        if before is not None:
            self._grows(before, after)
        for approval in (*after.approvals.values(), *after.closed.values()):
            shown = (approval.digest, approval.step_id)
            if self.approvals.setdefault(approval.approval_id, shown) != shown:
                self.breach(f"{approval.approval_id} changed its digest or its step")

    def _grows(self, before: RunState, after: RunState) -> None:
        """What is spent never shrinks; tokens only by the reservation that is trued up."""
        for name in ("steps", "attempts", "estimated_tokens", "cost_usd", "active_s"):
            if getattr(after.spent, name) < getattr(before.spent, name):
                self.breach(f"spent {name} shrank")
        reserved = sum(step.reserved_tokens for step in before.steps.values())
        if after.spent.tokens < before.spent.tokens - reserved:
            self.breach("spent tokens shrank by more than what was reserved")

    def read_back(self) -> None:
        """At an opening: what was written is all there is, whether it was acknowledged or not."""
        states: dict[str, RunState] = {}
        for record in self.log:
            commit = ev.decode(record.body)
            before = states.get(record.run_id)
            states[record.run_id] = after = apply(before, commit, record.run_id)
            if after.last_seq > (known.last_seq if (known := self.durable.get(record.run_id)) else 0):
                self.acknowledge(record.run_id, before, after, commit)
        for run_id, known in self.durable.items():
            if states.get(run_id) != known:
                self.breach(f"{run_id}: what was acknowledged is not what the log replays")
        if states != self.replayed:
            self.breach("a replay of the whole log differs from the fold of its commits one by one")

    # What a process shows

    def seen(self, run_id: str, state: RunState | None, why: str) -> None:
        """Something of the run becomes visible: it must be durable, and equal to what the log replays to."""
        known = self.durable.get(run_id)
        if state != known:
            have = state.last_seq if state else 0
            self.breach(f"{why}: shows seq {have}, durable is {known.last_seq if known else 0}, or they differ")

    def committed(self, run_id: str, commit: ev.Commit, state: RunState | None) -> None:
        """An event notification went out."""
        if self.dead:
            return
        last = self.published.get(run_id, 0)
        if commit.seq <= last:
            self.breach(f"events from {commit.seq} were published after {last}")
        self.published[run_id] = commit.seq + len(commit.events) - 1
        if run_id in self.deleted and state is not None:
            self.breach(f"{run_id} was deleted and is there")
        elif run_id not in self.deleted:
            self.seen(run_id, state, "published")

    def answered(self, run_id: str, key: str, decision: Any) -> None:
        """A definite answer reached the client: for one key, for ever the same."""
        first = self.decisions.setdefault((run_id, key), decision)
        if first != decision:
            self.breach(f"{key}: answered {first}, later {decision}")
