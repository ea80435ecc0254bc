"""Arguments against schemas: what the model is told, and what a bad schema does not do."""

from __future__ import annotations

import socket
from typing import Any

import pytest
from rpcagent.models.arguments import VALIDATORS_KEPT, Arguments
from rpcagent.runs.definition import Definition
from rpcagent.runs.effects import ToolSpec
from rpcagent.runs.outcomes import AskedCall, ModelReply
from rpcagent.tools.builtin import BUILTIN


def told(schema: dict[str, Any], arguments: dict[str, Any], faults: list[Exception] | None = None) -> str:
    definition = Definition(agent="a", tools=(ToolSpec(name="shop.charge", parameters=schema),))
    reply = ModelReply(calls=(AskedCall(tool="shop.charge", arguments=arguments),))
    checked = Arguments().checked(definition, reply, None if faults is None else faults.append)
    return checked.calls[0].problem.removeprefix("The arguments do not fit shop.charge, and it was not run: ")


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "order": {"type": "string", "pattern": "^[A-Z]"},
        "amount": {"type": ["number", "null"], "minimum": 0},
        "currency": {"enum": ["EUR", "USD"]},
        "items": {"type": "array", "items": {"$ref": "#/$defs/item"}, "maxItems": 2},
    },
    "required": ["order", "amount"],
    "additionalProperties": False,
    "$defs": {
        "item": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"], "additionalProperties": False}
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"order": "A1", "amount": 1.5, "currency": "EUR", "items": [{"name": "x"}]}, ""),
        ({"order": "A1", "amount": "abc"}, '`amount` must be a number or null, not "abc"'),
        ({"order": 7, "amount": 1}, "`order` must be a text, not 7"),
        ({"order": "A1"}, "`amount` missing"),
        ({}, "`order`, `amount` missing"),
        ({"order": "A1", "amount": 1, "sum": 2}, "`sum` not known (known: order, amount, currency, items)"),
        ({"order": "A1", "amount": -1}, "`amount` must have minimum 0; it is -1"),
        ({"order": "a1", "amount": 1}, '`order` must have pattern "^[A-Z]"; it is "a1"'),
        ({"order": "A1", "amount": 1, "currency": "CHF"}, '`currency` must be one of ["EUR","USD"], not "CHF"'),
        ({"order": "A1", "amount": 1, "items": [{"name": "x"}, {"name": 3}]}, "`items[1].name` must be a text, not 3"),
        ({"order": "A1", "amount": 1, "items": [{}]}, "`items[0].name` missing"),
        (
            {"order": "A1", "amount": 1, "items": [{"name": "x", "size": 1}]},
            "`size` not known in `items[0]` (known: name)",
        ),
    ],
)
def test_f061_what_does_not_fit_is_told_by_its_path_and_what_was_expected(
    arguments: dict[str, Any], problem: str
) -> None:
    assert told(SCHEMA, arguments) == problem


def test_at_most_three_faults_are_told_and_never_a_whole_document() -> None:
    schema = {"type": "object", "properties": {name: {"type": "integer"} for name in "abcde"}}
    problem = told(schema, dict.fromkeys("abcde", "x" * 100_000))
    assert problem.count("must be a whole number") == 3
    assert len(problem) < 600
    deep = {"type": "object", "required": ["r" * 5_000]}
    assert len(told(deep, {})) <= 600


def test_what_has_a_problem_no_schema_or_no_tool_is_left_alone() -> None:
    definition = Definition(agent="a", tools=(ToolSpec(name="shop.charge", parameters=SCHEMA), ToolSpec(name="a.b")))
    calls = (
        AskedCall(tool="shop.charge", arguments={}, problem="cut"),
        AskedCall(tool="a.b", arguments={"x": 1}),
        AskedCall(tool="no.tool", arguments={"x": 1}),
    )
    reply = ModelReply(text="x", calls=calls)
    assert Arguments().checked(definition, reply) == reply


@pytest.mark.parametrize(
    ("schema", "fault"),
    [
        ({"type": "no such type"}, "SchemaError"),
        ({"properties": {"a": {"pattern": "("}}}, "SchemaError"),
        ({"properties": {"a": {"$ref": "#/nowhere"}}}, "_WrappedReferencingError"),
        ({"properties": {"a": {"$ref": "#/properties/a"}}}, "RecursionError"),
    ],
)
def test_f059_a_schema_that_cannot_be_applied_judges_nothing_and_ends_nothing(
    schema: dict[str, Any], fault: str
) -> None:
    faults: list[Exception] = []
    assert told(schema, {"a": "b"}, faults) == ""
    assert [type(one).__name__ for one in faults] == [fault]


def test_nothing_is_fetched_for_a_schema() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0)
        url = f"http://127.0.0.1:{server.getsockname()[1]}/schema"
        assert told({"$ref": url}, {"a": "b"}, []) == ""
        with pytest.raises(BlockingIOError):
            server.accept()


def test_schemas_are_prepared_once_and_not_without_bound() -> None:
    arguments = Arguments()
    for number in [*range(VALIDATORS_KEPT + 10), 0]:
        schema = {"type": "object", "minProperties": number}
        definition = Definition(agent="a", tools=(ToolSpec(name="a.b", parameters=schema),))
        for _ in range(2):
            arguments.checked(definition, ModelReply(calls=(AskedCall(tool="a.b", arguments={}),)))
    assert len(arguments._validators) == VALIDATORS_KEPT


@pytest.mark.parametrize("spec", BUILTIN, ids=lambda spec: spec.name)
def test_the_schemas_of_the_built_in_tools_are_schemas(spec: ToolSpec) -> None:
    faults: list[Exception] = []
    definition = Definition(agent="a", tools=(spec,))
    call = AskedCall(tool=spec.name, arguments={"no such member": 1})
    checked = Arguments().checked(definition, ModelReply(calls=(call,)), faults.append)
    assert faults == []
    assert "`no such member` not known" in checked.calls[0].problem
