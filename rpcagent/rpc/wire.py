"""The params and results of every method, as types. The OpenRPC document is generated from this file.

Unknown members are refused, so that a typing error never passes for a default. Members equal to their default do not
count in a request's fingerprint, so a retry over an upgrade that adds one is no conflict.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Annotated, Any, Literal

from msgspec import NODEFAULT, Meta, Struct, field
from msgspec.structs import FieldInfo, fields

from rpcagent import errors
from rpcagent.ids import digest_of, is_request_key, is_run_id
from rpcagent.runs.definition import Budget, Drive, Recovery, Rule, Verdict
from rpcagent.runs.effects import EffectClass
from rpcagent.runs.instants import LONGEST_MS

PROTOCOL_VERSION = 1
MOST_WAIT_MS = 600_000
STEP_WAIT_MS = 30_000
MOST_PAGE = 1_000
MOST_COUNTED = 1_000_000_000_000
MOST_MEASURED = 1_000_000_000.0
"""Of dollars and of seconds. Far beyond use, and far below where sums stop being numbers that JSON can hold."""

RunStatus = Literal["ready", "running", "waiting", "completed", "failed", "cancelled", "damaged"]
WaitMs = Annotated[int, Meta(ge=0, le=MOST_WAIT_MS)]
Seconds = Annotated[float, Meta(gt=0, le=86_400)]
Name = Annotated[str, Meta(min_length=1, max_length=128)]
Limit = Annotated[int, Meta(ge=1, le=MOST_PAGE)]
Counted = Annotated[int, Meta(ge=1, le=MOST_COUNTED)]
Measured = Annotated[float, Meta(gt=0, le=MOST_MEASURED)]

_DURATION = re.compile(r"(\d{1,9})(ms|s|m|h|d)")
_UNIT_MS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_APPROVAL = re.compile(r"apr_[a-z2-7]{26}_[1-9][0-9]{0,9}")
_NAMESPACE = re.compile(r"[A-Za-z0-9._-]{0,64}")


class Params(Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True, forbid_unknown_fields=True):
    """Base of all params."""


class Keyed(Params, frozen=True, kw_only=True):
    """`clientRequestId` is the caller's durable idempotency key: the same key and params get the same decision."""

    client_request_id: str


class Client(Params, frozen=True, kw_only=True):
    """Who calls, for the log."""

    name: Name
    version: str = ""


class Capabilities(Params, frozen=True, kw_only=True):
    """What is sent without being asked for: events of no run, of runs this connection has named, or of all."""

    events: Literal["none", "own", "all"] = "none"
    deltas: bool = False


class Expect(Params, frozen=True, kw_only=True):
    """Refuse to go on with another store, or with one that is older than what the caller has seen."""

    store_id: str | None = None
    min_epoch: int = 0


class InitializeParams(Params, frozen=True, kw_only=True):
    protocol_version: int
    client_info: Client | None = None
    process_id: int | None = None
    capabilities: Capabilities = Capabilities()
    expect: Expect = Expect()


class RuleParams(Params, frozen=True, kw_only=True):
    """As a rule of the definition; `expires` is a duration such as `90s`, `15m`, `24h`."""

    do: Verdict
    tool: str | None = None
    effect: EffectClass | None = None
    arguments: dict[str, str] = {}
    paths: tuple[str, ...] = ()
    expires: str | None = None


class PolicyParams(Params, frozen=True, kw_only=True):
    rules: tuple[RuleParams, ...] = ()


class ModelParams(Params, frozen=True, kw_only=True):
    """Which model answers. `openai` is any endpoint of that kind, at `base_url`; its key is named by `api_key_env`, never
    given. For `scripted`: the turns inline, or a file of them whose content the run pins. `options` go to the provider as
    they are. `retry_for`: how long trouble around it is retried before a person is asked."""

    provider: str = "scripted"
    model: str = "default"
    base_url: str = ""
    api_key_env: str = ""
    headers: dict[str, str] = {}
    options: dict[str, Any] = {}
    stream: bool = True
    environment_proxy: bool = False
    script: tuple[dict[str, Any], ...] = ()
    script_file: str | None = None
    max_output_tokens: Annotated[int, Meta(ge=0)] = 0
    connect_timeout_s: Seconds = 10.0
    first_token_timeout_s: Seconds = 120.0
    idle_timeout_s: Seconds = 60.0
    timeout_s: Seconds = 600.0
    retry_for: str = "15m"


