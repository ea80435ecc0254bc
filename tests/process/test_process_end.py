"""How the process ends, and what the next one finds. S0-02, S0-73, F011, F077, P2."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.process.outside import Seen, act, agent, seen, step_of
from tests.process.wire_driver import ROOT, WAIT_S, Daemon
from tests.service.driver import CountingService

pytestmark = pytest.mark.process

CLIENT = """
import json, sys
from pathlib import Path
from tests.process.wire_driver import Daemon
store, requests = Path(sys.argv[1]), json.loads(sys.argv[2])
daemon = Daemon(store)
for params in requests:
    daemon.call("start", **params)
print(daemon.pid, flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CountingService]:
    with CountingService(tmp_path_factory.mktemp("service") / "truth") as service:
        yield service
        service.clear()
        service.release()


def manual_step_in_flight(daemon: Daemon, service: CountingService, operation: str) -> tuple[str, int]:
    """A run whose `step` is parked at the service after its effect: the run, and the id of the request."""
    described = agent(service, "at_most_once", operation)
    run_id: str = daemon.call("start", clientRequestId="run", agent=described, input="", drive="manual")["runId"]
    daemon.call("step", runId=run_id, clientRequestId="model")
    service.park("after_effect")
    ident = daemon.send("step", runId=run_id, clientRequestId="act", waitMs=600_000)
    service.wait_parked(20)
    return run_id, ident


def terminate(daemon: Daemon) -> None:
    daemon.signal(signal.SIGTERM)


def test_an_end_of_input_in_the_middle_of_a_recovery_is_an_ordinary_end(tmp_path: Path):
    store = tmp_path / "store"
    described = {"model": {"script": [{"calls": [{"tool": "files.list"}]}] * 30 + [{"text": "done"}]}}
    with Daemon(store) as daemon:
        for number in range(8):
            daemon.call("start", clientRequestId=f"run-{number}", agent=described, input="")
        daemon.kill()
    interrupted = []
    for _ in range(3):
        with Daemon(store) as daemon:
            hello = daemon.send("initialize", protocolVersion=1)
            daemon.end_input()
            interrupted.append(daemon.result(hello)["recovery"]["interruptedRuns"])
            assert (daemon.exit_code(), daemon.log.read_text()) == (0, "")
    assert interrupted[1:] == [0, 0]  # each end let what it had begun come to its record


@pytest.mark.parametrize("end", [terminate, Daemon.end_input], ids=["SIGTERM", "end of input"])
def test_an_outcome_that_comes_within_the_grace_time_is_recorded_s0_73_f077(
    service: CountingService, tmp_path: Path, end: Callable[[Daemon], None], request: pytest.FixtureRequest
):
    operation = request.node.name
    with Daemon(tmp_path / "store") as daemon:
        run_id, ident = manual_step_in_flight(daemon, service, operation)
        end(daemon)
        answer = daemon.result(ident)  # the caller is told at once how far it is
        assert (answer["step"]["status"], answer["request"]["state"]) == ("started", "in_progress")
        service.release()
        assert daemon.exit_code() == 0
    with Daemon(tmp_path / "store") as daemon:
        assert daemon.listen()["recovery"] == {"interruptedRuns": 0, "damagedRuns": [], "droppedTailBytes": 0}
        answer = daemon.call("step", runId=run_id, clientRequestId="act")
        assert (answer["step"]["status"], answer["replayed"]) == ("completed", True)
    assert seen(service, operation) == Seen(1, 1)


def test_an_outcome_that_comes_too_late_for_the_grace_time_is_in_doubt_and_not_cancelled_s0_73_f077(
    service: CountingService, tmp_path: Path
):
    with Daemon(tmp_path / "store") as daemon:
        run_id, ident = manual_step_in_flight(daemon, service, "too late")
        daemon.call("shutdown", graceMs=0)
        assert daemon.result(ident)["request"]["state"] == "in_progress"
        assert daemon.exit_code() == 0
    service.release()
    with Daemon(tmp_path / "store") as daemon:
        assert daemon.listen()["recovery"]["interruptedRuns"] == 1
        answer = daemon.call("step", runId=run_id, clientRequestId="act")
        assert (answer["step"]["status"], answer["run"]["status"]) == ("unknown", "waiting")
    assert seen(service, "too late") == Seen(1, 1)


def test_after_a_signal_no_request_is_taken_in(service: CountingService, tmp_path: Path):
    late = {"agent": {"model": {"script": [{"text": "done"}]}}, "input": ""}
    with Daemon(tmp_path / "store") as daemon:
        _, ident = manual_step_in_flight(daemon, service, "too late to ask")
        terminate(daemon)
        daemon.result(ident)  # it is on its way out, and waits for the tool
        daemon.write(b"".join(daemon.request("start", clientRequestId=f"late-{n}", **late)[1] for n in range(100)))
        service.release()
        assert (daemon.exit_code(), daemon.rest()) == (0, b"")
    with Daemon(tmp_path / "store") as daemon:
        assert [run["clientRequestId"] for run in daemon.call("list")["runs"]] == ["run"]


