"""Tools that a caller describes inline: the object's schema, its checks, and the spec that a run pins.

Knows: what an HTTP tool may say about itself. Does not know: how it is called. What it says about its effect is believed:
an inline configuration is the caller's own.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from rpcagent.errors import InvalidParams
from rpcagent.runs.effects import EffectClass, ToolName, ToolSpec
from rpcagent.runs.instants import LONGEST_MS
from rpcagent.tools.http import HttpCall, check_headers, check_url
from rpcagent.tools.reconcile import LookUpCall, check_conditions

TIMEOUT_MOST_MS = 3_600_000
MODEL_NAME_LENGTH = 64
"""Of `server__tool`, as the strictest providers want it."""

_WHERE = re.compile(r" - at `\$?(.*)`\Z")
_ROOT_CHOICES = ("oneOf", "anyOf", "allOf", "not", "enum", "$ref")


class InlineTool(msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    name: ToolName
    http: HttpCall
    description: str = ""
    parameters: dict[str, Any] = msgspec.field(default_factory=lambda: {"type": "object", "properties": {}})
    effect: EffectClass = "at_most_once"
    key_ttl_ms: int | None = None
    settle_ms: int = 0
    timeout_ms: int = 60_000
    lookup: LookUpCall | None = None


def inline_tool(value: dict[str, Any], path: str) -> ToolSpec:
    """The spec of the tool that `value` describes. Raises InvalidParams naming the member at fault."""
    try:
        tool = msgspec.convert(value, InlineTool)
    except msgspec.ValidationError as error:
        where = _WHERE.search(str(error))
        reason = str(error)[: where.start()] if where else str(error)
        if "regex" in reason:
            reason = "a name is `server.tool`, both of letters, digits, `_` and `-`"
        raise InvalidParams(reason, path=path + (where.group(1) if where else "")) from None
    if len(tool.name) + 1 > MODEL_NAME_LENGTH:
        raise InvalidParams(f"a tool's name has less than {MODEL_NAME_LENGTH} characters", path=f"{path}.name")
    _check_parameters(tool.parameters, f"{path}.parameters")
    check_url(tool.http.url, tool.parameters, f"{path}.http.url")
    check_headers(tool.http.headers, f"{path}.http.headers")
    _check_contract(tool, path)
    binding: dict[str, Any] = {"http": msgspec.to_builtins(tool.http)}
    if tool.lookup is not None:
        check_url(tool.lookup.url, tool.parameters, f"{path}.lookup.url")
        check_headers(tool.lookup.headers or {}, f"{path}.lookup.headers")
        check_conditions(tool.lookup, f"{path}.lookup")
        binding["lookup"] = msgspec.to_builtins(tool.lookup)
    return ToolSpec(
        name=tool.name,
        description=tool.description,
        parameters=tool.parameters,
        effect=tool.effect,
        key_ttl_ms=tool.key_ttl_ms,
        settle_ms=tool.settle_ms,
        timeout_ms=tool.timeout_ms,
        binding=binding,
    )


def _check_parameters(parameters: dict[str, Any], path: str) -> None:
    """A schema that one provider refuses would fail every request of the run, so it is refused here, by name."""
    if parameters.get("type") != "object":
        raise InvalidParams("parameters are a JSON schema of type object", path=f"{path}.type")
    for name in _ROOT_CHOICES:
        if name in parameters:
            raise InvalidParams("providers refuse this at the root of a schema", path=f"{path}.{name}")
    if not isinstance(parameters.get("properties", {}), dict):
        raise InvalidParams("properties are an object", path=f"{path}.properties")


def _check_contract(tool: InlineTool, path: str) -> None:
    if tool.effect == "reconcilable" and tool.lookup is None:
        raise InvalidParams("a reconcilable tool has a look-up", path=f"{path}.lookup")
    if tool.effect != "reconcilable" and tool.lookup is not None:
        raise InvalidParams("only a reconcilable tool is looked up", path=f"{path}.lookup")
    if tool.effect != "idempotent" and tool.key_ttl_ms is not None:
        raise InvalidParams("only an idempotent tool has keyTtlMs", path=f"{path}.keyTtlMs")
    if tool.key_ttl_ms is not None and not 1 <= tool.key_ttl_ms <= LONGEST_MS:
        raise InvalidParams(f"1 to {LONGEST_MS}", path=f"{path}.keyTtlMs")
    if not 0 <= tool.settle_ms <= LONGEST_MS:
        raise InvalidParams(f"0 to {LONGEST_MS}", path=f"{path}.settleMs")
    if not 1 <= tool.timeout_ms <= TIMEOUT_MOST_MS:
        raise InvalidParams(f"1 to {TIMEOUT_MOST_MS}", path=f"{path}.timeoutMs")
