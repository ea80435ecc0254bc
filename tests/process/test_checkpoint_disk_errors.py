"""Errors of the disk around the files of runs: a checkpoint that cannot be made is told and made later, one that may not last ends
the process, and what cannot be read just now is neither missing nor damaged. F025, F027, F029.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.process.nursery import Nursery
from tests.process.outside import Seen, agent, seen
from tests.process.wire_driver import Daemon, refused
from tests.service.driver import CountingService

pytestmark = pytest.mark.process

EVERY = 6
PAID = Seen(1, 1)
RIG = ("--checkpoint-every", str(EVERY), "--retry", "50")


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CountingService]:
    with CountingService(tmp_path_factory.mktemp("service") / "truth") as service:
        yield service


@dataclass(frozen=True)
class Failing:
    """`errno` is what `status` shows; None: nothing."""

    errno: str | None
    seam: tuple[str, ...]
    goes_on: bool = True


MAKING = {
    "no room for a folder": Failing("ENOSPC", ("mkdir:ENOSPC:runs",)),
    "no descriptor for a history": Failing("EMFILE", ("create:EMFILE:runs/",)),
    "no room for a history": Failing("ENOSPC", ("write:ENOSPC:runs/",)),
    "the quota is used up": Failing("EDQUOT", ("write:EDQUOT:runs/",)),
    "a state gets no name": Failing("EIO", ("rename:EIO:runs/",)),
    "no name for the manifest": Failing("ENOSPC", ("create:ENOSPC:checkpoint.json",)),
    "no room for the manifest": Failing("ENOSPC", ("write:ENOSPC:checkpoint.json",)),
    "read-only by now": Failing("EROFS", ("create:EROFS:runs/", "mkdir:EROFS:runs", "create:EROFS:checkpoint.json")),
    "no new segment": Failing("ENOSPC", ("create:ENOSPC:wal/",)),
    "old segments stay": Failing(None, ("unlink:EIO:wal/",)),
    "a sync of histories fails": Failing("EIO", ("sync_many:EIO:runs/",), goes_on=False),
}


class Runs:
    """Payments by their keys."""

    def __init__(self, service: CountingService, mark: str) -> None:
        self._service, self._mark = service, mark

    def params(self, key: str) -> dict[str, Any]:
        described = agent(self._service, "at_most_once", f"{self._mark} {key}")
        return {"clientRequestId": key, "agent": described, "input": ""}

    def pay(self, daemon: Daemon, *keys: str) -> None:
        """Where a process ended before it knew, a person looks into the service's books."""
        for key in keys:
            run_id = daemon.call("start", **self.params(key), waitMs=20_000)["runId"]
            shown = daemon.until(run_id, lambda shown: shown["run"]["status"] in {"waiting", "completed"})
            for question in shown["approvals"]:
                assert question["kind"] == "unknown_outcome"
                happened = seen(self._service, f"{self._mark} {key}").effects == 1
                named = {"runId": run_id, "approvalId": question["approvalId"], "digest": question["digest"]}
                decision = "happened" if happened else "did_not_happen"
                daemon.call("approve", clientRequestId=f"{key}-told", decision=decision, **named)
            daemon.until(run_id, lambda shown: shown["run"]["status"] == "completed")

    def kept(self, daemon: Daemon, *keys: str) -> None:
        """Each is there, is answered from its record, and was paid once."""
        daemon.listen()
        for key in keys:
            answer = daemon.call("start", **self.params(key))
            assert (answer["run"]["status"], answer["replayed"]) == ("completed", True)
            assert daemon.call("status", runId=answer["runId"])["run"]["output"] == "done"
            assert seen(self._service, f"{self._mark} {key}") == PAID
        listed = [run["clientRequestId"] for run in daemon.call("list", limit=100)["runs"]]
        assert sorted(listed) == sorted(keys)


