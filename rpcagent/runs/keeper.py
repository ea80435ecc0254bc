"""When the log is moved into the files of runs, which runs leave memory, and which are deleted.

Knows: how long the log has become, what of each run is not in its files, and the rules of retention. Does not know: files
(`ports.Archive`), or how a run goes on. A checkpoint holds nobody up: what it saves is frozen data, and it is written by
another thread. It may be cut off anywhere; the next one does it all again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

import anyio
import anyio.lowlevel

from rpcagent import errors
from rpcagent.runs import events as ev
from rpcagent.runs import summary
from rpcagent.runs.engine import Actor
from rpcagent.runs.ports import Checkpoint, Due, Filed, Mark
from rpcagent.runs.summary import Summary
from rpcagent.runs.supervisor import Supervisor

TAIL_RECORDS = 4_096
TAIL_BYTES = 4 << 20
"""What a start has to replay at most, about, and how many runs are in memory at most that could be parked."""
IDLE_RECORDS = 256
IDLE_S = 5.0
"""A daemon that has nothing to do for so long moves as few as `IDLE_RECORDS`."""
TIDY_S = 3_600.0
FIRST_TIDY_S = 30.0
"""What retention lets go is deleted so often, and for the first time so soon after a start."""
AGAIN_S = 30.0
"""After a checkpoint that could not be written."""
LOW_BYTES = 64 << 20
"""With less room than this on the disk people are warned: some checkpoints more, and the store takes nothing new."""
_SLICE = 64


class Keeper:
    """`records` and `size` (in bytes): the length of the log that asks for a checkpoint."""

    def __init__(self, supervisor: Supervisor, *, records: int | None = None, size: int | None = None) -> None:
        self._supervisor = supervisor
        self._roster = supervisor.roster
        self._archive = supervisor.archive
        self._records = TAIL_RECORDS if records is None else records
        self._size = TAIL_BYTES if size is None else size
        self.ended: Counter[str] = Counter()
        """Runs in the archive that have ended, by status."""
        self.deleted: list[str] = []
        """Runs whose deletion is in the log, and whose files may still be there."""
        self.made = 0
        self._took_ms = 0
        self.trouble: str | None = None
        self._free: int | None = None
        self._low = False
        self._saving = anyio.Lock()

    def replayed(self) -> None:
        """Takes over what the replay found."""
        for run_id, status in self._supervisor.buried:
            self.deleted.append(run_id)
            self.ended[status] -= 1

    async def keep(self, warn: Callable[[int], None]) -> None:
        """For as long as the daemon runs. `warn` is called with the bytes that are left where the disk may soon be full."""
        await self._attempt(self._settle)
        seen, tidied = -1, anyio.current_time() - TIDY_S + FIRST_TIDY_S
        while True:
            await self._look_at_room(warn)
            with anyio.move_on_after(IDLE_S):
                await self._supervisor.recorded_much(lambda: self.due)
            records = self._supervisor.tail_records
            if self.due or (records == seen and records >= IDLE_RECORDS) or (records and self._has_no_room()):
                await self._attempt(self.checkpoint)
                if self.trouble is not None:
                    await anyio.sleep(AGAIN_S)
            seen = self._supervisor.tail_records
            if anyio.current_time() - tidied >= TIDY_S:
                await self._attempt(self.tidy)
                tidied = anyio.current_time()

    async def _look_at_room(self, warn: Callable[[int], None]) -> None:
        """Tells it once, and again only after there was much more room."""
        self._free = await self._archive.free_bytes()
        if self._free is not None:
            before, self._low = self._low, self._free < LOW_BYTES * (2 if self._low else 1)
            if self._low and not before:
                warn(self._free)

    def _has_no_room(self) -> bool:
        """The file of the log may not become longer. A checkpoint begins another one."""
        return self._supervisor.journal.health().get("errno") == "EFBIG"

    async def finish(self) -> None:
        """At an orderly end: the next start does not read what this process did not get to move."""
        while self.due and self.trouble is None:
            await self._attempt(self.checkpoint)

    @property
    def due(self) -> bool:
        supervisor = self._supervisor
        return supervisor.tail_records >= self._records or supervisor.tail_bytes >= self._size

    def health(self) -> dict[str, Any]:
        """made: checkpoints of this process; tookMs: the last one; tail: what no checkpoint covers yet; trouble: why there is none."""
        supervisor = self._supervisor
        shown: dict[str, Any] = {
            "made": self.made,
            "tookMs": self._took_ms,
            "tailRecords": supervisor.tail_records,
            "tailBytes": supervisor.tail_bytes,
        }
        return shown if self.trouble is None else shown | {"trouble": self.trouble}

    def room(self) -> dict[str, Any]:
        """freeBytes: what the disk had left when it was last looked at; low: so little that people were warned."""
        if self._free is None:
            return {}
        return {"freeBytes": self._free, "low": True} if self._low else {"freeBytes": self._free}

    async def _attempt(self, work: Callable[[], Awaitable[object]]) -> None:
        """What hinders it is shown in `status`, and it is tried again later."""
        try:
            await work()
        except errors.StoragePoisoned as error:
            self._supervisor.fatal(error)
        except errors.StorageError as error:
            self.trouble = str(error.details.get("errno"))
        except errors.RpcAgentError as error:
            self.trouble = error.message
        except Exception as error:  # noqa: BLE001 - the log is whole without it
            self.trouble = (
                f"a fault of the daemon; incident {self._supervisor.incident(error, 'checkpoint')} in the log"
            )
        else:
            self.trouble = None

    async def checkpoint(self) -> None:
        """Durable on return: a start reads only what was recorded since it began. Raises StorageError, StoragePoisoned."""
        began = anyio.current_time()
        async with self._saving:
            if self._archive.lost is None:
                await self._archive.learn()  # by what the manifest counts that is there now
            self._adopt()
            mark = await self._archive.mark()
            places = self._roster.places  # whatever begins from here on is in the log, and is placed again by a replay
            filed = await self._filed(mark)
            await self._save(mark, filed, places, await self._carry())
            for one in filed:
                self._settled(one)
            self.made += 1
            await self._park()
        self._took_ms = round((anyio.current_time() - began) * 1_000)

    async def _settle(self) -> None:
        await self._archive.settle()
        if self._archive.uncounted:
            await self.checkpoint()

    def _adopt(self) -> None:
        for heads in self._archive.adopt():
            self.ended[heads.status] += 1
            self._roster.counts[heads.status] += 1
            self._roster.places = max(self._roster.places, heads.place + 1)

    async def _filed(self, mark: Mark) -> list[Filed]:
        """One for each run with records that are in no file. In slices: nobody waits for all of it."""
        filed: list[Filed] = []
        for actor in [actor for actor in self._roster.actors.values() if actor.tail and not actor.misfiled]:
            if len(filed) % _SLICE == _SLICE - 1:
                await anyio.lowlevel.checkpoint()
            filed.append(self._one(actor))
        have = {one.run_id: one.records[-1].last for one in filed}
        for run_id, end in mark.ends.items():
            known = self._roster.actors.get(run_id)
            if known is not None and not known.misfiled and max(have.get(run_id, 0), known.filed) < end:
                raise errors.StorageError(f"{run_id} is recorded further than it is published", errno="EAGAIN")
        return filed

    async def _carry(self) -> frozenset[str]:
        """The last records of a run whose files are damaged have nowhere to go but the log. They are recorded again behind the
        mark: none is lost, and one bad run does not make the log of all others grow. Raises StorageError."""
        carried = [actor for actor in self._roster.actors.values() if actor.misfiled and actor.tail]
        for actor in carried:
            await self._archive.carry(actor.run_id, actor.tail)
        return frozenset(actor.run_id for actor in carried)

    def _one(self, actor: Actor) -> Filed:
        if actor.state is None or actor.failed is not None:
            why = actor.damaged or (actor.failed.message if actor.failed is not None else "")
            heads, body = summary.damaged(actor.run_id, actor.place, why)
        else:
            policy = self._supervisor.policy(actor.state.definition.agent)
            heads, body = summary.summarise(actor.state, actor.place, policy)
        return Filed(run_id=actor.run_id, records=tuple(actor.tail), heads=heads, body=body)

    async def _save(self, mark: Mark, filed: list[Filed], places: int, carried: frozenset[str]) -> None:
        deleted = tuple(self.deleted)
        ended = self.ended + Counter(one.heads.status for one in filed if self._newly_ended(one))
        checkpoint = Checkpoint(
            at=self._supervisor.known_until or datetime.fromtimestamp(0, UTC),
            places=places,
            ended=dict(ended),
            filed=tuple(filed),
            live=self._live(filed),
            deleted=deleted,
            carried=carried,
        )
        await self._archive.save(mark, checkpoint)
        self.ended = ended
        self.deleted = self.deleted[len(deleted) :]

    def _live(self, filed: list[Filed]) -> tuple[tuple[str, Summary, bytes], ...]:
        """Every run that has files and, as far as they tell, is live. What was recorded since is in the log."""
        live = {one.run_id: (one.heads, one.body) for one in filed}
        for run_id, heads in self._roster.parked.items():
            live[run_id] = (heads, bytes(heads.body))
        for actor in self._roster.actors.values():
            if actor.run_id in live or actor.sheet is None:
                continue
            state = actor.state
            if state is not None and actor.failed is None and not actor.tail and actor.sheet[0].live:
                policy = self._supervisor.policy(state.definition.agent)
                if actor.sheet[0].policy != policy:  # it was looked at again under the present one, and nothing changed
                    actor.sheet = summary.summarise(state, actor.place, policy)
            live[actor.run_id] = actor.sheet
        return tuple((run_id, heads, body) for run_id, (heads, body) in live.items() if heads.live)

    def _newly_ended(self, one: Filed) -> bool:
        actor = self._roster.actors[one.run_id]
        before = actor.sheet
        return not one.heads.live and (before is None or before[0].live)

    def _settled(self, one: Filed) -> None:
        """Its records are in its files: the log may lose them, and memory too."""
        actor = self._roster.actors[one.run_id]
        end = one.records[-1].last
        actor.sheet, actor.filed = (one.heads, one.body), end
        actor.tail = [record for record in actor.tail if record.last > end]
        self._supervisor.tail_records -= len(one.records)
        self._supervisor.tail_bytes -= sum(len(record.body) for record in one.records)

    async def _park(self) -> None:
        """Runs at rest leave memory; a summary of those that have not ended stays."""
        epoch = self._supervisor.rules.epoch
        for number, actor in enumerate(self._roster.resting()):
            if number % _SLICE == _SLICE - 1:
                await anyio.lowlevel.checkpoint()
            state = actor.state
            if not actor.forgettable:
                continue  # asked for in the meantime
            if state is None:
                del self._roster.actors[actor.run_id]  # its first commit was refused
            elif actor.sheet is not None and not actor.sheet[0].hot:
                released = state.recovery != "auto" and state.released_epoch == epoch and not state.ended
                if not released:  # the summary shows it as held, which it is only in the next opening
                    self._roster.park(actor.run_id, *actor.sheet)

    # Deletion

    async def tidy(self) -> list[Due]:
        """As `collect`; the files of what was deleted are gone on return, and the large outputs that only it referred to."""
        try:
            if self._archive.lost is None:
                await self._archive.learn()
            if self._archive.uncounted or (not self._archive.retains_all and self._supervisor.tail_records):
                await self.checkpoint()  # only runs that are in files, and counted, can be let go
        except errors.StoragePoisoned:
            raise
        except errors.StorageError:
            pass  # the disk may be full, and what goes now makes room
        deleted = await self._collect_piecemeal()
        if self.deleted:
            try:
                await self.checkpoint()
            except errors.StoragePoisoned:
                raise
            except errors.StorageError:
                # Their files go with a checkpoint. Where there is no room for one, they go first.
                await self._archive.remove(list(self.deleted))
                await self.checkpoint()
            if self._supervisor.journal.health()["state"] == "full":
                await self.checkpoint()  # nothing is left to move: what was freed is held in reserve again
        await self._collect_blobs()
        return deleted

    async def _collect_piecemeal(self) -> list[Due]:
        """As `collect`. Where the log takes no more deletions, the files of those that it took make room for the others."""
        deleted: list[Due] = []
        removed = 0
        while True:
            try:
                await self._collect(deleted)
            except errors.StoragePoisoned:
                raise
            except errors.StorageError:
                if len(self.deleted) == removed:
                    raise
                removed = len(self.deleted)
                await self._archive.remove(list(self.deleted))
            else:
                return deleted

    async def _collect_blobs(self) -> None:
        """Not while a run is damaged: what it refers to is not known."""
        now = self._supervisor.clock.now()
        oldest, needed = now, set[str]()
        for actor in self._roster.actors.values():
            if actor.failed is not None:
                return
            if actor.state is not None:
                needed.update(actor.state.blobs)
                began = [s.started_at for s in actor.state.steps.values() if s.status == "started" and s.started_at]
                oldest = min([oldest, *began])
        for heads in self._roster.parked.values():
            needed.update(heads.blobs)
        await self._archive.collect_blobs(needed, (now - oldest).total_seconds())

    async def collect(self) -> list[Due]:
        """Deletes what retention says, the oldest first: its tombstone is durable before any file goes. Returns what was
        deleted. Raises StorageError, StoragePoisoned."""
        deleted: list[Due] = []
        await self._collect(deleted)
        return deleted

    async def _collect(self, deleted: list[Due]) -> None:
        """As `collect`; what was deleted is in `deleted` also where it raises."""
        failures: list[errors.StorageError] = []

        async def delete(due: Due) -> None:
            try:
                if await self._delete(due):
                    deleted.append(due)
            except errors.StorageError as error:
                failures.append(error)

        async with self._saving:
            found = await self._archive.due(self._supervisor.clock.now())
            for begin in range(0, len(found), _SLICE):
                async with anyio.create_task_group() as group:  # they share their syncs
                    for due in found[begin : begin + _SLICE]:
                        group.start_soon(delete, due)
                if failures:
                    raise failures[0]

    async def _delete(self, due: Due) -> bool:
        supervisor, roster = self._supervisor, self._roster
        async with roster.turn(due.run_id):
            actor = roster.actors.get(due.run_id)
            if self._archive.deleted(due.run_id) or (actor is not None and not actor.forgettable):
                return False
            if actor is not None and actor.sheet is not None:
                roster.park(due.run_id, *actor.sheet)  # from here on, whoever asks for it waits
            heads = due.heads
            event = ev.RunDeleted(status=heads.status, reason=due.reason)
            at = max(supervisor.clock.now(), heads.ended_at or supervisor.clock.now())
            commit = ev.Commit(seq=heads.last_seq + 1, at=at, events=(event,))
            answer = await supervisor.journal.append(
                due.run_id, supervisor.rules.epoch, heads.last_seq, 1, ev.encode(commit), outcome=True
            )
            if answer != "ok":
                raise errors.StoragePoisoned(f"the journal answers {answer} to the deletion of a run")
            self._archive.bury(due.run_id)
            roster.forget(due.run_id, heads.status)
            self.deleted.append(due.run_id)
            self.ended[heads.status] -= 1
            supervisor.deleted(due.run_id, commit)
        return True
