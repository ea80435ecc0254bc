"""What a configuration may say about an MCP server, and the specs that its tools become.

Knows: the shape of the configuration, how the claims of a server about its own tools are weighed against it, and which
schemas and names cannot be offered. Does not know: processes, the protocol, or how a tool is called.

What a server says about itself is a claim. It may tighten a contract, never loosen one: whatever is not declared by the
configuration is `at_most_once`, a `readOnlyHint` counts only where the configuration trusts it, and a claim that
contradicts the configuration towards caution is refused, so that a person looks at it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from rpcagent.errors import InvalidParams
from rpcagent.ids import canonical_json, digest_of
from rpcagent.runs.effects import EffectClass, ToolSpec
from rpcagent.runs.instants import LONGEST_MS
from rpcagent.tools.reconcile import Conditions, check_conditions

START_MOST_S = 30.0
"""For a server to start and to list its tools; it does not count as time of a call."""
SETUP_MOST_S = 75.0
"""For all that may come before a call: an old process ends, a new one starts, its tools are listed."""
TIMEOUT_MOST_S = 3_600
MODEL_NAME_LENGTH = 64
"""Of `server__tool`, as the strictest providers want it."""
TOOL_LENGTH = 60
SCHEMA_BYTES = 64 * 1024
DESCRIPTION_LENGTH = 8 * 1024
KEY_HOLE = "key"
"""`{key}` in a look-up's arguments is the step's key, whatever the arguments of the call say."""

_T = TypeVar("_T")

_SERVER = re.compile(r"[A-Za-z0-9_-]{1,40}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_HOLE = re.compile(r"\{([A-Za-z_][A-Za-z0-9_-]*)\}")
_WHERE = re.compile(r" - at `\$?(.*)`\Z")
_ROOT_CHOICES = ("oneOf", "anyOf", "allOf", "not", "enum", "$ref")


class LookUpTool(Conditions, frozen=True, kw_only=True):
    """A question that reads only. `{name}` in its arguments is an argument of the call that it asks about."""

    tool: str
    arguments: dict[str, Any] = msgspec.field(default_factory=dict)


class ToolConfig(msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """A tool's contract, as the caller declares it. `hidden`: the model is not told of it."""

    effect: EffectClass | None = None
    lookup: LookUpTool | None = None
    key_argument: str | None = None
    settle_ms: int = 0
    key_ttl_ms: int | None = None
    timeout_ms: int | None = None
    hidden: bool = False


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """How a server is started, and what its tools promise. `${NAME}` in `env` is a variable of the daemon's."""

    command: tuple[str, ...]
    env: dict[str, str] = {}
    timeout_s: float = 60.0
    trust_read_only: bool = False
    tools: dict[str, Any] = {}


class Binding(
    msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True, forbid_unknown_fields=True
):
    """All that is needed to call a pinned tool with no configuration at hand.

    `tool` is the server's own name of it. `trusted`: it is read-only because its server said so.
    """

    server: str
    command: tuple[str, ...]
    tool: str
    schema_hash: str
    env: dict[str, str] = {}
    key_argument: str | None = None
    trusted: bool = False
    lookup: LookUpTool | None = None


class Skipped(msgspec.Struct, frozen=True, kw_only=True):
    """A tool that its server has and that cannot be offered."""

    tool: str
    reason: str


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """The tools of one or more servers as a run pins them, and those that were left out."""

    specs: tuple[ToolSpec, ...] = ()
    skipped: tuple[Skipped, ...] = ()


def server_config(name: str, value: object, path: str) -> ServerConfig:
    """Raises InvalidParams naming the member at fault: `$.agent.mcp.tickets.command`."""
    if not _SERVER.fullmatch(name):
        raise InvalidParams("a server's name is 1 to 40 letters, digits, `_` and `-`", path=path)
    config = _converted(value, ServerConfig, path)
    if not config.command or not all(config.command) or any("\0" in part for part in config.command):
        raise InvalidParams("a program and its arguments, none of them empty", path=f"{path}.command")
    for variable, text in config.env.items():
        if not _VARIABLE.fullmatch(variable) or "\0" in text:
            raise InvalidParams("this can be no variable of an environment", path=f"{path}.env.{variable}")
    if not 0 < config.timeout_s <= TIMEOUT_MOST_S:
        raise InvalidParams(f"above 0, at most {TIMEOUT_MOST_S}", path=f"{path}.timeoutS")
    tools = {
        tool: _tool_config(_converted(said, ToolConfig, f"{path}.tools.{tool}"), f"{path}.tools.{tool}")
        for tool, said in config.tools.items()
    }
    return msgspec.structs.replace(config, tools=tools)


