"""SIGKILL around the model's answers, with a real endpoint in another process: what was accepted is never asked for again,
and what was waited for, counted or asked of a person goes on where it was. F047, F053, F057, F083, F085.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.process.wire_driver import Daemon
from tests.service.model_driver import ModelServer
from tests.service.model_server import history_problem

pytestmark = pytest.mark.process

KEY = "sk-kills-0123456789abcdef"
READ = {"text": "I read it.", "calls": [{"name": "files__read", "arguments": {"path": "a.txt"}}]}
DONE = {"text": "It says hello."}
QUIET_S = 1.0
QUIET_CPU_S = 0.2


class Stage:
    """One endpoint and one store, over as many daemons as it takes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.workspace = folder / "workspace"
        self.workspace.mkdir()
        (self.workspace / "a.txt").write_text("hello")
        self.server = ModelServer(folder / "model.log", [READ, DONE], key=KEY).start()
        self.run_id = ""

    def opened(self, **model: Any) -> Daemon:
        """A daemon that has been sent `start`, with the same key and params as each one before it."""
        daemon = Daemon(self.folder / "store", workspace=self.workspace, log=self.folder / "daemon.log")
        daemon.listen()
        settings = {"provider": "openai", "baseUrl": self.server.base_url, "apiKeyEnv": "MODEL_KEY", **model}
        agent = {"model": settings, "tools": ["files.read"]}
        started = daemon.call("start", clientRequestId="a", agent=agent, input="Go.")
        assert started["replayed"] is bool(self.run_id)
        self.run_id = started["runId"]
        return daemon

    def until(self, daemon: Daemon, *statuses: str) -> dict[str, Any]:
        return daemon.until(self.run_id, lambda answer: answer["run"]["status"] in statuses)

    def completed(self, daemon: Daemon) -> dict[str, Any]:
        shown = self.until(daemon, "completed", "failed")
        assert (shown["run"]["status"], shown["run"]["output"]) == ("completed", DONE["text"])
        return shown

    def retry(self, daemon: Daemon) -> None:
        """Answers the only open question so."""
        (question,) = daemon.call("status", runId=self.run_id)["approvals"]
        named = {name: question[name] for name in ("approvalId", "digest")}
        key = f"retry/{question['approvalId']}"
        daemon.call("approve", clientRequestId=key, runId=self.run_id, decision="retry", **named)

    def seen(self) -> list[tuple[int, str, str]]:
        """Turn, key and end of each call that reached the endpoint; no history was one that it would refuse."""
        calls = self.server.calls()
        assert [history_problem(call.body) for call in calls] == [""] * len(calls)
        return [(call.turn, call.key, call.ended) for call in calls]

    def quiet(self, daemon: Daemon, calls: int) -> None:
        """For a moment nothing more reaches the endpoint, and the daemon does nothing either."""
        before = _cpu_s(daemon.pid)
        self.nothing_reaches_it(calls)
        assert _cpu_s(daemon.pid) - before < QUIET_CPU_S

    def nothing_reaches_it(self, calls: int) -> None:
        """For a moment it stays at so many calls."""
        with pytest.raises(AssertionError, match=f"{calls} of {calls + 1} calls"):
            self.server.wait("calls", calls + 1, timeout=QUIET_S)

    def events(self, daemon: Daemon, kind: str) -> list[tuple[datetime, dict[str, Any]]]:
        elements = daemon.call("events", runId=self.run_id, limit=1_000)["events"]
        return [(datetime.fromisoformat(e["at"]), e["event"]) for e in elements if e["event"]["type"] == kind]


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _asked(answer: dict[str, Any]) -> bool:
    return bool(answer["approvals"])


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    monkeypatch.setenv("MODEL_KEY", KEY)
    stage = Stage(tmp_path)
    yield stage
    stage.server.stop()


def test_f047_f085_killed_while_a_call_streams_it_is_asked_again_and_one_answer_is_accepted(stage: Stage) -> None:
    stage.server.fault("park", after=5)  # three words, and the name of the call without its arguments
    with stage.opened() as daemon:
        stage.server.wait("held")
        daemon.kill()
    stage.server.wait("gone")
    with stage.opened() as daemon:
        steps = stage.completed(daemon)["steps"]
        answered = stage.events(daemon, "model_answered")
    assert [(step["name"], step["attempt"]) for step in steps] == [
        ("default", 2),
        ("files.read", 1),
        ("default", 1),
    ]
    assert [event["text"] for _, event in answered] == [READ["text"], DONE["text"]]
    assert stage.seen() == [(0, "right", "gone"), (0, "right", "answered"), (1, "right", "answered")]
    cut, again, _ = stage.server.calls()
    assert cut.body == again.body


def test_f057_f083_a_wait_of_an_hour_is_one_durable_wait_in_which_nothing_is_done(stage: Stage) -> None:
    stage.server.fault("rate_limited", seconds=3_600)
    with stage.opened() as daemon:
        shown = stage.until(daemon, "waiting")
        ((failed_at, failed),) = stage.events(daemon, "attempt_failed")
        daemon.kill()
    assert (failed["waitMs"], failed["error"]["kind"]) == (3_600_000, "rate_limited")
    retry_at = datetime.fromisoformat(shown["run"]["retryAt"])
    assert retry_at == failed_at + timedelta(hours=1)
    for _ in range(2):
        with stage.opened() as daemon:
            assert daemon.call("status", runId=stage.run_id) == shown
            stage.quiet(daemon, 1)
            assert daemon.call("status", runId=stage.run_id) == shown
            daemon.kill()
    assert stage.seen() == [(0, "right", "answered")]


