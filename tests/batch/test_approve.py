"""Answering: by `approve`, `resume` and `cancel`, and at the terminal. Nothing is ever answered by accident."""

from __future__ import annotations

from typing import Any

import pytest
from tests.batch.stage import NAME, RUN, Stage, decided, may_write, page, question, run, shown, started

WRITE = {"type": "approval_requested", **{n: v for n, v in may_write().items() if n not in {"runId", "status"}}}
SPENT = question("budget", {"limit": "steps", "value": 5, "spent": {"steps": 5}}, ["extend", "stop"])
LOST = question(
    "unknown_outcome",
    {"tool": "bank.pay", "effect": "at_most_once", "arguments": {"cents": 1}, "key": "key_1"},
    ["happened", "did_not_happen", "abandon"],
)
TROUBLE = question(
    "retry", {"step": "default", "attempt": 4, "error": {"kind": "http_401", "message": "No."}}, ["retry", "stop"]
)
LATER = question("workspace_drift", {"head": "abc"}, ["accept", "look_again"])


def test_approve_shows_and_sends_the_digest_and_goes_on_until_the_end(stage: Stage) -> None:
    answers = [shown("waiting", may_write()), decided("allow"), shown("completed", output="Done.")]
    played = stage.play("approve", RUN, "1", "allow", "--comment", "fine", answers=answers)
    assert (played.code, played.out) == (0, "Done.\n")
    assert "digest     sha256:d1\n" in played.err
    (sent,) = stage.sent("approve")
    assert (sent["approvalId"], sent["digest"], sent["decision"]) == (f"apr_{NAME}_1", "sha256:d1", "allow")
    assert sent["comment"] == "fine"


def test_approve_of_another_digest_than_the_one_insisted_on_sends_nothing(stage: Stage) -> None:
    played = stage.play("approve", RUN, "1", "allow", "--digest", "sha256:no", answers=[shown("waiting", may_write())])
    assert (played.code, stage.sent("approve")) == (2, [])
    assert f"STALE_DIGEST: the question apr_{NAME}_1 has the digest sha256:d1" in played.err


def test_the_same_answer_twice_arrives_at_the_question_that_is_closed(stage: Stage) -> None:
    answers = [
        shown("completed", lastSeq=1),
        shown("completed", lastSeq=1),
        page(WRITE),
        decided("allow", already=True),
        shown("completed", lastSeq=1, output="Done."),
        page(WRITE),
    ]
    played = stage.play("approve", RUN, f"apr_{NAME}_1", "allow", answers=answers)
    assert (played.code, played.out) == (0, "Done.\n")
    assert "was decided so before" in played.err


def test_no_wait_ends_with_the_answer(stage: Stage) -> None:
    answers = [shown("waiting", may_write()), decided("allow"), shown("running")]
    played = stage.play("approve", RUN, "1", "allow", "--no-wait", "--json", answers=answers)
    assert played.code == 0
    assert played.objects()[-1]["summary"]["run"]["status"] == "running"


def test_a_question_that_is_not_there_is_told_with_those_that_are(stage: Stage) -> None:
    played = stage.play("approve", RUN, "7", "allow", answers=[shown("waiting", may_write(3)), shown("waiting")])
    assert played.code == 2
    assert "has no question '7'\n  open are: 3\n" in played.err


def test_extend_says_how_much(stage: Stage) -> None:
    played = stage.play("approve", RUN, "1", "extend", answers=[shown("waiting", SPENT)])
    assert (played.code, stage.sent("approve")) == (2, [])
    assert "say it with --steps N\n" in played.err


def test_extend_and_result_are_sent_as_they_are_given(stage: Stage) -> None:
    answers = [shown("waiting", SPENT), decided("extend"), shown("running")]
    stage.play("approve", RUN, "1", "extend", "--steps", "5", "--cost-usd", "0.5", "--no-wait", answers=answers)
    assert stage.sent("approve")[0]["extend"] == {"steps": 5, "costUsd": 0.5}


def test_resume_without_a_plan_takes_the_one_that_it_shows(stage: Stage) -> None:
    plan = {"steps": [{"stepId": "s", "name": "bank.pay", "action": "look_up"}], "planDigest": "sha256:p"}
    resumed = {"result": {"recovery": {"released": True}, "run": run("running"), "replayed": False}}
    answers = [shown("ready", resumeRequired=True, recoveryPlan=plan), resumed, shown("completed")]
    played = stage.play("resume", RUN, answers=answers)
    assert played.code == 0
    assert "  look up   bank.pay\n  digest sha256:p\n" in played.err
    assert stage.sent("resume")[0]["planDigest"] == "sha256:p"


