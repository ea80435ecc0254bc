"""Pieces of answers as servers send them, the odd ones too, and what they come to."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rpcagent.models.assembly import CALLS_MOST, Assembly, read_arguments
from rpcagent.models.chat import Names
from rpcagent.models.redaction import Secrets, Sieve
from rpcagent.runs.events import Usage
from rpcagent.runs.outcomes import AskedCall, ModelReply
from tests.models.asking import TOOLS


def assembled(*pieces: dict[str, Any], secrets: dict[str, str] | None = None) -> Any:
    assembly = Assembly(Names(TOOLS), Secrets(secrets or {}))
    for piece in pieces:
        assembly.feed(piece)
    assembly.end()
    return assembly.reply()


def delta(finish: str | None = None, **members: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": members, "finish_reason": finish}]}


def piece(name: str | None = None, arguments: Any = None, **members: Any) -> dict[str, Any]:
    function = {key: value for key, value in (("name", name), ("arguments", arguments)) if value is not None}
    return {"function": function, **members}


def called(*pieces: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any], str]]:
    reply = assembled(*(delta(tool_calls=entries) for entries in pieces), delta("tool_calls"))
    assert isinstance(reply, ModelReply)
    return [(call.tool, call.arguments, call.problem) for call in reply.calls]


READ, LIST = ("files.read", {"path": "a"}, ""), ("files.list", {}, "")


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        # two in one piece, without an index, begun there and gone on with later
        (
            [[piece("files__read", "", index=0), piece("files__list", "{}", index=1)], [piece(None, '{"path":"a"}', index=0)]],
            [READ, LIST],
        ),
        # the same index twice in one piece: a fragment without a name belongs to the call before it
        ([[piece("files__read", "", index=0, id="x"), piece(None, '{"path":"a"}', index=0)]], [READ]),
        # the name is repeated with every fragment
        ([[piece("files__read", '{"path"', index=0, id="x")], [piece("files__read", ':"a"}', index=0, id="x")]], [READ]),
        # the name comes in fragments
        ([[piece("files__", "", index=0)], [piece("read", "", index=0)], [piece(None, '{"path":"a"}', index=0)]], [READ]),
        # arguments as an object
        ([[piece("files__read", {"path": "a"})]], [READ]),
        # no ids, no indexes, fragments of two calls one after the other
        (
            [[piece("files__read", '{"pa')], [piece(None, 'th":"a"}')], [piece("files__list", "{")], [piece(None, "}")]],
            [READ, LIST],
        ),
        # calls without arguments under one index
        ([[piece("files__list", "", index=0)], [piece("shop__charge", "", index=0)]], [LIST, ("shop.charge", {}, "")]),
        # the same tool twice under one index and id
        ([[piece("files__read", '{"path":"a"}', index=0, id="c")]] * 2, [READ, READ]),
        # the same tool twice in one piece, and under one index with two ids
        ([[piece("files__list", ""), piece("files__list", "")]], [LIST, LIST]),
        ([[piece("files__list", "", index=0, id="a")], [piece("files__list", "", index=0, id="b")]], [LIST, LIST]),
        # an index that is none, entries and functions that are none
        ([[piece("files__list", "{}", index="0"), {"function": None}, 7]], [LIST]),  # type: ignore[list-item]
    ],
)  # fmt: skip
def test_f051_pieces_find_their_call(pieces: list[list[dict[str, Any]]], expected: Any) -> None:
    assert called(*pieces) == expected


def test_the_older_way_of_calling_is_understood() -> None:
    reply = assembled(delta(function_call={"name": "files__read", "arguments": '{"path":"a"}'}), delta("function_call"))
    assert reply.calls == (AskedCall(tool="files.read", arguments={"path": "a"}),)


def test_an_unknown_tool_is_passed_on_under_its_name_and_bounded() -> None:
    assert called([piece("no__such", "{}")]) == [("no.such", {}, "")]
    assert called([piece("x" * 500, "{}")])[0][0] == "x" * 120
    assert called([piece("", "{}")])[0][0] == "(no name)"


def test_a_last_piece_that_repeats_the_whole_answer_adds_nothing() -> None:
    whole = {"choices": [{"index": 0, "message": {"content": "Hi"}, "finish_reason": "stop"}]}
    assert assembled(delta(content="Hi"), whole) == ModelReply(text="Hi")
    assert assembled(whole) == ModelReply(text="Hi")


def test_other_choices_reasoning_and_odd_members_are_passed_over() -> None:
    other = {"choices": [{"index": 1, "delta": {"content": "no"}}, {"index": 0, "delta": {"content": "yes"}}]}
    thinking = delta(content="", reasoning_content="hm")
    parts = delta("stop", content=[{"type": "thinking", "thinking": []}, {"type": "text", "text": "!"}])
    assert assembled(other, thinking, {"choices": [None]}, {"choices": 7}, parts) == ModelReply(text="yes!")
    assert assembled(delta("stop", refusal="I will not.")) == ModelReply(text="I will not.")


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        ({"prompt_tokens": 3, "completion_tokens": 4}, Usage(input_tokens=3, output_tokens=4)),
        ({"prompt_tokens": 3, "completion_tokens": None}, Usage(input_tokens=3)),
        ({"prompt_tokens": -3, "completion_tokens": "4"}, Usage()),
        ({"prompt_tokens": 2**63, "completion_tokens": 4}, Usage(input_tokens=10**12, output_tokens=4)),
        (None, Usage()),
        ([], Usage()),
    ],
)
def test_usage_is_what_was_counted_last_and_nothing_else(usage: Any, expected: Usage) -> None:
    reply = assembled(delta("stop", content="x"), {"choices": [], "usage": usage}, {"choices": [], "usage": None})
    assert reply == ModelReply(text="x", usage=expected)


def test_f053_a_call_that_was_cut_before_its_arguments_is_cut_and_not_one_without_arguments() -> None:
    reply = assembled(delta(tool_calls=[piece("files__list", "{}", index=0)]), delta("length"))
    assert reply.calls[0].problem == ""
    reply = assembled(delta(tool_calls=[piece("files__list", "", index=0)]), delta("length"))
    assert "was cut off" in reply.calls[0].problem


def test_f053_only_the_last_call_was_cut() -> None:
    reply = assembled(delta(tool_calls=[piece("files__list", ""), piece("files__read", '{"pa')]), delta("length"))
    assert [(call.arguments, bool(call.problem)) for call in reply.calls] == [({}, False), ({}, True)]


def test_too_many_calls_are_told_and_none_is_taken() -> None:
    many = [piece("files__list", "{}", index=place) for place in range(CALLS_MOST + 1)]
    reply = assembled(delta(tool_calls=many), delta("tool_calls"))
    assert (reply.calls, reply.problem) == ((), "The answer asks for 129 calls; at most 128 are taken at once.")


def test_a_provider_that_ends_in_error_without_a_word_is_trouble() -> None:
    assert assembled(delta("error")).error.kind == "bad_answer"


@given(st.text(max_size=40) | st.binary(max_size=40).map(lambda raw: raw.decode("latin-1")))
def test_f053_arguments_are_an_object_or_a_problem_and_never_an_exception(text: str) -> None:
    arguments, problem = read_arguments(text)
    assert isinstance(arguments, dict)
    assert not (arguments and problem)


def test_arguments_nested_beyond_all_measure_are_a_problem() -> None:
    assert read_arguments('{"a":' * 100_000)[1].startswith("The arguments are not valid JSON")
    assert read_arguments("[" * 100_000)[1].startswith("The arguments are not valid JSON")


# Secrets


@given(
    st.lists(st.sampled_from(["s3cret-value", "s3cret", "-value", "other", " ", "s", "s3cret-valu"]), max_size=8),
    st.integers(1, 7),
)
def test_f039_a_secret_is_taken_out_however_the_text_is_cut(words: list[str], size: int) -> None:
    text = "".join(words)
    sieve = Sieve(Secrets({"K": "s3cret-value"}))
    pieces = [sieve.feed(text[start : start + size]) for start in range(0, len(text), size)]
    assert "".join(pieces) + sieve.end() == text.replace("s3cret-value", "${K}")


def test_f039_longer_secrets_go_first_escaped_ones_are_found_and_short_ones_are_not_looked_for() -> None:
    secrets = Secrets({"A": "abcdefgh", "B": "abcdefgh-ijkl", "C": 'quo"ted-\\x', "D": "abc"})
    assert secrets.removed('abcdefgh-ijkl abcdefgh {"a":"quo\\"ted-\\\\x"} abc') == '${B} ${A} {"a":"${C}"} abc'


def test_f039_what_is_cut_short_is_not_cut_inside_a_secret() -> None:
    assert Secrets({"K": "s3cret-value"}).told("x" * 95 + "s3cret-value", 100) == "x" * 95 + "${K}"


@pytest.mark.parametrize(
    "said", ["key sk-abcdef123456 is wrong", "sent Bearer abcdef123456", "Incorrect: sk-ab***********wxyz", "ab****yz"]
)
def test_f039_what_looks_like_a_key_is_not_repeated(said: str) -> None:
    told = Secrets({}).told(said, 1_000)
    assert "[secret]" in told
    assert not any(part in told for part in ("abcdef", "wxyz", "yz"))
