"""The results of every method and the params of every notification, as types.

The daemon builds answers as plain values, for speed; these types are what the OpenRPC document is generated from, and the
tests convert every answer they see to them, so that neither can drift from the other.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

from msgspec import Struct

from rpcagent.rpc.wire import RunStatus


class Shown(Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True, forbid_unknown_fields=True):
    """Base of all results."""


class Trouble(Shown, frozen=True, kw_only=True):
    """`kind` is a stable word, `message` is for a person."""

    kind: str
    message: str = ""


class PlanStep(Shown, frozen=True, kw_only=True):
    step_id: str
    name: str
    action: Literal["reuse", "again", "look_up", "ask", "start"]


class RecoveryPlan(Shown, frozen=True, kw_only=True):
    """What `resume` would let happen. `plan_digest` binds a `resume` to exactly this."""

    steps: tuple[PlanStep, ...]
    plan_digest: str


class Run(Shown, frozen=True, kw_only=True):
    """A live view. `last_seq` is the number of the run's last event that it shows."""

    run_id: str
    status: RunStatus
    last_seq: int = 0
    client_request_id: str = ""
    namespace: str = ""
    agent: str = ""
    drive: Literal["auto", "manual"] = "auto"
    recovery: Literal["auto", "confirm", "manual"] = "auto"
    resume_required: bool = False
    cancelling: bool = False
    started_at: datetime | None = None
    updated_at: datetime | None = None
    open_approvals: tuple[str, ...] = ()
    workspace: str | None = None
    labels: dict[str, str] = {}
    retry_at: datetime | None = None
    output: str | None = None
    error: Trouble | None = None
    unresolved: tuple[str, ...] = ()
    recovery_plan: RecoveryPlan | None = None
    damaged: str | None = None


class Usage(Shown, frozen=True, kw_only=True):
    """Of one model call, as the provider counted it. Members that are zero are left out."""

    input_tokens: int = 0
    output_tokens: int = 0
    cost_usd: float = 0.0


class Step(Shown, frozen=True, kw_only=True):
    """`kind` gate: the run reached a question instead of an action."""

    step_id: str | None
    kind: Literal["model_call", "tool_call", "gate"]
    name: str
    status: Literal[
        "not_started", "waiting_approval", "started", "completed", "failed", "denied", "unknown", "withdrawn"
    ]
    attempt: int
    effect: Literal["read_only", "idempotent", "reconcilable", "at_most_once"] | None = None
    arguments: dict[str, Any] | None = None
    key: str | None = None
    request_hash: str | None = None
    approval_id: str | None = None
    interrupted: bool = False
    abandoned: bool = False
    look_up: Literal["absent", "pending", "unsure"] | None = None
    retry_at: datetime | None = None
    started_at: datetime | None = None
    ended_at: datetime | None = None
    result: dict[str, Any] | None = None
    error: Trouble | None = None
    source: Literal["tool", "look_up", "person"] | None = None
    usage: Usage | None = None


class Approval(Shown, frozen=True, kw_only=True):
    """An open question to a person. `digest` covers `subject`, and goes back with the answer. How it ended stands in the
    events."""

    approval_id: str
    run_id: str
    kind: Literal["tool_call", "unknown_outcome", "budget", "retry"]
    status: Literal["open"]
    digest: str
    subject: dict[str, Any]
    choices: tuple[str, ...]
    requested_at: datetime
    step_id: str | None = None
    expires_at: datetime | None = None


class Request(Shown, frozen=True, kw_only=True):
    """What became of a key: `unknown` was never accepted and may be sent."""

    state: Literal["settled", "in_progress", "unknown"]
    method: Literal["start", "step", "resume", "approve", "cancel"] | None = None
    result: dict[str, Any] | None = None


class Answer(Shown, frozen=True, kw_only=True):
    """What all mutating methods answer with, beside their decision. `replayed`: the decision is from the record."""

    run: Run
    replayed: bool


class StartResult(Answer, frozen=True, kw_only=True):
    run_id: str


class StepResult(Answer, frozen=True, kw_only=True):
    """`request` is there while the step is in progress: the same key joins it."""

    step: Step | None
    request: Request | None = None


class Recovery(Shown, frozen=True, kw_only=True):
    """`released` false: the run was not held, and nothing changed."""

    released: bool
    steps: tuple[PlanStep, ...] = ()
    plan_digest: str | None = None


class ResumeResult(Answer, frozen=True, kw_only=True):
    recovery: Recovery


class ApprovalDecision(Shown, frozen=True, kw_only=True):
    approval_id: str
    kind: Literal["tool_call", "unknown_outcome", "budget", "retry"]
    decision: str
    already: bool


class ApproveResult(Answer, frozen=True, kw_only=True):
    approval: ApprovalDecision


class CancelDecision(Shown, frozen=True, kw_only=True):
    already: bool


class CancelResult(Answer, frozen=True, kw_only=True):
    cancel: CancelDecision


class Spent(Shown, frozen=True, kw_only=True):
    steps: int = 0
    attempts: int = 0
    tokens: int = 0
    estimated_tokens: int = 0
    cost_usd: float = 0.0
    active_s: float = 0.0


