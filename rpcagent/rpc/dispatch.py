"""From messages to handlers and back: the only place where an exception becomes an error on the wire.

Knows: the methods by name, how params become a Struct, in which order requests enter, how many may run, and
jsonrpcserver, which nobody else imports. Does not know: what a method does, or how bytes arrive.

jsonrpcserver looks up the method and calls it, one call at a time, through its own `dispatch_request`. Its parsing,
schema check, batch and error texts are not used: one bad item would refuse a whole batch, one result that JSON cannot
hold would lose it, and the text of exceptions would go to the peer.
"""

from __future__ import annotations

import asyncio
import inspect
import re
import sys
import types
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from importlib.machinery import PathFinder
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec
from msgspec import UNSET, Raw

from rpcagent import errors
from rpcagent.rpc import jsonrpc
from rpcagent.rpc.choices import choices_at
from rpcagent.rpc.jsonrpc import Call, Fail, Id, Ok

URGENT_SPARE = 64
_READING_MAX = 4
_NAME_SHOWN_MAX = 100
_REASON_SHOWN_MAX = 300


def _import_lean() -> None:
    """Import the parts of jsonrpcserver 5.0.9 that are used here without what its `__init__` loads for others: jsonschema
    (its validator), http.server (its demo server), and all of oslash (only `oslash.either` is used). That is most of its
    time. The two stand-ins for a package are taken back at once, so that nobody else can see them.
    """
    stand_ins: dict[str, types.ModuleType] = {}
    for name in ("jsonrpcserver", "oslash"):
        found = PathFinder.find_spec(name)
        if found is None or found.submodule_search_locations is None:
            return  # the import that follows says what is missing
        if name not in sys.modules:
            stand_ins[name] = types.ModuleType(name)
            stand_ins[name].__path__ = list(found.submodule_search_locations)
    sys.modules.update(stand_ins)
    try:
        import jsonrpcserver.async_dispatcher  # noqa: F401
    finally:
        for name, module in stand_ins.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]


if "jsonrpcserver" not in sys.modules:
    _import_lean()

from jsonrpcserver.async_dispatcher import dispatch_request  # noqa: E402
from jsonrpcserver.request import Request  # noqa: E402
from jsonrpcserver.result import Error, Success  # noqa: E402

Handler = Callable[[Any, Any], Awaitable[Any]]


class Method(NamedTuple):
    """How a method is called: `await handler(context, params)` gives its result, anything that JSON can hold."""

    params: type[msgspec.Struct]
    handler: Handler
    mutating: bool
    """It is not executed when sent as a notification: nobody could name what it made."""
    inline: bool
    """It never waits for anything outside this process, so it is answered in place, whatever else is going on."""
    at_hand: Callable[[Any, Any], bool] | None = None
    """Of an inline method: whether this very call, by context and params as they came, needs no wait. Without: always."""
    urgent: bool = False
    """A person's word, which waits for the disk alone: some room is kept for it, whatever else is going on."""


class BrokenFrame(Protocol):
    """What stands where a message should have been."""

    @property
    def code(self) -> int:
        """-32700: no message could be read. -32600: it was above the limit."""

    @property
    def reason(self) -> str:
        """For a person."""


Incident = Callable[[BaseException, str], str]


class Dispatcher:
    """The methods, and how one call is answered. Shared by all sessions.

    `on_incident(exception, method)` keeps the whole story of a fault and returns the id under which it is found; the
    peer sees that id and nothing else. `max_batch` is in items.
    """

    def __init__(self, methods: Mapping[str, Method], *, on_incident: Incident, max_batch: int = 100) -> None:
        self.methods = dict(methods)
        self.max_batch = max_batch
        self._on_incident = on_incident
        self._names = sorted(self.methods)
        self._entries = {name: self._entry(name, method) for name, method in self.methods.items()}

    async def answer(self, context: Any, call: Call) -> Ok | Fail | None:
        """Execute one call; its answer for `encode`, or None for a notification. Raises nothing but cancellation."""
        result: Any
        _, result = await dispatch_request(self._entries, context, Request(call.method, [call.params], call.id))
        if call.id is UNSET:
            return None
        if isinstance(result, _Right):
            return Ok(call.id, result._value.result)  # noqa: SLF001  there is no other way
        if call.method not in self._entries:
            return jsonrpc.fail(call.id, self._method_not_found(call.method))
        error = result._error  # noqa: SLF001
        if type(error.data) is not dict:  # not one of ours: its text may be that of an exception
            return jsonrpc.fail(call.id, self._incident(RuntimeError(error.message), call.method))
        return Fail(call.id, jsonrpc.ErrorObject(error.code, error.message, error.data))

    def encode(self, answer: Ok | Fail, method: str) -> bytes:
        """Like `jsonrpc.encode`; what JSON cannot hold becomes an incident, for this id only."""
        try:
            return jsonrpc.encode(answer)
        except jsonrpc.Unserialisable as e:
            return jsonrpc.encode(jsonrpc.fail(answer.id, self._incident(e, method)))

    def _entry(self, name: str, method: Method) -> Callable[[Any, Any], Coroutine[Any, Any, Any]]:
        """What jsonrpcserver calls. It must not let an exception out: jsonrpcserver would put its text on the wire."""
        struct, handler = method.params, method.handler

        async def entry(context: Any, params: Any) -> Any:
            try:
                return Success(await handler(context, convert(params, struct)))
            except errors.RpcAgentError as e:
                return Error(e.number, e.message, e.data)
            except Exception as e:  # noqa: BLE001  this is the border
                fault = self._incident(e, name)
                return Error(fault.number, fault.message, fault.data)

        # jsonrpcserver asks for it at every call, and computing it costs more than all the rest of the call.
        entry.__signature__ = _Fits.from_callable(entry)  # type: ignore[attr-defined]
        return entry

    def _incident(self, error: BaseException, method: str) -> errors.InternalError:
        try:
            incident = self._on_incident(error, method)
        except Exception:  # noqa: BLE001  a second fault must not tell the peer what the first one may not
            incident = "inc_lost"
        return errors.InternalError(
            "a fault of the server; its standard error tells more under this incident", incident=incident
        )

    def _method_not_found(self, name: str) -> errors.MethodNotFound:
        shown = _cut(name, _NAME_SHOWN_MAX)
        return errors.MethodNotFound(f"there is no method {shown!r}", method=shown, methods=self._names)


