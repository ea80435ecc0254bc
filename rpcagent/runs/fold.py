"""`fold(state, event) -> state`: what an event does to a run. Pure; replay and live commits go through the same lines.

Knows: what each event changes, where the tables of `transitions` allow it. Does not know: why anybody chose the event;
that is `decide`. An illegal transition is our own fault and never a caller's: live, it is found before anything is written;
at replay, it stops that run alone.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any, Final, cast

from msgspec.structs import replace

from rpcagent.ids import digest_of
from rpcagent.runs import events as ev
from rpcagent.runs.context import context_after_turn, keeping, said
from rpcagent.runs.state import Approval, ApprovalStatus, ClosedBy, Message, Request, RunState, Spent, Step
from rpcagent.runs.transitions import APPROVAL_TABLE, RUN_TABLE, STEP_TABLE, IllegalTransition


def begin(run_id: str, event: ev.RunStarted, at: datetime) -> RunState:
    """The state after a run's first event."""
    definition_digest = digest_of(event.definition)
    state = RunState(
        run_id=run_id,
        client_request_id=event.client_request_id,
        namespace=event.namespace,
        definition=event.definition,
        definition_digest=definition_digest,
        input=event.input,
        drive=event.drive,
        recovery=event.recovery,
        workspace=event.workspace,
        labels=event.labels,
        started_at=at,
        last_at=at,
        last_seq=1,
        released_epoch=event.epoch,
        context_hash=definition_digest,
    )
    return said(state, (Message(role="user", content=event.input),))


def fold(state: RunState | None, event: ev.Event, at: datetime, run_id: str = "") -> RunState:
    """The state after one more event. Raises IllegalTransition; `state` itself is never changed.

    `state` None takes only RunStarted, and needs `run_id`.
    """
    if state is None:
        if not isinstance(event, ev.RunStarted):
            raise IllegalTransition(f"{run_id}: {type(event).__name__} before the run started")
        return begin(run_id, event, at)
    allowed = RUN_TABLE.get(type(event))
    if allowed is None or state.phase not in allowed:
        raise IllegalTransition(f"{state.run_id}: {type(event).__name__} in phase {state.phase}")
    changed = _APPLY[type(event)](state, event, at)
    return replace(changed, last_seq=state.last_seq + 1, last_at=max(at, state.last_at))


def apply(state: RunState | None, commit: ev.Commit, run_id: str) -> RunState:
    """Folds a whole commit. Raises IllegalTransition, also where its `seq` does not continue the run."""
    expected = state.last_seq + 1 if state else 1
    if commit.seq != expected:
        raise IllegalTransition(f"{run_id}: commit at seq {commit.seq}, expected {expected}")
    for event in commit.events:
        state = fold(state, event, commit.at, run_id)
    if state is None:
        raise IllegalTransition(f"{run_id}: empty commit")
    return state


# Steps


def _move(state: RunState, step_id: str, event: ev.Event, **changes: Any) -> Step:
    """The step after the event, by STEP_TABLE."""
    step = state.steps.get(step_id)
    if step is None:
        raise IllegalTransition(f"{state.run_id}: {type(event).__name__} for {step_id}, which is not open")
    status = STEP_TABLE.get((step.status, type(event)))
    attempt = getattr(event, "attempt", None)
    intent = isinstance(event, ev.ModelCallStarted | ev.ToolStarted)
    if status is None or (intent and step.status == "started" and not step.interrupted):
        raise IllegalTransition(f"{state.run_id}: {type(event).__name__} for {step_id}, which is {step.status}")
    if attempt is not None and attempt != step.attempt + intent:
        raise IllegalTransition(f"{state.run_id}: {type(event).__name__} for {step_id}, attempt {attempt}")
    return replace(step, status=status, **changes)


def _with(state: RunState, *steps: Step, **changes: Any) -> RunState:
    return replace(state, steps={**state.steps, **{s.step_id: s for s in steps}}, **changes)


def _closing(step: Step, spent: Spent, at: datetime) -> Spent:
    """The run's active time, with that of the attempt which ends now."""
    if step.started_at is None or step.interrupted:
        return spent
    return replace(spent, active_s=spent.active_s + max(0.0, (at - step.started_at).total_seconds()))


