"""The effect class decides what follows an intent without an outcome: all classes, interruptions and answers.

S0-31, S4-49, F075, and T5 of the order of calls.
"""

from __future__ import annotations

from datetime import timedelta
from itertools import product
from typing import Any, get_args

import pytest
from msgspec.structs import replace
from rpcagent.runs import events as ev
from rpcagent.runs.decide import Action, LookUpAction, ModelAction, ToolAction, open_pass
from rpcagent.runs.definition import Budget, Rule
from rpcagent.runs.effects import EffectClass, LookUpAnswer
from rpcagent.runs.outcomes import Failed, Lost, NotDone, backoff_ms
from rpcagent.runs.requests import CancelCommand

from .story import NAMES, TOOLS, Story, definition, sid

CLASSES: tuple[EffectClass, ...] = get_args(EffectClass)
LIVE: tuple[Any, ...] = ("timeout", "connection_lost", "crashed")
AGAIN = ToolAction(sid(2), 2)
LOOK_UP = LookUpAction(sid(2), 1)


def in_flight(effect: EffectClass, **spec: Any) -> Story:
    """A run whose second step, a call of that class, is being performed."""
    tools = tuple(replace(tool, **spec) if tool.effect == effect else tool for tool in TOOLS)
    story = Story(definition(tools=tools))
    assert story.says(1, NAMES[effect]) == [ToolAction(sid(2), 1)]
    return story


def unknown(story: Story) -> bool:
    return story.step(2).status == "unknown" and [a.kind for a in story.opened()] == ["unknown_outcome"]


@pytest.mark.parametrize(("effect", "how"), list(product(CLASSES, (*LIVE, "restart"))))
def test_what_follows_a_lost_attempt_is_decided_by_the_class_alone(effect: EffectClass, how: Any):
    story = in_flight(effect)
    key = story.step(2).key
    if how == "restart":
        story.restart()
        follows: list[Action] = story.go()
    else:
        assert story.report(2, Lost(reason=how)) == []
        follows = story.later(backoff_ms(sid(2), 1) / 1000)
    expected: dict[EffectClass, list[Action]] = {
        "read_only": [AGAIN],
        "idempotent": [AGAIN],
        "reconcilable": [LOOK_UP],
        "at_most_once": [],
    }
    assert follows == expected[effect]
    assert unknown(story) == (effect == "at_most_once")
    assert story.step(2).key == key


@pytest.mark.parametrize("effect", CLASSES)
def test_an_attempt_lost_in_a_cancelled_run_is_unknown_unless_it_only_reads(effect: EffectClass):
    story = in_flight(effect)
    story.asked("c", CancelCommand())
    assert story.status == "running"
    story.report(2, Lost(reason="cancelled"))
    assert story.status == "cancelled"
    if effect == "read_only":
        assert (story.step(2).status, story.state.unresolved) == ("withdrawn", ())
    else:
        assert unknown(story)
        assert story.state.unresolved == (sid(2),)


@pytest.mark.parametrize("effect", CLASSES)
def test_after_a_cancel_and_a_restart_nothing_is_done_again(effect: EffectClass):
    story = in_flight(effect)
    story.ask("c", CancelCommand())
    story.restart()
    assert story.go() == []
    assert story.status == "cancelled"
    assert unknown(story) == (effect != "read_only")


@pytest.mark.parametrize(("seconds", "again"), [(0, True), (59, True), (60, False), (61, False)])
def test_after_its_key_is_forgotten_an_idempotent_call_is_taken_for_at_most_once(seconds: int, again: bool):
    story = in_flight("idempotent", key_ttl_ms=60_000)
    story.restart(seconds)
    assert story.go() == ([AGAIN] if again else [])
    assert unknown(story) == (not again)


def test_the_time_of_a_key_counts_from_the_first_attempt():
    story = in_flight("idempotent", key_ttl_ms=60_000)
    story.restart(40)
    assert story.go() == [AGAIN]
    story.restart(40)
    assert story.go() == []
    assert unknown(story)


@pytest.mark.parametrize("answer", get_args(LookUpAnswer))
def test_each_answer_of_a_look_up_has_one_consequence(answer: LookUpAnswer):
    story = in_flight("reconcilable")
    story.restart()
    assert story.go() == [LOOK_UP]
    follows = story.looked_up(2, answer)
    step = story.step(2)
    if answer == "found":
        assert (step.status, step.source, step.attempt) == ("completed", "look_up", 1)
        assert story.doing() == [3]  # the model
    elif answer == "absent":
        assert follows == [AGAIN]
    elif answer == "pending":
        assert (follows, story.status, story.opened()) == ([], "waiting", [])
        assert story.later(1.9) == []
        assert story.later(0.2) == [LOOK_UP]
    else:
        assert follows == []
        assert unknown(story)


