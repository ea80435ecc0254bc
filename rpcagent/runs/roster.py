"""Which runs there are, and how much of each is in memory.

Knows: runs with an actor, live runs of which a summary is enough, and the archive that holds the files of all others; what
`status` counts and asks of people. Does not know: when anything is saved (`keeper`), the wire, or how files are made.

A run that was not recorded since the last checkpoint, and that nobody waits for, may be parked at any time; it comes back
by replaying its history, through the same fold as at a start.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import anyio
from msgspec import Raw
from msgspec.structs import replace

from rpcagent import errors
from rpcagent.ids import is_run_id
from rpcagent.runs import events as ev
from rpcagent.runs import summary
from rpcagent.runs.definition import Definition
from rpcagent.runs.engine import Actor, no_such_run
from rpcagent.runs.fold import apply
from rpcagent.runs.ports import Archive
from rpcagent.runs.state import RunState
from rpcagent.runs.summary import Summary

_DEFINITIONS = 64
_TEXTS = 1_000
_NONE: dict[str, str] = {}
RESIDENT = 128
"""Runs at rest that stay in memory, those that were asked for last."""


class Roster:
    """`make` makes an actor; `damaged` logs why the records of one cannot be replayed, and stops it; `back` tells that one
    came back from its files, to be shown as it is in this opening."""

    def __init__(
        self,
        archive: Archive,
        store_id: str,
        make: Callable[[str], Actor],
        damaged: Callable[[Actor, Exception], None],
        back: Callable[[Actor], None],
    ) -> None:
        self.archive = archive
        self._store_id = store_id
        self.actors: dict[str, Actor] = {}
        self.parked: dict[str, Summary] = {}
        self.counts: Counter[str] = Counter()
        self.places = 1
        self._make = make
        self._damaged = damaged
        self._back = back
        self._asks: dict[str, list[dict[str, Any]] | None] = {}  # None: as the summary says
        self._shown: dict[str, str] = {}
        self._loading: dict[str, anyio.Event] = {}
        self._definitions: dict[str, Definition] = {}
        self._texts: dict[str, str] = {}
        self._touches = 0

    # Finding

    def at_hand(self, run_id: str) -> Actor | None:
        """Its actor, if it is in memory and has anything to show."""
        actor = self.actors.get(run_id)
        return actor if actor is not None and _known(actor) else None

    def actor(self, run_id: str) -> Actor:
        """As it is in memory, or a new one. Only for a run that is in no file, or while it is being replayed."""
        actor = self.actors.get(run_id)
        if actor is None:
            actor = self.actors[run_id] = self._make(run_id)
        return actor

    async def reach(self, run_id: str, *, make: bool = False) -> Actor:
        """Its actor, from its files if it must be. Nothing comes between the return and the caller's next step. `make`: a
        new one where there is no such run.

        Raises NotFound, KeyExpired for a run that was deleted, StorageError where its files cannot be read just now, and
        StoreDamaged where it may be one of those of which nothing is left: what it did must not be done again.
        """
        while True:
            actor = self.actors.get(run_id)
            if actor is not None and (make or _known(actor)):
                self._touches += 1
                actor.touched = self._touches
                return actor
            if self.archive.deleted(run_id):
                raise errors.KeyExpired("the run was deleted; its key is never taken again", runId=run_id)
            if (loading := self._loading.get(run_id)) is not None:
                await loading.wait()
                continue
            if actor is None and (run_id in self.parked or (is_run_id(run_id) and self.archive.may_hold(run_id))):
                async with _Turn(self._loading, run_id):
                    found = await self.bring_in(run_id)
                    if not found and self.archive.lost is None:
                        await self.archive.learn()  # in turn, or a twin that came later would be first
                if found:
                    continue
            if actor is None and self.archive.lost and is_run_id(run_id):
                raise _perhaps_lost(self.archive.lost)
            if not make:
                raise no_such_run(run_id, self._store_id)
            actor = self.actor(run_id)

    async def bring_in(self, run_id: str, *, least: int = 0) -> bool:
        """Replays its files into a new actor. False: it has none, which is damage where they must reach event `least`, or what
        the summary tells. Damage stops that run alone."""
        parked = self.parked.get(run_id)
        if parked is not None:
            least = max(least, parked.last_seq, 1)
        try:
            read = await self.archive.read(run_id, lambda bodies: replayed(run_id, bodies), least=least)
        except (errors.StorageError, errors.Incompatible):
            raise
        except Exception as error:  # noqa: BLE001 - whatever stands in one run's files, all others open
            heads = None if run_id in self.parked else await self.archive.heads(run_id)
            self.set_aside(run_id, heads, error)
            return True
        if read is None:
            return False
        state, heads = read
        actor = self._take(run_id, heads)
        actor.state, actor.filed = self.shared(state), state.last_seq
        self._back(actor)
        return True

    def set_aside(self, run_id: str, heads: Summary | None, error: Exception) -> None:
        """Its files cannot be used. It is counted already, and keeps its place."""
        actor = self._take(run_id, heads)
        actor.misfiled = True
        self._damaged(actor, error)
        self.show(actor, "damaged", [{"runId": run_id, "kind": "damaged"}])

    def shared(self, state: RunState) -> RunState:
        """The same state. Runs of one agent hold one definition in memory between them."""
        known = self._definitions.setdefault(state.definition_digest, state.definition)
        if len(self._definitions) > _DEFINITIONS:
            self._definitions.pop(next(iter(self._definitions)))
        return replace(state, definition=known)

    def _take(self, run_id: str, filed: Summary | None) -> Actor:
        """`filed`: as its files say, which may be further than what is parked."""
        parked = self.parked.pop(run_id, None)
        heads = parked or filed
        actor = self.actor(run_id)
        if heads is not None:
            actor.place = heads.place
            self._shown[run_id] = heads.status  # it is counted already
        sheet = filed or heads
        if parked is not None and sheet is not None and not sheet.live:
            sheet = parked  # the manifest does not know yet that it ended: the next one counts it
        if sheet is not None:
            actor.sheet = (sheet, bytes(sheet.body))
        return actor

    # Showing

    def show(self, actor: Actor, status: str, lines: list[dict[str, Any]]) -> None:
        """What is counted, and what is asked of people, follows what is published."""
        run_id = actor.run_id
        if not actor.place:
            actor.place = self.places
            self.places += 1
        before = self._shown.get(run_id)
        if before != status:
            self._shown[run_id] = status
            self.counts[status] += 1
            if before is not None:
                self.counts[before] -= 1
        if lines:
            self._asks[run_id] = lines
        else:
            self._asks.pop(run_id, None)

    def attention(self, most: int) -> list[dict[str, Any]]:
        """What people must do, a line each."""
        found: list[dict[str, Any]] = []
        for run_id, lines in self._asks.items():
            found += lines if lines is not None else summary.attention_of(bytes(self.parked[run_id].body))
            if len(found) >= most:
                break
        return found[:most]

    def in_memory(self, place: int) -> Iterator[tuple[int, str, Actor | Summary]]:
        """Runs with an actor or a summary, from `place` on, in order."""
        rows: list[tuple[int, str]] = [(a.place, i) for i, a in self.actors.items() if a.place >= place and _known(a)]
        rows += [(heads.place, i) for i, heads in self.parked.items() if heads.place >= place]
        for where, run_id in sorted(rows):
            yield where, run_id, self.actors.get(run_id) or self.parked[run_id]

    # Parking

    def park(self, run_id: str, heads: Summary, body: bytes) -> None:
        """Keeps a summary in place of an actor, or nothing at all of a run that has ended and asks nothing."""
        actor = self.actors.pop(run_id, None)
        if actor is None:
            self.counts[heads.status] += 1
        else:
            self.counts[self._shown.pop(run_id)] -= 1
            self.counts[heads.status] += 1
        self._asks.pop(run_id, None)
        if heads.live:
            shared = {
                name: self._shared_text(getattr(heads, name)) for name in ("status", "namespace", "agent", "policy")
            }
            self.parked[run_id] = replace(heads, body=Raw(body), labels=heads.labels or _NONE, **shared)
            if heads.asks:
                self._asks[run_id] = None

    def _shared_text(self, text: str) -> str:
        """Thousands of runs wait in few states, for few agents."""
        return self._texts.setdefault(text, text) if len(self._texts) < _TEXTS else text

    def forget(self, run_id: str, status: str | None) -> None:
        """It was deleted; `status` is what it is counted as, where it has no actor."""
        actor = self.actors.pop(run_id, None)
        status = self._shown.pop(run_id, status) if actor is not None else status
        heads = self.parked.pop(run_id, None)
        if heads is not None:
            status = heads.status
        if status is not None:
            self.counts[status] -= 1
        self._asks.pop(run_id, None)

    def resting(self) -> list[Actor]:
        """Actors that may be parked, the ones that were asked for last left out; longest untouched first."""
        found = [actor for actor in self.actors.values() if actor.forgettable]
        found.sort(key=lambda actor: actor.touched)
        return found[: max(0, len(found) - RESIDENT)]

    def turn(self, run_id: str) -> _Turn:
        """While it is held, `reach` waits for this run."""
        return _Turn(self._loading, run_id)


class _Turn:
    """Whoever comes first to a run that is not in memory reads it, or deletes it; all others wait."""

    def __init__(self, loading: dict[str, anyio.Event], run_id: str) -> None:
        self._loading, self._run_id = loading, run_id

    async def __aenter__(self) -> None:
        while (busy := self._loading.get(self._run_id)) is not None:
            await busy.wait()
        self._loading[self._run_id] = anyio.Event()

    async def __aexit__(self, *_: object) -> None:
        self._loading.pop(self._run_id).set()


def _known(actor: Actor) -> bool:
    return actor.state is not None or actor.failed is not None


def _perhaps_lost(number: int) -> errors.StoreDamaged:
    return errors.StoreDamaged(
        f"{number} of the runs that this store has recorded left no trace but that they were counted, and this may be one of "
        "them: put their files back, or give them up with `rpcagent repair`",
        file="runs",
        offset=0,
        reason=f"{number} runs are missing",
    )


def replayed(run_id: str, bodies: Iterable[bytes]) -> RunState:
    """The state after all of a run's commits. Raises IllegalTransition, and whatever `decode` raises."""
    state: RunState | None = None
    for body in bodies:
        state = apply(state, ev.decode(body), run_id)
    if state is None:
        raise ValueError("the history is empty")
    return state