def _intent(state: RunState, step: Step, at: datetime, **changes: Any) -> tuple[Step, Spent]:
    spent = replace(state.spent, steps=state.spent.steps + (step.attempt == 0), attempts=state.spent.attempts + 1)
    started = replace(
        step,
        attempt=step.attempt + 1,
        started_at=at,
        first_started_at=step.first_started_at or at,
        interrupted=False,
        look_up="",
        retry_at=None,
        asking=False,
        error=None,
        **changes,
    )
    return started, spent


def _model_call_started(state: RunState, event: ev.ModelCallStarted, at: datetime) -> RunState:
    if event.step_id not in state.steps:
        state = context_after_turn(state)
        state = _with(
            state,
            Step(step_id=event.step_id, kind="model_call", name=state.definition.model.name),
            step_count=state.step_count + 1,
            model_step=event.step_id,
        )
    step = _move(state, event.step_id, event)
    step, spent = _intent(state, step, at, request_hash=event.request_hash, reserved_tokens=event.reserved_tokens)
    spent = replace(spent, tokens=spent.tokens + event.reserved_tokens)
    return _bind(_with(state, step, spent=spent), event.step_id)


def _model_answered(state: RunState, event: ev.ModelAnswered, at: datetime) -> RunState:
    before = state.steps.get(event.step_id)
    step = _move(
        state,
        event.step_id,
        event,
        ended_at=at,
        interrupted=False,
        reserved_tokens=0,
        usage=event.usage if event.usage != ev.Usage() else None,
    )
    used = event.usage.input_tokens + event.usage.output_tokens
    reserved = before.reserved_tokens if before else 0
    spent = _closing(before or step, state.spent, at)
    spent = replace(
        spent,
        tokens=spent.tokens + (used - reserved if used else 0),  # nobody counted: what was reserved stays spent
        estimated_tokens=spent.estimated_tokens + (0 if used else reserved),
        cost_usd=spent.cost_usd + event.usage.cost_usd,
    )
    calls = tuple(
        Step(
            step_id=call.step_id,
            kind="tool_call",
            name=call.tool,
            effect=state.definition.effect_of(call.tool, call.arguments),
            arguments=call.arguments,
            provider_id=call.provider_id,
            problem=call.problem,
        )
        for call in event.calls
    )
    state = _with(
        state, step, *calls, spent=spent, turn=tuple(c.step_id for c in calls), step_count=state.step_count + len(calls)
    )
    state = _judged(state, event)
    answer = Message(role="assistant", content=event.text, calls=event.calls, step_id=event.step_id)
    if not event.problem:
        return said(state, (answer,))
    told = f"Your last answer could not be used: {event.problem}"
    return said(state, (answer, Message(role="user", content=told)))


def _judged(state: RunState, event: ev.ModelAnswered) -> RunState:
    """Counts answers in a row that were of no use, and answers in a row that asked for the same."""
    useless = bool(event.problem) or (bool(event.calls) and all(call.problem for call in event.calls))
    calls = digest_of([[call.tool, call.arguments] for call in event.calls]) if event.calls else ""
    return replace(
        state,
        problem=event.problem,
        repairs=state.repairs + 1 if useless else 0,
        repeats=state.repeats + 1 if calls and calls == state.last_calls else int(bool(calls)),
        last_calls=calls,
    )


def _tool_started(state: RunState, event: ev.ToolStarted, at: datetime) -> RunState:
    step = _move(state, event.step_id, event)
    approvals = state.approvals
    if event.approval_id is not None:
        approval = approvals.get(event.approval_id)
        if approval is None or approval.step_id != event.step_id:
            raise IllegalTransition(f"{state.run_id}: {event.step_id} names an approval that is not its own")
        state = _put(state, _becomes(state, approval, event))
    elif step.approval_id in approvals:  # live: not consumed by an earlier attempt
        raise IllegalTransition(f"{state.run_id}: {event.step_id} starts without the approval that it waits for")
    step, spent = _intent(state, step, at, request_hash=event.request_hash, key=event.key)
    return _bind(_with(state, step, spent=spent), event.step_id)


def _put(state: RunState, approval: Approval) -> RunState:
    """Live approvals (open, or allowed and not consumed) stand apart from closed ones, so that a look at what is open
    costs the same however many were answered."""
    if approval.status in {"open", "allowed"}:
        return replace(state, approvals={**state.approvals, approval.approval_id: approval})
    live = {i: a for i, a in state.approvals.items() if i != approval.approval_id}
    return replace(state, approvals=live, closed={**state.closed, approval.approval_id: approval})


