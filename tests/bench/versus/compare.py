"""The comparison: the same work by ours and by others, in rounds that take turns, beside floors of the same minutes.

Knows: what the work is, in which order it is done, and what is set beside what. Does not know: how a system is started or
installed. One that cannot be had, or fails at the work, has a row that says so, and the others go on.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.bench.floors import raw_appends, sqlite_appends
from tests.bench.peer import Scratch
from tests.bench.row import Row, Target, beside, measured
from tests.bench.versus.install import CannotInstall
from tests.bench.versus.syncs import counted
from tests.bench.versus.systems import Ours, System, environment_of

RECORD_BYTES = 700
"""Of one step of the reading agent; what the floors write."""
FLOOR_APPENDS = 500
"""At most: no more than the work has steps."""
WARM_STEPS = 3


@dataclass(frozen=True, kw_only=True)
class Work:
    """`runs` runs, begun at once, of `steps` steps each. `target`: how many times the best of the others."""

    runs: int
    steps: int
    target: float

    def __str__(self) -> str:
        return f"one run x {self.steps} steps" if self.runs == 1 else f"{self.runs} runs x {self.steps} steps"


@dataclass(kw_only=True)
class Contender:
    """One system and what was seen of it. `failed`: why there is nothing more to see."""

    system: System
    environment: Path = Path()
    failed: str = ""
    syncs: float | None = None
    bytes: float = 0.0
    rates: dict[Work, list[float]] = field(default_factory=dict)
    cpu: dict[Work, list[float]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.system.name


def comparison(
    scratch: Scratch, others: Sequence[System], cache: Path, works: Sequence[Work], rounds: int
) -> list[Row]:
    """The first of `works` is also the one in which syncs and bytes are counted."""
    load = os.getloadavg()[0]
    ours, *rest = contenders = [Contender(system=system) for system in (Ours(), *others)]
    for each in contenders:
        _attempt(each, lambda each=each: _prepare(each, cache))
    for each in contenders:
        _attempt(each, lambda each=each: _count(scratch, each, works[0]))
    raw: dict[Work, list[float]] = {work: [] for work in works}
    sqlite: dict[Work, list[float]] = {work: [] for work in works}
    for number in range(rounds):
        _say(f"round {number + 1} of {rounds}")
        turn = number % len(contenders)
        for work in works:
            before = _floors(scratch, min(work.steps * work.runs, FLOOR_APPENDS))
            for each in contenders[turn:] + contenders[:turn]:
                _attempt(each, lambda each=each, work=work: _time(scratch, each, work))
            after = _floors(scratch, min(work.steps * work.runs, FLOOR_APPENDS))
            for seen, place in ((raw, 0), (sqlite, 1)):
                seen[work].append(2 / (1 / before[place] + 1 / after[place]))
    assert not ours.failed, ours.failed
    rows = [row for each in contenders for row in _counted_rows(each, works[0])]
    for work in works:
        rows += timed_rows(work, ours, rest, raw[work], sqlite[work])
    rows.append(Row(figure="load average at the end", value=os.getloadavg()[0], unit="", note=f"{load:.1f} before"))
    return rows


def _attempt(each: Contender, what: Callable[[], None]) -> None:
    """What one of the others cannot do ends its part, not the comparison."""
    if each.failed:
        return
    try:
        what()
    except CannotInstall as error:
        each.failed = f"cannot be installed: {error}"
    except (OSError, EOFError, AssertionError, ValueError) as error:
        each.failed = f"failed: {error or type(error).__name__}"
    if each.failed:
        _say(f"{each.name} {each.failed}")


def _prepare(each: Contender, cache: Path) -> None:
    each.environment = environment_of(each.system, cache)


def _count(scratch: Scratch, each: Contender, work: Work) -> None:
    """Syncs, by strace; bytes, by what a store is larger than one that was only warmed, both after an end in order."""
    _say(f"counting the syncs of {each.name}")
    warmed, worked = _store(scratch), _store(scratch)
    with each.system.start(scratch, warmed, each.environment) as running:
        running.work(1, WARM_STEPS)
        running.close()
    with each.system.start(scratch, worked, each.environment) as running:
        running.work(1, WARM_STEPS)
        with counted(running.pids, scratch.fresh("strace")) as seen:
            running.work(work.runs, work.steps)
        running.close()
    steps = work.runs * work.steps
    each.syncs = None if seen.syncs is None else seen.syncs / steps
    each.bytes = (_size(worked) - _size(warmed)) / steps
    for store in (warmed, worked):
        shutil.rmtree(store)


def _time(scratch: Scratch, each: Contender, work: Work) -> None:
    store = _store(scratch)
    with each.system.start(scratch, store, each.environment) as running:
        running.work(1, WARM_STEPS)
        used, began = _cpu_s(running.pids), time.perf_counter()
        running.work(work.runs, work.steps)
        took, used = time.perf_counter() - began, _cpu_s(running.pids) - used
        running.close()
    steps = work.runs * work.steps
    each.rates.setdefault(work, []).append(steps / took)
    each.cpu.setdefault(work, []).append(used / steps * 1e6)
    shutil.rmtree(store)


def _cpu_s(pids: Sequence[int]) -> float:
    """User and system time so far, threads that have ended included, in steps of a clock tick."""
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def _floors(scratch: Scratch, count: int) -> tuple[float, float]:
    """Records a second: bare appends, and SQLite with a transaction each."""
    return (
        count / raw_appends(scratch.fresh("raw"), count, RECORD_BYTES).wall,
        count / sqlite_appends(scratch.fresh("sqlite"), count, RECORD_BYTES).wall,
    )


def _store(scratch: Scratch) -> Path:
    store = scratch.fresh("versus")
    store.mkdir(mode=0o700)
    return store


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _counted_rows(each: Contender, work: Work) -> Iterable[Row]:
    """Fewer syncs than steps would mean that something was acknowledged before it was durable."""
    if each.failed:
        yield Row(figure=each.name, value=None, unit="", note=each.failed)
        return
    about = each.system.about
    if each.syncs is None:
        about += "; syncs not counted: strace is not here, or may not look"
    least = Target(sign=">=", number=1)
    yield Row(figure=f"syncs per step, {each.name}", value=each.syncs, unit="", target=least, note=about)
    kept = f"bytes on disk per step, {work.steps} steps, {each.name}"
    yield Row(figure=kept, value=each.bytes, unit="B", note="all files, after an end in order")


def timed_rows(
    work: Work, ours: Contender, others: Sequence[Contender], raw: Sequence[float], sqlite: Sequence[float]
) -> list[Row]:
    """The best of the others is looked for in each round anew: the harder comparison."""
    there = [each for each in others if not each.failed]
    rows = [beside(f"{work}, {each.name}, beside raw", "steps/s", each.rates[work], raw) for each in (ours, *there)]
    mine = ours.rates[work]
    rows.append(beside(f"{work}, ours beside SQLite WAL FULL", "steps/s", mine, sqlite))
    rows += [beside(f"{work}, ours beside {each.name}", "steps/s", mine, each.rates[work]) for each in there]
    if there:
        best = [max(seen) for seen in zip(*(each.rates[work] for each in there), strict=True)]
        aim = Target(sign=">=", number=work.target, of="ratio")
        rows.append(beside(f"{work}, ours beside the best of them", "steps/s", mine, best, aim))
    rows += [measured(f"{work}, CPU per step, {each.name}", "us", each.cpu[work]) for each in (ours, *there)]
    return rows


def _say(what: str) -> None:
    sys.stderr.write(f"  {what}\n")
    sys.stderr.flush()
