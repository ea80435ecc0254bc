"""A file system without room, at every commit: told, visible, and over when there is room again; nothing is doubled or forgotten.
S0-02, S1-26, F025.

The store is on a small tmpfs, which a file beside it fills to the last byte: the errors are those of the file system. What is
recorded here is longer than a page, or stands at the end of one: none of it fits into what a page has left.
"""

from __future__ import annotations

import select
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.process import disks
from tests.process.disk_rigs import FILLER, take_all
from tests.process.nursery import Nursery
from tests.process.outside import Effect, Seen, act, agent, seen, step_of
from tests.process.wire_driver import WAIT_S, Daemon, Refused, refused
from tests.service.driver import CountingService

pytestmark = [pytest.mark.process, disks.needs_mounts]

DISK_BYTES = 6 << 20
PAGE = 4_096
LONG = "x" * (PAGE + 500)
DONE = "done " + LONG
MET = Counter({"start": 5, "of its own": 3 + 3 + 3 + 3, "step": 3, "approve": 1, "cancel": 1})
NO_ROOM = {"code": "STORAGE", "retryable": True, "errno": "ENOSPC"}


@pytest.fixture
def service(tmp_path: Path) -> Iterator[CountingService]:
    with CountingService(tmp_path / "truth") as service:
        yield service
        service.release()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    with disks.tmpfs(tmp_path / "small", DISK_BYTES) as place:
        yield place


