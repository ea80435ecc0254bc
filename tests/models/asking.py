"""A request for a model as the engine makes one, a context to put into it, and what the endpoint of the fixtures answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rpcagent.ids import step_id
from rpcagent.models.openai import OpenAiModel
from rpcagent.runs.definition import Definition, ModelSettings
from rpcagent.runs.effects import ToolSpec
from rpcagent.runs.events import ToolCall, Trouble, Usage
from rpcagent.runs.outcomes import AskedCall, ModelReply, NotDone
from rpcagent.runs.ports import ModelRequest
from rpcagent.runs.state import Message
from tests.service.model_driver import ModelServer

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


# The endpoint of the fixtures, and what it answers

KEY = "sk-canary-0123456789abcdef"
USAGE = Usage(input_tokens=11, output_tokens=7)
TURN = {
    "text": "I charge two.",
    "calls": [
        {"name": "shop__charge", "arguments": {"order": "A1", "amount": 10}},
        {"name": "shop__charge", "arguments": {"order": "B2", "amount": 10}},
        {"name": "files__list"},
    ],
}
LATER = {"text": "Done."}


def calls(*ids: str, **problem: str) -> tuple[AskedCall, ...]:
    given = ids or ("call_0", "call_1", "call_2")
    arguments: list[dict[str, Any]] = [{"order": "A1", "amount": 10}, {"order": "B2", "amount": 10}, {}]
    tools = ["shop.charge", "shop.charge", "files.list"]
    return tuple(
        AskedCall(
            tool=tool,
            arguments={} if name in problem else arguments[place],
            provider_id=name,
            problem=problem.get(name, ""),
        )
        for place, (tool, name) in enumerate(zip(tools, given, strict=True))
    )


WHOLE = ModelReply(text="I charge two.", calls=calls(), usage=USAGE, stop="tool_calls")


async def ask(model: OpenAiModel, server: ModelServer, emitted: list[str] | None = None, **settings: Any) -> Any:
    request = asked(**{"base_url": server.base_url, "api_key_env": "KEY", **settings})
    return await model.complete(request, [].append if emitted is None else emitted.append)


def not_done(kind: str, message: str, **members: Any) -> NotDone:
    return NotDone(error=Trouble(kind=kind, message=message), **members)
