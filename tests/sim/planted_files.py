"""Checkpoints, parking and deletion with one bug each. The simulator must find every one of them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

from msgspec.structs import replace
from rpcagent.runs.engine import Actor, Wake
from rpcagent.runs.keeper import Keeper
from rpcagent.runs.ports import Due, Filed
from rpcagent.runs.roster import Roster, replayed
from rpcagent.runs.summary import Summary, summarise
from rpcagent.runs.supervisor import Supervisor

from . import scenarios
from .archive import CrashArchive
from .scenario import Scenario

_forgettable = Actor.forgettable.fget
_bring_in = Roster.bring_in
_live = Keeper._live
_one = Keeper._one
_delete = Keeper._delete
_reach = Roster.reach
_save = CrashArchive.save


def _whatever_its_tail(actor: Actor) -> bool:
    """It may leave memory with records that are in no file."""
    tail, actor.tail = actor.tail, []
    try:
        assert _forgettable is not None
        return bool(_forgettable(actor))
    finally:
        actor.tail = tail


async def _as_if_nothing_were_filed(roster: Roster, run_id: str, **named: Any) -> bool:
    found = await _bring_in(roster, run_id, **named)
    if named:  # by the replay
        roster.actors[run_id].filed = 0
    return found


def _not_armed(supervisor: Supervisor, run_id: str, heads: Summary) -> None:
    supervisor.roster.park(run_id, heads, bytes(heads.body))


def _only_actors(supervisor: Supervisor, run_id: str) -> None:
    """The clock of a run that was parked is over, and nobody reads it."""
    if (actor := supervisor.actors.get(run_id)) is not None:
        actor.post(Wake())


def _without_one(keeper: Keeper, filed: list[Filed]) -> tuple[tuple[str, Summary, bytes], ...]:
    """The manifest forgets the runs that have nothing new."""
    fresh = {one.run_id for one in filed}
    return tuple(row for row in _live(keeper, filed) if row[0] in fresh)


def _as_it_was(keeper: Keeper, actor: Actor) -> Filed:
    """All its records go to its files, and the summary is that of before."""
    archive: Any = keeper._archive
    filed = [record for record in archive.histories.get(actor.run_id, ()) if record.last <= actor.filed]
    before = [record.body for record in (*filed, *actor.tail[:-1])]
    if not before:
        return _one(keeper, actor)
    state = replayed(actor.run_id, before)
    heads, body = summarise(state, actor.place, keeper._supervisor.policy(state.definition.agent))
    return replace(_one(keeper, actor), heads=heads, body=body)


async def _files_first(keeper: Keeper, due: Due) -> bool:
    archive: Any = keeper._archive
    archive.histories.pop(due.run_id, None)
    archive.summaries.pop(due.run_id, None)
    return await _delete(keeper, due)


async def _begins_afresh(roster: Roster, run_id: str, *, make: bool = False) -> Actor:
    """A key that is not in memory is a new one."""
    if make and run_id not in roster.parked and not roster.archive.deleted(run_id):
        return roster.actor(run_id)
    return await _reach(roster, run_id, make=make)


async def _forgets_graves(archive: CrashArchive, mark: Any, checkpoint: Any) -> None:
    """The files of deleted runs go, their tombstones do not come."""
    graves = archive._files.graves.copy()
    await _save(archive, mark, checkpoint)
    archive._files.graves = graves


async def _cuts_first(archive: CrashArchive, mark: Any, checkpoint: Any) -> None:
    """The log is cut before the manifest is there that tells where the rest is."""
    archive._files.cut = mark.place
    await _save(archive, mark, checkpoint)


def _property(function: Callable[[Actor], bool]) -> property:
    return property(function)


PLANTED: dict[str, tuple[Scenario, Callable[[], AbstractContextManager[Any]]]] = {
    "a run leaves memory with records that are in no file": (
        scenarios.A,
        lambda: patch.object(Actor, "forgettable", _property(_whatever_its_tail)),
    ),
    "records are not skipped by number at the replay": (
        scenarios.A,
        lambda: patch.object(Roster, "bring_in", _as_if_nothing_were_filed),
    ),
    "the timer of a run in the manifest is not armed": (
        scenarios.EXPIRES,
        lambda: patch.object(Supervisor, "park", _not_armed),
    ),
    "a parked run is not read when its time has come": (
        scenarios.EXPIRES,
        lambda: patch.object(Supervisor, "_wake", _only_actors),
    ),
    "a live run is not in the manifest": (
        scenarios.DELETED,
        lambda: patch.object(Keeper, "_live", _without_one),
    ),
    "a summary lacks the last commit": (
        scenarios.A,
        lambda: patch.object(Keeper, "_one", _as_it_was),
    ),
    "files go before the tombstone": (
        scenarios.DELETED,
        lambda: patch.object(Keeper, "_delete", _files_first),
    ),
    "tombstones are not filed": (
        scenarios.DELETED,
        lambda: patch.object(CrashArchive, "save", _forgets_graves),
    ),
    "the log is cut before the manifest": (
        scenarios.A,
        lambda: patch.object(CrashArchive, "save", _cuts_first),
    ),
    "a key in the files begins a fresh run": (
        scenarios.DELETED,
        lambda: patch.object(Roster, "reach", _begins_afresh),
    ),
}
"""By what is wrong: a scenario in which it shows, and the bug."""
