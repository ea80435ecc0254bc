"""How many calls of a kind go on at once, over all runs: what a machine has is not multiplied by the number of runs.

Knows: which calls cost a process or a descriptor, and how many of those this machine should bear. Does not know: what a
call does. A call that waits for its turn has done nothing yet.
"""

from __future__ import annotations

import os
import resource
from contextlib import AbstractAsyncContextManager, nullcontext

import anyio

from rpcagent.runs.effects import ToolSpec

COMMANDS_MOST = 32
REQUESTS_MOST = 512


class Turns:
    """`of` gives what a call of this tool waits in; whoever came first goes first."""

    def __init__(
        self, *, searches: int | None = None, commands: int = COMMANDS_MOST, requests: int | None = None
    ) -> None:
        self._most = {
            "searches": searches or (os.cpu_count() or 1) + 2,
            "commands": commands,
            "requests": requests or _requests(),
        }
        self._lines: dict[str, anyio.Semaphore] = {}

    def of(self, spec: ToolSpec) -> AbstractAsyncContextManager[object]:
        """Entered when it is the call's turn. A cancellation while it waits goes through: nothing was dispatched."""
        kind = _kind(spec)
        if not kind:
            return nullcontext()
        if kind not in self._lines:
            self._lines[kind] = anyio.Semaphore(self._most[kind])
        return self._lines[kind]


def _kind(spec: ToolSpec) -> str:
    if "http" in spec.binding:
        return "requests"
    return {"files.search": "searches", "shell.run": "commands"}.get(spec.name, "")


def _requests() -> int:
    """A quarter of the descriptors that the process may have."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return REQUESTS_MOST if limit == resource.RLIM_INFINITY else max(1, min(REQUESTS_MOST, limit // 4))
