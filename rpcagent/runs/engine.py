"""One run's actor: the imperative shell around `fold` and `decide`.

Knows: the run's published state, its mailbox, and what this process is performing for it. Requests, outcomes and wake-ups
enter the mailbox in arrival order; one drain of the mailbox is one commit; performers report only to the mailbox. Does not
know: other runs, the wire, or what the journal is made of.

`_turn` is the one critical section: check, fold a candidate, append, sync, publish. Nothing that is not durable is ever
visible in a status, an answer or an event, and nothing outside is touched before its intent is durable.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from datetime import datetime, timedelta
from typing import Any, Protocol

import anyio
import anyio.lowlevel
import msgspec

from rpcagent import errors
from rpcagent.policy.rules import hidden_paths
from rpcagent.runs import events as ev
from rpcagent.runs.decide import Action, Advance, LookUpAction, ModelAction, Rules, advance
from rpcagent.runs.fold import fold
from rpcagent.runs.outcomes import LookUp, Lost, NotDone, Outcome, Report, events_of
from rpcagent.runs.ports import Clock, Journal, Model, ModelRequest, Recorded, ToolRequest, Tools
from rpcagent.runs.requests import Ask, Receipt, check_fingerprint, receive
from rpcagent.runs.state import RunState, Step
from rpcagent.runs.summary import Summary
from rpcagent.runs.transitions import IllegalTransition

RETRY_WRITE_MS = 1_000


class Host(Protocol):
    """What an actor asks of its supervisor."""

    journal: Journal
    clock: Clock
    model: Model
    tools: Tools
    rules: Rules
    grace_ms: int

    def spawn(self, job: Callable[..., Coroutine[Any, Any, None]], *args: Any) -> None: ...
    def published(self, actor: Actor, commit: ev.Commit | None, wake: datetime | None) -> None: ...
    def shared(self, state: RunState) -> RunState: ...
    def delta(self, run_id: str, step_id: str, attempt: int, text: str) -> None: ...
    def incident(self, error: BaseException, what: str) -> str: ...
    def fatal(self, error: errors.StoragePoisoned) -> None: ...


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """A request to begin the run, as its first event."""

    event: ev.RunStarted


class Wake(msgspec.Struct, frozen=True):
    """Time has passed, or the process has just begun: look again."""


class Letter(msgspec.Struct, kw_only=True):
    """A request in the mailbox, and where its answer goes: set once, when everything it rests on is durable."""

    ask: Ask | Start
    done: anyio.Event
    receipt: Receipt | None = None
    refusal: errors.RpcAgentError | None = None


Mail = Letter | Report | Wake


def no_such_run(run_id: str, store_id: str) -> errors.NotFound:
    """Most often the run is there, in another store than the one that was asked: the answer says which one that is."""
    return errors.NotFound(
        "there is no such run in this store: is it the store in which the run began? Each workspace has its own, unless "
        "--store names one; compare `storeId` with what `initialize` told there",
        runId=run_id,
        storeId=store_id,
    )


class Draft(msgspec.Struct, frozen=True, kw_only=True):
    """A candidate: the next commit and its bytes, and what it leads to once it is durable."""

    reported: set[tuple[str, int]]
    commit: ev.Commit | None = None
    body: bytes = b""
    state: RunState | None = None
    perform: tuple[Action, ...] = ()
    wake: datetime | None = None


class Actor:
    """Owns one run. `state` is the published one; None until the first commit is durable.

    `damaged` says why a run is stopped for good; `failed` is the error that every further request for it gets.
    `tail`: its records that are in the log alone; `filed`: its last event that is in files of its own, 0 for none. `place`:
    where it stands among all runs. `touched`: the higher, the later it was asked for. `sheet`: its summary, and the bytes of the
    summary's body, as its files have them; `misfiled`: its files are damaged, so nothing can be added to them.
    """

    def __init__(self, run_id: str, host: Host) -> None:
        self.run_id = run_id
        self.state: RunState | None = None
        self.tail: list[Recorded] = []
        self.filed = 0
        self.place = 0
        self.touched = 0
        self.sheet: tuple[Summary, bytes] | None = None
        self.misfiled = False
        self.damaged: str | None = None
        self.failed: errors.RpcAgentError | None = None
        self.performing: dict[tuple[str, int], anyio.CancelScope] = {}
        self._host = host
        self._mailbox: list[Mail] = []
        self._kept: list[Mail] = []
        self._draining = False
        self._watchers: list[anyio.Event] = []

    @property
    def busy(self) -> bool:
        """Something is being performed for it."""
        return bool(self.performing)

    @property
    def at_rest(self) -> bool:
        """Nothing is being performed for it, and no mail is being decided or recorded."""
        return not self.performing and not self._draining

    @property
    def forgettable(self) -> bool:
        """All that is known of it is in its files, and nobody waits for it."""
        busy = self.performing or self._draining or self._mailbox or self._kept or self._watchers
        return not busy and not self.tail and self.failed is None

    def post(self, item: Mail) -> None:
        """Puts an item into the mailbox; never blocks. One drain runs at a time, and only while there is mail."""
        if self._take_in(item):
            self._host.spawn(self._drain)

    def _take_in(self, item: Mail) -> bool:
        """True: no drain runs yet, and the caller begins it."""
        self._mailbox.append(item)
        if self._draining or self.failed is not None:
            return False
        self._draining = True
        return True

    async def request(self, ask: Ask | Start) -> Receipt:
        """The receipt of a request, when all that it rests on is durable. Raises RpcAgentError where it is refused."""
        if self.damaged is not None:
            raise errors.StoreDamaged(
                "the run is damaged and is kept as it is", runs=[self.run_id], reason=self.damaged
            )
        if self.failed is not None:
            raise self.failed
        letter = Letter(ask=ask, done=anyio.Event())
        self.post(letter)
        await letter.done.wait()
        if letter.refusal is not None:
            raise letter.refusal
        assert letter.receipt is not None
        return letter.receipt

    async def changed(self) -> None:
        """Returns after the next commit of the run, after the end of something that was performed, or when it comes to
        rest."""
        event = anyio.Event()
        self._watchers.append(event)
        await event.wait()

    # The loop

    async def _drain(self) -> None:
        try:
            while self._mailbox and self.failed is None:
                batch, self._mailbox, self._kept = self._kept + self._mailbox, [], []
                await self._turn(batch)
        finally:
            self._draining = False
            self.nudge()

    async def _turn(self, batch: list[Mail]) -> None:
        """One change of the run: everything in the batch, what follows from it, one commit."""
        now = self._host.clock.now() if self.state is None else max(self._host.clock.now(), self.state.last_at)
        try:
            draft = self._draft(batch, now)
            if draft.commit is not None:
                await self._commit(draft.commit, draft.body)
        except errors.StorageError as error:
            await self._not_recorded(error, batch, now)
            return
        except Exception as error:  # noqa: BLE001 - a fault of ours stops this run, and no other
            self._stop(error, batch)
            return
        self._publish(draft)
        for item in batch:
            if isinstance(item, Letter):
                item.done.set()

    def _draft(self, batch: list[Mail], now: datetime, *, outcomes_only: bool = False) -> Draft:
        """The next commit and the candidate state. Writes nothing, publishes nothing. `outcomes_only`: nothing follows from
        what is reported, so that it can be recorded where nothing new may begin."""
        state = self.state
        events: list[ev.AnyEvent] = []
        reported: set[tuple[str, int]] = set()
        for item in batch:
            fresh: list[ev.AnyEvent] = []
            if isinstance(item, Letter):
                fresh = self._receive(state, item, now, reported)
            elif isinstance(item, Report) and state is not None:
                reported.add((item.step_id, item.attempt))
                fresh = events_of(state, item, now)
            for event in fresh:
                state = fold(state, event, now, self.run_id)
            events += fresh
        if state is None:
            return Draft(reported=reported)
        if outcomes_only:
            following = Advance(state, (), (), None)
        else:
            following = advance(state, frozenset(self.performing.keys() - reported), self._host.rules, now)
        events += following.append
        commit = ev.Commit(seq=self._last_seq + 1, at=now, events=tuple(events)) if events else None
        return Draft(
            reported=reported,
            commit=commit,
            body=ev.encode(commit) if commit is not None else b"",
            state=following.state,
            perform=following.perform,
            wake=following.wake,
        )

    def _receive(
        self, state: RunState | None, letter: Letter, now: datetime, reported: set[tuple[str, int]]
    ) -> list[ev.AnyEvent]:
        ask = letter.ask
        letter.receipt = letter.refusal = None
        try:
            if isinstance(ask, Start):
                letter.receipt = _begin(state, ask, self.run_id)
            elif state is None:
                letter.refusal = no_such_run(self.run_id, self._host.journal.store_id)
            else:
                busy = bool(self.performing.keys() - reported)
                letter.receipt = receive(state, ask, self._host.rules.epoch, now, busy=busy)
        except errors.RpcAgentError as refusal:
            letter.refusal = refusal
        return list(letter.receipt.events) if letter.receipt is not None else []

    @property
    def _last_seq(self) -> int:
        return self.state.last_seq if self.state is not None else 0

    async def _commit(self, commit: ev.Commit, body: bytes, *, outcome: bool = False) -> None:
        host = self._host
        answer = await host.journal.append(
            self.run_id, host.rules.epoch, commit.seq - 1, len(commit.events), body, outcome=outcome
        )
        if answer == "fenced":
            raise errors.StoragePoisoned("another process has opened this store; this one may not write any more")
        if answer == "conflict":
            raise IllegalTransition(f"{self.run_id}: the journal knows other events after seq {commit.seq - 1}")

    def _publish(self, draft: Draft) -> None:
        """What was decided is durable: it becomes visible, and only now is anything performed."""
        for ident in draft.reported:
            self.performing.pop(ident, None)
        if draft.state is None:
            return
        commit = draft.commit
        if commit is not None:
            self.state = draft.state if self.state is not None else self._host.shared(draft.state)
            self.tail.append(Recorded(commit.seq, len(commit.events), draft.body))
        scopes = [(action, anyio.CancelScope()) for action in draft.perform]
        for action, scope in scopes:
            self.performing[action.step_id, action.attempt] = scope
        self._host.published(self, commit, draft.wake)
        self.nudge()
        for action, scope in scopes:
            self._host.spawn(self._perform, action, scope)
        if commit is not None and any(isinstance(e, ev.CancelRequested) for e in commit.events):
            self._ask_to_stop()

    def nudge(self) -> None:
        """Ends all waits of `changed`."""
        watchers, self._watchers = self._watchers, []
        for watcher in watchers:
            watcher.set()

    # Performing

    async def _perform(self, action: Action, scope: anyio.CancelScope) -> None:
        """Performs one attempt and reports to the mailbox. Cancelled with the process, it reports nothing: in doubt."""
        outcome: Outcome = Lost(reason="cancelled")
        with scope:
            try:
                outcome = await self._outcome(action)
            except Exception as error:  # noqa: BLE001 - whatever an adapter raises, its effect may have happened
                outcome = self._crashed(action, error)
        if self._take_in(Report(step_id=action.step_id, attempt=action.attempt, outcome=outcome)):
            await anyio.lowlevel.checkpoint()  # what ends in the same turn of the loop shares the commit
            await self._drain()  # in this task, for another would cost as much as the fold

    async def _outcome(self, action: Action) -> Outcome:
        state = self.state
        assert state is not None
        step = state.steps[action.step_id]
        if isinstance(action, ModelAction):
            request = ModelRequest(
                run_id=self.run_id,
                step_id=action.step_id,
                attempt=action.attempt,
                definition=state.definition,
                messages=state.messages,
                request_hash=step.request_hash or "",
            )
            return await self._host.model.complete(request, self._emit(action))
        spec = state.spec_of(step)
        assert spec is not None
        call = ToolRequest(
            run_id=self.run_id,
            step_id=action.step_id,
            attempt=action.attempt,
            spec=spec,
            arguments=step.arguments,
            key=step.key or "",
            workspace=state.workspace,
            hidden=hidden_paths(state.definition, self._host.rules.present),
        )
        if isinstance(action, LookUpAction):
            return await self._host.tools.look_up(call)
        return await self._host.tools.call(call)

    def _emit(self, action: Action) -> Callable[[str], None]:
        def emit(text: str) -> None:
            self._host.delta(self.run_id, action.step_id, action.attempt, text)

        return emit

    def _crashed(self, action: Action, error: Exception) -> Outcome:
        incident = self._host.incident(error, f"step {action.step_id}")
        trouble = ev.Trouble(kind="crashed", message=f"a fault of the adapter; incident {incident} in the log")
        if isinstance(action, LookUpAction):
            return LookUp(answer="unsure")
        step = self.state.steps.get(action.step_id) if self.state is not None else None
        harmless = isinstance(action, ModelAction) or (step is not None and step.effect == "read_only")
        return NotDone(error=trouble) if harmless else Lost(reason="crashed")

    def _ask_to_stop(self) -> None:
        """Cancel: model calls and reads are dropped, an effect in flight has the grace time to give its outcome."""
        assert self.state is not None
        for (step_id, _), scope in self.performing.items():
            step: Step | None = self.state.steps.get(step_id)
            effect = step is not None and step.kind == "tool_call" and step.effect != "read_only"
            if effect and step is not None and not step.interrupted:
                scope.deadline = anyio.current_time() + self._host.grace_ms / 1000
            else:
                scope.cancel()

    # Trouble

    def _stop(self, error: Exception, batch: list[Mail]) -> None:
        """A fault of ours, found before anything was written: this run stops as it is, all others go on."""
        incident = self._host.incident(error, f"run {self.run_id}")
        self.damaged = f"a fault of the daemon; incident {incident} in the log"
        self._fail(errors.InternalError("a fault of the daemon; the run is stopped", incident=incident), batch)

    async def _not_recorded(self, error: errors.StorageError, batch: list[Mail], now: datetime) -> None:
        """Nothing was written. Requests are told so. Outcomes have room in reserve: what happened outside must not become
        unknown because the disk is full. Where even that is used up, they are kept, and tried again before anything else."""
        reports: list[Mail] = [item for item in batch if isinstance(item, Report)]
        if reports and not isinstance(error, errors.StoragePoisoned):
            try:
                draft = self._draft(reports, now, outcomes_only=True)
                if draft.commit is not None:
                    await self._commit(draft.commit, draft.body, outcome=True)
            except errors.StorageError as again:
                error = again
            except Exception as fault:  # noqa: BLE001
                self._stop(fault, batch)
                return
            else:
                self._publish(draft)
                reports = []
        if isinstance(error, errors.StoragePoisoned):
            self._fail(error, batch)
            self._host.fatal(error)
            return
        _refuse(batch, error)
        self._kept = reports
        again_at = self._host.clock.now() + timedelta(milliseconds=RETRY_WRITE_MS)
        self._host.published(self, None, again_at)

    def _fail(self, error: errors.RpcAgentError, batch: list[Mail]) -> None:
        self.failed = error
        for scope in self.performing.values():
            scope.cancel()
        _refuse([*batch, *self._mailbox], error)
        self._mailbox = []
        self._host.published(self, None, None)
        self.nudge()


def _refuse(batch: list[Mail], error: errors.RpcAgentError) -> None:
    for item in batch:
        if isinstance(item, Letter):
            item.receipt, item.refusal = None, error
            item.done.set()


def _begin(state: RunState | None, ask: Start, run_id: str) -> Receipt:
    event = ask.event
    if state is not None:
        known = state.requests[state.client_request_id]
        check_fingerprint(known.method, known.fingerprint, "start", event.fingerprint)
        return Receipt(decision=known.decision, replayed=True)
    decision = {"runId": run_id}
    settled = ev.RequestSettled(
        client_request_id=event.client_request_id, method="start", fingerprint=event.fingerprint, decision=decision
    )
    return Receipt(events=(event, settled), decision=decision)
