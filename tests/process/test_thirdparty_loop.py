"""The loop over MCP servers of others, with the daemon killed in the middle: what is on disk is the truth in the end.

Run with RPCAGENT_THIRDPARTY=1: it installs programs from the package registries into a temporary folder.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.process.repository import gone
from tests.process.wire_driver import Daemon
from tests.tools import test_mcp_thirdparty as others

pytestmark = [
    pytest.mark.process,
    pytest.mark.thirdparty,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not os.environ.get("RPCAGENT_THIRDPARTY"), reason="installs programs; set RPCAGENT_THIRDPARTY=1"
    ),
]

npm, git_server = others.npm, others.git_server
WAIT_MS = 60_000
Call = tuple[str, dict[str, Any]]


class Loop:
    """One run of a scripted model, driven step by step with the same keys over as many daemons as it takes."""

    def __init__(self, folder: Path, command: list[str], calls: list[Call], **tools: dict[str, Any]) -> None:
        self.folder = folder
        self.command = command
        self.workspace = folder / "workspace"
        self.workspace.mkdir(exist_ok=True)
        turns = [{"calls": [{"tool": f"x.{tool}", "arguments": arguments}]} for tool, arguments in calls]
        self._agent = {
            "model": {"script": [*turns, {"text": "done"}]},
            "tools": ["mcp:x"],
            "mcp": {"x": {"command": command, "trustReadOnly": True, "tools": tools}},
            "policy": {"rules": [{"do": "allow", "tool": "x.*"}]},
        }
        self._steps = 0
        self.run_id = ""

    def opened(self, *rig: str) -> Daemon:
        folder = self.folder
        daemon = Daemon(folder / "store", rig=rig, workspace=self.workspace, log=folder / "daemon.log")
        ident = daemon.send("start", clientRequestId="a", agent=self._agent, input="Go.", drive="manual")
        self.run_id = daemon.result(ident, timeout=60)["runId"]
        return daemon

    def step(self, daemon: Daemon) -> dict[str, Any]:
        """The next step, of the model or of a tool."""
        self._steps += 1
        return self._again(daemon)

    def _again(self, daemon: Daemon) -> dict[str, Any]:
        ident = daemon.send("step", clientRequestId=f"step/{self._steps}", runId=self.run_id, waitMs=WAIT_MS)
        step: dict[str, Any] = daemon.result(ident, timeout=90)["step"]
        return step

    def killed_after_its_reply(self) -> dict[str, Any]:
        """The next step, a call whose effect has happened and is not recorded; and what it becomes in the next daemon."""
        self._steps += 1
        with self.opened("--pause", "after_reply") as daemon:
            daemon.send("step", clientRequestId=f"step/{self._steps}", runId=self.run_id)
            daemon.reports(1)
            servers = self.processes()
            daemon.kill()
        assert servers
        for pid in servers:
            gone(pid)
        with self.opened() as daemon:
            return self._again(daemon)

    def happened(self) -> None:
        """Says so, to the open question about an unknown outcome, and takes the model's next step."""
        with self.opened() as daemon:
            (question,) = daemon.call("status", runId=self.run_id)["approvals"]
            assert question["kind"] == "unknown_outcome"
            named = {name: question[name] for name in ("approvalId", "digest")}
            key = f"truth/{self._steps}"
            daemon.call("approve", clientRequestId=key, runId=self.run_id, decision="happened", **named)

    def processes(self) -> list[int]:
        """Those of the server, launchers included."""
        found = []
        for file in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = file.read_bytes()
            except OSError:
                continue
            if self.command[0].encode() in words and b"rpcagent" not in words:
                found.append(int(file.parent.name))
        return found


def text_of(step: dict[str, Any]) -> str:
    assert step["status"] == "completed", step
    text: str = step["result"]["content"][0]["text"]
    return text


