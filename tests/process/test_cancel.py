"""Cancelling what may have happened already: never a plain `cancelled` for an effect that nobody can tell about. F069, F077."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.process.outside import Seen, agent, seen, step_of
from tests.process.wire_driver import Daemon
from tests.service.driver import CountingService

pytestmark = pytest.mark.process


def in_mid_effect(daemon: Daemon, service: CountingService, operation: str) -> str:
    service.park("after_effect")
    described = agent(service, "at_most_once", operation)
    run_id: str = daemon.call("start", clientRequestId="run", agent=described, input="")["runId"]
    service.wait_parked(20)
    return run_id


def is_cancelled(shown: dict[str, Any]) -> bool:
    return bool(shown["run"]["status"] == "cancelled")


def test_an_outcome_that_comes_within_the_grace_time_is_recorded_in_the_cancelled_run_f077(
    service: CountingService, tmp_path: Path
):
    with Daemon(tmp_path / "store") as daemon:
        daemon.listen()
        run_id = in_mid_effect(daemon, service, "in time")
        answer = daemon.call("cancel", runId=run_id, clientRequestId="stop", reason="changed my mind")
        assert (answer["run"]["cancelling"], answer["run"]["status"]) == (True, "running")
        service.release()
        shown = daemon.until(run_id, is_cancelled)
        assert step_of(shown)["status"] == "completed"
        assert "unresolved" not in shown["run"]
        assert daemon.call("cancel", runId=run_id, clientRequestId="again")["cancel"] == {"already": True}
        daemon.kill()
    with Daemon(tmp_path / "store") as daemon:
        assert step_of(daemon.call("status", runId=run_id))["status"] == "completed"
        again = daemon.call("cancel", runId=run_id, clientRequestId="stop", reason="changed my mind")
        assert (again["cancel"], again["replayed"]) == ({"already": False}, True)
    assert seen(service, "in time") == Seen(1, 1)


@pytest.mark.parametrize("decision", ["happened", "did_not_happen", "abandon"])
def test_a_run_that_is_killed_while_it_is_being_cancelled_ends_cancelled_with_its_doubt_in_view_f077(
    service: CountingService, tmp_path: Path, decision: str
):
    operation = f"doubt {decision}"
    with Daemon(tmp_path / "store") as daemon:
        run_id = in_mid_effect(daemon, service, operation)
        daemon.call("cancel", runId=run_id, clientRequestId="stop")
        daemon.kill()
    service.release()
    with Daemon(tmp_path / "store") as daemon:
        daemon.listen()
        shown = daemon.until(run_id, is_cancelled)
        step = step_of(shown)
        assert (step["status"], shown["run"]["unresolved"]) == ("unknown", [step["stepId"]])
        [question] = shown["approvals"]
        assert [line["kind"] for line in daemon.call("status")["needsAttention"]] == ["unknown_outcome"]
        named = {"runId": run_id, "approvalId": question["approvalId"], "digest": question["digest"]}
        daemon.call("approve", clientRequestId="evidence", decision=decision, **named)
        daemon.kill()
    with Daemon(tmp_path / "store") as daemon:
        shown = daemon.call("status", runId=run_id)
        expected = {"happened": "completed", "did_not_happen": "withdrawn", "abandon": "unknown"}[decision]
        assert (shown["run"]["status"], step_of(shown)["status"]) == ("cancelled", expected)
        assert shown["run"].get("unresolved") == ([step["stepId"]] if decision == "abandon" else None)
        assert (shown["approvals"], daemon.call("status")["needsAttention"]) == ([], [])
    assert seen(service, operation) == Seen(1, 1)  # whatever was said, a cancelled run does nothing more
