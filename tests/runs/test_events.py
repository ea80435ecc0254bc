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
        "run_reopened", "run_released", "cancel_requested", "run_cancelled", "run_completed", "run_failed",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "raw",
    [
        b'{"seq":1,"at":"2026-03-01T12:00:00Z","events":[{"type":"run_paused"}]}',
        b'{"seq":1,"at":"2026-03-01T12:00:00Z","events":[{"type":"run_completed"}]}',
        b'{"seq":1,"events":[]}',
        b"{}",
        b"[]",
    ],
)
def test_an_event_of_an_unknown_type_or_shape_is_an_error_and_never_skipped(raw: bytes):
    with pytest.raises(msgspec.ValidationError):
        ev.decode(raw)


def test_a_field_of_a_later_version_does_not_hinder_reading():
    raw = b'{"seq":3,"at":"2026-03-01T12:00:00Z","events":[{"type":"run_completed","output":"x","later":1}]}'
    assert ev.decode(raw) == ev.Commit(seq=3, at=NOON, events=(ev.RunCompleted(output="x"),))


def test_every_annotation_of_an_event_is_known_to_the_test():
    for kind in EVENTS:
        for hint in typing.get_type_hints(kind).values():
            assert values_of(hint) is not None or hint is typing.ClassVar
