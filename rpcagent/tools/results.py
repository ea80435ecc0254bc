"""The shape of a tool's result: an MCP tool result of plain JSON values, of a bounded size.

Knows: what JSON can hold, and how a long text is cut so that a reader sees that it was. Does not know: which tool it was.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any

import msgspec

TEXT_BYTES = 64 * 1024
TAIL_BYTES = 16 * 1024
PARTS = 64
DEPTH = 100


class NotPlain(Exception):
    """The value cannot be recorded as it is: JSON has no such thing."""


def text_result(text: str, structured: dict[str, Any] | None = None, *, is_error: bool = False) -> dict[str, Any]:
    result: dict[str, Any] = {"content": [{"type": "text", "text": text}]}
    if structured is not None:
        result["structuredContent"] = structured
    if is_error:
        result["isError"] = True
    return result


def normalised(result: object) -> dict[str, Any]:
    """The same result, checked and cut: at most TEXT_BYTES of text in all, and as many of structured content.

    What is no MCP result becomes the text of one. Raises NotPlain for NaN, infinities, bytes, sets, keys that are no
    text, unpaired surrogates and nesting deeper than DEPTH.
    """
    _check(result, 0)
    if isinstance(result, str):
        return text_result(cut(result))
    if not isinstance(result, dict) or not isinstance(result.get("content"), list):
        structured = result if isinstance(result, dict) else None
        return normalised(text_result(msgspec.json.encode(result).decode(), structured))
    parts, left = [], TEXT_BYTES
    for part in result["content"][:PARTS]:
        shown = _cut_part(part, left)
        left -= min(left, len(msgspec.json.encode(shown)))
        parts.append(shown)
    if len(result["content"]) > PARTS:
        parts.append({"type": "text", "text": f"[cut: {len(result['content']) - PARTS} more parts]"})
    cleaned: dict[str, Any] = {"content": parts}
    structured = result.get("structuredContent")
    if isinstance(structured, dict):
        raw = msgspec.json.encode(structured)
        if len(raw) <= TEXT_BYTES:
            cleaned["structuredContent"] = structured
        else:
            parts.append({"type": "text", "text": f"[cut: structured content of {_named(raw)}]"})
    if result.get("isError") is True:
        cleaned["isError"] = True
    return cleaned


def cut(text: str, most: int = TEXT_BYTES) -> str:
    """`text`, or its head and tail around a marker that names the size and the SHA-256 of the whole.

    `most` is in bytes of UTF-8, and the marker comes on top of it.
    """
    raw = text.encode()
    if len(raw) <= most:
        return text
    tail_size = min(TAIL_BYTES, most // 4)
    head = raw[: most - tail_size].decode("utf-8", "ignore")
    tail = raw[len(raw) - tail_size :].decode("utf-8", "ignore") if tail_size else ""
    return f"{head}\n[cut: {len(raw) - most} bytes left out here; the whole has {_named(raw)}]\n{tail}"


def _cut_part(part: object, left: int) -> dict[str, Any]:
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise NotPlain("a part of the content is no object with a type")
    if part["type"] == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": cut(part["text"], left)}
    raw = msgspec.json.encode(part)
    if len(raw) <= left:
        return part
    return {"type": "text", "text": f"[cut: a part of type {part['type'][:40]!r}, {_named(raw)}]"}


def _named(raw: bytes) -> str:
    return f"{len(raw)} bytes, sha256 {hashlib.sha256(raw).hexdigest()}"


def _check(value: object, depth: int) -> None:
    if depth > DEPTH:
        raise NotPlain("nested too deeply")
    match value:
        case None | bool() | int():
            return
        case str():
            _check_text(value)
        case float():
            if not math.isfinite(value):
                raise NotPlain("a number is not finite")
        case list() | tuple():
            for item in value:
                _check(item, depth + 1)
        case dict():
            for key, item in value.items():
                if not isinstance(key, str):
                    raise NotPlain("a key is no text")
                _check_text(key)
                _check(item, depth + 1)
        case _:
            raise NotPlain(f"a value is of type {type(value).__name__}")


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise NotPlain("a text has an unpaired surrogate") from None
