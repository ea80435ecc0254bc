"""From what `start` names to what a run pins: names resolved, files read, tools listed.

Knows: the configuration, the catalog of models, the registry of tools. What comes out is content: nothing that is changed
afterwards, here or in a file, changes a run that has begun.
"""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from rpcagent import errors
from rpcagent.config import FileConfig
from rpcagent.ids import digest_of
from rpcagent.models.catalog import Catalog
from rpcagent.rpc import wire
from rpcagent.runs.commands import READ_ONLY_COMMANDS
from rpcagent.runs.definition import Budget, Definition, ModelSettings, Rule
from rpcagent.runs.effects import ToolSpec
from rpcagent.tools.registry import Registry

BUILT_IN_AGENT = "default"
INSTRUCTION_BYTES_MAX = 256 * 1024
DIGESTS_MOST = 256
"""Of present agents, kept at once: a caller may give each run a budget of its own."""


class Agents:
    """Makes definitions. Raises InvalidParams with the path of the member at fault, throughout."""

    def __init__(self, config: FileConfig, catalog: Catalog, registry: Registry) -> None:
        self._config = config
        self._catalog = catalog
        self._registry = registry
        self._present: dict[str, Definition | None] = {}
        self._digests: dict[tuple[str, Budget], str | None] = {}

    def present_rules(self) -> dict[str, tuple[Rule, ...]]:
        """Today's policy of every agent that the configuration names; a run goes by the stricter of it and its own."""
        return {name: self._rules(agent) for name, agent in self._config.agents.items()}

    async def define(self, params: wire.StartParams, workspace: str) -> Definition:
        """The definition of a new run. May start MCP servers, to learn their tools."""
        agent, name = self._agent(params.agent)
        return self._definition(
            agent,
            name,
            instructions=_instructions(agent, Path(workspace)),
            model=self._model(agent.model),
            tools=await self._tools(agent, workspace),
            budget=params.budget or agent.budget or self._config.budget or Budget(),
        )

    def current(self, pinned: Definition) -> str | None:
        """The digest of what the agent of the same name would pin now, with the budget that this run has, which its `start`
        may have set. None where the configuration alone does not tell: there is no agent of that name, none of its runs
        could begin, or what it pins depends on an MCP server or on other files too.

        Reads no file, asks nobody, and is worked out once for each agent and budget: it is shown in every `status`.
        """
        name, budget = pinned.agent, pinned.budget
        if (name, budget) not in self._digests:
            if len(self._digests) >= DIGESTS_MOST:
                self._digests.clear()
            present = self._by_itself(name)
            self._digests[name, budget] = None if present is None else digest_of(replace(present, budget=budget))
        return self._digests[name, budget]

    def _by_itself(self, name: str) -> Definition | None:
        """What `define` makes of the agent of this name with nothing but the configuration, where that is enough."""
        if name not in self._config.agents and name != BUILT_IN_AGENT:
            return None
        if name not in self._present:
            agent, _ = self._agent(name)
            self._present[name] = None if self._reads_files(agent) else self._tried(agent, name)
        return self._present[name]

    def _reads_files(self, agent: wire.AgentParams) -> bool:
        model = self._config.models.get(agent.model) if isinstance(agent.model, str) else agent.model
        return bool(agent.instruction_files) or (model is not None and model.script_file is not None)

    def _tried(self, agent: wire.AgentParams, name: str) -> Definition | None:
        try:
            return self._definition(
                agent,
                name,
                instructions=agent.instructions,
                model=self._model(agent.model),
                tools=self._registry.resolve(agent.tools),
                budget=Budget(),
            )
        except errors.InvalidParams:  # also where it has tools of an MCP server, which `resolve` does not know
            return None

    def _definition(
        self,
        agent: wire.AgentParams,
        name: str,
        *,
        instructions: str,
        model: ModelSettings,
        tools: tuple[ToolSpec, ...],
        budget: Budget,
    ) -> Definition:
        return Definition(
            agent=name,
            instructions=instructions,
            model=model,
            tools=tools,
            rules=self._rules(agent),
            budget=budget,
            read_only_commands=_commands(agent),
        )

    def _agent(self, named: str | wire.AgentParams) -> tuple[wire.AgentParams, str]:
        if not isinstance(named, str):
            return named, named.name
        agent = self._config.agents.get(named)
        if agent is not None:
            return agent, named
        if named == BUILT_IN_AGENT:
            return wire.AgentParams(name=BUILT_IN_AGENT), BUILT_IN_AGENT
        known = ", ".join(sorted({*self._config.agents, BUILT_IN_AGENT}))
        raise errors.InvalidParams(
            f"there is no agent named {named!r}; there are: {known}. An agent can also be sent as an object",
            path="$.agent",
        )

    def _rules(self, agent: wire.AgentParams) -> tuple[Rule, ...]:
        return wire.rules_of(agent.policy, "$.agent.policy") + wire.rules_of(self._config.policy, "$.policy")

    async def _tools(self, agent: wire.AgentParams, workspace: str) -> tuple[ToolSpec, ...]:
        servers = {**self._config.mcp, **agent.mcp}
        specs: list[ToolSpec] = []
        for place, tool in enumerate(agent.tools):
            path = f"$.agent.tools[{place}]"
            if not isinstance(tool, str) or not tool.startswith("mcp:"):
                specs += _new(self._registry.resolve([tool], "$.agent.tools", first=place), specs, path)
                continue
            name = tool.removeprefix("mcp:")
            if name not in servers:
                known = ", ".join(sorted(servers)) or "none"
                raise errors.InvalidParams(f"there is no MCP server named {name!r}; there are: {known}", path=path)
            offered = await self._registry.resolve_mcp(name, servers[name], workspace, f"$.agent.mcp.{name}")
            specs += _new(offered, specs, path)
        return tuple(specs)

    def _model(self, named: str | wire.ModelParams) -> ModelSettings:
        params = self._config.models.get(named) if isinstance(named, str) else named
        if params is None:
            known = ", ".join(sorted(self._config.models)) or "none"
            raise errors.InvalidParams(f"there is no model named {named!r}; there are: {known}", path="$.agent.model")
        settings = ModelSettings(
            provider=params.provider,
            name=params.model,
            script=_script(params),
            base_url=params.base_url,
            api_key_env=params.api_key_env,
            headers=params.headers,
            options=params.options,
            stream=params.stream,
            environment_proxy=params.environment_proxy,
            max_output_tokens=params.max_output_tokens,
            connect_timeout_ms=int(params.connect_timeout_s * 1000),
            first_token_timeout_ms=int(params.first_token_timeout_s * 1000),
            idle_timeout_ms=int(params.idle_timeout_s * 1000),
            timeout_ms=int(params.timeout_s * 1000),
            retry_for_ms=wire.duration_ms(params.retry_for, "$.agent.model.retryFor"),
        )
        self._catalog.check(settings, "$.agent.model")
        return settings


