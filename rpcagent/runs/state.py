"""What a run is, after its events so far. Frozen data, and questions about it that need no rule and no clock.

Knows: what the log says. Does not know: which attempts this process is performing, what the present policy says, or what
time it is; those enter `decide` as arguments.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from rpcagent.runs.definition import Definition, Drive, Recovery
from rpcagent.runs.effects import EffectClass, ToolSpec
from rpcagent.runs.events import ApprovalKind, Method, Source, ToolCall, Trouble, Usage

StepKind = Literal["model_call", "tool_call"]
StepStatus = Literal[
    "not_started", "waiting_approval", "started", "completed", "failed", "denied", "unknown", "withdrawn"
]
ApprovalStatus = Literal["open", "allowed", "denied", "consumed", "answered", "expired", "voided", "withdrawn"]
ClosedBy = Literal["", "expiry", "cancel", "end", "daemon"]
"""What closed a question where no person did: its time, a cancel, the end of the run; or the daemon, which says why."""
RunPhase = Literal["active", "cancelling", "completed", "failed", "cancelled"]

ENDED: frozenset[RunPhase] = frozenset({"completed", "failed", "cancelled"})
RECENT_STEPS = 50


class Step(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """One unit of recovery. `interrupted`: its last attempt will not report any more. `abandoned`: a person closed the
    question about its unknown outcome without an answer. `look_up` is the last thing the outside said about it. `asking`:
    its trouble can only be ended by a person. `doubt`: an attempt was interrupted that may have acted outside, and nothing
    has told since, whatever became of later attempts."""

    step_id: str
    kind: StepKind
    name: str
    status: StepStatus = "not_started"
    attempt: int = 0
    effect: EffectClass = "read_only"
    arguments: dict[str, Any] = {}
    provider_id: str = ""
    problem: str = ""
    approval_id: str | None = None
    key: str | None = None
    request_hash: str | None = None
    interrupted: bool = False
    doubt: bool = False
    interrupted_at: datetime | None = None
    looks: int = 0
    abandoned: bool = False
    look_up: Literal["", "absent", "pending", "unsure"] = ""
    retry_at: datetime | None = None
    waiting_since: datetime | None = None
    first_started_at: datetime | None = None
    started_at: datetime | None = None
    ended_at: datetime | None = None
    result: dict[str, Any] | None = None
    error: Trouble | None = None
    source: Source | None = None
    asking: bool = False
    reserved_tokens: int = 0
    usage: Usage | None = None

    @property
    def settled(self) -> bool:
        """Nothing more will be done about it, and the model can be told how it ended."""
        return self.status in _SETTLED or (self.status == "unknown" and self.abandoned)


_SETTLED = frozenset({"completed", "failed", "denied", "withdrawn"})


class Approval(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A durable question to a person, of any kind, and its answer. `allowed` is decided and not yet consumed. `closed_at`
    and `closed_by`: it takes no answer any more, and an allow that was given is not to be used, for other reasons than a
    person's answer."""

    approval_id: str
    kind: ApprovalKind
    digest: str
    subject: dict[str, Any]
    choices: tuple[str, ...]
    requested_at: datetime
    step_id: str | None = None
    expires_at: datetime | None = None
    status: ApprovalStatus = "open"
    decision: str | None = None
    decided_at: datetime | None = None
    decided_by: str = ""
    comment: str = ""
    closed_at: datetime | None = None
    closed_by: ClosedBy = ""
    closed_why: str = ""


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """A key that was accepted. `decision` is None until it is settled."""

    method: Method
    fingerprint: str
    decision: dict[str, Any] | None = None


