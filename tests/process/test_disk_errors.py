"""What each error of a disk comes to: the answer, `status`, and what follows. F024, F025, F027, F029, S1-26, S1-43.

Three tables. While it works: an error of a write is undone, told, and over when the disk is well again; one of a sync, of an
undo, or of what says who owns the store ends the process, and the next one decides. Where a new segment is needed: the same,
by call. At the start: nothing is served, nothing is changed, and it is tried again.

Errors come at the seam (`rigged_daemon`) and, where strace is there, from the system calls; some are the real thing.
"""

from __future__ import annotations

import contextlib
import json
import resource
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.process import disks
from tests.process.nursery import Nursery
from tests.process.outside import Seen, agent, seen
from tests.process.wire_driver import Daemon, refused
from tests.service.driver import CountingService

pytestmark = pytest.mark.process

NO_LIMIT = resource.RLIM_INFINITY
SEGMENT_BYTES = 8_000


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CountingService]:
    with CountingService(tmp_path_factory.mktemp("service") / "truth") as service:
        yield service


class Runs:
    """Payments by their keys, each with an operation of its own."""

    def __init__(self, service: CountingService, mark: str) -> None:
        self._service, self._mark = service, mark

    def params(self, key: str) -> dict[str, Any]:
        return {
            "clientRequestId": key,
            "agent": agent(self._service, "at_most_once", f"{self._mark} {key}"),
            "input": "",
        }

    def pay(self, daemon: Daemon, key: str) -> dict[str, Any]:
        """The answer, and the payment is over."""
        answer = daemon.call("start", **self.params(key), waitMs=20_000)
        assert daemon.until(answer["runId"], lambda shown: shown["run"]["status"] == "completed")["approvals"] == []
        return answer

    def paid(self, *keys: str) -> bool:
        return all(seen(self._service, f"{self._mark} {key}") == Seen(1, 1) for key in keys)


def refusal_of(daemon: Daemon, params: dict[str, Any]) -> dict[str, Any]:
    with refused("STORAGE") as caught:
        daemon.call("start", **params)
    return caught[0].data


# While it works


@dataclass(frozen=True)
class Failing:
    """`seam`: what `--fail` is told; `kernel`: which system calls on which file of the store fail. `goes_on`: the process
    stays, and works again once the calls do; otherwise it ends. No errno: nobody notices."""

    errno: str | None
    seam: tuple[str, ...]
    kernel: tuple[str, ...] = ()
    file: str = "wal/0000000000000001.jsonl"
    goes_on: bool = True


def writing(errno: str) -> Failing:
    return Failing(errno, (f"write:{errno}:wal/",), (f"pwrite64:error={errno}",))


WORKING = {
    "no room": writing("ENOSPC"),
    "the quota is used up": writing("EDQUOT"),
    "the file is too large": writing("EFBIG"),
    "a write fails": writing("EIO"),
    "read-only by now": writing("EROFS"),
    "the watermark cannot be written": Failing(None, ("write:EIO:HEAD",), ("pwrite64:error=EIO",), "HEAD"),
    "a sync fails": Failing("EIO", ("sync:EIO:wal/",), ("fdatasync:error=EIO",), goes_on=False),
    "a sync finds no room": Failing("ENOSPC", ("sync:ENOSPC:wal/",), ("fdatasync:error=ENOSPC",), goes_on=False),
    "a sync finds the quota used up": Failing(
        "EDQUOT", ("sync:EDQUOT:wal/",), ("fdatasync:error=EDQUOT",), goes_on=False
    ),
    "an undo fails": Failing(
        "EIO",
        ("write:ENOSPC:wal/", "truncate:EIO:wal/"),
        ("pwrite64:error=ENOSPC", "ftruncate:error=EIO"),
        goes_on=False,
    ),
    "the sync of an undo fails": Failing(
        "EIO", ("write:ENOSPC:wal/", "sync:EIO:wal/"), ("pwrite64:error=ENOSPC", "fdatasync:error=EIO"), goes_on=False
    ),
    "the owner cannot be read": Failing("EIO", ("read_at:EIO:HEAD",), ("pread64:error=EIO",), "HEAD", goes_on=False),
}


@contextlib.contextmanager
def trouble(daemon: Daemon, row: Failing, how: str, marker: Path) -> Iterator[None]:
    if how == "seam":
        marker.touch()
        yield
        marker.unlink()
        return
    file = str(daemon.store / row.file)
    injected = [part for call in row.kernel for part in ("-e", f"inject={call}")]
    with disks.tampered(daemon.pid, "-P", file, *injected):
        yield


