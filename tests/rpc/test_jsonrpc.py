"""The envelope: no input makes it raise, and no answer is anything but strict JSON."""

from __future__ import annotations

import json
import math
from enum import Enum
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import UNSET
from rpcagent.errors import NotFound
from rpcagent.rpc import jsonrpc
from rpcagent.rpc.jsonrpc import Call, Fail, Ok, Unserialisable

GOOD = b'{"jsonrpc":"2.0","method":"status","params":{"runId":"run_1"},"id":1}'


class Colour(Enum):
    RED = "red"


class Point(msgspec.Struct):
    x: float
    y: float | None = None


def strict(data: bytes) -> Any:
    def refuse(word: str) -> Any:
        raise ValueError(word)

    return json.loads(data.decode("utf-8"), parse_constant=refuse)


def check(message: bytes) -> None:
    """What a session does with a message; whatever comes out must be JSON."""
    if jsonrpc.is_batch(message):
        items = jsonrpc.split_batch(message, 100)
        parsed: list[Any] = [items] if isinstance(items, Fail) else [jsonrpc.parse(item) for item in items]
    else:
        parsed = [jsonrpc.parse(message)]
    for one in parsed:
        if isinstance(one, Fail):
            answer = strict(jsonrpc.encode(one))
            assert answer["error"]["code"] in (-32700, -32600)
        elif isinstance(one, Call) and one.id is not UNSET:
            assert strict(jsonrpc.encode(Ok(one.id, one.params)))["jsonrpc"] == "2.0"


@given(st.binary(max_size=200))
@settings(max_examples=300, deadline=None)
def test_no_bytes_make_it_raise(message: bytes) -> None:
    check(message)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
ENVELOPES = st.fixed_dictionaries(
    {},
    optional={
        "jsonrpc": st.just("2.0") | JSON,
        "method": st.just("status") | JSON,
        "params": JSON,
        "id": JSON,
        "result": JSON,
        "error": JSON,
        "x": JSON,
    },
)


@given(ENVELOPES | st.lists(ENVELOPES | JSON, max_size=4), st.booleans())
@settings(max_examples=300, deadline=None)
def test_no_json_makes_it_raise(value: Any, ascii_: bool) -> None:
    check(json.dumps(value, ensure_ascii=ascii_).encode("utf-8", "replace"))


@given(st.integers(0, len(GOOD)), st.integers(0, len(GOOD)), st.binary(max_size=3))
@settings(max_examples=300, deadline=None)
def test_no_damage_to_a_good_message_makes_it_raise(begin: int, end: int, instead: bytes) -> None:
    check(GOOD[:begin] + instead + GOOD[end:])
    check(b"[" + GOOD + b"," + GOOD[:begin] + instead + GOOD[end:] + b"]")


def test_a_message_cut_at_every_byte_is_not_json() -> None:
    for cut in range(1, len(GOOD)):
        answer = jsonrpc.parse(GOOD[:cut])
        assert isinstance(answer, Fail)
        assert (answer.id, answer.error.code) == (None, -32700)


@given(st.text(max_size=20).filter(lambda s: s.isprintable()) | st.integers() | st.none())
def test_an_id_is_echoed_exactly(id_: Any) -> None:
    parsed = jsonrpc.parse(json.dumps({"jsonrpc": "2.0", "method": "m", "id": id_}).encode())
    assert isinstance(parsed, Call)
    echoed = strict(jsonrpc.encode(Ok(parsed.id, 0)))["id"]  # type: ignore[arg-type]
    assert (echoed, type(echoed)) == (id_, type(id_))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "place",
    [
        lambda v: v,
        lambda v: [1, (2, v)],
        lambda v: {"a": {"b": [v]}},
        lambda v: Point(1.0, v),
        lambda v: [Point(v)],
    ],
)
def test_a_number_that_is_not_finite_is_refused_wherever_it_stands_f015(value: float, place: Any) -> None:
    with pytest.raises(Unserialisable, match=r"^(nan|-?inf) is no JSON number$"):
        jsonrpc.encode(Ok(1, place(value)))
    with pytest.raises(Unserialisable):
        jsonrpc.encode(jsonrpc.fail(1, NotFound("x", detail=place(value))))


