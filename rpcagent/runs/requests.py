"""What a caller's request does to a run: accepted with events, joined, answered from the record, or refused. Pure.

Only what is accepted is recorded. A refusal either follows from state that cannot change back, or says `retryable`, and
the same key may be sent again. Same key and same params: the same decision for ever.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

import msgspec

from rpcagent import errors
from rpcagent.runs import events as ev
from rpcagent.runs.state import Approval, RunState, question_of
from rpcagent.runs.view import approval_view, recovery_plan, run_status


class StepCommand(msgspec.Struct, frozen=True, kw_only=True):
    """Perform the next step of a manual run."""


class ResumeCommand(msgspec.Struct, frozen=True, kw_only=True):
    """Let a held run go on. `plan_digest`: only if this is still what would happen."""

    plan_digest: str | None = None


class ApproveCommand(msgspec.Struct, frozen=True, kw_only=True):
    """Answer a question. `result` goes with `happened`, `extend` with `extend`."""

    approval_id: str
    digest: str
    decision: str
    result: dict[str, Any] | None = None
    extend: dict[str, float] = {}
    comment: str = ""
    decided_by: str = ""


class CancelCommand(msgspec.Struct, frozen=True, kw_only=True):
    reason: str = ""


Command = StepCommand | ResumeCommand | ApproveCommand | CancelCommand


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """One request for one run. `fingerprint` covers method and params, without the key and `waitMs`."""

    key: str
    method: ev.Method
    fingerprint: str
    command: Command


class Receipt(msgspec.Struct, frozen=True, kw_only=True):
    """`decision` None and no events: the key is in progress already, join it. `replayed`: answered from the record."""

    events: tuple[ev.AnyEvent, ...] = ()
    decision: dict[str, Any] | None = None
    replayed: bool = False


def receive(state: RunState, ask: Ask, epoch: int, now: datetime, *, busy: bool) -> Receipt:
    """Raises RpcAgentError where the request is refused; then nothing may be recorded."""
    known = state.requests.get(ask.key)
    if known is not None:
        check_fingerprint(known.method, known.fingerprint, ask.method, ask.fingerprint)
        return Receipt(decision=known.decision, replayed=known.decision is not None)
    match ask.command:
        case StepCommand():
            _check_step(state, epoch, busy=busy)
            accepted = ev.RequestAccepted(client_request_id=ask.key, method=ask.method, fingerprint=ask.fingerprint)
            return Receipt(events=(accepted,))
        case ResumeCommand(plan_digest=digest):
            return _resume(state, ask, digest, epoch)
        case ApproveCommand() as command:
            return _approve(state, ask, command, now, run_status(state, epoch, busy=busy))
        case CancelCommand(reason=reason):
            return _cancel(state, ask, reason)


def check_fingerprint(known_method: str, known: str, method: str, fingerprint: str) -> None:
    """Raises IdempotencyConflict where one key comes with two meanings."""
    if known != fingerprint:
        raise errors.IdempotencyConflict(
            "this clientRequestId was used with another method or other params; use a new one for a new request",
            method=known_method,
            fingerprints=[known, fingerprint],
            sent=method,
        )


def _settled(ask: Ask, decision: dict[str, Any], *events: ev.AnyEvent) -> Receipt:
    settled = ev.RequestSettled(
        client_request_id=ask.key, method=ask.method, fingerprint=ask.fingerprint, decision=decision
    )
    return Receipt(events=(*events, settled), decision=decision)


def _check_step(state: RunState, epoch: int, *, busy: bool) -> None:
    if state.ended or state.phase == "cancelling":
        status = run_status(state, epoch, busy=busy)
        raise errors.InvalidState(f"the run is {state.phase}: it takes no further step", status=status)
    if state.drive == "auto":
        status = run_status(state, epoch, busy=busy)
        raise errors.InvalidState("the run is in auto drive and advances by itself; poll `status`", status=status)
    if state.held(epoch):
        raise errors.InvalidState(
            "the run waits for `resume` after a restart", retryable=True, status="ready", resumeRequired=True
        )
    if busy or state.step_request is not None:
        raise errors.RunBusy("a step of this run is being performed; wait for it, or send its own key to join")
    question = question_of(state)
    if question is None:
        return
    shown = [approval_view(state.run_id, a) for a in state.open_approvals()]
    if question.kind == "unknown_outcome":
        raise errors.UnknownOutcome(
            "a step's outcome is not known: answer the question with `approve`", approvals=shown
        )
    raise errors.ApprovalRequired("the run waits for an answer: give it with `approve`", approvals=shown)


def _resume(state: RunState, ask: Ask, digest: str | None, epoch: int) -> Receipt:
    if state.ended:
        raise errors.InvalidState(f"the run is {state.phase}: there is nothing to resume", status=state.phase)
    if not state.held(epoch):
        return _settled(ask, {"recovery": {"released": False}})
    plan = recovery_plan(state)
    if digest is not None and digest != plan["planDigest"]:
        raise errors.StaleDigest(
            "the recovery plan is another one now: look at it in `status`", digest=plan["planDigest"]
        )
    released = ev.RunReleased(epoch=epoch, plan_digest=plan["planDigest"])
    return _settled(ask, {"recovery": {"released": True, **plan}}, released)


def _approve(state: RunState, ask: Ask, command: ApproveCommand, now: datetime, status: str) -> Receipt:
    approval = state.approval(command.approval_id)
    if approval is None:
        raise errors.NotFound("this run has no such approval", runId=state.run_id, approvalId=command.approval_id)
    if command.digest != approval.digest:
        raise errors.StaleDigest(
            "the digest is not that of this question: look at it in `status` before you answer", digest=approval.digest
        )
    live = approval.status in {"open", "allowed"}
    expired = live and approval.expires_at is not None and approval.expires_at <= now
    if expired or approval.status in {"expired", "voided", "withdrawn"}:
        # An allow that was given, and can no longer be used, is not reported as standing.
        how = "expired" if expired else approval.status
        closed = _closed(state, approval, expired=expired)
        raise errors.InvalidState(f"the question is {how} and takes no answer", status=status, approval=how, **closed)
    if approval.decision is not None:
        return _already(state, ask, approval, command.decision)
    _check_decision(approval, command)
    decided = ev.ApprovalDecided(
        approval_id=approval.approval_id,
        decision=command.decision,
        decided_by=command.decided_by,
        comment=command.comment,
        result=command.result,
        extend=command.extend,
    )
    return _settled(ask, {"approval": _decision(approval, command.decision, already=False)}, decided)


def _already(state: RunState, ask: Ask, approval: Approval, decision: str) -> Receipt:
    if decision != approval.decision:
        key = _settled_by(state, "approve", "approval", approvalId=approval.approval_id, already=False)
        raise errors.AlreadyDecided(
            f"the first answer stands: {approval.decision}",
            approvalId=approval.approval_id,
            decision=approval.decision,
            decidedAt=approval.decided_at,
            source="person",
            **_told(decidedBy=approval.decided_by, clientRequestId=key),
        )
    return _settled(ask, {"approval": _decision(approval, decision, already=True)})


def _closed(state: RunState, approval: Approval, *, expired: bool) -> dict[str, Any]:
    """What closed a question that nobody can answer any more, and when. `expired`: its time is over, and the daemon has
    not recorded that yet."""
    source = "expiry" if expired else approval.closed_by
    key = _settled_by(state, "cancel", "cancel", already=False) if source == "cancel" else ""
    return {
        "approvalId": approval.approval_id,
        "closedAt": approval.expires_at if expired else approval.closed_at,
        "source": source,
        **_told(reason=approval.closed_why, clientRequestId=key),
    }


def _settled_by(state: RunState, method: ev.Method, member: str, **told: Any) -> str:
    """The key of the request that was settled with these words in the `member` of its decision. Looked for among all
    requests of the run: only a refusal needs it."""
    for key, request in state.requests.items():
        if request.method == method and request.decision is not None:
            said = request.decision.get(member, {})
            if all(said.get(name) == value for name, value in told.items()):
                return key
    return ""


def _told(**members: str) -> dict[str, Any]:
    return {name: text for name, text in members.items() if text}


def _decision(approval: Approval, decision: str, *, already: bool) -> dict[str, Any]:
    return {"approvalId": approval.approval_id, "kind": approval.kind, "decision": decision, "already": already}


def _check_decision(approval: Approval, command: ApproveCommand) -> None:
    if command.decision not in approval.choices:
        choices = ", ".join(approval.choices)
        raise errors.InvalidParams(f"a {approval.kind} question takes one of: {choices}", path="$.decision")
    if command.result is not None and command.decision != "happened":
        raise errors.InvalidParams("goes only with the decision `happened`", path="$.result")
    if (command.decision == "extend") != bool(command.extend):
        raise errors.InvalidParams(
            "the decision `extend` takes at least one of steps, tokens, costUsd, activeS, attempts, repeats; no other does",
            path="$.extend",
        )


def _cancel(state: RunState, ask: Ask, reason: str) -> Receipt:
    if state.phase in {"cancelled", "cancelling"}:
        return _settled(ask, {"cancel": {"already": True}})
    if state.ended:
        raise errors.InvalidState(f"the run is {state.phase}: it cannot be cancelled", status=state.phase)
    return _settled(ask, {"cancel": {"already": False}}, ev.CancelRequested(reason=reason))
