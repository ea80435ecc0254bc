"""Engines with one bug each. The simulator must find every one of them; else its silence means nothing."""

from __future__ import annotations

from datetime import datetime

from msgspec.structs import replace
from rpcagent.runs import engine
from rpcagent.runs import events as ev
from rpcagent.runs.decide import Action, Advance, InFlight, Rules, ToolAction, advance
from rpcagent.runs.engine import Actor, Draft, Mail
from rpcagent.runs.outcomes import Outcome
from rpcagent.runs.state import RunState
from rpcagent.runs.supervisor import Supervisor


class _Planted(Supervisor):
    actor: type[Actor] = Actor

    def _make(self, run_id: str) -> Actor:
        return self.actor(run_id, self)


class _Remembering(Actor):
    """Knows the draft that it is about to commit."""

    draft: Draft

    def _draft(self, batch: list[Mail], now: datetime) -> Draft:
        self.draft = super()._draft(batch, now)
        return self.draft


class _ActsFirst(_Remembering):
    """Performs the tool calls of a change, and only then writes that it is going to."""

    early: dict[Action, Outcome]

    async def _commit(self, commit: ev.Commit, body: bytes, *, outcome: bool = False) -> None:
        published, self.state = self.state, self.draft.state
        self.early = {a: await self._outcome_now(a) for a in self.draft.perform if isinstance(a, ToolAction)}
        self.state = published
        await super()._commit(commit, body, outcome=outcome)

    async def _outcome_now(self, action: Action) -> Outcome:
        return await super()._outcome(action)

    async def _outcome(self, action: Action) -> Outcome:
        early = self.early.pop(action, None)
        return early if early is not None else await super()._outcome(action)


class EffectBeforeIntent(_Planted):
    actor = _ActsFirst


class _SettlesLater(Actor):
    """Writes what a request did, and its recorded answer in a commit of its own."""

    async def _commit(self, commit: ev.Commit, body: bytes, *, outcome: bool = False) -> None:
        answers = tuple(e for e in commit.events if isinstance(e, ev.RequestSettled))
        changes = tuple(e for e in commit.events if not isinstance(e, ev.RequestSettled))
        if not answers or not changes:
            await super()._commit(commit, body, outcome=outcome)
            return
        first = replace(commit, events=changes)
        await super()._commit(first, ev.encode(first), outcome=outcome)
        second = ev.Commit(seq=first.seq + len(changes), at=commit.at, events=answers)
        await super()._commit(second, ev.encode(second), outcome=outcome)


class SettledInASecondCommit(_Planted):
    actor = _SettlesLater


class _ShowsFirst(_Remembering):
    """Sends the event notification, and then waits for the sync."""

    async def _commit(self, commit: ev.Commit, body: bytes, *, outcome: bool = False) -> None:
        published, self.state = self.state, self.draft.state
        self._host.published(self, commit, None)
        self.state = published
        await super()._commit(commit, body, outcome=outcome)


class _ShowsAtOnce(_Remembering):
    """Takes the candidate for the state, and then waits for the sync: a status or an answer can tell."""

    async def _commit(self, commit: ev.Commit, body: bytes, *, outcome: bool = False) -> None:
        self.state = self.draft.state
        self.nudge()
        await super()._commit(commit, body, outcome=outcome)


class PublishedBeforeSync(_Planted):
    actor = _ShowsFirst


class VisibleBeforeSync(_Planted):
    actor = _ShowsAtOnce


class InFlightIgnored(Supervisor):
    """`decide` is told that nothing is being performed. `engine.advance` is replaced where this class is in use."""


def advance_blindly(state: RunState, in_flight: InFlight, rules: Rules, now: datetime) -> Advance:
    return advance(state, frozenset(), rules, now)


class OpenPassSkipped(Supervisor):
    """Goes straight to the ordinary loop, which finds the same things, but after the first answers."""

    async def open(self) -> None:
        for actor in self.actors.values():
            self.published(actor, None, None)


PLANTED: dict[str, type[Supervisor]] = {
    "effect before intent": EffectBeforeIntent,
    "settled in a second commit": SettledInASecondCommit,
    "published before the sync": PublishedBeforeSync,
    "visible before the sync": VisibleBeforeSync,
    "in_flight ignored by decide": InFlightIgnored,
    "open pass skipped": OpenPassSkipped,
}


class planted:  # noqa: N801 - reads as a statement
    """`with planted(kind):` the bug is in."""

    def __init__(self, kind: type[Supervisor]) -> None:
        self._kind = kind

    def __enter__(self) -> None:
        if self._kind is InFlightIgnored:
            engine.advance = advance_blindly  # type: ignore[attr-defined]

    def __exit__(self, *_: object) -> None:
        engine.advance = advance  # type: ignore[attr-defined]
