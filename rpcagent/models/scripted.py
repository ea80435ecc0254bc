"""A model that answers from a script: for tests, demonstrations and a first try without a provider.

Knows: the script that the run pinned, and which turn a request asks for (the number of answers already in its context, so
a restart goes on at the right place). Does not know: files, clocks of others, or the tools that its calls name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import anyio
import msgspec

from rpcagent.errors import InvalidParams
from rpcagent.models.assembly import TOKENS_MOST, TOO_DEEP, too_deep
from rpcagent.runs.definition import Definition
from rpcagent.runs.events import Trouble, Usage
from rpcagent.runs.instants import LONGEST_MS
from rpcagent.runs.outcomes import AskedCall, Failed, Lost, ModelReply, NotDone
from rpcagent.runs.ports import ModelRequest
from rpcagent.runs.state import Message

SCRIPT_FILE_BYTES = 16 * 1024 * 1024
DELAY_MOST_MS = 3_600_000
COST_MOST_USD = 1e9

_TOOL = r"\A[A-Za-z0-9_-]{1,40}\.[A-Za-z0-9_-]{1,60}\Z"
_WORD = re.compile(r"\s*\S+|\s+")
_WHERE = re.compile(r" - at `\$?(.*)`\Z")

_NO_MODEL = (
    "No model is configured, so nothing was done beyond this. To configure one, start a run whose agent has a `model`: "
    'either a script, {"provider": "scripted", "script": [{"text": "Hello.", "calls": []}]}, '
    "or a provider of a real model that this daemon knows."
)


class _Call(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One call of a turn. `arguments` may be text, as a provider sends it; text that is no JSON object is a problem."""

    tool: str
    arguments: dict[str, Any] | str = {}
    id: str = ""


