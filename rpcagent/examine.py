"""What a configuration comes to: for each agent its model, its tools, what may be done unasked, and what is wrong.

Knows: how to resolve agents just as `start` would, which means that MCP servers are started, asked for their tools and
stopped again; but not those of a file that nobody has trusted. Does not know: runs, or any value of a secret.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio
import msgspec

from rpcagent import config as configuration
from rpcagent import errors
from rpcagent.agents import BUILT_IN_AGENT, Agents
from rpcagent.config import ConfigError, FileConfig, Problem
from rpcagent.config_toml import Document, parse
from rpcagent.models.catalog import Catalog
from rpcagent.models.endpoint import OPENAI_KEY
from rpcagent.models.redaction import names_in
from rpcagent.policy.rules import verdict
from rpcagent.rpc import wire
from rpcagent.runs.definition import Budget, Definition, ModelSettings, Rule, Verdict
from rpcagent.runs.effects import EffectClass, ToolSpec
from rpcagent.tools.mcp_config import Skipped
from rpcagent.tools.registry import Registry

_STRICT: dict[Verdict, int] = {"allow": 0, "ask": 1, "deny": 2}
_NOT_ASKED = "its server was not started, because nobody has trusted this file"


class _Shown(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Base of what is shown, as JSON or as text."""


class ModelShown(_Shown, frozen=True, kw_only=True):
    """`keys`: the variables that it takes secrets from, and whether each is set. Their values are nobody's business."""

    name: str
    provider: str
    model: str
    base_url: str
    keys: dict[str, bool]


class ToolShown(_Shown, frozen=True, kw_only=True):
    """`policy` is what holds for any arguments (`expiresMs`: how long its question stands); `unless`, what rules about
    arguments or paths make of it."""

    name: str
    effect: EffectClass
    declared_by: str
    policy: Verdict
    by_default: bool
    expires_ms: int | None
    unless: list[str]


class AgentShown(_Shown, frozen=True, kw_only=True):
    name: str
    model: ModelShown
    budget: dict[str, float]
    tools: list[ToolShown]
    skipped: dict[str, str]
    warnings: list[str]


class RetentionShown(_Shown, frozen=True, kw_only=True, omit_defaults=True):
    """A rule by which ended runs are deleted: which ones it decides about, and which of those stay."""

    namespace: str | None = None
    label: str | None = None
    statuses: tuple[str, ...] = ()
    after_ms: int | None = None
    keep: int | None = None


class Report(_Shown, frozen=True, kw_only=True):
    """`starts`: the command of each MCP server. `retention`: the rules, the first that fits a run decides."""

    ok: bool
    file: str
    digest: str = ""
    trusted: bool = False
    starts: dict[str, list[str]] = {}
    agents: list[AgentShown] = []
    retention: list[RetentionShown] = []
    warnings: list[str] = []
    problems: list[Problem] = []


def examine(path: Path, workspace: Path, store: Path, *, trusted: bool, ask_servers: bool = True) -> Report:
    """The report about the file at `path`. Servers are asked only where it is trusted, now (`trusted`) or before."""
    try:
        raw = configuration.read(path)
    except ConfigError as error:
        return Report(ok=False, file=str(path), problems=list(error.problems))
    trusted = trusted or configuration.is_trusted(path, raw, store)
    seen: dict[str, Any] = {"file": str(path), "digest": configuration.digest_of(raw), "trusted": trusted}
    try:
        document = parse(raw, path)
    except ConfigError as error:
        return Report(ok=False, problems=list(error.problems), **seen)
    registry = _Asking(str(store), ask=trusted and ask_servers)
    look = _Look(document, registry, str(workspace))
    anyio.run(look.at_all)
    return Report(
        ok=not look.problems,
        starts=_commands(document.config),
        agents=look.agents,
        retention=_retention(document.config),
        warnings=_idle_rules(document, look.agents, look.specs) if not look.problems else [],
        problems=look.problems,
        **seen,
    )


