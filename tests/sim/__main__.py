"""`python -m tests.sim`: every single and double crash of every scenario, and what became of the planted bugs."""

from __future__ import annotations

import sys
import time
from datetime import timedelta

from . import planted_files, scenarios, sweep
from .loop import run
from .planted import PLANTED, planted


async def _report() -> bool:
    good = True
    began = time.perf_counter()

    def show(what: str, tally: sweep.Tally) -> None:
        nonlocal good
        good &= not tally.failures
        print(f"[{time.perf_counter() - began:6.1f} s] {what}: {tally.text()}")

    for told in ("happened", "happened_without_result", "abandon"):
        show(f"singles, unknown outcomes: {told}", await sweep.singles(scenarios.A, told))
        show(f"doubles, unknown outcomes: {told}", await sweep.doubles(scenarios.A, 1, told))
    for scenario in scenarios.OTHERS:
        show("singles", await sweep.singles(scenario))
        show("singles, clock put back a day", await sweep.singles(scenario, back=timedelta(days=1)))
        show("doubles, every 5th first crash", await sweep.doubles(scenario, 5))
    for scenario in (scenarios.A, *scenarios.OTHERS, scenarios.DELETED):
        show("singles, with checkpoints", await sweep.singles(scenario, kept=True))
        show("doubles, with checkpoints", await sweep.doubles(scenario, 17, kept=True, step=7))
    show("no space for one record", await sweep.no_space(scenarios.A))
    show("no space for two records", await sweep.no_space(scenarios.A, both=True))
    for name, kind in PLANTED.items():
        with planted(kind):
            tally = await sweep.singles(scenarios.A, kind=kind)
        good &= bool(tally.failures)
        print(f"planted: {name}: found in {len(tally.failures)} of {tally.scenarios} scenarios")
    for name, (scenario, bug) in planted_files.PLANTED.items():
        with bug():
            tally = await sweep.singles(scenario, kept=True, enough=3)
        good &= bool(tally.failures)
        print(f"planted: {name}: found in {len(tally.failures)} of {tally.scenarios} scenarios")
    return good


if __name__ == "__main__":
    sys.exit(0 if run(_report) else 1)
