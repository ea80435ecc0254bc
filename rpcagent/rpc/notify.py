"""Notifications to one peer: hints that something happened, in order, before any answer that rests on it.

Knows: what the peer asked for in `initialize`. A peer that does not read is told with `run/lag` where its gap begins;
`events` and `status` give the same truth by polling.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from rpcagent.rpc.wire import Capabilities
from rpcagent.runs import events as ev

BACKLOG_BYTES_MAX = 1 << 20

_encode = msgspec.json.Encoder().encode


class Notifier:
    """`send` queues one message; `backlog` tells how many bytes the peer has not taken yet."""

    def __init__(self, send: Callable[[bytes], None], backlog: Callable[[], int]) -> None:
        self._send = send
        self._backlog = backlog
        self._wanted: Capabilities | None = None
        self._own: set[str] = set()
        self._missed: dict[str, int] = {}
        self._untold: dict[str, str] = {}  # warnings from before the peer said `initialize`, by kind

    @property
    def lagging(self) -> bool:
        return bool(self._missed)

    def subscribe(self, wanted: Capabilities) -> None:
        """From now on; nothing is sent before. What was to be warned of by then is told now."""
        self._wanted = wanted
        untold, self._untold = self._untold, {}
        for kind, message in untold.items():
            self.warn(kind, message)

    def names(self, run_id: str) -> None:
        """The peer spoke of this run: it is one of its own. Of runs that there are only: a set of anything else has no end."""
        self._own.add(run_id)

    def forgets(self, run_id: str) -> None:
        """It did not come to be."""
        self._own.discard(run_id)

    def committed(self, run_id: str, commit: ev.Commit) -> None:
        if not self._wants(run_id):
            return
        if run_id in self._missed or self._backlog() > BACKLOG_BYTES_MAX:
            self._missed.setdefault(run_id, commit.seq)
            return
        for params in elements(run_id, commit):
            self.notify("run/event", params)

    def delta(self, run_id: str, step_id: str, attempt: int, text: str) -> None:
        """Ephemeral: dropped without a word where the peer is slow."""
        self._delta({"runId": run_id, "stepId": step_id, "attempt": attempt, "text": text})

    def output(self, run_id: str, step_id: str, attempt: int, text: str) -> None:
        """The same for what a command prints."""
        self._delta({"runId": run_id, "stepId": step_id, "attempt": attempt, "text": text, "stream": "output"})

    def _delta(self, params: dict[str, Any]) -> None:
        if self._wanted is None or not self._wanted.deltas or not self._wants(params["runId"]):
            return
        if self._backlog() <= BACKLOG_BYTES_MAX:
            self.notify("run/delta", params)

    def catch_up(self) -> None:
        """The peer has read what was queued: say where the gaps begin, so that it can ask for the rest."""
        missed, self._missed = self._missed, {}
        for run_id, seq in missed.items():
            self.notify("run/lag", {"runId": run_id, "afterSeq": seq - 1})

    def warn(self, kind: str, message: str) -> None:
        """To every peer that says `initialize`, whatever it subscribes to."""
        if self._wanted is None:
            self._untold[kind] = message
        else:
            self.notify("daemon/warning", {"kind": kind, "message": message})

    def notify(self, method: str, params: Any) -> None:
        self._send(_encode({"jsonrpc": "2.0", "method": method, "params": params}))

    def _wants(self, run_id: str) -> bool:
        wanted = self._wanted
        return wanted is not None and (wanted.events == "all" or (wanted.events == "own" and run_id in self._own))


def elements(run_id: str, commit: ev.Commit) -> list[dict[str, Any]]:
    """The events of a commit as `run/event` and `events` show them: the same objects."""
    return [
        {"runId": run_id, "seq": commit.seq + place, "at": commit.at, "event": event}
        for place, event in enumerate(commit.events)
    ]
