"""`rpcagent backup`: a copy of one moment, whole, and one that a daemon opens."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path

import pytest
from rpcagent.journal import reading, runfiles
from rpcagent.journal.checkpoint import read_manifest
from rpcagent.journal.disk import RealDisk
from rpcagent.runs import summary
from rpcagent.upkeep import backup
from rpcagent.upkeep.checking import Check
from rpcagent.upkeep.copying import Copy
from rpcagent.upkeep.place import Place
from tests.process.wire_driver import Daemon

from .commands import damage, fingerprint, said
from .stores import Owner, commits, golden, runs


def story(store: Path) -> dict[str, list[str]]:
    """All events of each run, as `log` tells them."""
    disk = RealDisk(store)
    names = disk.names("runs") if disk.exists("runs") else []
    disk.close()
    told = {fact["runId"] for fact in said("log", "--store", store, "--json").facts if "runId" in fact}
    return {
        run: [json.dumps(f["event"]) for f in said("log", "--store", store, "--run", run, "--json").facts]
        for run in {*names, *told}
    }


def test_a_backup_holds_every_run_and_the_store_is_not_touched(store: Path, tmp_path: Path):
    before = fingerprint(store)
    found = said("backup", tmp_path / "copy", "--store", store, "--json")
    assert (found.code, found.facts[0]["backup"]["runs"]) == (0, 21)
    assert fingerprint(store) == before
    assert story(tmp_path / "copy") == story(store)
    verified = said("verify", "--store", tmp_path / "copy", "--json", "--replay")
    assert (verified.code, damage(verified), verified.summary["warnings"]) == (0, [], 0)
    assert [path for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_place_that_is_taken_is_refused_and_left_alone(store: Path, tmp_path: Path):
    (tmp_path / "copy").mkdir()
    found = said("backup", tmp_path / "copy", "--store", store, "--json")
    assert (found.code, list((tmp_path / "copy").iterdir())) == (2, [])
    assert said("backup", tmp_path / "no" / "copy", "--store", store).code == 2


@pytest.mark.process
def test_a_backup_beside_a_daemon_is_restored_and_goes_on(tmp_path: Path):
    store, copy = tmp_path / "store", tmp_path / "copy"
    agent = {"model": {"script": [{"text": "done"}]}}
    with Daemon(store, rig=("--checkpoint-every", "12"), workspace=tmp_path) as daemon:
        daemon.listen()
        acknowledged = [
            daemon.call("start", clientRequestId=f"k{n}", input="x", agent=agent, waitMs=5_000)["runId"]
            for n in range(12)
        ]
        found = said("backup", copy, "--store", store, "--json")
        assert (found.code, damage(found)) == (0, [])
        assert daemon.call("status")["status"] == "ok"
        daemon.call("start", clientRequestId="later", input="x", agent=agent, waitMs=5_000)
    shutil.rmtree(store)
    shutil.copytree(copy, store)
    with Daemon(store, workspace=tmp_path) as daemon:
        daemon.listen()
        listed = [run["runId"] for run in daemon.call("list", limit=100)["runs"]]
        assert listed == acknowledged
        again = daemon.call("start", clientRequestId="k3", input="x", agent=agent, waitMs=5_000)
        assert (again["runId"], again["replayed"]) == (acknowledged[3], True)
        assert daemon.stop() == 0


class Busy:
    """The disk as the copy sees it: before each read from number `at` on, and every `step`-th after it, the owner acts."""

    def __init__(self, disk: RealDisk, act, at: int, step: int) -> None:
        self._disk, self._act, self.at, self.step, self.reads = disk, act, at, step, 0

    def __getattr__(self, name):
        call = getattr(self._disk, name)
        if name not in {"names", "exists", "read", "read_at", "size"}:
            raise AssertionError(f"a copy calls {name}")

        def reads(*args):
            if self.reads >= self.at and (self.reads - self.at) % self.step == 0:
                self._act()
            self.reads += 1
            return call(*args)

        return reads


def owner_with(folder: Path, mine: list):
    disk = RealDisk(folder)
    owner = Owner(disk, folder, segment=6_000)
    owner.record(mine[:12]).checkpoint().record(mine[12:16])
    rest = mine[16:]
    turn = [0]

    def act() -> None:
        turn[0] += 1
        if turn[0] % 2:
            owner.checkpoint()
        elif rest:
            owner.record(rest[:3])
            del rest[:3]

    return owner, act


@pytest.mark.parametrize("step", [1, 3, 7])
def test_whatever_the_owner_does_while_it_is_copied_each_run_is_a_beginning_and_the_copy_is_whole(
    tmp_path: Path, step: int
):
    mine = [item for item in golden() if item.run in {*runs("active")[:3], *runs("completed")[:4]}]
    whole = {run: [item.body for item in commits(run)] for run in {item.run for item in mine}}
    made = 0
    for at in range(0, 40, 3):
        folder, copy = tmp_path / f"store{at}", tmp_path / f"copy{at}"
        owner, act = owner_with(folder, list(mine))
        before = story(folder)
        busy = Busy(RealDisk(folder), act, at, step)
        try:
            Copy(folder, busy, copy).make()
        except (reading.MovedOn, FileNotFoundError):
            continue
        made += 1
        findings: list = []
        Check(Place(copy), findings.append, replay=True).run()
        assert [finding for finding in findings if finding.severity != "note"] == [], at
        told = read_manifest(RealDisk(copy))
        begun = {line.run for line in reading.read_store(RealDisk(copy)).entries() if line.first == 1}
        for run in RealDisk(copy).names("runs"):
            heads = summary.decode(runfiles.read_state(RealDisk(copy), run).summary)
            assert run not in begun
            assert heads.place < told.places
            assert not heads.live or summary.decode(told.live[run]).last_seq == heads.last_seq, (
                "it is of another moment"
            )
        after = story(copy)
        for run, events in before.items():
            assert after[run][: len(events)] == events, (at, run)
        for run, events in after.items():
            every = [json.dumps(event) for body in whole[run] for event in json.loads(body)["events"]]
            assert events == every[: len(events)]
        owner.close()
    assert made > 3


def test_a_run_that_is_deleted_meanwhile_is_left_out_with_its_tombstone(tmp_path: Path):
    gone, kept = runs("completed")[:2]
    at, reads, made = 0, 1, 0
    while at < reads:
        folder, copy = tmp_path / f"store{at}", tmp_path / f"copy{at}"
        owner = Owner(RealDisk(folder), folder)
        owner.record([*commits(gone), *commits(kept), *commits(runs("active")[0])]).checkpoint()
        busy = Busy(RealDisk(folder), lambda owner=owner: owner.checkpoint([gone]), at, 10**9)
        try:
            Copy(folder, busy, copy).make()
        except (reading.MovedOn, FileNotFoundError):
            at, reads = at + 1, max(reads, busy.reads + 1)
            continue
        findings: list = []
        Check(Place(copy), findings.append).run()
        assert [finding for finding in findings if finding.severity != "note"] == [], at
        assert set(story(copy)) - {gone} == {kept, runs("active")[0]}
        at, reads, made = at + 1, max(reads, busy.reads), made + 1
        owner.close()
    assert made > 5


def test_damage_is_copied_along_and_told(store: Path, tmp_path: Path):
    path = store / "runs" / runs("completed")[2] / "history.jsonl"
    content = bytearray(path.read_bytes())
    content[200] ^= 1
    path.write_bytes(content)
    found = said("backup", tmp_path / "copy", "--store", store, "--json")
    assert (found.code, [finding.get("runs") for finding in damage(found)]) == (1, [[runs("completed")[2]]])
    assert (tmp_path / "copy" / path.relative_to(store)).read_bytes() == content


def test_two_backups_at_once_do_not_meet(store: Path, tmp_path: Path):
    codes = []
    threads = [
        threading.Thread(
            target=lambda n=n: codes.append(backup._copied(Place(store), tmp_path / f"c{n}").snapshot.end.seq)
        )
        for n in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert codes == [84, 84, 84]
