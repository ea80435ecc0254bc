"""A real task: a small git repository with one failing test, an agent that mends it, and commands that leave a trace.

The commands are the real ones, started through programs of the same name that stand first in PATH. Each appends to a file
outside the repository when it begins and when it has ended, so that what happened can be told without asking the daemon;
and each can be parked, before or after it has done its work, so that the daemon can be killed exactly there.
"""

from __future__ import annotations

import hashlib
import os
import re
import select
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

WAIT_S = 20.0
WRONG = "sum(price for price, count in items)"
RIGHT = "sum(price * count for price, count in items)"
MESSAGE = "Multiply by the count (café, 🍸)"
FILES = {
    ".gitignore": "__pycache__/\n",
    "AGENTS.md": "Run the tests with `python3 -m unittest -q`. One change, one commit.\n",
    "prices/__init__.py": "",
    "prices/total.py": f'"""Totals in cents."""\n\n\ndef total(items):\n    return {WRONG}\n',
    "tests/__init__.py": "",
    "tests/test_total.py": (
        "import unittest\n\nfrom prices.total import total\n\n\n"
        "class TotalTest(unittest.TestCase):\n"
        "    def test_it_counts(self):\n        self.assertEqual(total([(250, 2), (100, 1)]), 600)\n\n"
        "    def test_nothing_costs_nothing(self):\n        self.assertEqual(total([]), 0)\n"
    ),
}
STATUS, LIST, TEST, DIFF = "git status --short", "ls", "python3 -m unittest -q", "git diff"
COMMIT = f'git commit -q -a -m "{MESSAGE}"'
NO_OUTPUT = "[no output; exit code 0]"

_PROGRAM = """\
#!/bin/sh
park() {{
    mv "{folder}/park/$1-{name}${{2:+-$2}}" "{folder}/parked" 2>/dev/null || return 0
    echo $$ > "{folder}/events"
    read -r _ < "{folder}/never"
}}
printf '%s\\n' "begin {name}${{*:+ $*}}" >> "{folder}/trace"
park before "$1"
"{program}" "$@"
code=$?
printf '%s\\n' "end {name}${{*:+ $*}}" >> "{folder}/trace"
park after "$1"
exit $code
"""


