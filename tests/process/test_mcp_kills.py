"""SIGKILL of the daemon inside a call of an MCP tool, for every effect class; the server goes, dies with it, or stays on.

The truth is the server's own file, and its process is told apart by its number. A key that a model or an MCP server says
back is in nothing that the daemon leaves behind. F011, F039, F047, F075, F095.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import anyio
import pytest
from tests.process.outside import step_of
from tests.process.repository import gone
from tests.process.wire_driver import Daemon, refused
from tests.service.mcp_driver import TOOLS, McpFaultServer
from tests.service.model_driver import ModelServer

pytestmark = pytest.mark.process

ALLOW = {"rules": [{"do": "allow", "tool": "*"}]}
Point = Literal["before_effect", "after_effect"]


class Stage:
    """One MCP server and one store, over all their lives."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.server = McpFaultServer(folder / "server")
        self.run_id = ""
        self.heard = b""

    def close(self) -> None:
        self.server.close()

    def agent(self, tool: str, model: dict[str, Any] | None = None) -> dict[str, Any]:
        """One that calls the tool once and then says `done`."""
        script = [{"calls": [{"tool": f"t.{tool}", "arguments": {"operation": "o1"}}]}, {"text": "done"}]
        config = self.server.config(tools=TOOLS, env={"TOKEN": "${T_TOKEN}"})
        return {"model": model or {"script": script}, "tools": ["mcp:t"], "mcp": {"t": config}, "policy": ALLOW}

    def opened(self, tool: str = "", **options: Any) -> Daemon:
        """A daemon; where there is a run already it is sent its `start` again."""
        folder = self.folder
        daemon = Heard(self, folder / "store", workspace=folder, log=folder / "daemon.log", **options)
        daemon.listen()
        if tool:
            started = daemon.call("start", clientRequestId="a", agent=self.agent(tool), input="Go.")
            assert started["replayed"] is bool(self.run_id)
            self.run_id = started["runId"]
        return daemon

    def event(self, name: str) -> dict[str, Any]:
        """What the server tells, waited for."""
        return anyio.run(self.server.event, name)

    def killed_inside(self, tool: str, point: Point) -> int:
        """The daemon dies while the call is there; the number of the server's process."""
        self.server.fault("hang", point)
        with self.opened(tool) as daemon:
            pid: int = self.event("parked")["pid"]
            daemon.kill()
        return pid

    def ended(self, daemon: Daemon) -> dict[str, Any]:
        """The status when the run has ended or waits for somebody."""
        return daemon.until(self.run_id, lambda answer: answer["run"]["status"] not in {"ready", "running"})

    def completed(self, daemon: Daemon) -> dict[str, Any]:
        shown = daemon.until(self.run_id, lambda answer: answer["run"]["status"] in {"completed", "failed"})
        assert (shown["run"]["status"], shown["run"]["output"]) == ("completed", "done"), shown
        return shown

    def answer(self, daemon: Daemon, tool: str) -> str:
        """The question about the unknown outcome, answered from the server's file."""
        (question,) = daemon.until(self.run_id, lambda answer: bool(answer["approvals"]))["approvals"]
        assert question["kind"] == "unknown_outcome"
        decision = "happened" if self.server.effects().get(tool) else "did_not_happen"
        named = {name: question[name] for name in ("approvalId", "digest")}
        daemon.call("approve", clientRequestId="truth", runId=self.run_id, decision=decision, **named)
        return decision

    def events(self, daemon: Daemon) -> list[dict[str, Any]]:
        return [element["event"] for element in daemon.call("events", runId=self.run_id, limit=1_000)["events"]]

    def seen(self) -> list[str]:
        """The calls that came, in order."""
        return [call["path"] for call in self.server.calls()]

    def keys(self, tool: str) -> set[Any]:
        return {call["key"] for call in self.server.calls() if call["path"] == tool}


class Heard(Daemon):
    """Keeps every byte of standard output, as it came."""

    def __init__(self, stage: Stage, *args: Any, **options: Any) -> None:
        self._stage = stage
        super().__init__(*args, **options)

    def _fill(self, timeout: float) -> bool:
        before = len(self._buffer)
        more = super()._fill(timeout)
        self._stage.heard += self._buffer[before:]
        return more


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    monkeypatch.setenv("T_TOKEN", "token-of-the-tests")
    stage = Stage(tmp_path)
    yield stage
    stage.close()


CELLS: list[tuple[str, Point, list[str], int, int, str | None]] = [
    ("read", "before_effect", ["read", "read"], 0, 2, "tool"),
    ("charge_once", "before_effect", ["charge_once", "charge_once"], 1, 2, "tool"),
    ("charge_once", "after_effect", ["charge_once", "charge_once"], 1, 2, "tool"),
    ("charge_findable", "before_effect", ["charge_findable", "find", "charge_findable"], 1, 2, "tool"),
    ("charge_findable", "after_effect", ["charge_findable", "find"], 1, 1, "look_up"),
    ("charge", "before_effect", ["charge", "charge"], 1, 2, "tool"),
    ("charge", "after_effect", ["charge"], 1, 1, "person"),
]
"""Tool, where the call is when the daemon dies, all calls that come, effects, attempts, and who told the outcome."""