@pytest.mark.parametrize("how", ["seam", pytest.param("kernel", marks=disks.needs_strace)])
@pytest.mark.parametrize("name", WORKING)
def test_an_error_of_the_disk_is_told_as_what_it_is_and_followed_by_what_must_follow_f025_f029(
    service: CountingService, nursery: Nursery, tmp_path: Path, name: str, how: str
):
    row, marker, store = WORKING[name], tmp_path / "trouble", tmp_path / "store"
    runs = Runs(service, f"{name} {how}")
    rig = [option for call in row.seam for option in ("--fail", call)] if how == "seam" else []
    with nursery.daemon(store, rig=(*rig, "--while", str(marker), "--retry", "50")) as daemon:
        daemon.listen()
        before = runs.pay(daemon, "before")
        with trouble(daemon, row, how, marker):
            if row.errno is None:
                runs.pay(daemon, "during")
                assert state_of(daemon) == ("ok", "ok", None)
            else:
                told = {"code": "STORAGE", "retryable": row.goes_on, "errno": row.errno}
                assert refusal_of(daemon, runs.params("during")) == told
            if row.errno is not None and row.goes_on:
                assert state_of(daemon) == ("full", "full", row.errno)
                assert daemon.call("status", runId=before["runId"])["run"]["status"] == "completed"
                assert refusal_of(daemon, runs.params("during")) == told
            if not row.goes_on:
                assert daemon.exit_code() == 70
        if row.goes_on:
            assert runs.pay(daemon, "during")["replayed"] is (row.errno is None)
            assert state_of(daemon) == ("ok", "ok", None)
            assert daemon.stop() == 0
        else:
            warned = [note["params"]["kind"] for note in daemon.notes if note["method"] == "daemon/warning"]
            assert (warned, "poisoned" in daemon.log.read_text()) == (["storage_poisoned"], True)
    with nursery.daemon(store) as daemon:
        daemon.listen()
        again = daemon.call("start", **runs.params("before"))
        assert (again["runId"], again["replayed"]) == (before["runId"], True)
        runs.pay(daemon, "during")
        assert daemon.call("status")["counts"] == {"completed": 2}
    assert runs.paid("before", "during")


def state_of(daemon: Daemon) -> tuple[str, str, str | None]:
    health = daemon.call("status")
    return health["status"], health["journal"]["state"], health["journal"]["errno"]


def test_a_limit_on_the_size_of_files_is_told_as_such_and_over_when_it_is_lifted_f025(
    service: CountingService, nursery: Nursery, tmp_path: Path
):
    runs = Runs(service, "EFBIG")
    with nursery.daemon(tmp_path / "store") as daemon:
        daemon.listen()
        runs.pay(daemon, "before")
        size = max(path.stat().st_size for path in (daemon.store / "wal").iterdir())
        resource.prlimit(daemon.pid, resource.RLIMIT_FSIZE, (size, NO_LIMIT))
        told = {"code": "STORAGE", "retryable": True, "errno": "EFBIG"}
        assert refusal_of(daemon, runs.params("during")) == told
        assert state_of(daemon) == ("full", "full", "EFBIG")
        resource.prlimit(daemon.pid, resource.RLIMIT_FSIZE, (NO_LIMIT, NO_LIMIT))
        assert runs.pay(daemon, "during")["replayed"] is False
    assert runs.paid("before", "during")


# Where a new segment is needed

ROTATING = {
    "no descriptor": Failing("EMFILE", ("create:EMFILE:wal/",)),
    "no room for a name": Failing("ENOSPC", ("create:ENOSPC:wal/",)),
    "no room for its first line": Failing("ENOSPC", ("write:ENOSPC:wal/",)),
    "no more names by quota": Failing("EDQUOT", ("create:EDQUOT:wal/",)),
    "read-only by now": Failing("EROFS", ("create:EROFS:wal/",)),
    "its name fails": Failing("EIO", ("rename:EIO:wal/",), goes_on=False),
    "its sync fails": Failing("EIO", ("sync_full:EIO:wal/",), goes_on=False),
    "the sync of the folder fails": Failing("EIO", ("syncdir:EIO:wal",), goes_on=False),
}


