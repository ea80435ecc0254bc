"""Durable events as short lines for a reader.

Knows: what each type of event means to a person, and which call a step id stands for, because only the model's answer
names it. A type that it does not know is shown as it is: later versions add some.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rpcagent.batch.text import arguments, clock, goal_text, instant, one_line, result_summary, span, visible

Tone = Literal["plain", "dim", "good", "bad", "ask", "strong", "added", "removed"]
Event = Mapping[str, Any]
WORD_WIDTH = 11


@dataclass(frozen=True)
class Line:
    """`word` says what happened, `text` to what. `minor`: of interest only to whoever reads all events."""

    word: str
    text: str
    tone: Tone = "plain"
    minor: bool = False

    def laid_out(self) -> str:
        """Further lines of the text stand under the first one."""
        first, *rest = self.text.split("\n")
        return "\n".join(
            [f"{self.word:<{WORD_WIDTH - 1}} {first}".rstrip(), *(" " * WORD_WIDTH + line for line in rest)]
        )


class Narrator:
    """Tells the events of one run, which it must be given from the first one, in order."""

    def __init__(self, width: int) -> None:
        self._width = max(width - WORD_WIDTH, 40)
        self._names: dict[str, str] = {}
        self._calls: dict[str, Any] = {}
        self._tellers: dict[str, Callable[[Event, str], Line]] = {
            "request_accepted": self._request,
            "request_settled": self._request,
            "run_started": self._run_started,
            "model_call_started": self._model_call_started,
            "model_answered": self._model_answered,
            "tool_started": self._tool_started,
            "tool_completed": self._tool_completed,
            "step_failed": self._step_failed,
            "attempt_failed": self._attempt_failed,
            "attempt_interrupted": self._attempt_interrupted,
            "looked_up": self._looked_up,
            "step_unknown": self._step_unknown,
            "step_denied": self._step_denied,
            "late_outcome": self._late_outcome,
            "approval_requested": self._approval_requested,
            "approval_decided": self._approval_decided,
            "approval_expired": self._approval_expired,
            "approval_voided": self._approval_voided,
            "run_reopened": self._run_reopened,
            "run_released": self._run_released,
            "cancel_requested": self._cancel_requested,
            "run_cancelled": self._run_cancelled,
            "run_completed": self._run_completed,
            "run_failed": self._run_failed,
            "run_deleted": self._run_deleted,
        }

    def told(self, element: Event) -> Line:
        """The line of one element of `events`."""
        event = element["event"]
        for call in event.get("calls", ()):
            self._names[call["stepId"]] = visible(call["tool"])
            self._calls[call["stepId"]] = call["arguments"]
        if event["type"] == "model_call_started":
            self._names[event["stepId"]] = "the model"
        tell = self._tellers.get(event["type"])
        if tell is None:
            rest = {name: value for name, value in event.items() if name != "type"}
            return Line(one_line(event["type"], 40), self._short(json.dumps(rest, ensure_ascii=False)), "dim")
        return tell(event, element["at"])

    def _short(self, text: str) -> str:
        return one_line(text, self._width)

    def _name(self, event: Event) -> str:
        name = self._names.get(event["stepId"], visible(event["stepId"]))
        return f"{name} (attempt {event['attempt']})" if event.get("attempt", 1) > 1 else name

    def _trouble(self, event: Event) -> str:
        error = event.get("error") or {}
        return ": ".join(part for part in (error.get("kind", ""), error.get("message", "")) if part)

    # One method for each type of event: (event, at) -> Line

    def _run_started(self, event: Event, _at: str) -> Line:
        agent = event.get("definition", {}).get("agent", "")
        return Line("started", self._short(f"{agent}: {goal_text(event['input'])}"), minor=True)

    def _request(self, event: Event, _at: str) -> Line:
        return Line("request", self._short(f"{event['method']} {event['clientRequestId']}"), "dim", minor=True)

    def _model_call_started(self, event: Event, _at: str) -> Line:
        again = event.get("attempt", 1) > 1
        return Line("asks", self._name(event), "dim", minor=not again)

    def _model_answered(self, event: Event, _at: str) -> Line:
        text = visible(event.get("text", "").strip(), lines=True)
        cut = event.get("stop", "stop") not in {"stop", "tool_calls", ""}
        note = f"[stopped: {one_line(event['stop'], 40)}]" if cut else ""
        calls = event.get("calls", ())
        if not text and not note:
            return Line("model", f"{len(calls)} calls", "dim", minor=True)
        return Line("model", "\n".join(part for part in (text, note) if part))

    def _tool_started(self, event: Event, _at: str) -> Line:
        given = arguments(self._calls.get(event["stepId"], {}), self._width)
        return Line("call", self._short(f"{self._name(event)} {given}"))

    def _tool_completed(self, event: Event, _at: str) -> Line:
        source = {"look_up": " (it was looked up)", "person": " (a person said so)"}.get(event.get("source", ""), "")
        head = f"{self._name(event)}{source}: "
        wrong = event["result"].get("isError") is True
        text = head + result_summary(event["result"], self._width - len(head))
        return Line("error" if wrong else "result", text, "bad" if wrong else "dim")

    def _step_failed(self, event: Event, _at: str) -> Line:
        return Line("failed", self._short(f"{self._name(event)}: {self._trouble(event)}"), "bad")

    def _attempt_failed(self, event: Event, at: str) -> Line:
        wait = (instant(event["retryAt"]) - instant(at)).total_seconds()
        when = f"again in {span(wait)}, at {clock(event['retryAt'])}" if wait >= 1 else "again at once"
        return Line("waits", self._short(f"{self._name(event)}: {self._trouble(event)}; {when}"), "ask")

    def _attempt_interrupted(self, event: Event, _at: str) -> Line:
        return Line("cut off", self._short(f"{self._name(event)}: {event['reason'].replace('_', ' ')}"), "ask")

    def _looked_up(self, event: Event, _at: str) -> Line:
        return Line("looked up", self._short(f"{self._name(event)}: {event['answer']}"))

    def _step_unknown(self, event: Event, _at: str) -> Line:
        return Line("unknown", self._short(f"{self._name(event)}: nobody knows whether it happened"), "bad")

    def _step_denied(self, event: Event, _at: str) -> Line:
        return Line("denied", self._short(f"{self._name(event)}: {event.get('message') or event['reason']}"), "bad")

    def _late_outcome(self, event: Event, _at: str) -> Line:
        came = self._trouble(event) or result_summary(event.get("result"), self._width)
        return Line("late", self._short(f"{self._name(event)}: {came} (kept as evidence)"), "dim")

    def _approval_requested(self, event: Event, _at: str) -> Line:
        expires = f", until {clock(event['expiresAt'])}" if event.get("expiresAt") else ""
        about = f"{ordinal(event['approvalId'])}: {headline(event)}{expires}"
        return Line("question", self._short(about), "ask")

    def _approval_decided(self, event: Event, _at: str) -> Line:
        by = f" by {event['decidedBy']}" if event.get("decidedBy") else ""
        comment = f": {event['comment']}" if event.get("comment") else ""
        return Line("answer", self._short(f"{ordinal(event['approvalId'])}: {event['decision']}{by}{comment}"), "ask")

    def _approval_expired(self, event: Event, _at: str) -> Line:
        return Line("expired", f"question {ordinal(event['approvalId'])} was not answered in time", "bad")

    def _approval_voided(self, event: Event, _at: str) -> Line:
        return Line("void", self._short(f"answer {ordinal(event['approvalId'])}: {event['reason']}"), "bad")

    def _run_reopened(self, _event: Event, _at: str) -> Line:
        return Line("reopened", "the daemon that was at it had ended; this one goes on", "ask")

    def _run_released(self, _event: Event, _at: str) -> Line:
        return Line("resumed", "", "dim", minor=True)

    def _cancel_requested(self, event: Event, _at: str) -> Line:
        return Line("cancel", self._short(event.get("reason", "") or "asked for"), "ask")

    def _run_cancelled(self, event: Event, _at: str) -> Line:
        open_ones = len(event.get("unresolved", ()))
        return Line("cancelled", f"{open_ones} steps with an unknown outcome" if open_ones else "", "bad")

    def _run_completed(self, _event: Event, _at: str) -> Line:
        return Line("completed", "", "good")

    def _run_failed(self, event: Event, _at: str) -> Line:
        return Line("failed", self._short(f"the run: {self._trouble(event)}"), "bad")

    def _run_deleted(self, event: Event, _at: str) -> Line:
        return Line("deleted", self._short(f"by the rules of retention: {event.get('reason', '')}"), "dim")


def ordinal(approval_id: str) -> str:
    """The number of a question within its run, which is how a person names it."""
    return visible(approval_id.rsplit("_", 1)[-1])


def headline(question: Event) -> str:
    """One line on what a question is about."""
    subject = question["subject"]
    match question["kind"]:
        case "tool_call":
            return f"may {subject.get('tool')} run? {arguments(subject.get('arguments', {}), 120)}"
        case "unknown_outcome":
            return f"did {subject.get('tool')} happen? {arguments(subject.get('arguments', {}), 120)}"
        case "budget":
            return f"the budget of {subject.get('value'):g} {subject.get('limit')} is spent"
        case "retry":
            error = subject.get("error") or {}
            return f"{subject.get('step')} does not work: {error.get('kind', '')}: {error.get('message', '')}"
        case kind:
            return f"{kind}: {json.dumps(subject, ensure_ascii=False)}"