def test_f057_a_wait_that_is_over_while_nothing_runs_is_asked_again_at_once(stage: Stage) -> None:
    stage.server.fault("rate_limited", seconds=1)
    with stage.opened() as daemon:
        retry_at = datetime.fromisoformat(stage.until(daemon, "waiting")["run"]["retryAt"])
        daemon.kill()
    stage.nothing_reaches_it(1)
    with stage.opened() as daemon:
        stage.completed(daemon)
        (failed,) = stage.events(daemon, "attempt_failed")
    assert retry_at == failed[0] + timedelta(seconds=1)
    assert stage.server.calls()[1].at >= retry_at.timestamp()
    assert stage.seen() == [(0, "right", "answered"), (0, "right", "answered"), (1, "right", "answered")]


def test_a_wrong_key_is_asked_about_at_once_and_the_question_outlives_the_process_until_the_key_is_right(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MODEL_KEY", "sk-wrong-0123456789abcdef")
    with stage.opened() as daemon:
        first = daemon.until(stage.run_id, _asked)
        daemon.kill()
    (question,) = first["approvals"]
    assert (question["kind"], question["choices"]) == ("retry", ["retry", "stop"])
    assert (question["subject"]["attempt"], question["subject"]["error"]["kind"]) == (1, "credentials")
    with stage.opened() as daemon:
        assert daemon.call("status", runId=stage.run_id) == first
        stage.retry(daemon)  # too early: the key is still the wrong one
        (second,) = daemon.until(stage.run_id, _asked)["approvals"]
        daemon.kill()
    assert second["approvalId"] != question["approvalId"]
    assert second["subject"]["attempt"] == 2
    monkeypatch.setenv("MODEL_KEY", KEY)
    with stage.opened() as daemon:
        assert daemon.call("status", runId=stage.run_id)["approvals"] == [second]
        stage.retry(daemon)
        stage.completed(daemon)
    wrong, right = (0, "wrong", "answered"), (0, "right", "answered")
    assert stage.seen() == [wrong, wrong, right, (1, "right", "answered")]


BAD = ("cut_arguments", "malformed_arguments", "cut_text", "cut_arguments")
FRAGMENT = '{"order": "A1", "amount": 10'


@pytest.mark.parametrize("fourth", ["good", "bad"])
def test_f053_answers_that_cannot_be_used_are_counted_over_kills(stage: Stage, fourth: str) -> None:
    stage.server.script([READ] * 10)
    for fault in BAD[:3]:
        stage.server.fault(fault)
        stage.server.fault("stall_before_first")
    for held in range(3):
        with stage.opened() as daemon:
            stage.server.wait("held")
            daemon.kill()
        stage.server.wait("gone", held + 1)
    if fourth == "bad":
        stage.server.fault(BAD[3])
    else:
        stage.server.script([DONE] * 10)
    with stage.opened() as daemon:
        run = stage.until(daemon, "completed", "failed")["run"]
    ended = [call.ended for call in stage.server.calls()]
    assert ended == [*["answered", "gone"] * 3, "answered"]
    assert [history_problem(call.body) for call in stage.server.calls()] == [""] * 7
    assert not any(FRAGMENT in repr(call.body) for call in stage.server.calls())
    if fourth == "good":
        assert (run["status"], run["output"]) == ("completed", DONE["text"])
    else:
        assert (run["status"], run["error"]["kind"]) == ("failed", "bad_output")
        assert run["error"]["message"].startswith("4 answers in a row could not be used.")


def test_f057_an_endpoint_that_is_gone_for_good_is_asked_about_after_the_time_given_kills_included(
    stage: Stage,
) -> None:
    opened: Callable[[], Daemon] = lambda: stage.opened(retryFor="500ms")  # noqa: E731
    stage.server.stop()
    with opened() as daemon:
        shown = stage.until(daemon, "waiting")
        assert (shown["approvals"], "retryAt" in shown["run"]) == ([], True)
        daemon.kill()
    with opened() as daemon:
        (question,) = daemon.until(stage.run_id, _asked)["approvals"]
        failed = [event["attempt"] for _, event in stage.events(daemon, "attempt_failed")]
        daemon.kill()
    assert (question["kind"], question["subject"]["attempt"], failed) == ("retry", 2, [1, 2])
    stage.server.start()
    with opened() as daemon:
        assert daemon.call("status", runId=stage.run_id)["approvals"] == [question]
        stage.quiet(daemon, 0)  # it is back, and still nobody but a person lets it go on
        stage.retry(daemon)
        stage.completed(daemon)
    assert stage.seen() == [(0, "right", "answered"), (1, "right", "answered")]


def test_cancelled_while_an_answer_streams_the_connection_is_closed_and_a_kill_changes_nothing(stage: Stage) -> None:
    stage.server.fault("park", after=3)
    with stage.opened() as daemon:
        stage.server.wait("held")
        daemon.call("cancel", clientRequestId="c", runId=stage.run_id)
        stage.server.wait("gone")
        shown = stage.until(daemon, "cancelled")
        daemon.kill()
    assert shown["run"].get("unresolved", []) == []
    with stage.opened() as daemon:
        assert daemon.call("status", runId=stage.run_id) == shown
        stage.quiet(daemon, 1)
        assert daemon.call("cancel", clientRequestId="c", runId=stage.run_id)["replayed"] is True
    assert stage.seen() == [(0, "right", "gone")]
