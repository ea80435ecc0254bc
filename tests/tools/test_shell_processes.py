"""`shell.run`: nothing of a command is left, whatever it does and whatever becomes of the daemon.

A command shows that it lives by holding a named pipe open: the reader sees its end when the last holder is gone, be it a
child, a grandchild, or in a session of its own.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import anyio
import pytest
from rpcagent.journal.blobs import Blobs
from rpcagent.runs.outcomes import Lost, ToolReply
from rpcagent.runs.ports import ToolRequest
from rpcagent.tools import process as process_module
from rpcagent.tools.shell import Shell
from tests.tools.calls import builtin, request_for
from tests.tools.test_shell import LONGEST_S, outcome_of, run, says

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).parents[2]
HOLD = "exec 9>witness; echo up >&9; "


class Witness:
    """The reading end of a named pipe that a command's processes hold."""

    def __init__(self, workspace: Path) -> None:
        os.mkfifo(workspace / "witness")
        self._end = os.open(workspace / "witness", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self._end, select.POLLIN | select.POLLHUP)

    def up(self) -> bool:
        """Somebody has taken hold of it."""
        return bool(self._poll.poll(LONGEST_S * 1_000)) and os.read(self._end, 3) == b"up\n"

    def gone(self, within_ms: int = 0) -> bool:
        """Nobody holds it any more."""
        while self._poll.poll(within_ms):
            if not os.read(self._end, 4_096):
                return True
        return False

    def close(self) -> None:
        os.close(self._end)


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    (tmp_path / "ws").mkdir()
    return tmp_path / "ws"


@pytest.fixture
def witness(workspace: Path) -> Any:
    witness = Witness(workspace)
    yield witness
    witness.close()


TREES = {
    "itself": "exec sleep 1000",
    "a child": "sleep 1000; true",
    "a child in the background": "sleep 1000 & wait",
    "a pipeline": "sleep 1000 | cat | cat",
    "another session": "setsid -w sleep 1000",
    "another session in the background": "setsid sleep 1000 & wait",
    "a double fork": "(setsid sh -c 'sleep 1000 & sleep 1000' &) ; sleep 1000",
    "many": "for i in 1 2 3 4 5 6 7 8 9; do (setsid sh -c 'sleep 1000 | sleep 1000' &) ; done; sleep 1000",
    "one that is stopped": "kill -STOP $$",
    "one that ignores SIGTERM": "trap '' TERM HUP INT; sleep 1000; while :; do :; done",
    "another session that ignores SIGTERM": "(setsid sh -c \"trap '' TERM; sleep 1000; while :; do :; done\" &) ; sleep 1000",
    "one that starts others when told to end": "trap 'setsid sleep 1000 & setsid sleep 1000 &' TERM; while :; do :; done",
    "one that has closed its output": "exec >&- 2>&-; sleep 1000",
}


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
async def test_f011_at_the_time_limit_nothing_is_left_of_a_command_whatever_it_started(
    workspace: Path, witness: Witness, tree: str
) -> None:
    result = await run(workspace, f"{HOLD}{tree}", timeoutMs=600)
    assert witness.up()
    assert witness.gone()
    assert result["timedOut"] is result["isError"] is True
    assert "stopped at the time limit of 600 ms" in result["notes"]


@pytest.mark.parametrize(
    ("command", "left"),
    [
        ("sleep 1000 & echo done", 1),
        ("sleep 1000 >/dev/null 2>&1 & echo done", 1),
        ("nohup setsid sleep 1000 >/dev/null 2>&1 & echo done", 1),
        ("(sleep 1000 &) ; (setsid sleep 1000 &) ; echo done", 2),
        ("trap '' TERM HUP; sleep 1000 & echo done", 1),
        ("setsid sh -c 'kill -STOP $$' & echo done", 1),
    ],
)
async def test_f098_f099_what_a_command_leaves_in_the_background_neither_holds_the_call_nor_stays(
    workspace: Path, witness: Witness, command: str, left: int
) -> None:
    result = await run(workspace, f"{HOLD}{command}")
    assert witness.gone()
    assert result == {
        "text": "done\n",
        "notes": f"[still running at its end, and stopped: {left}]",
        "exitCode": 0,
        "outputBytes": 5,
        "leftRunning": left,
    }


