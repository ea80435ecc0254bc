"""What may be wrong with a store, as whoever uses it meets it: two owners, another store or version, files that a freeze
emptied. S0-69, S1-17; F033, F037, F111.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.golden import looking
from tests.process import disks
from tests.process.calls import TALKER, start, verified
from tests.process.nursery import Nursery
from tests.process.outside import Seen, agent, seen
from tests.process.wire_driver import refused
from tests.service.driver import CountingService
from tests.upkeep.commands import damage, fingerprint, said

pytestmark = pytest.mark.process

SLOW = bool(os.environ.get("RPCAGENT_SLOW"))
RACES = 20 if SLOW else 10
AT_ONCE = ("--checkpoint-every", "1", "--retry", "20")


# Two owners


def test_of_two_daemons_that_come_at_once_one_owns_and_when_it_is_killed_the_other_goes_on_f033_s2_26(
    nursery: Nursery, tmp_path: Path
):
    store, runs = tmp_path / "store", []
    for number in range(RACES):
        params = {"clientRequestId": f"race-{number}", "agent": TALKER, "input": "", "drive": "manual"}
        options = {"rig": ("--retry", "20", "--checkpoint-every", "7"), "log": tmp_path / "log"}
        with (
            nursery.daemon(store, "--lock-wait", "0.1", **options) as one,
            nursery.daemon(store, "--lock-wait", "0.1", **options) as other,
        ):
            both = (one, other)
            idents = [daemon.send("start", **params) for daemon in both]
            answers = [daemon.answer(ident) for daemon, ident in zip(both, idents, strict=True)]
            [owner] = [daemon for daemon, answer in zip(both, answers, strict=True) if "result" in answer]
            [second] = [daemon for daemon in both if daemon is not owner]
            [told] = [answer["error"]["data"] for answer in answers if "error" in answer]
            assert (told["code"], told["pid"]) == ("STORE_LOCKED", owner.pid)
            [run_id] = [answer["result"]["runId"] for answer in answers if "result" in answer]
            owner.send("step", runId=run_id, clientRequestId="step")
            owner.kill()
            assert second.once_not("STORE_LOCKED")["epoch"] == 2 * number + 2
            assert second.call("start", **params)["runId"] == run_id
            assert second.call("step", runId=run_id, clientRequestId="step")["step"]["status"] == "completed"
            runs.append(run_id)
            assert [run["runId"] for run in second.call("list", limit=1_000)["runs"]] == runs
            assert second.stop() == 0
    verified(store)


def test_an_owner_that_is_stopped_keeps_its_store_and_one_whose_lock_was_taken_away_writes_nothing_more_s0_69(
    service: CountingService, nursery: Nursery, tmp_path: Path
):
    """There is no lease that runs out: a process that sleeps may wake up with a call in flight. Who removes LOCK by hand has
    another process take over, and what the first one brings later is refused."""
    store, log = tmp_path / "store", tmp_path / "log"
    described = agent(service, "at_most_once", "asleep")
    with nursery.daemon(store) as first:
        service.park("after_effect")
        run_id = start(first, "run", agent=described, waitMs=0)
        service.wait_parked(20)
        first.signal(signal.SIGSTOP)
        disks.until_stopped(first.pid)
        service.release()
        with nursery.daemon(store, "--lock-wait", "0.1", rig=AT_ONCE, log=log) as second:
            with refused("STORE_LOCKED") as caught:
                second.call("status")
            assert caught[0].data["pid"] == first.pid
            (store / "LOCK").unlink()
            assert second.once_not("STORE_LOCKED")["epoch"] == 2
            [question] = second.call("status", runId=run_id)["approvals"]
            assert question["kind"] == "unknown_outcome"
            first.signal(signal.SIGCONT)
            assert first.exit_code() == 70
            named = {"runId": run_id, "approvalId": question["approvalId"], "digest": question["digest"]}
            second.call("approve", clientRequestId="told", decision="happened", **named)
            second.listen()
            shown = second.until(run_id, lambda shown: shown["run"]["status"] == "completed")
            assert [step.get("source") for step in shown["steps"]] == [None, "person", None]
            assert second.stop() == 0
    assert seen(service, "asleep") == Seen(1, 1)
    verified(store)


# Another store, another version


def test_in_another_store_a_run_is_unknown_and_whoever_says_which_store_it_means_is_told_at_once_s1_17(
    nursery: Nursery, tmp_path: Path
):
    with nursery.daemon(tmp_path / "one") as daemon:
        known = daemon.call("initialize", protocolVersion=1)
        run_id = start(daemon, "run")
        assert daemon.stop() == 0
    with nursery.daemon(tmp_path / "other") as daemon:
        other = daemon.call("status")["storeId"]
        assert other != known["storeId"]
        for params in ({"runId": run_id}, {"clientRequestId": "run"}):
            with refused("NOT_FOUND"):
                daemon.call("status", **params)
        with refused("INVALID_STATE") as caught:
            daemon.call("initialize", protocolVersion=1, expect={"storeId": known["storeId"]})
        assert (caught[0].data["storeId"], caught[0].data["epoch"]) == (other, 1)
        assert daemon.call("list")["runs"] == []
        assert daemon.stop() == 0
    with nursery.daemon(tmp_path / "one") as daemon:
        expect = {"storeId": known["storeId"], "minEpoch": 2}
        assert daemon.call("initialize", protocolVersion=1, expect=expect)["epoch"] == 2
        with refused("INVALID_STATE"):
            daemon.call("initialize", protocolVersion=1, expect={"minEpoch": 3})


@pytest.mark.timeout(600)
def test_a_store_of_format_0_that_is_killed_at_any_call_of_its_way_to_format_1_has_every_run_and_event_f037(
    nursery: Nursery, tmp_path: Path
):
    told = json.loads((looking.STORES / "format-0" / "expected.json").read_text())["held"]
    made = json.loads((looking.STORES / "format-0" / "manifest.json").read_text())["made"]
    before = {one["status"]["run"]["runId"]: one["events"]["events"] for one in told["runs"]}
    before = {run: [event for event in events if event["at"] != "later"] for run, events in before.items()}
    met, number = 0, 1
    while True:
        place = tmp_path / str(number)
        place.mkdir()
        store = looking.copied("format-0", place)
        with nursery.daemon(store, rig=(*AT_ONCE, "--kill-before", str(number))) as daemon:
            try:
                daemon.call("status")
                daemon.stop()
            except (AssertionError, OSError):
                assert daemon.exit_code() == -9
        killed = daemon.exit_code() == -9
        met += killed
        with nursery.daemon(store, "--hold") as daemon:
            listed = [run["runId"] for run in daemon.call("list", limit=1_000)["runs"]]
            assert listed == [one["runId"] for one in told["list"]["runs"]]
            for run_id, events in before.items():
                now = looking._masked(daemon.call("events", runId=run_id, limit=1_000)["events"], made)
                assert now[: len(events)] == events
            assert daemon.stop() == 0
        verified(store)
        shutil.rmtree(place)
        if not killed:
            break
        number += 1 if SLOW else 11
    assert met > (50 if SLOW else 4)


def recast(line: bytes, old: bytes, new: bytes) -> bytes:
    """The line with another content and the checksum of that."""
    assert line.count(old) == 1
    rest = line.replace(old, new)[16:]
    return b'{"c":"%08x",' % zlib.crc32(rest) + rest


@pytest.mark.parametrize("name", ["wal", "checkpoint.json"])
def test_a_store_that_a_later_version_wrote_is_refused_with_what_to_do_and_not_touched_f037(
    nursery: Nursery, tmp_path: Path, name: str
):
    store = tmp_path / "store"
    with nursery.daemon(store, rig=AT_ONCE) as daemon:
        start(daemon, "run", drive="manual")
        assert daemon.stop() == 0
    file = next((store / "wal").iterdir()) if name == "wal" else store / name
    first, *rest = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(recast(first, b'"format":1', b'"format":2') + b"".join(rest))
    before = {place: sum_ for place, sum_ in fingerprint(store).items() if place != "LOCK"}
    for options in ((), ("--hold",)):
        with nursery.daemon(store, *options) as daemon:
            for method, params in (("status", {}), ("start", {"clientRequestId": "x", "agent": TALKER, "input": ""})):
                with refused("INCOMPATIBLE") as caught:
                    daemon.call(method, **params)
                assert (caught[0].data["format"], caught[0].data["retryable"]) == (2, False)
                assert "install" in caught[0].message
            assert daemon.stop() == 1
    assert {place: sum_ for place, sum_ in fingerprint(store).items() if place != "LOCK"} == before


# Files that are empty after a freeze


def emptied(store: Path, file: Path) -> None:
    file.write_bytes(b"")


def zeroed(store: Path, file: Path) -> None:
    file.write_bytes(bytes(file.stat().st_size))


STORE_WIDE = {"wal", "checkpoint.json", "tombstones"}


@pytest.mark.parametrize("harm", [emptied, zeroed], ids=lambda harm: harm.__name__)
def test_whichever_file_a_freeze_emptied_new_runs_work_or_the_store_says_why_not_f111(
    nursery: Nursery, tmp_path: Path, harm: Callable[[Path, Path], None]
):
    store = tmp_path / "made" / "store"
    store.parent.mkdir()
    config = store.parent / "retention.toml"
    config.write_text('[retention]\nrules = [{ label = "gone", keep = 1 }]\n')
    printing = {"tools": ["shell"], "policy": {"rules": [{"do": "allow", "tool": "*"}]}, "model": {"script": [
        {"calls": [{"tool": "shell.run", "arguments": {"command": "yes | head -c 100000"}}]}, {"text": "done"}]}}  # fmt: skip
    with nursery.daemon(store, "--config", str(config), rig=(*AT_ONCE, "--tidy-every", "20")) as daemon:
        runs = [start(daemon, "ended"), start(daemon, "printed", agent=printing)]
        gone = [start(daemon, f"gone-{n}", labels={"gone": "1"}) for n in range(2)]
        daemon.listen()
        while daemon.call("status")["counts"]["completed"] > 3:
            daemon.take(daemon.message())
        runs.append(gone[1])
        assert daemon.stop() == 0
    with nursery.daemon(store, rig=AT_ONCE) as daemon:
        runs.append(start(daemon, "ready", drive="manual"))
        assert daemon.stop() == 0  # with a checkpoint, in which what was deleted goes too
    assert {path.name for path in (store / "runs").iterdir()} == set(runs)
    with nursery.daemon(store) as daemon:
        runs.append(start(daemon, "in-the-log", drive="manual"))
        daemon.kill()
    whole = said("verify", "--store", store, "--json")
    assert (whole.code, damage(whole)) == (0, [])
    kinds = set()
    for name in [path.relative_to(store) for path in sorted(store.rglob("*")) if path.is_file()]:
        copy = tmp_path / "copy" / "store"
        shutil.copytree(store, copy)
        harm(copy, copy / name)
        kinds.add(kind := name.parts[0].partition("-")[0])
        with nursery.daemon(copy) as daemon:
            if kind in STORE_WIDE:
                with refused("STORE_DAMAGED") as caught:
                    start(daemon, "new")
                assert caught[0].data["file"] == str(name)
            else:
                fresh = start(daemon, "new")
                listed = {run["runId"]: run["status"] for run in daemon.call("list", limit=1_000)["runs"]}
                assert listed.keys() == {*runs, fresh}
                harmed = {name.parts[1]} if kind == "runs" else set()
                shown = {run: daemon.call("status", runId=run)["run"]["status"] for run in listed}
                assert {run for run, status in shown.items() if status == "damaged"} == harmed, name
                ident = daemon.send("start", clientRequestId="gone-0", agent=TALKER, input="", labels={"gone": "1"})
                assert daemon.refusal(ident) == "KEY_EXPIRED"
                assert daemon.stop() == 0
        shutil.rmtree(copy.parent)
    assert kinds == {"wal", "checkpoint.json", "tombstones", "runs", "HEAD", "LOCK", "RESERVE", "blobs", "index.sqlite"}
