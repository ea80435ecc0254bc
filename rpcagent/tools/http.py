"""Tools behind HTTP: one request per attempt, and what its end says about the effect.

Knows: how arguments fill a URL and a body, and from which moment on a request may have acted. Does not know: retries,
runs, policy, or what a look-up's answer means. httpx is imported at the first call.

The line is the first byte: what fails before a connection stands did nothing outside (NotDone). After it, only a definite
answer counts; anything else is Lost for an effect, and Failed for a read. Every call has a connection of its own: a kept
one that the server closed meanwhile would turn a call that never arrived into one that nobody can tell about.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import quote, urlencode, urlsplit

import msgspec

from rpcagent.errors import InvalidParams
from rpcagent.runs.effects import EffectClass
from rpcagent.runs.events import Trouble
from rpcagent.runs.outcomes import Failed, Lost, NotDone, ToolReply
from rpcagent.runs.ports import ToolRequest
from rpcagent.tools.reconcile import Answer, LookUpCall
from rpcagent.tools.results import text_result
from rpcagent.urls import checked_url

if TYPE_CHECKING:
    import httpx

BODY_BYTES = 8 * 1024 * 1024
CONNECT_MOST_S = 10.0
RETRY_AFTER_MOST_MS = 24 * 3_600_000
KEY_HEADER = "Idempotency-Key"
KEY_NAME = "key"
"""`{key}` in a URL is the step's key, whatever the arguments say."""

_HOLE = re.compile(r"\{([A-Za-z_][A-Za-z0-9_-]*)\}")
_SECRET = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_HEADER_VALUE = re.compile(r"[\x20-\x7e]*")
_OURS = frozenset({"idempotency-key", "host", "content-length", "transfer-encoding", "connection", "accept-encoding"})
_SECRET_LENGTH = 8


class HttpCall(
    msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True, forbid_unknown_fields=True
):
    """How a tool is reached. `{name}` in `url` is an argument, `${NAME}` in a header a variable of the environment.

    `body` `arguments`: those that the URL did not take are sent as JSON, and with GET as the query.
    """

    url: str
    method: Literal["GET", "POST", "PUT", "PATCH", "DELETE"] = "POST"
    headers: dict[str, str] = {}
    body: Literal["arguments", "none"] = "arguments"


class _Response(msgspec.Struct, frozen=True, kw_only=True):
    status: int
    headers: dict[str, str]
    body: bytes
    cut: bool


