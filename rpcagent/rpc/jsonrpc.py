"""The JSON-RPC 2.0 envelope: bytes to calls, answers to bytes.

Knows: what a request looks like, which ids are allowed, what makes a batch, and what an answer may hold. Does not know:
methods, their params, or who sent the bytes. It does no I/O, and no input makes it raise.

Names of members inside `params` that occur twice: the last one counts, as in most parsers.
"""

from __future__ import annotations

import math
import re
from typing import Any, Literal

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from rpcagent.errors import InvalidRequest, ParseError, RpcAgentError

Id = str | int | float | Raw | None
"""`Raw` is a number that would not come back letter by letter from a float (`1.50`)."""


class Call(Struct):
    """One request; a notification where `id` is UNSET."""

    jsonrpc: Literal["2.0"]
    method: str
    params: dict[str, Any] | list[Any] | UnsetType = UNSET
    id: str | int | float | UnsetType | None = UNSET

    @property
    def notification(self) -> bool:
        return self.id is UNSET


class Ok(Struct):
    id: Id
    result: Any
    jsonrpc: str = "2.0"


class ErrorObject(Struct):
    code: int
    message: str
    data: dict[str, Any]


class Fail(Struct):
    id: Id
    error: ErrorObject
    jsonrpc: str = "2.0"


Parsed = Call | Fail | None
"""A call to execute, the answer to what is none, or None: nothing to do and nothing to say."""


class _OnlyId(Struct):
    id: Raw


_call = msgspec.json.Decoder(Call)
_only_id = msgspec.json.Decoder(_OnlyId)
_items = msgspec.json.Decoder(list[Raw])
_anything = msgspec.json.Decoder()
_encode = msgspec.json.Encoder().encode

# Everything that msgspec raises for bytes from outside; more than its own errors, and not all of them documented.
_BAD_INPUT = (msgspec.MsgspecError, UnicodeError, RecursionError, ValueError)
_REASON_MAX = 300
_SPACE = b" \t\r\n"

DEPTH_MAX = 100
"""Objects and arrays in each other, in one message. Far below what any part of the product can hold."""
_TOO_DEEP = f"nested more than {DEPTH_MAX} deep"
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*+"', re.DOTALL)
_MARK = re.compile(_STRING.pattern + rb"|[\[\]{}]", re.DOTALL)
_PAIRS = bytes.maketrans(b"{}", b"[]")
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_SHALLOW_BYTES_MAX = 1 << 20


def fail(id_: Id, error: RpcAgentError) -> Fail:
    return Fail(id_, ErrorObject(error.number, error.message, error.data))


def is_batch(message: bytes) -> bool:
    if message[:1] == b"{":
        return False
    return message.lstrip(_SPACE)[:1] == b"["


def parse(message: bytes | Raw) -> Parsed:
    """Read one message that is no batch (or one item of a batch).

    A message that answers something (`result` or `error` without `method`) gives None: whoever answers an answer may
    do so for ever. Unknown members of the envelope are ignored.
    """
    if _too_deep(message):
        return _refuse(message, RecursionError())
    try:
        call = _call.decode(message)
    except _BAD_INPUT as e:
        return _refuse(message, e)
    if type(call.id) is float:
        # Echo the digits that came, not those of the nearest float.
        call.id = _only_id.decode(message).id  # type: ignore[assignment]
    return call


def _refuse(message: bytes | Raw, error: BaseException) -> Fail | None:
    """The slow path. A decoder stops at its first complaint: whether it is JSON at all is found out here."""
    try:
        value = _anything_in(message)
    except _BAD_INPUT as e:
        return fail(None, ParseError(f"not JSON: {_reason(e)}", reason=_reason(e)))
    if not isinstance(value, dict):
        reason = "a request is an object, or an array of objects"
        return fail(None, InvalidRequest(reason, reason=reason))
    if "method" not in value and ("result" in value or "error" in value):
        return None
    return fail(_usable_id(message, value.get("id")), InvalidRequest(_reason(error), reason=_reason(error)))


def _usable_id(message: bytes | Raw, value: Any) -> Id:
    if isinstance(value, float):
        try:
            return _only_id.decode(message).id
        except RecursionError:
            return _only_id.decode(_shallow(bytes(message))).id
    return value if isinstance(value, str) or type(value) is int else None