class AgentParams(Params, frozen=True, kw_only=True):
    """An agent. A tool is the name of a built-in server (`files`, `shell`) or tool (`files.read`), `mcp:` and the name of an
    MCP server, or an HTTP tool of your own. `model` and the MCP servers are named in the configuration, or stand here.
    Of `instruction_files` (relative to the workspace) those that exist are read when a run starts. `read_only_commands`
    are beginnings of shell commands that only read; `default` among them stands for a list of our own."""

    name: Name = "inline"
    instructions: str = ""
    instruction_files: tuple[str, ...] = ()
    model: str | ModelParams = ModelParams()
    tools: tuple[str | dict[str, Any], ...] = ("files",)
    mcp: dict[str, dict[str, Any]] = {}
    policy: PolicyParams = PolicyParams()
    budget: Budget | None = None
    read_only_commands: tuple[str, ...] = ()


class StartParams(Keyed, frozen=True, kw_only=True):
    agent: str | AgentParams
    input: str | tuple[dict[str, Any], ...]
    namespace: str = ""
    from_: dict[str, Any] | None = field(default=None, name="from")
    drive: Drive = "auto"
    recovery: Recovery = "auto"
    durability: Literal["sync", "async", "exit"] = "sync"
    budget: Budget | None = None
    workspace: str | None = None
    labels: dict[str, str] = {}
    wait_ms: WaitMs = 0


class StepParams(Keyed, frozen=True, kw_only=True):
    run_id: str
    wait_ms: WaitMs = STEP_WAIT_MS


class ResumeParams(Keyed, frozen=True, kw_only=True):
    run_id: str
    plan_digest: str | None = None
    wait_ms: WaitMs = 0


class Extend(Params, frozen=True, kw_only=True):
    """What is added to the budget."""

    steps: Counted | None = None
    attempts: Counted | None = None
    repeats: Counted | None = None
    tokens: Counted | None = None
    cost_usd: Measured | None = None
    active_s: Measured | None = None

    def amounts(self) -> dict[str, float]:
        return {name: float(value) for name in self.__struct_fields__ if (value := getattr(self, name)) is not None}


class ApproveParams(Keyed, frozen=True, kw_only=True):
    run_id: str
    approval_id: str
    digest: str
    decision: Literal["allow", "deny", "happened", "did_not_happen", "abandon", "extend", "retry", "stop"]
    result: str | dict[str, Any] | None = None
    arguments: dict[str, Any] | None = None
    extend: Extend | None = None
    scope: Literal["call", "run"] = "call"
    comment: str = ""
    decided_by: str = ""


class CancelParams(Keyed, frozen=True, kw_only=True):
    run_id: str
    reason: str = ""
    compensate: bool = False


class StatusParams(Params, frozen=True, kw_only=True):
    """Neither id: health, counts, and the runs that need someone. A `start` key alone finds its run again."""

    run_id: str | None = None
    client_request_id: str | None = None
    namespace: str = ""


class ListParams(Params, frozen=True, kw_only=True):
    status: tuple[RunStatus, ...] = ()
    namespace: str | None = None
    agent: str | None = None
    open_approvals: bool = False
    cursor: str | None = None
    limit: Limit = 50


class EventsParams(Params, frozen=True, kw_only=True):
    run_id: str
    after_seq: Annotated[int, Meta(ge=0)] = 0
    limit: Limit = 100


class ShutdownParams(Params, frozen=True, kw_only=True):
    grace_ms: Annotated[int, Meta(ge=0, le=MOST_WAIT_MS)] | None = None


def fingerprint(method: str, params: Keyed) -> str:
    """What a key is bound to: the method and the params, without the key itself and how long the caller waits."""
    members = _significant(params)
    members.pop("clientRequestId", None)
    members.pop("waitMs", None)
    return digest_of([method, members])


