"""Work for LangGraph with SqliteSaver: a graph of one node that is its own successor. Arguments: the folder of the store.

Each line of input, `{"runs": R, "steps": S}`, is answered when all steps of all runs are durable, with the number of
checkpoints that the saver then has of them. `durability="sync"`: a step's checkpoint is written before the next begins.
"""

from __future__ import annotations

import json
import sqlite3
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypedDict

from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.graph import END, START, StateGraph


class Counted(TypedDict):
    done: int
    steps: int


def main(folder: Path) -> None:
    connection = sqlite3.connect(folder / "langgraph.sqlite", check_same_thread=False)
    graph = StateGraph(Counted)
    graph.add_node("step", lambda state: {"done": state["done"] + 1})
    graph.add_edge(START, "step")
    graph.add_conditional_edges("step", lambda state: "step" if state["done"] < state["steps"] else END)
    compiled = graph.compile(checkpointer=SqliteSaver(connection))

    def run(name: str, steps: int) -> None:
        settings = {"configurable": {"thread_id": name}, "recursion_limit": steps + 10}
        end = compiled.invoke({"done": 0, "steps": steps}, settings, durability="sync")
        assert end["done"] == steps, end

    for asked, line in enumerate(sys.stdin):
        work = json.loads(line)
        names = [f"{asked}-{number}" for number in range(work["runs"])]
        with ThreadPoolExecutor(work["runs"]) as pool:
            list(pool.map(run, names, [work["steps"]] * work["runs"]))
        kept = connection.execute("select count(*) from checkpoints where thread_id like ?", (f"{asked}-%",)).fetchone()
        print(json.dumps({"kept": kept[0]}), flush=True)
    connection.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
