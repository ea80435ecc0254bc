"""From what `start` names to what a run pins."""

from __future__ import annotations

import pytest
from rpcagent.agents import Agents
from rpcagent.config import EMPTY
from rpcagent.models.catalog import Catalog
from rpcagent.rpc import wire
from rpcagent.runs.commands import READ_ONLY_COMMANDS
from rpcagent.runs.definition import Definition
from rpcagent.tools.registry import Registry

pytestmark = pytest.mark.anyio


async def pinned(*commands: str) -> Definition:
    agents = Agents(EMPTY, Catalog(), Registry())
    agent = wire.AgentParams(tools=("shell",), read_only_commands=commands)
    return await agents.define(wire.StartParams(client_request_id="k", agent=agent, input=""), "/")


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        ((), ()),
        (("npm ls",), ("npm ls",)),
        (("default",), READ_ONLY_COMMANDS),
        (("npm ls", "default", "pytest"), ("npm ls", *READ_ONLY_COMMANDS, "pytest")),
    ],
)
async def test_default_among_the_read_only_commands_is_pinned_as_what_it_stands_for(
    named: tuple[str, ...], expected: tuple[str, ...]
) -> None:
    assert (await pinned(*named)).read_only_commands == expected


async def test_a_command_of_the_default_list_only_reads_and_any_other_may_do_anything() -> None:
    definition = await pinned("default")
    effects = {c: definition.effect_of("shell.run", {"command": c}) for c in ("git status", "git commit", "default")}
    assert effects == {"git status": "read_only", "git commit": "at_most_once", "default": "at_most_once"}