def _significant(value: Any) -> Any:
    """Plain values without the members that equal their default. (`omit_defaults` is for size: it may leave some in.)"""
    if isinstance(value, Struct):
        members = ((info, getattr(value, info.name)) for info in _fields(type(value)))
        return {info.encode_name: _significant(member) for info, member in members if not _is_default(info, member)}
    if isinstance(value, list | tuple):
        return [_significant(item) for item in value]
    if isinstance(value, dict):
        return {name: _significant(item) for name, item in value.items()}
    return value


@cache
def _fields(struct: type[Struct]) -> tuple[FieldInfo, ...]:
    return fields(struct)


def _is_default(info: FieldInfo, value: Any) -> bool:
    default = info.default if info.default_factory is NODEFAULT else info.default_factory()
    return default is not NODEFAULT and type(value) is type(default) and bool(value == default)


def check_keyed(params: Keyed) -> None:
    """Raises InvalidParams for a key or a run id that is none. Such text never comes near a file name."""
    check_key(params.client_request_id)
    run_id = getattr(params, "run_id", None)
    if run_id is not None:
        check_run_id(run_id)
    approval_id = getattr(params, "approval_id", None)
    if approval_id is not None and not _APPROVAL.fullmatch(approval_id):
        raise errors.InvalidParams("not an approval id; take it from `status`", path="$.approvalId")
    check_namespace(getattr(params, "namespace", ""))


def check_status(params: StatusParams) -> None:
    """Raises InvalidParams for ids that are none, and for a namespace that nothing would be looked up in."""
    if params.run_id is not None:
        check_run_id(params.run_id)
    if params.client_request_id is not None:
        check_key(params.client_request_id)
    elif params.namespace:
        raise errors.InvalidParams("goes only with clientRequestId; `list` takes one alone", path="$.namespace")
    check_namespace(params.namespace)


def check_budgets(params: StartParams) -> None:
    """Raises InvalidParams for a limit that is beyond all use."""
    check_budget(params.budget, "$.budget")
    if isinstance(params.agent, AgentParams):
        check_budget(params.agent.budget, "$.agent.budget")


def check_budget(budget: Budget | None, path: str) -> None:
    for info in _fields(Budget):
        amount = getattr(budget, info.name, None)
        most = MOST_MEASURED if info.name in {"cost_usd", "active_s"} else MOST_COUNTED
        if amount is not None and not amount <= most:
            raise errors.InvalidParams(f"a limit is at most {most:.0f}", path=f"{path}.{info.encode_name}")


def check_key(key: str) -> None:
    if not is_request_key(key):
        raise errors.InvalidParams("1 to 128 characters of A-Z a-z 0-9 . _ : / -", path="$.clientRequestId")


def check_run_id(run_id: str) -> None:
    if not is_run_id(run_id):
        raise errors.InvalidParams("not a run id; take it from the answer of `start`, or from `list`", path="$.runId")


def check_namespace(namespace: str) -> None:
    if not _NAMESPACE.fullmatch(namespace):
        raise errors.InvalidParams("at most 64 characters of A-Z a-z 0-9 . _ -", path="$.namespace")


def duration_ms(text: str, path: str) -> int:
    """`90s`, `15m`, `24h`, `7d`, `250ms` in milliseconds. Raises InvalidParams."""
    found = _DURATION.fullmatch(text)
    if found is None:
        raise errors.InvalidParams("a duration is a whole number and ms, s, m, h or d, such as `24h`", path=path)
    duration = int(found[1]) * _UNIT_MS[found[2]]
    if duration > LONGEST_MS:
        raise errors.InvalidParams(f"a duration is at most {LONGEST_MS // _UNIT_MS['d']}d", path=path)
    return duration


def rules_of(policy: PolicyParams, path: str) -> tuple[Rule, ...]:
    """The rules as a run pins them. Raises InvalidParams with the path of the one at fault."""
    return tuple(
        Rule(
            do=rule.do,
            tool=rule.tool,
            effect=rule.effect,
            arguments=rule.arguments,
            paths=rule.paths,
            expires_ms=None if rule.expires is None else duration_ms(rule.expires, f"{path}.rules[{i}].expires"),
        )
        for i, rule in enumerate(policy.rules)
    )
