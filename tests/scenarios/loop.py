"""An event loop in virtual time, in which `quiet` tells when nothing more happens unless time passes."""

from __future__ import annotations

import asyncio
import selectors
from typing import Any


class DeadlockError(Exception):
    """Nothing is ready and no timer is set: nothing would ever happen again."""


class _NeverBlocks(selectors.DefaultSelector):
    """Where a real selector would wait, whoever asked for quiet goes on; if nobody did, the clock moves to the next timer."""

    loop: QuietLoop

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is not None and timeout <= 0:
            return []
        asked, self.loop.asked = self.loop.asked, []
        for future in asked:
            if not future.done():
                future.set_result(None)
        if not asked:
            if timeout is None:
                raise DeadlockError
            self.loop.moved += timeout
        return []


class QuietLoop(asyncio.SelectorEventLoop):
    """`moved` is the present instant in seconds; it starts at 0. No descriptor is ever looked at."""

    def __init__(self) -> None:
        self.moved = 0.0
        self.asked: list[asyncio.Future[None]] = []
        selector = _NeverBlocks()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        return self.moved


async def quiet() -> None:
    """Returns when everything that can happen at this instant has happened."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, QuietLoop)
    future = loop.create_future()
    loop.asked.append(future)
    await future
