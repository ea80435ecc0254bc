"""Questions to a person: bound to what was shown, answered once, and never by silence. F065, F069, F071, S4-70."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from rpcagent import errors
from rpcagent.ids import digest_of
from rpcagent.runs import events as ev
from rpcagent.runs.decide import ToolAction
from rpcagent.runs.definition import Rule
from rpcagent.runs.requests import ApproveCommand, CancelCommand
from rpcagent.runs.state import Approval
from rpcagent.runs.view import recovery_plan

from .story import DONE, NOON, Story, definition, sid

ASK = definition(rules=(Rule(do="ask", effect="at_most_once", expires_ms=60_000),))
DENY = {"a": (Rule(do="deny", tool="t.pay"),)}


def asked(*calls: str, **more: Any) -> Story:
    story = Story(ASK, **more)
    story.says(1, *(calls or ("t.pay",)))
    return story


def command(question: Approval, decision: str, **changes: Any) -> ApproveCommand:
    return ApproveCommand(
        **{"approval_id": question.approval_id, "digest": question.digest, "decision": decision, **changes}
    )


def test_the_question_shows_all_that_will_run_and_its_digest_covers_it():
    story = asked()
    (question,) = story.opened()
    assert story.status == "waiting"
    assert question.subject == {
        "tool": "t.pay", "effect": "at_most_once", "arguments": {"n": 0}, "workspace": None,
    }  # fmt: skip
    assert question.digest == digest_of(
        [question.approval_id, "tool_call", story.state.run_id, sid(2), question.subject]
    )
    assert question.choices == ("allow", "deny")
    assert question.expires_at == NOON + timedelta(seconds=60)


def test_an_allow_is_consumed_by_the_intent_that_names_it():
    story = asked()
    question = story.opened()[0].approval_id
    story.answer("allow")
    assert story.performed[-1] == ToolAction(sid(2), 1)
    assert story.state.approvals == {}
    assert story.state.closed[question].status == "consumed"
    assert [e.approval_id for e in story.events if type(e).__name__ == "ToolStarted"] == [question]  # type: ignore[union-attr]


def test_a_denied_call_is_told_to_the_model_and_the_run_goes_on_f049():
    story = asked()
    story.answer("deny", comment="not today")
    assert story.step(2).status == "denied"
    assert story.state.messages[-1].result == {
        "content": [{"type": "text", "text": "Not run: a person denied it: not today"}],
        "isError": True,
    }
    assert story.doing() == [3]


def test_the_same_decision_again_is_already_and_another_one_names_the_first_f065():
    story = asked()
    question = story.opened()[0]
    first = story.asked("k1", command(question, "allow", decided_by="ada"))
    again = story.asked("k2", command(question, "allow"))
    shown = {"approvalId": question.approval_id, "kind": "tool_call", "decision": "allow"}
    assert first.decision == {"approval": {**shown, "already": False}}
    assert again.decision == {"approval": {**shown, "already": True}}
    with pytest.raises(errors.AlreadyDecided) as refusal:
        story.ask("k3", command(question, "deny"))
    assert refusal.value.data == {
        "code": "ALREADY_DECIDED", "retryable": False, "approvalId": question.approval_id, "decision": "allow",
        "decidedAt": NOON, "source": "person", "decidedBy": "ada", "clientRequestId": "k1",
    }  # fmt: skip
    assert "k3" not in story.state.requests
    repeated = story.asked("k1", command(question, "allow", decided_by="ada"))
    assert (repeated.decision, repeated.replayed, repeated.events) == (first.decision, True, ())
    assert story.kinds().count("ToolStarted") == 1


def test_a_race_of_two_deciders_in_one_drain_has_one_winner_200_times_f065():
    for n in range(200):
        story = asked()
        question = story.opened()[0]
        pair = ("allow", "deny") if n % 2 else ("deny", "allow")
        story.ask("k1", command(question, pair[0]))
        with pytest.raises(errors.AlreadyDecided):
            story.ask("k2", command(question, pair[1]))
        story.go()
        assert story.step(2).status == ("started" if pair[0] == "allow" else "denied")


def test_each_refusal_names_the_request_that_answered_its_own_question_f065():
    story = asked("t.put", "t.pay")
    put, pay = story.opened()
    story.asked("k1", command(pay, "allow"))
    story.later(1)
    story.asked("k2", command(put, "deny"))
    story.asked("k3", command(put, "deny"))
    story.restart(1)
    for question, other, key, at in ((pay, "deny", "k1", NOON), (put, "allow", "k2", NOON + timedelta(seconds=1))):
        with pytest.raises(errors.AlreadyDecided) as refusal:
            story.ask("k", command(question, other))
        told = refusal.value.details
        assert (told["approvalId"], told["clientRequestId"], told["decidedAt"]) == (question.approval_id, key, at)
        assert "decidedBy" not in told


def test_a_wrong_digest_is_stale_before_and_after_the_decision():
    story = asked()
    question = story.opened()[0]
    for _ in range(2):
        with pytest.raises(errors.StaleDigest) as refusal:
            story.ask("k", command(question, "allow", digest="sha256:0"))
        assert refusal.value.data == {"code": "STALE_DIGEST", "retryable": False, "digest": question.digest}
        story.asked("k1", command(question, "allow"))


def test_each_decision_reaches_only_its_own_question_f071():
    story = asked("t.pay", "t.pay")
    first, second = story.opened()
    assert first.digest != second.digest
    for one, other in ((first, second), (second, first)):
        with pytest.raises(errors.StaleDigest):
            story.ask("k", command(one, "allow", digest=other.digest))
    with pytest.raises(errors.NotFound) as refusal:
        story.ask("k", command(first, "allow", approval_id="apr_of_another_run_1"))
    assert refusal.value.details == {"runId": story.state.run_id, "approvalId": "apr_of_another_run_1"}
    story.asked("k2", command(second, "allow"))
    assert story.doing() == []  # the order of execution stays
    story.asked("k1", command(first, "allow"))
    assert story.doing() == [2]


@pytest.mark.parametrize(
    "wrong",
    [
        {"decision": "yes"},
        {"decision": "happened"},
        {"decision": "allow", "result": DONE},
        {"decision": "allow", "extend": {"steps": 1.0}},
    ],
)
def test_an_answer_that_does_not_fit_the_question_is_refused_and_takes_no_key(wrong: dict[str, Any]):
    story = asked()
    question = story.opened()[0]
    with pytest.raises(errors.InvalidParams):
        story.ask("k", command(question, **wrong))
    assert story.asked("k", command(question, "allow")).decision is not None


@pytest.mark.parametrize("restart", [False, True])
def test_silence_is_never_consent_an_open_question_expires_into_a_denial_f069(restart: bool):
    story = asked()
    assert story.wake == NOON + timedelta(seconds=60)
    question = story.opened()[0]
    if restart:
        story.restart(60)
        assert story.step(2).status == "denied"
        story.go()
    else:
        story.later(59.9)
        assert story.status == "waiting"
        story.later(0.1)
    assert story.step(2).status == "denied"
    assert story.step(2).error.kind == "expired"  # type: ignore[union-attr]
    assert story.state.closed[question.approval_id].status == "expired"
    assert story.doing() == [3]
    with pytest.raises(errors.InvalidState) as refusal:
        story.ask("late", command(question, "allow"))
    assert refusal.value.details == {
        "status": "running", "approval": "expired", "approvalId": question.approval_id,
        "closedAt": NOON + timedelta(seconds=60), "source": "expiry",
    }  # fmt: skip


def test_an_answer_that_comes_when_the_question_is_due_is_too_late():
    story = asked()
    story.now += timedelta(seconds=60)
    with pytest.raises(errors.InvalidState) as refusal:
        story.ask("late", command(story.opened()[0], "allow"))
    assert refusal.value.details == {
        "status": "waiting", "approval": "expired", "approvalId": story.opened()[0].approval_id,
        "closedAt": NOON + timedelta(seconds=60), "source": "expiry",
    }  # fmt: skip


def test_an_allow_that_was_not_consumed_expires_as_well():
    story = asked("t.put", "t.pay")
    put, pay = story.opened()
    story.asked("k2", command(pay, "allow"))
    assert story.state.approvals[pay.approval_id].status == "allowed"
    story.restart(60)
    assert story.state.closed[pay.approval_id].status == "expired"
    assert story.step(3).status == "denied"
    assert story.state.approvals[put.approval_id].status == "open"


def test_an_allow_given_before_a_restart_is_good_after_it_f073():
    story = asked("t.read", "t.pay")
    question = story.opened()[0]
    assert story.doing() == [2]
    story.answer("allow")
    story.restart(10)
    same = story.state.approvals[question.approval_id]
    assert (same.digest, same.status) == (question.digest, "allowed")
    story.go()
    story.done(2)
    assert story.doing() == [3]
    assert story.kinds().count("ApprovalRequested") == 1


@pytest.mark.parametrize("decided", [False, True])
def test_a_stricter_policy_after_a_restart_voids_the_question_or_its_allow(decided: bool):
    story = asked("t.put", "t.pay")
    question = story.opened()[1]
    if decided:
        story.answer("allow", place=1)
    story.restart(1, present=DENY)
    story.go()
    assert story.state.closed[question.approval_id].status == "voided"
    assert (story.step(3).status, story.step(3).error.kind) == ("denied", "policy")  # type: ignore[union-attr]
    with pytest.raises(errors.InvalidState) as refusal:
        story.ask("late", command(question, "allow"))
    assert refusal.value.details == {
        "status": "waiting", "approval": "voided", "approvalId": question.approval_id,
        "closedAt": NOON + timedelta(seconds=1), "source": "daemon", "reason": "policy denies this call",
    }  # fmt: skip


def test_a_policy_that_became_looser_lets_nothing_pass_that_was_pinned_stricter():
    story = asked()
    story.restart(1, present={"a": (Rule(do="allow"),)})
    assert story.go() == []
    assert story.status == "waiting"


def test_a_cancel_withdraws_open_and_allowed_questions_f069():
    story = asked("t.put", "t.pay")
    put, pay = story.opened()
    story.answer("allow", place=1)
    story.later(1)
    story.asked("c", CancelCommand())
    assert story.status == "cancelled"
    assert {a.approval_id: a.status for a in story.state.closed.values()} == {
        put.approval_id: "withdrawn",
        pay.approval_id: "withdrawn",
    }
    assert [story.step(n).status for n in (2, 3)] == ["withdrawn", "withdrawn"]
    for question in (put, pay):
        with pytest.raises(errors.InvalidState) as refusal:
            story.ask("k", command(question, "allow"))
        assert refusal.value.details == {
            "status": "cancelled", "approval": "withdrawn", "approvalId": question.approval_id,
            "closedAt": NOON + timedelta(seconds=1), "source": "cancel", "clientRequestId": "c",
        }  # fmt: skip


def test_the_end_of_a_run_closes_its_questions_and_says_so():
    story = asked("t.pay", "t.pay")
    first, second = story.opened()
    story.later(1)
    story._commit((ev.RunFailed(error=ev.Trouble(kind="model")),))
    for question in (first, second):
        with pytest.raises(errors.InvalidState) as refusal:
            story.ask("k", command(question, "allow"))
        assert refusal.value.details == {
            "status": "failed", "approval": "withdrawn", "approvalId": question.approval_id,
            "closedAt": NOON + timedelta(seconds=1), "source": "end",
        }  # fmt: skip


def test_a_question_survives_any_number_of_restarts_as_it_is_s4_70():
    story = asked()
    question = story.opened()[0]
    for _ in range(5):
        story.restart(1)
        story.go()
        assert story.opened() == [question]
        assert story.status == "waiting"


def test_a_policy_that_asks_after_a_restart_asks_also_before_a_further_attempt():
    story = Story()
    story.says(1, "t.pay")
    story.not_done(2, after_ms=1_000)
    story.restart(1, present={"a": (Rule(do="ask"),)})
    assert story.go() == []
    assert [q.kind for q in story.opened()] == ["tool_call"]
    story.answer("allow")
    assert story.performed[-1] == ToolAction(sid(2), 2)


def test_one_allow_is_enough_for_the_attempts_of_a_call_that_was_not_done():
    story = asked()
    story.answer("allow")
    story.not_done(2, after_ms=1_000)
    assert story.later(1) == [ToolAction(sid(2), 2)]
    assert story.kinds().count("ApprovalRequested") == 1


def test_a_plan_says_what_an_allow_lets_begin_and_what_still_waits_for_an_answer():
    story = asked("t.put", "t.pay", recovery="confirm")
    story.answer("allow")
    story.restart(1)
    assert [s["action"] for s in recovery_plan(story.state)["steps"]] == ["reuse", "again", "ask"]
    other = asked("t.put", "t.pay", recovery="confirm")
    other.answer("allow", place=1)
    other.restart(1)
    assert [s["action"] for s in recovery_plan(other.state)["steps"]] == ["reuse", "ask", "start"]