class Limits(Shown, frozen=True, kw_only=True):
    """What is not there is not limited."""

    steps: int | None = None
    attempts: int | None = None
    repeats: int | None = None
    tokens: int | None = None
    cost_usd: float | None = None
    active_s: float | None = None


class Budget(Shown, frozen=True, kw_only=True):
    """`limits` with what a person has added. `near`: those of which four fifths or more are used."""

    spent: Spent
    limits: Limits
    near: tuple[str, ...] = ()


class Pinned(Shown, frozen=True, kw_only=True):
    """Digests: of the agent as the run pinned it, and of what the agent of the same name would pin now, with the same budget.
    `current` and `differs` are null where the daemon's configuration alone does not tell."""

    pinned: str
    context_version: int
    current: str | None
    differs: bool | None


class Attention(Shown, frozen=True, kw_only=True):
    """A run that a person must do something about."""

    run_id: str
    kind: Literal["tool_call", "unknown_outcome", "budget", "retry", "resume", "damaged"]
    since: datetime | None = None
    approval_id: str | None = None
    expires_at: datetime | None = None


class Journal(Shown, frozen=True, kw_only=True):
    """Counts of this process; `state` full: mutating calls get STORAGE until there is room again. `free_bytes`: what the
    disk had left when it was last looked at; `low`: so little that it may soon be full."""

    state: Literal["ok", "full", "poisoned"]
    errno: str | None
    syncs: int
    records: int
    bytes: int
    waiting: int
    free_bytes: int | None = None
    low: bool = False


class Checkpoints(Shown, frozen=True, kw_only=True):
    """`made` by this process, `took_ms` the last one; the log since then, in records and bytes of payload. `trouble`: why
    none can be made just now; the log is whole, and longer than it should be."""

    made: int
    took_ms: int
    tail_records: int
    tail_bytes: int
    trouble: str | None = None


class StatusResult(Shown, frozen=True, kw_only=True):
    """With an id: the run. Without: the daemon, and the runs that need someone. `input_truncated`: only the beginning of
    `input` is shown; the first event has all of it."""

    run: Run | None = None
    input: str | tuple[dict[str, Any], ...] | None = None
    input_truncated: bool = False
    steps: tuple[Step, ...] = ()
    approvals: tuple[Approval, ...] = ()
    budget: Budget | None = None
    definition: Pinned | None = None
    request: Request | None = None
    status: Literal["ok", "full", "poisoned", "closed"] | None = None
    version: str | None = None
    pid: int | None = None
    uptime_s: float | None = None
    store: str | None = None
    store_id: str | None = None
    epoch: int | None = None
    journal: Journal | None = None
    checkpoint: Checkpoints | None = None
    dropped_log_lines: int = 0
    counts: dict[str, int] = {}
    needs_attention: tuple[Attention, ...] = ()


class ListResult(Shown, frozen=True, kw_only=True):
    runs: tuple[Run, ...]
    approvals: tuple[Approval, ...] | None = None
    next_cursor: str | None = None


class EventShown(Shown, frozen=True, kw_only=True):
    """The params of `run/event`, and the elements of `events`. `event.type` names the kind of event."""

    run_id: str
    seq: int
    at: datetime
    event: dict[str, Any]


class EventsResult(Shown, frozen=True, kw_only=True):
    events: tuple[EventShown, ...]
    last_seq: int


class ServerInfo(Shown, frozen=True, kw_only=True):
    name: str
    version: str


class RecoverySummary(Shown, frozen=True, kw_only=True):
    """What this opening of the store found."""

    interrupted_runs: int
    damaged_runs: tuple[str, ...]
    dropped_tail_bytes: int


class InitializeResult(Shown, frozen=True, kw_only=True):
    protocol_version: int
    server_info: ServerInfo
    store_id: str
    epoch: int
    capabilities: dict[str, Any]
    limits: dict[str, int]
    recovery: RecoverySummary


class ShutdownResult(Shown, frozen=True, kw_only=True):
    """Empty: the process ends with exit code 0 after the grace time."""


class DeltaShown(Shown, frozen=True, kw_only=True):
    """A piece of a model's answer, or of a command's output, as it comes: shown and forgotten."""

    run_id: str
    step_id: str
    attempt: int
    text: str
    stream: Literal["answer", "output"] = "answer"


class LagShown(Shown, frozen=True, kw_only=True):
    """Events of the run after this one were not sent; ask `events` for them."""

    run_id: str
    after_seq: int


class WarningShown(Shown, frozen=True, kw_only=True):
    """`storage_poisoned`: the disk failed a sync; the process ends, and the next one decides by what it finds. `storage_low`:
    the disk may soon be full."""

    kind: Literal["storage_poisoned", "storage_low"]
    message: str


RESULTS: dict[str, type[Struct]] = {
    "initialize": InitializeResult,
    "start": StartResult,
    "step": StepResult,
    "resume": ResumeResult,
    "approve": ApproveResult,
    "status": StatusResult,
    "list": ListResult,
    "events": EventsResult,
    "cancel": CancelResult,
    "shutdown": ShutdownResult,
}

NOTIFICATIONS: dict[str, type[Struct]] = {
    "run/event": EventShown,
    "run/delta": DeltaShown,
    "run/lag": LagShown,
    "daemon/warning": WarningShown,
}
