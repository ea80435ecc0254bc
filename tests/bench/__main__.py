"""The command: measures everything, prints a row per figure. `python -m tests.bench [--quick] [--json] [--only WORD]`.

Exits with 1 where a counted gate does not hold, else with 0 whatever a clock said.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.bench import log_alone, memory, round_trip, start_up, steps
from tests.bench.peer import Scratch
from tests.bench.row import Row, table

Part = Callable[[Scratch], list[Row]]


def parts(*, quick: bool) -> dict[str, Part]:
    """In the order in which they are printed. `quick` shows that everything runs; its times mean little."""
    if quick:
        return {
            "syncs": lambda scratch: steps.syncs_and_bytes(scratch, 100),
            "cpu": lambda scratch: steps.cpu_of_daemon(scratch, 100, 1) + steps.cpu_of_engine(100, 1),
            "rates": lambda scratch: steps.rates(scratch, 25, 20, 3, 1),
            "log": lambda scratch: log_alone.log_alone(scratch, 100, 1),
            "status": lambda scratch: round_trip.status_round_trip(scratch, 100, 1),
            "start": lambda scratch: start_up.first_answer(scratch, 20, 1),
            "restart": lambda scratch: start_up.restart(scratch, 100, 1),
            "memory": lambda scratch: memory.resident(scratch, 50),
        }
    return {
        "syncs": lambda scratch: steps.syncs_and_bytes(scratch, 1_000),
        "cpu": lambda scratch: steps.cpu_of_daemon(scratch, 1_000, 5) + steps.cpu_of_engine(1_000, 5),
        "rates": lambda scratch: steps.rates(scratch, 250, 200, 10, 5),
        "log": lambda scratch: log_alone.log_alone(scratch, 1_500, 5),
        "status": lambda scratch: round_trip.status_round_trip(scratch, 2_000, 7),
        "start": lambda scratch: start_up.first_answer(scratch, 1_000, 11),
        "restart": lambda scratch: start_up.restart(scratch, 1_000, 9),
        "memory": lambda scratch: memory.resident(scratch, 1_000),
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smoke run: few steps, one round")
    parser.add_argument("--json", action="store_true", help="one JSON array instead of the table")
    parser.add_argument("--only", action="append", choices=list(parts(quick=True)), help="only these parts")
    parser.add_argument("--dir", type=Path, help="where the stores are made (default: the temporary directory)")
    options = parser.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="rpcagent-bench-", dir=options.dir) as folder:
        scratch = Scratch(Path(folder))
        for name, part in parts(quick=options.quick).items():
            if options.only is None or name in options.only:
                sys.stderr.write(f"{name} ...\n")
                rows += part(scratch)
    sys.stdout.write(json.dumps([row.plain() for row in rows], indent=2) if options.json else table(rows))
    sys.stdout.write("\n")
    return int(any(row.broken for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
