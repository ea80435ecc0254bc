"""What a performer reports, and the events that it becomes. Pure.

Knows: that an attempt whose outcome nobody can tell is not a failed one, and that a report for an attempt which is no
longer open is evidence and changes nothing. Does not know: what is done next; that is `decide`.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

import msgspec
from msgspec.structs import replace

from rpcagent.ids import hash26, step_id
from rpcagent.policy import approvals
from rpcagent.runs import events as ev
from rpcagent.runs.effects import LookUpAnswer
from rpcagent.runs.instants import after
from rpcagent.runs.state import RunState, Step

MOST_COUNTED = 1_000_000_000
BACKOFF_FIRST_MS = 1_000
BACKOFF_MOST_MS = 60_000
LOOK_UP_AGAIN_MS = 2_000
LOOK_UP_MOST_MS = 300_000
MOST_CALLS = 128
"""Calls in one answer. More are a mistake of the model's, and none of them is made."""


class AskedCall(msgspec.Struct, frozen=True, kw_only=True):
    """A tool call as the model gave it. `problem` is set where its arguments could not be read."""

    tool: str
    arguments: dict[str, Any]
    provider_id: str = ""
    problem: str = ""


class ModelReply(msgspec.Struct, frozen=True, kw_only=True):
    """A model's whole answer. `problem` is set where it cannot be used as it is (cut by the length limit, say): it is
    recorded and paid for, and the model is told and asked again, a bounded number of times."""

    text: str = ""
    calls: tuple[AskedCall, ...] = ()
    usage: ev.Usage = ev.Usage()
    stop: str = "stop"
    problem: str = ""


class ToolReply(msgspec.Struct, frozen=True, kw_only=True):
    """A tool's whole answer: an MCP tool result, JSON values only. `isError` in it is an answer too, not a failure.

    `blobs`: the digests of large outputs that the result refers to; they are durable already."""

    result: dict[str, Any]
    blobs: tuple[str, ...] = ()


class Failed(msgspec.Struct, frozen=True, kw_only=True):
    """It is known not to have worked, and another try would not help."""

    error: ev.Trouble


class NotDone(msgspec.Struct, frozen=True, kw_only=True):
    """Nothing happened outside, and trying later may help. `retry_after_ms` is what the other side asked for.

    `ask`: trying again by itself would not help (credentials, say): a person is asked at once.
    """

    error: ev.Trouble
    retry_after_ms: int | None = None
    ask: bool = False


class Lost(msgspec.Struct, frozen=True, kw_only=True):
    """It was dispatched, and nobody will tell how it ended."""

    reason: ev.Interruption


class LookUp(msgspec.Struct, frozen=True, kw_only=True):
    """The outside's answer about an earlier attempt; `result` comes with `found`."""

    answer: LookUpAnswer
    result: dict[str, Any] | None = None


