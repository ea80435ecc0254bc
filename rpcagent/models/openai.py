"""Models behind an OpenAI-compatible chat-completions endpoint: one request per attempt, and what its end says.

Knows: HTTP, the stream of events, the time limits, and when the connection is closed. Does not know: what is in a request
or an answer (`chat`, `assembly`), what a refusal means (`refusal`), or retries.

The base is httpx (72 ms of CPU to import, and here already) with httpx-sse (6 ms more), not the openai SDK (512 ms): it
would bring 15 packages, a second HTTP client and two hidden retries, and leaves unusual tool-call deltas to its caller.

A model call touches nothing outside, so whatever ends it early is NotDone. Every call has a connection of its own, which
is closed when the call ends, however it ends. All is imported at the first call.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import anyio
import msgspec

from rpcagent.models.assembly import Assembly, bad_answer
from rpcagent.models.chat import Names, Unpaired, body_of
from rpcagent.models.endpoint import Endpoint, MissingSecret, endpoint_of
from rpcagent.models.refusal import Said, read_said, refused, refused_inside, refuses_stream_options, said_in
from rpcagent.runs.events import Trouble
from rpcagent.runs.outcomes import Failed, ModelReply, NotDone
from rpcagent.runs.ports import ModelRequest

if TYPE_CHECKING:
    import httpx

BODY_BYTES = 16 * 1024 * 1024
ERROR_BYTES = 64 * 1024

_Outcome = ModelReply | NotDone | Failed


class _Exchange:
    """One request and its answer: how far it came, and when it is given up for silence."""

    def __init__(self, request: ModelRequest, endpoint: Endpoint, emit: Callable[[str], None]) -> None:
        settings = request.definition.model
        self.endpoint = endpoint
        self.emit = emit
        self.names = Names(request.definition.tools)
        self.assembly = Assembly(self.names, endpoint.secrets)
        self.stream: bool = settings.stream
        self.connect_s: float = settings.connect_timeout_ms / 1_000
        self.first_ms: int = settings.first_token_timeout_ms
        self.idle_ms: int = settings.idle_timeout_ms
        self.scope = anyio.CancelScope()
        self.answered = False
        """The status line came, and it was a good one."""
        self.begun = False
        """The first piece of the answer came."""
        self.size = 0

    def wait(self) -> None:
        """The clock starts; it bounds a stream only, for a whole answer is silent until it is there."""
        if self.stream:
            self.scope.deadline = anyio.current_time() + self.first_ms / 1_000

    def heard(self, count: int) -> None:
        """Bytes came. Comments that keep the line open do not count as a first token."""
        self.size += count
        if self.begun and self.stream:
            self.scope.deadline = anyio.current_time() + self.idle_ms / 1_000

    def take(self, piece: dict[str, Any]) -> None:
        self.begun = True
        self.heard(0)
        text = self.assembly.feed(piece)
        if text:
            self.emit(text)

    def reply(self) -> ModelReply | NotDone:
        """What the pieces come to, when there will be no more."""
        text = self.assembly.end()
        if text:
            self.emit(text)
        return self.assembly.reply()

    def silent(self) -> ModelReply | NotDone:
        """Nothing came for too long. An answer that said why it ended is whole all the same."""
        if self.assembly.stop:
            return self.reply()
        kind, limit = ("idle_timeout", self.idle_ms) if self.begun else ("first_token_timeout", self.first_ms)
        what = "went silent" if self.begun else "did not begin to answer"
        return _not_done(kind, f"{self.endpoint.host} {what} for {limit} ms.")

    def broken(self) -> ModelReply | NotDone:
        """The connection ended where it should not have."""
        if self.assembly.stop:
            return self.reply()
        if self.answered:
            return _not_done("stream_cut", f"The connection to {self.endpoint.host} ended in the middle of the answer.")
        return _not_done("connection_lost", f"The connection to {self.endpoint.host} ended before an answer came.")


class OpenAiModel:
    """The adapter. `environ` is where secrets are read from, at each call; `now` gives the time in UTC."""

    def __init__(
        self, environ: Mapping[str, str] = os.environ, now: Callable[[], datetime] = lambda: datetime.now(UTC)
    ) -> None:
        self._environ = environ
        self._now = now
        self._clients: dict[tuple[bool, bool], httpx.AsyncClient] = {}
        self._without_usage: set[str] = set()

    async def complete(self, request: ModelRequest, emit: Callable[[str], None]) -> _Outcome:
        """Asks once. A server that refuses to count a stream's tokens is asked once more without, and remembered."""
        try:
            endpoint = endpoint_of(request.definition.model, self._environ)
            plain = endpoint.url in self._without_usage
            outcome = await self._ask(request, endpoint, body_of(request, usage=not plain), emit)
            if outcome is None:
                self._without_usage.add(endpoint.url)
                outcome = await self._ask(request, endpoint, body_of(request, usage=False), emit)
        except MissingSecret as missing:
            return _not_done("credentials", str(missing), ask=True)
        except Unpaired:
            message = "The context has a call without its result; it was not sent."
            return Failed(error=Trouble(kind="bad_history", message=message))
        return outcome or _not_done("bad_request", f"{endpoint.host} refuses `stream_options`, sent or not.", ask=True)

    async def aclose(self) -> None:
        """Closes what is open. A later call opens it again."""
        clients, self._clients = self._clients, {}
        for client in clients.values():
            await client.aclose()

    async def _ask(
        self, request: ModelRequest, endpoint: Endpoint, body: bytes, emit: Callable[[str], None]
    ) -> _Outcome | None:
        """None: the server refuses `stream_options`, and that is all it says."""
        import httpx

        exchange = _Exchange(request, endpoint, emit)
        limits = httpx.Timeout(None, connect=exchange.connect_s)
        headers = {
            "Content-Type": "application/json",
            "Accept": "text/event-stream" if exchange.stream else "application/json",
            "Accept-Encoding": "identity",
            **endpoint.headers,
        }
        client = self._client(endpoint)
        try:
            with exchange.scope:
                exchange.wait()
                async with client.stream(
                    "POST", endpoint.url, headers=headers, content=body, timeout=limits
                ) as response:
                    return await self._answer(exchange, response)
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.ProxyError) as error:
            return unreachable(endpoint.host, error)
        except (httpx.InvalidURL, httpx.UnsupportedProtocol, httpx.LocalProtocolError):
            return _not_done("bad_request", "These settings make no valid request.", ask=True)
        except httpx.DecodingError:
            return bad_answer(f"The answer of {endpoint.host} cannot be decompressed.")
        except (httpx.TransportError, httpx.StreamError):
            return exchange.broken()
        return exchange.silent()

    async def _answer(self, exchange: _Exchange, response: httpx.Response) -> _Outcome | None:
        status = response.status_code
        if not 200 <= status < 300:
            said = read_said(await _bytes_of(exchange, response, ERROR_BYTES))
            if exchange.stream and refuses_stream_options(status, said):
                return None
            headers = {name.lower(): value for name, value in response.headers.items()}
            endpoint = exchange.endpoint
            return refused(status, headers, said, host=endpoint.host, secrets=endpoint.secrets, now=self._now())
        exchange.answered = True
        if response.headers.get("content-type", "").partition(";")[0].strip().lower() == "text/event-stream":
            return await self._streamed(exchange, response)
        body = await _bytes_of(exchange, response, BODY_BYTES + 1)
        if len(body) > BODY_BYTES:
            return bad_answer(f"The answer has more than {BODY_BYTES} bytes.")
        return self._whole(exchange, body)

    def _whole(self, exchange: _Exchange, body: bytes) -> _Outcome:
        host = exchange.endpoint.host
        if not body.strip():
            return bad_answer(f"The answer of {host} is empty.")
        value = _json(body)
        if not isinstance(value, dict):
            kind = "an HTML page" if read_said(body).message == "(an HTML page)" else "no JSON object"
            return bad_answer(f"The answer of {host} is {kind}.")
        if _is_error(value):
            return self._error(exchange, said_in(value))
        exchange.take(value)
        return exchange.reply()

    async def _streamed(self, exchange: _Exchange, response: httpx.Response) -> _Outcome:
        from httpx_sse import EventSource

        if response.headers.get("content-encoding", "identity").lower() != "identity":
            return bad_answer(f"The answer of {exchange.endpoint.host} is compressed, which was not asked for.")
        response.stream = _watched(exchange, response.stream)
        ended = False
        async with aclosing(EventSource(response).aiter_sse()) as events:
            async for event in events:
                data = event.data.strip()
                if data == "[DONE]":
                    ended = True
                    break
                if not data:
                    continue
                value = _json(data)
                if event.event == "error" or (isinstance(value, dict) and _is_error(value)):
                    return self._error(exchange, said_in(value) if value is not msgspec.UNSET else Said(message=data))
                if not isinstance(value, dict):
                    return bad_answer(f"A piece of the answer of {exchange.endpoint.host} is no JSON object.")
                exchange.take(value)
        if exchange.size > BODY_BYTES:
            return bad_answer(f"The answer has more than {BODY_BYTES} bytes.")
        if not exchange.begun and not ended:
            return bad_answer(f"The answer of {exchange.endpoint.host} is empty.")
        return exchange.reply() if ended or exchange.assembly.stop else exchange.broken()

    def _error(self, exchange: _Exchange, said: Said) -> _Outcome:
        endpoint = exchange.endpoint
        return refused_inside(said, host=endpoint.host, secrets=endpoint.secrets, now=self._now())

    def _client(self, endpoint: Endpoint) -> httpx.AsyncClient:
        proxy, tls = endpoint.environment_proxy, endpoint.environment_proxy or endpoint.url.startswith("https:")
        client = self._clients.get((proxy, tls))
        if client is None:
            import logging
            import ssl

            import httpx

            for name in ("httpx", "httpcore"):  # their lines carry what servers echo, at debug level
                logging.getLogger(name).setLevel(logging.WARNING)
            client = self._clients[proxy, tls] = httpx.AsyncClient(
                trust_env=proxy,
                follow_redirects=False,
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
                # Where there is no TLS, reading all the world's certificates (15 ms) is saved; these trust nobody.
                verify=True if tls else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT),
            )
        return client


