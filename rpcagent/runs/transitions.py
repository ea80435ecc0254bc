"""Which event is legal where: three tables. A row that is missing is an illegal transition.

Knows: phases of a run, statuses of a step and of an approval, and nothing of what an event changes beside them; that is
`fold`. What becomes of a decided approval depends on its kind and decision and stands there too.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from rpcagent.runs import events as ev
from rpcagent.runs.state import ENDED, ApprovalStatus, StepStatus


class IllegalTransition(Exception):
    """The event cannot happen to a run in this state. The text names run, event and state; it is for our own log."""


# Which events a run may see, by phase. `step` requests may settle after the end, and an unresolved outcome of a cancelled
# or failed run may still be answered, as evidence.
_LIVE: Final = frozenset({"active", "cancelling"})
_ACTIVE: Final = frozenset({"active"})
_ANY: Final = frozenset({"active", "cancelling", "completed", "failed", "cancelled"})
RUN_TABLE: Final[dict[type[ev.Event], Collection[str]]] = {
    ev.RequestAccepted: _LIVE,
    ev.RequestSettled: _ANY,
    ev.ModelCallStarted: _ACTIVE,
    ev.ModelAnswered: _LIVE,
    ev.ToolStarted: _ACTIVE,
    ev.ToolCompleted: _LIVE,
    ev.StepFailed: _LIVE,
    ev.AttemptFailed: _LIVE,
    ev.AttemptInterrupted: _LIVE,
    ev.LookedUp: _LIVE,
    ev.StepUnknown: _LIVE,
    ev.StepDenied: _LIVE,
    ev.LateOutcome: _ANY,
    ev.ApprovalRequested: _LIVE,
    ev.ApprovalDecided: frozenset({"active", "cancelling", "cancelled", "failed"}),
    ev.ApprovalExpired: _LIVE,
    ev.ApprovalVoided: _LIVE,
    ev.RunReopened: _LIVE,
    ev.RunReleased: _LIVE,
    ev.CancelRequested: _ACTIVE,
    ev.RunCancelled: frozenset({"cancelling"}),
    ev.RunCompleted: _ACTIVE,
    ev.RunFailed: _ACTIVE,
    ev.RunDeleted: ENDED,
}

# What becomes of a step's status. An intent on a step that is `started` is a further attempt, legal only after the last
# one was interrupted.
STEP_TABLE: Final[dict[tuple[StepStatus, type[ev.Event]], StepStatus]] = {
    ("not_started", ev.ModelCallStarted): "started",
    ("not_started", ev.ToolStarted): "started",
    ("not_started", ev.ApprovalRequested): "waiting_approval",
    ("not_started", ev.StepDenied): "denied",
    ("not_started", ev.StepFailed): "failed",
    ("waiting_approval", ev.ToolStarted): "started",
    ("waiting_approval", ev.StepDenied): "denied",
    ("waiting_approval", ev.ApprovalVoided): "not_started",
    ("started", ev.ModelCallStarted): "started",
    ("started", ev.ToolStarted): "started",
    ("started", ev.ModelAnswered): "completed",
    ("started", ev.ToolCompleted): "completed",
    ("started", ev.StepFailed): "failed",
    ("started", ev.AttemptFailed): "not_started",
    ("started", ev.AttemptInterrupted): "started",
    ("started", ev.LookedUp): "started",
    ("started", ev.StepUnknown): "unknown",
    ("not_started", ev.StepUnknown): "unknown",
    ("waiting_approval", ev.StepUnknown): "unknown",
}

# What becomes of an approval's status; a decision's row depends on its kind and is in `_decided`.
APPROVAL_TABLE: Final[dict[tuple[ApprovalStatus, type[ev.Event]], ApprovalStatus]] = {
    ("allowed", ev.ToolStarted): "consumed",
    ("open", ev.ApprovalExpired): "expired",
    ("allowed", ev.ApprovalExpired): "expired",
    ("allowed", ev.ApprovalVoided): "voided",
    ("open", ev.ApprovalVoided): "voided",
}
