"""The composition root and the life of the process: lock, replay, open pass, serve, drain.

The only file that knows all parts. It owns the clock, the task group and the exit code; rules live elsewhere.

kill -9 is the normal case: nothing that is right depends on what happens here at the end.
"""

from __future__ import annotations

import hashlib
import os
import signal
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

import anyio
import msgspec
from msgspec.structs import replace

from rpcagent import __version__, errors
from rpcagent.agents import Agents
from rpcagent.config import EMPTY, FileConfig, retention_of
from rpcagent.journal.access import secure, why_read_only
from rpcagent.journal.blobs import Blobs
from rpcagent.journal.disk import StoreLock, make_store_folder
from rpcagent.journal.opening import stranger_in
from rpcagent.journal.seal import AesGcm, Plain, Seal
from rpcagent.keys import KeyRing
from rpcagent.log import Log
from rpcagent.models.catalog import Catalog
from rpcagent.rpc import wire
from rpcagent.rpc.dispatch import Dispatcher, Method, Session
from rpcagent.rpc.methods import METHODS, Context, Waits
from rpcagent.rpc.notify import Notifier
from rpcagent.runs.decide import Rules
from rpcagent.runs.definition import Definition
from rpcagent.runs.ports import Archive, Clock, Journal, ToolRequest
from rpcagent.runs.supervisor import Subscriber, Supervisor
from rpcagent.store import Store, look_at_store, open_store, utc
from rpcagent.tools.registry import Registry
from rpcagent.tools.shell import Shell
from rpcagent.transport.framing import FRAME_BYTES_MAX, Framer
from rpcagent.transport.stdio import Claimed, Wire

EXIT_OK = 0
EXIT_NO_STORE = 1
EXIT_POISONED = 70

GRACE_MS = 5_000
LOCK_RETRY_S = 1.0
MAX_IN_FLIGHT = 1_024
MAX_WAITING = 768
MAX_BATCH = 100
MAX_BATCH_BYTES = 16 << 20

_READ_ONLY = (
    "the store {store} can only be read ({errno}): nothing can be recorded in it. `runs`, `show`, `tail`, `log`, `verify`, `export` "
    "and `backup` read it, and so does `serve --hold`; to go on with it, make a copy elsewhere: `rpcagent backup DIR`"
)


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """Where the store is, what the default workspace is, how long `serve` waits for the lock (in seconds), what the
    configuration says, whether runs are only looked at: `hold` lets nothing begin, and what opens and seals an encrypted store."""

    store: Path
    workspace: Path
    lock_wait_s: float = 6.0
    config: FileConfig = EMPTY
    hold: bool = False
    keys: KeyRing | None = None


def default_store(workspace: Path) -> Path:
    """The user's state directory, by the hash of the real path of the workspace. Never inside the workspace."""
    state = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    name = hashlib.sha256(os.fsencode(workspace.resolve())).hexdigest()[:16]
    return Path(state) / "rpcagent" / name


