"""What a summary must tell of a run without its history, at any event of any run. Pure."""

from __future__ import annotations

from datetime import timedelta

import msgspec
import pytest
from rpcagent.runs import events as ev
from rpcagent.runs import summary
from rpcagent.runs.decide import Rules, advance, open_pass
from rpcagent.runs.fold import apply
from rpcagent.runs.state import RunState
from rpcagent.runs.view import needs_attention, run_status, run_view
from tests.sim import scenarios
from tests.sim.loop import run
from tests.sim.scenario import Scenario, play
from tests.sim.world import Plan, World

EVERY = (scenarios.A, *scenarios.OTHERS)
NEXT = 99
"""An epoch that no run was released in."""


def told(scenario: Scenario, monkeypatch: pytest.MonkeyPatch) -> list[RunState]:
    """The states of a run after each of its commits, with a crash on the way."""
    worlds: list[World] = []
    real = World.read_back

    def noting(world: World) -> None:
        worlds.append(world)
        real(world)

    monkeypatch.setattr(World, "read_back", noting)
    assert run(play, scenario, Plan(crashes=(20,))).broken == ()
    states: list[RunState] = []
    for record in worlds[0].log:
        states.append(apply(states[-1] if states else None, ev.decode(record.body), record.run_id))
    assert len(states) > 2
    return states


@pytest.mark.parametrize("scenario", EVERY, ids=lambda s: s.name)
def test_a_summary_shows_what_the_state_would_be_shown_as_in_the_next_opening(
    scenario: Scenario, monkeypatch: pytest.MonkeyPatch
):
    for state in told(scenario, monkeypatch):
        heads, body = summary.summarise(state, 7, "pol")
        assert heads.place == 7
        assert heads.last_seq == state.last_seq
        assert heads.status == run_status(state, NEXT, busy=False)
        view = msgspec.json.decode(msgspec.json.encode(run_view(state, NEXT, busy=False)))
        assert summary.view_of(body) == view
        asked = msgspec.json.decode(msgspec.json.encode(needs_attention(state, NEXT)))
        assert summary.attention_of(body) == asked
        assert heads.asks == bool(asked)
        assert (heads.namespace, heads.agent) == (state.namespace, state.definition.agent)
        assert (heads.ended_at, heads.started_at) == (
            (state.last_at, state.started_at) if state.ended else (None, None)
        )
        assert heads.live == (not state.ended or bool(state.open_approvals()))
        assert heads.unresolved == bool(state.unresolved)
        assert heads.policy == ("pol" if heads.live else "")


@pytest.mark.parametrize("scenario", EVERY, ids=lambda s: s.name)
def test_a_run_that_a_start_does_not_read_would_neither_record_nor_do_anything(
    scenario: Scenario, monkeypatch: pytest.MonkeyPatch
):
    cold = 0
    for state in told(scenario, monkeypatch):
        heads, _ = summary.summarise(state, 1, "pol")
        if heads.hot or not heads.live:
            continue
        cold += 1
        rules = Rules(epoch=NEXT)
        before = heads.wake - timedelta(milliseconds=1) if heads.wake is not None else state.last_at
        for now in (state.last_at, max(before, state.last_at)):
            assert open_pass(state, rules, now) == ()
            following = advance(state, frozenset(), rules, now)
            assert (following.append, following.perform) == ((), ())
            if following.wake != heads.wake:  # a person holds it up: at that instant nothing happens either
                assert following.wake is not None
                later = advance(state, frozenset(), rules, following.wake)
                assert (later.append, later.perform, later.wake) == ((), (), heads.wake)
        if heads.wake is not None and not state.held(NEXT):
            due = advance(state, frozenset(), rules, heads.wake)
            assert due.append or due.perform
    if scenario.recovery != "auto" or scenario.name in {"main", "approval expired", "rate limit"}:
        assert cold


def test_a_summary_of_a_damaged_run_is_read_again_at_each_start_and_asks_until_then():
    heads, body = summary.damaged("run_x", 3, "why")
    assert (heads.status, heads.place, heads.hot, heads.asks, heads.live) == ("damaged", 3, True, True, True)
    assert summary.view_of(body) == {"runId": "run_x", "status": "damaged", "damaged": "why"}
    assert summary.attention_of(body) == [{"runId": "run_x", "kind": "damaged"}]


@pytest.mark.parametrize("scenario", EVERY, ids=lambda s: s.name)
def test_a_summary_is_the_same_after_it_was_written_and_read(scenario: Scenario, monkeypatch: pytest.MonkeyPatch):
    for state in told(scenario, monkeypatch):
        heads, body = summary.summarise(state, 1, "pol")
        line = summary.encode(heads, body)
        assert b"\n" not in line
        again = summary.decode(line)
        assert bytes(again.body) == body
        assert summary.encode(again, bytes(again.body)) == line
        assert msgspec.structs.replace(again, body=heads.body) == heads


def test_a_summary_with_members_of_a_later_version_is_read_and_one_that_is_none_is_refused():
    heads = summary.decode(b'{"place":1,"status":"waiting","lastSeq":2,"body":{"view":{}},"news":[1]}')
    assert (heads.place, heads.status, heads.last_seq, bytes(heads.body)) == (1, "waiting", 2, b'{"view":{}}')
    for raw in (b"{}", b"null", b'{"place":"1","status":"waiting","lastSeq":2,"body":{}}'):
        with pytest.raises(msgspec.ValidationError):
            summary.decode(raw)