@pytest.mark.parametrize("name", MAKING)
def test_a_checkpoint_that_cannot_be_made_is_told_hinders_nothing_and_is_made_later(
    service: CountingService, nursery: Nursery, tmp_path: Path, name: str
):
    row, marker, store, runs = MAKING[name], tmp_path / "trouble", tmp_path / "store", Runs(service, name)
    fails = [option for call in row.seam for option in ("--fail", call)]
    with nursery.daemon(store, rig=(*RIG, *fails, "--while", str(marker))) as daemon:
        daemon.listen()
        marker.touch()
        if not row.goes_on:
            daemon.send("start", **runs.params("one"))
            daemon.send("start", **runs.params("two"))
            assert daemon.exit_code() == 70
        elif row.errno is None:
            runs.pay(daemon, "one", "two")
            daemon.once(lambda health: health["checkpoint"]["made"] > 0)
            runs.pay(daemon, "three")
            assert daemon.stop() == 0
        else:
            runs.pay(daemon, "one", "two")
            shown = daemon.once(lambda health: "trouble" in health["checkpoint"])["checkpoint"]
            assert (shown["trouble"], shown["made"]) == (row.errno, 0)
            runs.pay(daemon, "three")
            assert daemon.call("status")["journal"]["state"] == "ok"
            marker.unlink()
            daemon.once(lambda health: health["checkpoint"]["made"] > 0 and "trouble" not in health["checkpoint"])
            daemon.kill()
    with nursery.daemon(store, rig=RIG) as daemon:
        daemon.listen()
        runs.pay(daemon, "one", "two", "three")
        daemon.once(lambda health: health["checkpoint"]["tailRecords"] < EVERY)
        daemon.kill()
    with nursery.daemon(store) as daemon:
        runs.kept(daemon, "one", "two", "three")
    assert (store / "checkpoint.json").exists()


READING = {errno: (f"read:{errno}:runs/", f"read_at:{errno}:runs/") for errno in ("EIO", "EACCES", "EMFILE")}


@pytest.fixture
def moved(service: CountingService, nursery: Nursery, tmp_path: Path, request: pytest.FixtureRequest) -> Runs:
    """Runs on a store whose log was moved to their files."""
    runs = Runs(service, request.node.name)
    with nursery.daemon(tmp_path / "store", rig=RIG) as daemon:
        daemon.listen()
        runs.pay(daemon, "one", "two", "three")
        daemon.once(lambda health: health["checkpoint"]["tailRecords"] < EVERY)
        daemon.kill()
    assert (tmp_path / "store" / "checkpoint.json").exists()
    return runs


@pytest.mark.parametrize("errno", READING)
def test_files_of_a_run_that_cannot_be_read_just_now_are_neither_missing_nor_damaged_f027(
    nursery: Nursery, tmp_path: Path, moved: Runs, errno: str
):
    marker = tmp_path / "trouble"
    fails = [option for call in READING[errno] for option in ("--fail", call)]
    with nursery.daemon(tmp_path / "store", rig=(*fails, "--while", str(marker))) as daemon:
        [one, *_] = daemon.call("list")["runs"]
        marker.touch()
        for method, params in (("status", {"runId": one["runId"]}), ("start", moved.params("one"))):
            with refused("STORAGE") as caught:
                daemon.call(method, **params)
            assert caught[0].data == {"code": "STORAGE", "retryable": True, "errno": errno}
        assert daemon.call("status")["status"] == "ok"
        marker.unlink()
        moved.kept(daemon, "one", "two", "three")


@pytest.mark.parametrize("errno", ["EIO", "EACCES", "EMFILE"])
def test_a_manifest_that_cannot_be_read_is_no_new_store_f027(nursery: Nursery, tmp_path: Path, moved: Runs, errno: str):
    marker = tmp_path / "trouble"
    marker.touch()
    rig = ("--fail", f"read:{errno}:checkpoint.json", "--while", str(marker), "--retry", "50")
    with nursery.daemon(tmp_path / "store", rig=rig) as daemon:
        for method, params in (("status", {}), ("list", {}), ("start", moved.params("one"))):
            with refused("STORAGE") as caught:
                daemon.call(method, **params)
            assert caught[0].data == {"code": "STORAGE", "retryable": True, "errno": errno}
        marker.unlink()
        daemon.once_not("STORAGE")
        moved.kept(daemon, "one", "two", "three")
