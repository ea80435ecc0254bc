"""Callers that are late, gone, elsewhere on the earth, or on a command line: each gets an answer of its own, and nobody else
has to wait for it. P6, P10; S1-28, F101, F105, F109, F113.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.process.calls import question_of, start
from tests.process.nursery import Nursery
from tests.process.outside import agent, seen, step_of
from tests.process.wire_driver import WAIT_S, Daemon, Refused, refused
from tests.service.driver import CountingService

pytestmark = pytest.mark.process

SLOW_STEPS = 300
ASK_FOR_AN_HOUR = ({"effect": "at_most_once", "do": "ask", "expires": "1h"},)


# Questions


def test_each_way_in_which_an_answer_comes_too_late_or_to_the_wrong_place_has_its_own_reason_f109(
    service: CountingService, nursery: Nursery, tmp_path: Path
):
    def asks(daemon: Daemon, key: str, **more: Any) -> dict[str, Any]:
        described = agent(service, "at_most_once", f"late {key}", rules=ASK_FOR_AN_HOUR)
        return question_of(daemon, start(daemon, key, agent=described, **more))

    def said_of(daemon: Daemon, asked: dict[str, Any], decision: str) -> dict[str, Any]:
        with refused_somehow() as caught:
            daemon.call("approve", clientRequestId="late", decision=decision, **asked)
        data = caught[0].data
        shown = {"code", "approval", "decision", "status", "runId", "source", "clientRequestId", "storeId"}
        return {name: data[name] for name in data if name in shown}

    wall, rig = tmp_path / "wall", ("--wall-clock", str(tmp_path / "wall"))
    wall.write_text("0")
    with nursery.daemon(tmp_path / "other", rig=rig) as daemon:
        elsewhere = asks(daemon, "elsewhere")
    with nursery.daemon(tmp_path / "store", rig=rig) as daemon:
        names = ("allowed", "denied", "expired", "cancelled")
        asked = {name: asks(daemon, name) for name in names}
        daemon.listen()
        for name, decision in (("allowed", "allow"), ("denied", "deny")):
            daemon.call("approve", clientRequestId="first", decision=decision, decidedBy="ada", **asked[name])
            daemon.until(asked[name]["runId"], lambda shown: shown["run"]["status"] == "completed")
        daemon.call("cancel", clientRequestId="stop", runId=asked["cancelled"]["runId"])
        daemon.kill()
    wall.write_text(str(2 * 3_600))
    with nursery.daemon(tmp_path / "store", rig=rig) as daemon:
        ended = {"status": "completed"}
        person = {"source": "person", "clientRequestId": "first"}
        this_store = {"storeId": daemon.call("status")["storeId"]}
        stop = {"source": "cancel", "clientRequestId": "stop"}
        never = asked["allowed"] | {"approvalId": asked["allowed"]["approvalId"].rpartition("_")[0] + "_9"}
        assert {
            "already allowed": said_of(daemon, asked["allowed"], "deny"),
            "already denied": said_of(daemon, asked["denied"], "allow"),
            "expired": said_of(daemon, asked["expired"], "allow"),
            "cancelled": said_of(daemon, asked["cancelled"], "allow"),
            "another digest": said_of(daemon, asked["allowed"] | {"digest": asked["denied"]["digest"]}, "allow"),
            "never asked": said_of(daemon, never, "allow"),
            "another store": said_of(daemon, elsewhere, "allow"),
        } == {
            "already allowed": {"code": "ALREADY_DECIDED", "decision": "allow"} | person,
            "already denied": {"code": "ALREADY_DECIDED", "decision": "deny"} | person,
            "expired": {"code": "INVALID_STATE", "approval": "expired", "source": "expiry"} | ended,
            "cancelled": {"code": "INVALID_STATE", "approval": "withdrawn", "status": "cancelled"} | stop,
            "another digest": {"code": "STALE_DIGEST"},
            "never asked": {"code": "NOT_FOUND", "runId": never["runId"]},
            "another store": {"code": "NOT_FOUND", "runId": elsewhere["runId"]} | this_store,
        }
        with refused("ALREADY_DECIDED") as caught:
            daemon.call("approve", clientRequestId="late", decision="deny", **asked["allowed"])
        events = daemon.call("events", runId=asked["allowed"]["runId"], limit=1_000)["events"]
        [decided] = [one for one in events if one["event"]["type"] == "approval_decided"]
        assert caught[0].data["decidedAt"] == decided["at"]
        assert caught[0].data["decidedBy"] == decided["event"]["decidedBy"] == "ada"
        same = daemon.call("approve", clientRequestId="again", decision="allow", **asked["allowed"])["approval"]
        assert (same["decision"], same["already"]) == ("allow", True)
    assert [seen(service, f"late {name}").effects for name in names] == [1, 0, 0, 0]


@contextmanager
def refused_somehow() -> Iterator[list[Refused]]:
    caught: list[Refused] = []
    try:
        yield caught
    except Refused as refusal:
        caught.append(refusal)
    assert caught, "it was taken"


@pytest.mark.parametrize(
    ("decision", "kinds", "becomes", "effects"),
    [
        ("happened", ["model_call"], "completed", 1),
        ("did_not_happen", ["tool_call", "model_call"], "completed", 2),
        ("abandon", ["model_call"], "unknown", 1),
    ],
)
def test_a_person_gets_a_run_out_of_an_unknown_outcome_in_each_way_and_no_other_run_waits_for_it_f113(
    service: CountingService,
    nursery: Nursery,
    tmp_path: Path,
    decision: str,
    kinds: list[str],
    becomes: str,
    effects: int,
):
    operation = f"settled as {decision}"
    with nursery.daemon(tmp_path / "store") as daemon:
        run_id = start(daemon, "run", agent=agent(service, "at_most_once", operation), drive="manual")
        daemon.call("step", runId=run_id, clientRequestId="model")
        service.park("after_effect")
        daemon.send("step", runId=run_id, clientRequestId="act")
        service.wait_parked(20)
        daemon.kill()
    service.release()
    with nursery.daemon(tmp_path / "store") as daemon:
        with refused("UNKNOWN_OUTCOME"):
            daemon.call("step", runId=run_id, clientRequestId="more")
        other = start(daemon, "other", agent=agent(service, "at_most_once", f"beside {operation}"))
        assert daemon.call("status", runId=other)["run"]["status"] == "completed"
        asked = question_of(daemon, run_id)
        first = daemon.call("approve", clientRequestId="person", decision=decision, **asked)["approval"]
        daemon.kill()
    with nursery.daemon(tmp_path / "store") as daemon:
        again = daemon.call("approve", clientRequestId="person", decision=decision, **asked)
        assert (again["approval"], again["replayed"]) == (first, True)
        steps = [daemon.call("step", runId=run_id, clientRequestId=f"more-{n}")["step"] for n in range(len(kinds))]
        assert [step["kind"] for step in steps] == kinds
        shown = daemon.call("status", runId=run_id)
        assert (step_of(shown)["status"], shown["run"]["output"]) == (becomes, "done")
    assert seen(service, operation).effects == effects


# Time and resources


def test_instants_are_the_same_in_every_zone_and_marked_as_utc_f105(
    service: CountingService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Written around the hour that New York has twice, read in Shanghai."""
    wall, rig = tmp_path / "wall", ("--wall-clock", str(tmp_path / "wall"))
    twice = datetime(2026, 11, 1, 5, 59, 50, tzinfo=UTC)
    wall.write_text(str((twice - datetime.now(UTC)).total_seconds()))
    monkeypatch.setenv("TZ", "America/New_York")
    described = agent(service, "at_most_once", "zones", rules=ASK_FOR_AN_HOUR)
    retried = {"model": {"script": [{"fail": {"kind": "busy", "retryAfterMs": 3_600_000}}]}}
    with Daemon(tmp_path / "store", rig=rig) as daemon:
        runs = [start(daemon, "asks", agent=described), start(daemon, "retries", agent=retried)]
        before = [daemon.call("status", runId=run) for run in runs]
        daemon.kill()
    monkeypatch.setenv("TZ", "Asia/Shanghai")
    with Daemon(tmp_path / "store", rig=rig) as daemon:
        assert [daemon.call("status", runId=run) for run in runs] == before
        daemon.kill()
    [question] = before[0]["approvals"]
    expires, retries = (datetime.fromisoformat(one) for one in (question["expiresAt"], before[1]["run"]["retryAt"]))
    for instant in (expires, retries):
        assert timedelta(minutes=59) < instant - twice < timedelta(minutes=62)
    wal = b"".join(path.read_bytes() for path in (tmp_path / "store" / "wal").iterdir()).decode()
    instants = re.findall(r'"(\d{4}-\d\d-\d\dT[^"]*)"', wal)
    assert len(instants) > 5
    assert all(instant.endswith("Z") for instant in instants)


