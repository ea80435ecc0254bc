"""What a run pins when it starts: the agent as content, not by name.

An edited configuration never changes a run that has begun; the run goes on with what stands here.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from rpcagent.runs.effects import EffectClass, ToolSpec

Verdict = Literal["allow", "ask", "deny"]
Drive = Literal["auto", "manual"]
Recovery = Literal["auto", "confirm", "manual"]

CONTEXT_VERSION = 1
"""Raised only when the bytes of a rebuilt model request would change."""


class Rule(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True, forbid_unknown_fields=True):
    """One line of policy. Every condition that is given must hold; a rule without conditions always holds.

    `tool` and the values of `arguments` are shell-style patterns; `paths` are patterns of which the argument `path`
    must match one. `expires_ms` bounds the question that an `ask` opens.
    """

    do: Verdict
    tool: str | None = None
    effect: EffectClass | None = None
    arguments: dict[str, str] = {}
    paths: tuple[str, ...] = ()
    expires_ms: int | None = None


class Budget(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True, forbid_unknown_fields=True):
    """Limits of one run; None is no limit. `attempts` counts every try of every step, `active_s` is in seconds."""

    steps: int | None = 500
    attempts: int | None = 2_000
    tokens: int | None = None
    cost_usd: float | None = None
    active_s: float | None = None


class ModelSettings(
    msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True, forbid_unknown_fields=True
):
    """Which model, and how it is asked. `script` is the content that a scripted model answers from.

    `max_output_tokens` is reserved from the token budget before each call. `timeout_ms` bounds one call.
    """

    provider: str = "scripted"
    name: str = "default"
    script: tuple[dict[str, Any], ...] = ()
    max_output_tokens: int = 0
    timeout_ms: int = 600_000
    retry_for_ms: int = 900_000


class Definition(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """The pinned agent. Its digest is shown in `status`, so that a later difference can be named."""

    agent: str
    instructions: str = ""
    model: ModelSettings = ModelSettings()
    tools: tuple[ToolSpec, ...] = ()
    rules: tuple[Rule, ...] = ()
    budget: Budget = Budget()
    context_version: int = CONTEXT_VERSION

    def tool(self, name: str) -> ToolSpec | None:
        return next((spec for spec in self.tools if spec.name == name), None)
