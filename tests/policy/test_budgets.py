"""What one more attempt would exceed."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from msgspec.structs import replace
from rpcagent.policy.budgets import Limit, exceeded, near
from rpcagent.runs import events as ev
from rpcagent.runs.definition import Budget, Definition
from rpcagent.runs.fold import begin
from rpcagent.runs.state import RunState, Spent


def spent(budget: Budget, **amounts: float) -> RunState:
    event = ev.RunStarted(
        client_request_id="k", namespace="", fingerprint="f", input="", epoch=1,
        definition=Definition(agent="a", budget=budget),
    )  # fmt: skip
    return replace(begin("run_x", event, datetime(2026, 3, 1, tzinfo=UTC)), spent=Spent(**amounts))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("budget", "amounts", "new_step", "reserve", "expected"),
    [
        (Budget(steps=2), {"steps": 1}, True, 0, None),
        (Budget(steps=2), {"steps": 2}, True, 0, "steps"),
        (Budget(steps=2), {"steps": 2}, False, 0, None),
        (Budget(attempts=2), {"attempts": 1}, False, 0, None),
        (Budget(attempts=2), {"attempts": 2}, False, 0, "attempts"),
        (Budget(tokens=100), {"tokens": 50}, True, 50, None),
        (Budget(tokens=100), {"tokens": 51}, True, 50, "tokens"),
        (Budget(tokens=100), {"tokens": 100}, True, 0, "tokens"),
        (Budget(cost_usd=1.0), {"cost_usd": 0.99}, True, 0, None),
        (Budget(cost_usd=1.0), {"cost_usd": 1.0}, True, 0, "cost_usd"),
        (Budget(active_s=10.0), {"active_s": 10.0}, True, 0, "active_s"),
        (Budget(steps=0), {}, True, 0, "steps"),
        (Budget(steps=None, attempts=None), {"steps": 10**9, "attempts": 10**9}, True, 10**9, None),
    ],
)
def test_a_limit_is_checked_before_it_is_passed(
    budget: Budget, amounts: dict[str, float], new_step: bool, reserve: int, expected: Limit | None
):
    assert exceeded(spent(budget, **amounts), new_step=new_step, reserve_tokens=reserve) == expected


def test_what_a_person_added_counts():
    state = spent(Budget(steps=1), steps=1)
    assert exceeded(state, new_step=True) == "steps"
    assert exceeded(replace(state, extended={"steps": 1.0}), new_step=True) is None


def test_a_budget_without_limit_is_not_limited_by_an_extension():
    state = spent(Budget(steps=None), steps=10)
    assert exceeded(replace(state, extended={"steps": 1.0}), new_step=True) is None


@pytest.mark.parametrize(
    ("budget", "amounts", "expected"),
    [
        (Budget(steps=10), {"steps": 7}, []),
        (Budget(steps=10), {"steps": 8}, ["steps"]),
        (Budget(steps=10, tokens=100), {"steps": 11, "tokens": 80}, ["steps", "tokens"]),
        (Budget(steps=None, attempts=5), {"steps": 10**9, "attempts": 4}, ["attempts"]),
        (Budget(cost_usd=1.0, active_s=10.0), {"cost_usd": 0.79, "active_s": 8.0}, ["active_s"]),
    ],
)
def test_four_fifths_of_a_limit_are_near_it_r_te_3(budget: Budget, amounts: dict[str, float], expected: list[Limit]):
    assert near(spent(budget, **amounts)) == expected


def test_many_equal_answers_in_a_row_are_near_their_limit_r_te_3():
    assert near(replace(spent(Budget(repeats=20)), repeats=15)) == []
    assert near(replace(spent(Budget(repeats=20)), repeats=16)) == ["repeats"]