def test_nothing_found_before_it_could_have_arrived_is_not_yet_absent():
    story = in_flight("reconcilable", settle_ms=30_000)
    story.restart(10)
    story.go()
    assert story.looked_up(2, "absent") == []
    assert story.step(2).look_up == "pending"
    assert story.later(29) == []  # counted from the end of the attempt: until then it may have been sent
    assert story.later(1) == [LOOK_UP]
    assert story.looked_up(2, "absent") == [AGAIN]


def test_a_look_up_cut_off_by_a_crash_is_asked_again_and_counts_as_no_attempt():
    story = in_flight("reconcilable")
    for _ in range(3):
        story.restart()
        assert story.go() == [LOOK_UP]
    assert (story.step(2).attempt, story.state.spent.attempts) == (1, 2)


@pytest.mark.parametrize("effect", CLASSES)
def test_a_failure_that_is_known_ends_the_call_and_the_model_is_told_f049(effect: EffectClass):
    story = in_flight(effect)
    story.report(2, Failed(error=ev.Trouble(kind="http_403", message="no")))
    assert story.step(2).status == "failed"
    assert story.doing() == [3]
    assert story.state.messages[-1].result == {
        "content": [{"type": "text", "text": "Failed (http_403): no"}],
        "isError": True,
    }


@pytest.mark.parametrize("effect", CLASSES)
def test_a_late_outcome_is_evidence_and_changes_nothing(effect: EffectClass):
    story = in_flight(effect)
    story.asked("c", CancelCommand())
    story.report(2, Lost(reason="cancelled"))
    before = story.state
    story.in_flight = frozenset({(sid(2), 1)})
    story.done(2)
    assert story.kinds()[-1] == "LateOutcome"
    assert replace(story.state, last_seq=before.last_seq) == before


def test_reads_go_side_by_side_and_an_effect_waits_for_all_before_it_t5():
    story = Story()
    story.says(1, "t.read", "t.read", "t.put", "t.read")
    assert story.doing() == [2, 3]
    story.done(2)
    assert story.doing() == [3]
    story.restart()
    assert story.go() == [ToolAction(sid(3), 2)]  # the second read only
    story.done(3)
    assert story.doing() == [4]
    story.done(4)
    assert story.doing() == [5]
    story.done(5)
    assert story.doing() == [6]


@pytest.mark.parametrize(
    ("calls", "waves"),
    [
        (("read", "read", "put", "read"), [[2, 3], [4], [5]]),
        (("put", "read"), [[2], [3]]),
        (("read", "put", "read", "read"), [[2], [3], [4, 5]]),
        (("pay", "close", "put"), [[2], [3], [4]]),
    ],
)
def test_calls_run_in_the_order_given(calls: tuple[str, ...], waves: list[list[int]]):
    story = Story()
    story.says(1, *(f"t.{name}" for name in calls))
    seen: list[list[int]] = []
    while story.doing() != [len(calls) + 2]:
        seen.append(story.doing())
        for n in story.doing():
            story.done(n)
    assert seen == waves


def test_no_more_reads_go_side_by_side_than_the_limit():
    story = Story()
    story.says(1, *["t.read"] * 10)
    assert story.doing() == [2, 3, 4, 5, 6, 7, 8, 9]
    story.done(5)
    assert story.doing() == [2, 3, 4, 6, 7, 8, 9, 10]


def test_later_calls_wait_for_one_in_doubt_and_go_on_when_it_is_settled():
    story = Story()
    story.says(1, "t.pay", "t.read")
    story.restart()
    assert story.go() == []
    story.answer("abandon")
    assert story.doing() == [3]


@pytest.mark.parametrize("request_first", [True, False])
def test_a_request_while_reads_are_in_flight_starts_nothing_a_second_time_f079(request_first: bool):
    story = Story()
    story.says(1, "t.read", "t.read", "t.pay")
    if request_first:
        assert story.go() == []
    assert story.later(5) == []
    assert story.doing() == [2, 3]