class _Asking(Registry):
    """Keeps what servers have and cannot offer; or asks none, and says so."""

    def __init__(self, store: str, *, ask: bool) -> None:
        super().__init__(store=store)
        self._ask = ask
        self.skipped: list[Skipped] = []

    async def resolve_mcp(
        self, name: str, config: object, workspace: str | None, path: str, skipped: list[Skipped] | None = None
    ) -> tuple[ToolSpec, ...]:
        if self._ask:
            return await super().resolve_mcp(
                name, config, workspace, path, self.skipped if skipped is None else skipped
            )
        self.skipped.append(Skipped(tool=f"{name}.*", reason=_NOT_ASKED))
        return ()


class _Look:
    def __init__(self, document: Document, registry: _Asking, workspace: str) -> None:
        self.agents: list[AgentShown] = []
        self.specs: dict[str, ToolSpec] = {}
        self.problems: list[Problem] = []
        self._document = document
        self._config = document.config
        self._registry = registry
        self._workspace = workspace
        self._makes = Agents(document.config, Catalog(), registry)

    async def at_all(self) -> None:
        try:
            for name in self._config.agents or (BUILT_IN_AGENT,):
                await self._at(name)
            for name in self._config.models:
                await self._define(wire.AgentParams(model=name, tools=()), f"$.models.{name}", {})
        finally:
            await self._registry.aclose()

    async def _at(self, name: str) -> None:
        self._registry.skipped.clear()
        agent = self._config.agents.get(name, wire.AgentParams())
        model_at = f"$.models.{agent.model}" if isinstance(agent.model, str) else f"$.agents.{name}.model"
        own = {f"$.agent.mcp.{server}": f"$.agents.{name}.mcp.{server}" for server in agent.mcp}
        shared = {f"$.agent.mcp.{server}": f"$.mcp.{server}" for server in self._config.mcp if server not in agent.mcp}
        ways = {"$.agent.model": model_at, **own, **shared, "$.agent": f"$.agents.{name}"}
        definition = await self._define(name, f"$.agents.{name}", ways)
        if definition is None:
            return
        self.specs |= {spec.name: spec for spec in definition.tools}
        tools = [_tool(spec, definition.rules, _declared_by(spec, agent, self._config)) for spec in definition.tools]
        model = _model(agent.model if isinstance(agent.model, str) else "", definition.model, os.environ)
        self.agents.append(
            AgentShown(
                name=name,
                model=model,
                budget=_budget(definition.budget),
                tools=tools,
                skipped={skipped.tool: skipped.reason for skipped in self._registry.skipped},
                warnings=_warnings(definition, model, tools),
            )
        )

    async def _define(self, agent: str | wire.AgentParams, way: str, ways: Mapping[str, str]) -> Definition | None:
        """The definition, or a problem at its line. `ways` leads from the paths of `start` to those of the file."""
        params = wire.StartParams(client_request_id="check", agent=agent, input="")
        try:
            return await self._makes.define(params, self._workspace)
        except errors.InvalidParams as error:
            path = str(error.details["path"])
            start = next(
                (start for start in ways if path == start or path.startswith((start + ".", start + "["))), None
            )
            moved = ways[start] + path[len(start) :] if start is not None else way
            problem = self._document.translated(errors.InvalidParams(str(error.details["reason"]), path=moved))
        except errors.Incompatible as error:
            server = ways.get(f"$.agent.mcp.{error.details.get('server')}", way)
            problem = self._document.translated(errors.InvalidParams(error.message, path=server))
        if problem not in self.problems:
            self.problems.append(problem)
        return None


def _model(name: str, settings: ModelSettings, environ: Mapping[str, str]) -> ModelShown:
    keys = [settings.api_key_env] if settings.api_key_env else []
    if settings.provider == "openai" and not settings.base_url and not keys:
        keys = [OPENAI_KEY]
    keys += [key for key in names_in(settings.headers.values()) if key not in keys]
    return ModelShown(
        name=name,
        provider=settings.provider,
        model=settings.name,
        base_url=settings.base_url,
        keys={key: bool(environ.get(key)) for key in keys},
    )


