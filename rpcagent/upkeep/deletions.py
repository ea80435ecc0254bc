"""Which runs the log says are deleted, where no file of tombstones says so yet.

Knows: that a run is deleted as soon as its last record says so, by the very rule of a replay; that a sealed one may say it
too. Does not know: what is left of the files of such a run. That may be all, a part or nothing: where a disk has no room they
go before the checkpoint that names the tombstone, and until then its manifest counts the run and the index lists it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from rpcagent import errors
from rpcagent.journal import seal
from rpcagent.journal.record import Entry
from rpcagent.journal.runfiles import Line
from rpcagent.runs.ports import Recorded
from rpcagent.runs.supervisor import deletes

Trouble = seal.KeyMissing | errors.StoreDamaged | None
"""Why a payload cannot be opened."""


@dataclass
class Deletions:
    """`status`: how each deleted run had ended. `sealed`: the key of a record that nobody here can read, of each run of which the
    log has but this one event, and not its first: it may be its deletion."""

    status: dict[str, str] = field(default_factory=dict)
    sealed: dict[str, str] = field(default_factory=dict)
    _seen: set[str] = field(default_factory=set)

    def note(self, run: str, first: int, count: int, body: bytes | None, trouble: Trouble = None) -> None:
        """The next record of the log. `body`: None where it cannot be opened, because of `trouble`."""
        self.status.pop(run, None)
        self.sealed.pop(run, None)
        if body is not None:
            if (found := deletes(Recorded(first, count, body))) is not None:
                self.status[run] = found.status
        elif isinstance(trouble, seal.KeyMissing) and count == 1 and first > 1 and run not in self._seen:
            self.sealed[run] = str(trouble.details["kid"])
        self._seen.add(run)


def deletions_in(entries: Iterable[Entry], sealing: seal.Seal) -> Deletions:
    """Those in the entries of a log, from the first one behind the manifest on."""
    found = Deletions()
    for entry in entries:
        body, trouble = opened_or_not(sealing, entry.run, Line(entry.first, entry.count, entry.body))
        found.note(entry.run, entry.first, entry.count, body, trouble)
    return found


def opened_or_not(sealing: seal.Seal, run: str, line: Line) -> tuple[bytes | None, Trouble]:
    """The body as it was recorded; None and the reason where it cannot be opened."""
    try:
        return sealing.open(seal.record_context(run, line.first), line.body), None
    except (seal.KeyMissing, errors.StoreDamaged) as error:
        return None, error
