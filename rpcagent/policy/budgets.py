"""Budgets: what the next step would exceed. Pure checks on a run's state; spending is recorded by `fold`."""

from __future__ import annotations

from typing import Literal

from rpcagent.runs.state import RunState

Limit = Literal["steps", "attempts", "repeats", "tokens", "cost_usd", "active_s"]


def exceeded(state: RunState, *, new_step: bool, reserve_tokens: int = 0) -> Limit | None:
    """The first limit that one more attempt would exceed, or None. `new_step`: the attempt is a step's first.

    Tokens, cost and active time are compared with what is spent already, reservations included: the last call may end a
    little above its limit, no further one starts.
    """
    spent = state.spent
    asked: tuple[tuple[Limit, float], ...] = (
        ("steps", spent.steps + new_step),
        ("attempts", spent.attempts + 1),
        ("repeats", state.repeats),
        ("tokens", spent.tokens + max(reserve_tokens, 1)),
        ("cost_usd", spent.cost_usd),
        ("active_s", spent.active_s),
    )
    for name, value in asked:
        limit = state.limit(name)
        if limit is not None and (value > limit or (name in {"cost_usd", "active_s"} and value >= limit)):
            return name
    return None
