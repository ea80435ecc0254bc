"""Files of runs that survive crashes, and the process that keeps them: a checkpoint after every commit, no run at rest in memory.

Knows: which calls of a checkpoint change what the next process finds, and that each may be the last one. An interrupted
checkpoint leaves some runs filed further than the manifest says, as the real one does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from datetime import datetime
from types import SimpleNamespace
from typing import Any

import anyio
import msgspec
from msgspec.structs import replace
from rpcagent.runs.memory import MemoryArchive
from rpcagent.runs.ports import Checkpoint, Due, Recorded, T
from rpcagent.runs.state import RunState
from rpcagent.runs.summary import Summary, summarise
from rpcagent.runs.supervisor import Supervisor
from rpcagent.runs.view import needs_attention

from .world import World

READS_S = 0.0005
WRITES_S = 0.001


class CrashArchive(MemoryArchive):
    """The archive port of one opening over `world.files`. What it knows beside them is gone with the process."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world
        self._files = world.files
        self.histories, self.summaries = self._files.histories, self._files.summaries
        self.gone = set(self._files.graves)
        self.retention = lambda run_id, _heads: "asked for" if run_id in world.let_go else ""

    @property
    def any_held(self) -> bool:
        return self._files.manifest is not None

    async def read(
        self, run_id: str, fold: Callable[[Iterator[bytes]], T], *, least: int = 0
    ) -> tuple[T, Summary] | None:
        await anyio.sleep(READS_S)
        self._world.reads += 1
        return await super().read(run_id, fold, least=least)

    async def due(self, now: datetime) -> list[Due]:
        await anyio.sleep(READS_S)
        return await super().due(now)

    async def mark(self) -> Any:
        world = self._world
        await world.point("mark: nothing written")
        while world.writing:  # noqa: ASYNC110 - nobody tells of it
            await anyio.sleep(WRITES_S / 2)  # it goes through the log's own writer
        place = len(world.log)
        ends = {record.run_id: record.seq + record.count - 1 for record in world.log[self._files.marked : place]}
        self._files.marked = place
        await world.point("mark: a new segment has begun")
        return SimpleNamespace(ends=ends, place=place)

    async def save(self, mark: Any, checkpoint: Checkpoint) -> None:
        world, files = self._world, self._files
        for filed in checkpoint.filed:
            await super().save(mark, replace(checkpoint, filed=(filed,), deleted=()))
            await anyio.sleep(WRITES_S)
            await world.point("save: a run is filed, the manifest is the old one")
        if not checkpoint.filed:
            await world.point("save: the manifest is the old one")
        files.manifest, files.cut = checkpoint, mark.place
        files.graves |= set(checkpoint.deleted)
        await anyio.sleep(WRITES_S)
        await world.point("save: the manifest is the new one")
        for run_id in checkpoint.deleted:
            files.histories.pop(run_id, None)
            files.summaries.pop(run_id, None)
            await world.point("save: files of a deleted run are gone")


def holes(world: World) -> list[str]:
    """What neither the files nor the log after the manifest's mark can tell any more."""
    found = []
    tails: dict[str, list[Recorded]] = {}
    for record in world.log[world.files.cut :]:
        tails.setdefault(record.run_id, []).append(Recorded(record.seq, record.count, record.body))
    for run_id, state in world.replayed.items():
        history = world.files.histories.get(run_id, [])
        ends = [record.first - 1 for record in history] + [history[-1].last if history else 0]
        if ends != [0, *(record.last for record in history)]:
            found.append(f"the history of {run_id} is not one")
        end = ends[-1]
        for record in tails.get(run_id, []):
            if record.first == end + 1:
                end = record.last
        if end != state.last_seq and run_id not in world.deleted:
            found.append(f"{run_id} can be told up to {end}, and was recorded up to {state.last_seq}")
    return found


def overlooked(world: World, supervisor: Supervisor) -> list[str]:
    """Where what the process has in memory and files is not what all commits say, as a count from scratch has it."""
    roster, epoch, found = supervisor.roster, supervisor.rules.epoch, []
    counts: Counter[str] = Counter()
    asked: list[Any] = []
    for run_id, state in world.durable.items():
        actor, heads = roster.actors.get(run_id), roster.parked.get(run_id)
        if run_id in world.deleted:
            if heads is not None or (actor is not None and actor.state is not None):
                found.append(f"{run_id} was deleted and is there")
            continue
        if actor is not None and actor.state is not None:
            counts[supervisor.status_of(actor)] += 1
            asked += needs_attention(state, epoch)
            continue
        if heads is not None:
            expected, body = summarise(state, heads.place, heads.policy)
            if (
                replace(heads, body=expected.body) != expected
                or bytes(heads.body) != body
                or expected.hot
                or not expected.live
            ):
                found.append(f"{run_id} is not parked as it is")
        elif not state.ended or _filed(world, run_id) != state.last_seq:
            found.append(f"{run_id} is nowhere")
        counts[_status(state)] += 1
        asked += needs_attention(state, epoch)
    if +roster.counts != +counts:
        found.append(f"counts {dict(+roster.counts)}, and there are {dict(+counts)}")
    if (shown := _plain(roster.attention(1_000))) != _plain(asked):
        found.append(f"asks {shown}, and should {_plain(asked)}")
    return found


def _status(state: RunState) -> str:
    return summarise(state, 1, "")[0].status


def _filed(world: World, run_id: str) -> int:
    history = world.files.histories.get(run_id, [])
    return history[-1].last if history else 0


def _plain(lines: list[dict[str, Any]]) -> list[str]:
    """A parked run's lines are JSON already."""
    return sorted(msgspec.json.encode(line).decode() for line in lines)