def test_cancel_waits_for_the_end_and_tells_what_is_not_known(stage: Stage) -> None:
    cancelled = {"result": {"cancel": {"already": False}, "run": run("running"), "replayed": False}}
    answers = [shown("running"), cancelled, shown("running"), shown("cancelled", unresolved=["stp_1"])]
    played = stage.play("cancel", RUN, "--reason", "enough", answers=answers)
    assert played.code == 0
    assert f"unknown    stp_1; rpcagent show {RUN} tells more\n" in played.err
    assert stage.sent("cancel")[0]["reason"] == "enough"


# At the terminal


@pytest.mark.parametrize(
    ("asked", "typed", "sent"),
    [
        (may_write(), "y\n", {"decision": "allow"}),
        (may_write(), "allow\n", {"decision": "allow"}),
        (may_write(), "n\n\n", {"decision": "deny"}),
        (may_write(), "n\nnot today\n", {"decision": "deny", "comment": "not today"}),
        (may_write(), "n not today\n", {"decision": "deny", "comment": "not today"}),
        (may_write(), "\nyes\nx\nd\ny\n", {"decision": "allow"}),
        (LOST, "h\n\n", {"decision": "happened"}),
        (LOST, "h\nref 7\n", {"decision": "happened", "result": "ref 7"}),
        (LOST, "n\n", {"decision": "did_not_happen"}),
        (LOST, "a\n", {"decision": "abandon"}),
        (SPENT, "e\n10\n", {"decision": "extend", "extend": {"steps": 10}}),
        (SPENT, "e 10\n", {"decision": "extend", "extend": {"steps": 10}}),
        (SPENT, "e none\ne -1\ne 1.5\ne inf\ns\n", {"decision": "stop"}),
        (TROUBLE, "r\n", {"decision": "retry"}),
        (LATER, "look_again\n", {"decision": "look_again"}),
    ],
)
def test_what_is_typed_is_the_answer_that_is_sent(
    stage: Stage, asked: dict[str, Any], typed: str, sent: dict[str, Any]
) -> None:
    answers = [started(), shown("waiting", asked), decided("any"), shown("completed")]
    assert stage.play("run", "x", answers=answers, typed=typed).code == 0
    (approved,) = stage.sent("approve")
    ours = {name: approved[name] for name in ("decision", "result", "extend", "comment") if name in approved}
    assert (ours, approved["digest"]) == (sent, "sha256:d1")


@pytest.mark.parametrize("typed", ["q\n", "", "\n\n", "n\n", "yes\n"])
def test_what_is_no_answer_leaves_the_question_open(stage: Stage, typed: str) -> None:
    played = stage.play("run", "x", answers=[started(), shown("waiting", may_write())], typed=typed)
    assert (played.code, stage.sent("approve")) == (3, [])
    assert f"Question 1 stays open. To answer it later:\n  rpcagent approve {RUN} 1 allow\n" in played.err


def test_no_input_asks_nothing_at_a_terminal(stage: Stage) -> None:
    answers = [started(), shown("waiting", may_write())]
    played = stage.play("run", "x", "--no-input", answers=answers, typed="y\n")
    assert (played.code, stage.sent("approve")) == (3, [])


def test_a_question_that_was_overtaken_is_no_fault(stage: Stage) -> None:
    late = {"error": {"code": -32056, "message": "It expired.", "data": {"code": "INVALID_STATE", "retryable": False}}}
    answers = [started(), shown("waiting", may_write()), late, shown("completed", output="Done.")]
    played = stage.play("run", "x", answers=answers, typed="y\n")
    assert (played.code, played.out) == (0, "Done.\n")
    assert "overtaken  INVALID_STATE: It expired.\n" in played.err


def test_a_held_run_is_let_go_only_by_a_plain_yes(stage: Stage) -> None:
    plan = {"steps": [], "planDigest": "sha256:p"}
    held = shown("ready", resumeRequired=True, recoveryPlan=plan)
    assert stage.play("run", "x", answers=[started(), held], typed="\nn\n").code == 3
    assert stage.sent("resume") == []