_Right: Any = type(Success(None))


class _Fits(inspect.Signature):
    """Of an entry: it is always called with a context and params, so there is nothing to find out at every call."""

    __slots__ = ()

    def bind(self, *_args: Any, **_kwargs: Any) -> inspect.BoundArguments:
        return inspect.BoundArguments(self, OrderedDict())


_Params = TypeVar("_Params", bound=msgspec.Struct)
_AT = re.compile(r"\$[^`]*")
_MEMBER = re.compile(r"(?:unknown|missing required) field `([^`]*)`")


def convert(params: Any, struct: type[_Params]) -> _Params:
    """Params as they came (UNSET: none) as a Struct. Raises InvalidParams with the path of the first member at fault."""
    if params is UNSET:
        params = {}
    elif type(params) is list:
        raise errors.InvalidParams("params are taken by name: send an object, not an array")
    try:
        return msgspec.convert(params, struct)
    except msgspec.ValidationError as e:
        reason, _, where = str(e).partition(" - at ")
        found = _AT.search(where)
        path = found[0] if found else "$"
        # A message about a member that is not known, or not there, names the object around it.
        if member := _MEMBER.search(reason):
            path = f"{path}.{member[1]}"
        shown = _cut(reason.replace("`", ""), _REASON_SHOWN_MAX)
        if reason.startswith("Invalid enum value") and (choices := choices_at(struct, path)):
            shown += f"; it is one of: {', '.join(choices)}"
        raise errors.InvalidParams(shown, path=_cut(path, _NAME_SHOWN_MAX)) from None
    except (RecursionError, ValueError, OverflowError) as e:
        raise errors.InvalidParams(f"cannot be read ({type(e).__name__})") from None


def _cut(text: str, length: int) -> str:
    """The peer's own words go back to it, but not megabytes of them."""
    return text if len(text) <= length else text[:length] + "..."