def nearly_full_segment(daemon: Daemon) -> None:
    """So that the next run begins a new one."""
    plain = {"model": {"script": [{"text": "done"}]}, "tools": []}
    segment, number = daemon.store / "wal" / "0000000000000001.jsonl", 0
    while segment.stat().st_size < SEGMENT_BYTES - 700:
        daemon.call("start", clientRequestId=f"filling-{number}", agent=plain, input="", drive="manual")
        number += 1


@pytest.mark.parametrize("name", ROTATING)
def test_an_error_on_the_way_to_a_new_segment_is_told_and_followed_as_any_other_f025_f029(
    service: CountingService, nursery: Nursery, tmp_path: Path, name: str
):
    row, marker, store = ROTATING[name], tmp_path / "trouble", tmp_path / "store"
    runs = Runs(service, f"rotating: {name}")
    rig = ("--fail", *row.seam, "--while", str(marker), "--segment-bytes", str(SEGMENT_BYTES), "--retry", "50")
    with nursery.daemon(store, rig=rig) as daemon:
        daemon.listen()
        nearly_full_segment(daemon)
        marker.touch()
        told = {"code": "STORAGE", "retryable": row.goes_on, "errno": row.errno}
        assert refusal_of(daemon, runs.params("during")) == told
        if row.goes_on:
            assert state_of(daemon) == ("full", "full", row.errno)
            marker.unlink()
            assert runs.pay(daemon, "during")["replayed"] is False
            assert state_of(daemon) == ("ok", "ok", None)
            assert len(list((store / "wal").iterdir())) > 1
        else:
            assert daemon.exit_code() == 70
    with nursery.daemon(store) as daemon:
        daemon.listen()
        runs.pay(daemon, "during")
    assert runs.paid("during")


def test_a_process_out_of_descriptors_records_on_until_it_needs_one_f027(
    service: CountingService, nursery: Nursery, tmp_path: Path
):
    runs = Runs(service, "EMFILE")
    plain = {"model": {"script": [{"text": "done"}]}, "tools": []}
    with nursery.daemon(tmp_path / "store", rig=("--segment-bytes", str(SEGMENT_BYTES))) as daemon:
        daemon.listen()
        runs.pay(daemon, "before")
        before = resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE)
        most = max(int(path.name) for path in Path(f"/proc/{daemon.pid}/fd").iterdir()) + 1
        resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (most, before[1]))
        daemon.call("start", clientRequestId="fits", agent=plain, input="", drive="manual")
        assert state_of(daemon) == ("ok", "ok", None)
        long = {"clientRequestId": "long", "agent": plain, "input": "x" * SEGMENT_BYTES, "drive": "manual"}
        assert refusal_of(daemon, long) == {"code": "STORAGE", "retryable": True, "errno": "EMFILE"}
        assert state_of(daemon) == ("full", "full", "EMFILE")
        resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, before)
        assert daemon.call("start", **long)["replayed"] is False
        assert state_of(daemon) == ("ok", "ok", None)
        runs.pay(daemon, "after")
    assert runs.paid("before", "after")


# At the start

OPENING = {
    "the log cannot be read": Failing("EIO", ("read:EIO:wal/",)),
    "the log may not be read": Failing("EACCES", ("read:EACCES:wal/",)),
    "no descriptor for the log": Failing("EMFILE", ("read:EMFILE:wal/",)),
    "the watermark cannot be read": Failing("EIO", ("read:EIO:HEAD",)),
    "the store cannot be listed": Failing("EIO", ("names:EIO",)),
    "no descriptor for the folder": Failing("EMFILE", ("names:EMFILE:wal",)),
    "the watermark cannot be written": Failing("EROFS", ("write:EROFS:HEAD",)),
    "the sync of the folder fails": Failing("EIO", ("syncdir:EIO:wal",), goes_on=False),
    "the sync of the watermark fails": Failing("EIO", ("sync_full:EIO:HEAD",), goes_on=False),
}


