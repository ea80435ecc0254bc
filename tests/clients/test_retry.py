"""What is sent again, with which key, and what is not."""

from __future__ import annotations

import os
import threading
import uuid
from typing import Any

import pytest
from tests.clients.fake import Fake

from rpcagent_client import ClientClosed, ConnectionLost, DeadlineExceeded, RpcError
from rpcagent_client.client import _backoff

DIES: list[dict[str, Any]] = [{"die": 9}]


def refusal(code: str, *, retryable: bool, **data: Any) -> dict[str, Any]:
    return {"error": {"code": -32000, "message": "not now", "data": {"code": code, "retryable": retryable, **data}}}


def test_request_is_sent_again_with_the_same_key_and_params_after_the_daemon_died(fake: Fake, no_pauses: Any) -> None:
    fake.does(DIES, DIES, [{"result": {"runId": "run_a"}}])
    assert fake.client().start("default", "hello", labels={"a": "b"}) == {"runId": "run_a"}
    received = fake.received()
    assert [start for start, _, _ in received] == [0, 1, 2]
    first = received[0][2]
    assert first == {
        "agent": "default",
        "input": "hello",
        "labels": {"a": "b"},
        "clientRequestId": first["clientRequestId"],
        "waitMs": 0,
    }
    assert uuid.UUID(first["clientRequestId"]).version == 4
    assert all(request == ("start", first) for request in ((method, params) for _, method, params in received))


def test_each_keyed_method_sends_the_key_that_the_caller_gave(fake: Fake) -> None:
    client = fake.client()
    client.start("default", "x", client_request_id="k1", wait=1.5)
    client.step("run_a", client_request_id="k2")
    client.resume("run_a", plan_digest="d", client_request_id="k3")
    client.approve("run_a", "apr_1", "d", "extend", extend={"steps": 5}, comment="c", client_request_id="k4")
    client.cancel("run_a", reason="r", client_request_id="k5")
    assert fake.received() == [
        (0, "start", {"agent": "default", "input": "x", "clientRequestId": "k1", "waitMs": 1500}),
        (0, "step", {"runId": "run_a", "clientRequestId": "k2", "waitMs": 30000}),
        (0, "resume", {"runId": "run_a", "planDigest": "d", "clientRequestId": "k3", "waitMs": 0}),
        (
            0,
            "approve",
            {
                "runId": "run_a",
                "approvalId": "apr_1",
                "digest": "d",
                "decision": "extend",
                "extend": {"steps": 5},
                "comment": "c",
                "clientRequestId": "k4",
            },
        ),
        (0, "cancel", {"runId": "run_a", "reason": "r", "clientRequestId": "k5"}),
    ]


def test_reads_are_repeated_without_a_key(fake: Fake, no_pauses: Any) -> None:
    fake.does(DIES, [])
    client = fake.client()
    assert client.status("run_a") == {"n": 1}
    assert client.list(status=["waiting"], limit=5) == {"n": 2}
    assert client.events("run_a", after_seq=3) == {"n": 3}
    assert fake.received() == [
        (0, "status", {"runId": "run_a"}),
        (1, "status", {"runId": "run_a"}),
        (1, "list", {"status": ["waiting"], "limit": 5}),
        (1, "events", {"runId": "run_a", "afterSeq": 3}),
    ]


def test_retryable_error_is_asked_again_on_the_same_daemon(fake: Fake, no_pauses: Any) -> None:
    fake.does([refusal("STORAGE", retryable=True), refusal("RUN_BUSY", retryable=True), {"result": {"ok": 1}}])
    assert fake.client().step("run_a", client_request_id="k") == {"ok": 1}
    assert [(start, params["clientRequestId"]) for start, _, params in fake.received()] == [(0, "k")] * 3
    assert no_pauses == [1, 2]


@pytest.mark.parametrize(
    ("code", "retryable"),
    [
        ("IDEMPOTENCY_CONFLICT", False),
        ("INVALID_PARAMS", False),
        ("APPROVAL_REQUIRED", True),
        ("UNKNOWN_OUTCOME", True),
        ("INCOMPATIBLE", True),
        ("INVALID_STATE", True),
    ],
)
def test_what_asking_again_cannot_change_is_raised_at_once(fake: Fake, code: str, retryable: bool) -> None:
    fake.does([refusal(code, retryable=retryable, path="$.x")])
    with pytest.raises(RpcError) as raised:
        fake.client().step("run_a", client_request_id="k")
    error = raised.value
    assert (error.number, error.code, error.message, error.retryable) == (-32000, code, "not now", retryable)
    assert error.data == {"code": code, "retryable": retryable, "path": "$.x"}
    assert error.client_request_id == "k"
    assert len(fake.received()) == 1


