"""The walls of the workspace: no path, link, race, store or special file leads `files.*` out of it."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest
from rpcagent.runs.outcomes import Failed, ToolReply
from rpcagent.tools.registry import Registry
from tests.tools.calls import builtin, call, everything_below, failed, ok, request_for, sha

pytestmark = pytest.mark.anyio


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    (tmp_path / "ws").mkdir()
    return tmp_path / "ws"


TOOLS: list[tuple[str, dict[str, Any]]] = [
    ("read", {}),
    ("list", {}),
    ("search", {"pattern": "secret"}),
    ("write", {"content": "mine"}),
    ("edit", {"old": "secret", "new": "mine", "sha256": sha("secret")}),
]
UP = "A path may not contain `..`."
OUTSIDE = "The path is outside of the workspace."
LINK = "is a symbolic link; links are not followed."


@pytest.mark.parametrize(("tool", "arguments"), TOOLS)
@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("../secret", UP),
        ("a/../../secret", UP),
        ("a/..", UP),
        ("{outside}/secret", OUTSIDE),
        ("{workspace}x/secret", OUTSIDE),
        ("{workspace}/../secret", UP),
        ("a\0b", "A path has no NUL and at most 4096 bytes."),
        ("a" * 4_097, "A path has no NUL and at most 4096 bytes."),
        ("\ud800", "The path is not valid Unicode."),
        ("link", f"'link' {LINK}"),
        ("away/secret", f"'away' {LINK}"),
    ],
)
async def test_f041_no_path_leads_out_of_the_workspace(
    workspace: Path, tmp_path: Path, tool: str, arguments: dict[str, Any], path: str, message: str
) -> None:
    (tmp_path / "secret").write_text("secret")
    (workspace / "a").mkdir()
    (workspace / "link").symlink_to(tmp_path / "secret")
    (workspace / "away").symlink_to(tmp_path)
    before = everything_below(tmp_path)
    asked = path.format(outside=tmp_path, workspace=workspace)
    outcome = await call(workspace, tool, path=asked, **arguments)
    assert isinstance(outcome, Failed)
    assert (outcome.error.kind, outcome.error.message) == ("path_refused", message)
    assert everything_below(tmp_path) == before


@pytest.mark.parametrize("name", ["%2e%2e", "CON", "...", "\u202etxt", "a\nb", "-rf"])
async def test_f041_a_strange_name_is_a_name_like_any_other(workspace: Path, tmp_path: Path, name: str) -> None:
    await ok(workspace, "write", path=name, content="x")
    assert everything_below(tmp_path) == {"ws": None, f"ws/{name}": b"x"}


async def test_an_absolute_path_inside_of_the_workspace_is_taken_by_either_of_its_names(
    workspace: Path, tmp_path: Path
) -> None:
    (workspace / "f").write_text("x")
    other = tmp_path / "other"
    other.symlink_to(workspace)
    for path in (other / "f", workspace / "f"):
        assert (await ok(other, "read", path=str(path)))["structuredContent"]["path"] == "f"


async def test_a_directory_swapped_for_a_link_after_it_was_checked_leads_nowhere(
    workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "secret").write_text("secret")
    (workspace / "d").mkdir()
    (workspace / "d/secret").write_text("harmless")
    real = os.open

    def swap_then_open(path: str, flags: int, *args: Any, **more: Any) -> int:
        if path == "secret" and not (workspace / "d").is_symlink():
            (workspace / "d").rename(workspace / "moved")
            (workspace / "d").symlink_to(tmp_path)
        return real(path, flags, *args, **more)

    monkeypatch.setattr(os, "open", swap_then_open)
    assert (await ok(workspace, "read", path="d/secret"))["content"][0]["text"] == "harmless"


@pytest.mark.parametrize(("tool", "arguments"), [t for t in TOOLS if t[0] != "list"])
@pytest.mark.parametrize("kind", ["fifo", "socket", "directory"])
async def test_what_is_no_regular_file_is_refused_without_blocking(
    workspace: Path, tool: str, arguments: dict[str, Any], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(workspace)
    if kind == "fifo":
        os.mkfifo("f")
    elif kind == "directory":
        (workspace / "f").mkdir()
    else:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind("f")
    outcome = await call(workspace, tool, path="f", **arguments)
    if (tool, kind) == ("search", "directory"):
        assert isinstance(outcome, ToolReply)
    else:
        assert outcome == failed("path_refused", "'f' is not a regular file.")


@pytest.mark.parametrize(("tool", "arguments"), TOOLS)
async def test_the_store_is_open_to_no_tool_whether_it_lies_in_the_workspace_or_around_it(
    workspace: Path, tool: str, arguments: dict[str, Any]
) -> None:
    store = workspace / "sub/store"
    (store / "ws").mkdir(parents=True)
    (store / "f").write_text("secret")
    inside = await call(workspace, tool, store=store, path="sub/store/f", **arguments)
    assert inside == failed("path_refused", "The daemon's store is not open to tools.")
    around = await call(store / "ws", tool, store=store, path="f", **arguments)
    assert around == failed("path_refused", "The workspace lies inside of the daemon's store.")
    assert (store / "f").read_text() == "secret"


async def test_the_store_is_neither_listed_nor_searched(workspace: Path) -> None:
    store = workspace / "store"
    store.mkdir()
    (store / "f").write_text("secret")
    listed = await call(workspace, "list", store=store, recursive=True)
    searched = await call(workspace, "search", store=store, pattern="secret")
    assert isinstance(listed, ToolReply)
    assert isinstance(searched, ToolReply)
    assert listed.result["structuredContent"] == {"entries": [], "truncated": False}
    assert searched.result["structuredContent"]["matches"] == []


async def test_without_a_workspace_there_are_no_files(tmp_path: Path) -> None:
    request = request_for(builtin("files.list"), {})
    assert await Registry().call(request) == failed("no_workspace", "This run has no workspace.")
    gone = await call(tmp_path / "gone", "list")
    assert gone == failed("no_workspace", "The workspace is not there, or is no directory.")
