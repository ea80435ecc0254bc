"""Figures of a start: from spawn to the first answer, and from spawn after kill -9 to the first new step."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

from tests.bench.floors import JSON_ECHO, SAME_IMPORTS, child
from tests.bench.past import wait_until_moved
from tests.bench.peer import CALLS_AT_ONCE, STATUS, Daemon, Peer, Scratch, reading_agent
from tests.bench.row import Row, Target, beside
from tests.bench.steps import run_once

OUTCOMES = frozenset({"model_answered", "tool_completed"})


def first_answer(scratch: Scratch, finished_runs: int, rounds: int) -> list[Row]:
    """The store is made in the time of the first figure: that is what a first try sees. Wall time, and CPU time. A full store
    twice: as a daemon leaves it that ends right after the last run, and as one leaves it that was idle for a while."""
    full = _store_of_finished_runs(scratch, finished_runs)
    moved = scratch.fresh("moved")
    shutil.copytree(full, moved)
    with Daemon(scratch, moved) as daemon:
        daemon.call("status")
        wait_until_moved(moved)
        daemon.close()
    ways: dict[str, Callable[[], Peer]] = {
        "echo": lambda: child(scratch, JSON_ECHO),
        "imports": lambda: child(scratch, SAME_IMPORTS),
        "daemon": lambda: Daemon(scratch, scratch.fresh("empty")),
        "full": lambda: Daemon(scratch, full),
        "moved": lambda: Daemon(scratch, moved),
    }
    wall: dict[str, list[float]] = {name: [] for name in ways}
    cpu: dict[str, list[float]] = {name: [] for name in ways}
    for spawn in ways.values():
        _spawn_to_answer(spawn)  # bytecode, page cache
    for _ in range(rounds):
        for name, spawn in ways.items():
            took, used = _spawn_to_answer(spawn)
            wall[name].append(took)
            cpu[name].append(used)
    some = f"{finished_runs:,} finished runs"
    return [
        beside("spawn to answer, beside a JSON echo", "ms", wall["daemon"], wall["echo"], _most(8)),
        beside("CPU from spawn to end, beside a JSON echo", "ms", cpu["daemon"], cpu["echo"]),
        beside("spawn to answer, beside the same imports", "ms", wall["daemon"], wall["imports"], _most(1.5)),
        beside("CPU from spawn to end, beside the same imports", "ms", cpu["daemon"], cpu["imports"]),
        beside(f"spawn to answer, {some}, as they ended, beside none", "ms", wall["full"], wall["daemon"], _most(2)),
        beside(f"spawn to answer, {some}, log moved, beside none", "ms", wall["moved"], wall["daemon"], _most(2)),
    ]


def _most(number: float) -> Target:
    return Target(sign="<=", number=number, of="ratio")


def _spawn_to_answer(spawn: Callable[[], Peer]) -> tuple[float, float]:
    """Milliseconds of wall time to the first answer, and of CPU time of the whole life."""
    with spawn() as peer:
        peer.ask(STATUS)
        took = time.perf_counter() - peer.asked
        peer.close()
    return took * 1e3, peer.cpu_s * 1e3


def _store_of_finished_runs(scratch: Scratch, count: int) -> Path:
    store = scratch.fresh("finished")
    with Daemon(scratch, store) as daemon:
        for first in range(0, count, CALLS_AT_ONCE):
            numbers = range(first, min(first + CALLS_AT_ONCE, count))
            for number in numbers:
                daemon.send("start", clientRequestId=f"run-{number}", agent=reading_agent(1), input="go", waitMs=60_000)
            for _ in numbers:
                assert daemon.result()["run"]["status"] == "completed"
        daemon.close()
    return store


def restart(scratch: Scratch, records: int, rounds: int) -> list[Row]:
    """One run in the middle of its steps, `records` of them in the log when the process was killed."""
    killed = scratch.fresh("killed")
    with Daemon(scratch, killed) as daemon:
        run_once(daemon, "long", records * 2, wait_ms=0)
        while daemon.journal()["records"] < records:
            time.sleep(0.005)
        daemon.kill()
    with_log, without = [], []
    for _ in range(rounds):
        without.append(_spawn_to_answer(lambda: Daemon(scratch, scratch.fresh("empty")))[0])
        store = scratch.fresh("restarted")
        shutil.copytree(killed, store)
        with_log.append(_spawn_to_step(scratch, store))
        shutil.rmtree(store)
    return [beside(f"kill -9 to first new step, {records:,} records", "ms", with_log, without, _most(2))]


def _spawn_to_step(scratch: Scratch, store: Path) -> float:
    """Milliseconds. The first new step is one whose outcome this process made durable."""
    with Daemon(scratch, store) as daemon:
        daemon.send("initialize", protocolVersion=1, capabilities={"events": "all"})
        daemon.answer(_is_outcome)
        took = time.perf_counter() - daemon.asked
        daemon.kill()
    return took * 1e3


def _is_outcome(message: dict[str, object]) -> bool:
    params = message.get("params")
    return isinstance(params, dict) and params.get("event", {}).get("type") in OUTCOMES