@pytest.mark.parametrize("together", [False, True], ids=["daemon", "daemon and server"])
@pytest.mark.parametrize(("tool", "point", "calls", "effects", "attempt", "source"), CELLS)
def test_f075_killed_inside_a_call_its_contract_says_what_follows_and_its_effect_happens_once(
    stage: Stage,
    tool: str,
    point: Point,
    calls: list[str],
    effects: int,
    attempt: int,
    source: str | None,
    together: bool,
) -> None:
    stage.server.fault("hang", point)
    with stage.opened(tool) as daemon:
        pid = stage.event("parked")["pid"]
        if together:
            daemon.signal(signal.SIGSTOP)  # so that it does not see the server die
            os.kill(pid, signal.SIGKILL)
        daemon.kill()
    gone(pid)
    with stage.opened(tool) as daemon:
        if tool == "charge":
            assert stage.answer(daemon, tool) == ("happened" if source == "person" else "did_not_happen")
        step = step_of(stage.completed(daemon), f"t.{tool}")
    assert (step["status"], step["attempt"], step["source"]) == ("completed", attempt, source)
    assert stage.seen() == calls
    assert stage.server.effects() == ({tool: effects} if effects else {})
    assert stage.keys(tool) == ({None} if tool == "read" else {step["key"]})


def test_f011_a_server_that_ends_at_nothing_is_gone_soon_after_the_daemon_was_killed(stage: Stage) -> None:
    stage.server.fault("ignore_input_end", "start")
    stage.server.fault("grandchild", "start")
    stage.server.fault("hang", "after_effect")
    with stage.opened("charge") as daemon:
        child = stage.event("grandchild")["child"]
        pid = stage.event("parked")["pid"]
        daemon.kill()
    gone(pid)
    gone(child)
    assert stage.seen() == ["charge"]
    with stage.opened("charge") as daemon:
        assert stage.answer(daemon, "charge") == "happened"
        stage.completed(daemon)
    assert (stage.seen(), stage.server.effects()) == (["charge"], {"charge": 1})


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("schema_change", "The MCP server t has another schema for 'charge' now than when the run began."),
        ("tool_gone", "The MCP server t has no tool 'charge' any more."),
    ],
)
def test_f095_a_tool_that_is_another_one_after_the_kill_is_not_called_and_the_model_is_told(
    stage: Stage, fault: str, why: str
) -> None:
    gone(stage.killed_inside("charge", "before_effect"))
    stage.server.fault(fault, "list")
    with stage.opened("charge") as daemon:
        assert stage.answer(daemon, "charge") == "did_not_happen"
        step = step_of(stage.completed(daemon), "t.charge")
    assert (step["status"], step["error"]) == ("failed", {"kind": "incompatible", "message": why})
    assert (stage.seen(), stage.server.effects()) == (["charge"], {})


def test_f075_f095_a_call_that_cannot_be_sent_again_any_more_is_asked_about_because_it_may_have_happened(
    stage: Stage,
) -> None:
    gone(stage.killed_inside("charge_once", "after_effect"))
    stage.server.fault("schema_change", "list")
    with stage.opened("charge_once") as daemon:
        assert stage.answer(daemon, "charge_once") == "happened"
        step = step_of(stage.completed(daemon), "t.charge_once")
        (unknown,) = [event for event in stage.events(daemon) if event["type"] == "step_unknown"]
    why = "The MCP server t has another schema for 'charge_once' now than when the run began."
    assert (unknown["attempt"], unknown["error"]) == (2, {"kind": "incompatible", "message": why})
    assert (step["status"], step["source"], step["attempt"], "error" in step) == ("completed", "person", 2, False)
    assert (stage.seen(), stage.server.effects()) == (["charge_once"], {"charge_once": 1})


def test_f039_a_key_that_is_said_back_is_in_nothing_that_the_daemon_leaves(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_key, token = "sk-canary-model-0123456789", "canary-mcp-9876543210"
    monkeypatch.setenv("MODEL_KEY", model_key)
    monkeypatch.setenv("T_TOKEN", token)
    read = {"calls": [{"name": "t__read", "arguments": {"operation": "o1"}}]}
    turns = [read, read, {"text": "done"}]
    with ModelServer(stage.folder / "model.log", turns, key=model_key) as endpoint:
        endpoint.fault("echo_key")
        endpoint.fault("echo_key", status=200)
        stage.server.fault("secret", "start")
        stage.server.fault("secret", "after_effect", arg=False)
        model = {"provider": "openai", "baseUrl": endpoint.base_url, "apiKeyEnv": "MODEL_KEY"}
        start = {"clientRequestId": "a", "agent": stage.agent("read", model), "input": "Go."}
        with stage.opened() as daemon:
            with refused("INCOMPATIBLE") as caught:  # the server says its token, and dies
                daemon.call("start", **start)
            stage.run_id = daemon.call("start", **start)["runId"]
            (question,) = daemon.until(stage.run_id, lambda answer: bool(answer["approvals"]))["approvals"]
            daemon.kill()
        with stage.opened() as daemon:
            named = {name: question[name] for name in ("approvalId", "digest")}
            daemon.call("approve", clientRequestId="b", runId=stage.run_id, decision="retry", **named)
            stage.completed(daemon)
            daemon.call("events", runId=stage.run_id, limit=1_000)
            daemon.kill()
        messages = endpoint.calls()[-1].messages
    files = [path for path in (stage.folder / "store").rglob("*") if path.is_file()] + [stage.folder / "daemon.log"]
    left = {path.name: path.read_bytes() for path in files} | {"stdout": stage.heard}
    assert {"LOCK", "daemon.log", "stdout"} < left.keys()
    assert [name for name, raw in left.items() if model_key.encode() in raw or token.encode() in raw] == []
    # It was said, each time, and its name stands where it stood.
    assert caught[0].message.endswith("bad token ${T_TOKEN}")
    assert b"bad token ${T_TOKEN}" in left["daemon.log"]
    assert "MODEL_KEY" in question["subject"]["error"]["message"]
    assert messages[1]["content"] == "Your key is ${MODEL_KEY}, is it not?"
    assert messages[-1]["content"] == "token ${T_TOKEN}"
