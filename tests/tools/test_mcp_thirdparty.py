"""Servers of others through our adapter: what they list, one read, one write. Run with RPCAGENT_THIRDPARTY=1: it installs
programs from the package registries into a temporary folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from rpcagent.runs.effects import ToolSpec
from rpcagent.runs.outcomes import ToolReply
from rpcagent.tools.registry import Registry
from tests.tools.calls import request_for

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.thirdparty,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not os.environ.get("RPCAGENT_THIRDPARTY"), reason="installs programs; set RPCAGENT_THIRDPARTY=1"
    ),
]

INSTALL_S = 300
PACKAGES = ("@modelcontextprotocol/server-filesystem", "@modelcontextprotocol/server-everything")


def installed(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        pytest.skip(f"{command[0]} did not install: {error}")
    if done.returncode:
        pytest.skip(f"{command[0]} did not install: {done.stderr[-500:]}")


@pytest.fixture(scope="module")
def npm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the programs."""
    if shutil.which("npm") is None or shutil.which("node") is None:
        pytest.skip("there is no npm here")
    folder = tmp_path_factory.mktemp("npm")
    installed("npm", "install", "--no-fund", "--no-audit", "--prefix", str(folder), *PACKAGES)
    return folder / "node_modules" / ".bin"


@pytest.fixture(scope="module")
def git_server(tmp_path_factory: pytest.TempPathFactory) -> str:
    if shutil.which("git") is None:
        pytest.skip("there is no git here")
    folder = tmp_path_factory.mktemp("pypi")
    installed(sys.executable, "-m", "venv", str(folder))
    installed(str(folder / "bin" / "pip"), "install", "--quiet", "mcp-server-git")
    return str(folder / "bin" / "mcp-server-git")


@pytest.fixture
async def registry() -> AsyncIterator[Registry]:
    made = Registry(on_fault=lambda error, _request: pytest.fail(repr(error)))
    yield made
    await made.aclose()


async def specs_of(registry: Registry, command: list[str], workspace: Path, **members: Any) -> dict[str, ToolSpec]:
    config = {"command": command, "trustReadOnly": True, **members}
    skipped: list[Any] = []
    specs = await registry.resolve_mcp("x", config, str(workspace), "$.agent.mcp.x", skipped)
    assert skipped == []
    return {spec.name.removeprefix("x."): spec for spec in specs}


async def answer(registry: Registry, spec: ToolSpec, workspace: Path, **arguments: Any) -> dict[str, Any]:
    outcome = await registry.call(request_for(spec, arguments, workspace=str(workspace)))
    assert isinstance(outcome, ToolReply), outcome
    assert "isError" not in outcome.result
    return outcome.result


async def test_the_filesystem_server_reads_and_writes(registry: Registry, npm: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("as it was")
    tools = {"write_file": {"effect": "idempotent"}}
    specs = await specs_of(registry, [str(npm / "mcp-server-filesystem"), "."], tmp_path, tools=tools)
    effects = {name: specs[name].effect for name in ("read_text_file", "write_file", "edit_file", "move_file")}
    assert effects == {
        "read_text_file": "read_only",
        "write_file": "idempotent",
        "edit_file": "at_most_once",
        "move_file": "at_most_once",
    }
    read = await answer(registry, specs["read_text_file"], tmp_path, path=str(tmp_path / "a.txt"))
    assert read["content"][0]["text"] == "as it was"
    await answer(registry, specs["write_file"], tmp_path, path=str(tmp_path / "b.txt"), content="new")
    assert (tmp_path / "b.txt").read_text() == "new"


async def test_the_server_of_everything_is_used_as_far_as_it_has_tools(
    registry: Registry, npm: Path, tmp_path: Path
) -> None:
    specs = await specs_of(registry, [str(npm / "mcp-server-everything"), "stdio"], tmp_path)
    assert len(specs) > 5
    echoed = await answer(registry, specs["echo"], tmp_path, message="hello")
    assert "hello" in echoed["content"][0]["text"]


async def test_the_git_server_reads(registry: Registry, git_server: str, tmp_path: Path) -> None:
    installed("git", "init", "--quiet", str(tmp_path))
    specs = await specs_of(registry, [git_server, "--repository", str(tmp_path)], tmp_path)
    assert {specs["git_status"].effect, specs["git_commit"].effect} == {"read_only", "at_most_once"}
    status = await answer(registry, specs["git_status"], tmp_path, repo_path=str(tmp_path))
    assert "No commits yet" in status["content"][0]["text"]
