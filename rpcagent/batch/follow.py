"""Follows one run through its daemon until it is at rest, over restarts of the daemon, without a gap in its events.

Knows: that notifications are hints. They wake it up, and what they miss is asked for with `events`; whether the run is at
rest is what `status` says.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any

from rpcagent_client import Client

Json = dict[str, Any]

LISTEN_FIRST_S = 0.02
LISTEN_MOST_S = 0.5
PAGE = 500
ENDED = frozenset({"completed", "failed", "cancelled"})
_TURNS = frozenset(
    {
        "approval_requested",
        "run_completed",
        "run_failed",
        "run_cancelled",
        "attempt_failed",
        "step_unknown",
        "step_denied",
    }
)
"""After these the run may be at rest: worth asking at once."""


class Feed:
    """What the client's reading thread hears, handed over to the thread that prints."""

    def __init__(self) -> None:
        self._heard: SimpleQueue[tuple[str, Json]] = SimpleQueue()

    def on_event(self, params: Json) -> None:
        self._heard.put(("event", params))

    def on_delta(self, params: Json) -> None:
        self._heard.put(("delta", params))

    def next(self, seconds: float) -> tuple[str, Json] | None:
        """None where nothing comes within the time."""
        try:
            return self._heard.get(timeout=seconds) if seconds > 0 else self._heard.get_nowait()
        except Empty:
            return None


class Follower:
    """`event(element)` is called for each event once, in order; `delta(params)` for pieces of a model's text."""

    def __init__(
        self,
        client: Client,
        feed: Feed,
        run_id: str,
        *,
        event: Callable[[Json], None],
        delta: Callable[[Json], None] | None = None,
        after: int = 0,
    ) -> None:
        self._client, self._feed, self._run_id = client, feed, run_id
        self._event, self._delta = event, delta
        self.seen = after

    def look(self) -> Json:
        """The run's status, all events that it rests on having been told."""
        shown = self._client.status(self._run_id)
        while (heard := self._feed.next(0)) is not None:
            self._take(*heard)
        if self.seen < shown["run"].get("lastSeq", 0):
            self._catch_up()
        return shown

    def until(self, at_rest: Callable[[Json], bool], deadline: float | None) -> tuple[Json, bool]:
        """The status as soon as `at_rest` holds for it, or what it is at the deadline (an instant of `time.monotonic`); and
        which of the two."""
        pause = LISTEN_FIRST_S
        while True:
            shown = self.look()
            if at_rest(shown):
                return shown, True
            left = LISTEN_MOST_S if deadline is None else deadline - time.monotonic()
            if left <= 0:
                return shown, False
            pause = LISTEN_FIRST_S if self._listen(min(pause, left)) else min(pause * 2, LISTEN_MOST_S)

    def _listen(self, seconds: float) -> bool:
        """Tells what comes within the time; True as soon as the run may have come to rest by it."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            heard = self._feed.next(left)
            if heard is not None and self._take(*heard):
                return True
        return False

    def _take(self, kind: str, params: Json) -> bool:
        if params.get("runId") != self._run_id:
            return False
        if kind == "delta":
            if self._delta is not None:
                self._delta(params)
            return False
        if params["seq"] > self.seen + 1:
            self._catch_up()
        if params["seq"] == self.seen + 1:
            self._tell(params)
        return params["event"]["type"] in _TURNS

    def _catch_up(self) -> None:
        while True:
            page = self._client.events(self._run_id, after_seq=self.seen, limit=PAGE)
            for element in page["events"]:
                if element["seq"] == self.seen + 1:
                    self._tell(element)
            if not page["events"] or self.seen >= page["lastSeq"]:
                return

    def _tell(self, element: Json) -> None:
        self.seen = element["seq"]
        self._event(element)