def _commands(agent: wire.AgentParams) -> tuple[str, ...]:
    """`default` stands for our own list, which the run pins like all else."""
    return tuple(
        command
        for named in agent.read_only_commands
        for command in (READ_ONLY_COMMANDS if named == "default" else (named,))
    )


def _new(found: tuple[ToolSpec, ...], known: list[ToolSpec], path: str) -> tuple[ToolSpec, ...]:
    names = {spec.name for spec in known}
    for spec in found:
        if spec.name in names:
            raise errors.InvalidParams(f"the tool {spec.name!r} is there twice", path=path)
    return found


def _script(params: wire.ModelParams) -> tuple[dict[str, object], ...]:
    if params.script_file is None:
        return params.script
    if params.script:
        raise errors.InvalidParams("give `script` or `scriptFile`, not both", path="$.agent.model.scriptFile")
    from rpcagent.models.scripted import load_script

    try:
        return load_script(Path(params.script_file))
    except errors.InvalidParams as error:
        raise errors.InvalidParams(error.message, path="$.agent.model.scriptFile") from None


def _instructions(agent: wire.AgentParams, workspace: Path) -> str:
    """The agent's own words, then the files of the workspace that it names and that exist, each under its name."""
    parts = [agent.instructions] if agent.instructions else []
    for place, name in enumerate(agent.instruction_files):
        path = f"$.agent.instructionFiles[{place}]"
        file = (workspace / name).resolve()
        if "\0" in name or not file.is_relative_to(workspace):
            raise errors.InvalidParams("a file inside the workspace", path=path)
        if not file.is_file():
            continue
        try:
            with file.open("rb") as stream:
                raw = stream.read(INSTRUCTION_BYTES_MAX + 1)
            text = raw.decode()
        except (OSError, UnicodeDecodeError) as error:
            raise errors.InvalidParams(f"{name} cannot be read ({type(error).__name__})", path=path) from None
        if len(raw) > INSTRUCTION_BYTES_MAX:
            raise errors.InvalidParams(f"{name} has more than {INSTRUCTION_BYTES_MAX} bytes", path=path)
        parts.append(f"# {name}\n\n{text}")
    return "\n\n".join(parts)
