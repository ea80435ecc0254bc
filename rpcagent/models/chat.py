"""What a chat-completions endpoint is sent: from a ModelRequest to bytes. Pure.

Knows: how messages, tools and their names look on that wire. Does not know: how bytes travel, or what comes back. The same
request gives the same bytes in every process. A call goes out under our own step id, whatever id its provider gave it,
and never without exactly one result.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from rpcagent.runs.definition import Definition
from rpcagent.runs.effects import ToolSpec
from rpcagent.runs.events import ToolCall
from rpcagent.runs.ports import ModelRequest
from rpcagent.runs.state import Message

NAME_LENGTH = 64
"""Longer function names are refused by providers."""

_NO_NAME = re.compile(r"[^A-Za-z0-9_-]")
_TOKEN_LIMITS = ("max_tokens", "max_completion_tokens")


class Unpaired(Exception):
    """A call in the context without exactly one result. A fault of ours; such a context is never sent."""


class Names:
    """The tools' names on the wire (`server__tool`) and back. Two that would be the same, or too long, get a suffix."""

    def __init__(self, tools: Iterable[ToolSpec]) -> None:
        self._wire: dict[str, str] = {}
        self._ours: dict[str, str] = {}
        for spec in tools:
            name = spec.name.replace(".", "__")
            if len(name) > NAME_LENGTH or name in self._ours:
                name = f"{name[: NAME_LENGTH - 9]}_{hashlib.sha256(spec.name.encode()).hexdigest()[:8]}"
            self._wire[spec.name], self._ours[name] = name, spec.name

    def wire(self, tool: str) -> str:
        """The name to send. One that is no tool's is made fit to stand in a history."""
        return self._wire.get(tool) or _NO_NAME.sub("_", tool.replace(".", "__"))[:NAME_LENGTH] or "_"

    def ours(self, name: str) -> str:
        """The tool that a model means by `name`; what is unknown stays recognisable."""
        return self._ours.get(name) or (name if name in self._wire else name.replace("__", ".", 1))

    def known(self, name: str) -> bool:
        return name in self._ours or name in self._wire


def body_of(request: ModelRequest, *, usage: bool = True) -> bytes:
    """The request's body. `usage`: a stream is asked to end with its token counts, which some servers refuse.

    Options go through as they are, and one that is null takes a member away. Raises Unpaired.
    """
    definition = request.definition
    settings = definition.model
    names = Names(definition.tools)
    body: dict[str, Any] = {"model": settings.name, "messages": messages_of(definition, request.messages, names)}
    if definition.tools:
        body["tools"] = [_tool(spec, names) for spec in definition.tools]
    options: dict[str, Any] = settings.options
    if settings.max_output_tokens and not any(name in options for name in _TOKEN_LIMITS):
        body["max_tokens"] = settings.max_output_tokens
    body["stream"] = settings.stream
    if body["stream"] and usage:
        body["stream_options"] = {"include_usage": True}
    body.update(options)
    if not usage:
        body.pop("stream_options", None)
    return msgspec.json.encode({name: value for name, value in body.items() if value is not None})


def messages_of(definition: Definition, messages: Sequence[Message], names: Names) -> list[dict[str, Any]]:
    """The messages in order, the instructions first. Raises Unpaired."""
    sent: list[dict[str, Any]] = []
    if definition.instructions:
        sent.append({"role": "system", "content": definition.instructions})
    owed: list[str] = []
    for message in messages:
        if message.role == "tool":
            if not owed or owed[0] != message.step_id:
                raise Unpaired
            sent.append({"role": "tool", "tool_call_id": owed.pop(0), "content": result_text(message.result or {})})
            continue
        if owed:
            raise Unpaired
        if message.role == "user":
            sent.append({"role": "user", "content": _content(message.content)})
        else:
            owed = [call.step_id for call in message.calls]
            sent.append(_answer(message, names))
    if owed:
        raise Unpaired
    return sent


def result_text(result: dict[str, Any]) -> str:
    """An MCP tool result as text: its text parts, else its structured content; other parts are named."""
    parts = [_part_text(part) for part in result.get("content", ()) if isinstance(part, dict)]
    text = "\n".join(parts)
    if not text and "structuredContent" in result:
        text = _json(result["structuredContent"])
    return f"Error: {text}" if result.get("isError") else text


def _answer(message: Message, names: Names) -> dict[str, Any]:
    text = _content(message.content)
    if not message.calls:
        return {"role": "assistant", "content": text}
    return {"role": "assistant", "content": text or None, "tool_calls": [_call(call, names) for call in message.calls]}


def _call(call: ToolCall, names: Names) -> dict[str, Any]:
    # The arguments keep the order in which the model wrote them, so that a server's prompt cache finds them again.
    function = {"name": names.wire(call.tool), "arguments": _json(call.arguments)}
    return {"id": call.step_id, "type": "function", "function": function}


def _tool(spec: ToolSpec, names: Names) -> dict[str, Any]:
    parameters = spec.parameters or {"type": "object", "properties": {}}
    function = {"name": names.wire(spec.name), "description": spec.description, "parameters": parameters}
    return {"type": "function", "function": function}


def _content(content: str | tuple[dict[str, Any], ...]) -> str | list[dict[str, Any]]:
    """Text alone is sent as one text, which every server takes; only other parts make it a list."""
    if isinstance(content, str):
        return content
    if all(part.get("type") == "text" and isinstance(part.get("text"), str) for part in content):
        return "\n".join(part["text"] for part in content)
    return [_part(part) for part in content]


def _part(part: dict[str, Any]) -> dict[str, Any]:
    if part.get("type") == "image" and isinstance(part.get("data"), str):
        url = f"data:{part.get('mimeType', 'image/png')};base64,{part['data']}"
        return {"type": "image_url", "image_url": {"url": url}}
    return part


def _part_text(part: dict[str, Any]) -> str:
    if isinstance(part.get("text"), str):
        return str(part["text"])
    resource = part.get("resource")
    if isinstance(resource, dict) and isinstance(resource.get("text"), str):
        return str(resource["text"])
    return f"[{part.get('type', 'part')} {part.get('mimeType', '')}".rstrip() + ", not shown]"


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
