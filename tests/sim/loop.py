"""An event loop in virtual time: it never blocks. When nothing is ready, the clock moves to the next timer."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import anyio


class DeadlockError(Exception):
    """Nothing is ready and no timer is set: nothing would ever happen again."""


class _NeverBlocks(selectors.DefaultSelector):
    """Where a real selector would wait, the loop's clock is moved instead. No descriptor is ever looked at."""

    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise DeadlockError
        if timeout > 0:
            self.loop.moved += timeout
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """`moved` is the present instant in seconds; it starts at 0."""

    def __init__(self) -> None:
        self.moved = 0.0
        selector = _NeverBlocks()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        return self.moved


def run(main: Callable[..., Awaitable[Any]], *args: Any, **named: Any) -> Any:
    """Runs `main` to its end in virtual time."""
    return anyio.run(partial(main, *args, **named), backend="asyncio", backend_options={"loop_factory": VirtualLoop})
