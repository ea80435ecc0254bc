"""The engine with checkpoints dies at every point: no run in memory that is at rest, all of them back by replay. F031, F075, P1, P3."""

from __future__ import annotations

import os

import pytest
from rpcagent.runs import roster

from . import scenarios, sweep
from .loop import run
from .planted_files import PLANTED
from .scenario import Scenario, play

SLOW = bool(os.environ.get("RPCAGENT_SLOW"))
EVERY = (scenarios.A, *scenarios.OTHERS, scenarios.DELETED)


@pytest.mark.parametrize("scenario", EVERY, ids=lambda s: s.name)
def test_with_checkpoints_a_scenario_ends_as_without(scenario: Scenario):
    ending = run(play, scenario, kept=True)
    assert ending.broken == ()
    saved = [point for point in ending.points[0] if point == "save: the manifest is the new one"]
    assert len(saved) >= 3


@pytest.mark.parametrize("scenario", EVERY, ids=lambda s: s.name)
def test_after_any_one_crash_the_files_and_the_log_tell_the_same_as_the_log_alone_f031(scenario: Scenario):
    tally = run(sweep.singles, scenario, kept=True, stride=1 if SLOW or scenario is scenarios.A else 3)
    print(tally.text())
    assert tally.failures == {}
    assert tally.points > 40


@pytest.mark.parametrize("scenario", EVERY, ids=lambda s: s.name)
def test_after_two_crashes_the_files_and_the_log_tell_the_same_f075(scenario: Scenario):
    stride, step = (5, 2) if SLOW else (19, 5)
    tally = run(sweep.doubles, scenario, stride, kept=True, step=step)
    print(tally.text())
    assert tally.failures == {}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_of_checkpoints_is_found(name: str):
    scenario, bug = PLANTED[name]
    with bug():
        tally = run(sweep.singles, scenario, kept=True, enough=1)
    print(f"{name}: {tally.text()}")
    assert len(tally.failures) >= 1


def test_the_simulator_leaves_the_number_of_resident_runs_as_it_was():
    before = roster.RESIDENT
    run(play, scenarios.A, kept=True)
    assert roster.RESIDENT == before > 0