class _Fail(msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    kind: str
    message: str = ""
    retry_after_ms: int | None = None
    times: int | None = None


class Turn(msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    text: str = ""
    calls: tuple[_Call, ...] = ()
    usage: Usage = Usage()
    stop: str = ""
    delay_ms: int = 0
    fail: _Fail | None = None
    expect: str | None = None


class ScriptedModel:
    """Answers turn n of `request.definition.model.script`, n being the number of answers in `request.messages`.

    A turn is `{text?, calls?: [{tool, arguments?, id?}], usage?, stop?, delayMs?, fail?, expect?}`:

    - `delayMs`: waits so long before it answers. A cancellation ends the wait at once.
    - `fail: {kind, message?, retryAfterMs?, times?}`: with `times`, the first so many attempts of the step are not done
      and the next one answers; with `retryAfterMs` alone, every attempt is not done; with neither, it failed for good.
    - `expect`: must occur in the results since the last answer, else the turn failed as `script_mismatch`.

    An empty script stands for the built-in one, which lists the workspace where it may and says how to configure a model.
    """

    async def complete(
        self, request: ModelRequest, emit: Callable[[str], None]
    ) -> ModelReply | NotDone | Failed | Lost:
        place = [message.role for message in request.messages].count("assistant")
        script = request.definition.model.script
        if not script:
            return _said(_builtin(request.definition, place), place, emit)
        if place >= len(script):
            return _failed("script_exhausted", f"The script has {len(script)} turns, and turn {place} was asked for.")
        try:
            turn = _read_turn(script[place], f"$.model.script[{place}]")
        except InvalidParams as error:
            return _failed("script_invalid", error.message)
        if turn.delay_ms:
            await anyio.sleep(turn.delay_ms / 1_000)
        if turn.fail is not None and (turn.fail.times is None or request.attempt <= turn.fail.times):
            return _as_told(turn.fail)
        if turn.expect is not None and turn.expect not in _last_results(request.messages):
            return _failed(
                "script_mismatch", f"Turn {place} expects {turn.expect!r} in the last results, and it is not there."
            )
        return _said(turn, place, emit)


def validate_script(script: object, path: str = "$.model.script") -> tuple[dict[str, Any], ...]:
    """The script, if it is one. Raises InvalidParams naming the turn and the member: `$.model.script[2].calls[0].tool`."""
    if not isinstance(script, (list, tuple)):
        raise InvalidParams("a script is a list of turns", path=path)
    for place, turn in enumerate(script):
        _read_turn(turn, f"{path}[{place}]")
    return tuple(script)


def load_script(file: Path) -> tuple[dict[str, Any], ...]:
    """A checked script from a JSON file (a list of turns) or a JSON-lines file (a turn a line; blank lines are skipped).

    Raises InvalidParams, its path being the file's name and for JSON lines the line.
    """
    try:
        with file.open("rb") as stream:
            raw = stream.read(SCRIPT_FILE_BYTES + 1)
    except OSError as error:
        raise InvalidParams(f"the script cannot be read ({error.strerror})", path=str(file)) from None
    if len(raw) > SCRIPT_FILE_BYTES:
        raise InvalidParams(f"a script has at most {SCRIPT_FILE_BYTES} bytes", path=str(file))
    if raw.lstrip()[:1] == b"[":
        return validate_script(_json(raw, str(file)), str(file))
    turns: list[dict[str, Any]] = []
    for number, line in enumerate(raw.split(b"\n"), 1):
        if line.strip():
            where = f"{file}:{number}"
            turn = _json(line, where)
            _read_turn(turn, where)
            turns.append(turn)
    return tuple(turns)


def _json(raw: bytes, where: str) -> Any:
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        raise InvalidParams("this is not JSON", path=where) from None


def _read_turn(value: object, path: str) -> Turn:
    if not isinstance(value, dict):
        raise InvalidParams("a turn is an object", path=path)
    try:
        turn = msgspec.convert(value, Turn)
    except msgspec.ValidationError as error:
        where = _WHERE.search(str(error))
        reason = str(error)[: where.start()] if where else str(error)
        raise InvalidParams(reason, path=path + (where.group(1) if where else "")) from None
    _check(turn, value, path)
    return turn


def _check(turn: Turn, value: dict[str, Any], path: str) -> None:
    if not value.keys() & {"text", "calls", "fail"}:
        raise InvalidParams("a turn has text, calls or fail", path=path)
    for place, call in enumerate(turn.calls):
        if not re.search(_TOOL, call.tool):
            raise InvalidParams(
                f"{call.tool!r} is no tool name; one looks like `files.read`", path=f"{path}.calls[{place}].tool"
            )
    if not 0 <= turn.delay_ms <= DELAY_MOST_MS:
        raise InvalidParams(f"a delay is 0 to {DELAY_MOST_MS} ms", path=f"{path}.delayMs")
    if turn.fail is not None:
        if not turn.fail.kind:
            raise InvalidParams("a failure has a kind", path=f"{path}.fail.kind")
        if turn.fail.times is not None and turn.fail.times < 1:
            raise InvalidParams("a number of attempts is at least 1", path=f"{path}.fail.times")
        if turn.fail.retry_after_ms is not None and not 0 <= turn.fail.retry_after_ms <= LONGEST_MS:
            raise InvalidParams(f"a wait is 0 to {LONGEST_MS} ms", path=f"{path}.fail.retryAfterMs")
    if not all(0 <= tokens <= TOKENS_MOST for tokens in (turn.usage.input_tokens, turn.usage.output_tokens)):
        raise InvalidParams(f"a number of tokens is 0 to {TOKENS_MOST}", path=f"{path}.usage")
    if not 0 <= turn.usage.cost_usd <= COST_MOST_USD:
        raise InvalidParams(f"a cost is 0 to {COST_MOST_USD:.0f} dollars", path=f"{path}.usage.costUsd")


def _builtin(definition: Definition, place: int) -> Turn:
    if place == 0 and definition.tool("files.list") is not None:
        return Turn(text="No model is configured. This is what the workspace holds:", calls=(_Call(tool="files.list"),))
    return Turn(text=_NO_MODEL)


def _said(turn: Turn, place: int, emit: Callable[[str], None]) -> ModelReply:
    for piece in _WORD.findall(turn.text):
        emit(piece)
    calls = tuple(_asked(call, f"call_{place}_{number}") for number, call in enumerate(turn.calls))
    return ModelReply(text=turn.text, calls=calls, usage=turn.usage, stop=turn.stop or ModelReply().stop)


def _asked(call: _Call, derived_id: str) -> AskedCall:
    provider_id = call.id or derived_id
    arguments, problem = _arguments(call.arguments)
    return AskedCall(tool=call.tool, arguments=arguments, provider_id=provider_id, problem=problem)


def _arguments(said: dict[str, Any] | str) -> tuple[dict[str, Any], str]:
    """The arguments, and what is wrong with them; never both."""
    if isinstance(said, str):
        try:
            said = msgspec.json.decode(said, type=dict[str, Any])
        except (msgspec.MsgspecError, RecursionError):
            return {}, "The arguments are not a JSON object."
    return ({}, TOO_DEEP) if too_deep(said) else (said, "")


def _as_told(fail: _Fail) -> Failed | NotDone:
    error = Trouble(kind=fail.kind, message=fail.message)
    if fail.times is None and fail.retry_after_ms is None:
        return Failed(error=error)
    return NotDone(error=error, retry_after_ms=fail.retry_after_ms)


def _last_results(messages: Sequence[Message]) -> str:
    """The texts of the tool results that follow the last answer; a result without text counts as its JSON."""
    found: list[str] = []
    for message in reversed(messages):
        if message.role != "tool":
            break
        result = message.result or {}
        texts = [part["text"] for part in result.get("content", ()) if isinstance(part.get("text"), str)]
        found.append("\n".join(texts) or json.dumps(result, ensure_ascii=False))
    return "\n".join(reversed(found))


def _failed(kind: str, message: str) -> Failed:
    return Failed(error=Trouble(kind=kind, message=message))
