"""A run told event by event with the pure functions alone: no loop, no log, no supervisor.

Every change is encoded, decoded and folded a second time; the replayed state must equal the one that was lived.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from msgspec.structs import replace
from rpcagent.ids import digest_of, run_id, step_id
from rpcagent.runs import events as ev
from rpcagent.runs.decide import Action, LookUpAction, Rules, advance, open_pass
from rpcagent.runs.definition import Budget, Definition, Drive, ModelSettings, Recovery, Rule
from rpcagent.runs.effects import EffectClass, ToolSpec
from rpcagent.runs.fold import apply
from rpcagent.runs.outcomes import AskedCall, LookUp, Lost, ModelReply, NotDone, Outcome, Report, ToolReply, events_of
from rpcagent.runs.requests import (
    ApproveCommand,
    Ask,
    CancelCommand,
    Command,
    Receipt,
    ResumeCommand,
    StepCommand,
    receive,
)
from rpcagent.runs.state import Approval, RunState, Step
from rpcagent.runs.view import run_status

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
RUN = run_id("store", "", "start-1")
METHODS: dict[type, ev.Method] = {
    StepCommand: "step",
    ResumeCommand: "resume",
    ApproveCommand: "approve",
    CancelCommand: "cancel",
}
TOOLS = (
    ToolSpec(name="t.read", effect="read_only"),
    ToolSpec(name="t.put", effect="idempotent"),
    ToolSpec(name="t.close", effect="reconcilable"),
    ToolSpec(name="t.pay", effect="at_most_once"),
)
NAMES: dict[EffectClass, str] = {spec.effect: spec.name for spec in TOOLS}
ALLOW_ALL = (Rule(do="allow"),)
DONE: dict[str, Any] = {"content": [{"type": "text", "text": "done"}]}


def definition(**changes: Any) -> Definition:
    made = Definition(
        agent="a", tools=TOOLS, rules=ALLOW_ALL, budget=Budget(), model=ModelSettings(max_output_tokens=100)
    )
    return replace(made, **changes)


def sid(ordinal: int) -> str:
    return step_id(RUN, ordinal)


def assert_shows(decision: Any, step: dict[str, Any]) -> None:
    """The recorded answer of a `step` says this of its step, and perhaps more."""
    assert {name: decision["step"].get(name) for name in step} == step


class Story:
    """`performed` are all actions in the order in which they began; `in_flight` those without a report."""

    def __init__(
        self,
        made: Definition | None = None,
        *,
        drive: Drive = "auto",
        recovery: Recovery = "auto",
        present: dict[str, tuple[Rule, ...]] | None = None,
    ) -> None:
        self.now = NOON
        self.rules = Rules(epoch=1, present=present or {})
        self.in_flight: frozenset[tuple[str, int]] = frozenset()
        self.performed: list[Action] = []
        self.events: list[ev.AnyEvent] = []
        self.wake: datetime | None = None
        self._lived: RunState | None = None
        self._replayed: RunState | None = None
        started = ev.RunStarted(
            client_request_id="start-1",
            namespace="",
            fingerprint="f-start",
            definition=made or definition(),
            input="go",
            epoch=1,
            drive=drive,
            recovery=recovery,
        )
        settled = ev.RequestSettled(
            client_request_id="start-1", method="start", fingerprint="f-start", decision={"runId": RUN}
        )
        self._commit((started, settled))
        self.go()

    @property
    def state(self) -> RunState:
        assert self._lived is not None
        return self._lived

    @property
    def status(self) -> str:
        return run_status(self.state, self.rules.epoch, busy=bool(self.in_flight))

    def step(self, ordinal: int) -> Step:
        step = self.state.step(sid(ordinal))
        assert step is not None
        return step

    def opened(self) -> list[Approval]:
        return self.state.open_approvals()

    def kinds(self) -> list[str]:
        return [type(e).__name__ for e in self.events]

    def doing(self) -> list[int]:
        """Ordinals of the steps that are being performed."""
        return sorted(int(i.rsplit("_", 1)[1]) for i, _ in self.in_flight)

    # What happens

    def _commit(self, events: tuple[ev.AnyEvent, ...]) -> None:
        if not events:
            return
        seq = self._lived.last_seq + 1 if self._lived else 1
        commit = ev.Commit(seq=seq, at=self.now, events=events)
        self._lived = apply(self._lived, commit, RUN)
        self._replayed = apply(self._replayed, ev.decode(ev.encode(commit)), RUN)
        assert self._lived == self._replayed
        self.events += events

    def go(self) -> list[Action]:
        """What follows; what is to be performed is in flight from now on."""
        following = advance(self.state, self.in_flight, self.rules, self.now)
        self._commit(following.append)
        assert self.state == following.state
        self.wake = following.wake
        self.performed += following.perform
        self.in_flight |= {(a.step_id, a.attempt) for a in following.perform}
        return list(following.perform)

    def later(self, seconds: float) -> list[Action]:
        self.now += timedelta(seconds=seconds)
        return self.go()

    def report(self, ordinal: int, outcome: Outcome) -> list[Action]:
        """The outcome of the attempt of a step that is in flight."""
        attempt = next(a for i, a in self.in_flight if i == sid(ordinal))
        self._commit(
            tuple(events_of(self.state, Report(step_id=sid(ordinal), attempt=attempt, outcome=outcome), self.now))
        )
        self.in_flight -= {(sid(ordinal), attempt)}
        return self.go()

    def says(self, ordinal: int, *tools: str, text: str = "") -> list[Action]:
        """The model answers with calls of these tools, or with its last word."""
        calls = tuple(AskedCall(tool=name, arguments={"n": n}, provider_id="same") for n, name in enumerate(tools))
        return self.report(ordinal, ModelReply(text=text, calls=calls, usage=ev.Usage(input_tokens=7, output_tokens=3)))

    def done(self, ordinal: int) -> list[Action]:
        return self.report(ordinal, ToolReply(result=DONE))

    def lost(self, ordinal: int) -> list[Action]:
        return self.report(ordinal, Lost(reason="timeout"))

    def not_done(self, ordinal: int, after_ms: int | None = None) -> list[Action]:
        return self.report(ordinal, NotDone(error=ev.Trouble(kind="busy"), retry_after_ms=after_ms))

    def looked_up(self, ordinal: int, answer: Any) -> list[Action]:
        assert isinstance(self.performed[-1], LookUpAction)
        return self.report(ordinal, LookUp(answer=answer, result=DONE if answer == "found" else None))

    def restart(self, seconds: float = 0, present: dict[str, tuple[Rule, ...]] | None = None) -> None:
        """Everything in flight is gone; the open pass is done, and nothing has gone on yet."""
        self.now += timedelta(seconds=seconds)
        self.in_flight = frozenset()
        self.rules = replace(
            self.rules, epoch=self.rules.epoch + 1, present=self.rules.present if present is None else present
        )
        self._commit(open_pass(self.state, self.rules, max(self.now, self.state.last_at)))

    # Requests

    def ask(self, key: str, command: Command, fingerprint: str | None = None) -> Receipt:
        """Accepted, joined, answered or refused; nothing has followed yet."""
        method = METHODS[type(command)]
        print_of_it = fingerprint or digest_of([method, command])
        ask = Ask(key=key, method=method, fingerprint=print_of_it, command=command)
        receipt = receive(self.state, ask, self.rules.epoch, self.now, busy=bool(self.in_flight))
        self._commit(receipt.events)
        return receipt

    def asked(self, key: str, command: Command) -> Receipt:
        """The same, and what follows."""
        receipt = self.ask(key, command)
        self.go()
        return receipt

    def answer(self, decision: str, key: str = "", place: int = 0, **more: Any) -> Receipt:
        """Answers an open question."""
        question = self.opened()[place]
        command = ApproveCommand(approval_id=question.approval_id, digest=question.digest, decision=decision, **more)
        return self.asked(key or f"approve-{len(self.events)}", command)

    def decision(self, key: str) -> Any:
        return self.state.requests[key].decision