def _becomes(state: RunState, approval: Approval, event: ev.Event, **changes: Any) -> Approval:
    status = APPROVAL_TABLE.get((approval.status, type(event)))
    if status is None:
        raise IllegalTransition(
            f"{state.run_id}: {type(event).__name__} with {approval.approval_id}, which is {approval.status}"
        )
    return replace(approval, status=status, **changes)


def _bind(state: RunState, step_id: str) -> RunState:
    """An accepted `step` request answers for the first step that moves after it."""
    if state.step_request is not None and state.step_request_step is None:
        return replace(state, step_request_step=step_id)
    return state


def _tool_completed(state: RunState, event: ev.ToolCompleted, at: datetime) -> RunState:
    before = state.steps.get(event.step_id)
    step = _move(state, event.step_id, event, result=event.result, source=event.source, ended_at=at, interrupted=False)
    return _with(keeping(state, event.blobs, event.result), step, spent=_closing(before or step, state.spent, at))


def _step_failed(state: RunState, event: ev.StepFailed, at: datetime) -> RunState:
    before = state.steps.get(event.step_id)
    step = _move(state, event.step_id, event, error=event.error, ended_at=at, interrupted=False)
    return _with(state, step, spent=_closing(before or step, state.spent, at))


def _attempt_failed(state: RunState, event: ev.AttemptFailed, at: datetime) -> RunState:
    before = state.steps.get(event.step_id)
    since = before.waiting_since if before and before.waiting_since else at
    step = _move(
        state,
        event.step_id,
        event,
        error=event.error,
        retry_at=event.retry_at,
        asking=event.ask,
        waiting_since=since,
        interrupted=False,
    )
    spent = _closing(before or step, state.spent, at)
    spent = replace(spent, tokens=spent.tokens - step.reserved_tokens)
    return _with(state, replace(step, reserved_tokens=0), spent=spent)


def _attempt_interrupted(state: RunState, event: ev.AttemptInterrupted, at: datetime) -> RunState:
    before = state.steps.get(event.step_id)
    if before is not None and before.interrupted:
        raise IllegalTransition(f"{state.run_id}: {event.step_id} was interrupted twice")
    since = at if before is None or before.waiting_since is None else before.waiting_since
    step = _move(state, event.step_id, event, interrupted=True, retry_at=event.retry_at, waiting_since=since)
    step = replace(step, doubt=step.kind == "tool_call" and step.effect != "read_only", interrupted_at=at, looks=0)
    spent = state.spent if event.reason == "restart" else _closing(before or step, state.spent, at)
    spent = replace(spent, estimated_tokens=spent.estimated_tokens + step.reserved_tokens)
    return _with(state, step, spent=spent)


def _looked_up(state: RunState, event: ev.LookedUp, at: datetime) -> RunState:
    step = _move(state, event.step_id, event, retry_at=event.retry_at)
    if not step.interrupted:
        raise IllegalTransition(f"{state.run_id}: {event.step_id} was looked up while it is being performed")
    if event.answer == "found":
        step = replace(
            step, status="completed", result=event.result, source="look_up", ended_at=at, look_up="", interrupted=False
        )
    else:
        step = replace(step, look_up=event.answer, doubt=event.answer != "absent", looks=step.looks + 1)
    return _with(state, step)


def _step_unknown(state: RunState, event: ev.StepUnknown, at: datetime) -> RunState:
    before = state.steps.get(event.step_id)
    spent = _closing(before, state.spent, at) if before and before.status == "started" else state.spent
    return _with(state, _move(state, event.step_id, event, error=event.error), spent=spent)


def _step_denied(state: RunState, event: ev.StepDenied, at: datetime) -> RunState:
    step = _move(state, event.step_id, event, ended_at=at, error=ev.Trouble(kind=event.reason, message=event.message))
    return _bind(_with(state, step), event.step_id)


def _late_outcome(state: RunState, event: ev.LateOutcome, _at: datetime) -> RunState:
    return keeping(state, (), event.result)


def _unchanged(state: RunState, _event: ev.Event, _at: datetime) -> RunState:
    """A fact to be read in the log, on which nothing rests."""
    return state


# Approvals


