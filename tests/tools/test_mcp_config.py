"""What a configuration may say about an MCP server, and how the server's own claims are weighed against it."""

from __future__ import annotations

from typing import Any

import pytest
from rpcagent.errors import InvalidParams
from rpcagent.runs.effects import ToolSpec
from rpcagent.tools.mcp_config import Offer, Skipped, filled, offer, schema_hash, server_config, tool_name

PATH = "$.agent.mcp.tickets"
COMMAND = {"command": ["python", "server.py"]}
SCHEMA = {"type": "object", "properties": {"id": {"type": "string"}}}
LOOKUP = {"tool": "get_ticket", "arguments": {"id": "{id}"}, "found": "status == 'closed'"}
CLOSE = {"name": "close_ticket", "inputSchema": SCHEMA}
GET = {"name": "get_ticket", "inputSchema": SCHEMA}


def offered(has: list[dict[str, Any]], /, **members: Any) -> Offer:
    return offer("tickets", server_config("tickets", {**COMMAND, **members}, PATH), has, PATH)


def effect_of(annotations: Any, *, trust: bool = False, **declared: Any) -> str:
    config = {"tools": {"close_ticket": declared}} if declared else {}
    (spec,) = offered([{**CLOSE, "annotations": annotations}], trustReadOnly=trust, **config).specs
    return spec.effect


# What it may say

REFUSED: list[tuple[Any, str, str]] = [
    (7, "", "Expected `object`, got `int`"),
    ({}, "", "Object missing required field `command`"),
    ({"command": "python"}, ".command", "Expected `array`, got `str`"),
    ({"command": []}, ".command", "a program and its arguments, none of them empty"),
    ({"command": ["a", ""]}, ".command", "a program and its arguments, none of them empty"),
    ({"command": ["a\0"]}, ".command", "a program and its arguments, none of them empty"),
    ({**COMMAND, "url": "x"}, "", "Object contains unknown field `url`"),
    ({**COMMAND, "env": {"A B": "x"}}, ".env.A B", "this can be no variable of an environment"),
    ({**COMMAND, "env": {"A": "\0"}}, ".env.A", "this can be no variable of an environment"),
    ({**COMMAND, "env": {"A": 1}}, ".env[...]", "Expected `str`, got `int`"),
    ({**COMMAND, "timeoutS": 0}, ".timeoutS", "above 0, at most 3600"),
    ({**COMMAND, "timeoutS": 1e300}, ".timeoutS", "above 0, at most 3600"),
    ({**COMMAND, "timeoutS": "1"}, ".timeoutS", "Expected `float`, got `str`"),
]
TOOLS_REFUSED: list[tuple[Any, str, str]] = [
    (7, "", "Expected `object`, got `int`"),
    ({"effect": "safe"}, ".effect", "Invalid enum value 'safe'"),
    ({"efect": "read_only"}, "", "Object contains unknown field `efect`"),
    ({"effect": "reconcilable"}, ".lookup", "a reconcilable tool has a look-up"),
    ({"effect": "idempotent", "lookup": LOOKUP}, ".lookup", "only a reconcilable tool is looked up"),
    (
        {"effect": "reconcilable", "lookup": {**LOOKUP, "found": "=="}},
        ".lookup.found",
        "this is no JMESPath expression",
    ),
    ({"effect": "reconcilable", "lookup": {"tool": "x"}}, ".lookup", "Object missing required field `found`"),
    ({"effect": "reconcilable", "lookup": {**LOOKUP, "url": "x"}}, ".lookup", "Object contains unknown field `url`"),
    ({"effect": "read_only", "keyArgument": "id"}, ".keyArgument", "a tool that only reads gets no key"),
    ({"keyTtlMs": 5}, ".keyTtlMs", "only an idempotent tool has keyTtlMs"),
    ({"effect": "idempotent", "keyTtlMs": 0}, ".keyTtlMs", "1 to 315360000000"),
    ({"effect": "idempotent", "keyTtlMs": 10**17}, ".keyTtlMs", "1 to 315360000000"),
    ({"settleMs": -1}, ".settleMs", "0 to 315360000000"),
    ({"settleMs": 10**17}, ".settleMs", "0 to 315360000000"),
    ({"timeoutMs": 10**17}, ".timeoutMs", "1 to 3600000"),
    ({"timeoutMs": 0}, ".timeoutMs", "1 to 3600000"),
]


@pytest.mark.parametrize(("value", "where", "reason"), REFUSED)
def test_a_configuration_is_refused_with_the_member_at_fault(value: Any, where: str, reason: str) -> None:
    with pytest.raises(InvalidParams) as refused:
        server_config("tickets", value, PATH)
    assert refused.value.details == {"path": PATH + where, "reason": reason}


