"""An outcome that nobody knows: the question, its three answers, and what each of them does. P4, F075."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from rpcagent import errors
from rpcagent.runs.decide import ToolAction
from rpcagent.runs.definition import Rule
from rpcagent.runs.requests import ApproveCommand, CancelCommand

from .story import DONE, Story, sid

DENY = {"a": (Rule(do="deny", tool="t.pay"),)}


def in_doubt() -> Story:
    story = Story()
    story.says(1, "t.pay", "t.read")
    story.restart(5)
    assert story.go() == []
    return story


def told(story: Story, ordinal: int = 2) -> Any:
    """What the model is told about a call, once its whole turn is settled."""
    for n in range(2, 4):
        if n in story.doing():
            story.done(n)
    return next(m.result for m in story.state.messages if m.step_id == sid(ordinal))


def test_the_question_is_there_before_anything_else_and_never_expires():
    story = Story()
    story.says(1, "t.pay", "t.read")
    key = story.step(2).key
    story.restart(5)
    (question,) = story.opened()
    assert (story.step(2).status, story.status) == ("unknown", "waiting")
    assert (question.kind, question.step_id, question.expires_at) == ("unknown_outcome", sid(2), None)
    assert question.choices == ("happened", "did_not_happen", "abandon")
    assert question.subject == {
        "tool": "t.pay", "effect": "at_most_once", "arguments": {"n": 0}, "workspace": None, "attempt": 1, "key": key,
        "startedAt": "2026-03-01T12:00:00Z",
    }  # fmt: skip
    story.later(365 * 86_400)
    assert story.opened() == [question]


def test_happened_with_a_result_gives_the_model_that_result():
    story = in_doubt()
    story.answer("happened", result=DONE)
    step = story.step(2)
    assert (step.status, step.source, step.result, step.attempt) == ("completed", "person", DONE, 1)
    assert told(story) == DONE


def test_happened_without_a_result_tells_the_model_that_the_result_is_not_known():
    story = in_doubt()
    story.answer("happened")
    assert story.step(2).status == "completed"
    assert told(story) == {
        "content": [{"type": "text", "text": "A person confirmed that this happened. Its result is not known."}],
        "isError": False,
    }


def test_did_not_happen_is_one_more_attempt_with_the_same_key_and_no_further_question():
    story = in_doubt()
    key = story.step(2).key
    question = story.opened()[0].approval_id
    story.answer("did_not_happen")
    assert story.performed[-1] == ToolAction(sid(2), 2)
    assert (story.step(2).status, story.step(2).attempt, story.step(2).key) == ("started", 2, key)
    assert story.state.closed[question].status == "consumed"
    story.done(2)
    assert told(story) == DONE


def test_the_answer_covers_one_attempt_only():
    story = in_doubt()
    first = story.opened()[0].approval_id
    story.answer("did_not_happen")
    story.restart(5)
    assert story.go() == []
    (second,) = story.opened()
    assert (second.kind, second.subject["attempt"]) == ("unknown_outcome", 2)
    assert second.approval_id != first


def test_did_not_happen_under_a_policy_that_now_denies_runs_nothing():
    story = in_doubt()
    story.restart(1, present=DENY)
    story.answer("did_not_happen")
    assert (story.step(2).status, story.step(2).attempt) == ("denied", 1)
    assert story.state.approvals == {}
    assert story.doing() == [3]


def test_did_not_happen_survives_a_crash_before_the_next_attempt_began():
    story = in_doubt()
    question = story.opened()[0]
    story.ask(
        "k",
        ApproveCommand(approval_id=question.approval_id, digest=question.digest, decision="did_not_happen"),
    )
    story.restart(5)
    assert story.opened() == []
    assert story.go() == [ToolAction(sid(2), 2)]


def test_abandon_leaves_the_step_unknown_for_good_tells_the_model_and_goes_on():
    story = in_doubt()
    story.answer("abandon")
    assert (story.step(2).status, story.step(2).abandoned) == ("unknown", True)
    assert story.doing() == [3]
    assert told(story) == {
        "content": [
            {
                "type": "text",
                "text": "Unknown outcome: it may or may not have happened. It was not run again, and nobody could tell.",
            }
        ],
        "isError": True,
    }
    story.says(4, text="end")
    assert story.status == "completed"


def test_the_model_is_not_asked_again_and_nothing_starts_before_the_answer():
    story = in_doubt()
    before = len(story.performed)
    story.later(3_600)
    story.restart(5)
    story.go()
    assert len(story.performed) == before


@pytest.mark.parametrize(
    ("decision", "status", "unresolved"),
    [("happened", "completed", ()), ("did_not_happen", "withdrawn", ()), ("abandon", "unknown", (sid(2),))],
)
def test_after_a_cancel_the_answer_is_evidence_and_starts_nothing(decision: str, status: str, unresolved: tuple[str]):
    story = in_doubt()
    story.asked("c", CancelCommand())
    assert story.state.unresolved == (sid(2),)
    story.answer(decision)
    assert story.status == "cancelled"
    assert (story.step(2).status, story.state.unresolved) == (status, unresolved)
    assert story.state.approvals == {}
    assert story.doing() == []


def test_another_answer_is_refused_with_the_first_f065():
    story = in_doubt()
    question = story.opened()[0]
    story.answer("abandon")
    with pytest.raises(errors.AlreadyDecided):
        story.ask("k", ApproveCommand(approval_id=question.approval_id, digest=question.digest, decision="happened"))


def test_time_that_passes_in_doubt_is_not_charged():
    story = Story()
    story.says(1, "t.pay")
    story.now += timedelta(seconds=2)
    story.restart(3_600)
    assert story.state.spent.active_s == 0.0


def test_a_cancel_after_did_not_happen_withdraws_the_attempt_that_it_allowed():
    story = in_doubt()
    question = story.opened()[0]
    story.ask("k", ApproveCommand(approval_id=question.approval_id, digest=question.digest, decision="did_not_happen"))
    story.asked("c", CancelCommand())
    assert (story.status, story.step(2).status, story.state.unresolved) == ("cancelled", "withdrawn", ())
    assert story.state.approvals == {}
    assert story.doing() == []
