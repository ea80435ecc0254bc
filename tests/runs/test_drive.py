"""Manual drive: one `step`, one step. F073, S4-70."""

from __future__ import annotations

import pytest
from rpcagent import errors
from rpcagent.runs.definition import Budget, Rule
from rpcagent.runs.requests import CancelCommand, StepCommand

from .story import DONE, Story, assert_shows, definition, sid

ASK = definition(rules=(Rule(do="ask", effect="at_most_once"), Rule(do="allow")))


def test_each_step_request_performs_exactly_one_step():
    story = Story(drive="manual")
    assert (story.doing(), story.status) == ([], "ready")
    story.asked("s1", StepCommand())
    assert story.says(1, "t.read", "t.read", "t.put") == []
    seen = []
    for n in range(2, 5):
        assert story.status == "ready"
        story.asked(f"s{n}", StepCommand())
        seen.append(story.doing())
        story.done(n)
    assert seen == [[2], [3], [4]]  # reads go one by one
    story.asked("s5", StepCommand())
    story.says(5, text="end")
    assert story.status == "completed"
    assert [story.decision(f"s{n}")["step"]["stepId"] for n in range(1, 6)] == [sid(n) for n in range(1, 6)]
    assert_shows(
        story.decision("s2"),
        {
            "stepId": sid(2),
            "kind": "tool_call",
            "name": "t.read",
            "status": "completed",
            "attempt": 1,
            "result": DONE,
        },
    )


def test_after_an_answer_that_asks_for_a_gated_call_the_next_step_is_refused_and_an_allow_does_not_execute_s4_70():
    story = Story(ASK, drive="manual")
    story.asked("s1", StepCommand())
    story.says(1, "t.pay")
    assert story.decision("s1")["step"]["kind"] == "model_call"
    assert story.status == "waiting"
    with pytest.raises(errors.ApprovalRequired):
        story.ask("s2", StepCommand())
    story.answer("allow")
    assert (story.doing(), story.status) == ([], "ready")
    story.asked("s2", StepCommand())
    assert story.doing() == [2]


def test_a_step_that_reaches_a_question_instead_of_an_action_succeeds_as_a_gate():
    story = Story(definition(budget=Budget(steps=1)), drive="manual")
    story.asked("s1", StepCommand())
    story.says(1, "t.read")
    story.asked("s2", StepCommand())
    (question,) = story.opened()
    assert_shows(
        story.decision("s2"),
        {
            "stepId": None,
            "kind": "gate",
            "name": "budget",
            "status": "waiting_approval",
            "attempt": 0,
            "approvalId": question.approval_id,
        },
    )
    with pytest.raises(errors.ApprovalRequired):
        story.ask("s3", StepCommand())
    story.answer("extend", extend={"steps": 5.0})
    assert (story.doing(), story.status) == ([], "ready")
    story.asked("s3", StepCommand())
    assert story.doing() == [2]


def test_a_call_before_a_gated_one_is_performed_first():
    story = Story(ASK, drive="manual")
    story.asked("s1", StepCommand())
    story.says(1, "t.read", "t.pay")
    assert (len(story.opened()), story.status) == (1, "ready")
    story.asked("s2", StepCommand())
    story.done(2)
    assert story.status == "waiting"
    with pytest.raises(errors.ApprovalRequired):
        story.ask("s3", StepCommand())


def test_a_step_that_is_interrupted_is_brought_to_its_end_after_a_restart_and_no_further():
    story = Story(drive="manual")
    story.asked("s1", StepCommand())
    story.restart(1)
    story.go()
    assert story.doing() == [1]
    assert story.says(1, "t.read") == []
    assert story.decision("s1")["step"]["attempt"] == 2


def test_a_step_in_doubt_is_answered_as_unknown_and_no_request_is_held_for_a_person():
    story = Story(drive="manual")
    story.asked("s1", StepCommand())
    story.says(1, "t.pay")
    story.asked("s2", StepCommand())
    story.restart(1)
    story.go()
    assert_shows(
        story.decision("s2"),
        {"stepId": sid(2), "kind": "tool_call", "name": "t.pay", "status": "unknown", "attempt": 1},
    )
    story.answer("happened", result=DONE)
    assert story.doing() == []
    story.asked("s3", StepCommand())
    assert story.doing() == [3]


def test_a_step_that_must_be_retried_is_still_the_same_step():
    story = Story(drive="manual")
    story.asked("s1", StepCommand())
    story.not_done(1, after_ms=60_000)
    with pytest.raises(errors.RunBusy):
        story.ask("s2", StepCommand())
    story.later(60)
    assert story.doing() == [1]
    story.says(1, text="end")
    assert story.decision("s1")["step"]["attempt"] == 2


def test_a_manual_run_is_cancelled_at_once_when_nothing_is_performed():
    story = Story(drive="manual")
    story.asked("c", CancelCommand(reason="enough"))
    assert (story.status, story.state.cancel_reason) == ("cancelled", "enough")


def test_after_did_not_happen_a_manual_run_is_ready_for_the_next_step():
    story = Story(drive="manual")
    story.asked("s1", StepCommand())
    story.says(1, "t.pay")
    story.asked("s2", StepCommand())
    story.lost(2)
    assert (story.status, story.step(2).status) == ("waiting", "unknown")
    story.answer("did_not_happen")
    assert (story.status, story.step(2).retry_at) == ("ready", None)
    story.asked("s3", StepCommand())
    assert story.doing() == [2]
