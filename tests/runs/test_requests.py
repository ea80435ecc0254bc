"""Requests by method and state of the run; keys; refusals that leave no trace. P5, S4-53, F071."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from rpcagent import errors
from rpcagent.runs import events as ev
from rpcagent.runs.definition import Rule
from rpcagent.runs.outcomes import Failed
from rpcagent.runs.requests import ApproveCommand, CancelCommand, Command, ResumeCommand, StepCommand
from rpcagent.runs.view import recovery_plan

from .story import Story, assert_shows, definition, sid

ASK = definition(rules=(Rule(do="ask"),))


def ready(drive: Any = "manual") -> Story:
    return Story(drive=drive)


def held(drive: Any = "auto") -> Story:
    story = Story(drive=drive, recovery="confirm")
    story.restart(1)
    story.go()
    return story


def running(drive: Any = "auto") -> Story:
    story = Story(drive=drive)
    if drive == "manual":
        story.asked("s", StepCommand())
    return story


def waiting(drive: Any = "auto") -> Story:
    story = Story(ASK, drive=drive)
    if drive == "manual":
        story.asked("s", StepCommand())
    story.says(1, "t.pay")
    return story


def in_doubt(drive: Any = "auto") -> Story:
    story = Story(drive=drive)
    for key, ordinal in (("s", 1), ("s2", 0)):
        if drive == "manual":
            story.asked(key, StepCommand())
        if ordinal:
            story.says(1, "t.pay")
    story.restart(1)
    story.go()
    return story


def completed(drive: Any = "auto") -> Story:
    story = running(drive)
    story.says(1, text="end")
    return story


def cancelled(drive: Any = "auto") -> Story:
    story = ready(drive)
    story.asked("c", CancelCommand())
    for ordinal in story.doing():
        story.lost(ordinal)
    assert story.status == "cancelled"
    return story


Made = Callable[..., Story]
REFUSED: list[tuple[str, Command, Made, str, type[errors.RpcAgentError]]] = [
    ("step", StepCommand(), running, "auto", errors.InvalidState),
    ("step", StepCommand(), held, "auto", errors.InvalidState),
    ("step", StepCommand(), held, "manual", errors.InvalidState),
    ("step", StepCommand(), running, "manual", errors.RunBusy),
    ("step", StepCommand(), waiting, "auto", errors.InvalidState),
    ("step", StepCommand(), waiting, "manual", errors.ApprovalRequired),
    ("step", StepCommand(), in_doubt, "manual", errors.UnknownOutcome),
    ("step", StepCommand(), completed, "manual", errors.InvalidState),
    ("step", StepCommand(), cancelled, "manual", errors.InvalidState),
    ("resume", ResumeCommand(), completed, "auto", errors.InvalidState),
    ("resume", ResumeCommand(), cancelled, "auto", errors.InvalidState),
    ("cancel", CancelCommand(), completed, "auto", errors.InvalidState),
]
TAKEN: list[tuple[Command, Made, str, dict[str, Any]]] = [
    (ResumeCommand(), running, "auto", {"recovery": {"released": False}}),
    (ResumeCommand(), waiting, "auto", {"recovery": {"released": False}}),
    (ResumeCommand(), in_doubt, "auto", {"recovery": {"released": False}}),
    (CancelCommand(), running, "auto", {"cancel": {"already": False}}),
    (CancelCommand(), ready, "manual", {"cancel": {"already": False}}),
    (CancelCommand(), held, "auto", {"cancel": {"already": False}}),
    (CancelCommand(), waiting, "auto", {"cancel": {"already": False}}),
    (CancelCommand(), in_doubt, "auto", {"cancel": {"already": False}}),
    (CancelCommand(), cancelled, "auto", {"cancel": {"already": True}}),
]


@pytest.mark.parametrize(("name", "command", "made", "drive", "refusal"), REFUSED)
def test_what_the_state_does_not_allow_is_refused_and_never_recorded(
    name: str, command: Command, made: Made, drive: str, refusal: type[errors.RpcAgentError]
):
    story = made(drive)
    before = story.state
    with pytest.raises(refusal) as seen:
        story.ask("new", command)
    assert story.state == before
    permanent = before.ended or before.drive == "auto"
    assert seen.value.data["retryable"] == (not permanent)


@pytest.mark.parametrize(("command", "made", "drive", "decision"), TAKEN)
def test_what_the_state_allows_is_settled_in_the_commit_that_accepts_it(
    command: Command, made: Made, drive: str, decision: dict[str, Any]
):
    story = made(drive)
    receipt = story.ask("new", command)
    assert receipt.decision == decision
    assert story.decision("new") == decision


@pytest.mark.parametrize(
    ("made", "drive", "status"),
    [
        (ready, "manual", "ready"), (running, "auto", "running"), (running, "manual", "running"),
        (held, "auto", "ready"), (waiting, "auto", "waiting"), (waiting, "manual", "waiting"),
        (in_doubt, "auto", "waiting"), (in_doubt, "manual", "waiting"), (completed, "auto", "completed"),
        (cancelled, "auto", "cancelled"),
    ],
)  # fmt: skip
def test_the_status_of_a_run_says_who_must_act(made: Made, drive: str, status: str):
    assert made(drive).status == status


def test_a_question_of_an_ended_run_takes_no_answer():
    story = waiting()
    question = story.opened()[0]
    story.asked("c", CancelCommand())
    with pytest.raises(errors.InvalidState):
        story.ask("k", ApproveCommand(approval_id=question.approval_id, digest=question.digest, decision="allow"))


def test_a_decided_question_of_an_ended_run_answers_already():
    story = waiting()
    question = story.opened()[0]
    story.answer("deny")
    story.says(3, text="end")
    assert story.status == "completed"
    told = story.ask("k", ApproveCommand(approval_id=question.approval_id, digest=question.digest, decision="deny"))
    assert told.decision is not None
    assert told.decision["approval"]["already"] is True


@pytest.mark.parametrize("key", ["start-1", "s"])
@pytest.mark.parametrize(
    "command",
    [StepCommand(), ResumeCommand(), CancelCommand(), ApproveCommand(approval_id="a", digest="d", decision="x")],
)
def test_a_key_with_another_meaning_is_a_conflict_that_names_both_s4_53(key: str, command: Command):
    story = running("manual")
    before = story.state
    with pytest.raises(errors.IdempotencyConflict) as refusal:
        story.ask(key, command, fingerprint="another")
    known = before.requests[key]
    assert refusal.value.details == {
        "method": known.method,
        "fingerprints": [known.fingerprint, "another"],
        "sent": {StepCommand: "step", ResumeCommand: "resume", CancelCommand: "cancel"}.get(type(command), "approve"),
    }
    assert refusal.value.data["retryable"] is False
    assert story.state == before


def test_a_repeated_key_is_answered_from_the_record_over_restarts():
    story = waiting()
    first = story.answer("deny", key="k")
    question = next(iter(story.state.closed.values()))
    command = ApproveCommand(approval_id=question.approval_id, digest=question.digest, decision="deny")
    for _ in range(3):
        again = story.ask("k", command)
        assert (again.decision, again.replayed, again.events) == (first.decision, True, ())
        story.restart(1)
        story.go()


def test_a_twin_of_a_step_in_progress_joins_it():
    story = running("manual")
    twin = story.ask("s", StepCommand())
    assert (twin.decision, twin.replayed, twin.events) == (None, False, ())
    story.says(1, "t.read")
    again = story.ask("s", StepCommand())
    assert_shows(
        again.decision, {"stepId": sid(1), "kind": "model_call", "name": "default", "status": "completed", "attempt": 1}
    )
    assert again.replayed


def test_a_refused_key_may_be_sent_again_and_then_acts():
    story = waiting("manual")
    for _ in range(2):
        with pytest.raises(errors.ApprovalRequired) as refusal:
            story.ask("k", StepCommand())
    assert [a["approvalId"] for a in refusal.value.details["approvals"]] == [story.opened()[0].approval_id]
    story.answer("allow")
    story.asked("k", StepCommand())
    assert story.doing() == [2]


@pytest.mark.parametrize("end", ["cancel", "fail"])
def test_whatever_ends_the_run_settles_the_step_request_in_the_same_commit(end: str):
    story = running("manual")
    if end == "cancel":
        story.asked("c", CancelCommand())
        story.lost(1)
        assert_shows(
            story.decision("s"),
            {"stepId": sid(1), "kind": "model_call", "name": "default", "status": "withdrawn", "attempt": 1},
        )
    else:
        story.report(1, Failed(error=ev.Trouble(kind="model_gone", message="no such model")))
        assert story.status == "failed"
        assert story.decision("s")["step"]["status"] == "failed"
    assert story.state.step_request is None


def test_resume_goes_only_by_the_plan_that_was_shown_s0_25():
    story = Story(recovery="confirm")
    story.says(1, "t.read", "t.put", "t.close", "t.pay")
    story.done(2)
    story.restart(5)
    assert story.go() == []
    plan = recovery_plan(story.state)
    assert [s["action"] for s in plan["steps"]] == ["reuse", "reuse", "again", "start", "start"]
    with pytest.raises(errors.StaleDigest) as refusal:
        story.ask("r1", ResumeCommand(plan_digest="sha256:0"))
    assert refusal.value.details == {"digest": plan["planDigest"]}
    receipt = story.asked("r2", ResumeCommand(plan_digest=plan["planDigest"]))
    assert receipt.decision == {"recovery": {"released": True, **plan}}
    assert story.doing() == [3]


def test_a_plan_names_a_look_up_and_a_question_as_what_they_are_s0_31():
    story = Story(recovery="confirm")
    story.says(1, "t.close")
    story.restart(5)
    assert [s["action"] for s in recovery_plan(story.state)["steps"]] == ["reuse", "look_up"]
    other = Story(recovery="confirm")
    other.says(1, "t.pay")
    other.restart(5)
    assert [s["action"] for s in recovery_plan(other.state)["steps"]] == ["reuse", "ask"]


@pytest.mark.parametrize("recovery", ["confirm", "manual"])
def test_a_held_run_does_nothing_until_resume_whatever_is_answered_or_due_s0_24(recovery: Any):
    story = Story(definition(rules=(Rule(do="ask", effect="at_most_once"), Rule(do="allow"))), recovery=recovery)
    story.says(1, "t.close", "t.pay")
    story.not_done(2, after_ms=10_000)
    story.restart(1)
    story.answer("allow")
    assert story.later(86_400) == []
    assert (story.status, story.doing()) == ("ready", [])
    story.asked("r", ResumeCommand())
    assert story.doing() == [2]


def test_confirm_looks_up_and_does_not_act_manual_does_not_even_look_up_s0_25():
    confirm, manual = Story(recovery="confirm"), Story(recovery="manual")
    for story in (confirm, manual):
        story.says(1, "t.close")
        story.restart(1)
        story.go()
    assert (confirm.doing(), manual.doing()) == ([2], [])
    confirm.looked_up(2, "absent")
    assert confirm.doing() == []
    confirm.asked("r", ResumeCommand())
    assert confirm.step(2).attempt == 2


def test_an_unfinished_step_key_waits_for_resume_too():
    story = Story(drive="manual", recovery="confirm")
    story.asked("s", StepCommand())
    story.restart(1)
    assert story.go() == []
    assert story.ask("s", StepCommand()).decision is None
    story.asked("r", ResumeCommand())
    assert story.doing() == [1]
    story.says(1, text="end")
    assert story.decision("s")["step"]["status"] == "completed"