async def test_f098_what_is_about_to_end_by_itself_may_say_its_last_word(workspace: Path) -> None:
    os.mkfifo(workspace / "go")
    # The background process is let go by the very end of the command: it prints when the command itself is over.
    result = await run(workspace, "(exec 8>&-; cat go; echo last) & exec 8>go; echo first")
    assert (result["text"], "leftRunning" in result) == ("first\nlast\n", False)


async def test_a_command_that_ends_its_own_group_is_ended_by_a_signal(workspace: Path, witness: Witness) -> None:
    result = await run(workspace, f"{HOLD}sleep 1000 & kill -TERM 0; wait")
    assert witness.gone()
    assert result["signal"] == "SIGTERM"


async def test_a_command_that_kills_its_guard_dies_with_it_and_nobody_knows_the_outcome(
    workspace: Path, witness: Witness
) -> None:
    for friendly in ("TERM", "INT", "HUP", "QUIT"):
        assert (await run(workspace, f"kill -{friendly} $PPID; echo here"))["text"] == "here\n"
    outcome = await outcome_of(workspace, command=f"{HOLD}sleep 1000 & kill -KILL $PPID; wait; sleep 1000")
    assert outcome == Lost(reason="crashed")
    assert witness.up()
    assert witness.gone(LONGEST_S * 1_000)


# Limits of time


async def test_the_lower_of_the_two_time_limits_counts(workspace: Path) -> None:
    for limits in ({"timeoutMs": 200}, {"timeoutMs": 60_000, "timeout_ms": 400}):
        outcome = await outcome_of(workspace, command="echo a; exec sleep 1000", **limits)
        assert isinstance(outcome, ToolReply)
        assert outcome.result["content"] == [
            {"type": "text", "text": "a\n"},
            {"type": "text", "text": "[stopped at the time limit of 200 ms; ended by SIGTERM]"},
        ]
        assert outcome.result["structuredContent"]["timedOut"] is True
        assert 200 <= outcome.result["structuredContent"]["durationMs"] < LONGEST_S * 1_000


async def test_a_command_may_clean_up_when_its_time_is_up(workspace: Path) -> None:
    result = await run(workspace, "trap 'echo cleaned; exit 0' TERM; echo a; while :; do :; done", timeoutMs=250)
    assert result == {
        "text": "a\ncleaned\n",
        "notes": "[stopped at the time limit of 250 ms]",
        "exitCode": 0,
        "outputBytes": 10,
        "timedOut": True,
        "isError": True,
    }


# Cancelled


async def cancelled(workspace: Path, command: str) -> tuple[list[object], bool]:
    """What a call reports that is cancelled when its command has first printed something, and whether it was cut."""
    printed = anyio.Event()
    reported: list[object] = []

    def watch(_request: ToolRequest, _piece: bytes) -> None:
        printed.set()

    async def call() -> None:
        request = request_for(builtin("shell.run"), {"command": command}, workspace=str(workspace))
        reported.append(await Shell(progress=watch).call(request))

    with anyio.fail_after(LONGEST_S):
        async with anyio.create_task_group() as group:
            group.start_soon(call)
            await printed.wait()
            group.cancel_scope.cancel()
    return reported, group.cancel_scope.cancelled_caught


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
async def test_a_cancelled_call_ends_its_command_and_lets_the_cancellation_through(
    workspace: Path, witness: Witness, tree: str
) -> None:
    reported, _ = await cancelled(workspace, f"{HOLD}echo a; {tree}")
    assert reported == []
    assert witness.up()
    assert witness.gone()


