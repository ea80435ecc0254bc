"""Whether the arguments of a call fit the tool's schema, in words that a model can act on.

Knows: JSON Schema, through jsonschema, which is imported when the first call of a tool with a schema comes. Does not know:
providers or tools. A schema that cannot be applied (it is none, or it points outside itself) judges nothing: nothing is
ever fetched for it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from itertools import islice
from typing import TYPE_CHECKING, Any, cast

import msgspec
from msgspec.structs import replace

from rpcagent.runs.definition import Definition
from rpcagent.runs.outcomes import AskedCall, ModelReply

if TYPE_CHECKING:
    from jsonschema import ValidationError
    from jsonschema.protocols import Validator

VALIDATORS_KEPT = 256
FAULTS_TOLD = 3
_FAULTS_READ = 50
_VALUE_SHOWN = 80
_PROBLEM_MOST = 600
_KINDS = {
    "string": "a text", "number": "a number", "integer": "a whole number", "boolean": "true or false",
    "object": "an object", "array": "a list", "null": "null",
}  # fmt: skip


class Arguments:
    """Checks calls. Keeps the validators of the schemas that were used last."""

    def __init__(self) -> None:
        self._validators: OrderedDict[bytes, Validator | None] = OrderedDict()

    def checked(
        self, definition: Definition, reply: ModelReply, on_fault: Callable[[Exception], None] | None = None
    ) -> ModelReply:
        """The reply, each call that breaks its tool's schema with its problem. `on_fault` gets what is wrong with a schema."""
        if not reply.calls:
            return reply
        tell = on_fault or (lambda _error: None)
        return replace(reply, calls=tuple(self._call(definition, call, tell) for call in reply.calls))

    def _call(self, definition: Definition, call: AskedCall, tell: Callable[[Exception], None]) -> AskedCall:
        spec = definition.tool(call.tool)
        if call.problem or spec is None or not spec.parameters:
            return call
        try:
            validator = self._validator(spec.parameters, tell)
            faults = [] if validator is None else _faults(validator, call.arguments)
        except Exception as error:  # noqa: BLE001  (a schema of someone else's making must not end a run)
            tell(error)
            return call
        if not faults:
            return call
        problem = f"The arguments do not fit {call.tool}, and it was not run: {'; '.join(faults)}"
        return replace(call, problem=problem if len(problem) <= _PROBLEM_MOST else problem[: _PROBLEM_MOST - 1] + "…")

    def _validator(self, schema: dict[str, Any], tell: Callable[[Exception], None]) -> Validator | None:
        key = msgspec.json.encode(schema)
        if key in self._validators:
            self._validators.move_to_end(key)
            return self._validators[key]
        from jsonschema import Draft202012Validator
        from jsonschema.exceptions import SchemaError
        from jsonschema.validators import validator_for
        from referencing import Registry

        validator: Validator | None = None
        kind = validator_for(schema, default=Draft202012Validator)
        try:
            kind.check_schema(schema)
            # A registry of its own: the default one fetches what a `$ref` names from the network.
            validator = kind(schema, registry=Registry())
        except SchemaError as error:
            tell(error)
        self._validators[key] = validator
        while len(self._validators) > VALIDATORS_KEPT:
            self._validators.popitem(last=False)
        return validator


def _faults(validator: Validator, arguments: dict[str, Any]) -> list[str]:
    """The first few, in words. What one sentence says of several is said once."""
    found: dict[str, None] = {}
    for fault in islice(validator.iter_errors(arguments), _FAULTS_READ):
        found[_words(fault)] = None
        if len(found) == FAULTS_TOLD:
            break
    return list(found)


def _words(fault: ValidationError) -> str:
    where = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in fault.absolute_path)[:_VALUE_SHOWN]
    where = where.removeprefix(".")
    what = f"`{where}`" if where else "the whole"
    value, wanted = fault.instance, cast("Any", fault.validator_value)
    if fault.validator == "type":
        kinds = " or ".join(_KINDS.get(kind, str(kind)) for kind in ([wanted] if isinstance(wanted, str) else wanted))
        return f"{what} must be {kinds}, not {_shown(value)}"
    if fault.validator == "required":
        missing = [name for name in wanted if name not in cast("Any", value)]
        return f"{', '.join(f'`{where}.{name}`'.replace('`.', '`') for name in missing)} missing"
    if fault.validator == "additionalProperties" and isinstance(value, dict):
        known: dict[str, Any] = cast("Any", fault.schema).get("properties") or {}
        extra = ", ".join(f"`{name}`"[:_VALUE_SHOWN] for name in value if name not in known)
        return f"{extra} not known{f' in `{where}`' if where else ''} (known: {', '.join(known) or 'none'})"
    if fault.validator == "enum":
        return f"{what} must be one of {_shown(wanted)}, not {_shown(value)}"
    return f"{what} must have {fault.validator} {_shown(wanted)}; it is {_shown(value)}"


def _shown(value: Any) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= _VALUE_SHOWN else text[: _VALUE_SHOWN - 1] + "…"
