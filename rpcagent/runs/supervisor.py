"""All runs of one store: replay, the open pass, one timer for all waits, requests by run, and what is asked of people.

Knows: actors and ports. Does not know: the wire, or any adapter. No invariant spans two runs. A waiting run has no task
and no descriptor: it is a state in memory and, where the clock must act, one entry in the heap.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from datetime import datetime
from typing import Any

import anyio
import msgspec
from msgspec.structs import replace

from rpcagent import errors
from rpcagent.ids import run_id as derive_run_id
from rpcagent.runs import events as ev
from rpcagent.runs.decide import Rules, open_pass
from rpcagent.runs.engine import Actor, Start, Wake
from rpcagent.runs.fold import apply
from rpcagent.runs.ports import Clock, Journal, Model, Tools
from rpcagent.runs.requests import Ask, Receipt, check_fingerprint
from rpcagent.runs.view import needs_attention, run_status

MOST_SLEEP_S = 30.0
"""A wait is looked at again this often: the sleep may not have counted the time in which the machine slept."""


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
        self.actors: dict[str, Actor] = {}
        self.counts: Counter[str] = Counter()
        self.attention: dict[str, list[dict[str, Any]]] = {}
        self.recovered = 0
        self.hurried = False
        self.subscriber: Subscriber | None = None
        self._shown: dict[str, str] = {}
        self._armed: dict[str, datetime] = {}
        self._due: list[tuple[datetime, str]] = []
        self._rearm = anyio.Event()

    # Opening

    def load(self, run_id: str, body: bytes) -> None:
        """Folds one record of the log. What cannot be folded stops that run alone; its records are kept as they are."""
        actor = self._actor(run_id)
        if actor.failed is not None:
            return
        try:
            commit = ev.decode(body)
            actor.state = apply(actor.state, commit, run_id)
        except Exception as error:  # noqa: BLE001 - whatever stands in one run's records, all others open
            self._keep_as_it_is(actor, error)
            return
        actor.commits.append(commit)

    def _keep_as_it_is(self, actor: Actor, error: Exception) -> None:
        incident = self.incident(error, f"run {actor.run_id}")
        actor.damaged = f"its records cannot be replayed; incident {incident} in the log"
        actor.failed = errors.StoreDamaged(
            "the records of this run cannot be replayed; they are kept as they are",
            runs=[actor.run_id],
            reason=type(error).__name__,
        )

    def last_at(self) -> datetime | None:
        """The latest instant that the log knows; the clock may not begin before it."""
        return max((a.state.last_at for a in self.actors.values() if a.state is not None), default=None)

    async def open(self) -> None:
        """The open pass: one commit for each run that owes one, before any answer. Touches nothing outside.

        Raises StorageError where it cannot be recorded: then nothing may be served, and it may be called again.
        """
        now = self.clock.now()
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

    async def _reopen(
        self, actor: Actor, events: tuple[ev.AnyEvent, ...], at: datetime, failures: list[errors.StorageError]
    ) -> None:
        assert actor.state is not None
        seq = actor.state.last_seq
        commit = ev.Commit(seq=seq + 1, at=at, events=events)
        state = apply(actor.state, commit, actor.run_id)
        try:
            answer = await self.journal.append(actor.run_id, self.rules.epoch, seq, len(events), ev.encode(commit))
        except errors.StorageError as error:
            failures.append(error)
            return
        if answer != "ok":
            failures.append(errors.StoragePoisoned(f"the journal answers {answer} to the first commit of an opening"))
            return
        actor.state = state
        actor.commits.append(commit)
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
                self.actors[run_id].post(Wake())
            self._rearm = anyio.Event()
            left = (self._due[0][0] - now).total_seconds() if self._due else MOST_SLEEP_S
            with anyio.move_on_after(min(max(left, 0.001), MOST_SLEEP_S)):
                await self._rearm.wait()

    # Requests

    def run_id_of(self, namespace: str, key: str) -> str:
        return derive_run_id(self.journal.store_id, namespace, key)

    def find(self, run_id: str) -> Actor:
        """Raises NotFound for a run that this store does not show."""
        actor = self.actors.get(run_id)
        if actor is None or (actor.state is None and actor.failed is None):
            raise errors.NotFound("there is no such run in this store", runId=run_id)
        return actor

    async def start(self, event: ev.RunStarted, wait_ms: int) -> Answer:
        """Durable on return. A twin joins, a repeat is answered from the record."""
        run_id = self.run_id_of(event.namespace, event.client_request_id)
        actor = self._actor(run_id)
        receipt = await actor.request(Start(event=event))
        await self._rest(actor, wait_ms)
        return Answer(actor=actor, decision=receipt.decision, replayed=receipt.replayed)

    async def started(self, namespace: str, key: str, fingerprint: str, wait_ms: int) -> Answer | None:
        """The answer of a `start` that is recorded already; None where the key is new, or its first commit is under way.

        Raises IdempotencyConflict. A repeat needs nothing but the record: neither the agent nor its files.
        """
        actor = self.actors.get(self.run_id_of(namespace, key))
        if actor is None:
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
        actor = self.find(run_id)
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

    def runs(self) -> Iterator[Actor]:
        """Every run that is shown, oldest first."""
        return (a for a in self.actors.values() if a.state is not None or a.failed is not None)

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
        if actor.state is None and actor.failed is None:
            return  # its first commit was not recorded: nothing of it is visible
        status = self.status_of(actor)
        before = self._shown.get(actor.run_id)
        if before != status:
            self._shown[actor.run_id] = status
            self.counts[status] += 1
            if before is not None:
                self.counts[before] -= 1
        if actor.failed is not None:
            lines: list[dict[str, Any]] = [{"runId": actor.run_id, "kind": "damaged"}]
        else:
            lines = needs_attention(actor.state, self.rules.epoch) if actor.state is not None else []
        if lines:
            self.attention[actor.run_id] = lines
        else:
            self.attention.pop(actor.run_id, None)

    def _arm(self, run_id: str, wake: datetime) -> None:
        armed = self._armed.get(run_id)
        if armed is None or wake < armed:
            self._armed[run_id] = wake
            heapq.heappush(self._due, (wake, run_id))
            self._rearm.set()

    def delta(self, run_id: str, step_id: str, attempt: int, text: str) -> None:
        if self.subscriber is not None:
            self.subscriber.delta(run_id, step_id, attempt, text)

    def _actor(self, run_id: str) -> Actor:
        actor = self.actors.get(run_id)
        if actor is None:
            actor = self.actors[run_id] = Actor(run_id, self)
        return actor


def _decision(actor: Actor, key: str) -> dict[str, Any] | None:
    request = actor.state.requests.get(key) if actor.state is not None else None
    return request.decision if request is not None else None
