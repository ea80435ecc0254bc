"""All crash sweeps of the journal, larger than the tests take them: `python -m tests.journal.sweep`.

Prints how many disks were judged and how long it took, then each safeguard that was taken away and what caught it.
Ends with 1 if something was not caught, or with the failure itself."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

from . import checkpoint_damage as damage
from . import checkpoint_story as story
from .checkpoint_mutants import MUTANTS

PARTS = max(2, os.cpu_count() or 2)


KINDS = (story.Store, story.Eager)


def crash(part: int) -> story.Tally:
    tally = story.Tally()
    for kind in KINDS:
        tally += story.crash_everywhere(kind, cap=8, shapes=100, part=(part, PARTS))
    return tally


def recovery(part: int) -> story.Tally:
    tally = story.Tally()
    for kind in KINDS:
        tally += story.crash_in_recovery(kind, every=3, part=(part, PARTS))
    return tally


def failed_sync(part: int) -> story.Tally:
    tally = story.Tally()
    for kind in KINDS:
        tally += story.fail_each_sync(kind, cap=4, shapes=16, part=(part, PARTS))
    return tally


def full(part: int) -> story.Tally:
    tally = story.Tally()
    for kind in KINDS:
        tally += story.full_at_each_write(kind, after=3, shapes=6, part=(part, PARTS))
    return tally


SWEEPS: tuple[tuple[str, Callable[[int], story.Tally]], ...] = (
    ("a crash at each call", crash),
    ("a crash in recovery, sweep and checkpoint after a crash", recovery),
    ("each sync fails", failed_sync),
    ("each write stops half way", full),
)


def mutant(number: int) -> str | None:
    return MUTANTS[number].caught()


def rot(which: str) -> list[str]:
    image = getattr(damage, which)()
    flips = damage.flip_every_byte(image, bits=tuple(range(8)))
    return [f"{which}: flipped {flips}", f"{which}: cut {damage.cut_every_byte(image)}"]


def main() -> int:
    begin = time.monotonic()
    total = story.Tally()
    with ProcessPoolExecutor(PARTS) as pool:
        futures = [(name, [pool.submit(sweep, part) for part in range(PARTS)]) for name, sweep in SWEEPS]
        rots = [pool.submit(rot, which) for which in ("clean_stop", "killed")]
        caught = [pool.submit(mutant, number) for number in range(len(MUTANTS))]
        for name, parts in futures:
            tally = story.Tally()
            for part in parts:
                tally += part.result()
            print(f"{name:58} {tally}", flush=True)
            total += tally
        print(f"{'in all':58} {total}; {time.monotonic() - begin:.0f} s", flush=True)
        for future in rots:
            print("\n".join(future.result()))
        print(f"lost file: {damage.lose_each_file()}\n")
        missed = 0
        for found, future in zip(MUTANTS, caught, strict=True):
            answer = future.result()
            missed += answer is None
            print(f"{found.name:42} {found.check.__doc__ or '':22} {(answer or 'NOT CAUGHT')[:110]}", flush=True)
    print(f"\n{len(MUTANTS) - missed} of {len(MUTANTS)} caught; {time.monotonic() - begin:.0f} s")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
