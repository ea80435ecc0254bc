"""Long outputs: what is shown of one, what keeps the whole of it, and what a result says of that."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rpcagent.journal.blobs import BYTES_MAX, Blobs
from rpcagent.runs import events as ev
from rpcagent.runs.outcomes import Report, ToolReply, events_of
from rpcagent.tools.shell import Shell
from rpcagent.tools.spill import HEAD_BYTES, OUTPUT_BYTES, TAIL_BYTES, Output
from tests.runs.story import Story, sid
from tests.tools.calls import builtin, request_for, sha

pytestmark = pytest.mark.anyio

MOST = HEAD_BYTES + TAIL_BYTES
LONG = "head -c 50000 /dev/zero; touch done"
ZEROS = sha(bytes(50_000))


class FaultyBlobs:
    """Blobs whose calls of one name fail with `code`."""

    def __init__(self, call: str, code: int) -> None:
        self.call, self.code = call, code
        self.log: list[str] = []
        self.threads: set[int] = set()

    def create(self) -> FaultyBlobs:
        self._do("create")
        return self

    def write(self, data: bytes) -> None:
        self._do("write")

    def keep(self) -> str:
        self.threads.add(threading.get_ident())
        self._do("keep")
        return "digest"

    def drop(self) -> None:
        self.log.append("drop")

    def _do(self, call: str) -> None:
        self.log.append(call)
        if call == self.call:
            raise OSError(self.code, "no")


async def reply(workspace: Path, shell: Shell, command: str = LONG) -> ToolReply:
    os.makedirs(workspace, exist_ok=True)
    outcome = await shell.call(request_for(builtin("shell.run"), {"command": command}, workspace=str(workspace)))
    assert isinstance(outcome, ToolReply)
    return outcome


def notes(outcome: ToolReply) -> list[str]:
    return [part["text"] for part in outcome.result["content"][1:]]


# What a result names


async def test_a_result_names_its_blob_for_the_model_for_programs_and_for_the_store(tmp_path: Path) -> None:
    outcome = await reply(tmp_path / "ws", Shell(blobs=Blobs(tmp_path / "st/blobs")))
    assert outcome.blobs == (ZEROS,)
    assert (tmp_path / "st/blobs" / ZEROS).read_bytes() == bytes(50_000)
    structured = outcome.result["structuredContent"]
    assert (structured["outputFile"], structured["outputSha256"]) == (f"blobs/{ZEROS}", ZEROS)
    marker = f"[cut: this is the head and the tail; the whole output has 50000 bytes, and is kept as blobs/{ZEROS}]"
    assert f"\n{marker}\n" in outcome.result["content"][0]["text"]
    assert str(tmp_path) not in msgspec.json.encode(outcome.result).decode()


async def test_an_output_that_is_shown_whole_has_no_blob_and_writes_nothing(tmp_path: Path) -> None:
    shell = Shell(blobs=Blobs(tmp_path / "blobs"))
    outcome = await reply(tmp_path / "ws", shell, f"head -c {MOST} /dev/zero | tr '\\0' x")
    assert (outcome.blobs, "outputFile" in outcome.result["structuredContent"]) == ((), False)
    assert not (tmp_path / "blobs").exists()


async def test_without_blobs_a_long_output_is_named_by_its_sha256_only(tmp_path: Path) -> None:
    outcome = await reply(tmp_path / "ws", Shell(str(tmp_path / "st")))
    structured = outcome.result["structuredContent"]
    assert (outcome.blobs, structured["outputSha256"], "outputFile" in structured) == ((), ZEROS, False)
    marker = f"[cut: this is the head and the tail; the whole output has 50000 bytes, sha256 {ZEROS}]"
    assert f"\n{marker}\n" in outcome.result["content"][0]["text"]
    assert notes(outcome) == []
    assert os.listdir(tmp_path) == ["ws"]


async def test_two_runs_with_the_same_output_share_one_blob(tmp_path: Path) -> None:
    shell = Shell(blobs=Blobs(tmp_path / "blobs"))
    outcomes = [await reply(tmp_path / name, shell) for name in ("a", "b")]
    assert [each.blobs for each in outcomes] == [(ZEROS,), (ZEROS,)]
    assert os.listdir(tmp_path / "blobs") == [ZEROS]


def test_an_output_that_is_not_kept_leaves_nothing_in_the_folder(tmp_path: Path) -> None:
    blobs = Blobs(tmp_path / "blobs")
    output = Output(blobs)
    output.add(bytes(MOST + 1))
    assert len(os.listdir(tmp_path / "blobs")) == 1
    output.close()
    output.close()
    assert os.listdir(tmp_path / "blobs") == []


# What the event says


def recorded(outcome: ToolReply) -> dict[str, Any]:
    story = Story()
    story.says(1, "t.read")
    (event,) = events_of(story.state, Report(step_id=sid(2), attempt=1, outcome=outcome), story.now)
    assert isinstance(event, ev.ToolCompleted)
    found: dict[str, Any] = msgspec.to_builtins(event)
    return {name: found.get(name) for name in ("type", "result", "blobs")}


def test_the_event_of_a_tools_answer_names_its_blobs_and_is_silent_where_there_are_none() -> None:
    result = {"content": []}
    named = recorded(ToolReply(result=result, blobs=("a" * 64, "b" * 64)))
    assert named == {"type": "tool_completed", "result": result, "blobs": ("a" * 64, "b" * 64)}
    assert recorded(ToolReply(result=result)) == {"type": "tool_completed", "result": result, "blobs": None}


# A disk that fails


@pytest.mark.parametrize(
    ("call", "code", "log"),
    [
        ("create", errno.EMFILE, ["create"]),
        ("write", errno.ENOSPC, ["create", "write", "drop"]),
        ("keep", errno.EIO, ["create", "write", "keep", "drop"]),
    ],
)
async def test_a_whole_output_that_cannot_be_kept_does_not_change_what_the_command_did(
    tmp_path: Path, call: str, code: int, log: list[str]
) -> None:
    blobs = FaultyBlobs(call, code)
    outcome = await reply(tmp_path / "ws", Shell(blobs=blobs))
    structured = outcome.result["structuredContent"]
    assert (structured["exitCode"], structured["outputBytes"], structured["outputSha256"]) == (0, 50_000, ZEROS)
    assert (outcome.blobs, "outputFile" in structured, "isError" in outcome.result) == ((), False, False)
    assert notes(outcome) == [f"[the whole output could not be kept ({errno.errorcode[code]})]"]
    assert f"50000 bytes, sha256 {ZEROS}]" in outcome.result["content"][0]["text"]
    assert (tmp_path / "ws/done").exists()
    assert list(dict.fromkeys(blobs.log)) == log


async def test_a_folder_that_cannot_be_made_costs_the_whole_output_only(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    outcome = await reply(tmp_path / "ws", Shell(blobs=Blobs(tmp_path / "file")))
    assert notes(outcome) == ["[the whole output could not be kept (ENOTDIR)]"]
    assert outcome.result["structuredContent"]["exitCode"] == 0


async def test_the_event_loop_does_not_wait_for_the_disk(tmp_path: Path) -> None:
    blobs = FaultyBlobs("", 0)
    assert (await reply(tmp_path / "ws", Shell(blobs=blobs))).blobs == ("digest",)
    assert len(blobs.threads) == 1
    assert threading.get_ident() not in blobs.threads


def test_the_longest_output_fits_a_blob() -> None:
    assert OUTPUT_BYTES <= BYTES_MAX
