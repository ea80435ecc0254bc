"""One life of an MCP server: from the start of its process to its end, spoken to through the official SDK.

Knows: the handshake, what an answer is and what is noise, and that a server may say anything. Does not know: restarts,
contracts, or what the end of a call says about an effect.

The SDK's session and dispatcher keep request ids, time limits and cancellation; its transport over standard streams is
not used. Measured: it holds a line without end in memory and copies it with every piece that comes, starts a task for
each unasked message without a bound, prints tracebacks on standard error for noise, and ends at a byte that is no UTF-8.
So the lines are read here, bounded, and only answers reach the SDK: a request of the server is declined on the spot, and
a notification is heard at most as a sign that its list of tools has changed.

All of a life happens in one task, made here: the SDK's context managers are entered and left in it. Cancelling a call
cancels that call only. The SDK is imported by the first life, on a thread: it takes half a second, and memory that a daemon without
MCP servers should not pay for.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Self

import anyio
import anyio.to_thread
import msgspec

from rpcagent import __version__
from rpcagent.tools.mcp_child import (
    NOTE_BYTES,
    CannotStart,
    Child,
    Flood,
    Lines,
    Notes,
    Outbox,
    Overlong,
    discard,
    read_lines,
    read_rest,
)
from rpcagent.tools.mcp_config import START_MOST_S

if TYPE_CHECKING:
    from types import ModuleType

    from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
    from mcp.shared.jsonrpc_dispatcher import JSONRPCDispatcher
    from mcp.shared.message import SessionMessage

INPUT_S = 2.0
TERM_S = 2.0
"""How long a server has to end when its input ends, and again when it is asked to."""
LAST_ANSWERS_S = 1.0
EXIT_SOON_S = 0.25
"""A server that closes its output is about to end; how it ended is worth that long."""
FIRST_ID = 1_000
"""Ids below it are the SDK's own. They are numbers, because some servers have met nothing else."""
PAGES_MOST = 100
TOOLS_MOST = 1_000
UNREADABLE = -32098
"""Stands for an answer that is none, or larger than a line may be."""

_ANSWER_HEAD = re.compile(rb'\s*\{\s*(?:"jsonrpc"\s*:\s*"2\.0"\s*,\s*)?"id"\s*:\s*(\d{1,9})\s*,')
_EVERYTHING = 1 << 62


class Gone(Exception):
    """The server cannot be started, or ended. The text is for a person; `ask`: only a person can help."""

    def __init__(self, message: str, *, ask: bool = False) -> None:
        super().__init__(message)
        self.message = message
        self.ask = ask


class _Sdk:
    """The names that are used of the SDK."""

    def __init__(self) -> None:
        import mcp_types
        from mcp.client.session import ClientSession
        from mcp.shared.exceptions import MCPError
        from mcp.shared.jsonrpc_dispatcher import JSONRPCDispatcher
        from mcp.shared.message import SessionMessage

        self.types: ModuleType = mcp_types
        self.ClientSession, self.MCPError = ClientSession, MCPError
        self.JSONRPCDispatcher, self.SessionMessage = JSONRPCDispatcher, SessionMessage
        for name in ("mcp", "client"):  # it logs what servers do; that is told by us, bounded
            logger = logging.getLogger(name)
            logger.addHandler(logging.NullHandler())
            logger.propagate = False


_sdk: _Sdk | None = None


async def sdk() -> _Sdk:
    """The SDK, imported once, while the event loop goes on."""
    global _sdk  # noqa: PLW0603  (a module is imported once)
    if _sdk is None:
        _sdk = await anyio.to_thread.run_sync(_Sdk)
    return _sdk


