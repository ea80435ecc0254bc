"""Every crash point of a scenario, and every second one after the restart."""

from __future__ import annotations

from datetime import timedelta

import msgspec
from rpcagent.runs.supervisor import Supervisor

from .client import Truth
from .scenario import Ending, Scenario, play
from .world import Plan

MOST_POINTS = 120
MOST_KEPT = 300
"""Where an engine goes in circles, not every point of the circle is tried. With checkpoints there are more points."""


class Tally(msgspec.Struct):
    """`points`: those of the undisturbed scenario. `failures` name the crashes after which an invariant broke. `longest`:
    virtual seconds of the slowest one."""

    name: str
    points: int = 0
    scenarios: int = 0
    failures: dict[tuple[int, ...], tuple[str, ...]] = {}
    unknown: int = 0
    longest: float = 0.0

    def note(self, crashes: tuple[int, ...], ending: Ending) -> None:
        self.scenarios += 1
        self.unknown += bool(ending.unknown)
        self.longest = max(self.longest, ending.seconds)
        if ending.broken:
            self.failures[crashes] = ending.broken

    def text(self) -> str:
        line = f"{self.name}: {self.points} points, {self.scenarios} scenarios, {len(self.failures)} failures"
        shown = [f"  crash at {c}: {b[0]}" for c, b in list(self.failures.items())[:5]]
        return "\n".join([f"{line}, {self.unknown} with a person's answer about an unknown outcome", *shown])


async def undisturbed(
    scenario: Scenario, told: Truth = "happened", kind: type[Supervisor] = Supervisor, *, kept: bool = False
) -> Tally:
    """The scenario without a crash."""
    ending = await play(scenario, Plan(), told, kind, kept=kept)
    tally = Tally(name=scenario.name, points=len(ending.points[0]))
    tally.note((), ending)
    return tally


async def singles(
    scenario: Scenario,
    told: Truth = "happened",
    kind: type[Supervisor] = Supervisor,
    back: timedelta = timedelta(0),
    *,
    kept: bool = False,
    stride: int = 1,
    enough: int | None = None,
) -> Tally:
    """One crash, at each `stride`-th point in turn; and none. Not all of them where `enough` have failed."""
    tally = await undisturbed(scenario, told, kind, kept=kept)
    for first in range(1, min(tally.points, MOST_KEPT if kept else MOST_POINTS) + 1, stride):
        if enough is not None and len(tally.failures) >= enough:
            break
        tally.note((first,), await play(scenario, Plan(crashes=(first,), back=back), told, kind, kept=kept))
    return tally


async def doubles(
    scenario: Scenario,
    stride: int = 1,
    told: Truth = "happened",
    offset: int = 0,
    *,
    kept: bool = False,
    step: int = 1,
) -> Tally:
    """A crash at every `stride`-th point, and a second one at each point (or each `step`-th) that the next process passes."""
    tally = await undisturbed(scenario, told, kept=kept)
    for first in range(1 + offset, tally.points + 1, stride):
        alone = await play(scenario, Plan(crashes=(first,)), told, kept=kept)
        after = len(alone.points[1]) if len(alone.points) > 1 else 0
        for second in range(1 + first % step, after + 1, step):
            tally.note((first, second), await play(scenario, Plan(crashes=(first, second)), told, kept=kept))
    return tally


async def no_space(scenario: Scenario, both: bool = False) -> Tally:
    """The disk is full at each append in turn (and at the next one as well, where `both`)."""
    tally = await undisturbed(scenario)
    appends = (await play(scenario)).commits
    for number in range(1, appends + 1):
        full = frozenset({number, number + 1} if both else {number})
        tally.note((number,), await play(scenario, Plan(full=full)))
    return tally