def _approval_requested(state: RunState, event: ev.ApprovalRequested, at: datetime) -> RunState:
    if event.approval_id in state.approvals or event.approval_id in state.closed:
        raise IllegalTransition(f"{state.run_id}: {event.approval_id} was asked before")
    approval = Approval(
        approval_id=event.approval_id,
        kind=event.kind,
        digest=event.digest,
        subject=event.subject,
        choices=event.choices,
        requested_at=at,
        step_id=event.step_id,
        expires_at=event.expires_at,
    )
    state = replace(_put(state, approval), approval_count=state.approval_count + 1)
    if event.step_id is None or event.kind != "tool_call":
        return state
    return _with(state, _move(state, event.step_id, event, approval_id=event.approval_id))


def _approval(state: RunState, approval_id: str, event: ev.Event) -> Approval:
    approval = state.approvals.get(approval_id)
    if approval is None:
        raise IllegalTransition(f"{state.run_id}: {type(event).__name__} for {approval_id}, which does not exist")
    return approval


def _approval_decided(state: RunState, event: ev.ApprovalDecided, at: datetime) -> RunState:
    approval = _approval(state, event.approval_id, event)
    if approval.status != "open" or event.decision not in approval.choices:
        raise IllegalTransition(f"{state.run_id}: {event.decision} for {event.approval_id}, {approval.status}")
    status: ApprovalStatus = "answered"
    if event.decision == "deny":
        status = "denied"
    elif event.decision in {"allow", "did_not_happen"} and state.phase == "active":
        status = "allowed"  # consumed by the intent that names it; after a cancel there will be none
    approval = replace(
        approval,
        status=status,
        decision=event.decision,
        decided_at=at,
        decided_by=event.decided_by,
        comment=event.comment,
    )
    state = _put(state, approval)
    if event.decision == "stop":
        return replace(
            state, stopping=ev.Trouble(kind=approval.kind, message=f"A person answered stop. {event.comment}".rstrip())
        )
    if approval.kind == "unknown_outcome" and approval.step_id is not None:
        return _outcome_told(state, approval, event, at)
    if approval.kind == "budget" and event.decision == "extend":
        more = {k: state.extended.get(k, 0) + v for k, v in event.extend.items()}
        return replace(state, extended={**state.extended, **more})
    if approval.kind == "retry" and event.decision == "retry" and approval.step_id in state.steps:
        return _with(state, replace(state.steps[approval.step_id], retry_at=None, asking=False, waiting_since=None))
    return state


def _outcome_told(state: RunState, approval: Approval, event: ev.ApprovalDecided, at: datetime) -> RunState:
    """A person says what became of a step whose outcome was not known."""
    step = state.steps.get(approval.step_id or "")
    if step is None or step.status != "unknown":
        raise IllegalTransition(f"{state.run_id}: {approval.step_id} has no unknown outcome")
    told: dict[str, Any] = {"interrupted": False, "doubt": False, "error": None}
    told |= {"retry_at": None, "waiting_since": None, "asking": False}
    if event.decision == "happened":
        step = replace(step, status="completed", source="person", result=event.result, ended_at=at, **told)
    elif event.decision == "did_not_happen" and state.phase == "active":
        # The answer is also the approval of exactly one more attempt, with the same key.
        step = replace(step, status="not_started", approval_id=approval.approval_id, **told)
    elif event.decision == "did_not_happen":
        step = replace(step, status="withdrawn", ended_at=at, **told)
    else:
        step = replace(step, abandoned=True, ended_at=at)
    unresolved = tuple(i for i in state.unresolved if i != step.step_id or event.decision == "abandon")
    return _with(state, step, unresolved=unresolved)


def _approval_expired(state: RunState, event: ev.ApprovalExpired, at: datetime) -> RunState:
    approval = _approval(state, event.approval_id, event)
    return _put(state, _becomes(state, approval, event, closed_at=at, closed_by="expiry"))


def _approval_voided(state: RunState, event: ev.ApprovalVoided, at: datetime) -> RunState:
    approval = _approval(state, event.approval_id, event)
    approval = _becomes(state, approval, event, closed_at=at, closed_by="daemon", closed_why=event.reason)
    state = _put(state, approval)
    before = state.steps.get(approval.step_id or "")
    if before is not None and before.status == "not_started":
        step = replace(before, approval_id=None)
    else:
        step = _move(state, approval.step_id or "", event, approval_id=None)
    return _with(state, step)


# Requests and the run


