"""Figures of the engine: syncs, CPU time, rate and bytes for a step, by the real daemon and by the engine alone."""

from __future__ import annotations

import os
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import anyio
from rpcagent.models.scripted import ScriptedModel
from rpcagent.runs import events as ev
from rpcagent.runs.decide import Rules
from rpcagent.runs.definition import Budget, Definition, ModelSettings, Rule
from rpcagent.runs.outcomes import LookUp, ToolReply
from rpcagent.runs.ports import ToolRequest
from rpcagent.runs.supervisor import Supervisor
from rpcagent.tools.builtin import BUILTIN
from tests.bench.floors import raw_appends
from tests.bench.peer import NO_LIMITS, Daemon, Scratch, reading_agent
from tests.bench.row import Row, Target, beside, measured

WAIT_MS = 600_000
RECORD_BYTES = 700
"""Of one step of the reading agent."""


def run_once(daemon: Daemon, key: str, turns: int, *, drive: str = "auto", wait_ms: int = WAIT_MS) -> dict[str, Any]:
    """Starts a run; its `run` member when it rests."""
    run: dict[str, Any] = daemon.call(
        "start",
        clientRequestId=key,
        agent=reading_agent(turns),
        input="go",
        budget=NO_LIMITS,
        drive=drive,
        waitMs=wait_ms,
    )["run"]
    return run


def steps_of(daemon: Daemon, run_id: str) -> int:
    steps: int = daemon.call("status", runId=run_id)["budget"]["spent"]["steps"]
    return steps


def syncs_and_bytes(scratch: Scratch, turns: int) -> list[Row]:
    """Counted, so they gate. All syncs of the process are in it: making the store and opening it as well."""
    rows = []
    store = scratch.fresh("auto")
    with Daemon(scratch, store) as daemon:
        run = run_once(daemon, "auto", turns)
        assert run["status"] == "completed", run
        steps = steps_of(daemon, run["runId"])
        syncs = daemon.journal()["syncs"] / steps
        daemon.close()
    rows.append(_gate(f"syncs per step, auto, {steps:,} steps", syncs, 1.1))
    sizes = _record_sizes(store)
    rows += _bytes_rows(sizes, steps)
    manual = min(turns, 1_000)
    with Daemon(scratch, scratch.fresh("manual")) as daemon:
        run = run_once(daemon, "manual", manual, drive="manual")
        asked = 0
        while run["status"] == "ready":
            asked += 1
            run = daemon.call("step", clientRequestId=f"step-{asked}", runId=run["runId"], waitMs=30_000)["run"]
        assert run["status"] == "completed", run
        syncs = daemon.journal()["syncs"] / steps_of(daemon, run["runId"])
        daemon.close()
    rows.insert(1, _gate(f"syncs per step, manual, {asked:,} steps", syncs, 2.1))
    return rows


def _gate(figure: str, value: float, most: float) -> Row:
    return Row(figure=figure, unit="", value=value, target=Target(sign="<=", number=most), gate=True)


def _record_sizes(store: Path) -> list[int]:
    """Bytes of each commit in the log, oldest first."""
    lines = [line for segment in sorted((store / "wal").glob("*.jsonl")) for line in segment.read_bytes().split(b"\n")]
    return [len(line) + 1 for line in lines if b'"k":"commit"' in line[:100]]


def _bytes_rows(sizes: list[int], steps: int) -> list[Row]:
    """The size of a record around some steps of one run, set beside that around its fiftieth."""

    def around(step: int) -> float:
        window = sizes[step - 10 : step + 10]
        return sum(window) / len(window)

    first = around(50)
    places = [place for place in (100, 1_000, 1_980) if place + 10 < steps]
    flat = Target(sign="<=", number=1.05, of="ratio")
    return [
        Row(figure=f"bytes on disk a step, at step {place:,}", unit="B", value=seen, floor=first, ratio=seen / first,
            target=flat)
        for place in places
        for seen in [around(place)]
    ]  # fmt: skip


