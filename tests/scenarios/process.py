"""One life of the daemon of an example: the real framing, dispatch, methods and supervisor, over the ports of the world.

Knows: how they are put together, as the composition root does it, and what a slow peer, a lock of another process or a
damaged store look like from outside.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
from rpcagent import __version__, errors
from rpcagent.agents import Agents
from rpcagent.config import EMPTY
from rpcagent.daemon import Config, Daemon
from rpcagent.journal.tail import damaged, too_new
from rpcagent.models.catalog import Catalog
from rpcagent.rpc import wire
from rpcagent.rpc.dispatch import Dispatcher, Session
from rpcagent.rpc.methods import METHODS, Context
from rpcagent.rpc.notify import BACKLOG_BYTES_MAX, Notifier
from rpcagent.runs.decide import Rules
from rpcagent.runs.supervisor import Subscriber, Supervisor
from rpcagent.tools.registry import Registry
from rpcagent.transport.framing import Framer

from .world import STORE, WORKSPACE, MemoryLog, Outside, Relocated, WorldClock

GRACE_MS = 5_000
LIMITS = {
    "maxFrameBytes": 64 << 20,
    "maxInFlight": 1_024,
    "maxBatch": 100,
    "maxWaitMs": wire.MOST_WAIT_MS,
    "graceMs": GRACE_MS,
}
SEGMENT = "wal/0000000000000001.jsonl"


def closed_store(how: str) -> errors.RpcAgentError:
    """The errors of a store that is not served, with details that are the same everywhere."""
    match how:
        case "locked":
            since = "2026-03-01T11:58:00+00:00"
            return errors.StoreLocked("Another process owns this store.", pid=4711, host="workbench", since=since)
        case "damaged":
            return damaged(SEGMENT, 8_192, "its checksum is wrong")
        case _:
            return too_new(2, SEGMENT, 0)


class Life:
    """One process. `send` takes each message that it writes; `limits` are those of the example."""

    def __init__(
        self,
        *,
        folder: Path,
        log: MemoryLog,
        outside: Outside,
        clock: WorldClock,
        limits: dict[str, int],
        send: Callable[[bytes], None],
        group: anyio.abc.TaskGroup,
    ) -> None:
        self._log, self._group, self._send = log, group, send
        self._limits = LIMITS | limits
        self._framer = Framer(self._limits["maxFrameBytes"])
        self._incidents = 0
        self.slow = False
        self.notifier = Notifier(self._write, lambda: BACKLOG_BYTES_MAX + 1 if self.slow else 0)
        self._daemon = Daemon(Config(store=folder / "store", workspace=folder / "workspace"), None)  # type: ignore[arg-type]
        registry = Registry(store=str(folder / "store"), http=outside)
        self._agents = Agents(EMPTY, Catalog(), registry)
        self.supervisor = Supervisor(
            journal=log,
            clock=clock,
            model=Catalog(),
            tools=Relocated(registry, folder / "workspace"),
            rules=Rules(epoch=log.epoch),
            spawn=group.start_soon,
            incident=self._incident,
            fatal=lambda _error: None,
            grace_ms=GRACE_MS,
        )

    async def open(self, closed: str = "") -> None:
        """Replay, open pass, serve; or, with a store that is `closed`, answer with what is wrong with it."""
        if closed:
            self._daemon._store_error = closed_store(closed)
            self._daemon._wire = self  # type: ignore[assignment]
            self._daemon._spawn = self._spawn  # type: ignore[method-assign]
            self._session = self._daemon._without_store()
            return
        await self.supervisor.replay(self._log.records)
        self.supervisor.subscriber = Subscriber(committed=self.notifier.committed, delta=self.notifier.delta)
        await self.supervisor.open()
        self._session = self._serve()
        self.supervisor.begin()
        self._group.start_soon(self.supervisor.keep_time)

    async def feed(self, raw: bytes) -> None:
        await self._session.feed(self._framer.feed(raw))

    async def settled(self) -> None:
        """Everything that was accepted is answered."""
        await self._session.settled()

    def send(self, message: bytes) -> None:
        self._send(message)

    async def room(self) -> None:
        """There is always room."""

    def _write(self, message: bytes) -> None:
        self._send(message)

    def _serve(self) -> Session:
        context = Context(
            supervisor=self.supervisor,
            notifier=self.notifier,
            define=self._agents.define,
            current=self._agents.current,
            workspace=lambda named: WORKSPACE if named in {None, WORKSPACE} else self._daemon._workspace(named),
            health=self._health,
            shutdown=self._shutdown,
            limits=self._limits,
            recovery={
                "interruptedRuns": self.supervisor.recovered,
                "damagedRuns": [a.run_id for a in self.supervisor.actors.values() if a.damaged is not None],
                "droppedTailBytes": 0,
            },
        )
        dispatcher = Dispatcher(METHODS, on_incident=self._incident, max_batch=self._limits["maxBatch"])
        return Session(dispatcher, context, self._write, self._spawn, max_in_flight=self._limits["maxInFlight"])

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        async def run() -> None:
            await work

        self._group.start_soon(run)

    def _incident(self, _error: BaseException, _what: str) -> str:
        self._incidents += 1
        return f"inc_{self._incidents:012x}"

    def _health(self) -> dict[str, Any]:
        journal = self._log.health()
        return {
            "status": journal["state"],
            "version": __version__,
            "pid": 4242,
            "uptimeS": 3.5,
            "store": STORE,
            "journal": journal,
            "checkpoint": {"made": 0, "tookMs": 0, "tailRecords": journal["records"], "tailBytes": journal["bytes"]},
            "droppedLogLines": 0,
        }

    def _shutdown(self, grace_ms: int | None) -> None:
        async def end() -> None:
            self.supervisor.hurry()
            await self.supervisor.drain(GRACE_MS if grace_ms is None else grace_ms)

        self._group.start_soon(end)
