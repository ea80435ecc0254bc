"""An archive in memory: the fake of the port, for simulations, measurements and tests. Nothing of it outlives the object.

It does what the real one promises, in the same order, and never suspends.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import datetime
from types import SimpleNamespace

from msgspec import Raw
from msgspec.structs import replace

from rpcagent.errors import StoreDamaged
from rpcagent.runs.ports import Checkpoint, Due, Mark, Recorded, T
from rpcagent.runs.summary import Summary


class MemoryArchive:
    """`histories`: all filed records by run. `summaries`: with the bytes of the body. `gone`: runs that were deleted."""

    def __init__(self) -> None:
        self.histories: dict[str, list[Recorded]] = {}
        self.summaries: dict[str, tuple[Summary, bytes]] = {}
        self.gone: set[str] = set()
        self.last: Checkpoint | None = None
        self.retention: Callable[[str, Summary], str] = lambda _run_id, _heads: ""
        """Why a run that has ended may go; empty where it may not."""

    @property
    def any_held(self) -> bool:
        return bool(self.histories or self.gone)

    retains_all = False

    def may_hold(self, run_id: str) -> bool:
        return run_id in self.histories

    def deleted(self, run_id: str) -> bool:
        return run_id in self.gone

    def bury(self, run_id: str) -> None:
        self.gone.add(run_id)

    async def read(
        self, run_id: str, fold: Callable[[Iterator[bytes]], T], *, least: int = 0
    ) -> tuple[T, Summary] | None:
        history = self.histories.get(run_id)
        if (history[-1].last if history else 0) < least:
            raise StoreDamaged("the history of the run ends before what is known of it", runs=[run_id])
        if history is None:
            return None
        return fold(record.body for record in history), self._heads(run_id)

    async def heads(self, run_id: str) -> Summary | None:
        return self._heads(run_id) if run_id in self.summaries and not self.summaries[run_id][0].live else None

    def _heads(self, run_id: str) -> Summary:
        heads, body = self.summaries[run_id]
        return replace(heads, body=Raw(body))

    async def records(self, run_id: str, after_seq: int) -> list[Recorded]:
        return [record for record in self.histories.get(run_id, ()) if record.last > after_seq]

    async def ended(
        self, place: int, limit: int, *, namespace: str | None, agent: str | None, statuses: Collection[str]
    ) -> list[tuple[str, Summary]]:
        found = [
            (run_id, self._heads(run_id))
            for run_id, (heads, _) in self.summaries.items()
            if not heads.live
            and run_id not in self.gone
            and heads.place >= place
            and namespace in {None, heads.namespace}
            and agent in {None, heads.agent}
            and (not statuses or heads.status in statuses)
        ]
        return sorted(found, key=lambda row: row[1].place)[:limit]

    lost = 0
    uncounted = False

    def replayed(self, begun: Collection[str], named: Collection[str]) -> None:
        """Nothing of it can be lost."""

    async def learn(self) -> None:
        """It knows."""

    def adopt(self) -> list[Summary]:
        return []

    async def settle(self) -> None:
        """There is nothing to do."""

    async def due(self, now: datetime) -> list[Due]:  # noqa: ARG002 - the port's
        return [
            Due(run_id=run_id, heads=heads, reason=why, size=sum(len(record.body) for record in self.histories[run_id]))
            for run_id, (heads, _) in self.summaries.items()
            if not heads.live and (why := self.retention(run_id, heads))
        ]

    async def remove(self, run_ids: Sequence[str]) -> None:
        for run_id in run_ids:
            self.histories.pop(run_id, None)
            self.summaries.pop(run_id, None)

    async def collect_blobs(self, referenced: Collection[str], oldest_step_s: float) -> int:  # noqa: ARG002 - the port's
        return 0

    async def free_bytes(self) -> int | None:
        return None

    async def mark(self) -> Mark:
        ends: Mapping[str, int] = {}
        return SimpleNamespace(ends=ends)

    async def carry(self, run_id: str, records: Sequence[Recorded]) -> None:
        """The log is not this object's."""

    async def save(self, mark: Mark, checkpoint: Checkpoint) -> None:  # noqa: ARG002 - the port's
        for filed in checkpoint.filed:
            history = self.histories.setdefault(filed.run_id, [])
            end = history[-1].last if history else 0
            history += [record for record in filed.records if record.last > end]
            self.summaries[filed.run_id] = (filed.heads, filed.body)
        for run_id in checkpoint.deleted:
            self.histories.pop(run_id, None)
            self.summaries.pop(run_id, None)
        self.last = checkpoint