class _Writer:
    """The SDK's end of the outbox. `waiting` are the ids of the requests that nobody has answered yet."""

    def __init__(self, outbox: Outbox, waiting: set[int]) -> None:
        self._outbox = outbox
        self._waiting = waiting

    async def send(self, item: SessionMessage) -> None:
        message = item.message
        data = message.model_dump_json(by_alias=True, exclude_unset=True).encode() + b"\n"
        request = getattr(message, "id", None)
        if not isinstance(request, int):
            self._outbox.put_if_room(data)
            return
        self._waiting.add(request)
        if not await self._outbox.put(data, request):
            raise anyio.BrokenResourceError

    async def aclose(self) -> None:
        """The outbox ends with the process."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        return None


class _Reader:
    """The SDK's end of the answers. `left` is set when it has taken them all, or takes no more."""

    def __init__(self, answers: MemoryObjectReceiveStream[SessionMessage | Exception]) -> None:
        self._answers = answers
        self.left = anyio.Event()

    async def receive(self) -> SessionMessage | Exception:
        return await self._answers.receive()

    async def aclose(self) -> None:
        self._answers.close()
        self.left.set()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> SessionMessage | Exception:
        return await self._answers.__anext__()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class Life:
    """`started` waits until it can be called, or raises Gone. `end` begins its end; `ended` is set when all is over."""

    def __init__(
        self,
        name: str,
        command: tuple[str, ...],
        environ: Callable[[], Mapping[str, str]],
        folder: str,
        tell: Callable[[str], None],
        died: Callable[[], None],
        idle_left_s: Callable[[], float],
    ) -> None:
        self._name, self._command, self._environ, self._folder = name, command, environ, folder
        self._died, self._idle_left_s = died, idle_left_s
        self._notes = Notes(tell)
        self._ready = anyio.Event()
        self._ending = anyio.Event()
        self._why: Gone | None = None
        self._tools: dict[str, dict[str, Any]] | None = None
        self._listing = anyio.Lock()
        self._changes = 0
        self._requests = FIRST_ID
        self._waiting: set[int] = set()
        self._grace = (INPUT_S, TERM_S)
        self._to_session: MemoryObjectSendStream[SessionMessage | Exception] | None = None
        self._dispatcher: JSONRPCDispatcher[Any] | None = None
        self._outbox: Outbox | None = None
        self._child: Child | None = None
        self.ended = anyio.Event()
        self._asked_to_end = False
        self._task = asyncio.get_running_loop().create_task(self._live(), name=f"mcp {name}")

    @property
    def usable(self) -> bool:
        return not self._ending.is_set()

    @property
    def over(self) -> bool:
        """Whether it ends, also where its process has ended and that was not heard of yet."""
        return not self.usable or (self._child is not None and self._child.how_it_ended() != "")

    @property
    def failure(self) -> Gone:
        return self._why or Gone(f"The MCP server {self._name} was ended.")

    async def started(self) -> None:
        await self._ready.wait()
        if not self.usable:
            raise self.failure

    def end(self, grace: tuple[float, float] = (INPUT_S, TERM_S)) -> None:
        """Begins an end that nothing was wrong about."""
        self._grace = grace
        self._asked_to_end = True
        self._end(None)

    def kill(self) -> None:
        """Ends it with no grace at all; `ended` is set soon after."""
        self._grace = (0.0, 0.0)
        self._asked_to_end = True
        self._task.cancel()

    async def tools(self) -> dict[str, dict[str, Any]]:
        """What the server offers, by its own names; asked once, and again when it says that it has changed."""
        async with self._listing:
            if self._tools is not None:
                return self._tools
            changes = self._changes
            try:
                with anyio.fail_after(START_MOST_S):
                    found = await self._list()
            except TimeoutError:
                raise Gone(f"The MCP server {self._name} did not list its tools in time.") from None
            if changes == self._changes:
                self._tools = found
            return found

    def new_request(self) -> int:
        """An id for `ask`."""
        self._requests += 1
        return self._requests

    async def ask(self, request: int, method: str, params: dict[str, Any] | None) -> dict[str, Any]:
        """One request. Raises the SDK's MCPError. Cancelled, it tells the server that nobody waits any more.

        `taken_back` is to be asked afterwards, in any case and once.
        """
        if self._dispatcher is None:
            raise self.failure
        return await self._dispatcher.send_raw_request(method, params, {"request_id": request})

    def taken_back(self, request: int) -> bool:
        """Whether not a byte of the request has left; then none ever will."""
        self._waiting.discard(request)
        return self._outbox is None or self._outbox.taken_back(request)

    # The task

    async def _live(self) -> None:
        child: Child | None = None
        try:
            modules = await sdk()
            child = self._child = Child(self._command, self._environ(), self._folder)
            await self._speak(child, modules)
        except CannotStart as error:
            self._end(Gone(f"The MCP server {self._name} cannot be started: {error}.", ask=True))
        except Exception as error:  # noqa: BLE001  (a fault of ours ends this server, and nothing else)
            self._notes.add(f"[given up: {error!r}]".encode())
        finally:
            self._end(None)
            if child is not None:
                child.close()
            self._ready.set()
            self.ended.set()

    async def _speak(self, child: Child, modules: _Sdk) -> None:
        # As many as wait for an answer: nothing else gets in.
        send, receive = anyio.create_memory_object_stream[Any](math.inf)
        answers = _Reader(receive)
        outbox = self._outbox = Outbox(child.input)
        self._to_session = send
        try:
            async with anyio.create_task_group() as pumps:
                pumps.start_soon(self._write, outbox, child)
                pumps.start_soon(self._read, child)
                pumps.start_soon(read_lines, child.errors, Lines(NOTE_BYTES, _EVERYTHING), self._note)
                pumps.start_soon(self._notes.refill)
                dispatcher = self._dispatcher = modules.JSONRPCDispatcher(answers, _Writer(outbox, self._waiting))
                info = modules.types.Implementation(name="rpcagent", version=__version__)
                async with modules.ClientSession(dispatcher=dispatcher, client_info=info) as session:
                    await self._shake_hands(session, modules)
                    self._ready.set()
                    await self._serve_until_the_end()
                    with anyio.move_on_after(LAST_ANSWERS_S):
                        await answers.left.wait()
                pumps.cancel_scope.cancel()
        except asyncio.CancelledError:
            self._grace = (0.0, 0.0)  # the event loop ends, or nobody waits any longer
            raise
        finally:
            self._end(None)
            outbox.close()
            send.close()
            await answers.aclose()
            await self._stop(child)

    async def _serve_until_the_end(self) -> None:
        while not self._ending.is_set():
            left_s = self._idle_left_s()
            if left_s <= 0:
                self.end()
            with anyio.move_on_after(left_s):
                await self._ending.wait()

    async def _shake_hands(self, session: Any, modules: _Sdk) -> None:
        try:
            with anyio.fail_after(START_MOST_S):
                await session.initialize()
        except TimeoutError:
            self._end(Gone(f"The MCP server {self._name} did not answer within {START_MOST_S:g} s."))
        except modules.MCPError as error:  # nothing changes where it is only told that the server has ended
            self._end(Gone(f"The MCP server {self._name} refused to be used: error {error.error.code}."))
        except (RuntimeError, ValueError):  # a version of the protocol, or an answer, that the SDK does not know
            self._end(Gone(f"The MCP server {self._name} speaks no protocol that is known.", ask=True))

    async def _stop(self, child: Child) -> None:
        # Shielded, and bounded by the grace: an end that is cut short would leave a process behind.
        with anyio.CancelScope(shield=True):
            async with anyio.create_task_group() as emptying:
                emptying.start_soon(discard, child.output)
                emptying.start_soon(discard, child.errors)
                await child.stop(*self._grace)
                emptying.cancel_scope.cancel()

    async def _write(self, outbox: Outbox, child: Child) -> None:
        await outbox.write()  # returns when the server has closed its input: it may still have answered, or end
        with anyio.move_on_after(EXIT_SOON_S):
            await self._ending.wait()
        self._end(self._ended_by_itself(child))

    async def _read(self, child: Child) -> None:
        """Until the server closes its output or ends, whoever else may hold the pipe open."""
        lines = Lines()
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(self._wait_for_exit, child, group.cancel_scope)
                await read_lines(child.output, lines, self._heard)
                group.cancel_scope.cancel()
            read_rest(child.output, lines, self._heard)
        except* Flood:
            self._end(Gone(f"The MCP server {self._name} wrote without end and without a line; it was ended."))
        with anyio.move_on_after(EXIT_SOON_S):
            await child.exited()
        self._end(self._ended_by_itself(child))

    async def _wait_for_exit(self, child: Child, reading: anyio.CancelScope) -> None:
        await child.exited()
        reading.cancel()

    def _ended_by_itself(self, child: Child) -> Gone:
        how = child.how_it_ended()
        last = f" The last it said: {self._notes.last[:300]}" if self._notes.last else ""
        return Gone(f"The MCP server {self._name} ended{how and f' with {how}'}.{last}")

    def _end(self, why: Gone | None) -> None:
        if self._ending.is_set():
            return
        self._why = why
        self._ending.set()
        if not self._asked_to_end:
            self._died()
        if self._to_session is not None:
            self._to_session.close()  # whoever waits for an answer is told at once

    # What it says

    def _note(self, line: bytes | Overlong) -> bool:
        self._notes.add(line)
        return False

    def _heard(self, line: bytes | Overlong) -> bool:
        """Whether it was an answer."""
        if isinstance(line, Overlong):
            head = _ANSWER_HEAD.match(line.head)
            if head is None:
                self._notes.add(line)
                return False
            return self._answered({"id": int(head.group(1))})
        if not line.strip():
            return False
        try:
            message = msgspec.json.decode(line)
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            self._notes.add(line)
            return False
        messages = message if isinstance(message, list) else [message]
        answers = [self._said(one, line) for one in messages]
        return any(answers)

    def _said(self, message: object, line: bytes) -> bool:
        if not isinstance(message, dict):
            self._notes.add(line)
            return False
        if "method" not in message:
            return self._answered(message)
        if message["method"] == "notifications/tools/list_changed":
            self._changes += 1
            self._tools = None
        if "id" in message and self._outbox is not None:
            answer = {"jsonrpc": "2.0", "id": message["id"]}
            if message["method"] == "ping":
                answer["result"] = {}
            else:
                answer["error"] = {"code": -32601, "message": "This client does not do that."}
            self._outbox.put_if_room(msgspec.json.encode(answer) + b"\n")
        return False

    def _answered(self, message: dict[str, Any]) -> bool:
        modules, request = _sdk, message.get("id")
        if modules is None or self._to_session is None or type(request) is not int or request not in self._waiting:
            return False  # an answer to no question, or the second one to the same
        self._waiting.discard(request)
        types = modules.types
        result, error = message.get("result"), message.get("error")
        answer: Any
        if isinstance(result, dict):
            answer = types.JSONRPCResponse(jsonrpc="2.0", id=request, result=result)
        else:
            known = isinstance(error, dict) and isinstance(error.get("code"), int)
            code = error["code"] if known and isinstance(error, dict) else UNREADABLE
            text = str(error.get("message", "")) if isinstance(error, dict) else "The answer is none, or too large."
            answer = types.JSONRPCError(jsonrpc="2.0", id=request, error=types.ErrorData(code=code, message=text))
        with contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
            self._to_session.send_nowait(modules.SessionMessage(answer))
        return True

    async def _list(self) -> dict[str, dict[str, Any]]:
        tools: dict[str, dict[str, Any]] = {}
        cursor: object = None
        modules = await sdk()
        for _page in range(PAGES_MOST):
            request = self.new_request()
            try:
                page = await self.ask(request, "tools/list", None if cursor is None else {"cursor": cursor})
            except modules.MCPError as error:
                if self._ending.is_set():
                    raise self.failure from None
                if error.error.code == -32601:
                    return {}
                raise Gone(f"The MCP server {self._name} does not list its tools: {error.error.code}.") from None
            finally:
                self.taken_back(request)
            for tool in page.get("tools") or ():
                if isinstance(tool, dict) and isinstance(tool.get("name"), str) and tool["name"]:
                    tools.setdefault(tool["name"], tool)
            cursor = page.get("nextCursor")
            if cursor is None:
                return tools
            if len(tools) > TOOLS_MOST:
                break
        raise Gone(f"The MCP server {self._name} lists tools without end.", ask=True)
