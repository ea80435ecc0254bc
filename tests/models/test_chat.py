"""What is sent to a chat-completions endpoint: the same bytes for the same request, and names that come back as they went."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rpcagent.models.chat import NAME_LENGTH, Names, body_of, result_text
from rpcagent.models.endpoint import MissingSecret, completions_url, endpoint_of
from rpcagent.runs import events as ev
from rpcagent.runs.definition import ModelSettings
from rpcagent.runs.effects import ToolSpec
from rpcagent.runs.state import Message
from tests.models.asking import asked, assistant, result, step, user

ROOT = Path(__file__).parents[2]
HISTORY = (
    user("Größe?"),
    assistant(("shop.charge", {"order": "A1", "amount": 10, "a": {"z": 1, "b": 2}}), ("files.list", {}), text="Two."),
    result(2, "paid"),
    result(3, "no", is_error=True),
)


def body(*messages: Message, **settings: Any) -> dict[str, Any]:
    value: dict[str, Any] = msgspec.json.decode(body_of(asked(messages or (user(),), **settings)))
    return value


def test_a_request_looks_like_this() -> None:
    sent = body(*HISTORY, max_output_tokens=50, options={"temperature": 0.5})
    tools = sent.pop("tools")
    assert sent == {
        "model": "m",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Größe?"},
            {
                "role": "assistant",
                "content": "Two.",
                "tool_calls": [
                    {
                        "id": step(2),
                        "type": "function",
                        "function": {
                            "name": "shop__charge",
                            "arguments": '{"order":"A1","amount":10,"a":{"z":1,"b":2}}',
                        },
                    },
                    {"id": step(3), "type": "function", "function": {"name": "files__list", "arguments": "{}"}},
                ],
            },
            {"role": "tool", "tool_call_id": step(2), "content": "paid"},
            {"role": "tool", "tool_call_id": step(3), "content": "Error: no"},
        ],
        "max_tokens": 50,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.5,
    }
    assert [tool["function"]["name"] for tool in tools] == ["shop__charge", "files__read", "files__list"]
    assert tools[2]["function"]["parameters"] == {"type": "object", "properties": {}}


def test_the_same_request_has_the_same_bytes_in_another_process_and_after_a_replay() -> None:
    here = body_of(asked(HISTORY))
    code = (
        "import sys; from rpcagent.models.chat import body_of; from tests.models.asking import asked\n"
        "from tests.models.test_chat import HISTORY; sys.stdout.buffer.write(body_of(asked(HISTORY)))"
    )
    there = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=True, timeout=60).stdout
    assert there == here
    replayed = msgspec.json.decode(msgspec.json.encode(HISTORY), type=tuple[Message, ...])
    assert body_of(asked(replayed)) == here


def test_a_longer_history_begins_with_the_bytes_of_the_shorter_so_that_a_prompt_cache_finds_it() -> None:
    short, long = body_of(asked(HISTORY[:1])), body_of(asked(HISTORY))
    assert long.startswith(short[: short.index(b"]")])


def test_the_providers_own_ids_never_reach_the_wire() -> None:
    other = assistant(("shop.charge", {}))
    calls = (msgspec.structs.replace(other.calls[0], provider_id="something else"),)
    renamed = msgspec.structs.replace(other, calls=calls)
    assert body_of(asked((user(), other, result(2)))) == body_of(asked((user(), renamed, result(2))))


@pytest.mark.parametrize(
    ("settings", "present"),
    [
        ({}, {"stream": True, "stream_options": {"include_usage": True}}),
        ({"stream": False}, {"stream": False}),
        ({"max_output_tokens": 5}, {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 5}),
        (
            {"max_output_tokens": 5, "options": {"max_completion_tokens": 6, "stream_options": None}},
            {"stream": True, "max_completion_tokens": 6},
        ),
    ],
)
def test_options_go_through_and_win(settings: dict[str, Any], present: dict[str, Any]) -> None:
    sent = body(tools=(), instructions="", **settings)
    assert sent == {"model": "m", "messages": [{"role": "user", "content": "Go."}], **present}
    assert b"stream_options" not in body_of(asked(**settings), usage=False)


@pytest.mark.parametrize(
    ("content", "sent"),
    [
        (({"type": "text", "text": "a"}, {"type": "text", "text": "b"}), "a\nb"),
        (
            ({"type": "text", "text": "a"}, {"type": "image", "data": "QQ==", "mimeType": "image/gif"}),
            [
                {"type": "text", "text": "a"},
                {"type": "image_url", "image_url": {"url": "data:image/gif;base64,QQ=="}},
            ],
        ),
        (({"type": "other", "x": 1},), [{"type": "other", "x": 1}]),
    ],
)
def test_text_goes_as_one_text_and_only_other_parts_make_a_list(content: Any, sent: Any) -> None:
    assert body(user(content))["messages"][1] == {"role": "user", "content": sent}


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, "a\nb"),
        ({"content": [], "structuredContent": {"n": 1}}, '{"n":1}'),
        ({"content": [{"type": "image", "mimeType": "image/png", "data": "x"}]}, "[image image/png, not shown]"),
        ({"content": [{"type": "resource", "resource": {"text": "in it"}}]}, "in it"),
        ({"content": [{"type": "text", "text": "bad"}], "isError": True}, "Error: bad"),
        ({"content": []}, ""),
        ({}, ""),
    ],
)
def test_a_tools_result_is_told_as_text(given: dict[str, Any], text: str) -> None:
    assert result_text(given) == text


def test_an_answer_without_calls_and_one_without_text_are_said_as_providers_take_them() -> None:
    sent = body(user(), assistant(text="Hm."), user("And?"), assistant(("files.list", {})), result(2))["messages"]
    assert sent[2] == {"role": "assistant", "content": "Hm."}
    assert sent[4]["content"] is None


def test_f059_names_fit_the_wire_stay_apart_and_come_back() -> None:
    long = "s" * 40 + "." + "t" * 60
    specs = [ToolSpec(name=name) for name in ("a.b__c", "a__b.c", long, long[:-1] + "u", "files.read")]
    names = Names(specs)
    wire = [names.wire(spec.name) for spec in specs]
    assert len(set(wire)) == len(wire)
    assert all(len(name) <= NAME_LENGTH and name.replace("_", "").isalnum() for name in wire)
    assert [names.ours(name) for name in wire] == [spec.name for spec in specs]
    assert names.ours("files.read") == "files.read"
    assert (names.ours("files__write"), names.ours("nothing")) == ("files.write", "nothing")


def test_f053_a_call_that_was_never_a_tool_can_stand_in_a_history() -> None:
    call = ev.ToolCall(step_id=step(2), tool="run it! now", arguments={}, problem="There is no such tool.")
    history = (user(), Message(role="assistant", calls=(call,)), result(2))
    function = body(*history)["messages"][2]["tool_calls"][0]["function"]
    assert function == {"name": "run_it__now", "arguments": "{}"}


@pytest.mark.parametrize(
    ("base", "url"),
    [
        ("http://a/v1", "http://a/v1/chat/completions"),
        ("http://a/v1/", "http://a/v1/chat/completions"),
        ("http://a", "http://a/chat/completions"),
        ("http://a/v1/chat/completions", "http://a/v1/chat/completions"),
        ("https://a/x?api-version=1", "https://a/x/chat/completions?api-version=1"),
    ],
)
def test_the_url_is_made_from_the_base(base: str, url: str) -> None:
    assert completions_url(base) == url


def test_f039_secrets_come_from_the_environment_at_each_call_and_are_shown_nowhere() -> None:
    settings = ModelSettings(base_url="http://a", api_key_env="K", headers={"X-Team": "t-${TEAM}"})
    endpoint = endpoint_of(settings, {"K": "secret-key-1", "TEAM": "secret-team"})
    assert endpoint.headers == {"Authorization": "Bearer secret-key-1", "X-Team": "t-secret-team"}
    assert endpoint_of(settings, {"K": "2", "TEAM": "x"}).headers["Authorization"] == "Bearer 2"
    assert "secret" not in repr(endpoint)
    own = ModelSettings(base_url="http://a", api_key_env="K", headers={"authorization": "Basic ${B}"})
    assert endpoint_of(own, {"B": "1"}).headers == {"authorization": "Basic 1"}
    assert endpoint_of(ModelSettings(base_url="http://a"), {}).headers == {}
    assert endpoint_of(ModelSettings(), {"OPENAI_API_KEY": "k"}).url == "https://api.openai.com/v1/chat/completions"
    with pytest.raises(MissingSecret, match=r"no K, TEAM\.$"):
        endpoint_of(settings, {"K": ""})
    with pytest.raises(MissingSecret, match=r"^K holds something that no header can carry"):
        endpoint_of(settings, {"K": "a\nb", "TEAM": "x"})
