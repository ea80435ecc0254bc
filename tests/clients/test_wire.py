"""Daemons that are none, are slow, or break off: every one ends in a clear error, in time, and nothing is left behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.clients.fake import Fake

from rpcagent_client import Client, ConnectionLost, DaemonNotStarted, DeadlineExceeded, ProtocolError
from rpcagent_client import client as client_module
from rpcagent_client.client import _installed


@pytest.mark.parametrize(
    ("raw", "quoted"),
    [
        ("Welcome to the shell!\n", "'Welcome to the shell!'"),
        ("\n", "''"),
        ("[]\n", "'[]'"),
        ('{"id": 1}\n', "'{\"id\": 1}'"),
        ('{"id": 99, "result": {}}\n', '\'{"id": 99, "result": {}}\''),
        ('{"id": null, "error": {"code": -32700, "message": "no"}}\n', "-32700"),
        ("[" * 100_000 + "\n", "'" + "[" * 200 + "'..."),
    ],
)
def test_garbage_is_a_clear_error_and_not_asked_again(fake: Fake, raw: str, quoted: str) -> None:
    fake.does([{"raw": raw}])
    with pytest.raises(ProtocolError) as raised:
        fake.client().start("default", "x")
    assert quoted in str(raised.value)
    assert fake.starts() == 1


def test_endless_line_is_an_error_and_not_a_full_memory(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rpcagent_client.connection.LINE_BYTES_MAX", 1 << 16)
    fake.does([{"raw": "x" * (1 << 18)}])
    with pytest.raises(ProtocolError, match="a line of more than 65536 bytes"):
        fake.client().status()


def test_answer_that_was_cut_off_by_death_is_a_lost_answer(fake: Fake, no_pauses: Any) -> None:
    fake.does([{"raw": '{"jsonrpc": "2.0", "id": 1, "resu'}, {"die": 3}], [])
    client = fake.client()
    with pytest.raises(DeadlineExceeded):
        client.start("default", "x", client_request_id="k", timeout=0.5)
    assert client.start("default", "x", client_request_id="k") == {"n": 1}
    assert fake.starts() == 2


def test_daemon_that_never_answers_ends_in_an_error_in_time_and_is_left_alone(fake: Fake) -> None:
    fake.does([{"result": {}}, {"silent": True}])
    client = fake.client()
    client.status()
    pid, began = client.pid, time.monotonic()
    with pytest.raises(DeadlineExceeded, match="no answer to start in time") as raised:
        client.start("default", "x", client_request_id="k", timeout=0.3)
    assert 0.3 <= time.monotonic() - began < 5
    assert isinstance(raised.value, TimeoutError)
    assert raised.value.client_request_id == "k"
    assert client.pid == pid
    assert client.status() == {"n": 3}


def test_late_answer_is_dropped_and_the_connection_goes_on(fake: Fake) -> None:
    late = {"jsonrpc": "2.0", "id": 1, "result": {"late": True}}
    fake.does([{"silent": True}, {"before": [late], "result": {"second": True}}])
    client = fake.client()
    with pytest.raises(DeadlineExceeded):
        client.status(timeout=0.5)
    assert client.status() == {"second": True}
    assert fake.starts() == 1


def test_daemon_that_does_not_read_cannot_block_the_caller(fake: Fake) -> None:
    fake.does([{"deaf": True}], [])
    client = fake.client()
    with pytest.raises(DeadlineExceeded, match="the daemon does not read its input"):
        client.start("default", "x" * (1 << 20), client_request_id="k", timeout=0.5)
    # Half a request is on the wire; the next one gets a wire of its own.
    assert client.start("default", "y", client_request_id="k2") == {"n": 1}
    assert fake.starts() == 2


def test_close_ends_a_daemon_that_ignores_the_end_of_input_and_sigterm(
    fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rpcagent_client.connection.TERM_S", 0.1)
    client = fake.client("ignore-signals")
    client.status()
    pid = client.pid
    assert pid is not None
    client.close(grace=0.1)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_reader_ends_although_a_grandchild_holds_the_output_open(fake: Fake) -> None:
    script = (
        "import subprocess,sys;subprocess.Popen(['sleep','5']);print('{\"id\":1,\"result\":{}}',flush=True);input()"
    )
    with Client([sys.executable, "-S", "-c", script], timeout=10.0) as client:
        assert client.call("status") == {}
        client.kill()
        assert client.pid is None


def test_callbacks_get_notifications_in_order_before_the_answer_and_may_raise(
    fake: Fake, caplog: pytest.LogCaptureFixture
) -> None:
    messages = [
        {"jsonrpc": "2.0", "method": "run/event", "params": {"seq": 1}},
        {"jsonrpc": "2.0", "method": "run/delta", "params": {"text": "a"}},
        {"jsonrpc": "2.0", "method": "run/lag", "params": {"afterSeq": 1}},
        {"jsonrpc": "2.0", "method": "run/event", "params": {"seq": 2}},
    ]
    fake.does([{"result": {}}, {"before": messages, "result": {"done": True}}])
    told: list[Any] = []

    def on_event(params: dict[str, Any]) -> None:
        told.append(params)
        if params["seq"] == 1:
            raise LookupError("the callback's own fault")

    client = fake.client(on_event=on_event, on_delta=told.append, on_notice=lambda *notice: told.append(notice))
    assert client.status() == {"done": True}
    assert told == [{"seq": 1}, {"text": "a"}, ("run/lag", {"afterSeq": 1}), {"seq": 2}]
    assert [record.getMessage() for record in caplog.records] == ["the callback for run/event raised"]
    assert fake.received()[0] == (
        0,
        "initialize",
        {"protocolVersion": 1, "capabilities": {"events": "own", "deltas": True}},
    )


def test_callback_that_calls_the_client_gets_an_error_and_no_deadlock(
    fake: Fake, caplog: pytest.LogCaptureFixture
) -> None:
    event = {"jsonrpc": "2.0", "method": "run/event", "params": {}}
    fake.does([{"result": {}}, {"before": [event], "result": {"done": True}}])
    client = fake.client(on_event=lambda _params: client.status())
    assert client.status() == {"done": True}
    assert caplog.records[0].exc_info is not None
    assert isinstance(caplog.records[0].exc_info[1], RuntimeError)


def test_each_new_daemon_is_told_which_notifications_are_wanted(fake: Fake) -> None:
    client = fake.client(on_event=lambda _params: None, events="all")
    client.status()
    client.kill()
    client.status()
    wanted = {"protocolVersion": 1, "capabilities": {"events": "all", "deltas": False}}
    assert fake.received() == [
        (0, "initialize", wanted),
        (0, "status", {}),
        (1, "initialize", wanted),
        (1, "status", {}),
    ]


def test_command_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with (
        Client([str(tmp_path / "nothing")], timeout=5.0) as client,
        pytest.raises(DaemonNotStarted, match="nothing' cannot be started: No such file or directory"),
    ):
        client.status()


def test_without_a_command_the_daemon_beside_the_interpreter_is_run_whatever_path_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = tmp_path / "rpcagent"
    fake.write_text('#!/bin/sh\nread line\nprintf \'{"id":1,"result":["%s"]}\\n\' "$*"\nread line\n')
    fake.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with Client(store="here", timeout=10.0) as client:
        assert client.call("status") == ["serve --store here"]


def test_without_a_script_beside_the_interpreter_the_installed_module_is_run_and_else_what_path_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    (tmp_path / "rpcagent").touch(mode=0o644)
    assert _installed() == (str(tmp_path / "python"), "-m", "rpcagent", "serve")
    monkeypatch.setattr(client_module, "find_spec", lambda _name: None)
    assert _installed() == ("rpcagent", "serve")
    monkeypatch.setattr(sys, "executable", "")
    assert _installed() == ("rpcagent", "serve")


def test_program_that_ends_at_once_is_an_error_with_its_exit_code(no_pauses: Any) -> None:
    with (
        Client([sys.executable, "-S", "-c", "raise SystemExit(5)"], attempts=2) as client,
        pytest.raises(ConnectionLost) as raised,
    ):
        client.status()
    assert raised.value.exit_code == 5


def test_standard_error_goes_to_the_file_that_the_caller_names(tmp_path: Path) -> None:
    script = "import sys;sys.stderr.write('x'*1_000_000);print('{\"id\":1,\"result\":{}}',flush=True);input()"
    log = tmp_path / "log"
    log.write_text("before\n")
    with Client([sys.executable, "-S", "-c", script], stderr=log, timeout=10.0) as client:
        assert client.call("status") == {}
    assert log.read_text() == "before\n" + "x" * 1_000_000


@pytest.mark.parametrize("pipe", [subprocess.PIPE, subprocess.STDOUT])
def test_standard_error_into_a_pipe_that_nobody_reads_is_refused(pipe: int) -> None:
    with pytest.raises(ValueError, match="nobody reads a pipe, and stdout is the wire"):
        Client(stderr=pipe)
