"""`python -m tests.soak`: so many seconds of lives for each seed, side by side, and what was found."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.process.wire_driver import ROOT
from tests.soak.chain import Chain


def one(seed: int, seconds: float) -> int:
    """The exit code. What a finding needs is kept, and named."""
    folder = Path(tempfile.mkdtemp(prefix=f"soak-{seed}-"))
    with Chain(folder / "chain", seed) as chain:
        tally = chain.run(seconds=seconds)
    print(tally.text(), flush=True)
    if tally.finding:
        print(f"kept: {folder}", flush=True)
        return 1
    shutil.rmtree(folder)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="of lives; the end comes on top (default: 60)")
    parser.add_argument("--seed", type=int, default=1, help="the first one; one in three is with a key (default: 1)")
    parser.add_argument("--sides", type=int, default=1, help="so many seeds at the same time (default: 1)")
    options = parser.parse_args()
    if options.sides == 1:
        return one(options.seed, options.seconds)
    command = [sys.executable, "-m", "tests.soak", "--seconds", str(options.seconds), "--seed"]
    sides = [subprocess.Popen([*command, str(options.seed + n)], cwd=ROOT) for n in range(options.sides)]
    return max([side.wait() for side in sides])


if __name__ == "__main__":
    sys.exit(main())
