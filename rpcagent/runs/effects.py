"""Effect classes: what a tool promises about being called again. Pure data.

The class decides what follows an intent without an outcome, and nothing else does: neither who asked nor how the attempt
was interrupted.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

EffectClass = Literal["read_only", "idempotent", "reconcilable", "at_most_once"]
LookUpAnswer = Literal["found", "absent", "pending", "unsure"]

ToolName = Annotated[str, msgspec.Meta(pattern=r"\A[A-Za-z0-9_-]{1,40}\.[A-Za-z0-9_-]{1,60}\Z")]


class ToolSpec(
    msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True, forbid_unknown_fields=True
):
    """A tool as a run pins it: its name (`server.tool`), what the model is told, and its contract.

    `key_ttl_ms`: how long the other side remembers our key; after that an `idempotent` tool is taken for `at_most_once`.
    `settle_ms`: how long after an attempt a look-up that finds nothing does not yet prove that nothing will come.
    `binding`: what the tool's own adapter needs to reach it (an URL, a look-up); the core never reads it.
    """

    name: ToolName
    description: str = ""
    parameters: dict[str, Any] = {}
    effect: EffectClass = "at_most_once"
    key_ttl_ms: int | None = None
    settle_ms: int = 0
    timeout_ms: int = 60_000
    binding: dict[str, Any] = {}
