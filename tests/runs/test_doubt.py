"""A doubt lasts until something settles it: what a later attempt did not do says nothing of an earlier one. P4."""

from __future__ import annotations

import pytest
from rpcagent.runs import events as ev
from rpcagent.runs.decide import ToolAction
from rpcagent.runs.definition import Rule
from rpcagent.runs.outcomes import Failed
from rpcagent.runs.requests import CancelCommand

from .story import DONE, TOOLS, Story, definition, replace, sid

GONE = ev.Trouble(kind="incompatible", message="The server has another schema now.")


def second_attempt(tool: str = "t.put", key_ttl_ms: int | None = None) -> Story:
    """The first attempt was cut off, and may have acted; the second one is in flight."""
    tools = tuple(replace(spec, key_ttl_ms=key_ttl_ms) if spec.name == "t.put" else spec for spec in TOOLS)
    story = Story(definition(tools=tools))
    story.says(1, tool)
    story.restart(5)
    story.go()
    if tool == "t.close":
        story.looked_up(2, "absent")
    assert (story.step(2).attempt, story.doing()) == (2, [2])
    return story


def fails(story: Story) -> None:
    story.report(2, Failed(error=GONE))


def test_a_later_attempt_that_failed_leaves_an_idempotent_step_unknown_and_says_why():
    story = second_attempt()
    fails(story)
    (question,) = story.opened()
    assert (story.step(2).status, story.step(2).error, story.doing()) == ("unknown", GONE, [])
    assert (question.kind, question.step_id) == ("unknown_outcome", sid(2))
    assert (question.subject["attempt"], question.subject["error"]) == (2, {"kind": GONE.kind, "message": GONE.message})


@pytest.mark.parametrize("tool", ["t.read", "t.close"])
def test_where_nothing_can_have_happened_before_it_has_failed_and_the_model_is_told(tool: str):
    story = second_attempt(tool)
    fails(story)
    assert (story.step(2).status, story.opened(), story.doing()) == ("failed", [], [3])


def test_a_person_who_says_that_it_happened_ends_it():
    story = second_attempt()
    fails(story)
    story.answer("happened", result=DONE)
    step = story.step(2)
    assert (step.status, step.result, step.error, story.doing()) == ("completed", DONE, None, [3])


def test_after_did_not_happen_nothing_is_in_doubt_and_the_next_failure_is_one():
    story = second_attempt()
    fails(story)
    story.answer("did_not_happen")
    assert story.performed[-1] == ToolAction(sid(2), 3)
    fails(story)
    assert (story.step(2).status, story.step(2).error, story.doing()) == ("failed", GONE, [3])


@pytest.mark.parametrize(("seconds", "status"), [(50, "started"), (70, "unknown")])
def test_a_key_is_forgotten_while_a_later_attempt_waits_as_well(seconds: int, status: str):
    story = second_attempt(key_ttl_ms=60_000)
    story.not_done(2, after_ms=seconds * 1_000)
    assert story.later(seconds) == ([ToolAction(sid(2), 3)] if status == "started" else [])
    assert story.step(2).status == status


def test_a_cancel_while_a_later_attempt_waits_withdraws_nothing_that_may_have_happened():
    story = second_attempt()
    story.not_done(2, after_ms=60_000)
    story.asked("c", CancelCommand())
    assert (story.status, story.step(2).status, story.state.unresolved) == ("cancelled", "unknown", (sid(2),))
    story.answer("happened", result=DONE)
    assert (story.status, story.step(2).status, story.state.unresolved) == ("cancelled", "completed", ())


def test_a_cancel_while_a_first_attempt_waits_withdraws_it():
    story = Story()
    story.says(1, "t.put")
    story.not_done(2, after_ms=60_000)
    story.asked("c", CancelCommand())
    assert (story.status, story.step(2).status, story.state.unresolved) == ("cancelled", "withdrawn", ())


def asked_before_the_next_attempt() -> Story:
    """Today's policy asks before the next attempt of what an earlier one may have done."""
    story = second_attempt()
    story.not_done(2, after_ms=1)
    story.restart(5, present={"a": (Rule(do="ask", expires_ms=60_000),)})
    story.go()
    assert ([a.kind for a in story.opened()], story.step(2).status) == (["tool_call"], "waiting_approval")
    return story


def is_asked_whether_it_happened(story: Story, why: str) -> None:
    assert [a.kind for a in story.opened()] == ["unknown_outcome"]
    assert story.step(2).status == "unknown"
    assert story.step(2).error is None or story.step(2).error.kind == why
    story.answer("happened", result=DONE)
    assert (story.step(2).status, story.state.approvals) == ("completed", {})


def test_a_person_who_denies_the_next_attempt_is_asked_whether_an_earlier_one_happened():
    story = asked_before_the_next_attempt()
    story.answer("deny")
    is_asked_whether_it_happened(story, "person")


def test_a_question_that_expires_leaves_the_doubt():
    story = asked_before_the_next_attempt()
    assert story.later(60) == []
    is_asked_whether_it_happened(story, "expired")


def test_a_cancel_leaves_the_doubt_of_what_waits_for_an_approval():
    story = asked_before_the_next_attempt()
    story.asked("c", CancelCommand())
    assert (story.status, story.state.unresolved) == ("cancelled", (sid(2),))
    is_asked_whether_it_happened(story, "busy")
