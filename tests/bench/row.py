"""One printed figure: its value, the floor beside it, the ratio, how far the rounds lay apart, and the target.

Knows: medians and how a table is laid out. Does not know: how anything is measured. Only a counted figure (`gate`) can
fail a run; what a clock says is printed, never judged.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

_MARKS = {True: "yes", False: "NO", None: ""}


@dataclass(frozen=True, kw_only=True)
class Target:
    """`of`: whether the value itself is meant, or its ratio to the floor."""

    sign: Literal["<=", ">=", "=="]
    number: float
    of: Literal["value", "ratio"] = "value"

    def met(self, seen: float) -> bool:
        if self.sign == "==":
            return seen == self.number
        return seen <= self.number if self.sign == "<=" else seen >= self.number

    def __str__(self) -> str:
        return f"{self.sign} {self.number:,g}" + (" x" if self.of == "ratio" else "")


@dataclass(frozen=True, kw_only=True)
class Row:
    """`floor` has the unit of `value`; `spread` is (most - least) / median over the rounds. No value: the note says why."""

    figure: str
    value: float | None
    unit: str
    floor: float | None = None
    ratio: float | None = None
    spread: float | None = None
    target: Target | None = None
    gate: bool = False
    note: str = ""

    @property
    def met(self) -> bool | None:
        """None: there is no target, or nothing to hold against it."""
        if self.target is None or self.value is None:
            return None
        seen = self.ratio if self.target.of == "ratio" else self.value
        return seen is not None and self.target.met(seen)

    @property
    def broken(self) -> bool:
        """A counted gate that does not hold."""
        return self.gate and self.met is False

    def plain(self) -> dict[str, Any]:
        return {**asdict(self), "target": str(self.target) if self.target else None, "met": self.met}


def spread_of(values: Sequence[float]) -> float | None:
    """None for a single round."""
    middle = statistics.median(values)
    return (max(values) - min(values)) / middle if len(values) > 1 and middle else None


def measured(figure: str, unit: str, values: Sequence[float], target: Target | None = None) -> Row:
    """The median of the rounds, without a floor."""
    return Row(figure=figure, unit=unit, value=statistics.median(values), spread=spread_of(values), target=target)


def beside(
    figure: str, unit: str, values: Sequence[float], floors: Sequence[float], target: Target | None = None
) -> Row:
    """Rounds of both, interleaved: the ratio is the median of the rounds' own ratios, and so is the spread."""
    ratios = [value / floor for value, floor in zip(values, floors, strict=True)]
    return Row(
        figure=figure,
        unit=unit,
        value=statistics.median(values),
        floor=statistics.median(floors),
        ratio=statistics.median(ratios),
        spread=spread_of(ratios),
        target=target,
    )


def table(rows: Sequence[Row]) -> str:
    """Aligned columns, one figure a line."""
    head = ("figure", "value", "unit", "floor", "ratio", "spread", "target", "met", "note")
    lines = [head, *(_cells(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    left = {0, 2, 6, 7, 8}
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.figure,
        "" if row.value is None else _number(row.value),
        row.unit,
        "" if row.floor is None else _number(row.floor),
        "" if row.ratio is None else f"{row.ratio:.2f}",
        "" if row.spread is None else f"{row.spread:.0%}",
        str(row.target or ""),
        _MARKS[row.met] + (" gate" if row.gate else ""),
        row.note,
    )


def _number(value: float) -> str:
    if value >= 1_000:
        return f"{value:,.0f}"
    return f"{value:.3f}" if value < 10 else f"{value:.1f}"