def test_files_are_read_written_and_edited_once_over_two_kills(npm: Path, tmp_path: Path) -> None:
    old, new = tmp_path / "workspace" / "old.txt", tmp_path / "workspace" / "new.txt"
    edits = [{"oldText": "one", "newText": "one and one"}]  # done twice it would show
    calls: list[Call] = [
        ("read_text_file", {"path": str(old)}),
        ("write_file", {"path": str(new), "content": "new\n"}),
        ("edit_file", {"path": str(old), "edits": edits}),
        ("read_text_file", {"path": str(old)}),
    ]
    command = [str(npm / "mcp-server-filesystem"), str(tmp_path / "workspace")]
    loop = Loop(tmp_path, command, calls, write_file={"effect": "idempotent"})
    old.write_text("one\n")
    with loop.opened() as daemon:
        loop.step(daemon)
        assert text_of(loop.step(daemon)) == "one\n"
        loop.step(daemon)
    written = loop.killed_after_its_reply()
    assert (written["name"], written["status"], written["attempt"]) == ("x.write_file", "completed", 2)
    assert new.read_text() == "new\n"
    with loop.opened() as daemon:
        loop.step(daemon)
    edited = loop.killed_after_its_reply()
    assert (edited["name"], edited["status"], edited["attempt"]) == ("x.edit_file", "unknown", 1)
    assert old.read_text() == "one and one\n"
    loop.happened()
    with loop.opened() as daemon:
        loop.step(daemon)
        assert text_of(loop.step(daemon)) == "one and one\n"
        loop.step(daemon)
        assert daemon.call("status", runId=loop.run_id)["run"]["output"] == "done"
    assert (old.read_text(), new.read_text()) == ("one and one\n", "new\n")


def test_a_commit_is_made_once_over_a_kill(git_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    workspace = tmp_path / "workspace"
    at = {"repo_path": str(workspace)}
    calls: list[Call] = [
        ("git_status", at),
        ("git_add", {**at, "files": ["a.txt"]}),
        ("git_commit", {**at, "message": "Add a"}),
        ("git_log", {**at, "max_count": 5}),
    ]
    loop = Loop(tmp_path, [git_server, "--repository", str(workspace)], calls, git_add={"effect": "idempotent"})
    git = _git(workspace)
    git("init", "-q")
    git("config", "user.name", "A. Agent")
    git("config", "user.email", "agent@example.org")
    (workspace / "a.txt").write_text("a\n")
    with loop.opened() as daemon:
        loop.step(daemon)
        assert "a.txt" in text_of(loop.step(daemon))
        loop.step(daemon)
    added = loop.killed_after_its_reply()
    assert (added["name"], added["status"], added["attempt"]) == ("x.git_add", "completed", 2)
    with loop.opened() as daemon:
        loop.step(daemon)
    committed = loop.killed_after_its_reply()
    assert (committed["name"], committed["status"], committed["attempt"]) == ("x.git_commit", "unknown", 1)
    assert git("log", "--format=%s") == "Add a\n"
    loop.happened()
    with loop.opened() as daemon:
        loop.step(daemon)
        assert text_of(loop.step(daemon)).count("Add a") == 1
        loop.step(daemon)
        assert daemon.call("status", runId=loop.run_id)["run"]["output"] == "done"
    assert (git("log", "--format=%s"), git("status", "--short"), git("show", "HEAD:a.txt")) == ("Add a\n", "", "a\n")


def test_what_takes_its_time_and_only_reads_is_run_again_after_a_kill(npm: Path, tmp_path: Path) -> None:
    calls: list[Call] = [
        ("trigger-long-running-operation", {"duration": 1, "steps": 1}),
        ("get-sum", {"a": 2, "b": 3}),
    ]
    loop = Loop(tmp_path, [str(npm / "mcp-server-everything"), "stdio"], calls)
    with loop.opened() as daemon:
        loop.step(daemon)
    waited = loop.killed_after_its_reply()
    assert (waited["effect"], waited["attempt"]) == ("read_only", 2)
    assert "completed" in text_of(waited)
    with loop.opened() as daemon:
        loop.step(daemon)
        assert "5" in text_of(loop.step(daemon))
        loop.step(daemon)
        assert daemon.call("status", runId=loop.run_id)["run"]["output"] == "done"


def _git(workspace: Path) -> Callable[..., str]:
    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=workspace, capture_output=True, text=True, timeout=20, check=True)
        return done.stdout

    return git
