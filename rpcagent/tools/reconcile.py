"""What a look-up's answer says about an earlier attempt of an effect.

Knows: the conditions of a look-up (JMESPath) and how they are judged. Does not know: how the question is sent, when it is
asked again, or what follows; a mere `absent` is weighed against `settle_ms` by the core.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from rpcagent.errors import InvalidParams
from rpcagent.runs.outcomes import LookUp

NOT_FOUND = 404


class Conditions(
    msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True, forbid_unknown_fields=True
):
    """How an answer is judged, whoever gave it."""

    found: str
    absent: str | None = None
    pending: str | None = None


class LookUpCall(Conditions, frozen=True, kw_only=True):
    """A question that reads only. `headers` None: those of the call that it asks about."""

    url: str
    method: Literal["GET", "POST"] = "GET"
    headers: dict[str, str] | None = None


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What came back: the HTTP status, the decoded JSON (UNSET where it is none), and the same as a tool result."""

    status: int
    value: Any
    result: dict[str, Any]


def check_conditions(call: Conditions, path: str) -> None:
    """Raises InvalidParams naming the condition that is no JMESPath."""
    from jmespath.exceptions import JMESPathError

    for name in ("found", "absent", "pending"):
        expression = getattr(call, name)
        if expression is None:
            continue
        try:
            unknown = _unknown_functions(_compiled(expression).parsed)
        except JMESPathError:
            raise InvalidParams("this is no JMESPath expression", path=f"{path}.{name}") from None
        if unknown:  # it would be found out only when an effect is in doubt
            raise InvalidParams(f"JMESPath has no function {unknown[0]!r}", path=f"{path}.{name}")


def judge(call: Conditions, answer: Answer | None) -> LookUp:
    """The first that holds: `found`, `pending`, `absent`; or, where no `absent` is given, that nothing was found.

    A condition holds when its value is true in the sense of Python: not null, false, 0 or empty. `answer` None: the
    question failed. What cannot be evaluated, and every status but 2xx and 404, is `unsure`.
    """
    if answer is None:
        return LookUp(answer="unsure")
    if answer.status == NOT_FOUND:
        absent = call.absent is None or _holds(call.absent, answer.value)
        return LookUp(answer="absent" if absent else "unsure")
    if not 200 <= answer.status < 300 or answer.value is msgspec.UNSET:
        return LookUp(answer="unsure")
    found = _holds(call.found, answer.value)
    pending = _holds(call.pending, answer.value) if call.pending is not None else False
    absent_or_none = _holds(call.absent, answer.value) if call.absent is not None else found is False
    if found:
        return LookUp(answer="found", result=answer.result)
    if found is None or pending is None:
        return LookUp(answer="unsure")
    if pending:
        return LookUp(answer="pending")
    return LookUp(answer="absent" if absent_or_none else "unsure")


def _holds(expression: str, value: Any) -> bool | None:
    """None: it cannot be told."""
    from jmespath.exceptions import JMESPathError

    if value is msgspec.UNSET:
        return None
    try:
        return bool(_compiled(expression).search(value))
    except (JMESPathError, TypeError, ValueError, RecursionError):
        return None


def _unknown_functions(node: dict[str, Any]) -> list[str]:
    from jmespath.functions import Functions

    own = node["type"] == "function_expression" and node["value"] not in Functions.FUNCTION_TABLE
    below = [name for child in node["children"] if isinstance(child, dict) for name in _unknown_functions(child)]
    return [node["value"], *below] if own else below


def _compiled(expression: str) -> Any:
    import jmespath

    return jmespath.compile(expression)  # it keeps the last ones it compiled