class _Unusable(Exception):
    """The request cannot be made from these arguments or this environment; nothing was sent."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.trouble = Trouble(kind=kind, message=message)


class Http:
    """The adapter. `environ` is where `${NAME}` in headers is read from, at each call; `now` gives the time in UTC."""

    def __init__(
        self, environ: Mapping[str, str] = os.environ, now: Callable[[], datetime] = lambda: datetime.now(UTC)
    ) -> None:
        self._environ = environ
        self._now = now
        self._client: httpx.AsyncClient | None = None

    async def call(self, request: ToolRequest) -> ToolReply | Failed | NotDone | Lost:
        effect = request.spec.effect != "read_only"
        try:
            call = msgspec.convert(request.spec.binding["http"], HttpCall)
            secrets = self._secrets(call.headers)
            url, rest = fill(call.url, request.arguments, request.key)
            body = rest if call.body == "arguments" else None
            headers = _filled(call.headers, secrets) | ({KEY_HEADER: request.key} if effect else {})
        except _Unusable as unusable:
            return Failed(error=unusable.trouble)
        response = await self._send(call.method, url, headers, body, request)
        if not isinstance(response, _Response):
            return response
        return self._outcome(response, secrets, request.spec.effect)

    async def ask(self, request: ToolRequest) -> Answer | None:
        """Sends the look-up of an earlier attempt. None: no answer to judge by."""
        binding = request.spec.binding
        try:
            call = msgspec.convert(binding["lookup"], LookUpCall)
            headers = msgspec.convert(binding["http"], HttpCall).headers if call.headers is None else call.headers
            secrets = self._secrets(headers)
            url, _ = fill(call.url, request.arguments, request.key)
        except _Unusable:
            return None
        reading = msgspec.structs.replace(request, spec=msgspec.structs.replace(request.spec, effect="read_only"))
        response = await self._send(call.method, url, _filled(headers, secrets), None, reading)
        if not isinstance(response, _Response) or response.cut:
            return None
        text, value = _read(response, secrets)
        structured = value if isinstance(value, dict) else None
        return Answer(status=response.status, value=value, result=text_result(text or "", structured))

    async def aclose(self) -> None:
        """Closes the client. A later call makes a new one."""
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    async def _send(
        self, method: str, url: str, headers: dict[str, str], arguments: dict[str, Any] | None, request: ToolRequest
    ) -> _Response | Failed | NotDone | Lost:
        import httpx

        effect = request.spec.effect != "read_only"
        # Less than the whole limit, so that a connection that never stood is told apart from a call that never ended.
        connect_s = min(CONNECT_MOST_S, request.spec.timeout_ms / 3_000)
        try:
            content = None
            if arguments is not None and method == "GET":
                url = _with_query(url, arguments)
            elif arguments or (arguments is not None and method != "DELETE"):
                content = msgspec.json.encode(arguments)
            all_headers = httpx.Headers({"Accept-Encoding": "identity"})
            if content is not None:
                all_headers["Content-Type"] = "application/json"
            all_headers.update(headers)
            limits = httpx.Timeout(None, connect=connect_s, pool=connect_s)
            prepared = self._opened().build_request(method, url, headers=all_headers, content=content, timeout=limits)
        except (httpx.InvalidURL, UnicodeError, ValueError):
            return _failed("invalid_arguments", "These arguments make no valid request.")
        try:
            return await _exchanged(await self._opened().send(prepared, stream=True))
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout):
            host = urlsplit(url).netloc
            return NotDone(error=Trouble(kind="unreachable", message=f"{host} could not be reached; nothing was sent."))
        except httpx.TimeoutException:
            return Lost(reason="timeout") if effect else _failed("timeout", "No answer in time.")
        except (httpx.HTTPError, httpx.StreamError):
            if effect:
                return Lost(reason="connection_lost")
            return _failed("connection_lost", "The connection ended before the whole answer came.")

    def _opened(self) -> httpx.AsyncClient:
        if self._client is None:
            import httpx

            self._client = httpx.AsyncClient(
                trust_env=False, follow_redirects=False, limits=httpx.Limits(max_keepalive_connections=0)
            )
        return self._client

    def _secrets(self, headers: Mapping[str, str]) -> dict[str, str]:
        names = {name for value in headers.values() for name in _SECRET.findall(value)}
        missing = sorted(name for name in names if name not in self._environ)
        if missing:
            raise _Unusable("missing_secret", f"The environment has no {', '.join(missing)}.")
        secrets = {name: self._environ[name] for name in names}
        for name, value in secrets.items():
            if not _HEADER_VALUE.fullmatch(value):
                raise _Unusable("missing_secret", f"{name} holds something that no header can carry.")
        return secrets

    def _outcome(
        self, response: _Response, secrets: dict[str, str], contract: EffectClass
    ) -> ToolReply | Failed | NotDone | Lost:
        status, effect = response.status, contract != "read_only"
        retry_after = response.headers.get("retry-after")
        # A 429 refused the request. A 503 may be a gateway's, after what stands behind it acted: nothing is sent again on
        # its word alone.
        if status == 429 or (status == 503 and retry_after is not None and contract != "at_most_once"):
            trouble = Trouble(kind="busy", message=f"HTTP {status}: not now.")
            return NotDone(error=trouble, retry_after_ms=self._wait_ms(retry_after))
        if status >= 500:
            return Lost(reason="connection_lost") if effect else _failed("server_error", f"HTTP {status}.")
        text, value = _read(response, secrets)
        garbage = text is None or (effect and value is msgspec.UNSET and not response.cut and not _plain(response))
        if garbage and 200 <= status < 300:
            return Lost(reason="connection_lost") if effect else _failed("not_text", "The answer is no text.")
        text = text or ""
        if response.cut:
            text += f"\n[the answer has more than {BODY_BYTES} bytes; the rest was not read]"
        if not 200 <= status < 300:
            location = response.headers.get("location") if status < 400 else None
            text = f"HTTP {status}{f', location {location}' if location else ''}\n{text}".rstrip()
        # A 302 or 303 answers a request that was carried out; the other redirects say that it was not, here.
        is_error = status >= 400 or status in {300, 301, 305, 307, 308}
        structured = value if isinstance(value, dict) else None
        return ToolReply(result=text_result(text, structured, is_error=is_error))

    def _wait_ms(self, retry_after: str | None) -> int | None:
        if retry_after is None:
            return None
        if retry_after.strip().isascii() and retry_after.strip().isdigit():
            return min(int(retry_after.strip()[:9]) * 1_000, RETRY_AFTER_MOST_MS)
        from email.utils import parsedate_to_datetime

        try:
            until = parsedate_to_datetime(retry_after)
        except (ValueError, OverflowError):
            return None
        if until.tzinfo is None:
            until = until.replace(tzinfo=UTC)
        return min(max(0, round((until - self._now()).total_seconds() * 1_000)), RETRY_AFTER_MOST_MS)


def check_url(url: str, parameters: Mapping[str, Any], path: str) -> None:
    """Raises InvalidParams unless `url` is http or https, names its host, and takes its holes from `parameters`."""
    pieces = checked_url(url, path, "a header, as ${NAME}")
    if "{" in pieces.netloc or "}" in pieces.netloc:
        raise InvalidParams("the host cannot come from an argument", path=path)
    if re.search(r"[{}]", _HOLE.sub("", url)):
        raise InvalidParams("a brace that is no {name}", path=path)
    known = parameters.get("properties", {})
    for name in _HOLE.findall(url):
        if name != KEY_NAME and name not in known:
            raise InvalidParams(f"{{{name}}} is none of the tool's parameters", path=path)


def check_headers(headers: Mapping[str, str], path: str) -> None:
    """Raises InvalidParams for what no header can be, or is set by the daemon itself."""
    for name, value in headers.items():
        if not _HEADER_NAME.fullmatch(name) or not _HEADER_VALUE.fullmatch(value):
            raise InvalidParams(f"{name!r} is no header", path=path)
        if name.lower() in _OURS:
            raise InvalidParams(f"{name} is set by the daemon", path=path)


def fill(url: str, arguments: Mapping[str, Any], key: str) -> tuple[str, dict[str, Any]]:
    """The URL with its holes filled, percent-encoded, and the arguments that it did not take. Raises for what is missing,
    and for what would change the path's shape."""
    taken: set[str] = set()

    def value_of(match: re.Match[str]) -> str:
        name = match.group(1)
        if name == KEY_NAME:
            return quote(key, safe="")
        taken.add(name)
        value = arguments.get(name)
        if isinstance(value, bool):
            return "true" if value else "false"
        if not isinstance(value, (str, int, float)) or value == "":
            raise _Unusable("invalid_arguments", f"The argument {name!r} must be a text or a number.")
        try:
            return quote(str(value), safe="")
        except UnicodeEncodeError:
            raise _Unusable("invalid_arguments", f"The argument {name!r} is not valid Unicode.") from None

    filled = _HOLE.sub(value_of, url)
    before = urlsplit(_HOLE.sub("x", url)).path.split("/")
    after = urlsplit(filled).path.split("/")
    if any(now in {".", ".."} and now != then for then, now in zip(before, after, strict=True)):
        raise _Unusable("invalid_arguments", "An argument may not be `.` or `..`.")
    return filled, {name: value for name, value in arguments.items() if name not in taken}