class Message(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """One element of a model's context. A `tool` message answers the call at the same place of the last `assistant` one."""

    role: Literal["user", "assistant", "tool"]
    content: str | tuple[dict[str, Any], ...] = ""
    calls: tuple[ToolCall, ...] = ()
    step_id: str = ""
    provider_id: str = ""
    result: dict[str, Any] | None = None


class Spent(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Inherited over restarts. Tokens are reserved before a call and trued up after it; a reservation that a crash
    orphaned stays spent and is counted in `estimated_tokens` too."""

    steps: int = 0
    attempts: int = 0
    tokens: int = 0
    estimated_tokens: int = 0
    cost_usd: float = 0.0
    active_s: float = 0.0


class RunState(msgspec.Struct, frozen=True, kw_only=True):
    """`steps` holds the steps of the present turn and those with an open unknown outcome; `recent` the last settled ones.

    `approvals` are live: open, or allowed and not consumed; `closed` are all others. `turn` lists the present turn's tool calls in the order given. `context_hash` chains over `messages`, so that a
    request's hash costs the same however long the history is. `repairs` counts the answers in a row that could not be used,
    `repeats` those in a row that asked for exactly the same calls (`last_calls` is their digest). `blobs` are the digests
    of all large outputs that its results refer to.
    """

    run_id: str
    client_request_id: str
    namespace: str
    definition: Definition
    definition_digest: str
    input: str | tuple[dict[str, Any], ...]
    drive: Drive
    recovery: Recovery
    workspace: str | None
    labels: dict[str, str]
    started_at: datetime
    last_at: datetime
    last_seq: int
    released_epoch: int
    phase: RunPhase = "active"
    messages: tuple[Message, ...] = ()
    context_hash: str = ""
    steps: dict[str, Step] = {}
    turn: tuple[str, ...] = ()
    model_step: str | None = None
    recent: tuple[Step, ...] = ()
    step_count: int = 0
    approvals: dict[str, Approval] = {}
    closed: dict[str, Approval] = {}
    approval_count: int = 0
    requests: dict[str, Request] = {}
    problem: str = ""
    repairs: int = 0
    repeats: int = 0
    last_calls: str = ""
    step_request: str | None = None
    step_request_step: str | None = None
    extended: dict[str, float] = {}
    stopping: Trouble | None = None
    spent: Spent = Spent()
    output: str | None = None
    error: Trouble | None = None
    cancel_reason: str = ""
    unresolved: tuple[str, ...] = ()
    blobs: tuple[str, ...] = ()

    @property
    def ended(self) -> bool:
        return self.phase in ENDED

    def held(self, epoch: int) -> bool:
        """Waits for `resume`: its recovery is not automatic, and nobody has released it in this opening of the store."""
        return self.recovery != "auto" and self.released_epoch != epoch and not self.ended

    def step(self, step_id: str) -> Step | None:
        return self.steps.get(step_id) or next((s for s in reversed(self.recent) if s.step_id == step_id), None)

    def spec_of(self, step: Step) -> ToolSpec | None:
        """The contract of the step's tool, with the effect class of this very call."""
        spec = self.definition.tool(step.name)
        return spec if spec is None or spec.effect == step.effect else replace(spec, effect=step.effect)

    def approval(self, approval_id: str) -> Approval | None:
        return self.approvals.get(approval_id) or self.closed.get(approval_id)

    def open_approvals(self) -> list[Approval]:
        return [a for a in self.approvals.values() if a.status == "open"]

    def open_steps(self) -> list[Step]:
        """Steps of the present turn that are not settled, in order; the model call, where it is one, first."""
        order = ((self.model_step,) if self.model_step else ()) + self.turn
        return [s for s in (self.steps[i] for i in order) if not s.settled]

    def limit(self, name: Literal["steps", "attempts", "repeats", "tokens", "cost_usd", "active_s"]) -> float | None:
        """A limit of the budget, with what a person added to it."""
        base: float | None = getattr(self.definition.budget, name)
        return None if base is None else base + self.extended.get(name, 0)


def question_of(state: RunState) -> Approval | None:
    """The open question that holds up the whole run, where there is one: any that is not about a single call, or the
    one that the next call in order waits for."""
    opened = state.open_approvals()
    for approval in opened:
        if approval.kind != "tool_call":
            return approval
    first = next(iter(state.open_steps()), None)
    if first is None or first.status != "waiting_approval":
        return None
    return next((a for a in opened if a.approval_id == first.approval_id), None)
