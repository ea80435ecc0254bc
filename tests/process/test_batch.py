"""`rpcagent run` and its kin with the real daemon: from start to output, over kill -9, through a pipe and in a terminal."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rpcagent.rpc.results import EventShown, Run, StatusResult

pytestmark = pytest.mark.process

WAIT_S = 60.0
RPCAGENT = [sys.executable, "-P", "-m", "rpcagent"]
LOOKS = {"text": "I look.", "calls": [{"tool": "files.list"}]}
WRITES = {"text": "I write.", "calls": [{"tool": "files.write", "arguments": {"path": "a.txt", "content": "hello\n"}}]}
ALLOWED = {"rules": [{"do": "allow", "tool": "files.*"}]}


class Shell:
    """Runs commands in a real workspace, on a store of their own; every process that is left over is killed."""

    def __init__(self, folder: Path) -> None:
        self.workspace = folder / "workspace"
        self.workspace.mkdir()
        self.store = folder / "store"
        self.folder = folder
        self._started: list[subprocess.Popen[str]] = []

    def agent(self, *turns: dict[str, Any], **members: Any) -> str:
        file = self.folder / "agent.json"
        file.write_text(json.dumps({"name": "writer", "tools": ["files"], "model": {"script": turns}, **members}))
        return f"@{file}"

    def start(self, *words: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*RPCAGENT, *words, "--store", str(self.store)],
            cwd=self.workspace,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._started.append(process)
        return process

    def run(self, *words: str) -> tuple[int, str, str]:
        process = self.start(*words)
        out, err = process.communicate(timeout=WAIT_S)
        return process.returncode, out, err

    def daemon(self) -> int:
        """The process that owns the store."""
        return int(re.findall(r'"pid":\s*(\d+)', (self.store / "LOCK").read_text())[0])

    def close(self) -> None:
        for process in self._started:
            if process.poll() is None:
                process.kill()
            process.communicate(timeout=WAIT_S)


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    shell = Shell(tmp_path)
    yield shell
    shell.close()


def _until(stream: Any, text: str) -> None:
    """Reads lines until one has the text."""
    for line in stream:
        if text in line:
            return
    raise AssertionError(f"{text!r} was never said")


def test_an_agent_works_in_a_real_workspace_and_its_answer_is_all_of_standard_output(shell: Shell) -> None:
    agent = shell.agent(LOOKS, WRITES, {"text": "Written.\nBoth lines."}, policy=ALLOWED)
    code, out, err = shell.run("run", "Write it.", "--agent", agent, "--key", "k")
    assert (code, out) == (0, "Written.\nBoth lines.\n")
    assert (shell.workspace / "a.txt").read_text() == "hello\n"
    words = [line.split()[0] for line in err.splitlines()]
    assert words == ["key", "run", "model", "call", "result", "model", "call", "result", "completed"]
    assert "\x1b" not in err
    # Once more with the same key: the same run, and nothing done again.
    (shell.workspace / "a.txt").unlink()
    assert shell.run("run", "Write it.", "--agent", agent, "--key", "k")[:2] == (0, out)
    assert not (shell.workspace / "a.txt").exists()


def test_json_lines_are_the_documented_types(shell: Shell) -> None:
    agent = shell.agent(LOOKS, {"text": "Done."})
    code, out, err = shell.run("run", "x", "--agent", agent, "--json")
    *events, last = [json.loads(line) for line in out.splitlines()]
    assert (code, err) == (0, "")
    assert [msgspec.convert(event, EventShown).seq for event in events] == list(range(1, len(events) + 1))
    assert msgspec.convert(last["summary"]["run"], Run).output == "Done."
    run_id = last["summary"]["run"]["runId"]
    listed = [msgspec.convert(json.loads(line), Run) for line in shell.run("runs", "--json")[1].splitlines()]
    assert [run.run_id for run in listed] == [run_id]
    assert msgspec.convert(json.loads(shell.run("show", run_id[:12], "--json")[1]), StatusResult).run is not None
    tailed = shell.run("tail", run_id[4:12], "-f", "--json")[1]
    assert [json.loads(line) for line in tailed.splitlines()] == events


def test_a_question_is_left_to_approve_which_goes_on_to_the_end(shell: Shell) -> None:
    agent = shell.agent(WRITES, {"text": "Written."})
    code, out, err = shell.run("run", "Write it.", "--agent", agent)
    assert (code, out) == (3, "")
    assert not (shell.workspace / "a.txt").exists()
    command = next(
        line.split() for line in err.splitlines() if line.startswith("  rpcagent approve") and "allow" in line
    )
    assert "tool_call files.write" in shell.run("runs")[1]
    code, out, err = shell.run(*command[1:-2])
    assert (code, out) == (0, "Written.\n")
    assert (shell.workspace / "a.txt").read_text() == "hello\n"
    # The same answer again is no mistake, another one is.
    assert shell.run(*command[1:-2])[:2] == (0, "Written.\n")
    code, _, err = shell.run("approve", command[2], command[3], "deny")
    assert (code, "ALREADY_DECIDED" in err) == (2, True)


def test_a_denial_is_told_to_the_model_and_the_run_goes_on(shell: Shell) -> None:
    agent = shell.agent(WRITES, {"text": "Not written.", "expect": "not today"})
    shell.run("run", "x", "--agent", agent, "--key", "k")
    code, out, err = shell.run("approve", "k", "1", "deny", "--comment", "not today")
    assert (code, out) == (0, "Not written.\n")
    assert "denied     files.write: a person denied it: not today\n" in err


def test_killed_in_the_middle_and_repeated_with_the_same_key_it_goes_on(shell: Shell) -> None:
    agent = shell.agent(LOOKS, WRITES, {"text": "Written.", "delayMs": 1_500}, policy=ALLOWED)
    words = ("run", "Write it.", "--agent", agent, "--key", "k")
    first = shell.start(*words)
    _until(first.stderr, "a.txt is written")
    daemon = shell.daemon()
    first.kill()
    os.kill(daemon, signal.SIGKILL)
    first.wait(WAIT_S)
    (shell.workspace / "a.txt").write_text("changed since\n")
    code, out, err = shell.run(*words)
    assert (code, out) == (0, "Written.\n")
    assert "began earlier" in err
    assert "reopened   the daemon that was at it had ended" in err
    assert (shell.workspace / "a.txt").read_text() == "changed since\n"


def test_a_daemon_that_is_killed_is_replaced_and_the_command_goes_on(shell: Shell) -> None:
    agent = shell.agent(LOOKS, {"text": "Done.", "delayMs": 1_500})
    process = shell.start("run", "x", "--agent", agent)
    _until(process.stderr, "result ")
    os.kill(shell.daemon(), signal.SIGKILL)
    out, err = process.communicate(timeout=WAIT_S)
    assert (process.returncode, out) == (0, "Done.\n")
    assert "reopened " in err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_says_that_the_run_is_safe_and_how_to_go_on(
    shell: Shell, number: signal.Signals, code: int
) -> None:
    agent = shell.agent(LOOKS, {"text": "Done.", "delayMs": 1_500})
    process = shell.start("run", "x", "--agent", agent, "--key", "k")
    _until(process.stderr, "result ")
    process.send_signal(number)
    out, err = process.communicate(timeout=WAIT_S)
    assert (process.returncode, out) == (code, "")
    assert " is safe: what was done stays recorded. Go on with:\n" in err
    assert f"  rpcagent run --key k --store {shell.store}\n" in err
    assert shell.run("run", "--key", "k")[:2] == (0, "Done.\n")


def test_a_second_interrupt_ends_at_once(shell: Shell) -> None:
    agent = shell.agent(LOOKS, {"text": "Done.", "delayMs": 60_000})
    process = shell.start("run", "x", "--agent", agent, "--key", "k")
    _until(process.stderr, "result ")
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    _until(process.stderr, "rpcagent run --key k")
    process.send_signal(signal.SIGINT)
    assert process.wait(WAIT_S) == 130
    assert time.monotonic() - began < 4  # the daemon's grace time is 5 seconds


def test_a_store_in_use_is_told_with_the_process_that_has_it(shell: Shell) -> None:
    agent = shell.agent({"text": "Done.", "delayMs": 20_000})
    process = shell.start("run", "x", "--agent", agent, "--key", "k")
    _until(process.stderr, "run_")
    code, out, err = shell.run("tail", "k", "-f")
    assert (code, out) == (5, "")
    daemon = shell.daemon()
    assert f"STORE_LOCKED: another daemon (process {daemon} on " in err
    process.kill()
    os.kill(daemon, signal.SIGKILL)


def test_a_time_limit_leaves_a_run_that_can_be_gone_on_with(shell: Shell) -> None:
    agent = shell.agent({"text": "Done.", "delayMs": 60_000})
    code, out, _ = shell.run("run", "x", "--agent", agent, "--key", "k", "--timeout", "0.2")
    assert (code, out) == (4, "")
    code, _, err = shell.run("cancel", "k", "--reason", "enough")
    assert (code, "cancelled" in err) == (0, True)
    assert shell.run("run", "--key", "k")[0] == 1


def test_a_reader_that_has_gone_is_no_error(shell: Shell) -> None:
    shell.run("run", "x", "--agent", shell.agent({"text": "Done."}), "--key", "k")
    process = shell.start("tail", "k")
    assert process.stdout is not None
    process.stdout.close()
    process.stdout = None
    _, err = process.communicate(timeout=WAIT_S)
    assert (process.returncode, err) == (141, "")


class Terminal:
    """A command in a terminal of its own: what it shows, and what is typed."""

    def __init__(self, shell: Shell, *words: str) -> None:
        self._pid, self._fd = pty.fork()
        if self._pid == 0:
            os.chdir(shell.workspace)
            os.environ.update(TERM="xterm", COLUMNS="100")
            os.execv(sys.executable, [*RPCAGENT, *words, "--store", str(shell.store)])
        self.shown = ""
        self._read_to = 0

    def until(self, text: str) -> str:
        """What is shown from the last place to the text. Fails after a time."""
        deadline = time.monotonic() + WAIT_S
        while text not in self.shown[self._read_to :]:
            assert time.monotonic() < deadline, self.shown
            assert self._more(deadline), self.shown
        begin, self._read_to = self._read_to, self.shown.index(text, self._read_to) + len(text)
        return self.shown[begin : self._read_to]

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def end(self) -> int:
        deadline = time.monotonic() + WAIT_S
        while self._more(deadline):
            assert time.monotonic() < deadline, self.shown
        _, status = os.waitpid(self._pid, 0)
        os.close(self._fd)
        return os.waitstatus_to_exitcode(status)

    def _more(self, deadline: float) -> bool:
        ready, _, _ = select.select([self._fd], [], [], max(deadline - time.monotonic(), 0))
        try:
            data = os.read(self._fd, 65_536) if ready else b""
        except OSError:  # Linux says so when the other end is closed
            return False
        self.shown += data.decode().replace("\r\n", "\n")
        return bool(data)


def test_in_a_terminal_the_question_is_asked_and_the_answer_taken(shell: Shell) -> None:
    terminal = Terminal(shell, "run", "Write it.", "--agent", shell.agent(WRITES, {"text": "Written."}))
    asked = terminal.until("\n? ")
    assert "may this tool call run?" in asked
    assert "+hello" in asked
    terminal.type("\n")
    terminal.until("\n? ")
    assert not (shell.workspace / "a.txt").exists()
    terminal.type("d\n")
    assert "sha256:" in terminal.until("\n? ")
    terminal.type("y\n")
    assert terminal.end() == 0
    assert (shell.workspace / "a.txt").read_text() == "hello\n"
    # The answer was streamed, and is not shown twice on one screen.
    assert terminal.shown.count("Written.") == 1
    assert "\x1b[" in terminal.shown


def test_ctrl_c_at_the_question_leaves_it_open(shell: Shell) -> None:
    agent = shell.agent(WRITES, {"text": "Written."})
    terminal = Terminal(shell, "run", "Write it.", "--agent", agent, "--key", "k")
    terminal.until("\n? ")
    terminal.type("\x03")
    assert terminal.end() == 130
    assert f"rpcagent run --key k --store {shell.store}" in terminal.shown
    assert shell.run("approve", "k", "1", "allow")[:2] == (0, "Written.\n")


def test_rich_is_loaded_in_a_terminal_only(shell: Shell) -> None:
    script = (
        "import sys; from rpcagent.cli import main; code = main(sys.argv[1:]); sys.exit(code or 'rich' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", script, "runs", "--store", str(shell.store)],
        cwd=shell.workspace,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "no runs\n")
