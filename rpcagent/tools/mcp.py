"""Tools behind MCP servers: which process a spec belongs to, one attempt of a call, and what its end says of the effect.

Knows: one server for each configuration and workspace, when it is started again and when it is let go, and from which
moment on a call may have acted. Does not know: how a server is spoken to, retries, runs or policy.

The line is the first byte of the request: what ends before it left did nothing outside (NotDone). After it only a
definite answer counts; a server that dies, says nothing in time or says something else leaves an effect Lost, and a read
that can be made again. A definite answer is a tool result, `isError` included, or the refusal of the request as such.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import anyio
import msgspec

from rpcagent.errors import Incompatible
from rpcagent.ids import digest_of
from rpcagent.runs.events import Trouble
from rpcagent.runs.outcomes import Failed, LookUp, Lost, NotDone, ToolReply
from rpcagent.runs.ports import ToolRequest
from rpcagent.tools.mcp_child import CannotStart
from rpcagent.tools.mcp_config import (
    Binding,
    Offer,
    ServerConfig,
    filled,
    offer,
    says_read_only,
    schema_hash,
    server_config,
)
from rpcagent.tools.mcp_life import Gone, Life, sdk
from rpcagent.tools.reconcile import Answer, judge
from rpcagent.tools.results import text_result

KEY_META = "rpcagent/idempotencyKey"
IDLE_S = 600.0
CLOSE_S = (0.5, 0.3)
"""How long a server has to end by itself, and when asked to, while the daemon ends."""
DEATHS_MOST = 5
"""After so many ends without an answer in between, a person is asked."""
LIVES_MOST = 64
BACKOFF_FIRST_S = 1.0
BACKOFF_MOST_S = 60.0
INHERITED = ("HOME", "LANG", "LC_ALL", "LC_CTYPE", "LOGNAME", "PATH", "SHELL", "TERM", "TMPDIR", "TZ", "USER")
_REFUSED = frozenset({-32700, -32600, -32601, -32602})
"""Codes that say that the request was not carried out."""
_REFERENCE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
_SECRET_LENGTH = 8


class _Unavailable(Exception):
    """There is no server to ask now; nothing was sent."""

    def __init__(self, trouble: Trouble, *, after_s: float | None = None, ask: bool = False) -> None:
        super().__init__(trouble.message)
        self.not_done = NotDone(
            error=trouble, retry_after_ms=None if after_s is None else max(1, round(after_s * 1_000)), ask=ask
        )


class _Server:
    """One configuration in one workspace, over all its lives."""

    def __init__(self, pool: McpServers, bound: Binding | ServerConfig, name: str, folder: str) -> None:
        self._pool = pool
        self._command, self._env, self._name, self._folder = bound.command, bound.env, name, folder
        self.life: Life | None = None
        self.users = 0
        self._deaths = 0
        self._not_before = 0.0
        self.used_at = anyio.current_time()

    @asynccontextmanager
    async def used(self) -> AsyncIterator[Life]:
        """A life that can be called, and that is not ended for idleness meanwhile. Raises _Unavailable."""
        self.users += 1
        try:
            yield await self._alive()
        finally:
            self.users -= 1
            self.used_at = anyio.current_time()

    def answered(self) -> None:
        """It did what it is there for: its earlier ends do not count any more."""
        self._deaths = 0

    def forgettable(self) -> bool:
        return self.users == 0 and self._deaths == 0 and (self.life is None or self.life.ended.is_set())

    def secrets(self) -> dict[str, str]:
        """What must not come back: the values that its environment was given by reference, long ones only, also as JSON
        writes them; and the names to put there."""
        names = {name for value in self._env.values() for name in _REFERENCE.findall(value)}
        values = {name: self._pool.environ.get(name, "") for name in names}
        return {
            form: f"${{{name}}}"
            for name, value in values.items()
            if len(value) >= _SECRET_LENGTH
            for form in (json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1], value)
        }

    async def tools(self, life: Life) -> dict[str, dict[str, Any]]:
        try:
            return await life.tools()
        except Gone as gone:
            raise self._unavailable(gone) from None

    def lost(self, life: Life) -> NotDone:
        """The outcome of what it could not do because it ended."""
        return self._unavailable(life.failure).not_done

    async def _alive(self) -> Life:
        while (life := self.life) is not None and life.over:
            await life.ended.wait()  # bounded by its grace; two processes of one server may disturb each other
            if self.life is life:
                self.life = None
        if life is None:
            life = self.life = self._begin()
        try:
            await life.started()
        except Gone as gone:
            raise self._unavailable(gone) from None
        return life

    def _begin(self) -> Life:
        wait_s = self._not_before - anyio.current_time()
        if wait_s > 0:
            message = f"The MCP server {self._name} ended several times; it is started again later."
            raise self._unavailable(Gone(message))
        self._pool.make_room()
        return Life(
            self._name, self._command, self._environment, self._folder, self._tell, self._died, self._idle_left_s
        )

    def _idle_left_s(self) -> float:
        idle_s = self._pool.idle_s
        return idle_s if self.users else self.used_at + idle_s - anyio.current_time()

    def _unavailable(self, gone: Gone) -> _Unavailable:
        wait_s = max(0.0, self._not_before - anyio.current_time())
        trouble = Trouble(kind="unreachable", message=_without(gone.message, self.secrets()))
        return _Unavailable(trouble, after_s=wait_s or None, ask=gone.ask or self._deaths >= DEATHS_MOST)

    def _died(self) -> None:
        """It ended, and nobody had asked it to. It may be started again at once, after a second end later and later."""
        self._deaths += 1
        if self._deaths > 1:
            wait_s = min(BACKOFF_MOST_S, BACKOFF_FIRST_S * 2 ** min(self._deaths - 2, 16))
            self._not_before = anyio.current_time() + wait_s

    def _environment(self) -> dict[str, str]:
        environ = self._pool.environ
        given = {name: environ[name] for name in INHERITED if name in environ}
        missing = sorted({n for value in self._env.values() for n in _REFERENCE.findall(value) if n not in environ})
        if missing:
            raise CannotStart(f"the daemon's environment has no {', '.join(missing)}")
        mine = {name: _REFERENCE.sub(lambda m: environ[m.group(1)], value) for name, value in self._env.items()}
        return given | mine

    def _tell(self, line: str) -> None:
        self._pool.tell(self._name, _without(line, self.secrets()))


class McpServers:
    """The adapter. `environ` is where servers get their environment from; `on_note` gets lines that servers write for
    people, with the server's name, never many at a time. Nothing is started or imported before it is needed."""

    def __init__(
        self,
        environ: Mapping[str, str] = os.environ,
        on_note: Callable[[str, str], None] | None = None,
        idle_s: float = IDLE_S,
    ) -> None:
        self.environ = environ
        self.idle_s = idle_s
        self._on_note = on_note
        self._servers: dict[tuple[str, str], _Server] = {}
        self._closed = False

    async def offer(self, name: str, value: object, workspace: str | None, path: str) -> Offer:
        """The tools of the server that `value` describes. Raises InvalidParams naming the member at fault, Incompatible
        where the server cannot be asked now."""
        config = server_config(name, value, path)
        server = self._server(config, name, workspace)
        try:
            async with server.used() as life:
                tools = await server.tools(life)
        except _Unavailable as unavailable:
            raise Incompatible(str(unavailable), server=name) from None
        return offer(name, config, list(tools.values()), path)

    async def call(self, request: ToolRequest) -> ToolReply | Failed | NotDone | Lost:
        """Performs once. Its limits are its own: `timeout_ms` is for the call, not for the start of the server."""
        bound = msgspec.convert(request.spec.binding["mcp"], Binding)
        effect = request.spec.effect != "read_only"
        arguments = request.arguments
        if bound.key_argument is not None and effect:
            arguments = {**arguments, bound.key_argument: request.key}
        try:
            msgspec.json.encode(arguments)
        except UnicodeEncodeError:
            return _failed("invalid_arguments", "An argument is not valid Unicode.")
        server = self._server(bound, bound.server, request.workspace)
        try:
            async with server.used() as life:
                problem = _changed(bound, await server.tools(life))
                if problem is not None:
                    return _failed("incompatible", f"The MCP server {bound.server} {problem}")
                params: dict[str, Any] = {"name": bound.tool, "arguments": arguments}
                if effect:
                    params["_meta"] = {KEY_META: request.key}
                return await _performed(server, life, params, request.spec.timeout_ms / 1_000, effect=effect)
        except _Unavailable as unavailable:
            return unavailable.not_done

    async def look_up(self, request: ToolRequest) -> LookUp:
        """Asks the look-up that the spec pins. Whatever is no answer is `unsure`."""
        bound = msgspec.convert(request.spec.binding["mcp"], Binding)
        if bound.lookup is None:
            return LookUp(answer="unsure")
        try:
            arguments = filled(bound.lookup.arguments, request.arguments, request.key)
            msgspec.json.encode(arguments)
        except (KeyError, UnicodeEncodeError):
            return LookUp(answer="unsure")
        server = self._server(bound, bound.server, request.workspace)
        params = {"name": bound.lookup.tool, "arguments": arguments}
        try:
            async with server.used() as life:
                said = await _performed(server, life, params, request.spec.timeout_ms / 1_000, effect=False)
        except _Unavailable:
            return LookUp(answer="unsure")
        if not isinstance(said, ToolReply) or said.result.get("isError"):
            return LookUp(answer="unsure")
        return judge(bound.lookup, Answer(status=200, value=_value(said.result), result=said.result))

    async def aclose(self) -> None:
        """Ends all servers, side by side and within a bound; cancelled, at once. Nothing is started any more."""
        self._closed = True
        lives = [server.life for server in self._servers.values() if server.life is not None]
        self._servers.clear()
        try:
            for life in lives:
                life.end(CLOSE_S)
            for life in lives:
                await life.ended.wait()
        finally:
            for life in lives:
                if not life.ended.is_set():
                    life.kill()

    def tell(self, server: str, line: str) -> None:
        if self._on_note is not None:
            self._on_note(server, line)

    def make_room(self) -> None:
        """Before a process is made. Raises _Unavailable where there are too many that are all in use."""
        if self._closed:
            raise _Unavailable(Trouble(kind="stopping", message="The daemon is about to end."))
        living = [s for s in self._servers.values() if s.life is not None and s.life.usable]
        if len(living) < LIVES_MOST:
            return
        idle = min((s for s in living if not s.users), key=lambda s: s.used_at, default=None)
        if idle is None or idle.life is None:
            message = f"{LIVES_MOST} MCP servers are in use, and that is as many as there may be."
            raise _Unavailable(Trouble(kind="busy", message=message))
        idle.life.end()

    def _server(self, bound: Binding | ServerConfig, name: str, workspace: str | None) -> _Server:
        folder = workspace or "/"
        key = (digest_of([name, bound.command, bound.env]), folder)
        server = self._servers.get(key)
        if server is None:
            for old in [place for place, known in self._servers.items() if known.forgettable()]:
                del self._servers[old]
            server = self._servers[key] = _Server(self, bound, name, folder)
        return server