class Daemon:
    """One process on one store, serving one connection."""

    def __init__(self, config: Config, claimed: Claimed) -> None:
        self._config = config
        self._log = Log()
        self._claimed = claimed
        self._began = time.monotonic()
        self._grace_ms = GRACE_MS
        self._exit = EXIT_OK
        self._opened = anyio.Event()
        self._stopping = anyio.Event()
        self._session: Session | None = None
        self._store_error: errors.RpcAgentError | None = None
        self._store: Store | None = None
        self._registry: Registry | None = None
        self._agents: Agents | None = None
        self._lock: StoreLock | None = None
        self._catalog = Catalog(on_fault=self._fault)

    async def serve(self) -> int:
        """Serves until the end of input, `shutdown`, or a signal. The exit code: 0; 1 where the store could not be opened;
        70 where what was written may not last."""
        self._wire = Wire(self._claimed, Framer(), patience_s=GRACE_MS / 1_000)
        async with anyio.create_task_group() as group:
            self._group = group
            self._notifier = Notifier(self._wire.send, lambda: self._wire.out_bytes)
            group.start_soon(self._signals)
            group.start_soon(self._open)
            group.start_soon(self._read)
            await self._stopping.wait()
            await self._end()
            group.cancel_scope.cancel()
        await self._close()
        self._wire.close()
        if self._lock is not None:
            self._lock.close()
        return self._exit

    # Opening

    async def _open(self) -> None:
        """Takes the lock, replays, makes the open pass durable, and only then lets a request in."""
        while (trouble := self._take_lock()) is not None:
            self._store_error, self._exit = trouble, EXIT_NO_STORE
            if self._config.hold and _can_be_read(trouble) and await self._look(trouble):
                return
            if not isinstance(trouble, errors.StoreLocked):
                self._opened.set()  # waiting would not help; tried again all the same
            await anyio.sleep(LOCK_RETRY_S)
        while True:
            try:
                await self._open_store()
            except errors.RpcAgentError as error:
                self._log.error("the store cannot be opened", why=error.message, **error.data)
                self._store_error = error
                poisoned = isinstance(error, errors.StoragePoisoned)
                self._exit = EXIT_POISONED if poisoned else EXIT_NO_STORE
                self._opened.set()
                if poisoned or not isinstance(error, errors.StorageError):
                    return
                await anyio.sleep(LOCK_RETRY_S)
            else:
                break
        self._store_error, self._exit = None, EXIT_OK
        self._opened.set()

    def _take_lock(self) -> errors.RpcAgentError | None:
        """None: this process owns the store."""
        store = self._config.store
        try:
            make_store_folder(store)
            if not store.is_dir():
                return errors.StorageError(
                    f"the store {store} is a file, not a folder", retryable=False, errno="ENOTDIR"
                )
            if (stranger := stranger_in(os.listdir(store))) is not None:  # noqa: PTH208 - names, not paths
                return errors.StorageError(
                    f"the folder {store} is not a store: {stranger!r} is in it. Name an empty folder, or a new one",
                    retryable=False,
                    errno="ENOTEMPTY",
                )
            reason = why_read_only(store)
            if reason == "EROFS" or (reason and self._config.hold):  # otherwise the log may still take records
                return errors.StorageError(_READ_ONLY.format(store=store, errno=reason), errno=reason)
            for found in secure(store):
                self._log.warning(
                    "the store was open to other users; it is closed now",
                    name=found.name or ".",
                    mode=f"{found.mode:04o}",
                )
            self._lock = StoreLock.take(store, since=utc())
        except errors.RpcAgentError as error:
            return error
        except OSError as error:
            why = os.strerror(error.errno or 0)
            name = errors.name_of(error)
            return errors.StorageError(f"the store {store} cannot be used: {why}", errno=name)
        return None

    async def _open_store(self) -> None:
        store = self._store = await open_store(
            self._config.store,
            self._lock,
            self._supervise,
            sealing=self._sealing,
            retention=retention_of(self._config.config.retention),
            note=self._log.warning,
        )
        supervisor = store.supervisor
        supervisor.subscriber = Subscriber(committed=self._notifier.committed, delta=self._notifier.delta)
        await self._open_pass(supervisor)
        self._session = self._session_on(self._dispatcher(METHODS), self._context(supervisor))
        supervisor.begin()
        self._group.start_soon(supervisor.keep_time)
        self._group.start_soon(self._tell_lag)
        if not self._config.hold:
            self._group.start_soon(store.keeper.keep, self._low)

    async def _look(self, why: errors.RpcAgentError) -> bool:
        """A held daemon beside the owner of the store, or on one that can only be read: what is acknowledged now is shown, and
        nothing can be asked for; `why` is the answer to those who do."""
        try:
            store = self._store = await look_at_store(
                self._config.store, self._supervise, sealing=self._sealing, note=self._log.warning
            )
        except errors.RpcAgentError as error:
            self._store_error = error
            return False
        context = self._context(store.supervisor)
        methods = {name: self._refusing(m, why) if m.mutating else m for name, m in METHODS.items()}
        self._session = self._session_on(self._dispatcher(methods), context)
        self._store_error, self._exit = None, EXIT_OK
        self._opened.set()
        return True

    def _sealing(self, store_id: str) -> Seal:
        return Plain() if self._config.keys is None else AesGcm(self._config.keys, store_id)

    def _supervise(self, journal: Journal, archive: Archive, clock: Clock, blobs: Blobs) -> Supervisor:
        store = str(self._config.store)
        registry = self._registry = Registry(
            store=store,
            on_fault=self._fault,
            servers={"shell": Shell(store, blobs=blobs, progress=self._output)},
            on_note=self._note,
        )
        agents = self._agents = Agents(self._config.config, self._catalog, registry)
        return Supervisor(
            journal=journal,
            archive=archive,
            clock=clock,
            model=self._catalog,
            tools=registry,
            rules=Rules(epoch=journal.epoch, present=agents.present_rules(), draining=self._config.hold),
            spawn=self._group.start_soon,
            incident=self._log.incident,
            fatal=self._fatal,
            grace_ms=GRACE_MS,
        )

    async def _open_pass(self, supervisor: Supervisor) -> None:
        """Nothing is served before recovery is durable; on a full disk it is tried again until there is room."""
        while True:
            try:
                await supervisor.open()
            except errors.StoragePoisoned:
                raise
            except errors.StorageError as error:
                self._store_error = error
                self._opened.set()
                await anyio.sleep(LOCK_RETRY_S)
            else:
                self._store_error = None
                return

    def _context(self, supervisor: Supervisor) -> Context:
        return Context(
            supervisor=supervisor,
            notifier=self._notifier,
            define=self._define,
            current=lambda pinned: self._agents.current(pinned) if self._agents is not None else None,
            workspace=self._workspace,
            health=self._health,
            shutdown=self._shutdown,
            limits={
                "maxFrameBytes": FRAME_BYTES_MAX,
                "maxInFlight": MAX_IN_FLIGHT,
                "maxWaiting": MAX_WAITING,
                "maxBatch": MAX_BATCH,
                "maxBatchBytes": MAX_BATCH_BYTES,
                "maxWaitMs": wire.MOST_WAIT_MS,
                "graceMs": GRACE_MS,
            },
            recovery={
                "interruptedRuns": supervisor.recovered,
                "damagedRuns": [a.run_id for a in supervisor.actors.values() if a.damaged is not None],
                "droppedTailBytes": self._store.dropped_tail_bytes if self._store is not None else 0,
            },
            waits=Waits(0 if self._config.hold else MAX_WAITING),
        )

    def _dispatcher(self, methods: Mapping[str, Method]) -> Dispatcher:
        return Dispatcher(methods, on_incident=self._log.incident, max_batch=MAX_BATCH)

    def _without_store(self) -> Session:
        """Answers every call with what is wrong with the store; the peer may go on asking."""
        methods = {name: self._refusing(method) for name, method in METHODS.items()}
        methods["shutdown"] = Method(wire.ShutdownParams, self._shut_down_without_store, mutating=False, inline=True)
        return self._session_on(self._dispatcher(methods), None)

    def _refusing(self, method: Method, why: errors.RpcAgentError | None = None) -> Method:
        async def refuse(_context: Any, _params: Any) -> Any:
            raise why or self._store_error or errors.InternalError("the store is not open")

        return Method(method.params, refuse, mutating=False, inline=True)

    def _session_on(self, dispatcher: Dispatcher, context: Context | None) -> Session:
        return Session(
            dispatcher,
            context,
            self._wire.send,
            self._spawn,
            room=self._wire.room,
            max_in_flight=MAX_IN_FLIGHT,
            max_batch_bytes=MAX_BATCH_BYTES,
        )

    async def _shut_down_without_store(self, _context: Any, params: wire.ShutdownParams) -> dict[str, Any]:
        self._shutdown(params.grace_ms)
        return {}

    # Serving

    async def _read(self) -> None:
        """Frames in arrival order. Until the store is open, or its lock was waited for long enough, requests wait here."""
        waited = False
        without: Session | None = None
        while frames := await self._wire.recv():
            if not waited:
                with anyio.move_on_after(self._config.lock_wait_s):
                    await self._opened.wait()
                waited = True
            if self._lock is not None:
                await self._opened.wait()  # it is ours: the replay takes what it takes
            if self._stopping.is_set():
                return
            session = self._session
            if session is None:
                session = without = without or self._without_store()
            await session.feed(frames)
            self._wire.flush()
        if not waited:
            with anyio.move_on_after(self._config.lock_wait_s):
                await self._opened.wait()
        self._stopping.set()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self._group.start_soon(_run, work)

    async def _tell_lag(self) -> None:
        while True:
            await anyio.sleep(0.25)
            if self._notifier.lagging:
                await self._wire.drained()
                self._notifier.catch_up()

    async def _define(self, params: wire.StartParams, workspace: str) -> Definition:
        if self._agents is None:
            raise errors.InternalError("the store is not open")
        return await self._agents.define(params, workspace)

    def _workspace(self, named: str | None) -> str:
        """The real path, so that a link put in its place later changes nothing. Raises InvalidParams."""
        if named is None:
            return str(self._config.workspace)
        path = Path(named)
        if "\0" in named or not path.is_absolute() or not path.is_dir():
            raise errors.InvalidParams("an absolute path of a directory that exists", path="$.workspace")
        return str(path.resolve())

    def _health(self) -> dict[str, Any]:
        store = self._store
        journal = store.journal.health() | store.keeper.room() if store is not None else {}
        if self._lock is not None and not self._lock.held() and journal.get("state") != "poisoned":
            journal |= {"state": "poisoned", "errno": "ESTALE"}  # it was taken away; the next commit would find out
        return {
            "status": "ok" if journal.get("state") == "ok" else journal.get("state", "closed"),
            "version": __version__,
            "pid": os.getpid(),
            "uptimeS": round(time.monotonic() - self._began, 3),
            "store": str(self._config.store),
            "journal": journal,
            "checkpoint": store.keeper.health() if store is not None else {},
            "droppedLogLines": self._log.dropped,
        }

    # Ending

    async def _signals(self) -> None:
        with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as received:
            async for number in received:
                if self._stopping.is_set():
                    os._exit(128 + number)
                self._log.info("stopping", signal=signal.Signals(number).name)
                self._stopping.set()

    def _shutdown(self, grace_ms: int | None) -> None:
        self._grace_ms = GRACE_MS if grace_ms is None else grace_ms
        self._stopping.set()

    def _fatal(self, error: errors.StoragePoisoned) -> None:
        self._log.error(
            "the log is poisoned; the process ends, and the next one decides by what it finds", **error.data
        )
        self._notifier.warn("storage_poisoned", error.message)
        self._exit = EXIT_POISONED
        self._grace_ms = 0
        self._stopping.set()

    def _low(self, free: int) -> None:
        text = f"{free:,} bytes are left on the disk of the store; on a full disk nothing new is recorded until there is room"
        self._log.warning(text, store=str(self._config.store), free=free)
        self._notifier.warn("storage_low", text)

    def _output(self, request: ToolRequest, piece: bytes) -> None:
        self._notifier.output(request.run_id, request.step_id, request.attempt, piece.decode(errors="replace"))

    def _note(self, server: str, text: str) -> None:
        self._log.info("mcp server", server=server, note=text)

    def _fault(self, error: BaseException, what: object) -> None:
        self._log.incident(error, f"adapter: {type(what).__name__}")

    async def _end(self) -> None:
        """Nothing new is taken in or begun. What was taken in is answered, what is in flight may be recorded; the rest stays
        in doubt by design."""
        if self._store is not None and self._session is not None:
            supervisor = self._store.supervisor
            supervisor.rules = replace(supervisor.rules, draining=True)
            supervisor.hurry()
            with anyio.move_on_after(max(self._grace_ms, 1_000) / 1000):
                await self._session.settled()
            await supervisor.drain(self._grace_ms)
            if self._exit != EXIT_POISONED and not self._config.hold:
                await self._store.keeper.finish()
        with anyio.move_on_after(1.0):
            await self._wire.drained()

    async def _close(self) -> None:
        """When nobody is left who could report or append: what came too late for the grace time stays in doubt by design."""
        if self._registry is not None:
            with anyio.move_on_after(3.0):
                await self._registry.aclose()
        with anyio.move_on_after(1.0):
            await self._catalog.aclose()
        if self._store is not None and self._exit != EXIT_POISONED:
            await self._store.close()


def _can_be_read(trouble: errors.RpcAgentError) -> bool:
    """Whether what keeps this process from owning the store keeps it from a look at it too."""
    return isinstance(trouble, errors.StoreLocked) or trouble.details.get("errno") in {"EROFS", "EACCES"}


async def _run(work: Awaitable[None]) -> None:
    await work


def run(config: Config, claimed: Claimed) -> int:
    """Serves in an event loop of its own. Returns the exit code."""
    serve: Callable[[], Awaitable[int]] = Daemon(config, claimed).serve
    return anyio.run(serve)