def _tool(spec: ToolSpec, rules: tuple[Rule, ...], declared_by: str) -> ToolShown:
    plain = tuple(rule for rule in rules if not (rule.arguments or rule.paths))
    policy, by = verdict(plain, spec, {})
    unless = [
        f"{rule.do} where {_conditions(rule)}"
        for rule in rules
        if rule not in plain and _is_for(rule, spec) and (by is None or _STRICT[rule.do] > _STRICT[policy])
    ]
    return ToolShown(
        name=spec.name,
        effect=spec.effect,
        declared_by=declared_by,
        policy=policy,
        by_default=by is None,
        expires_ms=None if by is None else by.expires_ms,
        unless=unless,
    )


def _is_for(rule: Rule, spec: ToolSpec) -> bool:
    """Whether the rule can ever hold for a call of this tool."""
    return verdict((msgspec.structs.replace(rule, arguments={}, paths=()),), spec, {})[1] is not None


def _conditions(rule: Rule) -> str:
    parts = [f"{name} is like {pattern!r}" for name, pattern in rule.arguments.items()]
    if rule.paths:
        parts.append("path is like " + " or ".join(repr(pattern) for pattern in rule.paths))
    return " and ".join(parts)


def _declared_by(spec: ToolSpec, agent: wire.AgentParams, config: FileConfig) -> str:
    if "http" in spec.binding:
        said = next(tool for tool in agent.tools if isinstance(tool, dict) and tool.get("name") == spec.name)
        return "this file" if "effect" in said else "nobody"
    if "mcp" not in spec.binding:
        return "built in"
    bound = spec.binding["mcp"]
    server = {**config.mcp, **agent.mcp}[bound["server"]]
    if "effect" in server.get("tools", {}).get(bound["tool"], {}):
        return "this file"
    return "its server, trusted" if spec.effect == "read_only" else "nobody"


def _budget(budget: Budget) -> dict[str, float]:
    return {name: amount for name in budget.__struct_fields__ if (amount := getattr(budget, name)) is not None}


def _warnings(definition: Definition, model: ModelShown, tools: list[ToolShown]) -> list[str]:
    found: list[str] = []
    if model.provider == "scripted" and not definition.model.script:
        found.append("it has no model: it answers with a built-in text; name one with `model`")
    found += [
        f"{key} is not set here; where `serve` runs it must be" for key, is_set in model.keys.items() if not is_set
    ]
    if model.provider != "scripted" and definition.budget.tokens is None and definition.budget.cost_usd is None:
        found.append("no limit of tokens or cost: set `tokens` or `cost_usd` under [budget]")
    found += [
        f"{tool.name} acts unasked and is at_most_once: when it is interrupted, only a person can tell whether it "
        "happened. Declare its effect, or let policy ask"
        for tool in tools
        if tool.policy == "allow" and tool.effect == "at_most_once"
    ]
    if not tools:
        found.append("it has no tools")
    return found


def _idle_rules(document: Document, agents: list[AgentShown], specs: Mapping[str, ToolSpec]) -> list[str]:
    """Rules of no use: what they name is no tool of any agent. Where tools are not known, nothing is said."""
    if any(_NOT_ASKED in agent.skipped.values() for agent in agents):
        return []
    return [
        str(document.at(("policy", "rules", place), "this is about no tool that any agent has"))
        for place, rule in enumerate(wire.rules_of(document.config.policy, "$.policy"))
        if not any(_is_for(rule, spec) for spec in specs.values())
    ]


def _retention(config: FileConfig) -> list[RetentionShown]:
    rules = configuration.retention_of(config.retention).rules
    return [RetentionShown(**{name: getattr(rule, name) for name in rule.__struct_fields__}) for rule in rules]


def _commands(config: FileConfig) -> dict[str, list[str]]:
    servers: dict[str, Any] = dict(config.mcp)
    for agent in config.agents.values():
        servers |= agent.mcp
    return {name: [str(part) for part in server["command"]] for name, server in servers.items()}
