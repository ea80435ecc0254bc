"""What a run pins when it starts: the agent as content, not by name.

An edited configuration never changes a run that has begun; the run goes on with what stands here.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from rpcagent.runs.commands import is_read_only
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
    """Limits of one run; None is no limit. `attempts` counts every try of every step, `repeats` the answers in a row that
    ask for exactly the same calls; `active_s` is in seconds."""

    steps: int | None = 500
    attempts: int | None = 2_000
    repeats: int | None = 20
    tokens: int | None = None
    cost_usd: float | None = None
    active_s: float | None = None


class ModelSettings(
    msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True, forbid_unknown_fields=True
):
    """Which model, and how it is asked. `script` is the content that a scripted model answers from.

    `max_output_tokens` is reserved from the token budget before each call; 0 leaves it to the provider. `timeout_ms` bounds
    one call, the other time-outs its parts. `api_key_env` names a variable of the environment: the secret itself is never
    here. `options` go to the provider as they are (`temperature`, say). `environment_proxy`: its proxies and certificates count. Trouble is retried for `retry_for_ms`, then asked.
    """

    provider: str = "scripted"
    name: str = "default"
    script: tuple[dict[str, Any], ...] = ()
    base_url: str = ""
    api_key_env: str = ""
    headers: dict[str, str] = {}
    options: dict[str, Any] = {}
    stream: bool = True
    environment_proxy: bool = False
    max_output_tokens: int = 0
    connect_timeout_ms: int = 10_000
    first_token_timeout_ms: int = 120_000
    idle_timeout_ms: int = 60_000
    timeout_ms: int = 600_000
    retry_for_ms: int = 900_000


class Definition(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """The pinned agent. Its digest is shown in `status`, so that a later difference can be named.

    `read_only_commands`: the beginnings of shell commands that the caller declares to only read.
    """

    agent: str
    instructions: str = ""
    model: ModelSettings = ModelSettings()
    tools: tuple[ToolSpec, ...] = ()
    rules: tuple[Rule, ...] = ()
    budget: Budget = Budget()
    read_only_commands: tuple[str, ...] = ()
    context_version: int = CONTEXT_VERSION

    def tool(self, name: str) -> ToolSpec | None:
        return next((spec for spec in self.tools if spec.name == name), None)

    def effect_of(self, name: str, arguments: dict[str, Any]) -> EffectClass:
        """The tool's class; a shell command that the caller declared to only read does so, whatever else a shell may do."""
        spec = self.tool(name)
        if spec is None:
            return "read_only"
        command = arguments.get("command")
        if name == "shell.run" and isinstance(command, str) and is_read_only(command, self.read_only_commands):
            return "read_only"
        return spec.effect