class Session:
    """One connection: its requests in arrival order, each answered exactly once through `send`.

    `spawn` starts a coroutine as a task (it must take its first step no later than the next turn of the loop).
    `max_in_flight` bounds the tasks; a batch is one, and urgent calls have a few more to themselves. `context` is handed to every handler.

    Memory is bounded while the peer does not read: `room` returns when one more answer may be sent, and nothing is encoded
    before. Of batches, which are answered as a whole, `max_batch_bytes` are held, all together.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        context: Any,
        send: Callable[[bytes], None],
        spawn: Callable[[Coroutine[Any, Any, None]], Any],
        *,
        room: Callable[[], Awaitable[None]] | None = None,
        max_in_flight: int = 1024,
        max_batch_bytes: int = 16 << 20,
    ) -> None:
        self._dispatcher, self._context, self._send, self._spawn = dispatcher, context, send, spawn
        self._methods = dispatcher.methods
        self._room = room or _always
        self._max_in_flight = max_in_flight
        self._max_batch_bytes = max_batch_bytes
        self._batch_bytes = 0
        self.in_flight = 0
        """Tasks that run."""
        self.ignored = 0
        """Messages with nothing to say and nothing done: notifications of mutating methods or beyond the limit, and
        stray answers."""
        self._reading = asyncio.Semaphore(_READING_MAX)
        self._unstarted = False
        self._settled = asyncio.Event()
        self._settled.set()

    async def feed(self, frames: Sequence[bytes | BrokenFrame]) -> None:
        """Take what arrived. Returns when inline methods are answered and all others are started or refused.

        Not to be called twice at once: arrival order would be lost.
        """
        for frame in frames:
            await self._room()
            if not isinstance(frame, bytes):
                self._fail(None, _broken(frame))
            elif jsonrpc.is_batch(frame):
                self._feed_batch(frame)
            else:
                call = jsonrpc.parse(frame)
                if isinstance(call, Call):
                    await self._feed_call(call)
                elif (answer := self._encode(call)) is not None:
                    self._send(answer)

    async def settled(self) -> None:
        """Wait until every accepted request is answered. A task that is cancelled before its first step never settles."""
        await self._settled.wait()

    async def _feed_call(self, call: Call) -> None:
        method = self._methods.get(call.method)
        if method is None or self._inline(method, call):
            if self._unstarted:
                # Those before must have entered, so that the answer tells of them.
                self._unstarted = False
                await asyncio.sleep(0)
            answer = await self._execute(call)
            if answer is not None:
                self._send(self._dispatcher.encode(answer, call.method))
        elif self.in_flight < self._max_in_flight + (URGENT_SPARE if method.urgent else 0):
            self._start(self._run_reading(call) if method.inline else self._run(call))
        elif call.id is UNSET:
            self.ignored += 1
        else:
            self._fail(call.id, self._overloaded())

    def _inline(self, method: Method, call: Call) -> bool:
        return method.inline and (method.at_hand is None or method.at_hand(self._context, call.params))

    async def _execute(self, call: Call) -> Ok | Fail | None:
        if call.id is UNSET:
            method = self._methods.get(call.method)
            if method is None or method.mutating:
                self.ignored += 1
                return None
        return await self._dispatcher.answer(self._context, call)

    async def _run(self, call: Call) -> None:
        try:
            answer = await self._execute(call)
            if answer is not None:
                await self._room()
                self._send(self._dispatcher.encode(answer, call.method))
        finally:
            self._ended()

    async def _run_reading(self, call: Call) -> None:
        """What is read from files may be large: few are held at once, and none is read before there is room for it."""
        try:
            async with self._reading:
                await self._room()
                answer = await self._execute(call)
                if answer is not None:
                    await self._room()
                    self._send(self._dispatcher.encode(answer, call.method))
        finally:
            self._ended()

    def _feed_batch(self, frame: bytes) -> None:
        items = jsonrpc.split_batch(frame, self._dispatcher.max_batch)
        if isinstance(items, Fail):
            self._send(jsonrpc.encode(items))
        elif self.in_flight < self._max_in_flight:
            self._start(self._run_batch(items))
        else:
            self._refuse_batch(items)

    async def _run_batch(self, items: list[Raw]) -> None:
        answers: list[bytes] = []
        held = 0
        try:
            for item in items:
                if answers:  # the first has its place in the order of arrival
                    await self._room()
                answer = await self._batch_item(item)
                if answer is not None:
                    answers.append(answer)
                    held += len(answer)
                    self._batch_bytes += len(answer)
            if answers:
                await self._room()
                self._send(jsonrpc.encode_batch(answers))
        finally:
            self._batch_bytes -= held
            self._ended()

    async def _batch_item(self, item: Raw) -> bytes | None:
        call = jsonrpc.parse(item)
        if not isinstance(call, Call):
            return self._encode(call)
        if self._batch_bytes > self._max_batch_bytes:
            return self._refuse(call, self._too_much_held())
        answer = await self._execute(call)
        return None if answer is None else self._dispatcher.encode(answer, call.method)

    def _refuse_batch(self, items: list[Raw]) -> None:
        answers: list[bytes] = []
        for item in items:
            call = jsonrpc.parse(item)
            answer = self._refuse(call, self._overloaded()) if isinstance(call, Call) else self._encode(call)
            if answer is not None:
                answers.append(answer)
        if answers:
            self._send(jsonrpc.encode_batch(answers))

    def _refuse(self, call: Call, error: errors.RpcAgentError) -> bytes | None:
        return self._encode(None if call.id is UNSET else jsonrpc.fail(call.id, error))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        self.in_flight += 1
        self._unstarted = True
        self._settled.clear()
        self._spawn(work)

    def _ended(self) -> None:
        self.in_flight -= 1
        if not self.in_flight:
            self._settled.set()

    def _encode(self, fail: Fail | None) -> bytes | None:
        if fail is None:
            self.ignored += 1
            return None
        return jsonrpc.encode(fail)

    def _fail(self, id_: Id, error: errors.RpcAgentError) -> None:
        self._send(jsonrpc.encode(jsonrpc.fail(id_, error)))

    def _overloaded(self) -> errors.Overloaded:
        return errors.Overloaded(
            f"{self._max_in_flight} requests are being worked on; send it again when one is answered",
            limit="maxInFlight",
        )

    def _too_much_held(self) -> errors.Overloaded:
        return errors.Overloaded(
            f"the answers of batches that are not sent yet are above {self._max_batch_bytes} bytes; send it again alone",
            limit="maxBatchBytes",
        )


async def _always() -> None:
    """There is room."""


def _broken(frame: BrokenFrame) -> errors.RpcAgentError:
    kind = errors.ParseError if frame.code == errors.ParseError.number else errors.InvalidRequest
    return kind(frame.reason, reason=frame.reason)
