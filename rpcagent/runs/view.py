"""What a person or a client is shown of a run: JSON values made from its state, and the recovery plan. Pure."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from rpcagent.ids import digest_of
from rpcagent.policy import budgets
from rpcagent.runs.state import Approval, Request, RunState, Step, question_of

STEPS_SHOWN = 50


def run_status(state: RunState, epoch: int, *, busy: bool) -> str:
    """`ready`, `running`, `waiting`, or how it ended. `busy`: this process is performing something for it."""
    if state.ended:
        return state.phase
    if busy or state.phase == "cancelling":
        return "running"
    if state.held(epoch):
        return "ready"
    if question_of(state) is not None or retry_at(state) is not None:
        return "waiting"
    return "ready" if state.drive == "manual" and state.step_request is None else "running"


def retry_at(state: RunState) -> datetime | None:
    """When the clock lets the step that holds the run up go on, where nothing but the clock holds it up."""
    first = next(iter(state.open_steps()), None)
    if state.ended or first is None or first.retry_at is None or first.status == "waiting_approval":
        return None
    if question_of(state) is not None:
        return None  # a person holds it up, not the clock
    return first.retry_at


def run_view(state: RunState, epoch: int, *, busy: bool) -> dict[str, Any]:
    """The live half of every answer."""
    held = state.held(epoch)
    shown: dict[str, Any] = {
        "runId": state.run_id,
        "status": run_status(state, epoch, busy=busy),
        "lastSeq": state.last_seq,
        "clientRequestId": state.client_request_id,
        "namespace": state.namespace,
        "agent": state.definition.agent,
        "drive": state.drive,
        "recovery": state.recovery,
        "resumeRequired": held,
        "cancelling": state.phase == "cancelling",
        "startedAt": state.started_at,
        "updatedAt": state.last_at,
        "openApprovals": [a.approval_id for a in state.open_approvals()],
    }
    waits = retry_at(state)
    optional = {
        "workspace": state.workspace,
        "labels": state.labels or None,
        "retryAt": waits,
        "output": state.output,
        "error": state.error,
        "unresolved": state.unresolved or None,
        "recoveryPlan": recovery_plan(state) if held else None,
    }
    shown.update({name: value for name, value in optional.items() if value is not None})
    return shown


def status_view(state: RunState, epoch: int, *, busy: bool) -> dict[str, Any]:
    """Everything that `status` says about one run, but its request."""
    steps = (*state.recent, *state.steps.values())
    ordered = sorted(steps, key=lambda s: int(s.step_id.rsplit("_", 1)[1]))[-STEPS_SHOWN:]
    asked = {a.step_id: a.approval_id for a in state.open_approvals() if a.kind == "unknown_outcome"}
    return {
        "run": run_view(state, epoch, busy=busy),
        "input": state.input,
        "steps": [step_view(s) | _question(asked.get(s.step_id)) for s in ordered],
        "approvals": [approval_view(state.run_id, a) for a in state.open_approvals()],
        "budget": {"spent": state.spent, "limits": _limits(state)} | _near(state),
        "definition": {"pinned": state.definition_digest, "contextVersion": state.definition.context_version},
    }


def _question(approval_id: str | None) -> dict[str, Any]:
    """The open question that an unknown step waits for."""
    return {} if approval_id is None else {"approvalId": approval_id}


def _near(state: RunState) -> dict[str, list[str]]:
    if state.ended:
        return {}
    near = [{"cost_usd": "costUsd", "active_s": "activeS"}.get(name, name) for name in budgets.near(state)]
    return {"near": near} if near else {}


def _limits(state: RunState) -> dict[str, int | float]:
    """What is counted stays a whole number, also where a person has added to it."""
    counted = {
        "steps": state.limit("steps"),
        "attempts": state.limit("attempts"),
        "repeats": state.limit("repeats"),
        "tokens": state.limit("tokens"),
    }
    measured = {"costUsd": state.limit("cost_usd"), "activeS": state.limit("active_s")}
    shown: dict[str, int | float] = {name: int(value) for name, value in counted.items() if value is not None}
    return shown | {name: value for name, value in measured.items() if value is not None}


def step_view(step: Step) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "stepId": step.step_id,
        "kind": step.kind,
        "name": step.name,
        "status": step.status,
        "attempt": step.attempt,
    }
    if step.kind == "tool_call":
        shown["effect"] = step.effect
        shown["arguments"] = step.arguments
    optional = {
        "key": step.key,
        "requestHash": step.request_hash,
        "approvalId": step.approval_id,
        "interrupted": step.interrupted or None,
        "abandoned": step.abandoned or None,
        "lookUp": step.look_up or None,
        "retryAt": step.retry_at if step.status in {"not_started", "started"} else None,
        "startedAt": step.started_at,
        "endedAt": step.ended_at,
        "result": step.result,
        "error": step.error,
        "source": step.source,
        "usage": step.usage,
    }
    shown.update({name: value for name, value in optional.items() if value is not None})
    return shown


def approval_view(run_id: str, approval: Approval) -> dict[str, Any]:
    """An open question."""
    shown: dict[str, Any] = {
        "approvalId": approval.approval_id,
        "runId": run_id,
        "kind": approval.kind,
        "status": approval.status,
        "digest": approval.digest,
        "subject": approval.subject,
        "choices": approval.choices,
        "requestedAt": approval.requested_at,
    }
    optional = {"stepId": approval.step_id, "expiresAt": approval.expires_at}
    shown.update({name: value for name, value in optional.items() if value is not None})
    return shown


def request_view(request: Request | None) -> dict[str, Any]:
    """What became of a key: settled, in_progress, or unknown (never accepted, so it may be sent)."""
    if request is None:
        return {"state": "unknown"}
    if request.decision is None:
        return {"method": request.method, "state": "in_progress"}
    return {"method": request.method, "state": "settled", "result": request.decision}


def recovery_plan(state: RunState) -> dict[str, Any]:
    """What `resume` would let happen: each step of the present turn, and a digest over exactly that."""
    order = ((state.model_step,) if state.model_step else ()) + state.turn
    steps = [{"stepId": i, "name": state.steps[i].name, "action": _action(state, state.steps[i])} for i in order]
    return {"steps": steps, "planDigest": digest_of([state.run_id, steps])}


def _action(state: RunState, step: Step) -> str:
    """`reuse` what is recorded, do it `again`, `look_up` what became of it, `ask` a person, or begin it (`start`)."""
    if step.settled:
        return "reuse"
    if step.status in {"unknown", "waiting_approval"}:
        approval = state.approvals.get(step.approval_id or "")
        return "start" if approval is not None and approval.status == "allowed" else "ask"
    if step.status != "started":
        return "start"
    return "look_up" if step.effect == "reconcilable" and step.look_up != "absent" else "again"


def needs_attention(state: RunState, epoch: int) -> list[dict[str, Any]]:
    """What a person must do about the run, a line each; empty where nothing is asked."""
    lines: list[dict[str, Any]] = []
    for approval in state.open_approvals():
        line: dict[str, Any] = {
            "runId": state.run_id,
            "kind": approval.kind,
            "approvalId": approval.approval_id,
            "since": approval.requested_at,
        }
        if approval.expires_at is not None:
            line["expiresAt"] = approval.expires_at
        lines.append(line)
    if state.held(epoch):
        lines.append({"runId": state.run_id, "kind": "resume", "since": state.last_at})
    return lines
