"""What the engine needs from the outside, as Protocols owned by the engine.

Each has a real adapter and a shipped fake. No foreign exception crosses a port: an adapter reports an `Outcome`. What it
raises all the same is a fault of ours and is taken for an outcome that nobody knows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, Literal, Protocol, TypeVar

import msgspec

from rpcagent.runs.definition import Definition
from rpcagent.runs.effects import ToolSpec
from rpcagent.runs.outcomes import Failed, LookUp, Lost, ModelReply, NotDone, ToolReply
from rpcagent.runs.state import Message
from rpcagent.runs.summary import Summary

T = TypeVar("T")


class Clock(Protocol):
    def now(self) -> datetime:
        """The present instant, in UTC. It may jump; nothing is ordered by it."""
        ...


class Journal(Protocol):
    """The write-ahead log. `epoch` counts the openings of the store."""

    store_id: str
    epoch: int

    async def append(
        self, run_id: str, epoch: int, expected_seq: int, count: int, body: bytes, *, outcome: bool = False
    ) -> Literal["ok", "fenced", "conflict"]:
        """Appends one commit of `count` events to a run whose last event is `expected_seq`. `outcome`: it begins nothing new,
        and may use the space that is held in reserve.

        Durable on return of `ok`. Raises StorageError: nothing was recorded, and the same call may be made again;
        StoragePoisoned: nothing more will be recorded by this process, and what became of the commit is not known.
        """
        ...

    def health(self) -> dict[str, Any]:
        """state (ok, full, poisoned), and counts: syncs, records, bytes, waiting."""
        ...


class Recorded(msgspec.Struct, frozen=True, gc=False):
    """One commit of a run as it is recorded: `count` events, the first of which has number `first`."""

    first: int
    count: int
    body: bytes

    @property
    def last(self) -> int:
        return self.first + self.count - 1


class Filed(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint moves into the files of one run: its records since the last one, and its summary with the bytes of
    its body. Records that are there already may be among them."""

    run_id: str
    records: tuple[Recorded, ...]
    heads: Summary
    body: bytes


class Due(msgspec.Struct, frozen=True, kw_only=True):
    """A run that has ended and need not be kept any longer. `reason`: the rule that says so. `size`: bytes of its history."""

    run_id: str
    heads: Summary
    reason: str
    size: int


class Mark(Protocol):
    """A position of the log. `ends`: the last event of each run written since the mark before."""

    @property
    def ends(self) -> Mapping[str, int]: ...


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """What is in the files of runs once it is saved. `live`: every run that has files and is live (`Summary.live`), those of
    `filed` included, with the bytes of its summary's body. `places`: the next free place. `ended`: counts by status of the runs
    that are not live and are kept. `deleted`: runs whose deletion is in the log. `carried`: runs whose files are damaged: what
    the log holds of them was recorded again behind the mark. `at`: the latest instant that any event has."""

    at: datetime
    places: int
    ended: Mapping[str, int]
    filed: tuple[Filed, ...]
    live: tuple[tuple[str, Summary, bytes], ...]
    deleted: tuple[str, ...]
    carried: frozenset[str] = frozenset()