@pytest.mark.parametrize(("value", "where", "reason"), TOOLS_REFUSED)
def test_a_tool_of_it_is_refused_with_the_member_at_fault(value: Any, where: str, reason: str) -> None:
    with pytest.raises(InvalidParams) as refused:
        server_config("tickets", {**COMMAND, "tools": {"close_ticket": value}}, PATH)
    assert refused.value.details == {"path": f"{PATH}.tools.close_ticket{where}", "reason": reason}


@pytest.mark.parametrize("name", ["", "a.b", "a b", "x" * 41])
def test_a_server_has_a_name_that_tools_can_carry(name: str) -> None:
    with pytest.raises(InvalidParams):
        server_config(name, COMMAND, PATH)


DISAGREE: list[tuple[dict[str, Any], str, str]] = [
    ({"shut_ticket": {}}, ".tools.shut_ticket", "the server has no such tool; it has: close_ticket, get_ticket"),
    (
        {"close_ticket": {"effect": "idempotent", "keyArgument": "key"}},
        ".tools.close_ticket.keyArgument",
        "'key' is none of the tool's parameters",
    ),
    (
        {"close_ticket": {"effect": "reconcilable", "lookup": {**LOOKUP, "tool": "find"}}},
        ".tools.close_ticket.lookup.tool",
        "the server has no tool 'find'",
    ),
    (
        {"close_ticket": {"effect": "reconcilable", "lookup": {**LOOKUP, "arguments": {"a": ["{number}"]}}}},
        ".tools.close_ticket.lookup.arguments",
        "{number} is none of the tool's parameters",
    ),
    (
        {"close_ticket": {"effect": "reconcilable", "lookup": LOOKUP}, "get_ticket": {"effect": "at_most_once"}},
        ".tools.close_ticket.lookup.tool",
        "a look-up reads only, and 'get_ticket' is at_most_once",
    ),
]


@pytest.mark.parametrize(("tools", "where", "reason"), DISAGREE)
def test_what_the_server_does_not_have_is_refused_before_a_run_begins(
    tools: dict[str, Any], where: str, reason: str
) -> None:
    with pytest.raises(InvalidParams) as refused:
        offered([CLOSE, GET], tools=tools)
    assert refused.value.details == {"path": PATH + where, "reason": reason}


# What comes out


def test_a_spec_carries_all_that_a_later_process_needs() -> None:
    env = {"TOKEN": "${TICKETS_TOKEN}"}
    tools = {
        "close_ticket": {"effect": "reconcilable", "lookup": LOOKUP, "settleMs": 5, "timeoutMs": 7},
        "get_ticket": {"effect": "read_only", "hidden": True},
    }
    (spec,) = offered([{**CLOSE, "description": "d"}, GET], env=env, timeoutS=2.5, tools=tools).specs
    assert spec == ToolSpec(
        name="tickets.close_ticket",
        description="d",
        parameters=SCHEMA,
        effect="reconcilable",
        settle_ms=5,
        timeout_ms=7,
        binding={
            "mcp": {
                "server": "tickets",
                "command": ["python", "server.py"],
                "env": env,
                "tool": "close_ticket",
                "schemaHash": schema_hash(CLOSE),
                "lookup": LOOKUP,
            }
        },
    )


def test_the_key_is_ours_to_fill_so_the_model_is_not_told_of_it() -> None:
    schema = {**SCHEMA, "properties": {"id": {}, "key": {}}, "required": ["id", "key"]}
    tools = {"close_ticket": {"effect": "idempotent", "keyArgument": "key", "keyTtlMs": 9}}
    (spec,) = offered([{**CLOSE, "inputSchema": schema}], tools=tools, timeoutS=2.5).specs
    assert spec.parameters == {"type": "object", "properties": {"id": {}}, "required": ["id"]}
    assert (spec.effect, spec.key_ttl_ms, spec.timeout_ms) == ("idempotent", 9, 2_500)
    assert spec.binding["mcp"]["keyArgument"] == "key"
    assert spec.binding["mcp"]["schemaHash"] == schema_hash({"inputSchema": schema})


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "object", "oneOf": []}, "providers refuse oneOf at the root of a schema"),
        ({"type": "object", "$ref": "#"}, "providers refuse $ref at the root of a schema"),
        ({"type": "string"}, "its input schema is not of type object"),
        ({}, "its input schema is not of type object"),
        (None, "its input schema is not of type object"),
        ({"type": "object", "properties": []}, "its properties are no object"),
        ({"type": "object", "title": "x" * 65_536}, "its schema has more than 65536 bytes"),
    ],
)
def test_f059_a_tool_that_providers_would_refuse_is_left_out_by_name_and_the_others_stay(
    schema: Any, reason: str
) -> None:
    said = offered([{"name": "odd", "inputSchema": schema}, GET])
    assert [spec.name for spec in said.specs] == ["tickets.get_ticket"]
    assert said.skipped == (Skipped(tool="tickets.odd", reason=reason),)