def bytes_of(folder: Path) -> dict[str, bytes]:
    """Of all files but the lock, which says who looked last, and the watermark's slots, which are claimed."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in {"LOCK", "HEAD"}
    }


@pytest.mark.parametrize("name", OPENING)
def test_a_store_that_cannot_be_opened_is_neither_empty_nor_served_nor_changed_f027(
    service: CountingService, nursery: Nursery, tmp_path: Path, name: str
):
    row, marker, store = OPENING[name], tmp_path / "trouble", tmp_path / "store"
    runs = Runs(service, f"opening: {name}")
    with nursery.daemon(store) as daemon:
        daemon.listen()
        run_id = runs.pay(daemon, "before")["runId"]
        daemon.kill()
    before = bytes_of(store)
    marker.touch()
    rig = ("--fail", *row.seam, "--while", str(marker), "--retry", "50")
    with nursery.daemon(store, rig=rig) as daemon:
        for method, params in (
            ("status", {}),
            ("list", {}),
            ("start", runs.params("before")),
            ("start", runs.params("new")),
        ):
            with refused("STORAGE") as caught:
                daemon.call(method, **params)
            assert caught[0].data == {"code": "STORAGE", "retryable": row.goes_on, "errno": row.errno}
        assert bytes_of(store) == before
        marker.unlink()
        if row.goes_on:
            assert daemon.once_not("STORAGE")["status"] == "ok"
            assert daemon.call("status", runId=run_id)["run"]["status"] == "completed"
            assert daemon.stop() == 0
        else:
            assert daemon.stop() == 70
    with nursery.daemon(store) as daemon:
        assert [run["runId"] for run in daemon.call("list")["runs"]] == [run_id]
    assert (runs.paid("before"), seen(service, f"opening: {name} new")) == (True, Seen(0, 0, 0))


@disks.needs_mounts
def test_a_file_system_that_is_read_only_is_told_as_such_and_used_when_it_may_be_written_f024(
    service: CountingService, nursery: Nursery, tmp_path: Path
):
    runs = Runs(service, "EROFS")
    with nursery.daemon(tmp_path / "disk" / "store", log=tmp_path / "log") as daemon:
        daemon.listen()
        runs.pay(daemon, "before")
    place = tmp_path / "mounted"
    with disks.mounted(place, "--bind", tmp_path / "disk"):
        disks.remount(place, "remount,bind,ro")
        with nursery.daemon(place / "store", rig=("--retry", "50"), log=tmp_path / "log") as daemon:
            told = {"code": "STORAGE", "retryable": True, "errno": "EROFS"}
            assert refusal_of(daemon, runs.params("during")) == told
            with refused("STORAGE") as caught:
                daemon.call("status")
            assert caught[0].data == told
            disks.remount(place, "remount,bind,rw")
            assert daemon.once_not("STORAGE")["status"] == "ok"
            daemon.listen()
            assert runs.pay(daemon, "during")["replayed"] is False
            assert daemon.stop() == 0
    assert runs.paid("before", "during")


# The store goes away


def renamed(store: Path) -> None:
    store.rename(store.with_name("elsewhere"))


def unlinked(store: Path) -> None:
    shutil.rmtree(store)


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "in the middle of a commit"])
@pytest.mark.parametrize("go_away", [renamed, unlinked])
def test_a_store_that_goes_away_ends_the_daemon_before_it_acknowledges_anything_more(
    service: CountingService, nursery: Nursery, tmp_path: Path, go_away: Any, busy: bool
):
    store, runs = tmp_path / "store", Runs(service, f"{go_away.__name__} {busy}")
    with nursery.daemon(store, rig=("--slow-sync", "300") if busy else ()) as daemon:
        daemon.listen()
        runs.pay(daemon, "before")
        [segment] = (store / "wal").iterdir()
        size = segment.stat().st_size
        first = daemon.send("start", **runs.params("during"), drive="manual") if busy else None
        while busy and segment.stat().st_size == size:
            daemon.call("status")  # bounded: it is written, and then its sync is slow
        go_away(store)
        assert state_of(daemon) == ("poisoned", "poisoned", "ESTALE")
        after = daemon.send("start", **runs.params("after"))
        answer = daemon.answer(first) if first is not None else {}
        told = {"code": "STORAGE", "retryable": False, "errno": "ESTALE"}
        assert daemon.answer(after)["error"]["data"] == told
        assert daemon.exit_code() == 70
        assert not store.exists()
        events = [json.loads(line)["event"] for line in daemon.log.read_text().splitlines()]
        assert any("poisoned" in event for event in events)
    if go_away is renamed:
        with nursery.daemon(tmp_path / "elsewhere") as daemon:
            listed = {run["clientRequestId"] for run in daemon.call("list")["runs"]}
            assert {"before"} <= listed <= {"before", "during"}
            assert "result" not in answer or "during" in listed
    assert (runs.paid("before"), seen(service, f"{go_away.__name__} {busy} after")) == (True, Seen(0, 0, 0))
