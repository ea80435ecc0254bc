"""The agents that these tests run, and what the counting service saw of them.

Each run has an operation of its own, so that its calls and effects can be told apart in the service's truth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tests.service.counting import read_truth
from tests.service.driver import CountingService

Effect = Literal["read_only", "idempotent", "reconcilable", "at_most_once"]
ALLOW = ({"do": "allow", "tool": "*"},)
PATHS: dict[Effect, str] = {
    "read_only": "/read",
    "idempotent": "/charge-idempotent",
    "reconcilable": "/charge-reconcilable",
    "at_most_once": "/charge",
}


@dataclass(frozen=True)
class Seen:
    """What reached the service for one operation: calls, effects, and the different keys that came with them."""

    calls: int
    effects: int
    keys: int = 1


def seen(service: CountingService, operation: str) -> Seen:
    lines = [line for line in read_truth(service.truth) if line["operation"] == operation]
    kinds = [line["kind"] for line in lines]
    keys = {line["key"] for line in lines if line["key"] is not None}
    return Seen(kinds.count("call"), kinds.count("effect"), len(keys))


def keys_seen(service: CountingService, operation: str) -> set[str]:
    return {line["key"] for line in read_truth(service.truth) if line["operation"] == operation}


def tool(service: CountingService, effect: Effect) -> dict[str, Any]:
    """`outside.act {operation}`, of this class."""
    described: dict[str, Any] = {
        "name": "outside.act",
        "effect": effect,
        "parameters": {"type": "object", "properties": {"operation": {"type": "string"}}, "required": ["operation"]},
        "http": {"url": service.url + PATHS[effect], "method": "GET" if effect == "read_only" else "POST"},
        "timeoutMs": 60_000,
    }
    if effect == "reconcilable":
        described["lookup"] = {
            "url": service.url + "/lookup?key={key}",
            "found": "status == 'done'",
            "pending": "status == 'pending'",
            "absent": "status == 'absent'",
        }
    return described


def act(operation: str, *, times: int = 1) -> dict[str, Any]:
    """A turn that calls the tool."""
    return {"calls": [{"tool": "outside.act", "arguments": {"operation": operation}}] * times}


def agent(
    service: CountingService,
    effect: Effect,
    operation: str,
    *,
    script: Sequence[dict[str, Any]] | None = None,
    rules: Sequence[dict[str, Any]] = ALLOW,
) -> dict[str, Any]:
    """One that acts once and then says `done`, unless its script is another. `rules` empty: a person is asked."""
    turns = list(script) if script is not None else [act(operation), {"text": "done"}]
    return {"model": {"script": turns}, "tools": [tool(service, effect)], "policy": {"rules": list(rules)}}


def step_of(status: dict[str, Any], name: str = "outside.act") -> dict[str, Any]:
    """The last step of this name."""
    found: dict[str, Any] = [step for step in status["steps"] if step["name"] == name][-1]
    return found