def _filled(headers: Mapping[str, str], secrets: Mapping[str, str]) -> dict[str, str]:
    return {name: _SECRET.sub(lambda match: secrets[match.group(1)], value) for name, value in headers.items()}


def _with_query(url: str, arguments: Mapping[str, Any]) -> str:
    pairs = [
        (name, item if isinstance(item, str) else msgspec.json.encode(item).decode())
        for name, value in arguments.items()
        for item in (value if isinstance(value, list) else [value])
        if item is not None
    ]
    if not pairs:
        return url
    return f"{url}{'&' if urlsplit(url).query else '?'}{urlencode(pairs)}"


async def _exchanged(response: httpx.Response) -> _Response:
    pieces: list[bytes] = []
    size = 0
    try:
        async for piece in response.aiter_bytes():
            pieces.append(piece)
            size += len(piece)
            if size > BODY_BYTES:
                break
    finally:
        await response.aclose()
    body = b"".join(pieces)
    headers = {name.lower(): value for name, value in response.headers.items()}
    return _Response(status=response.status_code, headers=headers, body=body[:BODY_BYTES], cut=size > BODY_BYTES)


def _read(response: _Response, secrets: Mapping[str, str]) -> tuple[str | None, Any]:
    """The body as text (None: it is none) and as decoded JSON (UNSET: it is none), secrets replaced by their names."""
    try:
        text = response.body.decode("utf-8", "ignore" if response.cut else "strict")
    except UnicodeDecodeError:
        return None, msgspec.UNSET
    for name, value in secrets.items():
        if len(value) >= _SECRET_LENGTH:
            text = text.replace(value, f"${{{name}}}")
    try:
        return text, msgspec.json.decode(text)
    except (msgspec.MsgspecError, RecursionError):
        return text, msgspec.UNSET


def _plain(response: _Response) -> bool:
    """Whether text that is no JSON is an answer all the same: nothing at all, or what calls itself plain text."""
    return not response.body or response.headers.get("content-type", "").partition(";")[0].strip() == "text/plain"


def _failed(kind: str, message: str) -> Failed:
    return Failed(error=Trouble(kind=kind, message=message))
