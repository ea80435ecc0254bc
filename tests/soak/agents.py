"""The agents of the soak: what each kind of run does, and how many steps it is by hand. No run shares an operation with another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.process.outside import ALLOW, Effect, act, agent
from tests.service.driver import CountingService

SHOUT = 12_000
"""Lines: more than a record takes."""
Kind = Callable[[CountingService, str], tuple[dict[str, Any], int]]
"""The agent, and its number of steps in manual drive."""
LIST = {"calls": [{"tool": "files.list", "arguments": {}}]}


def _acts(effect: Effect, *, times: int, asked: bool = False) -> Kind:
    def make(service: CountingService, key: str) -> tuple[dict[str, Any], int]:
        script = [*(act(f"{key}.{number}") for number in range(times)), {"text": "done"}]
        return agent(service, effect, key, script=script, rules=() if asked else ALLOW), 0

    return make


def _by_hand(service: CountingService, key: str) -> tuple[dict[str, Any], int]:
    script = [act(f"{key}.0"), act(f"{key}.1"), {"text": "done"}]
    return agent(service, "idempotent", key, script=script), 5


def _reads(_service: CountingService, _key: str) -> tuple[dict[str, Any], int]:
    return {"model": {"script": [LIST, {"text": "done"}]}, "tools": ["files"]}, 0


def _shouts(_service: CountingService, key: str) -> tuple[dict[str, Any], int]:
    """Its output is kept beside the records, and is no other run's."""
    first = int(key[1:])
    call = {"tool": "shell.run", "arguments": {"command": f"seq {first} {first + SHOUT}"}}
    return {
        "model": {"script": [{"calls": [call]}, {"text": "done"}]},
        "tools": ["shell"],
        "readOnlyCommands": ["seq"],
    }, 0


KINDS: dict[str, Kind] = {
    "reads": _reads,
    "shouts": _shouts,
    "pays": _acts("at_most_once", times=2),
    "charges": _acts("idempotent", times=2),
    "looks_up": _acts("reconcilable", times=1),
    "asks": _acts("at_most_once", times=1, asked=True),
    "confirms": _acts("idempotent", times=1, asked=True),
    "by_hand": _by_hand,
}
