"""Durable questions: what each shows to the person, and the digest that binds the answer to exactly that."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import msgspec

from rpcagent.ids import approval_id, digest_of
from rpcagent.policy.budgets import Limit
from rpcagent.runs.definition import Rule
from rpcagent.runs.events import ApprovalKind, ApprovalRequested
from rpcagent.runs.instants import after
from rpcagent.runs.state import RunState, Step

CHOICES: dict[ApprovalKind, tuple[str, ...]] = {
    "tool_call": ("allow", "deny"),
    "unknown_outcome": ("happened", "did_not_happen", "abandon"),
    "budget": ("extend", "stop"),
    "retry": ("retry", "stop"),
}


def tool_call(state: RunState, step: Step, rule: Rule | None, now: datetime, ahead: int = 0) -> ApprovalRequested:
    """May this call run? `ahead`: how many questions are opened before it in the same commit."""
    expires = None if rule is None or rule.expires_ms is None else after(now, rule.expires_ms)
    return _ask(state, "tool_call", _call(state, step), step.step_id, ahead, expires)


def unknown_outcome(state: RunState, step: Step) -> ApprovalRequested:
    """Did it happen? Never expires, and nothing but an answer closes it."""
    subject = _call(state, step) | {"attempt": step.attempt, "key": step.key, "startedAt": step.started_at}
    if step.error is not None:
        subject["error"] = step.error
    return _ask(state, "unknown_outcome", subject, step.step_id)


def budget(state: RunState, limit: Limit) -> ApprovalRequested:
    return _ask(state, "budget", {"limit": limit, "value": state.limit(limit), "spent": state.spent})


def retry(state: RunState, step: Step) -> ApprovalRequested:
    subject = {"step": step.name, "attempt": step.attempt, "error": step.error, "since": step.waiting_since}
    return _ask(state, "retry", subject, step.step_id)


def _call(state: RunState, step: Step) -> dict[str, Any]:
    return {
        "tool": step.name,
        "effect": step.effect,
        "arguments": step.arguments,
        "workspace": state.workspace,
    }


def _ask(
    state: RunState,
    kind: ApprovalKind,
    subject: dict[str, Any],
    step_id: str | None = None,
    ahead: int = 0,
    expires_at: datetime | None = None,
) -> ApprovalRequested:
    shown: dict[str, Any] = msgspec.to_builtins(subject)
    ident = approval_id(state.run_id, state.approval_count + 1 + ahead)
    digest = digest_of([ident, kind, state.run_id, step_id, shown])
    return ApprovalRequested(
        approval_id=ident,
        kind=kind,
        digest=digest,
        subject=shown,
        choices=CHOICES[kind],
        step_id=step_id,
        expires_at=expires_at,
    )
