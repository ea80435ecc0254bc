"""From what `start` names to what a run pins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from rpcagent import agents
from rpcagent.agents import Agents
from rpcagent.config import EMPTY, FileConfig
from rpcagent.ids import digest_of
from rpcagent.models.catalog import Catalog
from rpcagent.rpc import wire
from rpcagent.runs.commands import READ_ONLY_COMMANDS
from rpcagent.runs.definition import Budget, Definition
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


# Then and now


CLOSES: dict[str, Any] = {
    "name": "tickets.close",
    "effect": "reconcilable",
    "http": {"method": "POST", "url": "http://127.0.0.1:1/close"},
    "lookup": {"method": "GET", "url": "http://127.0.0.1:1/ticket", "found": "status == 'closed'"},
}
FIXER: dict[str, Any] = {
    "instructions": "Mend it.",
    "model": "main",
    "tools": ["files", "shell", CLOSES],
    "policy": {"rules": [{"do": "ask", "effect": "at_most_once", "expires": "1h"}]},
    "readOnlyCommands": ["default"],
}
FILE: dict[str, Any] = {
    "agents": {"fixer": FIXER},
    "models": {"main": {"provider": "openai", "model": "m", "baseUrl": "http://127.0.0.1:1/v1"}},
    "policy": {"rules": [{"do": "deny", "tool": "files.write"}]},
    "budget": {"steps": 7},
}


def of(**changes: Any) -> Agents:
    """Of the file above, with these changes of its agent `fixer`, or of the whole file where it has the member."""
    file = {**FILE, **{name: value for name, value in changes.items() if name in FILE}}
    fixer = {**FIXER, **{name: value for name, value in changes.items() if name not in FILE}}
    config = msgspec.convert({**file, "agents": {"fixer": fixer}}, FileConfig)
    return Agents(config, Catalog(), Registry())


async def began(made: Agents, agent: Any = "fixer", budget: Budget | None = None, workspace: str = "/") -> Definition:
    return await made.define(wire.StartParams(client_request_id="k", agent=agent, input="", budget=budget), workspace)


@pytest.mark.parametrize("agent", ["fixer", "default"])
async def test_while_the_configuration_is_the_same_an_agent_would_pin_now_what_it_pinned(agent: str) -> None:
    pinned = await began(of(), agent)
    assert of().current(pinned) == digest_of(pinned)


@pytest.mark.parametrize(
    "changes",
    [
        {"instructions": "Mend it well."},
        {"model": {"provider": "scripted"}},
        {"models": {"main": {**FILE["models"]["main"], "timeoutS": 5}}},
        {"tools": ["files", "shell"]},
        {"tools": ["shell", "files", CLOSES]},
        {"tools": ["files", "shell", {**CLOSES, "timeoutMs": 5_000}]},
        {"policy": {"rules": []}},
        {"readOnlyCommands": []},
    ],
)
async def test_each_change_of_an_agent_alone_is_a_difference_s4_77(changes: dict[str, Any]) -> None:
    before, after = await began(of()), await began(of(**changes))
    assert of(**changes).current(before) == of(**changes).current(after) == digest_of(after) != digest_of(before)


async def test_a_budget_is_a_matter_of_the_run_and_no_difference_of_its_agent() -> None:
    made = of()
    for budget in (None, Budget(tokens=5), Budget(cost_usd=1)):
        pinned = await began(made, budget=budget)
        assert made.current(pinned) == of(budget={"steps": 8}).current(pinned) == digest_of(pinned)


@pytest.mark.parametrize(
    "changes",
    [
        {"tools": ["files", "mcp:tickets"]},
        {"instructionFiles": ["AGENTS.md"]},
        {"model": {"scriptFile": "/a/script.json"}},
        {"models": {"main": {"scriptFile": "/a/script.json"}}},
        {"model": "gone"},
        {"tools": ["files", "files.read"]},
    ],
)
async def test_what_the_configuration_alone_does_not_tell_is_not_told_and_nothing_is_read_for_it(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned = await began(of())

    def touched(*_: Any) -> Any:
        raise AssertionError("something outside the configuration was asked for")

    monkeypatch.setattr(Path, "open", touched)
    monkeypatch.setattr(Path, "is_file", touched)
    monkeypatch.setattr(Registry, "resolve_mcp", touched)
    assert of(**changes).current(pinned) is None


async def test_an_agent_that_no_configuration_names_has_nothing_to_be_compared_with() -> None:
    assert of().current(await began(of(), wire.AgentParams())) is None
    assert Agents(EMPTY, Catalog(), Registry()).current(await began(of())) is None


async def test_what_an_agent_would_pin_now_is_worked_out_once_for_all_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    made = of()
    pinned = [await began(made), await began(made, budget=Budget(tokens=5))]
    asked: list[str] = []
    resolve, digest = Registry.resolve, agents.digest_of
    monkeypatch.setattr(Registry, "resolve", lambda *given: [asked.append("tools"), resolve(*given)][1])
    monkeypatch.setattr(agents, "digest_of", lambda given: [asked.append("digest"), digest(given)][1])
    for _ in range(3):
        assert [made.current(one) for one in pinned] == [digest(one) for one in pinned]
    assert asked == ["tools", "digest", "digest"]


async def test_runs_with_many_budgets_do_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agents, "DIGESTS_MOST", 3)
    made = of()
    for tokens in (*range(10), *range(10)):
        pinned = await began(made, budget=Budget(tokens=tokens))
        assert made.current(pinned) == digest_of(pinned)
        assert len(made._digests) <= 3
