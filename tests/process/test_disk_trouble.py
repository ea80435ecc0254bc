"""A store that cannot be used, and a disk that takes no more. Section 9 of the promises: F024, F025.

The full disk is a limit on the size of files (EFBIG), set on the running daemon and lifted again: real failed writes, and no
file system has to be made for it.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
from pathlib import Path
from typing import Any

import pytest
from tests.process.outside import Seen, agent, seen, step_of
from tests.process.wire_driver import ROOT, Daemon, refused
from tests.service.driver import CountingService

pytestmark = pytest.mark.process

NO_LIMIT = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)


def fill(daemon: Daemon) -> None:
    """From now on no segment of its log takes another byte."""
    size = max(path.stat().st_size for path in (daemon.store / "wal").glob("*.jsonl"))
    resource.prlimit(daemon.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def make_room(daemon: Daemon) -> None:
    resource.prlimit(daemon.pid, resource.RLIMIT_FSIZE, NO_LIMIT)


def start(daemon: Daemon, described: dict[str, Any], key: str, **more: Any) -> str:
    run_id: str = daemon.call("start", clientRequestId=key, agent=described, input="", **more)["runId"]
    return run_id


def test_a_full_disk_is_told_the_outcome_in_flight_is_kept_and_the_same_keys_succeed_later_f025(
    service: CountingService, tmp_path: Path
):
    with Daemon(tmp_path / "store") as daemon:
        daemon.listen()
        service.park("after_effect")
        run_id = start(daemon, agent(service, "at_most_once", "outcome kept"), "in-flight")
        waiting = start(daemon, agent(service, "at_most_once", "asked", rules=()), "asked", waitMs=20_000)
        service.wait_parked(20)
        [question] = daemon.call("status", runId=waiting)["approvals"]
        named = {"runId": waiting, "approvalId": question["approvalId"], "digest": question["digest"]}
        allow = {"clientRequestId": "yes", "decision": "allow", **named}
        fill(daemon)
        service.release()
        later = {"clientRequestId": "later", "agent": agent(service, "at_most_once", "later"), "input": ""}
        for method, params in (("start", later), ("approve", allow)):
            with refused("STORAGE") as caught:
                daemon.call(method, **params)
            assert (caught[0].data["errno"], caught[0].data["retryable"]) == ("EFBIG", True)

        health = daemon.call("status")
        assert (health["status"], health["journal"]["errno"]) == ("full", "EFBIG")
        shown = daemon.call("status", runId=run_id)
        assert (shown["run"]["status"], step_of(shown)["status"]) == ("running", "started")
        assert daemon.call("status", runId=waiting)["approvals"] == [question]
        assert daemon.call("list")["runs"] != []
        with refused("NOT_FOUND"):
            daemon.call("status", clientRequestId="later")

        make_room(daemon)
        assert daemon.call("start", **later)["replayed"] is False
        assert daemon.call("approve", **allow)["approval"]["already"] is False
        for known in (run_id, waiting, daemon.call("status", clientRequestId="later")["run"]["runId"]):
            done = daemon.until(known, lambda shown: shown["run"]["status"] == "completed")
            assert (step_of(done)["status"], step_of(done)["attempt"]) == ("completed", 1)
        assert daemon.call("status")["status"] == "ok"
        assert daemon.stop() == 0
    with Daemon(tmp_path / "store") as daemon:
        assert daemon.call("status")["counts"] == {"completed": 3}
    assert {seen(service, operation) for operation in ("outcome kept", "asked", "later")} == {Seen(1, 1)}


def test_an_outcome_that_no_disk_took_before_kill_9_is_unknown_and_not_repeated_f025(
    service: CountingService, tmp_path: Path
):
    with Daemon(tmp_path / "store") as daemon:
        service.park("after_effect")
        run_id = start(daemon, agent(service, "at_most_once", "outcome lost"), "run")
        service.wait_parked(20)
        fill(daemon)
        service.release()
        with refused("STORAGE"):
            start(daemon, agent(service, "at_most_once", "never"), "never")
        daemon.kill()
    with Daemon(tmp_path / "store") as daemon:
        shown = daemon.call("status", runId=run_id)
        assert (shown["run"]["status"], step_of(shown)["status"]) == ("waiting", "unknown")
        assert len(daemon.call("list")["runs"]) == 1
    assert (seen(service, "outcome lost"), seen(service, "never")) == (Seen(1, 1), Seen(0, 0, 0))


def test_no_effect_begins_while_its_intent_cannot_be_written_f025(service: CountingService, tmp_path: Path):
    with Daemon(tmp_path / "store") as daemon:
        run_id = start(daemon, agent(service, "at_most_once", "no intent"), "run", drive="manual")
        daemon.call("step", runId=run_id, clientRequestId="model")
        fill(daemon)
        with refused("STORAGE"):
            daemon.call("step", runId=run_id, clientRequestId="act")
        assert seen(service, "no intent") == Seen(0, 0, 0)
        request = daemon.call("status", runId=run_id, clientRequestId="act")["request"]
        assert request == {"state": "unknown"}
        make_room(daemon)
        step = daemon.call("step", runId=run_id, clientRequestId="act")["step"]
        assert (step["status"], step["attempt"]) == ("completed", 1)
    assert seen(service, "no intent") == Seen(1, 1)


def test_a_store_with_work_in_doubt_that_is_opened_on_a_full_disk_is_served_when_there_is_room_f025(
    service: CountingService, tmp_path: Path
):
    store = tmp_path / "store"
    with Daemon(store) as daemon:
        service.park("after_effect")
        run_id = start(daemon, agent(service, "idempotent", "full at start"), "run")
        service.wait_parked(20)
        daemon.kill()
    service.release()
    size = max(path.stat().st_size for path in (store / "wal").glob("*.jsonl"))

    def on_a_full_disk() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

    with Daemon(store, before_exec=on_a_full_disk) as daemon:
        for method, params in (("status", {}), ("step", {"runId": run_id, "clientRequestId": "s"})):
            with refused("STORAGE") as caught:
                daemon.call(method, **params)
            assert (caught[0].data["errno"], caught[0].data["retryable"]) == ("EFBIG", True)
        assert seen(service, "full at start") == Seen(1, 1)
        make_room(daemon)
        assert daemon.once_not("STORAGE")["status"] == "ok"
        daemon.listen()
        shown = daemon.until(run_id, lambda shown: shown["run"]["status"] == "completed")
        assert step_of(shown)["attempt"] == 2
        assert daemon.stop() == 0
    assert seen(service, "full at start") == Seen(2, 1)


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_after_a_failed_sync_nothing_is_acknowledged_or_begun_and_the_next_process_decides_f029_s1_43(
    service: CountingService, tmp_path: Path, number: int
):
    """The commits of the run: its start; the call's intent; its outcome; its end."""
    operation, store = f"sync {number}", tmp_path / "store"
    params = {"clientRequestId": "run", "agent": agent(service, "at_most_once", operation), "input": ""}
    with Daemon(store, rig=("--fail-sync", str(number))) as daemon:
        ident = daemon.send("start", **params, waitMs=20_000)
        if number == 1:
            answer = daemon.answer(ident)
            assert (answer["error"]["data"]["code"], answer["error"]["data"]["retryable"]) == ("STORAGE", False)
        assert daemon.exit_code() == 70
        assert "poisoned" in daemon.log.read_text()
    assert seen(service, operation) == (Seen(0, 0, 0) if number < 3 else Seen(1, 1))
    with Daemon(store) as daemon:
        daemon.listen()
        run_id = daemon.call("start", **params)["runId"]
        shown = daemon.until(run_id, lambda shown: shown["run"]["status"] in {"waiting", "completed"})
        # An intent that was written and never acknowledged is an intent: it may be there, so it is in doubt.
        assert shown["run"]["status"] == ("waiting" if number == 2 else "completed")
        for question in shown["approvals"]:
            named = {"runId": run_id, "approvalId": question["approvalId"], "digest": question["digest"]}
            daemon.call("approve", clientRequestId="answer", decision="did_not_happen", **named)
        daemon.until(run_id, lambda shown: shown["run"]["status"] == "completed")
    assert seen(service, operation) == Seen(1, 1)