def test_daemon_that_always_dies_is_started_a_bounded_number_of_times(fake: Fake, no_pauses: Any) -> None:
    fake.does(DIES)
    with pytest.raises(ConnectionLost) as raised:
        fake.client(attempts=4).start("default", "x", client_request_id="k")
    assert fake.starts() == 4
    assert raised.value.exit_code == 9
    assert str(raised.value).startswith("the daemon ended with exit code 9 before it answered (pid ")
    assert raised.value.__notes__ == ["start was sent 4 times"]
    assert raised.value.client_request_id == "k"


def test_retries_end_when_the_time_is_over(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rpcagent_client.client._backoff", lambda _attempt: 60.0)
    fake.does([refusal("STORAGE", retryable=True)])
    with pytest.raises(RpcError):
        fake.client().cancel("run_a", timeout=5.0)
    assert len(fake.received()) == 1


def test_pauses_double_up_to_a_bound_and_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("random.uniform", lambda low, high: (low, high))
    assert [_backoff(attempt) for attempt in (1, 2, 3, 6, 7, 1000)] == [
        (0.025, 0.05),
        (0.05, 0.1),
        (0.1, 0.2),
        (0.8, 1.6),
        (1.0, 2.0),
        (1.0, 2.0),
    ]


def test_call_sends_once(fake: Fake) -> None:
    fake.does(DIES)
    with pytest.raises(ConnectionLost):
        fake.client().call("start", {"agent": "default", "input": "x", "clientRequestId": "k"})
    assert len(fake.received()) == 1


def test_shutdown_starts_no_daemon_and_returns_the_exit_code_of_one(fake: Fake) -> None:
    client = fake.client()
    assert client.shutdown() is None
    assert fake.starts() == 0
    client.status()
    assert client.shutdown(grace=0.5) == 0
    assert fake.received()[-1] == (0, "shutdown", {"graceMs": 500})
    assert client.pid is None


def test_kill_reaps_and_the_next_call_starts_another(fake: Fake) -> None:
    client = fake.client()
    client.status()
    pid = client.pid
    assert pid is not None
    client.kill()
    assert client.pid is None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert client.status() == {"n": 1}
    assert client.pid not in {None, pid}


def test_close_ends_the_calls_of_other_threads(fake: Fake) -> None:
    fake.does([{"result": {}}, {"silent": True}])
    client = fake.client()
    client.status()
    raised: list[BaseException] = []

    def wait_for_ever() -> None:
        try:
            client.start("default", "x", client_request_id="k")
        except ClientClosed as error:
            raised.append(error)

    thread = threading.Thread(target=wait_for_ever)
    thread.start()
    while len(fake.received()) < 2:
        assert thread.is_alive()
    client.close(grace=1.0)
    thread.join(5.0)
    assert [str(error) for error in raised] == ["the client was closed"]
    assert fake.starts() == 1
    with pytest.raises(ClientClosed):
        client.status()


def test_wait_returns_what_is_at_rest_and_not_what_waits_for_the_clock(fake: Fake, no_pauses: Any) -> None:
    shown = [
        {"status": "running", "openApprovals": []},
        {"status": "waiting", "openApprovals": [], "retryAt": "2031-01-01T00:00:00Z"},
        {"status": "waiting", "openApprovals": ["apr_1"]},
    ]
    fake.does([{"result": {"run": run}} for run in shown[:2]] + DIES, [{"result": {"run": shown[2]}}])
    assert fake.client().wait("run_a", 10.0) == {"run": shown[2]}
    assert [(start, method) for start, method, _ in fake.received()] == [(0, "status")] * 3 + [(1, "status")]


def test_wait_ends_when_its_time_is_over(fake: Fake) -> None:
    fake.does([{"result": {"run": {"status": "running"}}}] * 100)
    client = fake.client()
    client.status()
    with pytest.raises(DeadlineExceeded, match=r"run_a is still running after 0\.3 seconds"):
        client.wait("run_a", 0.3)