def _request_accepted(state: RunState, event: ev.RequestAccepted, _at: datetime) -> RunState:
    if event.client_request_id in state.requests or state.step_request is not None:
        raise IllegalTransition(f"{state.run_id}: {event.client_request_id} is taken, or another step is being made")
    request = Request(method=event.method, fingerprint=event.fingerprint)
    return replace(
        state,
        requests={**state.requests, event.client_request_id: request},
        step_request=event.client_request_id,
        step_request_step=None,
    )


def _request_settled(state: RunState, event: ev.RequestSettled, _at: datetime) -> RunState:
    known = state.requests.get(event.client_request_id)
    if known is not None and (known.decision is not None or known.fingerprint != event.fingerprint):
        raise IllegalTransition(f"{state.run_id}: {event.client_request_id} was settled before")
    request = Request(method=event.method, fingerprint=event.fingerprint, decision=event.decision)
    state = replace(state, requests={**state.requests, event.client_request_id: request})
    if state.step_request == event.client_request_id:
        state = replace(state, step_request=None, step_request_step=None)
    return state


def _run_released(state: RunState, event: ev.RunReleased, _at: datetime) -> RunState:
    return replace(state, released_epoch=event.epoch)


def _cancel_requested(state: RunState, event: ev.CancelRequested, at: datetime) -> RunState:
    """No new step starts: what has not begun is withdrawn with its question. What may have acted is not."""
    waiting = {"not_started", "waiting_approval"}
    steps = {
        i: replace(s, status="withdrawn", ended_at=at) if s.status in waiting and not s.doubt else s
        for i, s in state.steps.items()
    }
    return replace(_withdraw(state, at, "cancel"), phase="cancelling", steps=steps, cancel_reason=event.reason)


def _withdraw(state: RunState, at: datetime, by: ClosedBy, *, keep: str = "unknown_outcome") -> RunState:
    closed: dict[str, Any] = {"status": "withdrawn", "closed_at": at, "closed_by": by}
    gone = {i: replace(a, **closed) for i, a in state.approvals.items() if a.kind != keep or a.status != "open"}
    live = {i: a for i, a in state.approvals.items() if i not in gone}
    return replace(state, approvals=live, closed={**state.closed, **gone})


def _run_cancelled(state: RunState, event: ev.RunCancelled, at: datetime) -> RunState:
    state = replace(_withdraw(state, at, "cancel"), steps=_ended_steps(state, at))
    return replace(state, phase="cancelled", unresolved=event.unresolved)


def _ended_steps(state: RunState, at: datetime) -> dict[str, Step]:
    """What the end of a run leaves of its steps: nothing that looks as if it were still to come."""
    gone = {"started", "not_started", "waiting_approval"}
    return {i: replace(s, status="withdrawn", ended_at=at) if s.status in gone else s for i, s in state.steps.items()}


def _run_completed(state: RunState, event: ev.RunCompleted, at: datetime) -> RunState:
    return replace(_withdraw(state, at, "end", keep=""), phase="completed", output=event.output)


def _run_failed(state: RunState, event: ev.RunFailed, at: datetime) -> RunState:
    state = replace(_withdraw(state, at, "end"), steps=_ended_steps(state, at))
    return replace(state, phase="failed", error=event.error, unresolved=event.unresolved)


_APPLY: Final = cast(
    "dict[type[ev.Event], Callable[[RunState, ev.Event, datetime], RunState]]",
    {
        ev.RequestAccepted: _request_accepted,
        ev.RequestSettled: _request_settled,
        ev.ModelCallStarted: _model_call_started,
        ev.ModelAnswered: _model_answered,
        ev.ToolStarted: _tool_started,
        ev.ToolCompleted: _tool_completed,
        ev.StepFailed: _step_failed,
        ev.AttemptFailed: _attempt_failed,
        ev.AttemptInterrupted: _attempt_interrupted,
        ev.LookedUp: _looked_up,
        ev.StepUnknown: _step_unknown,
        ev.StepDenied: _step_denied,
        ev.LateOutcome: _late_outcome,
        ev.ApprovalRequested: _approval_requested,
        ev.ApprovalDecided: _approval_decided,
        ev.ApprovalExpired: _approval_expired,
        ev.ApprovalVoided: _approval_voided,
        ev.RunReopened: _unchanged,
        ev.RunReleased: _run_released,
        ev.CancelRequested: _cancel_requested,
        ev.RunCancelled: _run_cancelled,
        ev.RunCompleted: _run_completed,
        ev.RunFailed: _run_failed,
        ev.RunDeleted: _unchanged,
    },
)
