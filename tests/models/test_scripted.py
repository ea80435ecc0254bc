"""The scripted model: which turn it answers, how it fails, and what a broken script is told."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import anyio
import pytest
from rpcagent.errors import InvalidParams
from rpcagent.models.scripted import ScriptedModel, load_script, validate_script
from rpcagent.runs.definition import Definition, ModelSettings
from rpcagent.runs.effects import ToolSpec
from rpcagent.runs.events import Trouble, Usage
from rpcagent.runs.outcomes import AskedCall, Failed, Lost, ModelReply, NotDone
from rpcagent.runs.ports import ModelRequest
from rpcagent.runs.state import Message

USER = Message(role="user", content="go")
ASSISTANT = Message(role="assistant", content="yes")


def asked(
    *script: dict[str, Any], messages: tuple[Message, ...] = (USER,), attempt: int = 1, tools: tuple[ToolSpec, ...] = ()
) -> ModelRequest:
    definition = Definition(agent="a", model=ModelSettings(script=script), tools=tools)
    return ModelRequest(
        run_id="run_a", step_id="stp_a_1", attempt=attempt, definition=definition, messages=messages, request_hash="h"
    )


async def answered(request: ModelRequest) -> tuple[ModelReply | NotDone | Failed | Lost, list[str]]:
    pieces: list[str] = []
    return await ScriptedModel().complete(request, pieces.append), pieces


def result(text: str) -> Message:
    return Message(role="tool", result={"content": [{"type": "text", "text": text}]})


@pytest.mark.anyio
async def test_a_turn_is_answered_whole_and_shown_word_by_word() -> None:
    turn = {
        "text": "Reading  two\nfiles. ",
        "calls": [{"tool": "files.read", "arguments": {"path": "a"}}, {"tool": "files.list", "id": "mine"}],
        "usage": {"inputTokens": 7, "outputTokens": 3, "costUsd": 0.5},
        "stop": "tool_calls",
    }
    reply, pieces = await answered(asked(turn))
    assert reply == ModelReply(
        text="Reading  two\nfiles. ",
        calls=(
            AskedCall(tool="files.read", arguments={"path": "a"}, provider_id="call_0_0"),
            AskedCall(tool="files.list", arguments={}, provider_id="mine"),
        ),
        usage=Usage(input_tokens=7, output_tokens=3, cost_usd=0.5),
        stop="tool_calls",
    )
    assert pieces == ["Reading", "  two", "\nfiles.", " "]


@pytest.mark.anyio
async def test_the_turn_follows_from_the_request_alone_so_that_a_restart_goes_on_at_the_right_place() -> None:
    script = ({"text": "one"}, {"text": "two"}, {"text": "three"})
    messages: tuple[Message, ...] = (USER,)
    texts = []
    for _ in script:
        reply, _ = await answered(asked(*script, messages=messages))  # a new model each time
        assert isinstance(reply, ModelReply)
        texts.append(reply.text)
        messages = (*messages, ASSISTANT, result("r"))
    assert texts == ["one", "two", "three"]
    reply, pieces = await answered(asked(*script, messages=messages))
    error = Trouble(kind="script_exhausted", message="The script has 3 turns, and turn 3 was asked for.")
    assert (reply, pieces) == (Failed(error=error), [])


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("fail", "attempt", "outcome"),
    [
        ({"kind": "k", "message": "m"}, 9, Failed(error=Trouble(kind="k", message="m"))),
        ({"kind": "k", "retryAfterMs": 5}, 9, NotDone(error=Trouble(kind="k"), retry_after_ms=5)),
        ({"kind": "k", "times": 2}, 2, NotDone(error=Trouble(kind="k"))),
        ({"kind": "k", "times": 2, "retryAfterMs": 5}, 3, ModelReply(text="at last")),
    ],
)
async def test_a_failing_turn_fails_as_told_and_as_often_as_told(
    fail: dict[str, Any], attempt: int, outcome: object
) -> None:
    reply, _ = await answered(asked({"text": "at last", "fail": fail}, attempt=attempt))
    assert reply == outcome


@pytest.mark.anyio
async def test_a_turn_that_expects_a_result_sees_all_results_since_the_last_answer_and_no_earlier_one() -> None:
    script = ({"text": "1"}, {"text": "2", "expect": "needle"})
    seen = (USER, ASSISTANT, result("a needle"), result("hay"))
    assert await answered(asked(*script, messages=seen)) == (ModelReply(text="2"), ["2"])
    unseen = (USER, result("a needle"), ASSISTANT, result("hay"))
    error = Trouble(kind="script_mismatch", message="Turn 1 expects 'needle' in the last results, and it is not there.")
    assert await answered(asked(*script, messages=unseen)) == (Failed(error=error), [])


@pytest.mark.anyio
async def test_f053_arguments_that_are_no_json_object_are_a_problem_of_the_call_and_not_guessed() -> None:
    cut = '{"order": "A1", "amou'
    turn = {"calls": [{"tool": "a.b", "arguments": '{"x": 1}'}, {"tool": "a.b", "arguments": cut}]}
    reply, _ = await answered(asked(turn))
    problem = "The arguments are not a JSON object."
    assert isinstance(reply, ModelReply)
    assert reply.calls == (
        AskedCall(tool="a.b", arguments={"x": 1}, provider_id="call_0_0"),
        AskedCall(tool="a.b", arguments={}, provider_id="call_0_1", problem=problem),
    )


@pytest.mark.anyio
@pytest.mark.parametrize("as_text", [True, False])
async def test_f053_arguments_that_are_nested_too_deeply_are_a_problem_of_the_call(as_text: bool) -> None:
    def nested(depth: int) -> str:
        return '{"a":' * depth + "1" + "}" * depth

    texts = [nested(100), nested(101)]
    calls = [{"tool": "a.b", "arguments": text if as_text else json.loads(text)} for text in texts]
    reply, _ = await answered(asked({"calls": calls}))
    assert isinstance(reply, ModelReply)
    assert [(call.arguments, call.problem) for call in reply.calls] == [
        (json.loads(texts[0]), ""),
        ({}, "The arguments are nested more than 100 deep, and the call was not run."),
    ]


@pytest.mark.anyio
async def test_a_delayed_turn_is_cancelled_at_once() -> None:
    with anyio.move_on_after(0) as scope:
        await answered(asked({"text": "late", "delayMs": 3_600_000}))
    assert scope.cancelled_caught


@pytest.mark.anyio
async def test_without_a_script_it_lists_the_workspace_and_says_how_to_configure_a_model() -> None:
    files = (ToolSpec(name="files.list", effect="read_only"),)
    first, _ = await answered(asked(tools=files))
    second, _ = await answered(asked(tools=files, messages=(USER, ASSISTANT, result("a.txt"))))
    alone, _ = await answered(asked())
    assert isinstance(first, ModelReply)
    assert isinstance(second, ModelReply)
    assert first.calls == (AskedCall(tool="files.list", arguments={}, provider_id="call_0_0"),)
    assert (second.calls, second) == ((), alone)
    assert "No model is configured" in second.text
    assert '"provider": "scripted", "script"' in second.text


BROKEN = [
    ({"text": "x"}, "$.model.script", "a script is a list of turns"),
    ([{"text": "x"}, "y"], "$.model.script[1]", "a turn is an object"),
    ([{}], "$.model.script[0]", "a turn has text, calls or fail"),
    ([{"text": 1}], "$.model.script[0].text", "Expected `str`, got `int`"),
    ([{"text": "x", "say": 1}], "$.model.script[0]", "Object contains unknown field `say`"),
    (
        [{"text": "x"}, {"text": "x"}, {"calls": [{"tool": "read"}]}],
        "$.model.script[2].calls[0].tool",
        "'read' is no tool name; one looks like `files.read`",
    ),
    ([{"text": "x", "delayMs": -1}], "$.model.script[0].delayMs", "a delay is 0 to 3600000 ms"),
    ([{"fail": {"kind": "k", "times": 0}}], "$.model.script[0].fail.times", "a number of attempts is at least 1"),
    *(
        (
            [{"fail": {"kind": "k", "retryAfterMs": wait}}],
            "$.model.script[0].fail.retryAfterMs",
            "a wait is 0 to 315360000000 ms",
        )
        for wait in (-1, 10**17)
    ),
    ([{"fail": {}}], "$.model.script[0].fail", "Object missing required field `kind`"),
    *(
        ([{"text": "x", "usage": usage}], "$.model.script[0].usage", "a number of tokens is 0 to 1000000000000")
        for usage in ({"inputTokens": -1}, {"outputTokens": 10**18})
    ),
    *(
        (
            [{"text": "x", "usage": {"costUsd": cost}}],
            "$.model.script[0].usage.costUsd",
            "a cost is 0 to 1000000000 dollars",
        )
        for cost in (-0.01, 1e308, math.inf, math.nan)
    ),
]


@pytest.mark.parametrize(("script", "path", "reason"), BROKEN)
def test_a_broken_script_is_refused_with_the_turn_and_the_member_at_fault(
    script: object, path: str, reason: str
) -> None:
    with pytest.raises(InvalidParams) as refused:
        validate_script(script)
    assert refused.value.details == {"path": path, "reason": reason}


def test_a_script_is_read_from_a_json_file_and_from_json_lines(tmp_path: Path) -> None:
    turns = ({"text": "one"}, {"calls": [{"tool": "files.list"}]})
    whole, lines = tmp_path / "script.json", tmp_path / "script.jsonl"
    whole.write_text(json.dumps(turns, indent=1))
    lines.write_text("\n".join(json.dumps(turn) for turn in turns) + "\n\n")
    assert load_script(whole) == load_script(lines) == turns


@pytest.mark.parametrize(
    ("content", "where", "reason"),
    [
        ('{"text": "one"}\n{"text": 2}\n', ":2.text", "Expected `str`, got `int`"),
        ('{"text": "one"}\n{"text', ":2", "this is not JSON"),
        ('[{"text": "one"}', "", "this is not JSON"),
    ],
)
def test_a_broken_script_file_is_refused_with_its_line(tmp_path: Path, content: str, where: str, reason: str) -> None:
    file = tmp_path / "script"
    file.write_text(content)
    with pytest.raises(InvalidParams) as refused:
        load_script(file)
    assert refused.value.details == {"path": f"{file}{where}", "reason": reason}


def test_a_missing_script_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(InvalidParams) as refused:
        load_script(tmp_path / "none")
    reason = "the script cannot be read (No such file or directory)"
    assert refused.value.details == {"path": str(tmp_path / "none"), "reason": reason}
