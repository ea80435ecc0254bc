"""What the engine needs from the outside, as Protocols owned by the engine.

Each has a real adapter and a shipped fake. No foreign exception crosses a port: an adapter reports an `Outcome`. What it
raises all the same is a fault of ours and is taken for an outcome that nobody knows.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any, Literal, Protocol

import msgspec

from rpcagent.runs.definition import Definition
from rpcagent.runs.effects import ToolSpec
from rpcagent.runs.outcomes import Failed, LookUp, Lost, ModelReply, NotDone, ToolReply
from rpcagent.runs.state import Message


class Clock(Protocol):
    def now(self) -> datetime:
        """The present instant, in UTC. It may jump; nothing is ordered by it."""
        ...


class Journal(Protocol):
    """The write-ahead log. `epoch` counts the openings of the store."""

    store_id: str
    epoch: int

    async def append(
        self, run_id: str, epoch: int, expected_seq: int, count: int, body: bytes
    ) -> Literal["ok", "fenced", "conflict"]:
        """Appends one commit of `count` events to a run whose last event is `expected_seq`.

        Durable on return of `ok`. Raises StorageError: nothing was recorded, and the same call may be made again;
        StoragePoisoned: nothing more will be recorded by this process, and what became of the commit is not known.
        """
        ...

    def health(self) -> dict[str, Any]:
        """state (ok, full, poisoned), and counts: syncs, records, bytes, waiting."""
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