def test_a_store_that_is_taken_away_under_the_daemon_ends_it_before_it_acknowledges_anything_more(
    service: CountingService, tmp_path: Path
):
    with Daemon(tmp_path / "store") as daemon:
        daemon.call("status")
        (tmp_path / "store").rename(tmp_path / "elsewhere")
        ident = daemon.send("start", clientRequestId="run", agent=agent(service, "read_only", "gone"), input="")
        assert daemon.refusal(ident) == "STORAGE"
        assert daemon.exit_code() == 70
    assert seen(service, "gone") == Seen(0, 0, 0)
    with Daemon(tmp_path / "elsewhere") as daemon:
        assert daemon.call("list")["runs"] == []


def a_file_in_its_place(store: Path) -> None:
    store.write_text("not a folder")


def a_file_as_its_parent(store: Path) -> None:
    store.parent.rmdir()
    store.parent.write_text("not a folder")


def a_folder_as_its_lock(store: Path) -> None:
    (store / "LOCK").mkdir(parents=True)


def a_link_as_its_lock(store: Path) -> None:
    store.mkdir()
    (store / "LOCK").symlink_to(store / "elsewhere")


def a_file_as_its_log(store: Path) -> None:
    store.mkdir()
    (store / "wal").write_text("not a folder")


UNUSABLE = {
    make.__name__.replace("_", " "): (make, errno)
    for make, errno in (
        (a_file_in_its_place, {"EEXIST", "ENOTDIR"}),
        (a_file_as_its_parent, {"EEXIST", "ENOTDIR"}),
        (a_folder_as_its_lock, {"EISDIR"}),
        (a_link_as_its_lock, {"ELOOP"}),
        (a_file_as_its_log, {"ENOTDIR"}),
    )
}