async def _performed(
    server: _Server, life: Life, params: dict[str, Any], limit_s: float, *, effect: bool
) -> ToolReply | Failed | NotDone | Lost:
    modules = await sdk()
    number = life.new_request()
    answer, error, unsent = None, None, False
    try:
        with anyio.move_on_after(limit_s):
            answer = await life.ask(number, "tools/call", params)
    except modules.MCPError as raised:
        error = raised.error
    except Gone:
        return server.lost(life)
    finally:
        unsent = life.taken_back(number)
    if answer is not None:
        return _reply(server, answer, effect=effect)
    if error is not None and error.code in _REFUSED and not unsent:
        server.answered()
        text = _without(f"MCP error {error.code}: {error.message}", server.secrets())
        return ToolReply(result=text_result(text, is_error=True))
    if unsent and (error is not None or not life.usable):
        return server.lost(life)
    if unsent:
        message = "The server does not read what it is told; nothing was sent."
        return NotDone(error=Trouble(kind="timeout", message=message))
    if not life.usable:
        return Lost(reason="connection_lost") if effect else server.lost(life)
    if error is not None:
        kind, message = "server_error", f"The server answered with the error {error.code}."
        return Lost(reason="connection_lost") if effect else _failed(kind, message)
    return Lost(reason="timeout") if effect else _failed("timeout", f"No answer within {limit_s:g} s.")


