"""A question survives the process, and is answered once. P6; F063, F065, F069, S4-70..75."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.process.outside import Seen, agent, seen, step_of
from tests.process.wire_driver import Daemon, refused
from tests.service.driver import CountingService

pytestmark = pytest.mark.process

RACES = 200
WINDOW = 25


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CountingService]:
    with CountingService(tmp_path_factory.mktemp("service") / "truth") as service:
        yield service


def pending(daemon: Daemon, service: CountingService, operation: str, **more: Any) -> dict[str, Any]:
    """A run that waits for the approval of one charge: its status."""
    described = agent(service, "at_most_once", operation, rules=more.pop("rules", ()))
    key = operation.replace(" ", "-")
    started = daemon.call("start", clientRequestId=key, agent=described, input="", waitMs=20_000, **more)
    return daemon.call("status", runId=started["runId"])


def answer_to(question: dict[str, Any], decision: str, key: str) -> dict[str, Any]:
    named = {name: question[name] for name in ("runId", "approvalId", "digest")}
    return {**named, "decision": decision, "clientRequestId": key}


def test_an_approval_survives_kill_9_and_is_answered_by_the_very_first_frame_f063(
    service: CountingService, tmp_path: Path
):
    store = tmp_path / "store"
    with Daemon(store) as daemon:
        before = pending(daemon, service, "first frame")
        [question] = before["approvals"]
        assert (before["run"]["status"], question["kind"], question["choices"]) == (
            "waiting",
            "tool_call",
            ["allow", "deny"],
        )
        assert question["subject"]["arguments"] == {"operation": "first frame"}
        daemon.kill()
    allow = answer_to(question, "allow", "yes")
    with Daemon(store) as daemon:
        first = daemon.call("approve", **allow)
        decision = {"approvalId": question["approvalId"], "kind": "tool_call", "decision": "allow", "already": False}
        assert (first["approval"], first["replayed"]) == (decision, False)
        daemon.listen()
        shown = daemon.until(question["runId"], lambda shown: shown["run"]["status"] == "completed")
        assert (step_of(shown)["status"], step_of(shown)["approvalId"]) == ("completed", question["approvalId"])
        daemon.kill()
    with Daemon(store) as daemon:
        again = daemon.call("approve", **allow)
        assert (again["approval"], again["replayed"]) == (decision, True)
        another_key = daemon.call("approve", **{**allow, "clientRequestId": "another-device"})
        assert (another_key["approval"], another_key["replayed"]) == ({**decision, "already": True}, False)
        with refused("ALREADY_DECIDED") as caught:
            daemon.call("approve", **answer_to(question, "deny", "no"))
        assert caught[0].data["decision"] == "allow"
        with refused("IDEMPOTENCY_CONFLICT"):
            daemon.call("approve", **answer_to(question, "deny", "yes"))
        with refused("STALE_DIGEST"):
            daemon.call("approve", **{**allow, "clientRequestId": "blind", "digest": "sha256:" + "0" * 64})
    assert seen(service, "first frame") == Seen(1, 1)


def test_a_restart_asks_the_same_question_and_no_second_one_s4_70_s4_75(service: CountingService, tmp_path: Path):
    store = tmp_path / "store"
    with Daemon(store) as daemon:
        before = pending(daemon, service, "same question")
        daemon.kill()
    for _ in range(2):
        with Daemon(store) as daemon:
            after = daemon.call("status", runId=before["run"]["runId"])
            assert after["approvals"] == before["approvals"]
            assert after["run"] == before["run"]
            page = daemon.call("events", runId=before["run"]["runId"])["events"]
            assert [one["event"]["type"] for one in page].count("approval_requested") == 1
            daemon.kill()
    assert seen(service, "same question") == Seen(0, 0, 0)


def test_in_manual_drive_an_allow_executes_nothing_and_the_next_step_does_f063(
    service: CountingService, tmp_path: Path
):
    store = tmp_path / "store"
    with Daemon(store) as daemon:
        run_id = pending(daemon, service, "manual allow", drive="manual")["run"]["runId"]
        answer = daemon.call("step", runId=run_id, clientRequestId="model")
        assert (answer["step"]["kind"], answer["run"]["status"]) == ("model_call", "waiting")
        [question] = daemon.call("status", runId=run_id)["approvals"]
        daemon.kill()
    with Daemon(store) as daemon:
        with refused("APPROVAL_REQUIRED"):
            daemon.call("step", runId=run_id, clientRequestId="act")
        assert daemon.call("approve", **answer_to(question, "allow", "yes"))["run"]["status"] == "ready"
        daemon.kill()
    assert seen(service, "manual allow") == Seen(0, 0, 0)
    with Daemon(store) as daemon:
        step = daemon.call("step", runId=run_id, clientRequestId="act")["step"]
        assert (step["status"], step["approvalId"]) == ("completed", question["approvalId"])
    assert seen(service, "manual allow") == Seen(1, 1)


def test_of_two_racing_deciders_exactly_one_wins_each_of_200_times_f065_s4_72(service: CountingService, tmp_path: Path):
    store = tmp_path / "store"
    winners: dict[str, str] = {}
    with Daemon(store) as daemon:
        for first in range(0, RACES, WINDOW):
            winners |= race(daemon, service, range(first, first + WINDOW))
        assert len(winners) == RACES
        assert set(winners.values()) == {"allow", "deny"}
        daemon.listen()
        for run_id in winners:
            daemon.until(run_id, lambda shown: shown["run"]["status"] == "completed")
        daemon.kill()
    with Daemon(store) as daemon:
        assert daemon.call("status")["counts"] == {"completed": RACES}
        for number, (run_id, decision) in enumerate(winners.items()):
            shown = daemon.call("status", runId=run_id)
            assert step_of(shown)["status"] == ("completed" if decision == "allow" else "denied")
            assert seen(service, f"race {number}") == (Seen(1, 1) if decision == "allow" else Seen(0, 0, 0))
            [decided] = [
                one["event"]["decision"]
                for one in daemon.call("events", runId=run_id)["events"]
                if one["event"]["type"] == "approval_decided"
            ]
            assert decided == decision


def race(daemon: Daemon, service: CountingService, numbers: range) -> dict[str, str]:
    """Allow and deny in one write for each run, of all runs of the window together; who won, by run. Every third pair
    comes as a batch, every second one the other way round."""
    questions = [pending(daemon, service, f"race {number}")["approvals"][0] for number in numbers]
    data, sent = b"", {}
    for number, question in zip(numbers, questions, strict=True):
        decisions = ["allow", "deny"] if number % 2 else ["deny", "allow"]
        pair = {word: daemon.request("approve", **answer_to(question, word, f"{word}-it")) for word in decisions}
        sent[question["runId"]] = {word: ident for word, (ident, _) in pair.items()}
        lines = [line for _, line in pair.values()]
        batch = json.dumps([json.loads(line) for line in lines]).encode() + b"\n"
        data += batch if number % 3 == 0 else b"".join(lines)
    daemon.write(data)
    won = {}
    for run_id, idents in sent.items():
        answers = {word: daemon.answer(ident) for word, ident in idents.items()}
        [winner] = [word for word, answer in answers.items() if "result" in answer]
        [refusal] = [answer["error"]["data"] for answer in answers.values() if "error" in answer]
        assert (refusal["code"], refusal["decision"]) == ("ALREADY_DECIDED", winner)
        won[run_id] = winner
    return won


def test_a_cancelled_run_withdraws_its_question_and_a_late_answer_runs_nothing_f069(
    service: CountingService, tmp_path: Path
):
    with Daemon(tmp_path / "store") as daemon:
        [question] = pending(daemon, service, "cancelled")["approvals"]
        cancelled = daemon.call("cancel", runId=question["runId"], clientRequestId="stop")
        assert cancelled["run"]["status"] == "cancelled"
        with refused("INVALID_STATE") as caught:
            daemon.call("approve", **answer_to(question, "allow", "late"))
        assert caught[0].data["approval"] == "withdrawn"
        daemon.kill()
    with Daemon(tmp_path / "store") as daemon:
        with refused("INVALID_STATE"):
            daemon.call("approve", **answer_to(question, "allow", "later"))
        assert daemon.call("status")["needsAttention"] == []
        assert daemon.call("cancel", runId=question["runId"], clientRequestId="stop")["replayed"] is True
    assert seen(service, "cancelled") == Seen(0, 0, 0)


def test_silence_is_no_consent_an_expired_question_runs_nothing_after_a_restart_either_f069_s4_74(
    service: CountingService, tmp_path: Path
):
    rules = [{"do": "ask", "tool": "*", "expires": "1ms"}]
    with Daemon(tmp_path / "store") as daemon:
        described = agent(service, "at_most_once", "expired", rules=rules)
        run_id = daemon.call("start", clientRequestId="run", agent=described, input="", waitMs=20_000)["runId"]
        daemon.kill()
    with Daemon(tmp_path / "store") as daemon:
        shown = daemon.call("status", runId=run_id)  # the first answer of this process
        assert (step_of(shown)["status"], step_of(shown)["error"]["kind"]) == ("denied", "expired")
        assert shown["approvals"] == []
        daemon.listen()
        assert daemon.until(run_id, lambda shown: shown["run"]["status"] == "completed")["run"]["output"] == "done"
        page = daemon.call("events", runId=run_id)["events"]
        [asked] = [one["event"] for one in page if one["event"]["type"] == "approval_requested"]
        with refused("INVALID_STATE"):
            daemon.call("approve", **answer_to({**asked, "runId": run_id}, "allow", "late"))
    assert seen(service, "expired") == Seen(0, 0, 0)
