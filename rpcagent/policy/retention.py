"""Which ended runs are deleted, and why: pure rules over their heads.

Without a rule nothing is ever deleted. A run is the record of what was done in the world, and its keys are answered from
it: once it is gone, a late retry is refused, and nobody can look up what happened. So that is only done where a person has
written down what may go.

The first rule that fits a run decides alone. What is not certain keeps: a run that has not ended, an outcome that nobody
knows yet (the answer is still evidence), an end that cannot be read, and one that lies ahead of the clock. Such an end counts for
nothing else either: a clock that was once wrong must not make the runs of the present look like the old ones.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from typing import Protocol

import msgspec

from rpcagent.runs.instants import LONGEST_MS, after
from rpcagent.runs.state import ENDED

_UNITS = (("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1_000), ("ms", 1))
_Key = tuple[datetime, int, str]  # of age: ties are settled by place, so the order is the same each time


class RetentionRule(msgspec.Struct, frozen=True, kw_only=True):
    """What happens to the ended runs that fit all conditions; None, and no statuses: any.

    `label` is a name, or `name=value`. With `after_ms` a run stays for that time after its end; with `keep` the newest so
    many that this rule decides stay in each namespace. With both, a run goes only if neither keeps it; with none of them
    the rule keeps all."""

    namespace: str | None = None
    label: str | None = None
    statuses: tuple[str, ...] = ()
    after_ms: int | None = None
    keep: int | None = None

    def fits(self, row: Row) -> bool:
        """Whether this rule is about the run."""
        if self.namespace is not None and self.namespace != row.namespace:
            return False
        if self.statuses and row.status not in self.statuses:
            return False
        if self.label is None:
            return True
        name, equals, value = self.label.partition("=")
        return row.labels.get(name) == value if equals else name in row.labels

    def covers(self, other: RetentionRule) -> bool:
        """Whether this rule fits every run that `other` fits."""
        if self.namespace is not None and self.namespace != other.namespace:
            return False
        if self.statuses and not (other.statuses and set(other.statuses) <= set(self.statuses)):
            return False
        return self.label in {None, other.label} or self.label == (other.label or "").partition("=")[0]


class Retention(msgspec.Struct, frozen=True):
    """The rules of a store, the first that fits a run first. None of them: everything is kept."""

    rules: tuple[RetentionRule, ...] = ()

    def horizon(self, now: datetime) -> datetime | None:
        """No run that ended later than this has anything to do with what is due now; None: nothing is ever due."""
        ends = [
            now if rule.keep is not None or rule.after_ms is None else _before(now, rule.after_ms)
            for rule in self.rules
            if rule.keep is not None or rule.after_ms is not None
        ]
        return max(ends, default=None)

    def decides(self, row: Row) -> int | None:
        """The place in `rules` of the rule that decides about the run."""
        return next((place for place, rule in enumerate(self.rules) if rule.fits(row)), None)


class Row(Protocol):
    """What is asked of a run. `ended_at` is an RFC 3339 text; `unresolved`: the outcome of a step is still unknown."""

    @property
    def run(self) -> str: ...
    @property
    def place(self) -> int: ...
    @property
    def status(self) -> str: ...
    @property
    def namespace(self) -> str: ...
    @property
    def labels(self) -> Mapping[str, str]: ...
    @property
    def ended_at(self) -> str | None: ...
    @property
    def unresolved(self) -> bool: ...


class Due(msgspec.Struct, frozen=True):
    """A run that goes, and by which rule, for the log."""

    run: str
    reason: str


def due(rows: Iterable[Row], now: datetime, retention: Retention) -> list[Due]:
    """The runs that go now, the one that ended first foremost. The order of `rows` does not count, and none is held: of
    those that a `keep` keeps there are their ids, of the others nothing."""
    gone: list[tuple[_Key, int]] = []
    newest: dict[tuple[int, str], list[tuple[_Key, bool]]] = {}
    for row in rows:
        place = retention.decides(row)
        ended = _instant(row.ended_at)
        if place is None or row.status not in ENDED or ended is None or ended > now:
            continue
        rule = retention.rules[place]
        one = ((ended, row.place, row.run), row.unresolved)
        if rule.keep is not None:
            kept = newest.setdefault((place, row.namespace), [])
            heapq.heappush(kept, one)
            if len(kept) <= rule.keep:
                continue
            one = heapq.heappop(kept)
        elif rule.after_ms is None:
            continue
        key, unresolved = one
        if not unresolved and (rule.after_ms is None or after(key[0], rule.after_ms) <= now):
            gone.append((key, place))
    return [Due(key[2], _reason(place, retention.rules[place])) for key, place in sorted(gone)]


def _before(now: datetime, ms: int) -> datetime:
    back = timedelta(milliseconds=min(max(ms, 0), LONGEST_MS))
    start = datetime.min.replace(tzinfo=now.tzinfo)
    return start if now < start + back else now - back


def _instant(text: str | None) -> datetime | None:
    try:
        found = datetime.fromisoformat(text or "")
    except ValueError:
        return None
    return None if found.tzinfo is None else found


def _reason(place: int, rule: RetentionRule) -> str:
    parts = []
    if rule.after_ms is not None:
        parts.append(f"it ended {_duration(rule.after_ms)} ago or earlier")
    if rule.keep is not None:
        parts.append(f"it is not among the newest {rule.keep}")
    return f"rules[{place}]: {' and '.join(parts)}"


def _duration(ms: int) -> str:
    return next((f"{ms // size}{unit}" for unit, size in _UNITS if ms % size == 0 and ms >= size), "0s")
