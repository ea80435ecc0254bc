"""`rpcagent run` to each kind of rest: what is said where, and the exit code. The daemon's part is played."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.batch.stage import (
    ANSWERED,
    COMPLETED,
    RUN,
    STARTED,
    Stage,
    decided,
    elements,
    may_write,
    page,
    question,
    shown,
    started,
)

CALL = {
    "type": "model_answered",
    "stepId": "stp_1",
    "attempt": 1,
    "text": "I look.",
    "calls": [{"stepId": "stp_2", "tool": "files.list", "arguments": {"path": "."}}],
    "usage": {},
}
TOOL = {"type": "tool_started", "stepId": "stp_2", "attempt": 1, "requestHash": "sha256:0", "key": "key_1"}
RESULT = {
    "type": "tool_completed",
    "stepId": "stp_2",
    "attempt": 1,
    "result": {"content": [{"type": "text", "text": "a\nb"}]},
}
LAST = ANSWERED | {"stepId": "stp_3"}
STORY = (STARTED, CALL, TOOL, RESULT, LAST, COMPLETED)


def test_a_completed_run_leaves_its_output_alone_on_standard_output(stage: Stage) -> None:
    played = stage.play(
        "run",
        "Write it.",
        "--key",
        "k",
        "--store",
        "/s",
        answers=[started(), shown("completed", output="Done.", lastSeq=6), page(*STORY)],
    )
    assert (played.code, played.out) == (0, "Done.\n")
    assert played.err == (
        "key        k   (go on at any time: rpcagent run --key k --store /s)\n"
        f"run        {RUN}   in /w\n"
        "model      I look.\n"
        "call       files.list path=.\n"
        "result     files.list: a (+1 lines)\n"
        "completed\n"
    )


def test_events_that_come_by_themselves_are_shown_once_and_gaps_are_filled(stage: Stage) -> None:
    live = [{"jsonrpc": "2.0", "method": "run/event", "params": one} for one in elements(*STORY)]
    answers = [
        started() | {"before": live[:2]},
        shown("running", lastSeq=3) | {"before": live[2:3]},
        shown("completed", output="Done.", lastSeq=6) | {"before": live[5:]},
        page(*STORY),
    ]
    played = stage.play("run", "Write it.", "--key", "k", answers=answers)
    assert played.code == 0
    assert [line.split()[0] for line in played.err.splitlines()] == [
        "key",
        "run",
        "model",
        "call",
        "result",
        "completed",
    ]


def test_with_json_every_line_is_an_event_and_the_last_one_the_summary(stage: Stage) -> None:
    answers = [started(), shown("completed", output="Done.", lastSeq=6), page(*STORY)]
    played = stage.play("run", "Write it.", "--key", "k", "--json", answers=answers)
    *events, last = played.objects()
    assert (played.code, played.err) == (0, "")
    assert events == elements(*STORY)
    assert last["summary"]["run"]["output"] == "Done."
    assert (last["summary"]["exitCode"], last["summary"]["next"]) == (0, [])


@pytest.mark.parametrize("status", ["failed", "cancelled"])
def test_a_run_that_failed_or_was_cancelled_is_exit_code_1(stage: Stage, status: str) -> None:
    event = {"type": "run_failed", "error": {"kind": "budget", "message": "A person answered stop."}}
    played = stage.play("run", "x", answers=[started(), shown(status, lastSeq=2), page(STARTED, event)])
    assert (played.code, played.out) == (1, "")
    assert "failed     the run: budget: A person answered stop.\n" in played.err


def test_a_question_without_a_terminal_is_shown_in_full_with_its_commands_and_exit_code_3(stage: Stage) -> None:
    answers = [started(), shown("waiting", may_write())]
    played = stage.play("run", "x", "--key", "k", "--workspace", "/", answers=answers)
    assert (played.code, played.out) == (3, "")
    assert played.err.partition("\n\n")[2] == (
        "Question 1: may this tool call run?\n"
        "  tool       files.write\n"
        "  effect     idempotent: after a crash it is sent again with the same key, which makes one effect\n"
        "  path       a\n"
        "  content    5 bytes; a new file\n"
        "    +hello\n"
        "  workspace  /none\n"
        f"  rpcagent approve {RUN} 1 allow --workspace /\n"
        "      it runs once, exactly as shown\n"
        f"  rpcagent approve {RUN} 1 deny --workspace /\n"
        "      it does not run; the model is told, and the run goes on\n"
        "\n"
        "waits      for a person; the question stays, over any restart\n"
    )


def test_json_asks_nothing_and_its_summary_has_the_questions_and_the_commands(stage: Stage) -> None:
    played = stage.play("run", "x", "--json", answers=[started(), shown("waiting", may_write())])
    summary = played.objects()[-1]["summary"]
    assert (played.code, summary["exitCode"]) == (3, 3)
    assert [one["digest"] for one in summary["approvals"]] == ["sha256:d1"]
    assert summary["next"] == [f"rpcagent approve {RUN} 1 allow", f"rpcagent approve {RUN} 1 deny"]


def test_yes_to_allows_what_matches_and_says_so_and_nothing_else(stage: Stage) -> None:
    answers = [
        started(),
        shown("waiting", may_write(1, "mail.send"), may_write(2), lastSeq=0),
        decided("allow"),
        shown("waiting", may_write(1, "mail.send")),
    ]
    played = stage.play("run", "x", "--yes-to", "files.*", answers=answers)
    (approved,) = stage.sent("approve")
    assert played.code == 3
    assert (approved["approvalId"][-2:], approved["decision"], approved["digest"]) == ("_2", "allow", "sha256:d1")
    assert approved["comment"] == "--yes-to files.*"


def test_yes_to_never_answers_whether_something_happened(stage: Stage) -> None:
    subject = {"tool": "files.write", "effect": "at_most_once", "arguments": {}}
    unknown = question("unknown_outcome", subject, ["happened", "did_not_happen", "abandon"])
    played = stage.play("run", "x", "--yes-to", "*", answers=[started(), shown("waiting", unknown)])
    assert (played.code, stage.sent("approve")) == (3, [])
    assert f"rpcagent approve {RUN} 1 did_not_happen\n" in played.err


def test_a_wait_for_the_clock_that_is_too_long_is_exit_code_4(stage: Stage) -> None:
    answers = [started(), shown("waiting", retryAt="2999-01-01T00:00:00Z")]
    played = stage.play("run", "x", "--key", "k", answers=answers)
    assert played.code == 4
    assert "waits      until 2999-01-01 00:00:00Z (in " in played.err
    assert "go on with rpcagent run --key k\n" in played.err


def test_a_time_limit_leaves_the_run_as_it_is_with_exit_code_4(stage: Stage) -> None:
    played = stage.play("run", "x", "--key", "k", "--timeout", "0", answers=[started(), shown("running")])
    assert played.code == 4
    assert "time is up the run is running, and safe\n" in played.err


def test_a_run_that_a_restart_holds_is_exit_code_3_with_the_plan(stage: Stage) -> None:
    plan = {"steps": [{"stepId": "stp_2", "name": "bank.pay", "action": "look_up"}], "planDigest": "sha256:p"}
    answers = [started(), shown("ready", resumeRequired=True, recoveryPlan=plan)]
    played = stage.play("run", "x", answers=answers)
    assert played.code == 3
    assert f"  look up   bank.pay\n  rpcagent resume {RUN} --plan sha256:p\n" in played.err


def test_a_key_without_a_goal_goes_on_with_its_run_and_shows_what_is_recent(stage: Stage) -> None:
    many = [{"type": "cancel_requested", "reason": f"r{n}"} for n in range(59)]
    answers = [shown("completed", lastSeq=60), shown("completed", lastSeq=60, output="Done."), page(*many, COMPLETED)]
    played = stage.play("run", "--key", "k", answers=answers)
    assert (played.code, played.out) == (0, "Done.\n")
    assert f"           40 earlier events: rpcagent tail {RUN}\n" in played.err
    assert [line.split()[1] for line in played.err.splitlines() if line.startswith("cancel ")] == [
        f"r{n}" for n in range(40, 59)
    ]


def test_the_workspace_is_part_of_what_a_key_stands_for(stage: Stage, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    stage.play("run", "x", "--workspace", str(tmp_path / "link"), answers=[started(), shown("completed")])
    assert stage.sent("start")[0]["workspace"] == str((tmp_path / "real").resolve())


def test_a_key_that_stands_for_another_goal_is_told_with_the_run_and_both_ways_out(stage: Stage) -> None:
    conflict = {
        "error": {"code": -32050, "message": "no", "data": {"code": "IDEMPOTENCY_CONFLICT", "retryable": False}}
    }
    played = stage.play("run", "y", "--key", "k", answers=[conflict, shown("completed")])
    assert played.code == 2
    assert f"the key k stands for the run {RUN} (Write it.)" in played.err
    assert "to go on with that run: rpcagent run --key k; for a new one give another --key\n" in played.err


def test_each_run_without_a_key_gets_one_of_its_own(stage: Stage) -> None:
    stage.play("run", "x", answers=[started(), shown("completed")])
    (first,) = stage.sent("start")
    assert first["clientRequestId"].startswith("cli-")
    assert len(first["clientRequestId"]) == len("cli-") + 12


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("run",), "there is no goal"),
        (("run", "x", "--key", "a b"), "'a b' is no key"),
        (("run", "x", "--agent", "@/nowhere.json"), "/nowhere.json cannot be read: No such file or directory"),
        (("run", "x", "--agent", f"@{__file__}"), "test_run.py is no JSON (line 1, column 3)"),
    ],
)
def test_a_mistake_is_told_before_anything_is_started(stage: Stage, words: tuple[str, ...], message: str) -> None:
    played = stage.play(*words, answers=[])
    assert played.code == 2
    assert message in played.err
    assert stage.fake.starts() == 0
