"""Budgets are reserved before they are spent and inherited; retries are recorded, bounded, and end in a question. P7."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from msgspec.structs import replace
from rpcagent.runs import events as ev
from rpcagent.runs.decide import ModelAction
from rpcagent.runs.definition import Budget, ModelSettings
from rpcagent.runs.outcomes import AskedCall, Failed, ModelReply, NotDone, backoff_ms
from rpcagent.runs.requests import CancelCommand, ResumeCommand

from .story import NOON, Story, definition, sid


def question(story: Story) -> Any:
    (approval,) = story.opened()
    return approval


@pytest.mark.parametrize(
    ("budget", "calls", "limit"),
    [
        (Budget(steps=2), ("t.read", "t.read"), "steps"),
        (Budget(attempts=2), ("t.read", "t.read"), "attempts"),
        (Budget(tokens=109), (), "tokens"),
    ],
)
def test_the_next_step_asks_before_it_exceeds_a_limit(budget: Budget, calls: tuple[str, ...], limit: str):
    story = Story(definition(budget=budget))
    if calls:
        story.says(1, *calls)
        assert story.doing() == [2]
        story.done(2)
    else:
        story.says(1, "t.read")
        story.done(2)
    assert story.doing() == []
    assert (question(story).kind, question(story).subject["limit"]) == ("budget", limit)
    assert story.status == "waiting"


@pytest.mark.parametrize(("budget", "limit"), [(Budget(cost_usd=0.5), "cost_usd"), (Budget(active_s=3.0), "active_s")])
def test_cost_and_active_time_stop_the_next_step_and_not_the_one_that_is_paid_for(budget: Budget, limit: str):
    story = Story(definition(budget=budget))
    story.now += timedelta(seconds=3)
    call = AskedCall(tool="t.read", arguments={})
    story.report(1, ModelReply(usage=ev.Usage(cost_usd=0.5), calls=(call,)))
    assert story.step(1).status == "completed"
    assert question(story).subject["limit"] == limit
    other = Story(definition(budget=budget))
    other.now += timedelta(seconds=3)
    other.report(1, ModelReply(usage=ev.Usage(cost_usd=0.5), text="end"))
    assert other.status == "completed"


def test_extend_adds_to_the_limit_and_the_run_goes_on_where_it_stood():
    story = Story(definition(budget=Budget(steps=1)))
    story.says(1, "t.read")
    story.answer("extend", extend={"steps": 1.0})
    assert story.doing() == [2]
    story.done(2)
    assert question(story).subject["value"] == 2
    story.answer("extend", extend={"steps": 10.0})
    assert story.doing() == [3]
    assert story.state.limit("steps") == 12


def test_stop_ends_the_run_as_failed_and_says_why():
    story = Story(definition(budget=Budget(steps=1)))
    story.says(1, "t.read")
    story.answer("stop", comment="too dear")
    assert story.status == "failed"
    assert story.state.error == ev.Trouble(kind="budget", message="A person answered stop. too dear")


def test_a_budget_question_waits_for_what_is_in_flight():
    story = Story(definition(budget=Budget(steps=2)))
    story.says(1, "t.read", "t.read")
    assert (story.doing(), story.opened()) == ([2], [])
    story.done(2)
    assert len(story.opened()) == 1


def test_what_is_spent_is_inherited_over_restarts_and_a_lost_reservation_stays_spent():
    story = Story(definition(budget=Budget(tokens=350)))
    for n in range(1, 3):
        story.restart(1)
        story.go()
        assert (story.state.spent.tokens, story.state.spent.estimated_tokens) == (100 * (n + 1), 100 * n)
    story.restart(1)
    story.go()
    assert story.state.spent.attempts == 3
    assert question(story).subject["limit"] == "tokens"


def test_tokens_are_trued_up_by_what_the_provider_counted():
    story = Story()
    assert story.state.spent.tokens == 100
    story.says(1, "t.read")
    assert story.state.spent.tokens == 10
    assert (story.state.spent.steps, story.state.spent.attempts) == (2, 2)


def test_tokens_that_nobody_counted_stay_spent_as_they_were_reserved():
    story = Story()
    story.report(1, ModelReply(calls=(AskedCall(tool="t.read", arguments={}),)))
    assert (story.state.spent.tokens, story.state.spent.estimated_tokens) == (100, 100)


def test_a_wait_that_is_asked_for_is_never_shorter_than_our_own():
    story = Story()
    story.not_done(1, after_ms=1)
    assert story.step(1).retry_at == story.now + timedelta(milliseconds=backoff_ms(sid(1), 1))


def test_an_attempt_that_was_not_done_gives_its_reservation_back():
    story = Story()
    story.not_done(1)
    assert (story.state.spent.tokens, story.state.spent.attempts) == (0, 1)


@pytest.mark.parametrize(("attempt", "most"), [(1, 1_000), (2, 2_000), (5, 16_000), (7, 60_000), (10_000, 60_000)])
def test_the_wait_doubles_up_to_a_minute_less_up_to_a_quarter(attempt: int, most: int):
    waits = [backoff_ms(f"stp_a_{n}", attempt) for n in range(200)]
    assert most * 0.75 < min(waits) < max(waits) <= most
    assert waits == [backoff_ms(f"stp_a_{n}", attempt) for n in range(200)]  # derived: a replay waits as long
    assert len(set(waits)) > 100  # and many runs do not come back at once


def test_a_rate_limit_is_waited_for_as_long_as_the_provider_says():
    story = Story()
    story.not_done(1, after_ms=60_000)
    assert (story.status, story.wake) == ("waiting", NOON + timedelta(seconds=60))
    assert story.later(59) == []
    assert story.later(1) == [ModelAction(sid(1), 2)]


def test_resume_does_not_shorten_a_wait():
    story = Story()
    story.not_done(1, after_ms=60_000)
    assert story.asked("r", ResumeCommand()).decision == {"recovery": {"released": False}}
    assert story.doing() == []


@pytest.mark.parametrize("recovery", ["auto", "confirm"])
def test_a_wait_goes_on_over_restarts_and_its_attempts_are_counted_t3(recovery: Any):
    story = Story(recovery=recovery)
    story.not_done(1, after_ms=60_000)
    for _ in range(5):
        story.restart(10)
        assert story.go() == []
    follows = story.later(10)
    if recovery == "confirm":
        assert (follows, story.status) == ([], "ready")
        story.asked("r", ResumeCommand())
    assert story.performed[-1] == ModelAction(sid(1), 2)
    assert (story.state.spent.steps, story.state.spent.attempts) == (1, 2)


def test_time_does_not_run_behind_the_last_event():
    story = Story()
    story.not_done(1, after_ms=60_000)
    story.now -= timedelta(days=1)
    story.restart()
    assert story.go() == []
    assert story.state.last_at == NOON
    story.now = NOON + timedelta(seconds=60)
    assert story.go() == [ModelAction(sid(1), 2)]


@pytest.mark.parametrize("restart", [False, True])
def test_lasting_trouble_becomes_a_question_and_not_a_failure(restart: bool):
    story = Story(definition(model=ModelSettings(retry_for_ms=120_000)))
    while not story.opened():
        story.not_done(1)
        if restart and story.step(1).attempt == 4:
            story.restart(1)
        if not story.opened():
            story.later(backoff_ms(sid(1), story.step(1).attempt) / 1000)
    assert question(story).kind == "retry"
    assert (story.step(1).attempt, story.status) == (9, "waiting")
    assert story.step(1).started_at - NOON >= timedelta(seconds=120)  # type: ignore[operator]
    story.answer("retry")
    assert story.doing() == [1]
    story.not_done(1)
    assert story.opened() == []  # the bound begins anew


def test_lasting_trouble_may_be_given_up():
    story = Story(definition(model=ModelSettings(retry_for_ms=0)))
    story.not_done(1, after_ms=0)
    story.go()
    assert question(story).choices == ("retry", "stop")
    story.answer("stop")
    assert (story.status, story.state.error.kind) == ("failed", "retry")  # type: ignore[union-attr]


def test_replies_lost_again_and_again_are_spaced_out_and_end_in_a_question():
    story = Story(definition(model=ModelSettings(retry_for_ms=60_000)))
    story.says(1, "t.put")
    seen = []
    while not story.opened():
        assert story.lost(2) == []
        before = story.now
        follows: list[Any] = []
        while not follows and not story.opened():
            follows = story.later(1)
        seen.append((story.now - before).total_seconds())
    assert seen[:4] == [1, 2, 4, 8]
    assert question(story).kind == "retry"
    story.answer("retry")
    assert story.doing() == [2]


def test_a_run_that_was_stopped_with_a_step_in_doubt_opens_again_whenever_that_is():
    tools = tuple(replace(t, key_ttl_ms=1_000) if t.name == "t.put" else t for t in definition().tools)
    story = Story(definition(budget=Budget(attempts=2), tools=tools))
    story.says(1, "t.put")
    story.restart(0.1)
    story.go()
    story.answer("stop")
    assert story.status == "failed"
    assert story.step(2).status == "unknown"  # what may have happened is not passed over
    before = story.state
    story.restart(86_400)
    assert story.go() == []
    assert story.state == before


def test_a_model_that_fails_for_good_fails_the_run():
    story = Story()
    story.report(1, Failed(error=ev.Trouble(kind="script_exhausted", message="no more")))
    assert (story.status, story.state.error) == ("failed", ev.Trouble(kind="script_exhausted", message="no more"))


def test_a_cancel_ends_a_wait_at_once():
    story = Story()
    story.not_done(1, after_ms=60_000)
    story.asked("c", CancelCommand())
    assert (story.status, story.step(1).status) == ("cancelled", "withdrawn")


def test_trouble_that_only_a_person_can_end_is_asked_about_at_once():
    story = Story()
    story.report(1, NotDone(error=ev.Trouble(kind="credentials", message="the key is refused"), ask=True))
    assert (question(story).kind, story.status) == ("retry", "waiting")
    assert question(story).subject["error"] == {"kind": "credentials", "message": "the key is refused"}
    story.answer("retry")
    assert story.doing() == [1]
    story.says(1, text="end")
    assert story.status == "completed"


def test_an_answer_that_cannot_be_used_is_told_to_the_model_and_the_run_goes_on():
    story = Story()
    story.report(1, ModelReply(text="I wi", problem="it was cut by the length limit"))
    assert story.doing() == [2]
    assert [m.content for m in story.state.messages[1:]] == [
        "I wi",
        "Your last answer could not be used: it was cut by the length limit",
    ]
    story.report(2, ModelReply(text="Done."))
    assert (story.status, story.state.output, story.state.repairs) == ("completed", "Done.", 0)


def test_answers_that_can_never_be_used_end_the_run_f053():
    story = Story()
    for n in range(1, 5):
        assert story.status == "running"
        story.report(n, ModelReply(problem="it was cut by the length limit"))
    assert story.status == "failed"
    assert story.state.error == ev.Trouble(
        kind="bad_output",
        message="4 answers in a row could not be used. The last one: it was cut by the length limit",
    )


def test_calls_that_can_never_be_run_end_the_run_f061():
    story = Story()
    for n in range(4):
        assert story.status == "running"
        story.report(2 * n + 1, ModelReply(calls=(AskedCall(tool="t.none", arguments={}),)))
    assert story.status == "failed"
    assert story.state.error is not None
    assert story.state.error.kind == "bad_output"


def test_a_model_that_asks_for_the_same_again_and_again_is_stopped_by_a_question_f056():
    story = Story(definition(budget=Budget(repeats=3)))
    n = 1
    while not story.opened():
        story.says(n, "t.read")
        if not story.opened():
            story.done(n + 1)
        n += 2
    assert story.state.spent.steps == 7  # four answers, three calls
    assert question(story).subject["limit"] == "repeats"
    story.answer("extend", extend={"repeats": 2})
    assert story.status == "running"


def test_an_answer_with_more_calls_than_can_be_meant_is_not_acted_on():
    story = Story()
    story.report(1, ModelReply(calls=tuple(AskedCall(tool="t.read", arguments={"n": n}) for n in range(129))))
    assert (story.doing(), story.state.turn, story.state.repairs) == ([2], (), 1)
    assert story.state.messages[-1].content == (
        "Your last answer could not be used: it asked for 129 calls at once; at most 128 are made"
    )


def test_a_cost_that_cannot_be_true_is_not_counted():
    story = Story()
    story.report(1, ModelReply(text="end", usage=ev.Usage(input_tokens=10**12, cost_usd=1e308)))
    assert (story.state.spent.tokens, story.state.spent.cost_usd) == (10**9, 0.0)
