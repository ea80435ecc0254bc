"""`runs`, `show` and `tail`: what a person sees, in fixed width, and what a program gets."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from rpcagent.batch.session import short_ids
from tests.batch.stage import ANSWERED, AT, COMPLETED, NAME, RUN, STARTED, Stage, elements, may_write, page, run, shown

OTHER = "run_abcdefgzzzzzzzzzzzzzzzzzzz"


@pytest.fixture(autouse=True)
def _at_half_past(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rpcagent.batch.look.now", lambda: datetime(2031, 4, 1, 12, 30, tzinfo=UTC))


def _listed(*runs: dict[str, Any], cursor: str | None = None) -> dict[str, Any]:
    return {"result": {"runs": list(runs)} | ({} if cursor is None else {"nextCursor": cursor})}


def test_runs_are_listed_newest_first_over_all_pages(stage: Stage) -> None:
    waits = shown("waiting", may_write())
    answers = [
        _listed(run("waiting"), cursor="c1"),
        _listed(run("completed", runId=OTHER, agent="fixer")),
        shown("completed"),
        waits,
    ]
    played = stage.play("runs", answers=answers)
    assert played.code == 0
    assert played.out == (
        "run           status     agent   steps  age  waits for              goal\n"
        "run_abcdefgz  completed  fixer   3      30m                         Write it.\n"
        "run_abcdefgh  waiting    writer  3      30m  tool_call files.write  Write it.\n"
    )
    assert [params.get("cursor") for params in stage.sent("list")] == [None, "c1"]


def test_runs_that_have_ended_are_cut_to_the_newest_and_said_to_be(stage: Stage) -> None:
    ids = [f"run_{letter * 26}" for letter in "abcdefghijklmnopqrstuvwxyz"]
    every = [run("waiting" if place == 0 else "completed", runId=ident) for place, ident in enumerate(ids)]
    played = stage.play("runs", answers=[_listed(*every), *[shown("completed")] * 20])
    listed = [line.split()[0] for line in played.out.splitlines()[1:]]
    assert listed == [ident[:10] for ident in [*ids[:6:-1], ids[0]]]
    assert "6 more that have ended: --all\n" in played.err


def test_runs_as_json_are_the_runs_of_the_protocol_one_a_line(stage: Stage) -> None:
    played = stage.play(
        "runs", "--json", "--status", "failed", answers=[_listed(run("failed"), run("ready", runId=OTHER))]
    )
    assert played.objects() == [run("failed")]


def test_no_runs_are_said_to_be_none(stage: Stage) -> None:
    played = stage.play("runs", answers=[_listed()])
    assert (played.code, played.out, played.err) == (0, "", "no runs\n")


def test_show_tells_everything_with_the_exact_commands(stage: Stage) -> None:
    steps = [
        {"stepId": "stp_x_1", "kind": "model_call", "name": "default", "status": "completed", "attempt": 1},
        {
            "stepId": "stp_x_2",
            "kind": "tool_call",
            "name": "files.write",
            "status": "waiting_approval",
            "attempt": 0,
            "effect": "idempotent",
            "arguments": {"path": "a"},
            "approvalId": f"apr_{NAME}_1",
        },
    ]
    played = stage.play("show", RUN, "--store", "/s p", answers=[shown("waiting", may_write(), steps=steps)])
    assert played.code == 0
    assert played.out == (
        f"run        {RUN}\n"
        "goal       Write it.\n"
        "status     waiting\n"
        "agent      writer, drive auto, recovery auto\n"
        "key        k\n"
        "workspace  /w\n"
        "started    2031-04-01 12:00:00Z\n"
        "last event 0 at 2031-04-01 12:00:00Z\n"
        "budget     steps 3 of 500, attempts 4, activeS 0.25\n"
        "definition sha256:00\n"
        "\n"
        "step  name         status            attempt  effect      what came of it\n"
        "1     the model    completed         1\n"
        "2     files.write  waiting approval  0        idempotent  question 1; path=a\n"
        "\n"
        "Question 1: may this tool call run?\n"
        "  tool       files.write\n"
        "  effect     idempotent: after a crash it is sent again with the same key, which makes one effect\n"
        "  path       a\n"
        "  content    5 bytes; a new file\n"
        "    +hello\n"
        "  workspace  /none\n"
        f"  rpcagent approve {RUN} 1 allow --store '/s p'\n"
        "      it runs once, exactly as shown\n"
        f"  rpcagent approve {RUN} 1 deny --store '/s p'\n"
        "      it does not run; the model is told, and the run goes on\n"
    )


def test_show_tells_plan_trouble_and_output(stage: Stage) -> None:
    plan = {"steps": [], "planDigest": "sha256:p"}
    members = {
        "resumeRequired": True,
        "recoveryPlan": plan,
        "retryAt": "2031-04-01T12:40:00Z",
        "error": {"kind": "k", "message": "m\x1b"},
        "output": "one\ntwo\x07\n",
    }
    played = stage.play("show", RUN, answers=[shown("ready", **members)])
    assert "status     ready, held\n" in played.out
    assert "waits      until 2031-04-01 12:40:00Z (in 10m)\n" in played.out
    assert "error      k: m\\x1b\n" in played.out
    assert (
        f"  nothing was in progress: the model is asked next\n  rpcagent resume {RUN} --plan sha256:p\n" in played.out
    )
    assert played.out.endswith("\noutput:\none\ntwo\\x07\n")


def test_show_warns_of_limits_and_of_an_agent_that_is_another_one_now_r_te_3(stage: Stage) -> None:
    answer = shown("running")
    answer["result"]["budget"]["near"] = ["steps", "tokens"]
    answer["result"]["definition"] |= {"current": "sha256:01", "differs": True}
    played = stage.play("show", RUN, answers=[answer])
    assert "budget     steps 3 of 500, attempts 4, activeS 0.25; near its limit: steps, tokens\n" in played.out
    assert "definition sha256:00; the agent is configured otherwise now, and this run keeps its own\n" in played.out


def test_show_as_json_is_the_status_of_the_protocol(stage: Stage) -> None:
    answer = shown("waiting", may_write())
    played = stage.play("show", RUN, "--json", answers=[answer])
    assert played.objects() == [answer["result"]]


def test_tail_shows_every_event_after_the_one_that_is_named(stage: Stage) -> None:
    settled = {"type": "request_settled", "clientRequestId": "k", "method": "start"}
    later = {"type": "of_a_later_version", "what": 1}
    answers = [shown("completed", lastSeq=5), page(STARTED, settled, ANSWERED, later, COMPLETED)]
    played = stage.play("tail", RUN, "--after", "1", answers=answers)
    assert played.out == (
        "    2  12:00:00  request    start k\n"
        "    3  12:00:00  model      Done.\n"
        '    4  12:00:00  of_a_later_version {"what": 1}\n'
        "    5  12:00:00  completed\n"
    )


def test_tail_f_stays_until_the_run_has_ended_and_json_gives_the_events(stage: Stage) -> None:
    events = elements(STARTED, ANSWERED, COMPLETED)
    live = [{"jsonrpc": "2.0", "method": "run/event", "params": one} for one in events]
    answers = [
        shown("running", lastSeq=1) | {"before": live[:1]},
        shown("waiting", may_write(), lastSeq=2) | {"before": live[1:2]},
        shown("completed", lastSeq=3) | {"before": live[2:]},
    ]
    played = stage.play("tail", RUN, "-f", "--json", answers=answers)
    assert (played.code, played.objects()) == (0, events)


@pytest.mark.parametrize("name", ["abcdefgz", "run_abcdefgz", "the-key"])
def test_a_run_is_meant_by_the_beginning_of_its_id_or_by_its_key(stage: Stage, name: str) -> None:
    runs = [run("completed"), run("completed", runId=OTHER, clientRequestId="the-key")]
    assert stage.play("show", name, answers=[_listed(*runs), shown("completed")]).code == 0
    assert stage.sent("status")[1:] == [{"runId": OTHER}]


@pytest.mark.parametrize("name", ["abcdef", "run_"])
def test_a_beginning_that_is_not_of_one_run_is_refused(stage: Stage, name: str) -> None:
    played = stage.play("show", name, answers=[_listed(run("completed"), run("completed", runId=OTHER))])
    assert played.code == 2
    assert ("may be any of 2 runs" in played.err) == (name == "abcdef")


def test_short_ids_are_long_enough_to_be_told_apart() -> None:
    assert short_ids([RUN, OTHER]) == {RUN: "run_abcdefgh", OTHER: "run_abcdefgz"}
    assert short_ids([RUN]) == {RUN: "run_abcdef"}


def test_a_run_that_is_damaged_is_shown_as_far_as_it_is_known(stage: Stage) -> None:
    damaged = {"result": {"run": {"runId": RUN, "status": "damaged", "damaged": "unknown event"}}}
    played = stage.play("show", RUN, answers=[damaged])
    assert (played.code, played.out) == (0, f"run        {RUN}\nstatus     damaged\ndamaged    unknown event\n")
    assert AT not in played.out
