"""What leaves a store: runs that retention deletes, and large outputs that nobody refers to; and what may not. S0-67, S2-31,
S4-31, F093.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.process.calls import TALKER, start, verified
from tests.process.nursery import Nursery
from tests.process.outside import agent
from tests.process.wire_driver import WAIT_S, Daemon, refused
from tests.service.driver import CountingService
from tests.upkeep.commands import damage, said

pytestmark = pytest.mark.process

SLOW = bool(os.environ.get("RPCAGENT_SLOW"))
MANY, KEPT = 1_000, 100
AT_ONCE = ("--checkpoint-every", "1", "--retry", "20")


def rules(folder: Path, *said_of: str) -> tuple[str, ...]:
    file = folder / "retention.toml"
    file.write_text(f"[retention]\nrules = [{', '.join(said_of)}]\n")
    return ("--config", str(file))


def until_kept(daemon: Daemon, completed: int) -> None:
    daemon.listen()
    while daemon.call("status")["counts"].get("completed", 0) > completed:
        daemon.take(daemon.message())


def until_gone(daemon: Daemon, left: int) -> None:
    end = time.monotonic() + WAIT_S
    while len(list((daemon.store / "runs").iterdir())) > left:
        assert time.monotonic() < end
        daemon.call("status")


def test_of_1000_ended_runs_the_newest_100_stay_and_what_waits_stays_however_old_s0_67(
    service: CountingService, nursery: Nursery, tmp_path: Path
):
    store, config = tmp_path / "store", rules(tmp_path, f"{{ keep = {KEPT} }}")
    with nursery.daemon(store) as daemon:
        asks = start(daemon, "asks", agent=agent(service, "at_most_once", "asks", rules=()))
        sent = [
            daemon.request("start", clientRequestId=f"r-{n}", agent=TALKER, input="", waitMs=60_000)
            for n in range(MANY)
        ]
        daemon.write(b"".join(line for _, line in sent))
        begun = [daemon.result(ident)["runId"] for ident, _ in sent]  # fewer than all may wait for their ends
        for run_id in begun:
            daemon.until(run_id, lambda shown: shown["run"]["status"] == "completed")
        ended = daemon.call("list", status=["completed"], limit=1_000)["runs"]
        assert len(ended) == MANY
        assert daemon.stop() == 0
    newest = sorted(ended, key=lambda run: (run["updatedAt"], ended.index(run)))[-KEPT:]
    with nursery.daemon(store, *config, rig=(*AT_ONCE, "--tidy-every", "20")) as daemon:
        until_kept(daemon, KEPT)
        listed = daemon.call("list", limit=1_000)["runs"]
        assert {run["runId"] for run in listed} == {asks, *(run["runId"] for run in newest)}
        [question] = daemon.call("status", runId=asks)["approvals"]
        assert question["status"] == "open"
        assert daemon.stop() == 0
    verified(store)
    with nursery.daemon(store, *config, rig=AT_ONCE) as daemon:
        assert daemon.call("status")["counts"] == {"completed": KEPT, "waiting": 1}
        start(daemon, "one-more")
        assert daemon.stop() == 0
    assert len(list((store / "runs").iterdir())) == KEPT + 2
    verified(store)


@pytest.mark.timeout(600)
def test_a_deletion_that_is_killed_anywhere_leaves_a_whole_store_and_what_was_deleted_never_comes_back_s0_67_f093(
    nursery: Nursery, tmp_path: Path
):
    made, count = tmp_path / "made", 6
    with nursery.daemon(made, rig=AT_ONCE) as daemon:
        runs = {f"r-{n}": start(daemon, f"r-{n}") for n in range(count)}
        assert daemon.stop() == 0
    config = rules(tmp_path, "{ keep = 1 }")
    tidy = (*AT_ONCE, "--tidy-every", "10")
    number, met = 1, 0
    while True:
        store = tmp_path / str(number)
        shutil.copytree(made, store)
        with nursery.daemon(store, *config, rig=(*tidy, "--kill-before", str(number))) as daemon:
            try:
                until_kept(daemon, 1)
                until_gone(daemon, 1)
                daemon.stop()
            except (AssertionError, OSError):
                assert daemon.exit_code() == -9
        killed = daemon.exit_code() == -9
        met += killed
        with nursery.daemon(store, "--hold") as daemon:
            left = {run["runId"] for run in daemon.call("list")["runs"]}
            asked = {key: daemon.send("start", clientRequestId=key, agent=TALKER, input="") for key in runs}
            answers = {key: daemon.answer(ident) for key, ident in asked.items()}
            for key, answer in answers.items():
                if runs[key] in left:
                    assert (answer["result"]["runId"], answer["result"]["replayed"]) == (runs[key], True)
                else:
                    assert answer["error"]["data"] == {"code": "KEY_EXPIRED", "retryable": False, "runId": runs[key]}
            assert daemon.call("status")["counts"] == {"completed": len(left)}
            assert daemon.stop() == 0
        verified(store)
        with nursery.daemon(store, *config, rig=tidy) as daemon:
            until_kept(daemon, 1)
            assert [run["runId"] for run in daemon.call("list")["runs"]] == [runs[f"r-{count - 1}"]]
            assert daemon.stop() == 0
        if not killed:
            break
        number += 1 if SLOW else 5
    assert met > (20 if SLOW else 4)


def test_a_late_request_for_a_deleted_run_is_told_so_by_every_method_and_begins_nothing_f093(
    nursery: Nursery, tmp_path: Path
):
    """After a day, and ten thousand other requests: the key of a run that is there gets its answer, that of one that was
    deleted is expired."""
    store, config, wall = tmp_path / "store", rules(tmp_path, '{ label = "gone", keep = 1 }'), tmp_path / "wall"
    wall.write_text("0")
    with nursery.daemon(store, *config, rig=(*AT_ONCE, "--tidy-every", "20", "--wall-clock", str(wall))) as daemon:
        kept = start(daemon, "kept")
        gone = start(daemon, "gone", labels={"gone": "1"})
        start(daemon, "later", labels={"gone": "1"})
        until_kept(daemon, 2)
        sent = [daemon.request("cancel", clientRequestId=f"c-{n}", runId=kept) for n in range(10_000)]
        for part in range(0, len(sent), 500):
            daemon.write(b"".join(line for _, line in sent[part : part + 500]))
            for ident, _ in sent[part : part + 500]:
                assert daemon.refusal(ident) == "INVALID_STATE"
        daemon.kill()
    wall.write_text(str(25 * 3_600))
    with nursery.daemon(store, rig=("--wall-clock", str(wall))) as daemon:
        again = daemon.call("start", clientRequestId="kept", agent=TALKER, input="")
        assert (again["runId"], again["replayed"], again["run"]["status"]) == (kept, True, "completed")
        named = {"runId": gone, "clientRequestId": "late"}
        answer = {"approvalId": f"apr_{gone.removeprefix('run_')}_1", "digest": "sha256:0", "decision": "allow"}
        for method, params in (
            ("start", {"clientRequestId": "gone", "agent": TALKER, "input": "", "labels": {"gone": "1"}}),
            ("start", {"clientRequestId": "gone", "agent": TALKER, "input": "another"}),
            ("step", named),
            ("resume", named),
            ("cancel", named),
            ("approve", named | answer),
        ):
            with refused("KEY_EXPIRED") as caught:
                daemon.call(method, **params)
            assert caught[0].data == {"code": "KEY_EXPIRED", "retryable": False, "runId": gone}
        for method, params in (
            ("status", {"runId": gone}),
            ("status", {"clientRequestId": "gone"}),
            ("events", {"runId": gone}),
        ):
            with refused("NOT_FOUND") as caught:
                daemon.call(method, **params)
            told = {"runId": gone, "deleted": True, "storeId": daemon.call("status")["storeId"]}
            assert caught[0].data == {"code": "NOT_FOUND", "retryable": False, **told}
        assert len(daemon.call("list")["runs"]) == 2
        assert daemon.stop() == 0


# Large outputs


PRINTED = 5_000_000
PRINTING: dict[str, Any] = {
    "tools": ["shell"],
    "policy": {"rules": [{"do": "allow", "tool": "*"}]},
    "model": {"script": [
        {"calls": [{"tool": "shell.run", "arguments": {"command": f"yes 0123456 | head -c {PRINTED}"}}]}, {"text": "done"},
    ]},
}  # fmt: skip
DIGEST = hashlib.sha256(b"0123456\n" * (PRINTED // 8)).hexdigest()


def log_bytes(store: Path) -> int:
    return sum(path.stat().st_size for path in (store / "wal").iterdir())


def test_of_an_output_of_5_megabytes_the_log_takes_its_two_ends_and_the_whole_is_verified_when_it_is_read_s2_31_s4_31(
    nursery: Nursery, tmp_path: Path
):
    store = tmp_path / "store"
    with nursery.daemon(store, rig=AT_ONCE) as daemon:
        run_id = start(daemon, "printed", agent=PRINTING)
        assert log_bytes(store) < 2 * 56 * 1024
        shown = daemon.call("status", runId=run_id)["steps"][1]["result"]["content"][0]["text"]
        assert (
            f"the whole output has {PRINTED} bytes, and is kept as blobs/{DIGEST}" in shown,
            len(shown) < 57_344,
        ) == (True, True)
        assert daemon.stop() == 0
    blob = store / "blobs" / DIGEST
    assert (blob.stat().st_size, hashlib.sha256(blob.read_bytes()).hexdigest()) == (PRINTED, DIGEST)
    listed = said("blob", run_id, "--store", store)
    assert (listed.code, DIGEST in listed.out) == (0, True)
    verified(store)
    with blob.open("r+b") as file:
        file.seek(PRINTED // 2)
        file.write(b"X")
    command = [sys.executable, "-P", "-m", "rpcagent", "blob", DIGEST, "--store", str(store)]
    read = subprocess.run(command, capture_output=True, timeout=60, check=False)
    assert (read.returncode, DIGEST.encode() in read.stderr) == (1, True)
    [found] = damage(said("verify", "--store", store, "--json"))
    assert found["file"] == f"blobs/{DIGEST}"
    assert found["remedy"] == f"the output is lost; the run that refers to it is whole: {run_id}"


def test_an_output_whose_record_never_came_is_nobodys_and_is_collected_and_one_that_is_referred_to_stays_s4_31(
    nursery: Nursery, tmp_path: Path
):
    store = tmp_path / "store"
    with Daemon(store, rig=("--pause", "before_append:tool_completed")) as daemon:
        run_id = start(daemon, "printed", agent=PRINTING, waitMs=0)
        daemon.reports(1)
        daemon.kill()
    blob = store / "blobs" / DIGEST
    assert blob.stat().st_size == PRINTED
    with nursery.daemon(store) as daemon:
        [question] = daemon.call("status", runId=run_id)["approvals"]
        assert question["kind"] == "unknown_outcome"
        assert daemon.stop() == 0
    long_ago = blob.stat().st_mtime - 86_400
    os.utime(blob, (long_ago, long_ago))
    assert said("gc", "--store", store, "--workspace", tmp_path, "--json").code == 0
    assert not blob.exists()
    verified(store)
    with nursery.daemon(store) as daemon:
        start(daemon, "again", agent=PRINTING)
        assert daemon.stop() == 0
    os.utime(blob, (long_ago, long_ago))
    assert said("gc", "--store", store, "--workspace", tmp_path, "--json").code == 0
    assert blob.stat().st_size == PRINTED
    verified(store)