def test_after_a_signal_nothing_begins_while_answers_still_wait_for_the_peer(service: CountingService, tmp_path: Path):
    large = {"agent": {"model": {"script": [{"text": "done"}]}}, "input": "x" * 6_000_000}
    script = [act("unread"), act("unread"), {"text": "done"}]
    with Daemon(tmp_path / "store", stderr=subprocess.PIPE) as daemon:
        heavy = daemon.call("start", clientRequestId="heavy", **large, waitMs=20_000)["runId"]
        service.park("after_effect")
        params = {"agent": agent(service, "at_most_once", "unread", script=script), "input": ""}
        daemon.send("start", clientRequestId="run", **params, waitMs=600_000)
        service.wait_parked(20)
        daemon.send("events", runId=heavy, limit=1)  # more than it may hold: the other answer waits behind it
        assert select.select([daemon.process.stdout], [], [], WAIT_S)[0]
        terminate(daemon)
        assert daemon.process.stderr is not None
        with daemon.process.stderr as log:
            assert json.loads(log.readline())["event"] == "stopping"
            service.release()
            assert daemon.exit_code() == 0
    assert seen(service, "unread") == Seen(1, 1)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_an_idle_daemon_at_once_and_in_order(tmp_path: Path, number: signal.Signals):
    with Daemon(tmp_path / "store") as daemon:
        daemon.call("status")
        daemon.signal(number)
        assert (daemon.exit_code(timeout=5), daemon.rest()) == (0, b"")
        assert [json.loads(line)["event"] for line in daemon.log.read_text().splitlines()] == ["stopping"]


def test_a_second_signal_ends_it_at_once(service: CountingService, tmp_path: Path):
    with Daemon(tmp_path / "store") as daemon:
        run_id, ident = manual_step_in_flight(daemon, service, "second signal")
        terminate(daemon)
        daemon.result(ident)  # it is on its way out, and waits for the tool
        terminate(daemon)
        assert daemon.exit_code(timeout=4) == 128 + signal.SIGTERM
    service.release()
    with Daemon(tmp_path / "store") as daemon:
        assert step_of(daemon.call("status", runId=run_id))["status"] == "unknown"


def test_a_peer_that_stops_reading_for_good_loses_answers_and_no_work_f011(service: CountingService, tmp_path: Path):
    with Daemon(tmp_path / "store") as daemon:
        service.park("after_effect")
        described = agent(service, "at_most_once", "deaf")
        daemon.call("start", clientRequestId="before", agent=described, input="")
        service.wait_parked(20)
        assert daemon.process.stdout is not None
        daemon.process.stdout.close()
        later = agent(service, "at_most_once", "deaf later")
        assert daemon.process.stdin is not None
        daemon.process.stdin.write(daemon.request("status")[1])
        daemon.process.stdin.write(daemon.request("start", clientRequestId="after", agent=later, input="")[1])
        service.park("after_effect")
        service.wait_parked(20, count=2)  # the second run came so far without a reader
        service.release()
        daemon.end_input()
        assert daemon.exit_code() == 0
        assert daemon.log.read_text() == ""
    with Daemon(tmp_path / "store") as daemon:
        daemon.listen()
        for key in ("before", "after"):
            run_id = daemon.call("status", clientRequestId=key)["run"]["runId"]
            shown = daemon.until(run_id, lambda shown: shown["run"]["status"] == "completed")
            assert step_of(shown)["attempt"] == 1
    assert (seen(service, "deaf"), seen(service, "deaf later")) == (Seen(1, 1), Seen(1, 1))


@pytest.mark.parametrize("busy_with", ["nothing", "an approval", "a tool"])
def test_a_client_that_is_killed_leaves_no_daemon_behind_f011(service: CountingService, tmp_path: Path, busy_with: str):
    starts: list[dict[str, Any]] = []
    rules = [{"do": "ask" if busy_with == "an approval" else "allow", "tool": "*"}]
    if busy_with != "nothing":
        described = agent(service, "at_most_once", f"orphan of {busy_with}", rules=rules)
        starts.append({"clientRequestId": "run", "agent": described, "input": "", "waitMs": 0})
    if busy_with == "a tool":
        service.park("after_effect")
    command = [sys.executable, "-c", CLIENT, str(tmp_path / "store"), json.dumps(starts)]
    client = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert client.stdout is not None
        watched = os.pidfd_open(int(client.stdout.readline()))
        if busy_with == "a tool":
            service.wait_parked(20)
    finally:
        client.kill()
        client.communicate(timeout=WAIT_S)

    ended, _, _ = select.select([watched], [], [], WAIT_S)

    os.close(watched)
    assert ended
    with Daemon(tmp_path / "store", "--lock-wait", "0") as daemon:
        assert daemon.call("status")["status"] == "ok"
        if busy_with != "nothing":
            shown = daemon.call("status", clientRequestId="run")
            expected = "waiting_approval" if busy_with == "an approval" else "unknown"
            assert step_of(shown)["status"] == expected
            assert shown["approvals"][0]["status"] == "open"
    service.release()
