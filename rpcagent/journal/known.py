"""Which runs have files, in memory: eight bytes each. Pure.

Knows: sets of names. Does not know: where the names come from, or what a run is.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable
from hashlib import blake2b

_FRESH = 4_096


class Known:
    """A set of runs in eight bytes each. Two runs with the same eight bytes cost a look at the disk, and nothing else. One
    thread adds, any may ask."""

    def __init__(self, runs: Iterable[str]) -> None:
        self._sorted = array("Q", sorted(set(map(_short, runs))))
        self._fresh: frozenset[int] = frozenset()

    def add(self, runs: Iterable[str]) -> None:
        fresh = self._fresh | {_short(run) for run in runs}
        if len(fresh) > _FRESH:
            # Whoever asks meanwhile finds each of them in one place or in both.
            self._sorted = array("Q", sorted({*self._sorted, *fresh}))
            fresh = frozenset()
        self._fresh = fresh

    def __contains__(self, run: object) -> bool:
        if not isinstance(run, str):
            return False
        wanted, fresh, known = _short(run), self._fresh, self._sorted
        place = bisect_left(known, wanted)
        return wanted in fresh or (place < len(known) and known[place] == wanted)


def _short(run: str) -> int:
    return int.from_bytes(blake2b(run.encode(), digest_size=8).digest())
