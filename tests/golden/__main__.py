"""`python -m tests.golden --make NAME` makes a golden store with this version; `--expect NAME` writes down anew what it must
give, for a person to compare.

A store is made once for each format that was released, and never again: an existing one is not overwritten.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.golden import looking, making


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.golden", description=__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--make", metavar="NAME", help="a new store, such as format-1")
    what.add_argument("--expect", metavar="NAME", help="expected.json of a store that is there")
    options = parser.parse_args()
    name = options.make or options.expect
    folder = looking.STORES / name
    if options.make:
        for path in (folder, making.PLACE):
            if path.exists():
                sys.stderr.write(f"{path} is there; nothing was made\n")
                return 1
        asked = making.make()
        folder.mkdir(parents=True)
        making.keep(folder / "store")
        store = folder / "store"
        told = {"made": looking.latest(store), "files": looking.sums(store), "asked": asked}
        (folder / "manifest.json").write_text(making.dump(told))
    (folder / "expected.json").write_text(making.dump(expected(name)))
    return 0


def expected(name: str) -> dict[str, Any]:
    told = json.loads((looking.STORES / name / "manifest.json").read_text())
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        return {
            "held": looking.held(looking.copied(name, Path(one)), told["asked"], told["made"]),
            "goneOn": looking.gone_on(looking.copied(name, Path(other)), told["asked"], told["made"]),
        }


if __name__ == "__main__":
    sys.exit(main())