def cpu_of_daemon(scratch: Scratch, turns: int, rounds: int) -> list[Row]:
    """The whole process: both threads, in the kernel too, from the first request for a run to its end. Once with the store
    in memory, where a sync costs nothing and no wait cools the caches; and once on the disk, beside what the kernel alone
    takes to write and sync as many bytes as often, which no engine can save."""
    us, raw, rate, us_in_memory = [], [], [], []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory(prefix="rpcagent-bench-", dir=_memory()) as folder:
            steps, used, _ = _cpu_of_a_run(scratch, Path(folder) / "store", turns)
        us_in_memory.append(used / steps * 1e6)
        steps, used, took = _cpu_of_a_run(scratch, scratch.fresh("cpu"), turns)
        us.append(used / steps * 1e6)
        raw.append(raw_appends(scratch.fresh("raw"), steps // 2, RECORD_BYTES).cpu / (steps // 2) * 1e6)
        rate.append(steps / took)
    return [
        measured("CPU per step, daemon, store in memory", "us", us_in_memory, Target(sign="<=", number=300)),
        beside("CPU per step, daemon, store on disk, beside write + sync", "us", us, raw),
        measured(f"rate of that run, {steps:,} steps", "steps/s", rate),
    ]


def _cpu_of_a_run(scratch: Scratch, store: Path, turns: int) -> tuple[int, float, float]:
    """Steps, seconds of CPU, seconds by the wall."""
    with Daemon(scratch, store) as daemon:
        daemon.call("status")
        before, began = daemon.cpu_now_s(), time.perf_counter()
        run = run_once(daemon, "cpu", turns)
        used, took = daemon.cpu_now_s() - before, time.perf_counter() - began
        steps = steps_of(daemon, run["runId"])
        daemon.close()
    return steps, used, took


def _memory() -> str | None:
    """Where files live in memory, if this system has such a place."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


class _NoJournal:
    """Takes everything and keeps nothing."""

    store_id, epoch = "sto_bench", 1

    async def append(
        self, run_id: str, epoch: int, expected_seq: int, count: int, body: bytes, *, outcome: bool = False
    ) -> Literal["ok", "fenced", "conflict"]:
        return "ok"

    def health(self) -> dict[str, Any]:
        return {}


class _NoTools:
    async def call(self, request: ToolRequest) -> ToolReply:
        return ToolReply(result={"content": [{"type": "text", "text": "a short file"}]})

    async def look_up(self, request: ToolRequest) -> LookUp:
        return LookUp(answer="unsure")


class _WallClock:
    def now(self) -> datetime:
        return datetime.now(UTC)


def cpu_of_engine(turns: int, rounds: int) -> list[Row]:
    """Mailbox, fold, decide, encoding and tasks; no journal, no tool, no wire."""
    figures = [anyio.run(_engine_alone, turns) for _ in range(rounds)]
    return [measured(f"CPU per step, engine alone, {turns * 2 + 1:,} steps", "us", figures)]


async def _engine_alone(turns: int) -> float:
    agent = reading_agent(turns)
    definition = Definition(
        agent="bench",
        model=ModelSettings(script=tuple(agent["model"]["script"])),
        tools=tuple(spec for spec in BUILTIN if spec.name == "files.read"),
        rules=(Rule(do="allow"),),
        budget=Budget(steps=None, attempts=None, repeats=None),
    )
    event = ev.RunStarted(
        client_request_id="bench",
        namespace="",
        fingerprint="",
        definition=definition,
        input="go",
        epoch=1,
        drive="auto",
        recovery="auto",
        workspace="/",
        labels={},
    )
    async with anyio.create_task_group() as group:
        supervisor = Supervisor(
            journal=_NoJournal(),
            clock=_WallClock(),
            model=ScriptedModel(),
            tools=_NoTools(),
            rules=Rules(epoch=1),
            spawn=group.start_soon,
            incident=_incident,
            fatal=lambda error: None,
        )
        before = time.process_time()
        answer = await supervisor.start(event, WAIT_MS)
        used = time.process_time() - before
    state = answer.actor.state
    assert state is not None
    assert state.phase == "completed", state.error
    return used / state.spent.steps * 1e6


def _incident(error: BaseException, what: str) -> str:
    raise error


def rates(scratch: Scratch, turns: int, runs: int, turns_each: int, rounds: int) -> list[Row]:
    """Steps a second beside appends a second of the bare file system, with the same bytes a record."""
    one, one_raw, many, many_raw, per_sync = [], [], [], [], []
    for _ in range(rounds):
        seen, floor, _ = _rate(scratch, 1, turns)
        one.append(seen)
        one_raw.append(floor)
        seen, floor, records = _rate(scratch, runs, turns_each)
        many.append(seen)
        many_raw.append(floor)
        per_sync.append(records)
    least = Target(sign=">=", number=0.35, of="ratio")
    return [
        beside(f"one run x {2 * turns + 1:,} steps", "steps/s", one, one_raw, least),
        beside(f"{runs} runs x {2 * turns_each + 1} steps", "steps/s", many, many_raw),
        measured(f"{runs} runs, records per sync", "", per_sync, Target(sign=">=", number=runs / 4)),
    ]


def _rate(scratch: Scratch, runs: int, turns: int) -> tuple[float, float, float]:
    """Steps a second; appends a second of the file system, before and after; records a sync."""
    count = min(runs * (2 * turns + 1), 500) // 2
    with Daemon(scratch, scratch.fresh("rate")) as daemon:
        daemon.call("status")
        before = raw_appends(scratch.fresh("raw"), count, RECORD_BYTES).wall
        steps, took, records = _timed_runs(daemon, runs, turns)
        after = raw_appends(scratch.fresh("raw"), count, RECORD_BYTES).wall
        daemon.close()
    return steps / took, 2 * count / (before + after), records


def _timed_runs(daemon: Daemon, runs: int, turns: int) -> tuple[int, float, float]:
    """Steps, seconds, records a sync; the requests are in the time."""
    before = daemon.journal()
    began = time.perf_counter()
    for number in range(runs):
        daemon.send(
            "start",
            clientRequestId=f"run-{number}",
            agent=reading_agent(turns),
            input="go",
            budget=NO_LIMITS,
            waitMs=WAIT_MS,
        )
    for _ in range(runs):
        run = daemon.result()["run"]
        assert run["status"] == "completed", run
    took = time.perf_counter() - began
    after = daemon.journal()
    records, syncs = (after[name] - before[name] for name in ("records", "syncs"))
    return runs * (2 * turns + 1), took, records / syncs
