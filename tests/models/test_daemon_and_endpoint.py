"""The real daemon before a real endpoint: killed while an answer streams, told to wait, told the wrong things."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.process.wire_driver import Daemon
from tests.service.model_driver import ModelServer

pytestmark = pytest.mark.process

KEY = "sk-canary-0123456789abcdef"
READ = {"text": "I read it.", "calls": [{"name": "files__read", "arguments": {"path": "a.txt"}}]}
DONE = {"text": "It says hello, and that is all."}
WAIT_MS = 20_000


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModelServer]:
    monkeypatch.setenv("MODEL_KEY", KEY)
    (tmp_path / "workspace").mkdir()
    (tmp_path / "workspace" / "a.txt").write_text("hello")
    with ModelServer(tmp_path / "model.log", [READ, DONE], key=KEY) as running:
        yield running


def opened(tmp_path: Path) -> Daemon:
    daemon = Daemon(tmp_path / "store", workspace=tmp_path / "workspace", log=tmp_path / "daemon.log")
    daemon.listen()
    return daemon


def start(daemon: Daemon, server: ModelServer, tmp_path: Path, wait_ms: int = WAIT_MS) -> dict[str, Any]:
    model = {"provider": "openai", "baseUrl": server.base_url, "model": "m", "apiKeyEnv": "MODEL_KEY"}
    agent = {"instructions": "Be brief.", "model": model, "tools": ["files"]}
    workspace = str(tmp_path / "workspace")
    run: dict[str, Any] = daemon.call(
        "start", clientRequestId="a", agent=agent, input="Go.", workspace=workspace, waitMs=wait_ms
    )["run"]
    return run


def completed(daemon: Daemon, run_id: str) -> None:
    daemon.until(run_id, lambda answer: answer["run"]["status"] == "completed")


def kept_nowhere(tmp_path: Path) -> bool:
    """Whether the key is in no file of the store and in no line of the log."""
    files = [path for path in (tmp_path / "store").rglob("*") if path.is_file()] + [tmp_path / "daemon.log"]
    return len(files) > 2 and not any(KEY.encode() in path.read_bytes() for path in files)


def test_f047_f085_killed_while_an_answer_streams_the_same_bytes_are_asked_again_and_no_call_is_dangling(
    server: ModelServer, tmp_path: Path
) -> None:
    server.script([READ, {**DONE, "fault": {"name": "park", "after": 3}}])
    with opened(tmp_path) as daemon:
        run = start(daemon, server, tmp_path, wait_ms=0)
        server.wait("held")
        daemon.kill()
    server.wait("gone")
    with opened(tmp_path) as daemon:
        run = daemon.call("resume", clientRequestId="r", runId=run["runId"], waitMs=WAIT_MS)["run"]
        assert (run["status"], run["output"]) == ("completed", DONE["text"])
        assert daemon.call("status", runId=run["runId"])["budget"]["spent"]["tokens"] == 36
    first, cut, again = server.calls()
    assert [(call.turn, call.key, call.ended) for call in (first, cut, again)] == [
        (0, "right", "answered"),
        (1, "right", "gone"),
        (1, "right", "answered"),
    ]
    assert cut.body == again.body
    assert kept_nowhere(tmp_path)


def test_f057_a_wait_that_is_asked_for_is_kept(server: ModelServer, tmp_path: Path) -> None:
    server.fault("rate_limited", seconds=1)
    with opened(tmp_path) as daemon:
        run = start(daemon, server, tmp_path)
        assert run["status"] == "waiting"
        assert "retryAt" in run
        completed(daemon, run["runId"])
    first, second, _ = server.calls()
    assert second.at - first.at >= 1


def test_f039_a_key_that_is_refused_and_echoed_is_asked_about_and_kept_nowhere(
    server: ModelServer, tmp_path: Path
) -> None:
    server.fault("echo_key")
    with opened(tmp_path) as daemon:
        run = start(daemon, server, tmp_path)
        assert (run["status"], len(run["openApprovals"])) == ("waiting", 1)
        answer = daemon.call("status", runId=run["runId"])
        (approval,) = answer["approvals"]
        assert approval["kind"] == "retry"
        assert KEY not in repr(answer)
        names = {"runId": run["runId"], "approvalId": approval["approvalId"], "digest": approval["digest"]}
        daemon.call("approve", clientRequestId="b", decision="retry", **names)
        completed(daemon, run["runId"])
    assert kept_nowhere(tmp_path)


def test_f061_arguments_that_do_not_fit_are_told_once_and_the_tool_is_not_run(
    server: ModelServer, tmp_path: Path
) -> None:
    server.script([{"calls": [{"name": "files__read", "arguments": {"path": 7}}]}, DONE])
    with opened(tmp_path) as daemon:
        assert start(daemon, server, tmp_path)["status"] == "completed"
    told = server.calls()[-1].messages[-1]["content"]
    problem = "The arguments do not fit files.read, and it was not run: `path` must be a text, not 7"
    assert told == f"Error: Not run: {problem}"
