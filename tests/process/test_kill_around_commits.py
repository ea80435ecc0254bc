"""SIGKILL just before, and just after, the commit of each kind of event in a run's life; the client sends all of it again.
P2-P6; S1-33, S4-49, F031, F063."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.process.outside import Seen, agent, seen, step_of
from tests.process.wire_driver import Daemon
from tests.service.driver import CountingService

pytestmark = pytest.mark.process

BEFORE_THE_ANSWER = ("run_started", "model_call_started", "model_answered", "approval_requested")
AFTER_THE_ANSWER = ("approval_decided", "tool_started", "tool_completed", "run_completed")
ONCE_EACH = ("run_started", "approval_requested", "approval_decided", "run_completed")


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CountingService]:
    with CountingService(tmp_path_factory.mktemp("service") / "truth") as service:
        yield service


def waits_or_is_over(shown: dict[str, Any]) -> bool:
    return bool(shown["approvals"]) or shown["run"]["status"] == "completed"


def events_of(daemon: Daemon, run_id: str) -> list[dict[str, Any]]:
    page = daemon.call("events", runId=run_id, limit=1_000)["events"]
    assert [element["seq"] for element in page] == list(range(1, len(page) + 1))
    return [element["event"] for element in page]


def allow(daemon: Daemon, run_id: str) -> dict[str, Any]:
    """The same request, before and after the kill."""
    [asked] = [event for event in events_of(daemon, run_id) if event["type"] == "approval_requested"]
    named = {"runId": run_id, "approvalId": asked["approvalId"], "digest": asked["digest"]}
    return {"clientRequestId": "yes", "decision": "allow", **named}


@pytest.mark.parametrize("kind", [*BEFORE_THE_ANSWER, *AFTER_THE_ANSWER])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_kill_around_any_commit_changes_nothing_but_who_does_the_rest_s4_49(
    service: CountingService, tmp_path: Path, when: str, kind: str
):
    operation = f"{when} {kind}"
    described = agent(service, "reconcilable", operation, rules=())
    start = {"clientRequestId": "run", "agent": described, "input": ""}
    with Daemon(tmp_path / "store", rig=("--pause", f"{when}_append:{kind}")) as daemon:
        daemon.listen()
        started = daemon.send("start", **start)
        if kind in AFTER_THE_ANSWER:
            run_id = daemon.result(started)["runId"]
            daemon.until(run_id, waits_or_is_over)
            daemon.send("approve", **allow(daemon, run_id))
        daemon.reports(1)
        daemon.kill()

    with Daemon(tmp_path / "store") as daemon:
        daemon.listen()
        answer = daemon.call("start", **start)
        # The first model call begins in the commit of the start.
        assert answer["replayed"] is not (when == "before" and kind in {"run_started", "model_call_started"})
        run_id = answer["runId"]
        shown = daemon.until(run_id, waits_or_is_over)
        open_still = kind in BEFORE_THE_ANSWER or (when == "before" and kind in {"approval_decided", "tool_started"})
        assert bool(shown["approvals"]) is open_still
        approved = daemon.call("approve", **allow(daemon, run_id))
        assert (approved["approval"]["already"], approved["replayed"]) == (False, not open_still)
        shown = daemon.until(run_id, lambda shown: shown["run"]["status"] == "completed")
        assert (shown["run"]["output"], step_of(shown)["status"]) == ("done", "completed")
        counted = Counter(event["type"] for event in events_of(daemon, run_id))
        assert {name: counted[name] for name in ONCE_EACH} == dict.fromkeys(ONCE_EACH, 1)
        assert counted["model_answered"] == 2  # an accepted answer is never asked for again
        assert counted["tool_completed"] + counted["looked_up"] >= 1
    assert seen(service, operation) == Seen(1, 1)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_kill_in_the_middle_of_a_recovery_is_recovered_from_too(service: CountingService, tmp_path: Path, when: str):
    operation = f"{when} the open pass"
    with Daemon(tmp_path / "store") as daemon:
        service.park("after_effect")
        described = agent(service, "at_most_once", operation)
        run_id = daemon.call("start", clientRequestId="run", agent=described, input="")["runId"]
        service.wait_parked(20)
        daemon.kill()
    service.release()
    times = 2 if when == "before" else 1  # once it is recorded, there is nothing to do for the next one
    for _ in range(times):
        with Daemon(tmp_path / "store", rig=("--pause", f"{when}_append:run_reopened")) as daemon:
            daemon.reports(1)
            daemon.kill()
    with Daemon(tmp_path / "store") as daemon:
        shown = daemon.call("status", runId=run_id)
        assert step_of(shown)["status"] == "unknown"
        assert [question["kind"] for question in shown["approvals"]] == ["unknown_outcome"]
        counted = Counter(event["type"] for event in events_of(daemon, run_id))
        assert (counted["run_reopened"], counted["step_unknown"], counted["approval_requested"]) == (1, 1, 1)
    assert seen(service, operation) == Seen(1, 1)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("kind", ["cancel_requested", "run_released"])
def test_a_kill_around_a_decision_about_the_run_leaves_it_taken_or_not_and_the_key_as_good_s4_49(
    service: CountingService, tmp_path: Path, when: str, kind: str
):
    operation = f"{when} {kind}"
    with Daemon(tmp_path / "store") as daemon:
        described = agent(service, "at_most_once", operation)
        params = {"agent": described, "input": "", "drive": "manual", "recovery": "manual"}
        run_id = daemon.call("start", clientRequestId="run", **params)["runId"]
        daemon.kill()
    method = "cancel" if kind == "cancel_requested" else "resume"
    request = {"runId": run_id, "clientRequestId": "it"}
    with Daemon(tmp_path / "store", rig=("--pause", f"{when}_append:{kind}")) as daemon:
        daemon.send(method, **request)
        daemon.reports(1)
        daemon.kill()
    with Daemon(tmp_path / "store") as daemon:
        known = daemon.call("status", runId=run_id, clientRequestId="it")["request"]
        assert known["state"] == ("unknown" if when == "before" else "settled")
        answer = daemon.call(method, **request)
        assert answer["replayed"] is (when == "after")
        if method == "cancel":
            assert (answer["cancel"]["already"], answer["run"]["status"]) == (False, "cancelled")
        else:
            # A release is for one opening of the store: after the next kill it has to be given again.
            assert answer["recovery"]["released"] is True
            assert answer["run"]["resumeRequired"] is (when == "after")
    assert seen(service, operation) == Seen(0, 0, 0)
