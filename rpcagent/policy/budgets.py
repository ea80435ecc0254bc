"""Budgets: what the next step would exceed. Pure checks on a run's state; spending is recorded by `fold`."""

from __future__ import annotations

from typing import Literal

from rpcagent.runs.state import RunState

Limit = Literal["steps", "attempts", "repeats", "tokens", "cost_usd", "active_s"]
NEAR = 0.8
"""The part of a limit from which on `status` warns of it."""


def exceeded(state: RunState, *, new_step: bool, reserve_tokens: int = 0) -> Limit | None:
    """The first limit that one more attempt would exceed, or None. `new_step`: the attempt is a step's first.

    Tokens, cost and active time are compared with what is spent already, reservations included: the last call may end a
    little above its limit, no further one starts.
    """
    more = {"steps": int(new_step), "attempts": 1, "tokens": max(reserve_tokens, 1)}
    for name, used in _used(state):
        value = used + more.get(name, 0)
        limit = state.limit(name)
        if limit is not None and (value > limit or (name in {"cost_usd", "active_s"} and value >= limit)):
            return name
    return None


def near(state: RunState) -> list[Limit]:
    """The limits of which `NEAR` or more is used."""
    limits = ((name, used, state.limit(name)) for name, used in _used(state))
    return [name for name, used, limit in limits if limit is not None and used >= NEAR * limit]


def _used(state: RunState) -> tuple[tuple[Limit, float], ...]:
    spent = state.spent
    return (
        ("steps", spent.steps),
        ("attempts", spent.attempts),
        ("repeats", state.repeats),
        ("tokens", spent.tokens),
        ("cost_usd", spent.cost_usd),
        ("active_s", spent.active_s),
    )