def test_each_lost_attempt_is_looked_up_anew_before_the_next():
    story = in_flight("reconcilable")
    for attempt in (1, 2, 3):
        story.restart()
        assert story.go() == [LookUpAction(sid(2), attempt)]
        assert story.looked_up(2, "absent") == [ToolAction(sid(2), attempt + 1)]


def test_a_reply_that_comes_after_its_attempt_was_given_up_settles_nothing():
    story = in_flight("idempotent")
    story.lost(2)
    before = story.state
    story.in_flight = frozenset({(sid(2), 1)})
    story.done(2)
    assert story.kinds()[-1] == "LateOutcome"
    assert replace(story.state, last_seq=before.last_seq) == before


def test_a_read_does_not_overtake_one_that_stands_before_a_denied_effect():
    story = Story(definition(rules=(Rule(do="deny", tool="t.pay"), Rule(do="allow"))))
    story.says(1, "t.read", "t.pay", "t.read")
    assert (story.step(3).status, story.doing()) == ("denied", [2])
    story.done(2)
    assert story.doing() == [4]


def test_an_ended_run_owes_nothing_at_an_opening():
    story = in_flight("at_most_once")
    for phase in ("completed", "failed", "cancelled"):
        assert open_pass(replace(story.state, phase=phase), story.rules, story.now) == ()


def test_the_time_to_settle_counts_from_the_end_of_a_long_attempt():
    story = in_flight("reconcilable", settle_ms=3_000)
    story.now += timedelta(seconds=2.5)
    story.lost(2)
    assert story.later(1) == [LOOK_UP]
    assert story.looked_up(2, "absent") == []
    assert story.step(2).look_up == "pending"
    assert story.later(2) == [LOOK_UP]


def test_what_stays_pending_is_asked_about_less_and_less_often():
    story = in_flight("reconcilable")
    story.restart()
    story.go()
    waits = []
    for _ in range(12):
        story.looked_up(2, "pending")
        assert story.wake is not None
        waits.append((story.wake - story.now).total_seconds())
        story.now = story.wake
        story.go()
    assert waits == [2, 4, 8, 16, 32, 64, 128, 256, 300, 300, 300, 300]


@pytest.mark.parametrize("effect", ["read_only", "idempotent", "reconcilable"])
def test_what_present_policy_denies_is_not_sent_again(effect: EffectClass):
    story = in_flight(effect)
    story.restart(present={"a": (Rule(do="deny", tool=NAMES[effect]),)})
    story.go()
    if effect == "reconcilable":
        assert story.looked_up(2, "absent") == [ModelAction(sid(3), 1)]
    if effect == "idempotent":  # it may have happened: that is asked
        assert unknown(story)
        story.answer("did_not_happen")
        assert (story.step(2).status, story.doing()) == ("denied", [3])
    else:
        assert (story.step(2).status, story.doing()) == ("failed", [3])
        assert story.step(2).error == ev.Trouble(kind="policy", message="policy denies this call")


@pytest.mark.parametrize("ends", ["cancel", "stop"])
def test_what_a_look_up_proved_absent_is_not_unknown_when_the_run_ends(ends: str):
    made = definition(budget=Budget(attempts=2))
    story = Story(made)
    story.says(1, NAMES["reconcilable"])
    story.restart()
    story.go()
    assert story.looked_up(2, "absent") == []  # the budget holds the next attempt up
    if ends == "cancel":
        story.asked("c", CancelCommand())
    else:
        story.answer("stop")
    assert (story.step(2).status, story.state.unresolved, story.opened()) == ("withdrawn", (), [])


def test_an_unknown_outcome_of_a_run_that_was_stopped_can_still_be_told():
    story = in_flight("idempotent")
    story.restart()
    story.go()
    story.report(2, NotDone(error=ev.Trouble(kind="gone"), ask=True))
    story.answer("stop")
    assert (story.status, story.step(2).status, story.state.unresolved) == ("failed", "unknown", (sid(2),))
    story.answer("happened")
    assert (story.status, story.step(2).status, story.state.unresolved) == ("failed", "completed", ())


def test_no_duration_in_a_record_is_too_long():
    story = in_flight("idempotent", key_ttl_ms=10**17)
    story.restart(5)
    assert story.go() == [AGAIN]
    story.not_done(2, after_ms=10**17)
    assert story.step(2).retry_at == story.now + timedelta(days=3650)
    asked = Story(definition(rules=(Rule(do="ask", expires_ms=10**17),)))
    asked.says(1, NAMES["at_most_once"])
    assert asked.opened()[0].expires_at == asked.now + timedelta(days=3650)
