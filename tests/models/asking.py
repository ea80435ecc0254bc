"""A request for a model as the engine makes one, and a context to put into it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rpcagent.ids import step_id
from rpcagent.runs.definition import Definition, ModelSettings
from rpcagent.runs.effects import ToolSpec
from rpcagent.runs.events import ToolCall
from rpcagent.runs.ports import ModelRequest
from rpcagent.runs.state import Message

RUN = "run_" + "a" * 26

CHARGE = ToolSpec(
    name="shop.charge",
    description="Charges an order.",
    parameters={
        "type": "object",
        "properties": {"order": {"type": "string"}, "amount": {"type": "number"}},
        "required": ["order"],
    },
)
READ = ToolSpec(name="files.read", parameters={"type": "object", "properties": {"path": {"type": "string"}}})
LIST = ToolSpec(name="files.list")
TOOLS = (CHARGE, READ, LIST)


def step(number: int) -> str:
    return step_id(RUN, number)


def user(content: str | tuple[dict[str, Any], ...] = "Go.") -> Message:
    return Message(role="user", content=content)


def assistant(*calls: tuple[str, dict[str, Any]], text: str = "", first: int = 2, **call: Any) -> Message:
    made = tuple(
        ToolCall(step_id=step(first + place), tool=tool, arguments=arguments, provider_id="call", **call)
        for place, (tool, arguments) in enumerate(calls)
    )
    return Message(role="assistant", content=text, calls=made)


def result(number: int, text: str = "ok", *, is_error: bool = False) -> Message:
    content = {"content": [{"type": "text", "text": text}], "isError": is_error}
    return Message(role="tool", step_id=step(number), provider_id="call", result=content)


def asked(
    messages: Sequence[Message] = (user(),),
    *,
    tools: tuple[ToolSpec, ...] = TOOLS,
    instructions: str = "Be brief.",
    **settings: Any,
) -> ModelRequest:
    model = ModelSettings(**{"provider": "openai", "name": "m", **settings})
    definition = Definition(agent="a", instructions=instructions, model=model, tools=tools)
    return ModelRequest(
        run_id=RUN,
        step_id=step(1),
        attempt=1,
        definition=definition,
        messages=tuple(messages),
        request_hash="h",
    )
