"""What goes wrong is told with its code, its message and what can be done, and never as a traceback."""

from __future__ import annotations

import json
from typing import Any

import pytest
from rpcagent.batch.faults import fault_of, plain_lines
from tests.batch.stage import Stage, shown

from rpcagent_client import ClientError, ConnectionLost, DaemonNotStarted, DeadlineExceeded, ProtocolError, RpcError


def _refusal(number: int, code: str, **data: Any) -> dict[str, Any]:
    return {
        "error": {"code": number, "message": "No.", "data": {"code": code, "retryable": code == "STORE_LOCKED", **data}}
    }


def test_a_store_in_use_is_told_at_once_with_the_process_that_has_it(stage: Stage) -> None:
    locked = _refusal(-32057, "STORE_LOCKED", pid=41, host="h", since="2031")
    played = stage.play("tail", "x", "-f", look=locked, answers=[])
    assert (played.code, played.out) == (5, "")
    assert "STORE_LOCKED: another daemon (process 41 on h) has owned this store since 2031\n" in played.err
    assert "`ps -fp 41` shows whose" in played.err
    assert [method for _, method, _ in stage.fake.received()] == ["initialize", "status"]


def test_with_json_an_error_is_an_object_with_what_the_protocol_promises(stage: Stage) -> None:
    refusal = _refusal(-32602, "INVALID_PARAMS", path="$.agent")
    played = stage.play("run", "x", "--json", answers=[refusal])
    (told,) = played.objects()
    assert (played.code, played.err, told["exitCode"]) == (2, "", 2)
    assert (told["error"]["code"], told["error"]["data"]["path"]) == ("INVALID_PARAMS", "$.agent")


def test_a_daemon_that_ends_at_once_is_told_with_its_reason(stage: Stage) -> None:
    played = stage.play("runs", look={"die": 1}, answers=[])
    assert played.code == 5
    assert "rpcagent: DAEMON_ENDED: " in played.err
    assert "give the same command again" in played.err


@pytest.mark.parametrize(
    ("code", "exit_code"),
    [
        ("NOT_FOUND", 2),
        ("STALE_DIGEST", 2),
        ("ALREADY_DECIDED", 2),
        ("INVALID_STATE", 2),
        ("KEY_EXPIRED", 2),
        ("STORAGE", 5),
        ("STORE_DAMAGED", 5),
        ("INTERNAL", 5),
        ("OVERLOADED", 5),
        ("INCOMPATIBLE", 5),
        ("OF_A_LATER_VERSION", 5),
    ],
)
def test_what_cannot_be_done_as_it_was_asked_is_2_and_trouble_is_5(code: str, exit_code: int) -> None:
    fault = fault_of(RpcError(-32000, code, "No.\x1b[2J", {"code": code}))
    assert (fault.exit_code, fault.lines()[0]) == (exit_code, f"rpcagent: {code}: No.\\x1b[2J")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConnectionLost("the daemon ended", 70, 9), "DAEMON_ENDED"),
        (DeadlineExceeded("no answer in time"), "NO_ANSWER"),
        (DaemonNotStarted("no"), "DAEMON_NOT_STARTED"),
        (ProtocolError("no JSON"), "PROTOCOL"),
    ],
)
def test_each_error_of_the_client_has_a_word_and_a_remedy(error: ClientError, code: str) -> None:
    fault = fault_of(error)
    assert (fault.code, fault.exit_code, fault.remedy != "") == (code, 5, True)


def test_the_reason_is_taken_from_the_end_of_the_daemons_log() -> None:
    log = "\n".join(
        json.dumps(entry)
        for entry in (
            {"level": "info", "event": "stopping"},
            {"level": "error", "event": "the log is poisoned", "reason": "EIO"},
            {"level": "info", "event": "closed"},
        )
    )
    assert fault_of(ConnectionLost("it ended", 70, 9), log).message == "it ended (pid 9): the log is poisoned: EIO"


def test_a_configuration_at_fault_is_a_mistake_with_its_own_lines() -> None:
    fault = fault_of(ConnectionLost("it ended", 2, 9), "rpcagent.toml:1: this is not TOML\n")
    assert (fault.code, fault.exit_code, fault.message) == ("CONFIG", 2, "rpcagent.toml:1: this is not TOML")


def test_only_what_is_no_log_entry_is_said_to_a_person() -> None:
    assert plain_lines('a note\n{"level":"info"}\n\n"text"\n') == ["a note", '"text"']


def test_an_unknown_run_is_told_with_where_to_look(stage: Stage) -> None:
    played = stage.play("show", "nope", answers=[{"result": {"runs": []}}])
    assert played.code == 2
    assert "rpcagent: NOT_FOUND: there is no run 'nope' in this store\n" in played.err


def test_a_daemon_that_dies_later_is_started_again_and_said_so(stage: Stage) -> None:
    answers = [{"result": {"runs": [shown("completed")["result"]["run"]]}}, {"die": 9}]
    stage.fake.folder.joinpath("1.json").write_text(json.dumps([{"result": {}}, shown("completed", output="Done.")]))
    played = stage.play("show", "k", answers=answers)
    assert played.code == 0
    assert "output:\nDone.\n" in played.out
    assert "client     status: the daemon ended with exit code 9" in played.err