class Repository:
    """One copy of the repository, in `folder/workspace`, with its programs, its trace and its parking places."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.workspace = folder / "workspace"
        self._git = shutil.which("git") or pytest.skip("there is no git here")
        for name in ("bin", "park", "home"):
            (folder / name).mkdir(parents=True)
        for name in ("events", "never"):
            os.mkfifo(folder / name)
        self._events = os.open(folder / "events", os.O_RDWR | os.O_NONBLOCK)
        monkeypatch.setenv("HOME", str(folder / "home"))  # no configuration of the person who runs the tests
        for name, text in FILES.items():
            file = self.workspace / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        self.git("init", "-q", "-b", "main")
        for name, value in (("user.name", "A. Agent"), ("user.email", "agent@example.org")):
            self.git("config", name, value)
        self.git("add", "-A")
        self.git("commit", "-q", "-m", "Totals")
        for name, program in (("git", self._git), ("ls", shutil.which("ls")), ("python3", sys.executable)):
            script = folder / "bin" / name
            script.write_text(_PROGRAM.format(folder=folder, name=name, program=program))
            script.chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}")

    def close(self) -> None:
        os.close(self._events)

    def git(self, *words: str) -> str:
        """What the real git says, past the trace."""
        done = subprocess.run(
            [self._git, *words], cwd=self.workspace, capture_output=True, text=True, timeout=WAIT_S, check=True
        )
        return done.stdout

    # Commands that stop where the test wants them

    def park(self, point: str, command: str) -> None:
        """The next command that begins with these words (one, or git and its own) stops `before` or `after` its work."""
        (self.folder / "park" / f"{point}-{command.replace(' ', '-')}").touch()

    def parked(self) -> int:
        """The process that has stopped; waits for it."""
        assert select.select([self._events], [], [], WAIT_S)[0], "no command came to where it was to stop"
        return int(os.read(self._events, 64))

    def trace(self) -> dict[str, tuple[int, int]]:
        """How often each command began, and how often it ended."""
        file = self.folder / "trace"
        lines = Counter(file.read_text().splitlines() if file.exists() else ())
        commands = {line.partition(" ")[2] for line in lines}
        return {command: (lines[f"begin {command}"], lines[f"end {command}"]) for command in commands}

    def truth(self, command: str) -> str:
        """What an honest person answers, who looks: whether the command that was cut off did its work."""
        if command == COMMIT:
            happened = self.git("log", "-1", "--format=%s").strip() == MESSAGE
        else:
            began, ended = self.trace()[command]
            happened = began == ended
        return "happened" if happened else "did_not_happen"

    # What there is in the end

    def result(self) -> dict[str, Any]:
        """All that two copies in which the same was done have in common."""
        names = self.git("ls-files").split()
        done = subprocess.run(
            [sys.executable, "-m", "unittest", "-q"],
            cwd=self.workspace,
            capture_output=True,
            timeout=WAIT_S,
            check=False,
        )
        return {
            "tree": self.git("rev-parse", "HEAD^{tree}"),
            "listing": self.git("ls-tree", "-r", "HEAD"),
            "files": {name: (self.workspace / name).read_bytes() for name in names},
            "messages": self.git("log", "--format=%B"),
            "left over": self.git("status", "--short"),
            "tests pass": done.returncode == 0,
        }


def turns() -> list[dict[str, Any]]:
    """The model's part, for the model server."""
    path = "prices/total.py"
    edit = {
        "path": path,
        "old": WRONG,
        "new": RIGHT,
        "sha256": hashlib.sha256(FILES[path].encode()).hexdigest(),
    }
    look = [_shell(STATUS), _shell(LIST), _read(path), _read("tests/test_total.py")]
    return [
        {"text": "I look around.", "calls": look, "fault": {"name": "fragmented_arguments", "size": 3}},
        {"text": "Now the tests.", "calls": [_shell(TEST)]},
        {
            "text": "It leaves out the count.",
            "calls": [{"name": "files__edit", "arguments": edit}, _shell(TEST)],
            "fault": {"name": "fragmented_arguments", "size": 1},
        },
        {"text": "They pass. What did I change?", "calls": [_shell(DIFF), _shell(STATUS)]},
        {"text": "That is all.", "calls": [_shell(COMMIT)], "fault": {"name": "fragmented_arguments", "size": 5}},
        {"text": "The total counts each item now, and it is committed."},
    ]


def agent(base_url: str) -> dict[str, Any]:
    """It may do everything without being asked about it. Its key is in MODEL_KEY."""
    return {
        "name": "mender",
        "instructions": "You mend programs. Be brief.",
        "instructionFiles": ["AGENTS.md", "NOT_THERE.md"],
        "model": {"provider": "openai", "baseUrl": base_url, "model": "m", "apiKeyEnv": "MODEL_KEY"},
        "tools": ["files", "shell"],
        "policy": {"rules": [{"do": "allow", "tool": "files.*"}, {"do": "allow", "tool": "shell.run"}]},
        "readOnlyCommands": ["default"],
    }


def history(messages: list[dict[str, Any]], workspace: Path) -> list[Any]:
    """What a model was told, without what differs between two copies: ids, the place, and how long tests took."""
    told = []
    for message in messages:
        text = re.sub(r"in \d+\.\d+s", "in TIME", str(message["content"]).replace(str(workspace), "WORKSPACE"))
        asked = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
        told.append((message["role"], text, asked))
    return told


def gone(pid: int) -> None:
    """Returns when the process has ended, whoever's child it is."""
    try:
        watch = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([watch], [], [], WAIT_S)[0], f"{pid} lives on"
    finally:
        os.close(watch)


def _shell(command: str) -> dict[str, Any]:
    return {"name": "shell__run", "arguments": {"command": command}}


def _read(path: str) -> dict[str, Any]:
    return {"name": "files__read", "arguments": {"path": path}}
