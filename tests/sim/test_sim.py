"""The engine dies at every point, and twice. P1, P3, P4, P5, P6, P7, S0-24, S0-25, S0-31, S4-49, F047, F065, F073, F075."""

from __future__ import annotations

import os
from datetime import timedelta

import pytest

from . import scenarios, sweep
from .client import Truth
from .loop import run
from .planted import PLANTED, planted
from .scenario import Scenario

SLOW = bool(os.environ.get("RPCAGENT_SLOW"))
TRUTHS: tuple[Truth, ...] = ("happened", "happened_without_result", "abandon")
EVERY = (scenarios.A, *scenarios.OTHERS)


@pytest.mark.parametrize("scenario", EVERY, ids=lambda s: s.name)
def test_undisturbed_a_scenario_ends_as_it_should(scenario: Scenario):
    tally = run(sweep.undisturbed, scenario)
    assert tally.failures == {}
    assert tally.points > 20


@pytest.mark.parametrize("told", TRUTHS)
def test_after_any_one_crash_no_effect_is_repeated_and_nothing_is_lost_s4_49(told: Truth):
    tally = run(sweep.singles, scenarios.A, told)
    print(tally.text())
    assert tally.failures == {}
    assert tally.points >= 48
    assert tally.unknown >= 6


@pytest.mark.parametrize("told", TRUTHS[::2])
@pytest.mark.parametrize("offset", [0, 1])
def test_after_any_two_crashes_no_effect_is_repeated_and_nothing_is_lost_f075(told: Truth, offset: int):
    tally = run(sweep.doubles, scenarios.A, 2, told, offset)
    print(tally.text())
    assert tally.failures == {}
    assert tally.scenarios > 600


@pytest.mark.parametrize("scenario", scenarios.OTHERS, ids=lambda s: s.name)
def test_after_any_one_crash_each_scenario_ends_as_it_should(scenario: Scenario):
    tally = run(sweep.singles, scenario)
    print(tally.text())
    assert tally.failures == {}


@pytest.mark.parametrize("scenario", scenarios.OTHERS, ids=lambda s: s.name)
def test_after_two_crashes_each_scenario_ends_as_it_should(scenario: Scenario):
    tally = run(sweep.doubles, scenario, 1 if SLOW else 11)
    print(tally.text())
    assert tally.failures == {}


@pytest.mark.parametrize("scenario", EVERY, ids=lambda s: s.name)
def test_a_clock_that_is_put_back_a_day_at_the_restart_changes_nothing(scenario: Scenario):
    tally = run(sweep.singles, scenario, back=timedelta(days=1))
    assert tally.failures == {}
    assert tally.longest < 300  # no wait grew: the longest are two minutes by two rate limits


@pytest.mark.parametrize("both", [False, True])
def test_a_full_disk_loses_no_outcome_and_repeats_no_effect(both: bool):
    tally = run(sweep.no_space, scenarios.A, both)
    assert tally.failures == {}
    assert tally.scenarios >= 9


def test_the_same_crashes_give_the_same_history():
    first, second = (run(sweep.singles, scenarios.A).text() for _ in range(2))
    assert first == second


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_is_found(name: str):
    kind = PLANTED[name]
    with planted(kind):
        tally = run(sweep.singles, scenarios.A, kind=kind)
    print(f"{name}: found in {len(tally.failures)} of {tally.scenarios} scenarios")
    assert len(tally.failures) >= 5
