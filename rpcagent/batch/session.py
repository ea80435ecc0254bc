"""What all commands share while they run: the client, the streams, and how a reader's short name of a run is resolved."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

from rpcagent.batch.desk import Desk
from rpcagent.batch.faults import Mistake
from rpcagent.batch.follow import Feed
from rpcagent.batch.place import Place
from rpcagent.ids import is_run_id
from rpcagent_client import Client

Json = dict[str, Any]

PAGE = 1_000
SHORTEST = 6


@dataclass
class Session:
    """`run_id` and `key`: what the command is about, as soon as it is known, for whoever must say that it is safe."""

    client: Client
    feed: Feed
    desk: Desk
    place: Place
    run_id: str | None = None
    key: str | None = None

    def begin(self) -> None:
        """The first call is sent once: a store that is in use and a configuration at fault are told at once, not after ten
        attempts. From then on the client outlives its daemon."""
        self.client.call("status")

    def runs(self, status: list[str] | None = None) -> Iterator[Json]:
        """All runs, oldest first, page by page."""
        cursor = None
        while True:
            page = self.client.list(status=status or None, cursor=cursor, limit=PAGE)
            yield from page["runs"]
            cursor = page.get("nextCursor")
            if cursor is None:
                return

    def resolve(self, name: str) -> str:
        """The run that is meant by an id, the beginning of one (with or without `run_`), or a key. Raises Mistake."""
        if is_run_id(name):
            return name
        prefix = "run_" + name.removeprefix("run_")
        every = list(self.runs())
        found = [run["runId"] for run in every if run["runId"].startswith(prefix) and prefix != "run_"]
        found = found or [run["runId"] for run in every if run.get("clientRequestId") == name]
        if len(found) == 1:
            return str(found[0])
        if found:
            shown = ", ".join(found[:4]) + (", ..." if len(found) > 4 else "")
            raise Mistake(f"{name!r} may be any of {len(found)} runs: {shown}", "give more of the id")
        raise Mistake(
            f"there is no run {name!r} in this store",
            "`rpcagent runs --all` lists them; each workspace has a store of its own unless --store names one",
            code="NOT_FOUND",
        )


def short_ids(run_ids: list[str]) -> dict[str, str]:
    """The shortest beginning of each id that is no other's, and never shorter than a person would trust."""
    ordered = sorted(run_ids)
    needed = dict.fromkeys(ordered, len("run_") + SHORTEST)
    for one, other in pairwise(ordered):
        same = next((i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))
        needed[one], needed[other] = max(needed[one], same + 1), max(needed[other], same + 1)
    return {run_id: run_id[:length] for run_id, length in needed.items()}


def now() -> datetime:
    return datetime.now(UTC)