def _reason(error: BaseException) -> str:
    if isinstance(error, RecursionError):
        return _TOO_DEEP
    if isinstance(error, UnicodeError):
        return "invalid UTF-8"
    return str(error).replace("`", "")[:_REASON_MAX]


def _too_deep(message: bytes | Raw, most: int = DEPTH_MAX) -> bool:
    """Also true where brackets do not pair. Most messages have too few brackets for more than a glance."""
    text = message if type(message) is bytes else bytes(message)
    if text.count(b"[") + text.count(b"{") <= most:
        return False
    left = _STRING.sub(b"", text).translate(_PAIRS, _NO_BRACKETS)
    if b"[" * (most + 1) in left:
        return True
    for _ in range(most):
        before = len(left)
        left = left.replace(b"[]", b"")  # the innermost of all
        if len(left) == before:
            break
    return bool(left)


def _shallow(message: bytes) -> bytes:
    """With null for each object and array in its members: an id can be found in that whatever the depth was."""
    depth = at = 0
    kept = []
    for mark in _MARK.finditer(message):
        first = message[mark.start()]
        if first in b"[{":
            depth += 1
            if depth == 2:
                kept += [message[at : mark.start()], b"null"]
        elif first in b"]}":
            depth -= 1
            if depth == 1:
                at = mark.end()
    return b"".join([*kept, message[at:] if depth == 0 else b""])


def _anything_in(message: bytes | Raw) -> Any:
    """The value; of one that no decoder takes because of its depth, what `_shallow` leaves of it. Raises what decoders do."""
    try:
        return _anything.decode(message)
    except RecursionError:
        if len(bytes(message)) > _SHALLOW_BYTES_MAX:
            return {}
    return _anything.decode(_shallow(bytes(message)))


def split_batch(message: bytes, max_items: int) -> list[Raw] | Fail:
    """The items of a batch, each for `parse`; or the one answer to all of it: not JSON, empty, too many, or too deep."""
    try:
        # The whole text first, strings too: half of a broken batch must not be executed.
        _anything_in(message)
        if _too_deep(message, DEPTH_MAX + 1):
            return fail(None, InvalidRequest(_TOO_DEEP, reason=_TOO_DEEP))
        items = _items.decode(message)
    except _BAD_INPUT as e:
        return fail(None, ParseError(f"not JSON: {_reason(e)}", reason=_reason(e)))
    if not items:
        reason = "an empty batch"
    elif len(items) > max_items:
        reason = f"a batch of {len(items)} is more than the limit of {max_items}"
    else:
        return items
    return fail(None, InvalidRequest(reason, reason=reason))


class Unserialisable(Exception):
    """A result that JSON cannot hold."""


def encode(answer: Ok | Fail) -> bytes:
    """The answer as JSON on one line. Raises Unserialisable.

    NaN and the infinities are refused: written as null they would change what the peer reads. `bytes` must not stand in
    a result: they would be written as base64 text. An answer without null costs nothing for the check.
    """
    try:
        data = _encode(answer)
    except Exception as e:  # whatever the encoder cannot do
        raise Unserialisable(f"{type(e).__name__}: {e}") from e
    if b"null" in data:
        _refuse_not_finite(answer.result if type(answer) is Ok else answer.error.data)  # type: ignore[union-attr]
    return data


def encode_batch(answers: list[bytes]) -> bytes:
    return b"[" + b",".join(answers) + b"]"


def _refuse_not_finite(value: Any) -> None:
    """The encoder has succeeded, so there is no cycle and nothing too deep."""
    todo = [value]
    while todo:
        value = todo.pop()
        kind = type(value)
        if kind is float:
            if not math.isfinite(value):
                raise Unserialisable(f"{value} is no JSON number")
        elif kind is dict:
            todo.extend(value.values())
        elif kind is list or kind is tuple:
            todo.extend(value)
        elif isinstance(value, Struct):
            todo.extend(getattr(value, name) for name in value.__struct_fields__)
        elif kind not in _LEAVES:
            todo.append(msgspec.to_builtins(value))


_LEAVES = frozenset({str, int, bool, type(None), Raw, type(UNSET)})
