"""Work for DBOS on SQLite: a workflow that calls one step again and again. Arguments: the folder of the store.

Each line of input, `{"runs": R, "steps": S}`, is answered when all steps of all runs are durable, with the number of step
results that the database then has of them.
"""

from __future__ import annotations

import json
import os
import random
import sqlite3
import sys
from pathlib import Path

from dbos import DBOS, SetWorkflowID

TEXT = random.Random(1).randbytes(200).hex()
"""What brings a step's row and its index entries to some 700 bytes."""


@DBOS.step()
def step(number: int) -> str:
    return f"{number} {TEXT}"


@DBOS.workflow()
def run(steps: int) -> int:
    for number in range(steps):
        step(number)
    return steps


def start(name: str, steps: int) -> object:
    with SetWorkflowID(name):
        return DBOS.start_workflow(run, steps)


def main(folder: Path) -> None:
    database = folder / "dbos.sqlite"
    DBOS(
        config={
            "name": "bench",
            "system_database_url": f"sqlite:///{database}",
            "log_level": "ERROR",
            "run_admin_server": False,
            "application_version": "1",
        }
    )
    DBOS.launch()
    for asked, line in enumerate(sys.stdin):
        work = json.loads(line)
        started = [start(f"{asked}-{number}", work["steps"]) for number in range(work["runs"])]
        for each in started:
            assert each.get_result() == work["steps"]
        with sqlite3.connect(database) as connection:
            kept = connection.execute(
                "select count(*) from operation_outputs where workflow_uuid like ?", (f"{asked}-%",)
            ).fetchone()
        print(json.dumps({"kept": kept[0]}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    # Its threads do not end by themselves.
    os._exit(0)
