"""What can happen to a run: a closed union of past-tense facts, and the commit that carries them.

An event that exists is valid, is never edited and never changes its meaning: a later version adds a type, or a field with
a default. An earlier one stops at what it does not know, by its name, and never skips it. Events carry no time of their
own; all events of one commit happened at the commit's `at`.
"""

from __future__ import annotations

import re
from datetime import datetime
from typing import Any, Final, Literal

import msgspec

from rpcagent.runs.definition import Definition, Drive, Recovery
from rpcagent.runs.effects import LookUpAnswer
from rpcagent.runs.upcast import upcast

ApprovalKind = Literal["tool_call", "unknown_outcome", "budget", "retry"]
Interruption = Literal["restart", "timeout", "connection_lost", "cancelled", "crashed"]
Source = Literal["tool", "look_up", "person"]
Method = Literal["start", "step", "resume", "approve", "cancel"]


def _tag(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


class Event(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    tag_field="type",
    tag=_tag,
    rename="camel",
    omit_defaults=True,
    forbid_unknown_fields=True,
):
    """Base of all events; `type` is the class name in snake_case."""


class Usage(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True, forbid_unknown_fields=True):
    """Tokens and dollars of one model call, as the provider counted them."""

    input_tokens: int = 0
    output_tokens: int = 0
    cost_usd: float = 0.0


class ToolCall(
    msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True, forbid_unknown_fields=True
):
    """One call that the model asked for. `problem` is set where it cannot be run as asked; the model is told.

    `provider_id` is data: it goes back to the model with the result and identifies nothing.
    """

    step_id: str
    tool: str
    arguments: dict[str, Any]
    provider_id: str = ""
    problem: str = ""


class Trouble(
    msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True, forbid_unknown_fields=True
):
    """Why an attempt or a run failed: a stable word, and a sentence for a person."""

    kind: str
    message: str = ""


# Requests


class RunStarted(Event, frozen=True, kw_only=True):
    """The first event of a run. `epoch` is the opening of the store in which it began."""

    client_request_id: str
    namespace: str
    fingerprint: str
    definition: Definition
    input: str | tuple[dict[str, Any], ...]
    epoch: int
    drive: Drive = "auto"
    recovery: Recovery = "auto"
    workspace: str | None = None
    labels: dict[str, str] = {}


class RequestAccepted(Event, frozen=True, kw_only=True):
    """The key is taken; its answer follows in a later commit. Only `step` needs the two."""

    client_request_id: str
    method: Method
    fingerprint: str


class RequestSettled(Event, frozen=True, kw_only=True):
    """The recorded half of the answer: equal for ever, whatever the run does later."""

    client_request_id: str
    method: Method
    fingerprint: str
    decision: dict[str, Any]


# Model calls


class ModelCallStarted(Event, frozen=True, kw_only=True):
    """Intent. `request_hash` covers the pinned definition and every message; `reserved_tokens` is spent until trued up."""

    step_id: str
    attempt: int
    request_hash: str
    reserved_tokens: int = 0


class ModelAnswered(Event, frozen=True, kw_only=True):
    """Outcome: the accepted answer. It is never asked for again. `problem`: it cannot be used as it is; the model is told
    so, and asked for another one."""

    step_id: str
    attempt: int
    text: str = ""
    calls: tuple[ToolCall, ...] = ()
    usage: Usage = Usage()
    stop: str = "stop"
    problem: str = ""


# Tool calls


class ToolStarted(Event, frozen=True, kw_only=True):
    """Intent. Durable before anything outside is touched; consumes the approval that it names."""

    step_id: str
    attempt: int
    request_hash: str
    key: str
    approval_id: str | None = None


class ToolCompleted(Event, frozen=True, kw_only=True):
    """Outcome, with the tool's result (an MCP tool result). `blobs`: digests of large outputs that it refers to."""

    step_id: str
    attempt: int
    result: dict[str, Any]
    source: Source = "tool"
    blobs: tuple[str, ...] = ()


class StepFailed(Event, frozen=True, kw_only=True):
    """Outcome: it is known not to have worked. The model is told."""

    step_id: str
    attempt: int
    error: Trouble


class AttemptFailed(Event, frozen=True, kw_only=True):
    """This try did nothing outside, and another may follow at `retry_at`, `wait_ms` after this commit. `ask`: only a person
    can end the trouble, and is asked at once."""

    step_id: str
    attempt: int
    error: Trouble
    retry_at: datetime
    wait_ms: int
    ask: bool = False


class AttemptInterrupted(Event, frozen=True, kw_only=True):
    """An intent whose outcome nobody will report any more. `retry_at`: it is not tried or looked up before."""

    step_id: str
    attempt: int
    reason: Interruption
    retry_at: datetime | None = None


class LookedUp(Event, frozen=True, kw_only=True):
    """What the outside said about an interrupted attempt. `pending`: asked again at `retry_at`."""

    step_id: str
    attempt: int
    answer: LookUpAnswer
    result: dict[str, Any] | None = None
    retry_at: datetime | None = None


class StepUnknown(Event, frozen=True, kw_only=True):
    """Whether the effect happened is not known, and nothing but a person can tell. `error`: why this attempt did nothing;
    it is an earlier one that may have acted."""

    step_id: str
    attempt: int
    error: Trouble | None = None


class StepDenied(Event, frozen=True, kw_only=True):
    """It will not run. `reason`: policy, person, expired, or invalid (the call could not be run as asked)."""

    step_id: str
    reason: Literal["policy", "person", "expired", "invalid"]
    message: str = ""


class LateOutcome(Event, frozen=True, kw_only=True):
    """An outcome that came after the step was decided otherwise: kept as evidence, changes nothing."""

    step_id: str
    attempt: int
    result: dict[str, Any] | None = None
    error: Trouble | None = None


# Approvals


class ApprovalRequested(Event, frozen=True, kw_only=True):
    """A durable question. `digest` covers `subject`, which is all that the person is shown."""

    approval_id: str
    kind: ApprovalKind
    digest: str
    subject: dict[str, Any]
    choices: tuple[str, ...]
    step_id: str | None = None
    expires_at: datetime | None = None


class ApprovalDecided(Event, frozen=True, kw_only=True):
    approval_id: str
    decision: str
    decided_by: str = ""
    comment: str = ""
    result: dict[str, Any] | None = None
    extend: dict[str, float] = {}


class ApprovalExpired(Event, frozen=True, kw_only=True):
    approval_id: str


class ApprovalVoided(Event, frozen=True, kw_only=True):
    """The allow no longer covers what would run: present policy is stricter than the one it was given under."""

    approval_id: str
    reason: str


# The run


class RunReopened(Event, frozen=True, kw_only=True):
    """A process opened the store while attempts of this run were in flight in an earlier one."""

    epoch: int


class RunReleased(Event, frozen=True, kw_only=True):
    """`resume` let the run go on in this opening of the store."""

    epoch: int
    plan_digest: str


class CancelRequested(Event, frozen=True, kw_only=True):
    reason: str = ""


class RunCancelled(Event, frozen=True, kw_only=True):
    """`unresolved`: steps whose outcome is not known; each can still be answered, as evidence."""

    unresolved: tuple[str, ...] = ()


class RunCompleted(Event, frozen=True, kw_only=True):
    output: str


class RunFailed(Event, frozen=True, kw_only=True):
    """`unresolved`: as in RunCancelled."""

    error: Trouble
    unresolved: tuple[str, ...] = ()


class RunDeleted(Event, frozen=True, kw_only=True):
    """The last thing that is said of a run. Its files go only after this is durable; its key is never taken again.
    `status`: how it had ended. `reason`: the rule that let it go."""

    status: str
    reason: str = ""


AnyEvent = (
    RunStarted | RequestAccepted | RequestSettled | ModelCallStarted | ModelAnswered | ToolStarted | ToolCompleted
    | StepFailed | AttemptFailed | AttemptInterrupted | LookedUp | StepUnknown | StepDenied | LateOutcome
    | ApprovalRequested | ApprovalDecided | ApprovalExpired | ApprovalVoided | RunReopened | RunReleased
    | CancelRequested | RunCancelled | RunCompleted | RunFailed | RunDeleted
)  # fmt: skip


class Commit(msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """All events of one change of one run, with the settled answer of the request that caused it: one log record.

    `seq` is the run's number of the first event; the others follow without a gap. In memory a commit is always of the
    present schema: its version is a member of the bytes alone.
    """

    seq: int
    at: datetime
    events: tuple[AnyEvent, ...]


VERSION: Final[int] = 1
"""The schema that is written, as `v`, the first member of a body; no `v` means 1. A new type of event or a new member needs
no new version: an earlier version stops at it by its name. Where what was there changes its form, this number rises, and
`UPCASTS` gets the function that raises what is stored."""


class WrittenLater(Exception):
    """These bytes mean something that this version does not know, so a later one wrote them. Never to be skipped: it may
    be an effect. `kind` and `found` are what was met: a `version`, an event `type`, a `member`, or a `value` of a closed
    set; `where` is its JSON path."""

    def __init__(self, kind: Literal["version", "type", "member", "value"], found: str, where: str) -> None:
        super().__init__(
            f"a later version of rpcagent wrote this record: it has the {kind} {found!r} at {where}, which this version "
            "does not know. Install the latest version; the record is kept as it is"
        )
        self.kind = kind
        self.found = found
        self.where = where


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Commit)
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`|Invalid value (.*)|Invalid enum value (.*)", re.DOTALL)
_AT = re.compile(r"(.*?)(?: - at `(.*)`)?", re.DOTALL)
_LONGEST = 80


def encode(commit: Commit) -> bytes:
    raw = _encoder.encode(commit)
    return raw if VERSION == 1 else b'{"v":%d,%b' % (VERSION, raw[1:])


def decode(raw: bytes | memoryview) -> Commit:
    """The commit, of whatever version its bytes are. Raises WrittenLater for what a later version wrote,
    msgspec.ValidationError for what no version wrote, msgspec.DecodeError for what is no JSON."""
    if VERSION == 1:
        try:
            return _decoder.decode(raw)
        except msgspec.ValidationError:
            pass  # its words are of the present schema; which schema it is comes first
    return _of_any_version(raw)


def _of_any_version(raw: bytes | memoryview) -> Commit:
    body = msgspec.json.decode(raw, type=dict[str, Any])
    version = body.pop("v", 1)
    if type(version) is not int or version < 1:
        raise msgspec.ValidationError("a version is a whole number from 1 - at `$.v`")
    if version > VERSION:
        raise WrittenLater("version", str(version), "$.v")
    try:
        return msgspec.convert(upcast(body, version, VERSION), Commit)
    except msgspec.ValidationError as error:
        raise _later(error) or error from None


def _later(error: msgspec.ValidationError) -> WrittenLater | None:
    """What of a later version the error tells of; None where the bytes are simply wrong."""
    said, where = _AT.fullmatch(str(error)).groups()  # type: ignore[union-attr]
    found = _UNKNOWN.fullmatch(said)
    if found is None:
        return None
    kinds: tuple[Literal["member", "type", "value"], ...] = ("member", "type", "value")
    kind, text = next((kind, text) for kind, text in zip(kinds, found.groups(), strict=True) if text is not None)
    if text[:1] == text[-1:] and text[:1] in {"'", '"'}:
        text = text[1:-1]
    return WrittenLater(kind, text[:_LONGEST], where or "$")
