"""What a provider's refusal means: from a status, headers and a body to an outcome. Pure.

Knows: the codes and sentences that OpenAI, vLLM, llama.cpp, Ollama, LiteLLM and gateways in front of them use. Does not
know: how often anything is tried. What trying again may cure is NotDone; what only a person can cure is NotDone with
`ask`; a context that is too long is Failed, for the same request will always be.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec

from rpcagent.models.redaction import Secrets
from rpcagent.runs.events import Trouble
from rpcagent.runs.outcomes import Failed, NotDone

SAID_MOST = 500
_READ_MOST = 4_000
RETRY_AFTER_MOST_MS = 24 * 3_600_000

_CONTEXT_CODES = frozenset({"context_length_exceeded", "exceed_context_size_error", "context_window_exceeded"})
_CONTEXT = re.compile(
    r"context[ _](length|size|window)[ _]exceeded|contextwindowexceeded|maximum context length"
    r"|(exceeds?|exceeded|exceeding|greater than|longer than|larger than|too long for|fit into|fit in)\b.{0,60}\b(context|model length)"
    r"|maximum (input|model|prompt) length|(prompt|input|request|message)s?( is| are)? too long"
    r"|input tokens exceed|reduce the length of the (messages|prompt|input)",
    re.IGNORECASE | re.DOTALL,
)
_QUOTA_CODES = frozenset(
    {"insufficient_quota", "billing_hard_limit_reached", "billing_not_active", "insufficient_balance"}
)
_QUOTA = re.compile(
    r"exceeded your current quota|(credit|balance)s?( \w+){0,2} (too low|insufficient)|insufficient (credit|balance|fund)",
    re.IGNORECASE,
)
_MODEL = re.compile(r"\bmodel\b|model_not_found", re.IGNORECASE)
_STREAM_OPTIONS = re.compile(r"stream_options|include_usage")
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")
_UNIT_MS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_HTML = re.compile(r"\s*<(!doctype|html|head|body)\b", re.IGNORECASE)


class Said(msgspec.Struct, frozen=True, kw_only=True):
    """What the other side said: its words, and its codes (`code` and `type`)."""

    message: str
    codes: frozenset[str] = frozenset()
    number: int | None = None


def read_said(body: bytes) -> Said:
    """The words of an error body, whatever its shape."""
    text = body.decode("utf-8", "replace").strip()
    if not text:
        return Said(message="(no words)")
    try:
        value = msgspec.json.decode(text)
    except (msgspec.MsgspecError, RecursionError, UnicodeError):
        return Said(message="(an HTML page)" if _HTML.match(text) else text)
    return said_in(value)


def said_in(value: Any) -> Said:
    """The words of an error in JSON: `{"error": {...} | "..."}`, `{"message": ...}`, `{"detail": ...}`."""
    error = value.get("error", value) if isinstance(value, dict) else value
    if not isinstance(error, dict):
        return Said(message=error if isinstance(error, str) else _short(error))
    message = next((error[name] for name in ("message", "detail", "msg") if error.get(name)), None)
    code = error.get("code")
    number = (
        int(code) if (type(code) is int or (isinstance(code, str) and code.isdigit())) and len(str(code)) == 3 else None
    )
    return Said(
        message=message if isinstance(message, str) else _short(error if message is None else message),
        codes=frozenset(str(error[name]) for name in ("code", "type") if isinstance(error.get(name), str)),
        number=number,
    )


def refused(
    status: int, headers: Mapping[str, str], said: Said, *, host: str, secrets: Secrets, now: datetime
) -> NotDone | Failed:
    """The outcome of an answer with this status. `headers` in lower case."""
    plain = secrets.told(said.message, _READ_MOST)
    message = f"{host} answered HTTP {status}: {_bounded(plain)}"

    def not_done(kind: str, *, ask: bool = False, wait: bool = False) -> NotDone:
        after = retry_after_ms(headers, now) if wait else None
        return NotDone(error=Trouble(kind=kind, message=message), retry_after_ms=after, ask=ask)

    if status == 402 or said.codes & _QUOTA_CODES or (status in {400, 403, 429} and _QUOTA.search(plain)):
        return not_done("quota", ask=True)
    if status == 429:
        return not_done("rate_limited", wait=True)
    if status in {503, 529}:
        return not_done("overloaded", wait=True)
    if status in {401, 403}:
        return not_done("credentials", ask=True)
    if status not in {404, 407} and (said.codes & _CONTEXT_CODES or _CONTEXT.search(plain)):
        explained = f"The context is too long for this model. {message}"
        return Failed(error=Trouble(kind="context_overflow", message=explained))
    if status >= 500 or status in {408, 409, 425}:
        return not_done("server_error", wait=True)
    if status == 404:
        return not_done("model_not_found" if _MODEL.search(" ".join((plain, *said.codes))) else "not_found", ask=True)
    if 300 <= status < 400:
        message = (
            f"{host} answered HTTP {status} and names another place, to which nothing was sent. Correct the base URL."
        )
        return not_done("redirected", ask=True)
    return not_done("bad_request", ask=True)


def refused_inside(said: Said, *, host: str, secrets: Secrets, now: datetime) -> NotDone | Failed:
    """The outcome of an error inside an answer with status 200: by its own number, where it has one."""
    if said.number is not None and 400 <= said.number < 600:
        return refused(said.number, {}, said, host=host, secrets=secrets, now=now)
    plain = secrets.told(said.message, _READ_MOST)
    words = _bounded(plain)
    if said.codes & _CONTEXT_CODES or _CONTEXT.search(plain):
        explained = f"The context is too long for this model. {host} answered with an error: {words}"
        return Failed(error=Trouble(kind="context_overflow", message=explained))
    if said.codes & _QUOTA_CODES:
        return NotDone(error=Trouble(kind="quota", message=f"{host} answered with an error: {words}"), ask=True)
    return NotDone(error=Trouble(kind="bad_answer", message=f"{host} answered with an error: {words}"))


def refuses_stream_options(status: int, said: Said) -> bool:
    """Whether the one thing that is wrong with the request is that it asks for token counts in a stream."""
    return status in {400, 422} and _STREAM_OPTIONS.search(said.message) is not None


def retry_after_ms(headers: Mapping[str, str], now: datetime) -> int | None:
    """How long the other side asks to wait. None where it does not say, or says "not at all": then our own backoff holds."""
    wait = _number(headers.get("retry-after-ms"), 1)
    if wait is None:
        wait = _number(headers.get("retry-after"), 1_000)
    if wait is None:
        wait = _date(headers.get("retry-after"), now)
    if wait is None:
        wait = _reset(headers, now)
    return round(min(wait, RETRY_AFTER_MOST_MS)) if wait is not None and wait >= 1 else None


def _number(text: str | None, unit: int) -> float | None:
    return float(text) * unit if text is not None and re.fullmatch(r"\s*\d{1,15}(\.\d{1,6})?\s*", text) else None


def _date(text: str | None, now: datetime) -> float | None:
    if text is None:
        return None
    from email.utils import parsedate_to_datetime

    try:
        until = parsedate_to_datetime(text)
    except (ValueError, OverflowError):
        return None
    if until.tzinfo is None:
        until = until.replace(tzinfo=UTC)
    return (until - now).total_seconds() * 1_000


def _reset(headers: Mapping[str, str], now: datetime) -> float | None:
    """`x-ratelimit-reset`: of what is used up, the last to come back; durations (`1m30s`), seconds, or an instant."""
    names = [name for name in headers if name.startswith("x-ratelimit-reset")]
    spent = [name for name in names if headers.get(name.replace("reset", "remaining"), "").strip() == "0"]
    waits = [wait for name in spent if (wait := _reset_ms(headers[name].strip(), now)) is not None]
    return max(waits, default=None)


def _reset_ms(text: str, now: datetime) -> float | None:
    number = _number(text, 1)
    if number is None:
        parts = _DURATION.findall(text)
        if not parts or "".join(amount + unit for amount, unit in parts) != text:
            return None
        return sum(float(amount) * _UNIT_MS[unit] for amount, unit in parts)
    if number < 1e9:
        return number * 1_000
    return number * (1 if number > 1e11 else 1_000) - now.timestamp() * 1_000


def _bounded(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= SAID_MOST else text[: SAID_MOST - 1] + "…"


def _short(value: Any) -> str:
    return msgspec.json.encode(value).decode()