def test_300_callers_that_gave_up_leave_no_descriptor_no_lock_and_no_run_that_is_busy_f101(
    service: CountingService, nursery: Nursery, tmp_path: Path
):
    described = agent(service, "read_only", "given up")
    with nursery.daemon(tmp_path / "store") as daemon:
        runs = [start(daemon, f"r-{n}", agent=described, drive="manual", waitMs=0) for n in range(SLOW_STEPS)]
        for run_id in runs:
            daemon.call("step", runId=run_id, clientRequestId="model")
        before = descriptors(daemon.pid)
        service.fault("before_effect", "hang", times=SLOW_STEPS)
        sent = [daemon.request("step", runId=run_id, clientRequestId="act", waitMs=1) for run_id in runs]
        daemon.write(b"".join(line for _, line in sent))
        gave_up = [daemon.result(ident) for ident, _ in sent]
        assert {(one["step"]["status"], one["request"]["state"]) for one in gave_up} == {("started", "in_progress")}
        for run_id in runs:
            daemon.call("cancel", runId=run_id, clientRequestId="stop")
        service.clear()
        service.release()
        daemon.listen()
        for run_id in runs:
            daemon.until(run_id, lambda shown: shown["run"]["status"] == "cancelled")
        counts = daemon.call("status")["counts"]
        assert counts == {"cancelled": SLOW_STEPS}
        end = time.monotonic() + WAIT_S
        while (left := descriptors(daemon.pid) - before) > 0:
            assert time.monotonic() < end, left
            daemon.call("status")
        again = start(daemon, "again", agent=described, drive="manual")
        for key in ("model", "act", "say"):
            assert daemon.call("step", runId=again, clientRequestId=key)["step"]["status"] == "completed"
        assert daemon.stop() == 0


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