class OnFullDisk:
    """A daemon that meets a full disk at each new end of its log, once. Each time is looked at, and then there is room."""

    def __init__(self, daemon: Daemon, place: Path) -> None:
        self.daemon = daemon
        self.met: Counter[str] = Counter()
        self._filler = place / FILLER
        self._log = place / "store" / "wal"
        self._spacers = 0

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """The request is refused as often as the disk is full, and then its very key succeeds."""
        while True:
            try:
                return self.daemon.call(method, **params)
            except Refused as refusal:
                assert refusal.data == NO_ROOM
                self._relieve(method)

    def until(self, run_id: str, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """What nobody asked for is recorded as well: outcomes, and what follows from them."""
        end = time.monotonic() + WAIT_S
        while not condition(shown := self.daemon.call("status", runId=run_id)):
            assert time.monotonic() < end, shown
            if self._filler.exists() and self.daemon.call("status")["status"] == "full":
                assert [one["kind"] for one in shown["approvals"]] == []
                self._relieve("of its own")
            else:
                select.select([self.daemon._out()], [], [], 0.02)
        return shown

    def leave_no_slack(self, agent: dict[str, Any]) -> None:
        """Starts runs whose records fill the last page of the log, so that the next record needs a new one."""
        overhead = 0
        while (slack := -self._size() % PAGE) > 64:
            before, given = self._size(), "s" * ((slack - overhead) % PAGE if overhead else 0)
            key = f"spacer-{self._spacers:04}"
            self._spacers += 1
            self.call("start", clientRequestId=key, agent=agent, input=given, drive="manual")
            overhead = self._size() - before - len(given)

    def _size(self) -> int:
        return max(self._log.glob("*.jsonl")).stat().st_size

    def _relieve(self, met: str) -> None:
        health = self.daemon.call("status")
        assert (health["status"], health["journal"]["state"], health["journal"]["errno"]) == ("full", "full", "ENOSPC")
        self.met[met] += 1
        self._filler.unlink()


def payment(service: CountingService, effect: Effect, name: str, **more: Any) -> dict[str, Any]:
    """An agent whose every record is long."""
    operation = f"{name} {LONG}"
    return agent(service, effect, operation, script=[act(operation), {"text": DONE}], **more)


def paid(shown: dict[str, Any]) -> bool:
    return bool(shown["run"]["status"] == "completed")


def test_a_disk_that_is_full_at_every_commit_refuses_and_forgets_and_doubles_nothing_s1_26_f025(
    service: CountingService, nursery: Nursery, place: Path, tmp_path: Path
):
    plain = {"model": {"script": [{"text": "done"}]}, "tools": []}
    rig = ("--fill", str(place), "--retry", "50")
    with nursery.daemon(place / "store", rig=rig, log=tmp_path / "log") as daemon:
        disk = OnFullDisk(daemon, place)
        effects: tuple[Effect, ...] = ("at_most_once", "idempotent")
        runs = {}
        for effect in effects:
            params = {"agent": payment(service, effect, effect), "input": ""}
            runs[effect] = disk.call("start", clientRequestId=effect, **params)["runId"]
            disk.until(runs[effect], paid)
        steps = {"agent": payment(service, "at_most_once", "steps"), "input": "", "drive": "manual"}
        runs["steps"] = disk.call("start", clientRequestId="steps", **steps)["runId"]
        for key in ("model", "act", "say"):
            disk.leave_no_slack(plain)
            disk.call("step", runId=runs["steps"], clientRequestId=key, waitMs=0)
            disk.until(runs["steps"], lambda shown: shown["run"]["status"] in {"ready", "completed"})
        asking = {"agent": payment(service, "at_most_once", "asked", rules=()), "input": ""}
        runs["asked"] = disk.call("start", clientRequestId="asked", **asking)["runId"]
        [question] = disk.until(runs["asked"], lambda shown: bool(shown["approvals"]))["approvals"]
        named = {"runId": runs["asked"], "approvalId": question["approvalId"], "digest": question["digest"]}
        disk.call("approve", clientRequestId="yes", decision="allow", comment=LONG, **named)
        disk.until(runs["asked"], paid)
        dropped = disk.call("start", clientRequestId="dropped", agent=plain, input=LONG, drive="manual")["runId"]
        disk.call("cancel", runId=dropped, clientRequestId="no", reason=LONG)
        before = {run_id: look(daemon, run_id) for run_id in runs.values()}
        assert (daemon.call("status")["status"], daemon.stop()) == ("ok", 0)
    print(f"full at {sum(disk.met.values())} commits: {dict(disk.met)}")
    assert disk.met >= MET
    with nursery.daemon(place / "store", log=tmp_path / "log") as daemon:
        assert {run_id: look(daemon, run_id) for run_id in runs.values()} == before
    assert {name: seen(service, f"{name} {LONG}") for name in runs} == dict.fromkeys(runs, Seen(1, 1))


def look(daemon: Daemon, run_id: str) -> dict[str, Any]:
    """A run that was paid for at the first attempt, and nobody was asked what became of it."""
    shown = daemon.call("status", runId=run_id)
    assert (shown["run"]["status"], shown["run"]["output"], shown["approvals"]) == ("completed", DONE, [])
    step = step_of(shown)
    assert (step["status"], step["attempt"], step["source"]) == ("completed", 1, "tool")
    return shown


def test_a_disk_that_may_soon_be_full_is_told_of_before_it_is_r_te_3(nursery: Nursery, place: Path, tmp_path: Path):
    with nursery.daemon(place / "store", log=tmp_path / "log") as daemon:
        room = daemon.once(lambda health: "freeBytes" in health["journal"])["journal"]
        assert 0 < room["freeBytes"] < DISK_BYTES
        assert (room["low"], room["state"]) == (True, "ok")
        daemon.listen()
        daemon.call("status")
        warned = [note["params"] for note in daemon.notes if note["method"] == "daemon/warning"]
        text = f"{room['freeBytes']:,} bytes are left on the disk of the store; on a full disk nothing new is recorded until there is room"
        assert warned == [{"kind": "storage_low", "message": text}]
    with nursery.daemon(tmp_path / "store", log=tmp_path / "log") as daemon:
        daemon.listen()
        assert "low" not in daemon.once(lambda health: "freeBytes" in health["journal"])["journal"]
        assert daemon.notes == []


def test_a_restart_on_a_full_disk_shows_all_there_is_and_goes_on_when_there_is_room_f025(
    service: CountingService, nursery: Nursery, place: Path, tmp_path: Path
):
    """Nothing is in doubt: two questions are open."""
    params = {"agent": payment(service, "at_most_once", "asked", rules=()), "input": ""}
    with nursery.daemon(place / "store", log=tmp_path / "log") as daemon:
        run_id = daemon.call("start", clientRequestId="asked", waitMs=20_000, **params)["runId"]
        [question] = daemon.call("status", runId=run_id)["approvals"]
        take_all(place / FILLER)
        daemon.kill()
    with nursery.daemon(place / "store", log=tmp_path / "log") as daemon:
        daemon.listen()
        assert daemon.call("status", runId=run_id)["approvals"] == [question]
        named = {"runId": run_id, "approvalId": question["approvalId"], "digest": question["digest"]}
        allow = {"clientRequestId": "yes", "decision": "allow", "comment": LONG, **named}
        with refused("STORAGE") as caught:
            daemon.call("approve", **allow)
        assert caught[0].data == NO_ROOM
        assert daemon.call("start", clientRequestId="asked", **params)["replayed"] is True
        (place / FILLER).unlink()
        assert daemon.call("approve", **allow)["approval"]["already"] is False
        daemon.until(run_id, paid)
        look(daemon, run_id)
    assert seen(service, f"asked {LONG}") == Seen(1, 1)


@pytest.mark.parametrize("room", ["before the restart", "after it"])
@pytest.mark.parametrize("effect", ["at_most_once", "idempotent"])
def test_an_outcome_that_is_known_when_kill_9_meets_a_full_disk_stays_known_f025(
    service: CountingService, nursery: Nursery, place: Path, tmp_path: Path, effect: Effect, room: str
):
    """The store keeps room back for what became of effects."""
    with nursery.daemon(place / "store", log=tmp_path / "log") as daemon:
        daemon.listen()
        service.park("after_effect")
        params = {"agent": payment(service, effect, "paid"), "input": ""}
        run_id = daemon.call("start", clientRequestId="paid", **params)["runId"]
        service.wait_parked(20)
        take_all(place / FILLER)
        with refused("STORAGE") as caught:
            daemon.call("start", clientRequestId="other", agent=params["agent"], input=LONG, drive="manual")
        assert caught[0].data == NO_ROOM
        service.release()
        daemon.until(run_id, lambda shown: step_of(shown)["status"] == "completed")
        assert daemon.call("status")["status"] == "full"
        daemon.kill()
    if room == "before the restart":
        (place / FILLER).unlink()
    with nursery.daemon(place / "store", log=tmp_path / "log") as daemon:
        daemon.listen()
        shown = daemon.call("status", runId=run_id)
        assert (step_of(shown)["status"], shown["approvals"]) == ("completed", [])
        (place / FILLER).unlink(missing_ok=True)
        daemon.until(run_id, paid)
        look(daemon, run_id)
        assert daemon.call("start", clientRequestId="paid", **params)["replayed"] is True
    assert seen(service, f"paid {LONG}") == Seen(1, 1)
