"""A request whose answer was lost is sent again with its key. P2, P5; F031, F079, S4-53."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.process.outside import Seen, agent, seen, step_of
from tests.process.wire_driver import Daemon, refused
from tests.service.driver import CountingService

pytestmark = pytest.mark.process

TALKER: dict[str, Any] = {"model": {"script": [{"text": "done"}]}}
TIMES = 50
RECOVERABLE = 30


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CountingService]:
    with CountingService(tmp_path_factory.mktemp("service") / "truth") as service:
        yield service


def test_a_start_whose_answer_was_lost_is_found_again_by_its_key_f091(service: CountingService, tmp_path: Path):
    store = tmp_path / "store"
    params = {"clientRequestId": "lost", "agent": agent(service, "at_most_once", "lost start"), "input": "go"}
    with Daemon(store) as daemon:
        daemon.send("start", **params)
        daemon.throw_away(lines=1)
        daemon.kill()
    with Daemon(store) as daemon:
        found = daemon.call("status", clientRequestId="lost")
        assert found["request"] == {"method": "start", "state": "settled", "result": {"runId": found["run"]["runId"]}}
        again = daemon.call("start", **params)
        assert (again["runId"], again["replayed"]) == (found["run"]["runId"], True)
        longer = daemon.call("start", **params, waitMs=20)
        assert (longer["runId"], longer["replayed"]) == (again["runId"], True)
        spelled_out = daemon.call("start", **params, drive="auto", labels={}, namespace="")
        assert spelled_out["runId"] == again["runId"]  # a member equal to its default is no other request
        with refused("IDEMPOTENCY_CONFLICT") as caught:
            daemon.call("start", **{**params, "input": "go elsewhere"})
        assert (caught[0].data["method"], len(set(caught[0].data["fingerprints"]))) == ("start", 2)
        assert len(daemon.call("list")["runs"]) == 1
        elsewhere = daemon.call("start", **params, namespace="another")
        assert elsewhere["runId"] != again["runId"]


def test_twins_of_a_start_in_one_write_are_one_run(tmp_path: Path):
    with Daemon(tmp_path / "store") as daemon:
        requests = [
            daemon.request("start", clientRequestId="twin", agent=TALKER, input="", waitMs=n) for n in (0, 20_000)
        ]
        daemon.write(b"".join(line for _, line in requests))
        first, second = (daemon.result(ident) for ident, _ in requests)
        assert first["runId"] == second["runId"]
        assert (first["replayed"], second["replayed"]) == (False, True)
        assert second["run"]["status"] == "completed"
        assert [run["runId"] for run in daemon.call("list")["runs"]] == [first["runId"]]


def test_a_step_whose_wait_ran_out_is_joined_by_its_key_and_by_a_twin(service: CountingService, tmp_path: Path):
    with Daemon(tmp_path / "store") as daemon:
        described = agent(service, "at_most_once", "joined")
        run_id = daemon.call("start", clientRequestId="run", agent=described, input="", drive="manual")["runId"]
        daemon.call("step", runId=run_id, clientRequestId="model")
        service.park("after_effect")
        short = daemon.call("step", runId=run_id, clientRequestId="act", waitMs=1)
        assert (short["step"]["status"], short["replayed"]) == ("started", False)
        assert short["request"] == {"method": "step", "state": "in_progress"}
        with refused("RUN_BUSY"):
            daemon.call("step", runId=run_id, clientRequestId="another")
        twins = [daemon.request("step", runId=run_id, clientRequestId="act", waitMs=n) for n in (20_000, 30_000)]
        daemon.write(b"".join(line for _, line in twins))
        service.wait_parked(20)
        service.release()
        first, second = (daemon.result(ident) for ident, _ in twins)
        assert first["step"] == second["step"]
        assert first["step"]["status"] == "completed"
        settled = daemon.call("status", runId=run_id, clientRequestId="act")["request"]
        assert settled == {"method": "step", "state": "settled", "result": {"step": first["step"]}}
        assert daemon.call("step", runId=run_id, clientRequestId="act", waitMs=0)["replayed"] is True
    assert seen(service, "joined") == Seen(1, 1)


def test_an_accepted_step_is_brought_to_its_end_after_kill_9_without_being_asked_again(
    service: CountingService, tmp_path: Path
):
    with Daemon(tmp_path / "store") as daemon:
        described = agent(service, "idempotent", "accepted")
        run_id = daemon.call("start", clientRequestId="run", agent=described, input="", drive="manual")["runId"]
        daemon.call("step", runId=run_id, clientRequestId="model")
        service.park("after_effect")
        daemon.send("step", runId=run_id, clientRequestId="act")
        service.wait_parked(20)
        daemon.kill()
    service.release()
    with Daemon(tmp_path / "store") as daemon:
        daemon.listen()
        shown = daemon.until(run_id, lambda shown: step_of(shown)["status"] == "completed")
        assert (step_of(shown)["attempt"], shown["run"]["status"]) == (2, "ready")
        request = daemon.call("status", runId=run_id, clientRequestId="act")["request"]
        answer = daemon.call("step", runId=run_id, clientRequestId="act")
        assert (request["state"], request["result"]) == ("settled", {"step": answer["step"]})
        assert answer["replayed"] is True
    assert seen(service, "accepted") == Seen(2, 1)


@pytest.mark.parametrize("method", ["start", "step", "resume", "approve", "cancel"])
def test_one_key_with_two_meanings_is_a_conflict_for_every_method_s4_53_f087(
    service: CountingService, tmp_path: Path, method: str
):
    with Daemon(tmp_path / "store") as daemon:
        described = agent(service, "at_most_once", f"meaning of {method}", rules=())
        started = {"clientRequestId": "key", "agent": described, "input": "one server", "drive": "manual"}
        run_id = daemon.call("start", **started)["runId"]
        daemon.call("step", runId=run_id, clientRequestId="model")
        [question] = daemon.call("status", runId=run_id)["approvals"]
        named = {"runId": run_id, "approvalId": question["approvalId"], "digest": question["digest"]}
        requests: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
            "start": (started, {"input": "ten servers"}),
            "step": ({"runId": run_id, "clientRequestId": "model"}, {}),
            "resume": ({"runId": run_id, "clientRequestId": "key-2"}, {"planDigest": "sha256:0"}),
            "approve": ({**named, "clientRequestId": "key-2", "decision": "deny"}, {"comment": "no"}),
            "cancel": ({"runId": run_id, "clientRequestId": "key-2"}, {"reason": "another"}),
        }
        params, other = requests[method]
        decision = daemon.call(method, **params)
        with refused("IDEMPOTENCY_CONFLICT") as caught:
            if other:
                daemon.call(method, **{**params, **other})
            else:  # a step has no other meaning but that of another method
                daemon.call("cancel", **params)
        assert caught[0].data["retryable"] is False
        assert len(set(caught[0].data["fingerprints"])) == 2
        same = daemon.call(method, **params)
        changing = {"run", "replayed"}
        assert {k: v for k, v in same.items() if k not in changing} == {
            k: v for k, v in decision.items() if k not in changing
        }
    assert seen(service, f"meaning of {method}") == Seen(0, 0, 0)


def test_an_acknowledged_start_is_there_after_kill_9_each_of_50_times_f031(tmp_path: Path):
    store = tmp_path / "store"
    runs: list[str] = []
    for number in range(TIMES):
        with Daemon(store) as daemon:
            if runs:
                found = daemon.call("status", runId=runs[-1])
                assert found["run"]["runId"] == runs[-1]
            params = {"clientRequestId": f"run-{number}", "agent": TALKER, "input": "", "drive": "manual"}
            runs.append(daemon.call("start", **params)["runId"])
            daemon.kill()
    with Daemon(store) as daemon:
        assert [run["runId"] for run in daemon.call("list")["runs"]] == runs
        assert daemon.call("step", runId=runs[-1], clientRequestId="model")["step"]["status"] == "completed"
        assert daemon.call("status")["epoch"] == TIMES + 1


@pytest.mark.parametrize("drive", ["manual", "auto"])
def test_requests_that_come_before_the_daemon_is_ready_meet_recovered_runs_f079(
    service: CountingService, tmp_path: Path, drive: str
):
    """Each run is killed with its effect applied; then `step` (or `status`) for each is on stdin before the process runs."""
    store = tmp_path / "store"
    operations = [f"early {drive} {number}" for number in range(RECOVERABLE)]
    runs = {}
    with Daemon(store) as daemon:
        for operation in operations:
            params = {"clientRequestId": operation.replace(" ", "-"), "input": "", "drive": drive}
            described = agent(service, "idempotent", operation)
            runs[operation] = daemon.call("start", agent=described, **params)["runId"]
            if drive == "manual":
                daemon.call("step", runId=runs[operation], clientRequestId="model")
                service.park("after_effect")
                daemon.send("step", runId=runs[operation], clientRequestId="act")
        if drive == "manual":
            service.wait_parked(20, count=RECOVERABLE)
        daemon.kill()
    service.release()
    service.clear()
    with Daemon(store) as daemon:
        method = "step" if drive == "manual" else "status"
        more = {"clientRequestId": "act"} if drive == "manual" else {}
        requests = [daemon.request(method, runId=run_id, **more) for run_id in runs.values()]
        daemon.write(b"".join(line for _, line in requests))
        for ident, _ in requests:
            answer = daemon.result(ident)
            if drive == "manual":
                assert (answer["step"]["status"], answer["step"]["attempt"]) == ("completed", 2)
            else:
                assert answer["run"]["status"] in {"running", "completed"}
        daemon.listen()
        for run_id in runs.values():
            daemon.until(run_id, lambda shown: step_of(shown)["status"] == "completed")
    assert {seen(service, operation).effects for operation in operations} == {1}
    if drive == "manual":
        assert {seen(service, operation).calls for operation in operations} == {2}