class Archive(Protocol):
    """Runs in files of their own, and the memory of those that were deleted. No call holds up the event loop.

    Damage in the files of a run raises StoreDamaged; what cannot be read or written just now StorageError."""

    @property
    def any_held(self) -> bool:
        """False: it is empty, and no question to it needs an answer."""
        ...

    @property
    def retains_all(self) -> bool:
        """There are no rules of retention: nothing is ever `due`."""
        ...

    def may_hold(self, run_id: str) -> bool:
        """False: certainly no file of this run is there, and how many are `lost` is known."""
        ...

    def deleted(self, run_id: str) -> bool: ...

    def bury(self, run_id: str) -> None:
        """Its deletion is durable in the log: from now on it is `deleted`."""
        ...

    async def read(
        self, run_id: str, fold: Callable[[Iterator[bytes]], T], *, least: int = 0
    ) -> tuple[T, Summary] | None:
        """Verifies the whole history and gives its bodies, oldest first, to `fold`, off the event loop. None: no such run.
        `least`: the event that its files must reach, as the log or a manifest tells; files that end before it, or are not there,
        are damage, as they are for a run that the archive itself knows to have ended."""
        ...

    async def heads(self, run_id: str) -> Summary | None:
        """The summary of a run that has ended, as it is known without its files; None where it is not."""
        ...

    async def records(self, run_id: str, after_seq: int) -> list[Recorded]:
        """Some records, in order, from the one that holds event `after_seq` + 1; empty at the end of what is in files."""
        ...

    async def ended(
        self, place: int, limit: int, *, namespace: str | None, agent: str | None, statuses: Collection[str]
    ) -> list[tuple[str, Summary]]:
        """Runs that ended, from `place` on, in the order of their places; an empty `statuses` is all."""
        ...

    def replayed(self, begun: Collection[str], named: Collection[str]) -> None:
        """What stands in the log: runs that began after the checkpoint, and runs that are known by name without their files."""
        ...

    @property
    def lost(self) -> int | None:
        """How many runs were recorded of which nothing is left, not even the name: any that is not known may be one of them.
        None: `learn` has not found out yet."""
        ...

    async def learn(self) -> None:
        """Looks which runs have files. Raises StorageError."""
        ...

    @property
    def uncounted(self) -> bool:
        """There is something to `adopt`: a checkpoint should be made, for what nobody counts is neither copied nor let go."""
        ...

    def adopt(self) -> list[Summary]:
        """Runs that have ended and that nobody counts yet, as `learn` found them: an import was cut off behind their files. Each
        is given once."""
        ...

    async def settle(self) -> None:
        """What need not be done before the first answer. Raises StorageError, StoreDamaged."""
        ...

    async def due(self, now: datetime) -> list[Due]:
        """Runs that retention lets go at `now`, the oldest first."""
        ...

    async def remove(self, run_ids: Sequence[str]) -> None:
        """Deletes the files of runs that are `deleted`, as far as that can be done now."""
        ...

    async def collect_blobs(self, referenced: Collection[str], oldest_step_s: float) -> int:
        """Deletes large outputs to which no run refers: neither those `referenced` nor the runs that have ended. What was
        written while a step is under way, the oldest for `oldest_step_s`, stays. Returns how many went."""
        ...

    async def free_bytes(self) -> int | None:
        """What the disk has left for it; None where that cannot be told."""
        ...

    async def mark(self) -> Mark:
        """Begins a new segment of the log, durable on return. Raises StorageError, StoragePoisoned."""
        ...

    async def carry(self, run_id: str, records: Sequence[Recorded]) -> None:
        """Records once more, behind the mark, what the log holds of a run whose files cannot take it. Durable on return. Raises
        StorageError, StoragePoisoned."""
        ...

    async def save(self, mark: Mark, checkpoint: Checkpoint) -> None:
        """Durable on return: a start reads the log from `mark` on. Raises StorageError (as before, try again later) and
        StoragePoisoned."""
        ...


class ModelRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A pure function of a run's events. `request_hash` is the same in every process that rebuilds it."""

    run_id: str
    step_id: str
    attempt: int
    definition: Definition
    messages: tuple[Message, ...]
    request_hash: str


class Model(Protocol):
    async def complete(
        self, request: ModelRequest, emit: Callable[[str], None]
    ) -> ModelReply | NotDone | Failed | Lost:
        """Asks once; never retries. `emit` takes pieces of text as they come; they are shown and forgotten.

        Cancelled: stops at once.
        """
        ...


class ToolRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt of one tool call, or the question what became of it. `key` is the same for all attempts of the step.

    `hidden`: patterns of paths that policy denies to `files` tools, so that none of them is shown by listing or searching.
    """

    run_id: str
    step_id: str
    attempt: int
    spec: ToolSpec
    arguments: dict[str, Any]
    key: str
    workspace: str | None
    hidden: tuple[str, ...] = ()


class Tools(Protocol):
    async def call(self, request: ToolRequest) -> ToolReply | Failed | NotDone | Lost:
        """Performs once; never retries. Anything but a definite answer, once the request left, is Lost.

        Cancelled: asks the effect to stop if it can, and lets the cancellation through.
        """
        ...

    async def look_up(self, request: ToolRequest) -> LookUp:
        """Asks what became of an earlier attempt. Reads only. A failure of its own is `unsure`."""
        ...
