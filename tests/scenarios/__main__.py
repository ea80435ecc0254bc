"""`python -m tests.scenarios --update [NAME ...]` rewrites what the examples receive; without `--update` it only says which differ."""

from __future__ import annotations

import sys

from .replay import EXAMPLES, FILES, acts, play, read
from .update import update


def main(arguments: list[str]) -> int:
    names = [a for a in arguments if not a.startswith("--")]
    files = [EXAMPLES / f"{name}.jsonl" for name in names] or FILES
    differ = 0
    for path in files:
        if "--update" in arguments:
            changed = update(path)
        else:
            known = acts(read(path))
            changed = play([entry for entry, _ in known])[0] != known
        differ += changed
        print(f"{'changed' if changed else 'same':8}{path.name}")
    return int(bool(differ) and "--update" not in arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