async def test_a_command_that_had_ended_before_the_cancellation_is_reported(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = "tell(ready=True); tell(started=0x7fffffff); tell(ended=0x300, ms=5, timedOut=False); os.write(1, b'a')"
    says(monkeypatch, workspace, f"{ended}; os.read(0, 1); tell(left=1, remaining=0)")
    reported, _ = await cancelled(workspace, "whatever")
    assert [outcome.result["structuredContent"] for outcome in reported if isinstance(outcome, ToolReply)] == [
        {"exitCode": 3, "durationMs": 5, "outputBytes": 1, "leftRunning": 1}
    ]


async def test_a_guard_that_does_not_answer_is_killed_and_does_not_hold_the_call(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    says(monkeypatch, workspace, "tell(ready=True); os.write(1, b'a'); time.sleep(1000)")
    monkeypatch.setattr(process_module, "STOP_S", 0.1)
    assert await cancelled(workspace, "whatever") == ([], True)
    assert children() == []


# What the daemon keeps, and what it leaves


def children() -> list[str]:
    """The children of this process, dead ones included."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            fields = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == os.getpid():
            found.append(name)
    return found


async def test_a_call_leaves_no_descriptor_no_zombie_and_no_thread(workspace: Path, tmp_path: Path) -> None:
    shell = Shell(blobs=Blobs(tmp_path / "blobs"))
    await outcome_of(workspace, shell, command="head -c 60000 /dev/zero")  # loads what is loaded once
    before = (sorted(os.listdir("/proc/self/fd")), children(), threading.active_count())
    for command, limit_ms in (
        ("echo a", 60_000),
        ("exit 1", 60_000),
        ("yes", 60_000),
        ("head -c 60000 /dev/zero", 60_000),
        ("setsid sleep 1000 &", 60_000),
        ("exec sleep 1000", 50),
        ("exec >&- 2>&-", 60_000),
        ("kill -KILL $PPID", 60_000),
        ("cd nowhere", 60_000),
        ("", 60_000),
    ):
        await outcome_of(workspace, shell, command=command, timeoutMs=limit_ms)
    await outcome_of(workspace, shell, command="true", cwd="nowhere")
    await cancelled(workspace, "echo a; sleep 1000")
    assert (sorted(os.listdir("/proc/self/fd")), children(), threading.active_count()) == before


async def test_many_commands_at_once_keep_apart(workspace: Path) -> None:
    outputs: dict[int, str] = {}

    async def one(number: int) -> None:
        outputs[number] = (await run(workspace, f"echo {number}; echo {number} >&2; cat"))["text"]

    async with anyio.create_task_group() as group:
        for number in range(20):
            group.start_soon(one, number)
    assert outputs == {number: f"{number}\n{number}\n" for number in range(20)}


_DAEMON = """
import sys, anyio
from rpcagent.tools.registry import Registry
from tests.tools.calls import builtin, request_for
request = request_for(builtin("shell.run"), {"command": sys.argv[2]}, workspace=sys.argv[1])
anyio.run(Registry().call, request)
"""


@pytest.mark.parametrize(
    ("tree", "number"),
    [*((tree, signal.SIGKILL) for tree in TREES), *((tree, signal.SIGTERM) for tree in ("itself", "a double fork"))],
)
def test_f011_nothing_of_a_command_outlives_the_daemon_by_more_than_moments(
    workspace: Path, witness: Witness, tree: str, number: signal.Signals
) -> None:
    tree = TREES[tree]
    daemon = subprocess.Popen([sys.executable, "-c", _DAEMON, str(workspace), f"{HOLD}{tree}"], cwd=ROOT)
    try:
        assert witness.up()
    finally:
        daemon.send_signal(number)
        daemon.wait(LONGEST_S)
    assert witness.gone(LONGEST_S * 1_000)
