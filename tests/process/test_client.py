"""The Python client and the real daemon: what was acknowledged is there after kill -9, and events come before answers."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from rpcagent_client import Client, RpcError

pytestmark = pytest.mark.process

Connect = Callable[..., Client]

WAIT_S = 30.0
TWO_READS = {
    "model": {
        "script": [
            {"text": "Looking.", "calls": [{"tool": "files.list"}, {"tool": "files.list", "arguments": {"path": "."}}]},
            {"text": "Nothing here."},
        ]
    },
    "tools": ["files"],
}
ASKING = {
    "model": {
        "script": [
            {"calls": [{"tool": "files.write", "arguments": {"path": "a.txt", "content": "hello"}}]},
            {"text": "Written."},
        ]
    },
    "tools": ["files"],
}


def test_an_acknowledged_start_is_there_after_kill_minus_9_f031(connect: Connect) -> None:
    client = connect()
    acknowledged: dict[str, str] = {}
    for number in range(20):
        key = f"run-{number}"
        acknowledged[key] = client.start(TWO_READS, "look", client_request_id=key)["runId"]
        client.kill()
        again = client.start(TWO_READS, "look", client_request_id=key)
        assert (again["runId"], again["replayed"]) == (acknowledged[key], True)
    assert len(set(acknowledged.values())) == 20
    for key, run_id in acknowledged.items():
        shown = client.wait(run_id, WAIT_S)
        assert (shown["run"]["clientRequestId"], shown["run"]["status"]) == (key, "completed")
        assert shown["run"]["output"] == "Nothing here."
    assert [run["runId"] for run in client.list(limit=100)["runs"]] == list(acknowledged.values())


def test_a_start_that_was_killed_unanswered_is_answered_after_the_restart(connect: Connect) -> None:
    slow = {"model": {"script": [{"text": "At last.", "delayMs": 300}]}}
    client = connect()
    client.status()
    with ThreadPoolExecutor(1) as pool:
        started = pool.submit(client.start, slow, "x", client_request_id="k", wait=WAIT_S)
        while _unknown(client, "k"):
            assert not started.done()
        client.kill()
        answer = started.result(WAIT_S)
    assert (answer["replayed"], answer["run"]["status"], answer["run"]["output"]) == (True, "completed", "At last.")
    assert answer["runId"] == client.status(client_request_id="k")["run"]["runId"]


def test_events_come_in_order_and_before_the_answer_that_rests_on_them_f017(connect: Connect) -> None:
    seen: list[dict[str, Any]] = []
    client = connect(on_event=seen.append)
    for number in range(10):
        seen.clear()
        answer = client.start(TWO_READS, "look", client_request_id=f"run-{number}", wait=WAIT_S)
        # No wait of any kind: what the answer speaks of has been delivered when it returns.
        told = list(seen)
        assert answer["run"]["status"] == "completed"
        assert [event["seq"] for event in told] == list(range(1, answer["run"]["lastSeq"] + 1))
        assert {event["runId"] for event in told} == {answer["runId"]}
        assert told == client.events(answer["runId"])["events"]


def test_deltas_are_delivered_where_they_are_asked_for(connect: Connect) -> None:
    deltas: list[dict[str, Any]] = []
    answer = connect(on_delta=deltas.append).start(TWO_READS, "look", wait=WAIT_S)
    assert [delta["text"] for delta in deltas] == ["Looking.", "Nothing", " here."]
    assert {delta["runId"] for delta in deltas} == {answer["runId"]}


def test_an_approval_is_the_same_after_a_kill_and_its_answer_is_taken_once(connect: Connect) -> None:
    client = connect()
    run_id = client.start(ASKING, "write", client_request_id="k")["runId"]
    before = client.wait(run_id, WAIT_S)["approvals"]
    client.kill()
    after = client.wait(run_id, WAIT_S)["approvals"]
    assert after == before
    question = after[0]
    answers = []
    for _ in range(2):
        answers.append(
            client.approve(run_id, question["approvalId"], question["digest"], "allow", client_request_id="allow")
        )
        client.kill()
    decision = {
        "approvalId": question["approvalId"],
        "kind": "tool_call",
        "decision": "allow",
        "already": False,
    }
    assert [answer["approval"] for answer in answers] == [decision, decision]
    assert [answer["replayed"] for answer in answers] == [False, True]
    assert client.wait(run_id, WAIT_S)["run"]["output"] == "Written."


def test_manual_drive_takes_one_step_for_each_key(connect: Connect) -> None:
    client = connect()
    run_id = client.start(TWO_READS, "look", drive="manual", client_request_id="k")["runId"]
    first = client.step(run_id, client_request_id="s1")
    client.kill()
    again = client.step(run_id, client_request_id="s1")
    assert (again["step"], again["replayed"]) == (first["step"], True)
    assert (first["step"]["kind"], first["step"]["status"]) == ("model_call", "completed")
    assert client.step(run_id, client_request_id="s2")["step"]["name"] == "files.list"
    cancelled = client.cancel(run_id, reason="enough", client_request_id="c")
    assert (cancelled["cancel"], cancelled["run"]["status"]) == ({"already": False}, "cancelled")


def test_the_same_key_with_other_params_is_a_conflict_and_not_retried(connect: Connect) -> None:
    client = connect()
    client.start(TWO_READS, "look", client_request_id="k")
    with pytest.raises(RpcError) as raised:
        client.start(TWO_READS, "look elsewhere", client_request_id="k")
    assert (raised.value.code, raised.value.number, raised.value.retryable) == ("IDEMPOTENCY_CONFLICT", -32050, False)
    assert client.status()["epoch"] == 1


def test_a_locked_store_is_waited_for(connect: Connect) -> None:
    """The second daemon answers STORE_LOCKED at once here; the client asks again until the first one has gone."""
    first = connect()
    second = connect("--lock-wait", "0")
    run_id = first.start(TWO_READS, "look", client_request_id="k")["runId"]
    with pytest.raises(RpcError) as raised:
        second.call("status")
    assert (raised.value.code, raised.value.data["pid"]) == ("STORE_LOCKED", first.pid)
    assert first.shutdown() == 0
    assert second.start(TWO_READS, "look", client_request_id="k")["runId"] == run_id


def test_shutdown_ends_with_0_and_the_next_call_goes_on(connect: Connect) -> None:
    client = connect()
    run_id = client.start(TWO_READS, "look", wait=WAIT_S)["runId"]
    assert client.shutdown() == 0
    assert client.pid is None
    assert client.status(run_id)["run"]["status"] == "completed"


def _unknown(client: Client, key: str) -> bool:
    try:
        client.status(client_request_id=key)
    except RpcError as error:
        assert error.code == "NOT_FOUND"
        return True
    return False


def test_what_a_command_prints_is_sent_as_it_comes(connect: Connect) -> None:
    deltas: list[dict[str, Any]] = []
    client = connect(on_delta=deltas.append)
    agent = {
        "tools": ["shell"],
        "model": {
            "script": [
                {"calls": [{"tool": "shell.run", "arguments": {"command": "echo one; echo two"}}]},
                {"text": "Run."},
            ]
        },
        "policy": {"rules": [{"do": "allow"}]},
    }
    run_id = client.start(agent, "print")["runId"]
    shown = client.wait(run_id, WAIT_S)
    assert shown["run"]["status"] == "completed"
    step_id = next(step["stepId"] for step in shown["steps"] if step["kind"] == "tool_call")
    printed = [delta for delta in deltas if delta.get("stream") == "output"]
    assert "".join(delta["text"] for delta in printed) == "one\ntwo\n"
    assert {(delta["runId"], delta["stepId"], delta["attempt"]) for delta in printed} == {(run_id, step_id, 1)}
