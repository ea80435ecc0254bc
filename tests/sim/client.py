"""A client as the reference clients are: it sends every request with the same key until it has a definite answer.

It sends each answered request once more, and expects the same decision. It answers questions from the outside's truth.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from typing import Any, Literal, TypeVar

import anyio
import msgspec
from rpcagent import errors
from rpcagent.ids import digest_of, run_id
from rpcagent.runs import events as ev
from rpcagent.runs.definition import Definition, Drive, Recovery
from rpcagent.runs.engine import Actor
from rpcagent.runs.requests import ApproveCommand, Ask, CancelCommand, Command, ResumeCommand, StepCommand
from rpcagent.runs.state import Approval, RunState
from rpcagent.runs.supervisor import Answer, Supervisor
from rpcagent.runs.view import recovery_plan

from .outside import Service, result_of
from .process import Died, Process, call
from .world import World

T = TypeVar("T")
Truth = Literal["happened", "happened_without_result", "abandon"]
METHODS: dict[type, ev.Method] = {
    StepCommand: "step",
    ResumeCommand: "resume",
    ApproveCommand: "approve",
    CancelCommand: "cancel",
}


class Refused(msgspec.Struct, frozen=True):
    """A definite answer, too."""

    code: str
    details: dict[str, Any]


class Client:
    """Outlives every process. `told` says how unknown outcomes are answered."""

    def __init__(
        self, world: World, service: Service, process: Callable[[], Process], told: Truth = "happened"
    ) -> None:
        self.world = world
        self.service = service
        self.told = told
        self._process = process
        self.unknown_answers: dict[str, str] = {}
        self._resumes = 0

    # Sending

    async def send(
        self, run: str, key: str, ask: Callable[[Supervisor], Awaitable[Answer]]
    ) -> dict[str, Any] | Refused:
        """Until there is a definite answer; then once more, which must be answered alike."""
        first = await self._send(ask, run)
        if not isinstance(first, Refused):
            self.world.answered(run, key, first)
            again = await self._send(ask, run)
            self.world.answered(run, key, again)
        return first

    async def _send(self, ask: Callable[[Supervisor], Awaitable[Answer]], run: str) -> dict[str, Any] | Refused:
        while True:
            await self.world.alive.wait()
            try:
                answer = await call(self.world, self._process(), lambda process: ask(process.supervisor))
            except Died:
                continue
            except errors.RpcAgentError as refusal:
                if refusal.data["retryable"] and refusal.code in {"STORAGE", "RUN_BUSY"}:
                    await anyio.sleep(0.5)
                    continue
                return Refused(refusal.code, refusal.data)
            if answer.decision is not None:
                return answer.decision
            if (await self.state(run)).held(self.world.epoch):
                await self.release(run)

    async def start(self, key: str, definition: Definition, drive: Drive = "auto", recovery: Recovery = "auto") -> str:
        """The run's id, which the caller can tell beforehand."""
        run = run_id(self.world.store_id, "", key)
        decision = await self.try_start(key, definition, drive, recovery)
        if decision != {"runId": run}:
            self.world.breach(f"start answered {decision}")
        return run

    async def try_start(
        self, key: str, definition: Definition, drive: Drive = "auto", recovery: Recovery = "auto"
    ) -> dict[str, Any] | Refused:
        def ask(supervisor: Supervisor) -> Awaitable[Answer]:
            event = ev.RunStarted(
                client_request_id=key,
                namespace="",
                fingerprint=digest_of(["start", definition.agent]),
                definition=definition,
                input="go",
                epoch=supervisor.rules.epoch,
                drive=drive,
                recovery=recovery,
            )
            return supervisor.start(event, 0)

        return await self.send(run_id(self.world.store_id, "", key), key, ask)

    async def delete(self, run: str) -> None:
        """Lets retention have a run that has ended, and waits until it is deleted."""
        self.world.let_go.add(run)
        while run not in self.world.deleted:
            await self.world.alive.wait()
            with contextlib.suppress(Died):
                await call(self.world, self._process(), Process.delete)
            await anyio.sleep(0.1)

    async def ask(self, run: str, key: str, command: Command, wait_ms: int = 30_000) -> dict[str, Any] | Refused:
        method = METHODS[type(command)]
        request = Ask(key=key, method=method, fingerprint=digest_of([method, command]), command=command)

        def ask(supervisor: Supervisor) -> Awaitable[Answer]:
            return supervisor.submit(run, request, wait_ms)

        return await self.send(run, key, ask)

    # Looking

    async def state(self, run: str) -> RunState:
        def shown(_supervisor: Supervisor, actor: Actor) -> RunState:
            self.world.seen(run, actor.state, "status")
            assert actor.state is not None
            return actor.state

        return await self._look(run, shown)

    async def status(self, run: str) -> str:
        return await self._look(run, lambda supervisor, actor: supervisor.status_of(actor))

    async def _look(self, run: str, shown: Callable[[Supervisor, Actor], T]) -> T:
        """Reading changes nothing, so nobody dies of it; what a process shows that dies meanwhile is not seen."""
        while True:
            await self.world.alive.wait()
            process = self._process()
            actor = await process.supervisor.find(run)
            if not self.world.dead and process is self._process():
                found = shown(process.supervisor, actor)
                await process.rest()
                return found

    async def until(self, run: str, *statuses: str) -> str:
        """Polls, ever more slowly."""
        pause = 0.002
        while (status := await self.status(run)) not in statuses:
            await anyio.sleep(pause)
            pause = min(pause * 2, 4.0)
        return status

    # Answering

    async def answer(self, run: str, approval: Approval, decision: str, **more: Any) -> dict[str, Any] | Refused:
        command = ApproveCommand(
            approval_id=approval.approval_id, digest=approval.digest, decision=decision, decided_by="person", **more
        )
        told = await self.ask(run, f"approve/{approval.approval_id}/{decision}", command)
        expected = {
            "approval": {
                "approvalId": approval.approval_id,
                "kind": approval.kind,
                "decision": decision,
                "already": False,
            }
        }
        if told != expected and not (isinstance(told, Refused) and told.code == "INVALID_STATE"):
            self.world.breach(f"approve answered {told}")
        return told

    async def tell(self, run: str, approval: Approval) -> None:
        """Says what became of an unknown outcome, as the outside has it; or that nobody will say."""
        key = approval.subject["key"]
        decision = (
            "abandon" if self.told == "abandon" else "happened" if key in self.service.by_key else "did_not_happen"
        )
        more = {}
        if decision == "happened" and self.told == "happened":
            more = {"result": result_of(approval.subject["arguments"]["op"])}
        self.unknown_answers[approval.approval_id] = decision
        await self.answer(run, approval, decision, **more)

    async def see_through(self, run: str, *, verdicts: dict[str, str] | None = None) -> str:
        """Answers every question and releases every held run until the run has ended."""
        while True:
            status = await self.until(run, "ready", "waiting", "completed", "failed", "cancelled", "damaged")
            state = await self.state(run)
            if state.ended or status == "damaged":
                return status
            opened = state.open_approvals()
            if state.held(self.world.epoch):
                await self.release(run)
            elif opened:
                await self._answer_first(run, opened[0], verdicts or {})
            elif state.drive == "manual":
                await self.ask(run, f"step-{state.last_seq}", StepCommand())
            else:
                await anyio.sleep(1.0)

    async def _answer_first(self, run: str, approval: Approval, verdicts: dict[str, str]) -> None:
        if approval.kind == "unknown_outcome":
            await self.tell(run, approval)
        elif approval.kind == "budget":
            verdict = verdicts.get("budget", "extend")
            await self.answer(run, approval, verdict, **({"extend": {"attempts": 50.0}} if verdict == "extend" else {}))
        elif approval.kind == "retry":
            await self.answer(run, approval, verdicts.get("retry", "retry"))
        else:
            await self.answer(run, approval, verdicts.get(approval.subject["tool"], "allow"))

    async def release(self, run: str) -> None:
        """Lets a held run go, by the plan that it shows now."""
        plan = recovery_plan(await self.state(run))
        self._resumes += 1
        told = await self.ask(run, f"resume-{self._resumes}", ResumeCommand(plan_digest=plan["planDigest"]), 0)
        if isinstance(told, Refused) and told.code not in {"STALE_DIGEST", "INVALID_STATE"}:
            self.world.breach(f"resume answered {told}")