@pytest.mark.parametrize("value", [object(), {1j}, "\ud800", {"\udfff": 1}, lambda: 0])
def test_what_json_cannot_hold_is_refused_f015(value: Any) -> None:
    with pytest.raises(Unserialisable):
        jsonrpc.encode(Ok(1, value))


def test_null_is_allowed_beside_everything_that_json_can_hold() -> None:
    value = {"a": None, "b": [True, 1, 1.5, "null", Colour.RED, msgspec.Raw(b"[null]"), Point(2.0)], "c": (None,)}
    assert strict(jsonrpc.encode(Ok("i", value))) == {
        "id": "i",
        "result": {"a": None, "b": [True, 1, 1.5, "null", "red", [None], {"x": 2.0, "y": None}], "c": [None]},
        "jsonrpc": "2.0",
    }


def test_an_answer_holds_no_line_end() -> None:
    assert b"\n" not in jsonrpc.encode(Ok(1, "a\nb\r\u2028"))


def test_a_cycle_is_refused() -> None:
    cycle: list[Any] = [None]
    cycle.append(cycle)
    with pytest.raises(Unserialisable):
        jsonrpc.encode(Ok(1, cycle))


# -- depth


def deep(depth: int, id_: str = "1") -> bytes:
    """A request that is `depth` deep; its id comes last, and its text is full of brackets that do not count."""
    arrays = depth - 2
    inside = b'["]]]]\\"[[[", ' + b"[" * (arrays - 1) + b"]" * (arrays - 1) + b"]"
    return b'{"jsonrpc": "2.0", "method": "x", "params": {"a": ' + inside + b'}, "id": ' + id_.encode() + b"}"


def test_a_message_may_be_100_deep() -> None:
    call = jsonrpc.parse(deep(100))
    assert isinstance(call, Call)
    assert call.id == 1


@pytest.mark.parametrize("id_", ["1", '"a"', "1.50", "null"])
@pytest.mark.parametrize("depth", [101, 700, 960, 2_000, 100_000])
def test_a_deeper_one_is_refused_under_its_own_id(depth: int, id_: str) -> None:
    answer = jsonrpc.parse(deep(depth, id_))
    assert isinstance(answer, Fail)
    assert json.loads(jsonrpc.encode(answer)) == {
        "jsonrpc": "2.0",
        "id": json.loads(id_),
        "error": {
            "code": -32600,
            "message": "nested more than 100 deep",
            "data": {"code": "INVALID_REQUEST", "retryable": False, "reason": "nested more than 100 deep"},
        },
    }
    assert f'"id":{id_},'.encode() in jsonrpc.encode(answer)


def test_a_string_full_of_brackets_has_no_depth() -> None:
    assert isinstance(
        jsonrpc.parse(b'{"jsonrpc":"2.0","method":"x","id":1,"params":{"a":"' + b'[{\\"' * 1_000 + b'"}}'), Call
    )


@pytest.mark.parametrize("text", [b"[" * 100_000, b'{"a":' * 2_000, b'{"a":[' + b"[[]" * 200, b"[" * 200 + b"}" * 200])
def test_brackets_that_do_not_pair_are_no_json_however_many(text: bytes) -> None:
    for answer in (jsonrpc.parse(text), jsonrpc.split_batch(text, 100)):
        assert isinstance(answer, Fail)
        assert (answer.id, answer.error.code) == (None, -32700)


def test_a_batch_with_an_item_that_is_too_deep_is_refused_as_a_whole() -> None:
    assert isinstance(jsonrpc.split_batch(b"[" + deep(100) + b"]", 100), list)
    for depth in (101, 5_000):
        answer = jsonrpc.split_batch(b"[" + deep(depth) + b"]", 100)
        assert isinstance(answer, Fail)
        assert (answer.id, answer.error.code) == (None, -32600)
