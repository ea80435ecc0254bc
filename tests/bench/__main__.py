"""The command: measures everything, prints a row per figure. `python -m tests.bench [--quick] [--json] [--only WORD]`,
or the comparison with other systems in place of all that: `python -m tests.bench --peers [--dbos] [--restate]`.

Exits with 1 where a counted gate does not hold, else with 0 whatever a clock said.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.bench import growth, log_alone, long_past, memory, round_trip, start_up, steps
from tests.bench.peer import Scratch
from tests.bench.row import Row, table
from tests.bench.versus.compare import Work, comparison
from tests.bench.versus.install import cache_folder
from tests.bench.versus.restate import Restate
from tests.bench.versus.systems import DBOS, LANGGRAPH, System

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
            "memory": lambda scratch: memory.resident(scratch, 30),
            "growth": lambda scratch: growth.growth(scratch, 100),
            "past": lambda scratch: long_past.start_up(scratch, 10, 20, 1),
            "list": lambda scratch: long_past.list_all(scratch, 60, 4, 20),
        }
    return {
        "syncs": lambda scratch: steps.syncs_and_bytes(scratch, 1_000),
        "cpu": lambda scratch: steps.cpu_of_daemon(scratch, 1_000, 5) + steps.cpu_of_engine(1_000, 5),
        "rates": lambda scratch: steps.rates(scratch, 250, 200, 10, 5),
        "log": lambda scratch: log_alone.log_alone(scratch, 1_500, 5),
        "status": lambda scratch: round_trip.status_round_trip(scratch, 2_000, 7),
        "start": lambda scratch: start_up.first_answer(scratch, 10_000, 11),
        "restart": lambda scratch: start_up.restart(scratch, 1_000, 9),
        "memory": lambda scratch: memory.resident(scratch, 10_000),
        "growth": lambda scratch: growth.growth(scratch, 16_000),
        "past": lambda scratch: long_past.start_up(scratch, 10_000, 100, 5),
        "list": lambda scratch: long_past.list_all(scratch, 100_000, 4, 100),
    }


def versus(scratch: Scratch, options: argparse.Namespace) -> list[Row]:
    """LangGraph always; the others where they are asked for."""
    others: list[System] = [LANGGRAPH]
    others += [DBOS] if options.dbos else []
    others += [Restate()] if options.restate else []
    if options.quick:
        works, rounds = [Work(runs=1, steps=51, target=3), Work(runs=20, steps=7, target=5)], 2
    else:
        works, rounds = [Work(runs=1, steps=501, target=3), Work(runs=200, steps=21, target=5)], 5
    return comparison(scratch, others, options.cache, works, options.rounds or rounds)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smoke run: few steps, one round")
    parser.add_argument("--json", action="store_true", help="one JSON array instead of the table")
    parser.add_argument("--only", action="append", choices=list(parts(quick=True)), help="only these parts")
    parser.add_argument("--dir", type=Path, help="where the stores are made (default: the temporary directory)")
    parser.add_argument("--peers", action="store_true", help="beside LangGraph with SQLite, and nothing else")
    parser.add_argument("--dbos", action="store_true", help="the same, and beside DBOS on SQLite")
    parser.add_argument("--restate", action="store_true", help="the same, and beside Restate")
    parser.add_argument("--rounds", type=int, help="of the comparison with others (default: 5)")
    parser.add_argument("--cache", type=Path, default=cache_folder(), help="where the others are installed")
    options = parser.parse_args()
    others = options.peers or options.dbos or options.restate
    if others and options.only:
        parser.error("--only is for the figures of rpcagent alone")
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="rpcagent-bench-", dir=options.dir) as folder:
        scratch = Scratch(Path(folder))
        if others:
            chosen: dict[str, Part] = {"peers": lambda scratch: versus(scratch, options)}
        else:
            every = parts(quick=options.quick)
            chosen = {name: every[name] for name in options.only or every}
        for name, part in chosen.items():
            sys.stderr.write(f"{name} ...\n")
            rows += part(scratch)
    sys.stdout.write(json.dumps([row.plain() for row in rows], indent=2) if options.json else table(rows))
    sys.stdout.write("\n")
    return int(any(row.broken for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