@pytest.mark.parametrize(
    ("server", "tool", "name"),
    [
        ("t", "get_ticket", "t.get_ticket"),
        ("t", "get ticket", "t.get_ticket_61eb230d"),
        ("t", "get.ticket", "t.get_ticket_57891735"),
        ("t", "x" * 60, "t." + "x" * 60),
        ("t", "x" * 61, "t." + "x" * 51 + "_" + "c508e75f"),
        ("s" * 40, "x" * 22, "s" * 40 + "." + "x" * 22),
        ("s" * 40, "x" * 23, "s" * 40 + "." + "x" * 13 + "_" + "564b146b"),
    ],
)
def test_f059_names_that_providers_refuse_become_ones_that_fit_and_stay_apart(
    server: str, tool: str, name: str
) -> None:
    assert tool_name(server, tool) == name
    assert len(name) + 1 <= 64


def test_a_looked_up_argument_keeps_its_type_and_a_text_around_it_makes_a_text() -> None:
    template = {"id": "{id}", "q": ["key:{key} id:{id}", 7, None], "n": {"x": "{list}"}}
    assert filled(template, {"id": 5, "list": [1], "key": "forged"}, "key_a") == {
        "id": 5,
        "q": ["key:key_a id:5", 7, None],
        "n": {"x": [1]},
    }
    with pytest.raises(KeyError):
        filled("{id}", {}, "key_a")


# Claims

READ, WRITE = {"readOnlyHint": True}, {"readOnlyHint": False}
DESTROYS = {"destructiveHint": True}


@pytest.mark.parametrize(
    ("annotations", "trust", "declared", "effect"),
    [
        (None, False, {}, "at_most_once"),
        ("nonsense", True, {}, "at_most_once"),
        (READ, False, {}, "at_most_once"),
        (READ, True, {}, "read_only"),
        ({"readOnlyHint": "yes"}, True, {}, "at_most_once"),
        ({**READ, **DESTROYS}, True, {}, "at_most_once"),
        ({**READ, "destructiveHint": False}, True, {}, "read_only"),
        (WRITE, True, {}, "at_most_once"),
        ({"idempotentHint": True}, True, {}, "at_most_once"),
        ({"idempotentHint": True, "destructiveHint": False}, True, {"settleMs": 0}, "at_most_once"),
        (READ, True, {"effect": "at_most_once"}, "at_most_once"),
        (None, False, {"effect": "read_only"}, "read_only"),
        (READ, False, {"effect": "read_only"}, "read_only"),
        (None, False, {"effect": "idempotent"}, "idempotent"),
        (DESTROYS, False, {"effect": "idempotent"}, "idempotent"),
        ({"idempotentHint": False}, False, {"effect": "idempotent", "keyArgument": "id"}, "idempotent"),
    ],
)
def test_s5_claims_of_a_server_never_loosen_a_contract(
    annotations: Any, trust: bool, declared: dict[str, Any], effect: str
) -> None:
    assert effect_of(annotations, trust=trust, **declared) == effect


@pytest.mark.parametrize(
    ("annotations", "effect", "reason"),
    [
        (DESTROYS, "read_only", "read_only here, but the server says destructiveHint: true"),
        ({**READ, **DESTROYS}, "read_only", "read_only here, but the server says destructiveHint: true"),
        (WRITE, "read_only", "read_only here, but the server says readOnlyHint: false"),
        (
            {"idempotentHint": False},
            "idempotent",
            "idempotent here, but the server says idempotentHint: false; name its keyArgument, if it has one",
        ),
    ],
)
@pytest.mark.parametrize("trust", [True, False])
def test_s5_a_claim_that_is_more_careful_than_the_configuration_is_refused(
    annotations: Any, effect: str, reason: str, trust: bool
) -> None:
    with pytest.raises(InvalidParams) as refused:
        effect_of(annotations, trust=trust, effect=effect)
    assert refused.value.details == {"path": f"{PATH}.tools.close_ticket.effect", "reason": reason}


def test_a_look_up_that_says_it_writes_is_refused() -> None:
    tools = {"close_ticket": {"effect": "reconcilable", "lookup": LOOKUP}}
    with pytest.raises(InvalidParams) as refused:
        offered([CLOSE, {**GET, "annotations": WRITE}], tools=tools)
    assert refused.value.details["reason"] == "read_only here, but the server says readOnlyHint: false"
