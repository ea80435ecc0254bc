"""The events of one run, folded one commit after the other, for a check: whether each leads from a legal state to the next.

Knows: what is a fault of the record and what only lacks a key. Does not know: where the commits come from.
"""

from __future__ import annotations

from rpcagent.journal import seal
from rpcagent.journal.runfiles import Line
from rpcagent.runs import events as ev
from rpcagent.runs.fold import apply
from rpcagent.runs.state import RunState
from rpcagent.upkeep.findings import Finding
from rpcagent.upkeep.stories import opened

_REMEDY = "nothing is lost, and nothing is to be repaired: the daemon shows it as damaged; please report it"


class Replay:
    """`trouble`: the first thing that is wrong, once there is one; from then on nothing is looked at."""

    def __init__(self, run: str, sealing: seal.Seal) -> None:
        self.trouble: Finding | None = None
        self._run, self._seal = run, sealing
        self._state: RunState | None = None

    def line(self, line: Line) -> None:
        if self.trouble is not None:
            return
        try:
            self._state = apply(self._state, ev.decode(opened(self._seal, self._run, line)), self._run)
        except seal.KeyMissing as error:
            what = f"not replayed: its payloads are sealed with the key {error.details['kid']}"
            self.trouble = Finding(severity="note", what=what, runs=[self._run])
        except Exception as error:  # noqa: BLE001 - whatever stands in the records of one run, all others are checked
            what = f"the events from {line.first} on cannot be replayed: {error}"
            self.trouble = Finding(severity="damage", what=what, runs=[self._run], remedy=_REMEDY)