def offer(name: str, config: ServerConfig, tools: Sequence[dict[str, Any]], path: str) -> Offer:
    """The specs of `tools`, as the server listed them. Raises InvalidParams where config and server do not agree."""
    by_name = {tool["name"]: tool for tool in tools}
    for declared in config.tools:
        if declared not in by_name:
            known = ", ".join(sorted(by_name)[:50]) or "none"
            raise InvalidParams(f"the server has no such tool; it has: {known}", path=f"{path}.tools.{declared}")
    specs: dict[str, ToolSpec] = {}
    skipped: list[Skipped] = []
    for tool in by_name.values():
        said = config.tools.get(tool["name"], ToolConfig())
        where = f"{path}.tools.{tool['name']}"
        problem = schema_problem(tool)
        if problem is not None:
            skipped.append(Skipped(tool=f"{name}.{tool['name']}", reason=problem))
            continue
        spec = _spec(name, config, tool, said, where)
        if said.lookup is not None:
            _check_look_up(said.lookup, tool, by_name, config, f"{where}.lookup")
        if spec.name in specs:
            skipped.append(Skipped(tool=f"{name}.{tool['name']}", reason=f"{spec.name} is taken"))
        elif not said.hidden:
            specs[spec.name] = spec
    return Offer(specs=tuple(specs.values()), skipped=tuple(skipped))


def schema_hash(tool: Mapping[str, Any]) -> str:
    """What is pinned, and compared before the first call after each start of the server."""
    return digest_of(tool.get("inputSchema"))


def says_read_only(tool: Mapping[str, Any]) -> bool:
    """Whether the server claims that the tool only reads, and claims nothing that contradicts it."""
    hints = _hints(tool)
    return hints.get("readOnlyHint") is True and hints.get("destructiveHint") is not True


def schema_problem(tool: Mapping[str, Any]) -> str | None:
    """Why providers would refuse the schema, and with it every request of the run; None: they would not."""
    schema = tool.get("inputSchema")
    if not isinstance(schema, dict) or schema.get("type") != "object":
        return "its input schema is not of type object"
    for choice in _ROOT_CHOICES:
        if choice in schema:
            return f"providers refuse {choice} at the root of a schema"
    if not isinstance(schema.get("properties", {}), dict):
        return "its properties are no object"
    if len(canonical_json(schema)) > SCHEMA_BYTES:
        return f"its schema has more than {SCHEMA_BYTES} bytes"
    return None


def tool_name(server: str, tool: str) -> str:
    """`server.tool`. A name that does not fit is made to, with a piece of its digest, so that no two become one."""
    room = min(TOOL_LENGTH, MODEL_NAME_LENGTH - 2 - len(server))
    fitting = re.sub(r"[^A-Za-z0-9_-]", "_", tool)
    if fitting != tool or not 0 < len(tool) <= room:
        digest = hashlib.sha256(tool.encode("utf-8", "surrogatepass")).hexdigest()[:8]
        fitting = f"{fitting[: room - 9]}_{digest}"
    return f"{server}.{fitting}"


def filled(value: Any, arguments: Mapping[str, Any], key: str) -> Any:
    """A look-up's arguments. A text that is nothing but `{name}` becomes the argument itself, of whatever type.

    Raises KeyError for an argument that the call did not have.
    """
    known = {**arguments, KEY_HOLE: key}
    match value:
        case str():
            whole = _HOLE.fullmatch(value)
            if whole:
                return known[whole.group(1)]
            return _HOLE.sub(lambda hole: str(known[hole.group(1)]), value)
        case list():
            return [filled(item, arguments, key) for item in value]
        case dict():
            return {name: filled(item, arguments, key) for name, item in value.items()}
        case _:
            return value


def _converted(value: object, kind: type[_T], path: str) -> _T:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        where = _WHERE.search(str(error))
        reason = str(error)[: where.start()] if where else str(error)
        raise InvalidParams(reason, path=path + (where.group(1) if where else "")) from None


