"""`shell.run`: what it answers, what it keeps, and what it refuses before anything runs. Real processes throughout."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import tracemalloc
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
from rpcagent.journal.blobs import Blobs
from rpcagent.runs.outcomes import Failed, Lost, NotDone, ToolReply
from rpcagent.runs.ports import ToolRequest
from rpcagent.tools import process as process_module
from rpcagent.tools import shell as shell_module
from rpcagent.tools.registry import Registry
from rpcagent.tools.results import normalised
from rpcagent.tools.shell import COMMAND_BYTES, Shell
from rpcagent.tools.spill import HEAD_BYTES, OUTPUT_BYTES, TAIL_BYTES
from tests.tools.calls import builtin, failed, request_for, sha

pytestmark = pytest.mark.anyio

LONGEST_S = 30


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    (tmp_path / "ws").mkdir()
    return tmp_path / "ws"


async def outcome_of(
    workspace: Path | None, shell: Shell | None = None, timeout_ms: int | None = None, **arguments: Any
) -> ToolReply | Failed | NotDone | Lost:
    spec = builtin("shell.run")
    if timeout_ms is not None:
        spec = msgspec.structs.replace(spec, timeout_ms=timeout_ms)
    registry = Registry(servers={"shell": shell} if shell else None)
    request = request_for(spec, arguments, workspace=str(workspace) if workspace else None)
    with anyio.fail_after(LONGEST_S):
        return await registry.call(request)


async def run(workspace: Path, command: str, shell: Shell | None = None, **arguments: Any) -> dict[str, Any]:
    """The result, its texts under `text` and `notes`."""
    outcome = await outcome_of(workspace, shell, command=command, **arguments)
    assert isinstance(outcome, ToolReply), outcome
    texts = [part["text"] for part in outcome.result["content"]]
    notes = texts.pop() if texts[-1].startswith("[") and texts[-1].endswith("]") else ""
    structured = outcome.result["structuredContent"]
    assert structured.pop("durationMs") < LONGEST_S * 1_000
    error = {"isError": True} if outcome.result.get("isError") else {}
    return {"text": "".join(texts), "notes": notes, **structured, **error}


def file_at(path: Path) -> tuple[int, int]:
    entry = os.stat(path)
    return entry.st_size, stat.S_IMODE(entry.st_mode)


def content_of(path: Path) -> bytes:
    return path.read_bytes()


def keeping(store: Path) -> Shell:
    """A shell whose whole outputs are kept in `store`."""
    return Shell(blobs=Blobs(store / "blobs"))


# What it says


async def test_the_output_of_a_command_and_its_end_are_the_result(workspace: Path) -> None:
    assert await outcome_of(workspace, command="echo a; echo b >&2; printf c") == ToolReply(
        result={
            "content": [{"type": "text", "text": "a\nb\nc"}],
            "structuredContent": {"exitCode": 0, "durationMs": pytest.approx(5_000, abs=5_000), "outputBytes": 5},
        }
    )


async def test_an_exit_code_other_than_zero_is_an_error_and_an_answer(workspace: Path) -> None:
    assert await run(workspace, "echo a; exit 3") == {
        "text": "a\n",
        "notes": "[exit code 3]",
        "exitCode": 3,
        "outputBytes": 2,
        "isError": True,
    }


@pytest.mark.parametrize(("name", "code"), [("TERM", 143), ("KILL", 137), ("SEGV", 139), ("PIPE", 141), ("INT", 130)])
async def test_a_command_ended_by_a_signal_names_it(workspace: Path, name: str, code: int) -> None:
    assert await run(workspace, f"ulimit -c 0; echo a; kill -{name} $$; echo b") == {
        "text": "a\n",
        "notes": f"[ended by SIG{name}]",
        "exitCode": code,
        "signal": f"SIG{name}",
        "outputBytes": 2,
        "isError": True,
    }


async def test_a_command_that_says_nothing_has_a_text_all_the_same(workspace: Path) -> None:
    assert await run(workspace, "true") == {
        "text": "",
        "notes": "[no output; exit code 0]",
        "exitCode": 0,
        "outputBytes": 0,
    }


async def test_a_command_that_closes_its_output_early_is_still_waited_for(workspace: Path) -> None:
    result = await run(workspace, "echo a; exec >&- 2>&-; cat /dev/zero | head -c 30000000 >f; exit 4")
    assert (result["text"], result["exitCode"]) == ("a\n", 4)
    assert (workspace / "f").stat().st_size == 30_000_000


async def test_control_characters_are_kept_and_what_is_no_utf8_is_replaced(workspace: Path) -> None:
    result = await run(workspace, r"printf '\033[1mgr\303\274n\033[0m \377 \000 \r\n'")
    assert result["text"] == "\x1b[1mgrün\x1b[0m \ufffd \0 \r\n"


async def test_output_comes_to_whoever_watches_as_it_is_printed(workspace: Path) -> None:
    pieces: list[bytes] = []
    seen: list[ToolRequest] = []

    def watch(request: ToolRequest, piece: bytes) -> None:
        seen.append(request)
        pieces.append(piece)
        (workspace / "seen").touch()

    # The command goes on only when its first word has been seen.
    waits = "echo first; while [ ! -e seen ]; do :; done; echo second"
    result = await run(workspace, waits, Shell(progress=watch))
    assert b"".join(pieces) == result["text"].encode() == b"first\nsecond\n"
    assert pieces[0] == b"first\n"
    assert {request.step_id for request in seen} == {"stp_a_1"}


# What it gets


async def test_f008_a_command_that_reads_its_input_gets_its_end_at_once(workspace: Path) -> None:
    assert (await run(workspace, "cat; read x || echo end"))["text"] == "end\n"


async def test_f007_what_a_command_prints_to_any_of_its_descriptors_reaches_nobody_else(
    workspace: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    result = await run(workspace, "echo a; echo b >&2; echo c >/proc/self/fd/1; echo d 2>/dev/null >/dev/tty || echo e")
    assert "a\nb\nc\n" in result["text"]
    assert result["text"].endswith("e\n")
    assert capfd.readouterr() == ("", "")


async def test_f010_a_command_inherits_no_descriptor_but_its_output(workspace: Path) -> None:
    read, write = os.pipe()
    try:
        os.set_inheritable(write, True)
        result = await run(workspace, "for f in /proc/$$/fd/*; do readlink $f; done")
    finally:
        os.close(read)
        os.close(write)
    null, out, error = result["text"].split()[:3]
    assert null == "/dev/null"
    assert out == error
    assert [line for line in result["text"].split() if line.startswith(("pipe", "socket"))] == [out, out]


async def test_a_command_leads_a_session_and_a_group_of_its_own_and_no_signal_is_ignored_in_it(workspace: Path) -> None:
    own = await run(
        workspace, "read -r pid comm state parent group session rest </proc/$$/stat; echo $pid $group $session"
    )
    assert len(set(own["text"].split())) == 1
    assert own["text"].split()[0] != str(os.getsid(0))
    signals = await run(workspace, "exec grep -E 'Sig(Blk|Ign)' /proc/self/status")
    assert {line.split()[1] for line in signals["text"].splitlines()} == {"0" * 16}


async def test_a_command_starts_in_the_workspace_or_in_a_directory_below(workspace: Path) -> None:
    (workspace / "a/b").mkdir(parents=True)
    assert (await run(workspace, "pwd"))["text"] == f"{workspace}\n"
    assert (await run(workspace, "pwd", cwd="./a//b"))["text"] == f"{workspace}/a/b\n"


async def test_f039_no_key_in_the_environment_of_the_daemon_reaches_a_command(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY", "RPCAGENT_STORE", "MY_NAME", "http_proxy", "LD_PRELOAD_X"):
        monkeypatch.setenv(name, "canary")
    monkeypatch.setenv("LC_TIME", "C")
    plain = await run(workspace, "env")
    assert "canary" not in plain["text"]
    names = {line.partition("=")[0] for line in plain["text"].splitlines()}
    assert {"PATH", "TERM", "LC_TIME"} <= names
    assert names <= {*shell_module.ENVIRONMENT, "TERM", "LC_TIME", "LC_CTYPE", "LC_ALL", "PWD", "OLDPWD", "SHLVL", "_"}
    listed = await run(workspace, "echo $MY_NAME $TERM", Shell(environment=("MY_NAME", "NOT_THERE")))
    assert listed["text"] == "canary dumb\n"


# Large outputs


async def test_f045_of_a_giant_output_the_ends_are_shown_and_the_command_is_stopped_at_the_limit(
    workspace: Path, tmp_path: Path
) -> None:
    tracemalloc.start()
    try:
        result = await run(workspace, "head -c 300000000 /dev/zero | tr '\\0' '\\n'", keeping(tmp_path))
        assert tracemalloc.get_traced_memory()[1] < 4 * 1024 * 1024
    finally:
        tracemalloc.stop()
    assert result["outputBytes"] == OUTPUT_BYTES
    assert result["outputLimitReached"] is result["truncated"] is result["isError"] is True
    assert result["notes"].startswith(f"[stopped at the output limit of {OUTPUT_BYTES} bytes")
    assert result["outputSha256"] == sha(b"\n" * OUTPUT_BYTES)
    assert result["outputFile"] == f"blobs/{result['outputSha256']}"
    assert file_at(tmp_path / result["outputFile"]) == (OUTPUT_BYTES, 0o600)
    assert sha(content_of(tmp_path / result["outputFile"])) == result["outputSha256"]


async def test_f045_an_endless_output_ends(workspace: Path) -> None:
    result = await run(workspace, "trap '' PIPE TERM; yes & while :; do echo x; done", timeoutMs=20_000)
    assert result["outputLimitReached"]
    assert "timedOut" not in result
    assert "outputFile" not in result


async def test_f045_fifty_megabytes_without_a_line_end_are_kept_whole_in_bounded_memory(
    workspace: Path, tmp_path: Path
) -> None:
    tracemalloc.start()
    try:
        result = await run(
            workspace,
            "printf 'begin '; head -c 50000000 /dev/zero | tr '\\0' x; printf ' end'",
            keeping(tmp_path),
        )
        assert tracemalloc.get_traced_memory()[1] < 4 * 1024 * 1024
    finally:
        tracemalloc.stop()
    assert (result["exitCode"], result["outputBytes"], result["notes"]) == (0, 50_000_010, "")
    text = result["text"]
    file = f"blobs/{result['outputSha256']}"
    marker = f"[cut: this is the head and the tail; the whole output has 50000010 bytes, and is kept as {file}]"
    head, middle, tail = text.partition(f"\n{marker}\n")
    assert middle
    assert (head, tail) == ("begin " + "x" * (HEAD_BYTES - 6), "x" * (TAIL_BYTES - 4) + " end")
    assert result["outputFile"] == file
    assert file_at(tmp_path / file) == (50_000_010, 0o600)
    assert sha(content_of(tmp_path / file)) == result["outputSha256"]


async def test_an_output_as_long_as_head_and_tail_is_shown_whole_and_one_byte_more_is_not(workspace: Path) -> None:
    most = HEAD_BYTES + TAIL_BYTES
    whole = await run(workspace, f"head -c {most} /dev/zero | tr '\\0' x")
    assert (whole["text"], "truncated" in whole) == ("x" * most, False)
    cut = await run(workspace, f"head -c {most + 1} /dev/zero | tr '\\0' x")
    assert (cut["text"].count("x"), cut["truncated"]) == (most, True)


@pytest.mark.parametrize("shift", range(4))
@pytest.mark.parametrize("character", ["é", "€", "𝄞"])
async def test_f045_a_character_that_the_cut_goes_through_is_left_out(
    workspace: Path, character: str, shift: int
) -> None:
    (workspace / "f").write_text("x" * shift + character * 40_000, encoding="utf-8")
    text = (await run(workspace, "cat f"))["text"]
    assert "\ufffd" not in text
    assert set(text.partition("\n[cut: ")[0]) <= {"x", character}


@pytest.mark.parametrize("octal", ["\\001", "\\377", "\\033"])
async def test_an_output_that_grows_when_it_is_written_down_is_cut_to_fit_a_result(
    workspace: Path, tmp_path: Path, octal: str
) -> None:
    outcome = await outcome_of(
        workspace, keeping(tmp_path), command=f"head -c 48000 /dev/zero | tr '\\0' '{octal}'; exit 1"
    )
    assert isinstance(outcome, ToolReply)
    assert normalised(outcome.result) == outcome.result
    assert outcome.result["content"][1]["text"] == "[exit code 1]"
    structured = outcome.result["structuredContent"]
    assert structured["truncated"] is True
    assert content_of(tmp_path / structured["outputFile"]) == bytes([int(octal[1:], 8)]) * 48_000


# What is refused, and what did not happen


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"command": ""}, "invalid_arguments", "The command is empty."),
        ({"command": " \n\t"}, "invalid_arguments", "The command is empty."),
        ({"command": "touch f\0"}, "invalid_arguments", "A command has no NUL."),
        ({"command": "touch f; \ud800"}, "invalid_arguments", "The command is not valid Unicode."),
        (
            {"command": "touch f #" + "é" * (COMMAND_BYTES // 2)},
            "invalid_arguments",
            f"A command has at most {COMMAND_BYTES} bytes; write a script.",
        ),
        ({}, "invalid_arguments", "Object missing required field `command`"),
        ({"command": ["touch", "f"]}, "invalid_arguments", "Expected `str`, got `array` - at `$.command`"),
        ({"command": "touch f", "input": "x"}, "invalid_arguments", "Object contains unknown field `input`"),
        ({"command": "touch f", "timeoutMs": 0}, "invalid_arguments", "Expected `int` >= 1 - at `$.timeoutMs`"),
        (
            {"command": "touch f", "timeoutMs": 600_001},
            "invalid_arguments",
            "Expected `int` <= 600000 - at `$.timeoutMs`",
        ),
        ({"command": "touch f", "cwd": "gone"}, "not_found", "There is no directory 'gone'."),
        ({"command": "touch f", "cwd": ".."}, "path_refused", "A path may not contain `..`."),
        ({"command": "touch f", "cwd": "/etc"}, "path_refused", "The path is outside of the workspace."),
        ({"command": "touch f", "cwd": "a\0b"}, "path_refused", "A path has no NUL and at most 4096 bytes."),
        ({"command": "touch f", "cwd": "file"}, "path_refused", "'file' is not a directory."),
        ({"command": "touch f", "cwd": "link"}, "path_refused", "'link' is a symbolic link; links are not followed."),
    ],
)
async def test_a_command_that_cannot_be_run_as_asked_is_refused_before_anything_runs(
    workspace: Path, arguments: dict[str, Any], kind: str, message: str
) -> None:
    (workspace / "file").touch()
    (workspace / "link").symlink_to("/")
    assert await outcome_of(workspace, **arguments) == failed(kind, message)
    assert not (workspace / "f").exists()


async def test_without_a_workspace_or_inside_of_the_store_nothing_runs(workspace: Path) -> None:
    assert await outcome_of(None, command="true") == failed("no_workspace", "This run has no workspace.")
    assert await outcome_of(workspace, Shell(str(workspace)), command="true") == failed(
        "path_refused", "The workspace lies inside of the daemon's store."
    )
    os.rmdir(workspace)
    assert await outcome_of(workspace, command="true") == failed(
        "no_workspace", "The workspace is not there, or is no directory."
    )


async def test_the_longest_command_runs_whatever_it_begins_with(workspace: Path) -> None:
    assert (await run(workspace, "echo " + "x" * (COMMAND_BYTES - 5)))["outputBytes"] == COMMAND_BYTES - 4
    assert (await run(workspace, "-e"))["exitCode"] == 127
    assert (await run(workspace, "+x"))["exitCode"] == 127


@pytest.mark.parametrize(
    ("number", "sort"),
    [(errno.EAGAIN, NotDone), (errno.ENOMEM, NotDone), (errno.E2BIG, Failed), (errno.EACCES, Failed)],
)
async def test_a_process_that_could_not_be_started_did_nothing(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, number: int, sort: type[NotDone | Failed]
) -> None:
    def refuse(*_args: Any, **_options: Any) -> None:
        raise OSError(number, "no")

    before = os.listdir("/proc/self/fd")
    monkeypatch.setattr(subprocess, "Popen", refuse)
    outcome = await outcome_of(workspace, command="true")
    assert isinstance(outcome, sort)
    assert outcome.error.kind == "not_started"
    assert os.listdir("/proc/self/fd") == before

    # The same from within the guard, after it was started and before the command was.
    monkeypatch.undo()
    says(monkeypatch, workspace, f"tell(ready=True); tell(errno={number})")
    assert isinstance(await outcome_of(workspace, command="true"), sort)


async def test_an_environment_that_is_too_large_and_a_shell_that_is_not_there_are_failures(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LARGE", "x" * 200_000)
    outcome = await outcome_of(workspace, Shell(environment=("LARGE",)), command="true")
    assert outcome == failed("not_started", "The command could not be started: Argument list too long.")
    monkeypatch.setattr(shell_module, "SHELL", "/nowhere/sh")
    outcome = await outcome_of(workspace, command="true")
    assert outcome == failed("not_started", "The command could not be started: No such file or directory.")


@pytest.mark.parametrize(
    ("said", "expected"),
    [("pass", NotDone), ("tell(ready=True)", Lost), ("tell(ready=True); tell(started=0x7fffffff)", Lost)],
)
async def test_a_guard_that_dies_has_not_run_the_command_only_where_it_had_not_begun_to(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, said: str, expected: type
) -> None:
    says(monkeypatch, workspace, said)
    assert isinstance(await outcome_of(workspace, command="true"), expected)


def says(monkeypatch: pytest.MonkeyPatch, folder: Path, program: str) -> None:
    """Puts a program of the test's own in the place of the guard."""
    guard = folder.parent / "guard_of_a_test.py"
    guard.write_text(
        "import json, os, time\n"
        "def tell(**said):\n    os.write(0, json.dumps(said).encode() + b'\\n')\n" + program.replace("; ", "\n") + "\n"
    )
    monkeypatch.setattr(process_module, "_GUARD", str(guard))