def _reply(server: _Server, answer: dict[str, Any], *, effect: bool) -> ToolReply | Failed | Lost:
    content, structured = answer.get("content", []), answer.get("structuredContent")
    parts = isinstance(content, list) and all(isinstance(p, dict) and isinstance(p.get("type"), str) for p in content)
    if not parts or ("content" not in answer and not isinstance(structured, dict)):
        message = "The server's answer is no tool result."
        return Lost(reason="connection_lost") if effect else _failed("bad_answer", message)
    server.answered()
    result: dict[str, Any] = {"content": content}
    if isinstance(structured, dict):
        result["structuredContent"] = structured
    if answer.get("isError") is True:
        result["isError"] = True
    return ToolReply(result=_without(result, server.secrets()))


def _changed(bound: Binding, tools: Mapping[str, dict[str, Any]]) -> str | None:
    """Why the pinned tool is not there any more as it was."""
    tool = tools.get(bound.tool)
    if tool is None:
        return f"has no tool {bound.tool!r} any more."
    if schema_hash(tool) != bound.schema_hash:
        return f"has another schema for {bound.tool!r} now than when the run began."
    if bound.trusted and not says_read_only(tool):
        return f"does not say any more that {bound.tool!r} only reads."
    return None


def _value(result: dict[str, Any]) -> Any:
    """What a look-up is judged by: structured content, else the JSON that its text is; UNSET: there is neither."""
    if "structuredContent" in result:
        return result["structuredContent"]
    texts = [part.get("text") for part in result["content"] if part["type"] == "text"]
    if len(texts) != 1 or not isinstance(texts[0], str):
        return msgspec.UNSET
    try:
        return msgspec.json.decode(texts[0])
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return msgspec.UNSET


def _without(value: Any, secrets: Mapping[str, str]) -> Any:
    """The same with each secret replaced by its name."""
    if not secrets:
        return value
    match value:
        case str():
            for secret, name in secrets.items():
                value = value.replace(secret, name)
            return value
        case list():
            return [_without(item, secrets) for item in value]
        case dict():
            return {_without(name, secrets): _without(item, secrets) for name, item in value.items()}
        case _:
            return value


def _failed(kind: str, message: str) -> Failed:
    return Failed(error=Trouble(kind=kind, message=message))