def _tool_config(config: ToolConfig, path: str) -> ToolConfig:
    if config.effect == "reconcilable" and config.lookup is None:
        raise InvalidParams("a reconcilable tool has a look-up", path=f"{path}.lookup")
    if config.effect != "reconcilable" and config.lookup is not None:
        raise InvalidParams("only a reconcilable tool is looked up", path=f"{path}.lookup")
    if config.lookup is not None:
        check_conditions(config.lookup, f"{path}.lookup")
    if config.effect == "read_only" and config.key_argument is not None:
        raise InvalidParams("a tool that only reads gets no key", path=f"{path}.keyArgument")
    if config.effect != "idempotent" and config.key_ttl_ms is not None:
        raise InvalidParams("only an idempotent tool has keyTtlMs", path=f"{path}.keyTtlMs")
    if config.key_ttl_ms is not None and not 1 <= config.key_ttl_ms <= LONGEST_MS:
        raise InvalidParams(f"1 to {LONGEST_MS}", path=f"{path}.keyTtlMs")
    if not 0 <= config.settle_ms <= LONGEST_MS:
        raise InvalidParams(f"0 to {LONGEST_MS}", path=f"{path}.settleMs")
    if config.timeout_ms is not None and not 1 <= config.timeout_ms <= TIMEOUT_MOST_S * 1_000:
        raise InvalidParams(f"1 to {TIMEOUT_MOST_S * 1_000}", path=f"{path}.timeoutMs")
    return config


def _spec(server: str, config: ServerConfig, tool: dict[str, Any], said: ToolConfig, path: str) -> ToolSpec:
    trusted = said.effect is None and config.trust_read_only and says_read_only(tool)
    effect: EffectClass = said.effect or ("read_only" if trusted else "at_most_once")
    _check_claims(effect, tool, said, trusted, path)
    binding = Binding(
        server=server,
        command=config.command,
        env=config.env,
        tool=tool["name"],
        schema_hash=schema_hash(tool),
        key_argument=said.key_argument,
        trusted=trusted,
        lookup=said.lookup,
    )
    description = tool.get("description")
    return ToolSpec(
        name=tool_name(server, tool["name"]),
        description=description[:DESCRIPTION_LENGTH] if isinstance(description, str) else "",
        parameters=_parameters(tool["inputSchema"], said.key_argument, f"{path}.keyArgument"),
        effect=effect,
        key_ttl_ms=said.key_ttl_ms,
        settle_ms=said.settle_ms,
        timeout_ms=said.timeout_ms or max(1, round(config.timeout_s * 1_000)),
        binding={"mcp": msgspec.json.decode(msgspec.json.encode(binding))},  # as it is read back from the log
    )


def _check_claims(effect: EffectClass, tool: dict[str, Any], said: ToolConfig, trusted: bool, path: str) -> None:
    """Where a server is more careful about its tool than the configuration, one of the two is wrong."""
    hints = _hints(tool)
    if effect == "read_only" and not trusted:
        for hint, value in (("destructiveHint", True), ("readOnlyHint", False)):
            if hints.get(hint) is value:
                reason = f"read_only here, but the server says {hint}: {str(value).lower()}"
                raise InvalidParams(reason, path=f"{path}.effect")
    if effect == "idempotent" and said.key_argument is None and hints.get("idempotentHint") is False:
        reason = "idempotent here, but the server says idempotentHint: false; name its keyArgument, if it has one"
        raise InvalidParams(reason, path=f"{path}.effect")


def _hints(tool: Mapping[str, Any]) -> dict[str, Any]:
    hints = tool.get("annotations")
    return hints if isinstance(hints, dict) else {}


def _parameters(schema: dict[str, Any], key_argument: str | None, path: str) -> dict[str, Any]:
    """The schema that the model is told: without the argument that is ours to fill."""
    if key_argument is None:
        return schema
    properties = schema.get("properties", {})
    if key_argument not in properties:
        raise InvalidParams(f"{key_argument!r} is none of the tool's parameters", path=path)
    shown = {**schema, "properties": {name: part for name, part in properties.items() if name != key_argument}}
    if isinstance(schema.get("required"), list):
        shown["required"] = [name for name in schema["required"] if name != key_argument]
    return shown


def _check_look_up(
    lookup: LookUpTool, tool: dict[str, Any], tools: Mapping[str, Any], config: ServerConfig, path: str
) -> None:
    asked = tools.get(lookup.tool)
    if asked is None:
        raise InvalidParams(f"the server has no tool {lookup.tool!r}", path=f"{path}.tool")
    declared = config.tools.get(lookup.tool, ToolConfig()).effect
    if declared not in {None, "read_only"}:
        raise InvalidParams(f"a look-up reads only, and {lookup.tool!r} is {declared}", path=f"{path}.tool")
    _check_claims("read_only", asked, ToolConfig(), trusted=False, path=path)
    known = tool["inputSchema"].get("properties", {})
    for name in _holes(lookup.arguments):
        if name != KEY_HOLE and name not in known:
            raise InvalidParams(f"{{{name}}} is none of the tool's parameters", path=f"{path}.arguments")


def _holes(value: Any) -> list[str]:
    match value:
        case str():
            return _HOLE.findall(value)
        case list():
            return [name for item in value for name in _holes(item)]
        case dict():
            return [name for item in value.values() for name in _holes(item)]
        case _:
            return []
