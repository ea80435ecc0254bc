"""All runs of one store: replay, the open pass, one timer for all waits, and requests by run.

Knows: actors, the roster of runs, ports. Does not know: the wire, or any adapter. No invariant spans two runs. A waiting run
has no task and no descriptor: it is a summary in memory and, where the clock must act, one entry in the heap.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Coroutine, Iterable
from datetime import datetime, timedelta
from typing import Any

import anyio
import msgspec
from msgspec.structs import replace

from rpcagent import errors
from rpcagent.ids import digest_of
from rpcagent.ids import run_id as derive_run_id
from rpcagent.runs import events as ev
from rpcagent.runs.decide import Rules, open_pass
from rpcagent.runs.engine import Actor, Start, Wake
from rpcagent.runs.fold import apply
from rpcagent.runs.memory import MemoryArchive
from rpcagent.runs.ports import Archive, Clock, Journal, Model, Recorded, Tools
from rpcagent.runs.requests import Ask, Receipt, check_fingerprint
from rpcagent.runs.roster import Roster
from rpcagent.runs.state import RunState
from rpcagent.runs.summary import Summary
from rpcagent.runs.view import needs_attention, run_status

MOST_SLEEP_S = 30.0
"""A wait is looked at again this often: the sleep may not have counted the time in which the machine slept."""

READ_AGAIN_S = 1.0
"""A run whose time has come, and whose files cannot be read just now, is tried again."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """`decision` None: the request is in progress still, and its key joins it."""

    actor: Actor
    decision: dict[str, Any] | None
    replayed: bool


class Subscriber(msgspec.Struct, frozen=True, kw_only=True):
    """Called in the moment of publication, before any answer that rests on it."""

    committed: Callable[[str, ev.Commit], None]
    delta: Callable[[str, str, int, str], None]


class Supervisor:
    """`spawn` starts a task of the daemon's own task group; `incident` logs a fault and returns its id."""

    def __init__(
        self,
        *,
        journal: Journal,
        clock: Clock,
        model: Model,
        tools: Tools,
        rules: Rules,
        spawn: Callable[..., object],
        incident: Callable[[BaseException, str], str],
        fatal: Callable[[errors.StoragePoisoned], None],
        grace_ms: int = 5_000,
        archive: Archive | None = None,
    ) -> None:
        self.journal = journal
        self.clock = clock
        self.model = model
        self.tools = tools
        self.rules = rules
        self._spawn = spawn
        self.incident = incident
        self.fatal = fatal
        self.grace_ms = grace_ms
        self.archive = archive if archive is not None else MemoryArchive()
        self.roster = Roster(self.archive, journal.store_id, self._make, self._keep_as_it_is, self._came_back)
        self.recovered = 0
        self.hurried = False
        self.subscriber: Subscriber | None = None
        self.tail_records = self.tail_bytes = 0
        """Of records that no checkpoint covers yet."""
        self.known_until: datetime | None = None
        """The latest instant that any event has."""
        self.buried: list[tuple[str, str]] = []
        """Runs whose deletion the replay found, and how they had ended: their files may still be there."""
        self._much: tuple[Callable[[], bool], anyio.Event] | None = None
        self._late: set[str] = set()
        """Runs that go on by themselves and could not be read yet."""
        self._policies: dict[str, str] = {}
        self._armed: dict[str, datetime] = {}
        self._due: list[tuple[datetime, str]] = []
        self._rearm = anyio.Event()

    @property
    def actors(self) -> dict[str, Actor]:
        return self.roster.actors

    def _make(self, run_id: str) -> Actor:
        return Actor(run_id, self)

    # Opening

    def park(self, run_id: str, heads: Summary) -> None:
        """Takes in one live run as the last checkpoint summed it up."""
        self.roster.park(run_id, heads, bytes(heads.body))
        if heads.wake is not None:
            self._arm(run_id, heads.wake)

    async def replay(self, records: Iterable[tuple[str, Recorded]]) -> None:
        """Folds the records of the log that no checkpoint covers, oldest first. What cannot be folded, or
        whose files cannot be read, stops that run alone; its records are kept as they are."""
        tails: dict[str, list[Recorded]] = {}
        for run_id, record in records:
            tails.setdefault(run_id, []).append(record)
        begun = {run_id for run_id, tail in tails.items() if tail[0].first == 1 and run_id not in self.roster.parked}
        self.archive.replayed(begun, {*self.roster.parked, *tails} - begun)
        for run_id, tail in tails.items():
            if (deletion := deletes(tail[-1])) is not None:
                self.archive.bury(run_id)
                self.roster.forget(run_id, deletion.status)
                self.buried.append((run_id, deletion.status))
            elif tail[0].first > 1:
                await self._continue(run_id, tail)
            else:
                self._fold(self.roster.actor(run_id), tail)

    async def _continue(self, run_id: str, tail: list[Recorded]) -> None:
        """The run began before the last checkpoint: its files come first."""
        try:
            await self.roster.bring_in(run_id, least=tail[0].first - 1)
        except errors.RpcAgentError as error:  # they cannot be read just now, or no key opens them
            self.roster.set_aside(run_id, None, error)
        self._fold(self.roster.actor(run_id), tail)

    def _fold(self, actor: Actor, tail: list[Recorded]) -> None:
        for record in tail:
            if actor.tail and record.last <= actor.tail[-1].last:
                continue  # it was recorded again by a checkpoint that was interrupted
            # A checkpoint may have been interrupted after it had filed this run. The next one files and counts it again.
            if actor.failed is None and record.last > actor.filed:
                try:
                    actor.state = apply(actor.state, ev.decode(record.body), actor.run_id)
                except Exception as error:  # noqa: BLE001 - whatever stands in one run's records, all others open
                    self._keep_as_it_is(actor, error)
            actor.tail.append(record)
            if not actor.misfiled:
                self._count(record)
        if actor.state is not None:
            actor.state = self.roster.shared(actor.state)
        self._know(actor)
        self._show(actor)

    def _count(self, record: Recorded) -> None:
        self.tail_records += 1
        self.tail_bytes += len(record.body)
        if self._much is not None and self._much[0]():
            self._much[1].set()

    async def recorded_much(self, enough: Callable[[], bool]) -> None:
        """Returns when `enough` is so, which is asked after each record."""
        if not enough():
            reached = anyio.Event()
            self._much = (enough, reached)
            try:
                await reached.wait()
            finally:
                self._much = None

    def _know(self, actor: Actor) -> None:
        if actor.state is not None and (self.known_until is None or actor.state.last_at > self.known_until):
            self.known_until = actor.state.last_at

    def _keep_as_it_is(self, actor: Actor, error: Exception) -> None:
        if isinstance(error, ev.WrittenLater):
            actor.damaged = str(error)
            actor.failed = errors.Incompatible(
                str(error), retryable=False, runs=[actor.run_id], found=error.found, supported=[ev.VERSION]
            )
            return
        if isinstance(error, errors.RpcAgentError):
            actor.damaged, actor.failed = error.message, error
            return
        incident = self.incident(error, f"run {actor.run_id}")
        actor.damaged = f"its records cannot be replayed; incident {incident} in the log"
        actor.failed = errors.StoreDamaged(
            "the records of this run cannot be replayed; they are kept as they are",
            runs=[actor.run_id],
            reason=type(error).__name__,
        )

    async def open(self) -> None:
        """The open pass: one commit for each run that owes one, before any answer. Touches nothing outside.

        Raises StorageError where it cannot be recorded: then nothing may be served, and it may be called again.
        """
        now = self.clock.now()
        for run_id, heads in list(self.roster.parked.items()):
            if heads.hot or (heads.wake is not None and heads.wake <= now) or heads.policy != self.policy(heads.agent):
                await self._look_at(run_id)
        failures: list[errors.StorageError] = []
        async with anyio.create_task_group() as group:
            for actor in self.actors.values():
                if actor.state is None or actor.failed is not None:
                    continue
                try:
                    events = open_pass(actor.state, self.rules, now)
                except Exception as error:  # noqa: BLE001
                    self._keep_as_it_is(actor, error)
                    continue
                if events:
                    group.start_soon(self._reopen, actor, events, max(now, actor.state.last_at), failures)
        if failures:
            raise failures[0]
        for actor in self.actors.values():
            self.published(actor, None, None)

    async def _look_at(self, run_id: str) -> None:
        """What stands in the way of one run is told to whoever asks for it, and holds up no other."""
        try:
            await self.roster.reach(run_id)
        except errors.RpcAgentError:
            self._late.add(run_id)
            self._arm(run_id, self.clock.now() + timedelta(seconds=READ_AGAIN_S))

    def _came_back(self, actor: Actor) -> None:
        self._show(actor)
        if actor.run_id in self._late:
            self._late.discard(actor.run_id)
            actor.post(Wake())  # what the opening owed it comes from the ordinary loop

    async def _reopen(
        self, actor: Actor, events: tuple[ev.AnyEvent, ...], at: datetime, failures: list[errors.StorageError]
    ) -> None:
        assert actor.state is not None
        seq = actor.state.last_seq
        commit = ev.Commit(seq=seq + 1, at=at, events=events)
        state = apply(actor.state, commit, actor.run_id)
        body = ev.encode(commit)
        try:
            answer = await self.journal.append(actor.run_id, self.rules.epoch, seq, len(events), body)
        except errors.StorageError as error:
            failures.append(error)
            return
        if answer != "ok":
            failures.append(errors.StoragePoisoned(f"the journal answers {answer} to the first commit of an opening"))
            return
        actor.state = state
        actor.tail.append(Recorded(commit.seq, len(events), body))
        self._count(actor.tail[-1])
        self.recovered += 1

    def begin(self) -> None:
        """Lets every run go on by the ordinary loop. There is no other recovery."""
        for actor in self.actors.values():
            if actor.state is not None and not actor.state.ended:
                actor.post(Wake())

    async def keep_time(self) -> None:
        """Wakes runs whose wait is over; runs for as long as the daemon."""
        while True:
            now = self.clock.now()
            while self._due and self._due[0][0] <= now:
                when, run_id = heapq.heappop(self._due)
                if self._armed.get(run_id) == when:
                    del self._armed[run_id]
                self._wake(run_id)
            self._rearm = anyio.Event()
            left = (self._due[0][0] - now).total_seconds() if self._due else MOST_SLEEP_S
            with anyio.move_on_after(min(max(left, 0.001), MOST_SLEEP_S)):
                await self._rearm.wait()

    def _wake(self, run_id: str) -> None:
        actor = self.actors.get(run_id)
        if actor is not None:
            actor.post(Wake())
        elif (heads := self.roster.parked.get(run_id)) is not None and (heads.wake is not None or run_id in self._late):
            self._spawn(self._wake_parked, run_id)

    async def _wake_parked(self, run_id: str) -> None:
        try:
            actor = await self.roster.reach(run_id)
        except errors.StorageError:
            self._arm(run_id, self.clock.now() + timedelta(seconds=READ_AGAIN_S))
        except errors.RpcAgentError:
            return  # deleted, or damaged: it is shown as such
        else:
            actor.post(Wake())

    def policy(self, agent: str) -> str:
        """Names the present policy for an agent: a run that waits under another one is looked at again at a start."""
        found = self._policies.get(agent)
        if found is None:
            found = self._policies[agent] = digest_of(self.rules.present.get(agent, ()))[-12:]
        return found

    # Requests

    def run_id_of(self, namespace: str, key: str) -> str:
        return derive_run_id(self.journal.store_id, namespace, key)

    async def find(self, run_id: str) -> Actor:
        """Raises NotFound for a run that this store does not hold, KeyExpired for one that was deleted."""
        return await self.roster.reach(run_id)

    async def start(self, event: ev.RunStarted, wait_ms: int) -> Answer:
        """Durable on return. A twin joins, a repeat is answered from the record."""
        run_id = self.run_id_of(event.namespace, event.client_request_id)
        actor = await self.roster.reach(run_id, make=True)
        try:
            receipt = await actor.request(Start(event=event))
        finally:
            if actor.state is None and actor.forgettable and self.actors.get(run_id) is actor:
                del self.actors[run_id]  # it was refused: nothing of it is kept
        await self._rest(actor, wait_ms)
        return Answer(actor=actor, decision=receipt.decision, replayed=receipt.replayed)

    async def started(self, namespace: str, key: str, fingerprint: str, wait_ms: int) -> Answer | None:
        """The answer of a `start` that is recorded already; None where the key is new, or its first commit is under way.

        Raises IdempotencyConflict, KeyExpired. A repeat needs nothing but the record: neither the agent nor its files.
        """
        try:
            actor = await self.roster.reach(self.run_id_of(namespace, key))
        except errors.NotFound:
            return None
        if actor.failed is not None:
            raise actor.failed
        if actor.state is None:
            return None
        known = actor.state.requests[key]
        check_fingerprint(known.method, known.fingerprint, "start", fingerprint)
        await self._rest(actor, wait_ms)
        return Answer(actor=actor, decision=known.decision, replayed=True)

    async def submit(self, run_id: str, ask: Ask, wait_ms: int) -> Answer:
        """Durable on return. Raises RpcAgentError where the request is refused."""
        actor = await self.find(run_id)
        receipt: Receipt = await actor.request(ask)
        if receipt.decision is not None:
            await self._rest(actor, 0 if ask.method != "resume" else wait_ms)
            return Answer(actor=actor, decision=receipt.decision, replayed=receipt.replayed)
        decision: dict[str, Any] | None = None
        with anyio.move_on_after(wait_ms / 1000):
            while (decision := _decision(actor, ask.key)) is None and actor.failed is None and not self.hurried:
                await actor.changed()
        if decision is None and actor.failed is not None:
            raise actor.failed
        return Answer(actor=actor, decision=decision or _decision(actor, ask.key), replayed=False)

    async def _rest(self, actor: Actor, wait_ms: int) -> None:
        """Until the run waits, is ready or has ended; at most `wait_ms`."""
        if wait_ms <= 0:
            return
        with anyio.move_on_after(wait_ms / 1000):
            while actor.failed is None and not self.hurried and self.status_of(actor) == "running":
                await actor.changed()

    def status_of(self, actor: Actor) -> str:
        if actor.state is None or actor.failed is not None:
            return "damaged"
        return run_status(actor.state, self.rules.epoch, busy=actor.busy)

    def hurry(self) -> None:
        """The caller has gone or is about to: every wait ends now, with the present state for an answer."""
        self.hurried = True
        for actor in self.actors.values():
            actor.nudge()

    async def drain(self, grace_ms: int) -> None:
        """Begins nothing new, and lets what is being performed or recorded come to its record for at most `grace_ms`; the
        rest stays in doubt by design."""
        self.rules = replace(self.rules, draining=True)
        with anyio.move_on_after(grace_ms / 1000):
            for actor in list(self.actors.values()):
                while not actor.at_rest and actor.failed is None:
                    await actor.changed()

    # What an actor asks of its host

    def spawn(self, job: Callable[..., Coroutine[Any, Any, None]], *args: Any) -> None:
        self._spawn(job, *args)

    def published(self, actor: Actor, commit: ev.Commit | None, wake: datetime | None) -> None:
        if wake is not None:
            self._arm(actor.run_id, wake)
        if commit is not None and self.subscriber is not None:
            self.subscriber.committed(actor.run_id, commit)
        if commit is not None and actor.tail:
            self._count(actor.tail[-1])
            self._know(actor)
        if actor.state is None and actor.failed is None:
            return  # its first commit was not recorded: nothing of it is visible
        self._show(actor)

    def deleted(self, run_id: str, commit: ev.Commit) -> None:
        """Tells of the last event of a run, which has no actor any more."""
        if self.subscriber is not None:
            self.subscriber.committed(run_id, commit)

    def shared(self, state: RunState) -> RunState:
        return self.roster.shared(state)

    def _show(self, actor: Actor) -> None:
        if actor.failed is not None:
            lines: list[dict[str, Any]] = [{"runId": actor.run_id, "kind": "damaged"}]
        else:
            lines = needs_attention(actor.state, self.rules.epoch) if actor.state is not None else []
        self.roster.show(actor, self.status_of(actor), lines)

    def _arm(self, run_id: str, wake: datetime) -> None:
        armed = self._armed.get(run_id)
        if armed is None or wake < armed:
            self._armed[run_id] = wake
            heapq.heappush(self._due, (wake, run_id))
            self._rearm.set()

    def delta(self, run_id: str, step_id: str, attempt: int, text: str) -> None:
        if self.subscriber is not None:
            self.subscriber.delta(run_id, step_id, attempt, text)


def deletes(record: Recorded) -> ev.RunDeleted | None:
    """The last thing that is said of a run, if this is it."""
    if record.count != 1 or b'"run_deleted"' not in record.body:
        return None
    try:
        event = ev.decode(record.body).events[0]
    except Exception:  # noqa: BLE001 - it cannot be read, and is kept as it is
        return None
    return event if isinstance(event, ev.RunDeleted) else None


def _decision(actor: Actor, key: str) -> dict[str, Any] | None:
    request = actor.state.requests.get(key) if actor.state is not None else None
    return request.decision if request is not None else None