async def _bytes_of(exchange: _Exchange, response: httpx.Response, most: int) -> bytes:
    """The body, of at most `most` bytes; the rest is not read."""
    pieces: list[bytes] = []
    size = 0
    async for piece in response.aiter_bytes():
        exchange.heard(len(piece))
        pieces.append(piece)
        size += len(piece)
        if size >= most:
            break
    return b"".join(pieces)[:most]


def _watched(exchange: _Exchange, stream: Any) -> httpx.AsyncByteStream:
    """The same bytes; each resets the clock, and beyond the limit there are no more: a reader of lines would keep an
    endless one whole."""
    import httpx

    class Watched(httpx.AsyncByteStream):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            async for piece in stream:
                exchange.heard(len(piece))
                if exchange.size > BODY_BYTES:
                    return
                yield piece

        async def aclose(self) -> None:
            await stream.aclose()

    return Watched()


def _json(raw: bytes | str) -> Any:
    """The decoded value; UNSET where it is no JSON."""
    try:
        return msgspec.json.decode(raw)
    except (msgspec.MsgspecError, RecursionError, UnicodeError):
        return msgspec.UNSET


def _is_error(value: dict[str, Any]) -> bool:
    """Some servers send `"error": null` with every answer, some name an error in `object` alone."""
    return bool(value.get("error")) or (value.get("object") == "error" and "choices" not in value)


def unreachable(host: str, error: Exception) -> NotDone:
    import ssl

    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return _not_done("untrusted", f"The certificate of {host} is not trusted; nothing was sent.", ask=True)
        cause = cause.__cause__ or cause.__context__
    return _not_done("unreachable", f"{host} could not be reached; nothing was sent.")


def _not_done(kind: str, message: str, *, ask: bool = False) -> NotDone:
    return NotDone(error=Trouble(kind=kind, message=message), ask=ask)
