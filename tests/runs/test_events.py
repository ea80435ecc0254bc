"""Every event type survives its encoding, and an unknown one is never skipped."""

from __future__ import annotations

import types
import typing
from datetime import datetime, timedelta
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rpcagent.runs import events as ev
from rpcagent.runs.definition import Definition

from .story import NOON

EVENTS = get_args(ev.AnyEvent)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
NUMBER = st.floats(min_value=0, max_value=1e6)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | NUMBER | TEXT,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXT, inner, max_size=2),
    max_leaves=4,
)
PLAIN: dict[Any, st.SearchStrategy[Any]] = {
    str: TEXT,
    int: st.integers(0, 10**9),
    float: NUMBER,
    bool: st.booleans(),
    Any: JSON,
    type(None): st.none(),
    datetime: st.integers(0, 10**9).map(lambda n: NOON + timedelta(microseconds=n)),
}


def values_of(kind: Any) -> st.SearchStrategy[Any]:
    """Values of an annotation, as far as events use annotations."""
    if kind in PLAIN:
        return PLAIN[kind]
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return structs_of(kind)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin in {Union, types.UnionType}:
        return st.one_of(*map(values_of, arguments))
    if origin is tuple:
        return st.lists(values_of(arguments[0]), max_size=2).map(tuple)
    if origin is dict:
        return st.dictionaries(values_of(arguments[0]), values_of(arguments[1]), max_size=2)
    assert origin is Annotated
    return st.just("files.read")  # the one pattern: a tool's name


def structs_of(kind: type[msgspec.Struct]) -> st.SearchStrategy[Any]:
    hints = get_type_hints(kind, include_extras=True)
    return st.builds(kind, **{name: values_of(hints[name]) for name in kind.__struct_fields__})


@pytest.mark.parametrize("kind", EVENTS, ids=lambda k: k.__name__)
def test_an_event_is_the_same_after_a_round_trip(kind: type[ev.AnyEvent]):
    @settings(max_examples=25, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(structs_of(kind), st.integers(1, 10**9))
    def check(event: ev.AnyEvent, seq: int) -> None:
        commit = ev.Commit(seq=seq, at=NOON, events=(event,))
        raw = ev.encode(commit)
        assert b"\n" not in raw
        assert ev.decode(raw) == commit
        assert ev.encode(ev.decode(raw)) == raw

    check()


def test_the_type_on_disk_is_the_name_in_snake_case():
    assert [msgspec.inspect.type_info(kind).tag for kind in EVENTS] == [  # type: ignore[union-attr]
        "run_started", "request_accepted", "request_settled", "model_call_started", "model_answered", "tool_started",
        "tool_completed", "step_failed", "attempt_failed", "attempt_interrupted", "looked_up", "step_unknown",
        "step_denied", "late_outcome", "approval_requested", "approval_decided", "approval_expired", "approval_voided",
        "run_reopened", "run_released", "cancel_requested", "run_cancelled", "run_completed", "run_failed", "run_deleted",
    ]  # fmt: skip


def line(*events: str, head: str = '"seq":3,"at":"2026-03-01T12:00:00Z"') -> bytes:
    return f'{{{head},"events":[{",".join(events)}]}}'.encode()


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (line('{"type":"run_completed"}'), "Object missing required field `output` - at `$.events[0]`"),
        (line('{"type":"run_completed","output":3}'), "Expected `str`, got `int` - at `$.events[0].output`"),
        (line('{"output":"x"}'), "Object missing required field `type` - at `$.events[0]`"),
        (line('{"type":7}'), "Expected `str`, got `int` - at `$.events[0].type`"),
        (line(head='"seq":1'), "Object missing required field `at`"),
        (line(head='"seq":1,"at":"noon"'), "Invalid RFC3339 encoded datetime - at `$.at`"),
        (b"{}", "Object missing required field `seq`"),
        (b"[]", "Expected `object`, got `array`"),
    ],
)
def test_bytes_that_no_version_wrote_are_an_error_that_says_where(raw: bytes, said: str):
    with pytest.raises(msgspec.ValidationError) as caught:
        ev.decode(raw)
    assert str(caught.value) == said


@pytest.mark.parametrize("raw", [b"", b"{", line() + b"x", b'{"seq":"\xff"}'])
def test_what_is_no_json_is_an_error(raw: bytes):
    with pytest.raises(msgspec.DecodeError):
        ev.decode(raw)


OUTPUT = '{"type":"run_completed","output":"x"'


@pytest.mark.parametrize(
    ("raw", "kind", "found", "where"),
    [
        (line('{"type":"run_paused"}'), "type", "run_paused", "$.events[0].type"),
        (line(OUTPUT + "}", '{"type":"run_paused"}'), "type", "run_paused", "$.events[1].type"),
        (line('{"type":"it\'s `new`"}'), "type", "it's `new`", "$.events[0].type"),
        (line(f'{{"type":"{"x" * 1_000}"}}'), "type", "x" * 80, "$.events[0].type"),
        (line(OUTPUT + ',"later":null}'), "member", "later", "$.events[0]"),
        (line('{"type":"run_failed","error":{"kind":"k","code":3}}'), "member", "code", "$.events[0].error"),
        (line(head='"seq":3,"at":"2026-03-01T12:00:00Z","sealed":true'), "member", "sealed", "$"),
        (
            line('{"type":"attempt_interrupted","stepId":"s","attempt":1,"reason":"moved"}'),
            "value",
            "moved",
            "$.events[0].reason",
        ),
        (line(OUTPUT + "}", head='"v":2,"seq":3,"at":"2026-03-01T12:00:00Z"'), "version", "2", "$.v"),
        (b'{"v":3,"what":"ever"}', "version", "3", "$.v"),
    ],
)
def test_what_a_later_version_wrote_is_named_and_never_skipped(raw: bytes, kind: str, found: str, where: str):
    with pytest.raises(ev.WrittenLater) as caught:
        ev.decode(raw)
    assert (caught.value.kind, caught.value.found, caught.value.where) == (kind, found, where)
    assert str(caught.value) == (
        f"a later version of rpcagent wrote this record: it has the {kind} {found!r} at {where}, which this version does "
        "not know. Install the latest version; the record is kept as it is"
    )


def structs_in(info: msgspec.inspect.Type) -> typing.Iterator[msgspec.inspect.StructType]:
    if isinstance(info, msgspec.inspect.StructType):
        yield info
    fields = [field.type for field in getattr(info, "fields", ())]
    inner = [getattr(info, name) for name in ("item_type", "key_type", "value_type") if hasattr(info, name)]
    for part in (*fields, *inner, *getattr(info, "types", ())):
        yield from structs_in(part)


def test_no_struct_of_an_event_lets_an_unknown_member_pass():
    found = {info.cls for info in structs_in(msgspec.inspect.type_info(ev.Commit))}
    assert found > {*EVENTS, ev.Commit, ev.Usage, ev.ToolCall, ev.Trouble, Definition}
    lax = {info.cls for info in structs_in(msgspec.inspect.type_info(ev.Commit)) if not info.forbid_unknown_fields}
    assert lax - {Definition} == set()


def test_every_annotation_of_an_event_is_known_to_the_test():
    for kind in EVENTS:
        for hint in typing.get_type_hints(kind).values():
            assert values_of(hint) is not None or hint is typing.ClassVar
