"""Power cuts on a real file system: what was acknowledged is on the disk, and so is every intent before its call left. P2, S1-33.

The store is on an ext4 in a file. The daemon is stopped in the middle of its work and the file is copied: the copy is what a
disk would hold had the power failed in that instant. Then the daemon works on, towards the next cut. Each copy is mounted
and opened by another daemon, which recovers it, and from which no call leaves. Checkpoints are made all the time.

ext4 makes names durable with the files' own syncs: that folders are synced, the simulated disk shows (tests/journal).
"""

from __future__ import annotations

import os
import random
import select
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.process import disks
from tests.process.nursery import Nursery
from tests.process.outside import agent
from tests.process.wire_driver import Daemon, Refused
from tests.service.counting import read_truth
from tests.service.driver import CountingService

pytestmark = [pytest.mark.process, disks.needs_mounts]

RIG = ("--checkpoint-every", "20")
LOOKING = ("--pause", "before_call")
IMAGE_BYTES = 24 << 20
CUTS = 25
MANY_CUTS = 100
CUTS_WITHOUT_SYNCS = 6


@pytest.fixture
def service(tmp_path: Path) -> Iterator[CountingService]:
    with CountingService(tmp_path / "truth") as service:
        yield service


class Work:
    """Starts without end, a payment in each; what was answered, and with which run."""

    def __init__(self, service: CountingService, seed: int) -> None:
        self.acknowledged: dict[str, str] = {}
        self._service = service
        self._random = random.Random(seed)
        self._sent: dict[int, str] = {}
        self._started = 0

    def params(self, key: str) -> dict[str, Any]:
        """The same for the same key."""
        size = random.Random(key).choice((0, 10, 3_000))
        return {"clientRequestId": key, "agent": agent(self._service, "at_most_once", key), "input": "x" * size}

    def burst(self, daemon: Daemon) -> None:
        """Some starts in one write; back when a few of them were answered, while the others are still worked on."""
        lines = b""
        for _ in range(self._random.randint(2, 12)):
            key = f"run-{self._started}"
            self._started += 1
            ident, line = daemon.request("start", **self.params(key))
            self._sent[ident] = key
            lines += line
        daemon.write(lines)
        wanted = len(self.acknowledged) + self._random.randint(1, 2)
        while len(self.acknowledged) < wanted:
            self.take(daemon, daemon.message())

    def take(self, daemon: Daemon, message: Any) -> None:
        if message.get("id") in self._sent:
            self.acknowledged[self._sent.pop(message["id"])] = message["result"]["runId"]
        else:
            daemon.take(message)

    def take_what_is_there(self, daemon: Daemon) -> None:
        """Answers that were given before the cut, and were not read yet."""
        while b"\n" in daemon._buffer or select.select([daemon._out()], [], [], 0)[0]:
            self.take(daemon, daemon.message())


def lost(daemon: Daemon, work: Work, called: set[str]) -> list[str]:
    """What was acknowledged, or called, and is not in this store."""
    try:
        runs = daemon.call("list", limit=1_000)["runs"]
    except Refused as refusal:
        assert refusal.code == "STORE_DAMAGED"
        return [refusal.message]
    if damaged := [run["runId"] for run in runs if run["status"] == "damaged"]:
        return damaged
    found = {run["clientRequestId"]: run["runId"] for run in runs}
    missing = [key for key, run_id in work.acknowledged.items() if found.get(key) != run_id]
    missing += [f"the run of the call {key}" for key in called - found.keys()]
    for key in called & found.keys():
        steps = daemon.call("status", runId=found[key]).get("steps", [])
        if not any(step["name"] == "outside.act" and step["status"] != "not_started" for step in steps):
            missing.append(f"the intent of the call {key}")
    if not missing:
        for key, run_id in work.acknowledged.items():
            answer = daemon.call("start", **work.params(key))
            assert (answer["runId"], answer["replayed"]) == (run_id, True)
    return missing


def cut(nursery: Nursery, tmp_path: Path, daemon: Daemon, work: Work, service: CountingService) -> list[str]:
    """One power cut, and what the store on the copy lacks."""
    daemon.signal(signal.SIGSTOP)
    disks.until_stopped(daemon.pid)
    work.take_what_is_there(daemon)
    called = {line["operation"] for line in read_truth(service.truth) if line["kind"] == "call"}
    shutil.copyfile(tmp_path / "disk", tmp_path / "copy")
    daemon.signal(signal.SIGCONT)
    after = tmp_path / "after"
    with (
        disks.loop(after, tmp_path / "copy"),
        nursery.daemon(after / "store", rig=(*RIG, *LOOKING), log=tmp_path / "after.log") as another,
    ):
        return lost(another, work, called)


def cuts(
    nursery: Nursery, service: CountingService, tmp_path: Path, times: int, rig: tuple[str, ...] = ()
) -> list[list[str]]:
    disks.image(tmp_path / "disk", IMAGE_BYTES)
    work = Work(service, times)
    place, found = tmp_path / "before", []
    with (
        disks.loop(place, tmp_path / "disk"),
        nursery.daemon(place / "store", rig=(*RIG, *rig), log=tmp_path / "before.log") as daemon,
    ):
        for _ in range(times):
            work.burst(daemon)
            found.append(cut(nursery, tmp_path, daemon, work, service))
        made = daemon.call("status")["checkpoint"]["made"]
    print(
        f"{times} power cuts; {len(work.acknowledged)} acknowledged starts, {made} checkpoints; lost: {sum(map(len, found))}"
    )
    assert made > 0
    return found


def test_after_a_power_cut_all_that_was_acknowledged_and_every_intent_of_a_call_is_on_the_disk(
    service: CountingService, nursery: Nursery, tmp_path: Path
):
    assert cuts(nursery, service, tmp_path, CUTS) == [[]] * CUTS


@pytest.mark.parametrize("call", ["sync", "sync_many"])
def test_a_daemon_that_does_not_sync_would_be_found_out(
    service: CountingService, nursery: Nursery, tmp_path: Path, call: str
):
    """Neither its log, nor what a checkpoint moves out of that."""
    assert any(cuts(nursery, service, tmp_path, CUTS_WITHOUT_SYNCS, ("--no-sync", call)))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not os.environ.get("RPCAGENT_SLOW"), reason="set RPCAGENT_SLOW=1")
def test_after_many_power_cuts_all_that_was_acknowledged_and_every_intent_of_a_call_is_on_the_disk(
    service: CountingService, nursery: Nursery, tmp_path: Path
):
    assert cuts(nursery, service, tmp_path, MANY_CUTS) == [[]] * MANY_CUTS
