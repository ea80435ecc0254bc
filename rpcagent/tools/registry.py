"""All tools behind one port: who performs a call, for how long, and what leaves it.

Knows: which adapter a spec belongs to, the time limit of a call, and that whatever goes wrong in an adapter is an outcome
of the call, never an exception. Does not know: what any adapter does, and nothing of runs or policy.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import anyio
import msgspec

from rpcagent.errors import InvalidParams
from rpcagent.runs.effects import ToolSpec
from rpcagent.runs.events import Interruption, Trouble
from rpcagent.runs.outcomes import Failed, LookUp, Lost, NotDone, ToolReply
from rpcagent.runs.ports import ToolRequest
from rpcagent.tools.builtin import BUILTIN
from rpcagent.tools.files import Files
from rpcagent.tools.http import Http
from rpcagent.tools.inline import inline_tool
from rpcagent.tools.reconcile import LookUpCall, judge
from rpcagent.tools.results import NotPlain, normalised
from rpcagent.tools.shell import Shell
from rpcagent.tools.turns import Turns

if TYPE_CHECKING:
    from rpcagent.tools.mcp import McpServers
    from rpcagent.tools.mcp_config import Skipped


class Adapter(Protocol):
    """What performs the tools of one server. It may raise; the registry makes an outcome of it."""

    async def call(self, request: ToolRequest) -> ToolReply | Failed | NotDone | Lost: ...


class Registry:
    """The `Tools` port over the built-in servers, inline HTTP tools, and the `servers` that the caller adds by name.

    `store` is the daemon's own directory, which no tool may touch. `on_fault` gets every exception that an adapter raised,
    with the request; the run is told the exception's class name only.
    """

    def __init__(
        self,
        store: str | None = None,
        on_fault: Callable[[Exception, ToolRequest], None] | None = None,
        servers: Mapping[str, Adapter] | None = None,
        http: Http | None = None,
        mcp: McpServers | None = None,
        on_note: Callable[[str, str], None] | None = None,
        turns: Turns | None = None,
    ) -> None:
        self._servers: dict[str, Adapter] = {"files": Files(store), "shell": Shell(store), **(servers or {})}
        self._http = http or Http()
        self._mcp = mcp
        self._on_note = on_note
        self._turns = turns or Turns()
        self._on_fault = on_fault

    def resolve(
        self, tools: Sequence[str | dict[str, Any]], path: str = "$.agent.tools", first: int = 0
    ) -> tuple[ToolSpec, ...]:
        """The specs that a run pins. A text names a built-in server (`files`) or tool (`files.read`), an object is an
        inline HTTP tool. Raises InvalidParams naming the member at fault: `$.agent.tools[1].lookup.found`;
        `first` is the place of the first one."""
        specs: dict[str, ToolSpec] = {}
        for place, tool in enumerate(tools, first):
            where = f"{path}[{place}]"
            for spec in self._named(tool, where) if isinstance(tool, str) else [self._inline(tool, where)]:
                if spec.name in specs:
                    raise InvalidParams(f"the tool {spec.name!r} is there twice", path=where)
                specs[spec.name] = spec
        return tuple(specs.values())

    async def resolve_mcp(
        self, name: str, config: object, workspace: str | None, path: str, skipped: list[Skipped] | None = None
    ) -> tuple[ToolSpec, ...]:
        """The same for the tools of one MCP server, which is started to be asked. `skipped` gets those that it has and
        that cannot be offered. Raises InvalidParams below `path`; Incompatible where the server cannot be asked now."""
        if name in self._servers:
            raise InvalidParams(f"{name!r} is the name of a built-in server", path=path)
        offer = await self._mcp_servers().offer(name, config, workspace, path)
        for left_out in offer.skipped:
            if self._on_note is not None:
                self._on_note(name, f"the tool {left_out.tool} is left out: {left_out.reason}")
        if skipped is not None:
            skipped += offer.skipped
        return offer.specs

    async def call(self, request: ToolRequest) -> ToolReply | Failed | NotDone | Lost:
        """Performs once, for at most `timeout_ms` from its turn on. Results are plain JSON of a bounded size."""
        adapter = self._adapter(request.spec)
        if adapter is None:
            message = f"This daemon cannot reach {request.spec.name} any more."
            return Failed(error=Trouble(kind="incompatible", message=message))
        outcome: ToolReply | Failed | NotDone | Lost | None = None
        try:
            async with self._turns.of(request.spec):
                with anyio.move_on_after(_limit_s(request.spec)):
                    outcome = await adapter.call(request)
            if outcome is None:
                return _gone(request, "timeout", f"No answer within {request.spec.timeout_ms} ms.")
            return (
                ToolReply(result=normalised(outcome.result), blobs=outcome.blobs)
                if isinstance(outcome, ToolReply)
                else outcome
            )
        except NotPlain as error:
            self._fault(error, request)
            return _gone(request, "crashed", f"The tool's result cannot be recorded: {error}.")
        except Exception as error:  # noqa: BLE001  (no foreign exception crosses a port)
            self._fault(error, request)
            return _gone(request, "crashed", f"The tool raised {type(error).__name__}.")

    async def look_up(self, request: ToolRequest) -> LookUp:
        """What the tool's look-up says about an earlier attempt; `unsure` where it has none, failed or took too long."""
        binding = request.spec.binding
        if "mcp" not in binding and ("http" not in binding or "lookup" not in binding):
            return LookUp(answer="unsure")
        return await self._bounded(request, lambda: self._look_up(request))

    async def aclose(self) -> None:
        """Closes what the adapters hold open, and ends the servers that they started."""
        try:
            await self._http.aclose()
        finally:
            if self._mcp is not None:
                await self._mcp.aclose()

    async def _look_up(self, request: ToolRequest) -> LookUp:
        if "mcp" in request.spec.binding:
            said = await self._mcp_servers().look_up(request)
            return said if said.result is None else LookUp(answer=said.answer, result=normalised(said.result))
        call = msgspec.convert(request.spec.binding["lookup"], LookUpCall)
        said = judge(call, await self._http.ask(request))
        return said if said.result is None else LookUp(answer=said.answer, result=normalised(said.result))

    async def _bounded(self, request: ToolRequest, ask: Callable[[], Awaitable[LookUp]]) -> LookUp:
        try:
            async with self._turns.of(request.spec):
                with anyio.move_on_after(_limit_s(request.spec)):
                    return await ask()
        except Exception as error:  # noqa: BLE001  (no foreign exception crosses a port)
            self._fault(error, request)
        return LookUp(answer="unsure")

    def _named(self, name: str, where: str) -> list[ToolSpec]:
        found = [spec for spec in BUILTIN if name in {spec.name, spec.name.partition(".")[0]}]
        if not found:
            known = ", ".join(sorted({spec.name.partition(".")[0] for spec in BUILTIN} | {s.name for s in BUILTIN}))
            raise InvalidParams(f"there is no built-in tool or server {name!r}; there are: {known}", path=where)
        return found

    def _inline(self, tool: object, where: str) -> ToolSpec:
        if not isinstance(tool, dict):
            raise InvalidParams("a tool is a name or an object", path=where)
        spec = inline_tool(tool, where)
        server = spec.name.partition(".")[0]
        if server in self._servers:
            raise InvalidParams(f"{server!r} is the name of a built-in server", path=f"{where}.name")
        return spec

    def _adapter(self, spec: ToolSpec) -> Adapter | None:
        if "mcp" in spec.binding:
            return self._mcp_servers()
        return self._http if "http" in spec.binding else self._servers.get(spec.name.partition(".")[0])

    def _mcp_servers(self) -> McpServers:
        if self._mcp is None:
            from rpcagent.tools.mcp import McpServers

            self._mcp = McpServers(on_note=self._on_note)
        return self._mcp

    def _fault(self, error: Exception, request: ToolRequest) -> None:
        if self._on_fault is not None:
            self._on_fault(error, request)


def _gone(request: ToolRequest, reason: Interruption, message: str) -> Failed | Lost:
    """It went wrong where it cannot be told what happened outside; a read has no outside."""
    if request.spec.effect == "read_only":
        return Failed(error=Trouble(kind=reason, message=message))
    return Lost(reason=reason)


def _limit_s(spec: ToolSpec) -> float:
    """A server that has to be started first takes what it takes; its adapter keeps the call itself within its limit."""
    limit_s = spec.timeout_ms / 1_000
    if "mcp" in spec.binding:
        from rpcagent.tools.mcp_config import SETUP_MOST_S

        limit_s += SETUP_MOST_S
    return limit_s
