"""A disk that takes its time: the daemon answers meanwhile, what waits shares the next sync, and nobody pays for more than one.
P2, S1-26; syncs are counted, and time is only compared with a delay that is ten times as long.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.process import disks
from tests.process.wire_driver import Daemon

pytestmark = pytest.mark.process

SLOW_MS = 500
QUICK_S = 0.05
MANY = 512
PLAIN: dict[str, Any] = {
    "agent": {"model": {"script": [{"text": "done"}]}, "tools": []},
    "input": "",
    "drive": "manual",
}


@contextlib.contextmanager
def slow(store: Path, how: str) -> Iterator[Daemon]:
    """A daemon whose syncs take half a second longer: of the log at the seam, or each fdatasync of the kernel."""
    if how == "seam":
        with Daemon(store, rig=("--slow-sync", str(SLOW_MS))) as daemon:
            daemon.call("status")
            yield daemon
        return
    with Daemon(store) as daemon:
        daemon.call("status")
        with disks.tampered(daemon.pid, "-e", f"inject=fdatasync:delay_enter={SLOW_MS * 1_000}"):
            yield daemon


def in_the_log(daemon: Daemon, size: int) -> bool:
    return max((daemon.store / "wal").iterdir()).stat().st_size > size


@pytest.mark.parametrize("how", ["seam", pytest.param("kernel", marks=disks.needs_strace)])
def test_status_is_answered_at_once_while_a_commit_waits_for_half_a_second(tmp_path: Path, how: str):
    with slow(tmp_path / "store", how) as daemon:
        size = max((daemon.store / "wal").iterdir()).stat().st_size
        began = time.monotonic()
        started = daemon.send("start", clientRequestId="run", **PLAIN)
        took = []
        while started not in daemon._answers:
            asked = time.monotonic()
            health = daemon.call("status")
            if started in daemon._answers:
                break
            took.append(time.monotonic() - asked)
            assert health["status"] == "ok"
        assert in_the_log(daemon, size)
        assert time.monotonic() - began > SLOW_MS / 1_000
        assert daemon.result(started)["replayed"] is False
        assert daemon.call("status")["counts"] == {"ready": 1}
    print(f"{len(took)} answers while one commit waited, the quickest in {min(took) * 1_000:.1f} ms")
    assert len(took) >= 5
    assert min(took) < QUICK_S


def test_what_comes_while_a_sync_runs_shares_the_next_ones(tmp_path: Path):
    """Alone, each would take its half second, and all of them four minutes."""
    with slow(tmp_path / "store", "seam") as daemon:
        before = daemon.call("status")["journal"]
        sent = [daemon.request("start", clientRequestId=f"run-{number}", **PLAIN) for number in range(MANY)]
        daemon.write(b"".join(line for _, line in sent))
        assert {daemon.result(ident)["replayed"] for ident, _ in sent} == {False}
        after = daemon.call("status")["journal"]
    syncs = after["syncs"] - before["syncs"]
    print(f"{syncs} syncs for {MANY} starts at once")
    assert after["records"] - before["records"] == MANY
    assert syncs <= MANY // 32


def test_a_lone_start_is_exactly_one_sync_and_a_look_none(tmp_path: Path):
    with Daemon(tmp_path / "store") as daemon:
        before = daemon.call("status")["journal"]["syncs"]
        for number in range(1, 4):
            daemon.call("start", clientRequestId=f"run-{number}", **PLAIN)
            daemon.call("list")
            assert daemon.call("status")["journal"]["syncs"] == before + number
        daemon.call("start", clientRequestId="run-1", **PLAIN)  # a repeat writes nothing
        assert daemon.call("status")["journal"]["syncs"] == before + 3
