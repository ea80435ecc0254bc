"""A store in memory that survives the death of its processes, with faults on request: for tests of what is kept where.

Knows: the supervisor, its keeper and an archive over a list of records and a table of files. Time is virtual. A life that is
left is a process that was killed.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import anyio
import msgspec
from msgspec import Raw
from msgspec.structs import replace
from rpcagent.ids import run_id
from rpcagent.runs import events as ev
from rpcagent.runs.decide import Rules
from rpcagent.runs.definition import Definition, Rule
from rpcagent.runs.engine import Actor
from rpcagent.runs.fold import apply
from rpcagent.runs.keeper import Keeper
from rpcagent.runs.memory import MemoryArchive
from rpcagent.runs.outcomes import AskedCall, LookUp, Lost, ModelReply, ToolReply
from rpcagent.runs.ports import Checkpoint, Recorded, T
from rpcagent.runs.requests import ApproveCommand, Ask, CancelCommand, Command, ResumeCommand, StepCommand
from rpcagent.runs.state import RunState
from rpcagent.runs.summary import Summary
from rpcagent.runs.supervisor import Answer, Supervisor
from rpcagent.runs.view import needs_attention, run_status, run_view
from tests.sim.loop import run as virtually
from tests.sim.outside import TOOLS
from tests.sim.world import BEGINNING

LIMIT_S = 100_000
STORE = "store"
METHODS: dict[type, ev.Method] = {
    StepCommand: "step",
    ResumeCommand: "resume",
    ApproveCommand: "approve",
    CancelCommand: "cancel",
}


def virtual(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """The test runs in virtual time, in a loop of its own."""

    @functools.wraps(test)
    def within(*args: Any, **named: Any) -> None:
        async def bounded() -> None:
            with anyio.fail_after(LIMIT_S):
                await test(*args, **named)

        virtually(bounded)

    return within


def identity(key: str) -> str:
    return run_id(STORE, "", key)


class Shelf(MemoryArchive):
    """The archive of one life. `faults` are raised by the next reads, in order; `damaged` by every read of these runs."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        self.store = store
        self.histories, self.summaries = store.histories, store.summaries
        self.gone = set(store.graves)
        self.retention = lambda run, _heads: "asked for" if run in store.let_go else ""

    async def read(
        self, run_id: str, fold: Callable[[Iterator[bytes]], T], *, least: int = 0
    ) -> tuple[T, Summary] | None:
        self.store.reads.append(run_id)
        await anyio.sleep(0.001)
        if self.store.faults:
            raise self.store.faults.pop(0)
        if run_id in self.store.damaged:
            raise self.store.damaged[run_id]
        return await super().read(run_id, fold, least=least)

    async def carry(self, run_id: str, records: Sequence[Recorded]) -> None:
        self.store.log += [(run_id, record) for record in records]

    async def mark(self) -> Any:
        place = len(self.store.log)
        ends = {run: record.last for run, record in self.store.log[self.store.marked : place]}
        self.store.marked = place
        return SimpleNamespace(ends=ends, place=place)

    async def save(self, mark: Any, checkpoint: Checkpoint) -> None:
        store = self.store
        await super().save(mark, replace(checkpoint, deleted=()))
        await anyio.sleep(0.001)
        if store.no_manifest is not None:
            raise store.no_manifest
        store.manifest, store.cut = checkpoint, mark.place
        store.graves |= set(checkpoint.deleted)
        await super().save(mark, replace(checkpoint, filed=()))


class Store:
    """What outlives a process. `no_manifest` is raised by a checkpoint in place of its last step; `refuse` by an append."""

    store_id = STORE

    def __init__(self) -> None:
        self.log: list[tuple[str, Recorded]] = []
        self.histories: dict[str, list[Recorded]] = {}
        self.summaries: dict[str, tuple[Summary, bytes]] = {}
        self.manifest: Checkpoint | None = None
        self.graves: set[str] = set()
        self.let_go: set[str] = set()
        self.cut = self.marked = 0
        self.epoch = 0
        self.present: dict[str, tuple[Rule, ...]] = {}
        self.reads: list[str] = []
        self.faults: list[Exception] = []
        self.damaged: dict[str, Exception] = {}
        self.no_manifest: Exception | None = None
        self.refuse: Exception | None = None
        self.incidents: list[str] = []
        self.calls: Counter[str] = Counter()
        self.loses = False

    # The ports

    def now(self) -> Any:
        return BEGINNING + timedelta(seconds=anyio.current_time())

    async def append(self, run: str, epoch: int, expected_seq: int, count: int, body: bytes, **_: Any) -> Any:
        await anyio.sleep(0.001)
        if self.refuse is not None:
            raise self.refuse
        last = max((record.last for known, record in self.log if known == run), default=0)
        if epoch != self.epoch or last != expected_seq:
            return "conflict"
        self.log.append((run, Recorded(expected_seq + 1, count, body)))
        return "ok"

    def health(self) -> dict[str, Any]:
        return {"state": "ok"}

    async def complete(self, request: Any, emit: Callable[[str], None]) -> ModelReply:
        """Does what the input of the run names: a tool once, or nothing."""
        asked = request.messages[0].content
        first = len(request.messages) == 1 and asked != "end"
        calls = (AskedCall(tool=asked, arguments={"op": "x"}, provider_id="same"),) if first else ()
        return ModelReply(text="" if first else "The end.", calls=calls)

    async def call(self, request: Any) -> ToolReply | Lost:
        self.calls[request.run_id] += 1
        return Lost(reason="timeout") if self.loses else ToolReply(result={"content": []})

    async def look_up(self, request: Any) -> LookUp:
        return LookUp(answer="unsure")

    def incident(self, error: BaseException, what: str) -> str:
        self.incidents.append(type(error).__name__)
        return f"inc_{len(self.incidents)}"

    # What the log says

    def states(self) -> dict[str, RunState]:
        """Of all runs that were not deleted, folded from the first record on; in the order of their first records."""
        states: dict[str, RunState] = {}
        for run, record in self.log:
            if run in states and record.last <= states[run].last_seq:
                continue  # carried on by a checkpoint
            commit = ev.decode(record.body)
            states[run] = apply(states.get(run), commit, run)
            if isinstance(commit.events[-1], ev.RunDeleted):
                del states[run]
        return states

    def events(self, run: str) -> list[Any]:
        return [event for known, record in self.log if known == run for event in ev.decode(record.body).events]

    @asynccontextmanager
    async def life(self, kind: type[Shelf] = Shelf) -> AsyncIterator[Life]:
        """A process, from its opening to its death."""
        self.epoch += 1
        async with anyio.create_task_group() as group:
            life = Life(self, group, kind)
            await life.open()
            yield life
            group.cancel_scope.cancel()