@pytest.mark.parametrize("what", UNUSABLE)
def test_a_place_that_cannot_be_a_store_is_an_error_that_says_why_and_no_crash(tmp_path: Path, what: str):
    make, errnos = UNUSABLE[what]
    store = tmp_path / "parent" / "store"
    store.parent.mkdir()
    make(store)
    with Daemon(store, workspace=ROOT, log=tmp_path / "daemon.log") as daemon:
        refuses_everything(daemon, errnos)
        assert daemon.stop() == 1


def test_a_file_as_the_store_is_called_one_and_by_its_name(tmp_path: Path):
    store = tmp_path / "store"
    store.write_text("mine")
    with Daemon(store, workspace=ROOT) as daemon:
        with refused("STORAGE") as caught:
            daemon.call("status")
        assert caught[0].message == f"the store {store} is a file, not a folder"
        assert caught[0].data == {"code": "STORAGE", "retryable": False, "errno": "ENOTDIR"}
        assert daemon.stop() == 1
    assert store.read_text() == "mine"


def test_a_folder_of_something_else_is_no_store_and_is_left_as_it_is(tmp_path: Path):
    store = tmp_path / "store"
    store.mkdir()
    (store / "notes.txt").write_text("mine")
    with Daemon(store, workspace=ROOT) as daemon:
        with refused("STORAGE") as caught:
            daemon.call("status")
        assert caught[0].message.startswith(f"the folder {store} is not a store: 'notes.txt' is in it.")
        assert caught[0].data == {"code": "STORAGE", "retryable": False, "errno": "ENOTEMPTY"}
        assert [path.name for path in store.iterdir()] == ["notes.txt"]
        assert daemon.stop() == 1


def test_a_store_that_it_may_not_write_to_is_an_error_that_says_why_and_is_used_as_soon_as_it_may(tmp_path: Path):
    store = tmp_path / "parent" / "store"
    store.parent.mkdir(mode=0o500)
    with Daemon(store, workspace=ROOT, log=tmp_path / "daemon.log", before_exec=without_privilege) as daemon:
        refuses_everything(daemon, {"EACCES"})
        store.parent.chmod(0o700)
        assert daemon.once_not("STORAGE")["epoch"] == 1
        assert daemon.stop() == 0
    store.joinpath("wal").chmod(0o500)
    with Daemon(store, workspace=ROOT, log=tmp_path / "daemon.log", before_exec=without_privilege) as daemon:
        # Nothing is in doubt, so nothing has to be made: what is there can be read, and written to.
        assert daemon.call("status")["epoch"] == 2
    store.chmod(0o500)
    (store / "LOCK").chmod(0o400)
    with Daemon(store, workspace=ROOT, log=tmp_path / "daemon.log", before_exec=without_privilege) as daemon:
        refuses_everything(daemon, {"EACCES"})
        assert daemon.stop() == 1
    store.chmod(0o700)


def refuses_everything(daemon: Daemon, errnos: set[str]) -> None:
    for method in ("status", "list"):
        with refused("STORAGE") as caught:
            daemon.call(method)
        assert caught[0].data["errno"] in errnos
        assert str(daemon.store) in caught[0].message or "store" in caught[0].message
    assert all(json.loads(line)["event"] for line in daemon.log.read_text().splitlines())


def without_privilege() -> None:
    """Where the tests run as root, modes of files would not count: the daemon gives up what makes it so (capabilities 1 and
    2, from its bounding set)."""
    if os.geteuid() == 0:
        for capability in (1, 2):
            assert ctypes.CDLL(None).prctl(24, capability, 0, 0, 0) == 0
