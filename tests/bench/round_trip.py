"""Figures of the wire: `status`, alone and 64 in flight, beside a child that gives each line back as it came."""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.bench.floors import ECHO, child
from tests.bench.peer import STATUS, Daemon, Peer, Scratch
from tests.bench.row import Row, Target, beside, measured

IN_FLIGHT = 64


def status_round_trip(scratch: Scratch, calls: int, rounds: int) -> list[Row]:
    """With one call in flight the CPU time is in part the kernel's, for a sleep and a wake-up at each call."""
    alone, alone_floor, rate, rate_floor, cpu, cpu_alone, cpu_floor = [], [], [], [], [], [], []
    with Daemon(scratch, scratch.fresh("status")) as daemon, child(scratch, ECHO) as echo:
        for peer in (daemon, echo):
            _one_by_one(peer, 50)
        for _ in range(rounds):
            before = echo.cpu_now_s()
            alone_floor.append(_one_by_one(echo, calls))
            cpu_floor.append((echo.cpu_now_s() - before) / calls * 1e6)
            before = daemon.cpu_now_s()
            alone.append(_one_by_one(daemon, calls))
            cpu_alone.append((daemon.cpu_now_s() - before) / calls * 1e6)
            rate_floor.append(_pipelined(echo, calls * 8))
            before = daemon.cpu_now_s()
            rate.append(_pipelined(daemon, calls * 8))
            cpu.append((daemon.cpu_now_s() - before) / (calls * 8) * 1e6)
    return [
        beside("status, 1 in flight, p50", "us", alone, alone_floor, Target(sign="<=", number=6, of="ratio")),
        beside("status, 64 in flight", "calls/s", rate, rate_floor, Target(sign=">=", number=0.12, of="ratio")),
        measured("CPU per status, 64 in flight", "us", cpu, Target(sign="<=", number=60)),
        beside("CPU per status, 1 in flight", "us", cpu_alone, cpu_floor, Target(sign="<=", number=60)),
    ]


@contextlib.contextmanager
def _apart(peer: Peer) -> Iterator[None]:
    """This process on one processor and the peer on another: else the scheduler decides, anew in each round, whether a
    wake-up costs an echo 7 us or 20."""
    allowed = os.sched_getaffinity(0)
    here, *others = sorted(allowed)
    _place(peer, others or [here])
    os.sched_setaffinity(0, [here])
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)
        _place(peer, allowed)


def _place(peer: Peer, processors: Iterable[int]) -> None:
    for thread in Path(f"/proc/{peer.pid}/task").iterdir():
        os.sched_setaffinity(int(thread.name), processors)


def _one_by_one(peer: Peer, calls: int) -> float:
    """Median of the round trips, in microseconds."""
    took = []
    with _apart(peer):
        for _ in range(calls):
            began = time.perf_counter()
            peer.ask(STATUS)
            took.append(time.perf_counter() - began)
    return statistics.median(took) * 1e6


def _pipelined(peer: Peer, calls: int) -> float:
    """Answers a second, while `IN_FLIGHT` are on their way."""
    began = time.perf_counter()
    peer.write(STATUS * IN_FLIGHT)
    sent, seen = IN_FLIGHT, 0
    while seen < calls:
        got = peer.lines(calls)
        seen += got
        more = min(got, calls - sent)
        if more > 0:
            peer.write(STATUS * more)
            sent += more
    return calls / (time.perf_counter() - began)