# All modes save alike


def test_a_run_from_the_command_line_leaves_the_same_records_as_one_over_the_wire_one_for_each_step_s1_28(
    nursery: Nursery, tmp_path: Path
):
    (tmp_path / "note").write_text("hello\n")
    read = {"calls": [{"tool": "files.read", "arguments": {"path": "note"}}]}
    described = {"model": {"script": [read, {"text": "done"}]}, "tools": ["files"]}
    (tmp_path / "agent.json").write_text(json.dumps(described))
    batch = [sys.executable, "-P", "-m", "rpcagent", "run", "go", "--agent", "@agent.json", "--key", "run"]
    command = [*batch, "--store", str(tmp_path / "batch"), "--no-input"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
    with nursery.daemon(tmp_path / "wire") as daemon:
        start(daemon, "run", agent=described, input="go")
        assert daemon.stop() == 0
    recorded = {}
    for name in ("batch", "wire"):
        lines = [
            json.loads(line) for path in (tmp_path / name / "wal").iterdir() for line in path.read_bytes().splitlines()
        ]
        recorded[name] = [[one["type"] for one in line["d"]["events"]] for line in lines if line["k"] == "commit"]
    assert (
        recorded["batch"]
        == recorded["wire"]
        == [
            ["run_started", "request_settled", "model_call_started"],
            ["model_answered", "tool_started"],
            ["tool_completed", "model_call_started"],
            ["model_answered", "run_completed"],
        ]
    )
