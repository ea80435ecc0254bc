"""The rows of the index, made of what stands in the files of the runs themselves.

Knows: what of a summary a row has, and that files which cannot be used give none. Does not know: what becomes of the rows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from typing import TYPE_CHECKING

from rpcagent import errors
from rpcagent.journal import runfiles
from rpcagent.journal.index import Ended
from rpcagent.journal.summaries import decoded

if TYPE_CHECKING:
    from rpcagent.journal.disk import Disk
    from rpcagent.journal.runfiles import State
    from rpcagent.runs.summary import Summary


def rows_of(disk: Disk, runs: Iterable[str], note: Callable[[str], None]) -> Iterator[Ended]:
    """A row for each of these runs that has ended. Those whose files cannot be used are left out, and `note` is told. One run
    is in memory at a time."""
    for run_id in runs:
        try:
            state = runfiles.read_state(disk, run_id)
            row = ended_row(run_id, state, decoded(run_id, state.summary)) if state is not None else None
        except (errors.StoreDamaged, errors.StorageError, errors.Incompatible):
            note(f"run {run_id} is not listed: its files cannot be used; `rpcagent verify` tells more")
            continue
        if row is not None:
            yield row


def uncounted(disk: Disk, runs: Iterable[str], places: int) -> Iterator[tuple[str, Summary]]:
    """Those of these runs that have ended, and that a manifest with so many places does not count: each was taken in by an import
    that was cut off behind its files. Files that cannot be used are left out. The caller knows that the log does not hold them."""
    for run_id in runs:
        with contextlib.suppress(errors.StoreDamaged, errors.StorageError, errors.Incompatible):
            state = runfiles.read_state(disk, run_id)
            heads = decoded(run_id, state.summary) if state is not None else None
            if heads is not None and not heads.live and heads.place >= places:
                yield run_id, heads


def ended_row(run_id: str, state: State, heads: Summary) -> Ended | None:
    """The row of a run whose files hold this; None while it goes on."""
    if heads.live:
        return None
    return Ended(
        run=run_id,
        place=heads.place,
        status=heads.status,
        namespace=heads.namespace,
        agent=heads.agent,
        labels=heads.labels,
        started_at=_text(heads.started_at),
        ended_at=_text(heads.ended_at),
        bytes=state.size,
        blobs=heads.blobs,
        unresolved=heads.unresolved,
        summary=state.summary,
    )


def _text(instant: datetime | None) -> str:
    return instant.isoformat() if instant is not None else ""