class Life:
    def __init__(self, store: Store, group: anyio.abc.TaskGroup, kind: type[Shelf]) -> None:
        self.store, self._group = store, group
        self.archive = kind(store)
        self.fatal: list[Exception] = []
        journal: Any = SimpleNamespace(store_id=STORE, epoch=store.epoch, append=store.append, health=store.health)
        self.supervisor = Supervisor(
            journal=journal, clock=store, model=store, tools=store, archive=self.archive,
            rules=Rules(epoch=store.epoch, present=store.present), spawn=group.start_soon, incident=store.incident,
            fatal=self.fatal.append,
        )  # fmt: skip
        self.keeper = Keeper(self.supervisor)
        self.roster = self.supervisor.roster

    async def open(self) -> None:
        """In the order of `store.open_store`."""
        manifest = self.store.manifest
        if manifest is not None:
            self.supervisor.known_until = manifest.at
            self.roster.places = manifest.places
            self.keeper.ended.update(manifest.ended)
            self.roster.counts.update(manifest.ended)
            for run, heads, body in manifest.live:
                self.supervisor.park(run, replace(heads, body=Raw(body)))
        await self.supervisor.replay(self.store.log[self.store.cut :])
        self.keeper.replayed()
        await self.supervisor.open()
        self._group.start_soon(self.supervisor.keep_time)
        self.supervisor.begin()

    # Requests

    async def start(self, key: str, does: str = "end", wait_ms: int = 60_000, **more: Any) -> str:
        """The run's id, once it waits, is ready or has ended."""
        rules = more.pop("rules", (Rule(do="allow", effect="idempotent"),))
        definition = Definition(agent=more.pop("agent", "a"), tools=TOOLS, rules=rules)
        event = ev.RunStarted(
            client_request_id=key, namespace=more.pop("namespace", ""), fingerprint="f", definition=definition,
            input=does, epoch=self.store.epoch, **more,
        )  # fmt: skip
        answer = await self.supervisor.start(event, wait_ms)
        return answer.actor.run_id

    async def ask(self, run: str, key: str, command: Command, wait_ms: int = 60_000) -> Answer:
        method = METHODS[type(command)]
        return await self.supervisor.submit(
            run, Ask(key=key, method=method, fingerprint=f"{command}", command=command), wait_ms
        )

    async def approve(self, run: str, decision: str = "allow", key: str = "approve") -> Answer:
        """Answers the first open question."""
        actor = await self.supervisor.find(run)
        assert actor.state is not None
        question = actor.state.open_approvals()[0]
        command = ApproveCommand(
            approval_id=question.approval_id, digest=question.digest, decision=decision, decided_by="person"
        )
        return await self.ask(run, key + question.approval_id, command)

    async def settled(self, run: str) -> Actor:
        """Its actor, when it waits, is ready or has ended."""
        actor = await self.supervisor.find(run)
        while self.supervisor.status_of(actor) == "running" or not actor.at_rest:
            await actor.changed()
        return actor

    def overview(self) -> tuple[dict[str, int], list[str]]:
        """Counts and questions, as `status` without a run shows them."""
        return dict(+self.roster.counts), plain(self.roster.attention(1_000))

    def truth(self) -> tuple[dict[str, int], list[str]]:
        """The same, counted from the first record on."""
        counts: Counter[str] = Counter()
        asked: list[Any] = []
        for run, state in self.store.states().items():
            actor = self.roster.actors.get(run)
            counts[run_status(state, self.store.epoch, busy=actor is not None and actor.busy)] += 1
            asked += needs_attention(state, self.store.epoch)
        return dict(counts), plain(asked)

    def view(self, run: str) -> dict[str, Any]:
        """As `list` has to show it, from its first record on."""
        made: dict[str, Any] = shown(run_view(self.store.states()[run], self.store.epoch, busy=False))
        return made


def shown(value: Any) -> Any:
    """As it is on the wire."""
    return msgspec.json.decode(msgspec.json.encode(value))


def plain(lines: list[dict[str, Any]]) -> list[str]:
    return sorted(msgspec.json.encode(line).decode() for line in lines)
