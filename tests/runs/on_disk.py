"""A store in files, opened by `store.open_store` over a model and tools in memory. A life that is killed leaves the files as
they were at that moment: the next one opens a copy of them."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
from rpcagent import store as stores
from rpcagent.journal import seal
from rpcagent.policy.retention import Retention
from rpcagent.runs import events as ev
from rpcagent.runs.decide import Rules
from rpcagent.runs.definition import Definition, Rule
from rpcagent.runs.engine import Actor
from rpcagent.runs.outcomes import AskedCall, LookUp, ModelReply, ToolReply
from rpcagent.runs.requests import ApproveCommand, Ask
from rpcagent.runs.supervisor import Supervisor
from tests.sim.outside import TOOLS

LIMIT_S = 100
ALLOW = (Rule(do="allow", effect="idempotent"),)


class OnDisk:
    """`present`: the policy of the next life. `sealing` and `retention` as for `open_store`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "0"
        self.folder.mkdir()
        self.present: dict[str, tuple[Rule, ...]] = {}
        self.retention = Retention()
        self.sealing: Callable[[str], seal.Seal] = lambda _store_id: seal.Plain()
        self.notes: list[str] = []
        self.incidents: list[str] = []
        self.calls: Counter[str] = Counter()

    async def complete(self, request: Any, emit: Callable[[str], None]) -> ModelReply:
        asked = request.messages[0].content
        first = len(request.messages) == 1 and asked != "end"
        calls = (AskedCall(tool=asked, arguments={"op": "x"}, provider_id="same"),) if first else ()
        return ModelReply(text="" if first else "The end.", calls=calls)

    async def call(self, request: Any) -> ToolReply:
        self.calls[request.run_id] += 1
        return ToolReply(result={"content": []})

    async def look_up(self, request: Any) -> LookUp:
        return LookUp(answer="unsure")

    def _incident(self, error: BaseException, what: str) -> str:
        self.incidents.append(f"{what}: {error!r}")
        return "inc_1"

    @asynccontextmanager
    async def life(self) -> AsyncIterator[Life]:
        """A process, until it is killed."""
        async with within_limits() as group:

            def build(journal: Any, archive: Any, clock: Any, _blobs: Any) -> Supervisor:
                rules = Rules(epoch=journal.epoch, present=self.present)
                return Supervisor(
                    journal=journal, archive=archive, clock=clock, model=self, tools=self, rules=rules,
                    spawn=group.start_soon, incident=self._incident, fatal=self._fatal,
                )  # fmt: skip

            opened = await stores.open_store(
                self.folder, None, build, sealing=self.sealing, retention=self.retention, note=self.notes.append
            )
            try:
                await opened.supervisor.open()
                opened.supervisor.begin()
                yield Life(opened)
            finally:
                with anyio.CancelScope(shield=True):
                    group.cancel_scope.cancel()
                    copy = self.folder.with_name(str(int(self.folder.name) + 1))
                    shutil.copytree(self.folder, copy)
                    await opened.close()
                    self.folder = copy

    def _fatal(self, error: BaseException) -> None:
        raise error


@asynccontextmanager
async def within_limits() -> AsyncIterator[anyio.abc.TaskGroup]:
    with anyio.fail_after(LIMIT_S):
        async with anyio.create_task_group() as group:
            yield group


class Life:
    def __init__(self, opened: stores.Store) -> None:
        self.store = opened
        self.supervisor, self.keeper, self.archive = opened.supervisor, opened.keeper, opened.archive
        self.roster = opened.supervisor.roster

    def identity(self, key: str) -> str:
        return self.supervisor.run_id_of("", key)

    async def start(self, key: str, does: str = "end", wait_ms: int = 60_000, **more: Any) -> str:
        """The run's id, once it waits or has ended."""
        event = ev.RunStarted(
            client_request_id=key, namespace=more.pop("namespace", ""), fingerprint="f",
            definition=Definition(agent=more.pop("agent", "a"), tools=TOOLS, rules=ALLOW), input=does,
            epoch=self.supervisor.rules.epoch, **more,
        )  # fmt: skip
        answer = await self.supervisor.start(event, wait_ms)
        return answer.actor.run_id

    async def approve(self, run: str) -> None:
        """Allows what the run asks, and waits for its end."""
        actor = await self.supervisor.find(run)
        assert actor.state is not None
        [question] = actor.state.open_approvals()
        command = ApproveCommand(approval_id=question.approval_id, digest=question.digest, decision="allow")
        ask = Ask(key="approve", method="approve", fingerprint="f", command=command)
        await self.supervisor.submit(run, ask, 60_000)
        await self.settled(run)

    async def settled(self, run: str) -> Actor:
        actor = await self.supervisor.find(run)
        while self.supervisor.status_of(actor) == "running" or not actor.at_rest:
            await actor.changed()
        return actor

    @property
    def counts(self) -> dict[str, int]:
        return dict(+self.roster.counts)

    async def listed(self) -> list[tuple[int, str, str]]:
        """Of runs in files: place, run and status."""
        found, place = [], 0
        while rows := await self.archive.ended(place, 3, namespace=None, agent=None, statuses=()):
            found += [(heads.place, run, heads.status) for run, heads in rows]
            place = rows[-1][1].place + 1
        return found
