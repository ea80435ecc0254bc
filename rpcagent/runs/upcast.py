"""From the body of a commit as an earlier version wrote it to the body as this one writes it. Pure.

Knows: one function for each schema version that was ever released, from it to the next. Does not know: bytes, events, or
which version is the present one; `events` asks.

What is stored is never rewritten: a record keeps its version for ever, and is raised each time it is read. So a function
here is never changed once it was released. It takes builtin values (times are text), returns a new body, and leaves the
one it was given as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Body = dict[str, Any]

UPCASTS: dict[int, Callable[[Body], Body]] = {}
"""By version: what makes a body of the next one of it. Version 1 is the first and, as yet, the only one."""


def upcast(body: Body, version: int, present: int) -> Body:
    """The body, of schema `version`, as one of `present`. Raises KeyError where a step between them is missing."""
    for step in range(version, present):
        body = UPCASTS[step](body)
    return body