Outcome = ModelReply | ToolReply | Failed | NotDone | Lost | LookUp


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of one attempt of one step, as its performer saw it."""

    step_id: str
    attempt: int
    outcome: Outcome


def events_of(state: RunState, report: Report, now: datetime) -> list[ev.AnyEvent]:
    """The events that record the report."""
    step = state.steps.get(report.step_id)
    looked_up = isinstance(report.outcome, LookUp)
    if state.ended or step is None or not _awaited(step, report.attempt, looked_up=looked_up):
        return _evidence(report)
    where: dict[str, Any] = {"step_id": report.step_id, "attempt": report.attempt}
    match report.outcome:
        case ModelReply() as reply:
            return [_answered(state, reply, where)]
        case ToolReply(result=result, blobs=blobs):
            return [ev.ToolCompleted(**where, result=result, blobs=blobs)]
        case Failed(error=error) if step.doubt:
            # It is known of this attempt only; of the earlier one, which may have acted, it says nothing.
            return [ev.StepUnknown(**where, error=error), approvals.unknown_outcome(state, replace(step, error=error))]
        case Failed(error=error):
            return [ev.StepFailed(**where, error=error)]
        case NotDone(error=error, ask=True):
            return [ev.AttemptFailed(**where, error=error, retry_at=now, wait_ms=0, ask=True)]
        case NotDone(error=error, retry_after_ms=asked):
            wait_ms = max(backoff_ms(report.step_id, report.attempt), asked or 0)
            retry_at = after(now, wait_ms)
            return [ev.AttemptFailed(**where, error=error, retry_at=retry_at, wait_ms=wait_ms)]
        case Lost(reason="cancelled"):
            return [ev.AttemptInterrupted(**where, reason="cancelled")]
        case Lost(reason=reason):
            retry_at = after(now, backoff_ms(report.step_id, report.attempt))
            return [ev.AttemptInterrupted(**where, reason=reason, retry_at=retry_at)]
        case LookUp() as look_up:
            return [_looked_up(state, step, look_up, where, now)]


def backoff_ms(step: str, attempt: int) -> int:
    """Doubling from one second, at most a minute, less up to a quarter so that many runs do not come back at once. The
    jitter derives from the step: a replay waits as long. `attempt` counts from 1."""
    most: int = min(BACKOFF_MOST_MS, BACKOFF_FIRST_MS * 2 ** min(attempt - 1, 16))
    return most - int.from_bytes(hash26(step, str(attempt)).encode()) % (most // 4)


def _awaited(step: Step, attempt: int, *, looked_up: bool) -> bool:
    return step.status == "started" and step.attempt == attempt and step.interrupted == looked_up


def _evidence(report: Report) -> list[ev.AnyEvent]:
    where: dict[str, Any] = {"step_id": report.step_id, "attempt": report.attempt}
    match report.outcome:
        case ToolReply(result=result):
            return [ev.LateOutcome(**where, result=result)]
        case Failed(error=error) | NotDone(error=error):
            return [ev.LateOutcome(**where, error=error)]
        case LookUp(answer="found", result=result):
            return [ev.LateOutcome(**where, result=result)]
        case _:
            return []  # a dropped model answer or a look-up that found nothing is no evidence of anything


def _answered(state: RunState, reply: ModelReply, where: dict[str, Any]) -> ev.ModelAnswered:
    if len(reply.calls) > MOST_CALLS:
        problem = f"it asked for {len(reply.calls)} calls at once; at most {MOST_CALLS} are made"
        reply = replace(reply, calls=(), problem=problem)
    calls = tuple(
        ev.ToolCall(
            step_id=step_id(state.run_id, state.step_count + 1 + place),
            tool=call.tool,
            arguments=call.arguments,
            provider_id=call.provider_id,
            problem=call.problem or _problem(state, call.tool),
        )
        for place, call in enumerate(reply.calls)
    )
    return ev.ModelAnswered(
        **where,
        text=reply.text,
        calls=calls,
        usage=_counted(reply.usage),
        stop=reply.stop,
        problem="" if calls else reply.problem,
    )


def _counted(usage: ev.Usage) -> ev.Usage:
    """What a provider says it used, as far as it can be true: no sum of such numbers is ever beyond a number."""
    cost = usage.cost_usd if 0 <= usage.cost_usd <= MOST_COUNTED else 0.0
    tokens = (max(0, min(n, MOST_COUNTED)) for n in (usage.input_tokens, usage.output_tokens))
    return ev.Usage(input_tokens=next(tokens), output_tokens=next(tokens), cost_usd=cost)


def _problem(state: RunState, tool: str) -> str:
    if state.definition.tool(tool) is not None:
        return ""
    known = ", ".join(spec.name for spec in state.definition.tools) or "none"
    return f"There is no tool named {tool!r}. Tools: {known}."


def _looked_up(state: RunState, step: Step, look_up: LookUp, where: dict[str, Any], now: datetime) -> ev.LookedUp:
    """`absent` counts only when the effect can no longer arrive: until `settle_ms` after the end of the attempt, which is
    the last moment at which it may have been sent, it is `pending`."""
    answer = look_up.answer
    retry_at = None
    spec = state.definition.tool(step.name)
    settled_at = after(step.interrupted_at or now, spec.settle_ms if spec else 0)
    if answer == "absent" and now < settled_at:
        answer, retry_at = "pending", settled_at
    elif answer == "pending":
        retry_at = after(now, min(LOOK_UP_AGAIN_MS * 2 ** min(step.looks, 16), LOOK_UP_MOST_MS))
    return ev.LookedUp(**where, answer=answer, result=look_up.result, retry_at=retry_at)
