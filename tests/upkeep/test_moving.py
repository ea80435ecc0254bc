"""`rpcagent export` and `import`: a run comes out whole, and goes in once, whole or not at all."""

from __future__ import annotations

import hashlib
import json
import shutil
from datetime import UTC, datetime
from pathlib import Path

import pytest
from rpcagent import errors, keys
from rpcagent.journal import manifest, reading, runfiles
from rpcagent.journal.blobs import Blobs
from rpcagent.journal.checkpoint import read_manifest
from rpcagent.journal.disk import RealDisk, StoreLock
from rpcagent.journal.record import Item
from rpcagent.journal.seal import AesGcm
from rpcagent.runs import events as ev
from rpcagent.upkeep import importing
from rpcagent.upkeep.checking import Check
from rpcagent.upkeep.findings import Finding
from rpcagent.upkeep.place import Place
from tests.journal.simdisk import Crash, SimDisk
from tests.process.wire_driver import Daemon, refused

from .commands import damage, fingerprint, said
from .stores import STORE_ID, Owner, commits, golden, real_store, runs

ENDED = runs("completed")[2]
LIVE = runs("active")[-1]


@pytest.fixture
def parcel(store: Path, tmp_path: Path) -> Path:
    path = tmp_path / "run.jsonl"
    assert said("export", ENDED, path, "--store", store).code == 0
    return path


def bodies(store: Path, run: str) -> list[bytes]:
    disk = RealDisk(store)
    held = runfiles.read_bodies(disk, run, named=True)
    disk.close()
    assert held is not None
    return [line.body for line in held[1]]


def test_an_export_holds_all_of_a_run_and_changes_nothing(store: Path, tmp_path: Path):
    before = fingerprint(store)
    path = tmp_path / "x.jsonl"
    found = said("export", LIVE[:12], path, "--store", store, "--json")
    assert found.code == 0
    assert found.facts[0]["exported"]["lastSeq"] == commits(LIVE)[-1].first + commits(LIVE)[-1].count - 1
    assert fingerprint(store) == before
    assert path.stat().st_mode & 0o777 == 0o600
    lines = path.read_bytes().splitlines(keepends=True)
    assert json.loads(lines[0])["d"]["runId"] == LIVE
    assert [json.loads(line)["d"] for line in lines[1:-1]] == [json.loads(item.body) for item in commits(LIVE)]
    end = json.loads(lines[-1])["d"]
    assert end == {"lines": len(lines) - 2, "blobs": 0, "sha256": hashlib.sha256(b"".join(lines[:-1])).hexdigest()}
    assert [path for path in tmp_path.iterdir() if path.name.endswith(".tmp")] == []


@pytest.mark.process
def test_an_export_beside_a_daemon_holds_what_is_acknowledged(tmp_path: Path):
    store = tmp_path / "store"
    with Daemon(store, workspace=tmp_path) as daemon:
        daemon.listen()
        agent = {"model": {"script": [{"text": "done"}]}}
        run = daemon.call("start", clientRequestId="k", input="x", agent=agent, waitMs=5_000)["runId"]
        assert said("export", run, tmp_path / "x", "--store", store).code == 0
        locked = said("import", tmp_path / "x", "--store", store, "--json")
        assert (locked.code, locked.error["code"]) == (5, "STORE_LOCKED")
        assert daemon.stop() == 0
    other = tmp_path / "other"
    assert said("import", tmp_path / "x", "--store", other).code == 0
    with Daemon(other, workspace=tmp_path) as daemon:
        daemon.listen()
        assert daemon.call("status", runId=run)["run"]["status"] == "completed"
        assert [each["runId"] for each in daemon.call("list", limit=5)["runs"]] == [run]
        assert daemon.call("status")["counts"]["completed"] == 1
        assert daemon.stop() == 0
    assert damage(said("verify", "--store", other, "--json", "--replay")) == []


def test_a_run_that_has_ended_goes_into_another_store_with_all_its_events(parcel: Path, tmp_path: Path):
    other = tmp_path / "other"
    found = said("import", parcel, "--store", other, "--json")
    assert (found.code, found.facts[0]["imported"]["runId"]) == (0, ENDED)
    assert bodies(other, ENDED) == [item.body for item in commits(ENDED)]
    verified = said("verify", "--store", other, "--json", "--replay")
    assert (verified.code, verified.summary["runs"], verified.summary["warnings"]) == (0, 1, 0)
    again = said("import", parcel, "--store", other, "--json")
    assert (again.code, again.error["code"]) == (2, "INVALID_STATE")


def test_a_store_that_has_runs_takes_one_more_and_keeps_its_log_as_it_is(store: Path, tmp_path: Path):
    other = tmp_path / "from"
    disk = RealDisk(other)
    odd = "run_" + "b" * 26
    mine = [Item(odd, item.first, item.count, item.body) for item in commits(ENDED)]
    Owner(disk, other).record(mine).close()
    path = tmp_path / "x.jsonl"
    assert said("export", odd, path, "--store", other).code == 0
    log = {path.name: path.read_bytes() for path in (store / "wal").iterdir()}
    assert said("import", path, "--store", store).code == 0
    assert {path.name: path.read_bytes() for path in (store / "wal").iterdir()} == log
    verified = said("verify", "--store", store, "--json", "--replay")
    assert (verified.code, verified.summary["runs"], verified.summary["warnings"]) == (0, 22, 0)


def test_what_is_there_or_was_deleted_does_not_come_in(store: Path, parcel: Path, tmp_path: Path):
    before = fingerprint(store)
    for run, code in ((ENDED, "INVALID_STATE"), (runs("completed")[0], "KEY_EXPIRED")):
        other = tmp_path / run
        disk = RealDisk(other)
        Owner(disk, other).record(commits(run)).close()
        path = tmp_path / f"{run}.jsonl"
        assert said("export", run, path, "--store", other).code == 0
        found = said("import", path, "--store", store, "--json")
        assert (found.code, found.error["code"]) == (2, code)
    (store / "LOCK").write_bytes(b"")
    assert fingerprint(store) == before


def test_a_run_that_goes_on_is_taken_over_only_by_a_word(store: Path, tmp_path: Path):
    """_f031"""
    path, other = tmp_path / "x.jsonl", tmp_path / "other"
    assert said("export", LIVE, path, "--store", store).code == 0
    refusal = said("import", path, "--store", other, "--json")
    assert (refusal.code, refusal.error["code"]) == (2, "INVALID_STATE")
    assert "--take-over" in refusal.error["remedy"]
    assert not (other / "runs").exists()
    taken = said("import", path, "--store", other, "--take-over")
    assert taken.code == 0
    assert "must never be opened again" in taken.err
    disk = RealDisk(other)
    told = read_manifest(disk)
    disk.close()
    assert list(told.live) == [LIVE]


def test_the_next_opening_is_never_taken_for_the_one_that_released_the_run(store: Path, tmp_path: Path):
    path, other = tmp_path / "x.jsonl", tmp_path / "other"
    disk = RealDisk(tmp_path / "from")
    begun = ev.decode(commits(LIVE)[0].body)
    first = begun.events[0]
    events = (
        type(first)(**{name: getattr(first, name) for name in first.__struct_fields__} | {"epoch": 7}),
        *begun.events[1:],
    )
    body = ev.encode(ev.Commit(seq=1, at=begun.at, events=events))
    Owner(disk).record([Item(LIVE, 1, len(events), body)]).close()
    assert said("export", LIVE, path, "--store", tmp_path / "from").code == 0
    assert said("import", path, "--store", other, "--take-over").code == 0
    assert Owner(RealDisk(other)).wal.epoch == 8


@pytest.mark.process
def test_a_run_that_was_taken_over_goes_on_with_its_question(store: Path, tmp_path: Path):
    path, other = tmp_path / "x.jsonl", tmp_path / "other"
    asks = next(run for run in runs("active") if b"approval_requested" in commits(run)[-1].body)
    assert said("export", asks, path, "--store", store).code == 0
    assert said("import", path, "--store", other, "--take-over").code == 0
    with Daemon(other, "--hold", workspace=tmp_path) as daemon:
        daemon.listen()
        shown = daemon.call("status", runId=asks)
        assert [question["kind"] for question in shown["approvals"]] != []
        with refused("NOT_FOUND"):
            daemon.call("status", runId=ENDED)
        assert daemon.stop() == 0


def test_any_changed_byte_of_a_file_is_seen_and_nothing_is_written(parcel: Path, tmp_path: Path):
    content = parcel.read_bytes()
    other = tmp_path / "other"
    for place in [*range(0, len(content), 211), *range(len(content) - 160, len(content))]:
        rotten = bytearray(content)
        rotten[place] ^= 1
        parcel.write_bytes(rotten)
        with pytest.raises((errors.StoreDamaged, errors.StoreTooNew)):
            importing.read(parcel)
    for end in range(0, len(content), 401):
        parcel.write_bytes(content[:end])
        found = said("import", parcel, "--store", other, "--json")
        assert (found.code, found.error["code"]) == (1, "STORE_DAMAGED")
    parcel.write_bytes(content + b"\n")
    assert said("import", parcel, "--store", other).code == 1
    assert not other.exists()


def test_a_file_of_a_later_format_and_what_is_no_file_are_told(parcel: Path, tmp_path: Path):
    first, _, rest = parcel.read_bytes().partition(b"\n")
    parcel.write_bytes(first.replace(b'"format":1', b'"format":2') + b"\n" + rest)
    found = said("import", parcel, "--store", tmp_path / "other", "--json")
    assert (found.code, found.error["code"]) == (5, "INCOMPATIBLE")
    missing = said("import", tmp_path / "none", "--store", tmp_path / "other", "--json")
    assert (missing.code, missing.error["code"]) == (5, "STORAGE")


def with_output(tmp_path: Path, sealing=None) -> tuple[Path, str, bytes]:
    """A store with a run that refers to a large output."""
    store = tmp_path / "has-output"
    disk = RealDisk(store)
    content = b"a long output\n" * 5_000
    writer = Blobs(store / "blobs", sealing).create()
    writer.write(content)
    digest = writer.keep()
    run = runs("active")[0]
    found = next(run for run in runs("completed") if any(b'"tool_completed"' in item.body for item in commits(run)))
    items = []
    for item in commits(found):
        commit = ev.decode(item.body)
        marked = tuple(
            type(event)(**{n: getattr(event, n) for n in event.__struct_fields__} | {"blobs": (digest,)})
            if isinstance(event, ev.ToolCompleted)
            else event
            for event in commit.events
        )
        items.append(
            Item(found, item.first, item.count, ev.encode(ev.Commit(seq=commit.seq, at=commit.at, events=marked)))
        )
    Owner(disk, store, sealing=sealing).record(items).checkpoint().record(commits(run)).close()
    return store, found, content


def test_large_outputs_go_along_and_are_verified(tmp_path: Path):
    store, run, content = with_output(tmp_path)
    path, other = tmp_path / "x.jsonl", tmp_path / "other"
    assert said("export", run, path, "--store", store, "--json").facts[0]["exported"]["blobs"] == 1
    assert said("import", path, "--store", other).code == 0
    digest = hashlib.sha256(content).hexdigest()
    assert (other / "blobs" / digest).read_bytes() == content
    assert said("verify", "--store", other, "--json").code == 0
    listed = said("blob", run, "--store", other, "--json")
    assert listed.facts == [{"digest": digest, "bytes": len(content)}]
    (other / "blobs" / digest).write_bytes(b"?")
    assert said("blob", digest[:8], "--store", other, "--json").code == 1
    (other / "blobs" / digest).unlink()
    found = said("verify", "--store", other, "--json")
    assert (found.code, damage(found)[0]["runs"]) == (1, [run])
    assert said("export", run, tmp_path / "y", "--store", other, "--json").error["code"] == "STORE_DAMAGED"
    assert not (tmp_path / "y").exists()


def test_a_sealed_run_comes_out_in_the_clear_with_its_key_and_goes_in_sealed(tmp_path: Path):
    key = tmp_path / "key"
    ring = keys.KeyRing(keys.new_key_file(key))
    store, run, content = with_output(tmp_path, AesGcm(ring, STORE_ID))
    path = tmp_path / "x.jsonl"
    shut = said("export", run, path, "--store", store, "--json")
    assert (shut.code, shut.error["code"], path.exists()) == (5, "INCOMPATIBLE", False)
    assert said("export", run, path, "--store", store, "--encryption-key", f"file:{key}").code == 0
    sealed = real_store(tmp_path / "sealed", sealing=AesGcm(ring, STORE_ID))
    odd = path.read_bytes()
    assert run.encode() in odd
    assert b"a long output" not in (store / "blobs" / hashlib.sha256(content).hexdigest()).read_bytes()
    target = tmp_path / "target"
    disk = RealDisk(target)
    Owner(disk, target, sealing=AesGcm(ring, STORE_ID)).record(commits(LIVE)).checkpoint().close()
    refusal = said("import", path, "--store", target, "--json")
    assert (refusal.code, refusal.error["code"]) == (5, "INCOMPATIBLE")
    assert said("import", path, "--store", target, "--encryption-key", f"file:{key}").code == 0
    assert b"run_started" not in (target / "runs" / run / "history.jsonl").read_bytes()
    verified = said("verify", "--store", target, "--json", "--replay", "--encryption-key", f"file:{key}")
    assert (verified.code, damage(verified)) == (0, [])
    assert sealed.exists()


def test_an_import_that_is_cut_off_anywhere_leaves_all_or_nothing_and_can_be_repeated(parcel: Path, tmp_path: Path):
    found = importing.read(parcel)
    disk = SimDisk()
    Owner(disk).record(item for item in golden() if item.run == LIVE).checkpoint().close()
    before = disk.image()

    def take(on: SimDisk) -> None:
        taking = importing.Taking(tmp_path, Place(tmp_path), on)
        taking.check(found, take_over=False)
        taking.take(found, parcel)

    count = SimDisk(before)
    take(count)
    whole = [item.body for item in commits(ENDED)]
    for point in range(count.calls):
        disk = SimDisk(before, crash_at=point)
        with pytest.raises(Crash):
            take(disk)
        for image in [disk.image(), *disk.after_cut(seed=point, cap=3, shapes=4)]:
            after = SimDisk(image)
            held = runfiles.read_bodies(after, ENDED, named=False)
            assert held is None or [line.body for line in held[1]] == whole, point
            assert reading.read_store(after).manifest is not None
            Owner(SimDisk(image)).close()
            if held is None or ENDED not in _counted(after):
                take(after)
            assert _counted(after) == {ENDED}
            held = runfiles.read_bodies(after, ENDED, named=True)
            assert [line.body for line in held[1]] == whole


def _counted(disk: SimDisk) -> set[str]:
    told = read_manifest(disk)
    return {ENDED} if told is not None and told.ended == {"completed": 1} else set()


def test_an_import_that_was_cut_off_hides_no_lost_run_and_the_next_one_counts_it(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Whatever it left, a store that has lost a run down to its name says so, and the import of another run changes nothing of it."""
    other, lost = runs("completed")[3:5]
    parcels = {name: tmp_path / f"{name}.parcel" for name in (ENDED, other)}
    for name, path in parcels.items():
        assert said("export", name, path, "--store", store).code == 0
    owner = Owner(SimDisk()).record(commits(lost)).checkpoint()
    owner.close()
    before = {name: data for name, data in owner.disk.image().items() if not name.startswith("index")}

    def take(on: SimDisk, name: str) -> None:
        taking = importing.Taking(tmp_path, Place(tmp_path), on)
        taking.check(importing.read(parcels[name]), take_over=False)
        taking.take(importing.read(parcels[name]), parcels[name])

    count = SimDisk(before)
    take(count, ENDED)
    for point in range(count.calls):
        disk = SimDisk(before, crash_at=point)
        with pytest.raises(Crash):
            take(disk, ENDED)
        for again in ((), (other,), (ENDED, other)):
            after = SimDisk(disk.image())
            for name in again:
                if name != ENDED or ENDED not in _named(after):
                    take(after, name)
            rest = SimDisk({name: data for name, data in after.image().items() if lost not in name})
            monkeypatch.setattr(Place, "disk", lambda _place, rest=rest: rest)
            told: list[Finding] = []
            Check(Place(tmp_path), told.append).run()
            said_so = [finding.what for finding in told if finding.severity == "damage"]
            assert said_so == [f"1 completed runs are missing: the manifest counts {_ended(after)}"], (point, again)


def _ended(disk: SimDisk) -> int:
    told = read_manifest(disk)
    return told.ended["completed"] if told is not None else 0


def _named(disk: SimDisk) -> set[str]:
    return {ENDED} if _ended(disk) == 2 else set()


def test_an_import_waits_for_nobody(store: Path, parcel: Path):
    lock = StoreLock.take(store, since=datetime.now(UTC).isoformat())
    try:
        assert said("import", parcel, "--store", store, "--json").error["code"] == "STORE_LOCKED"
    finally:
        lock.close()


def test_a_deleted_run_is_not_exported(store: Path, tmp_path: Path):
    found = said("export", runs("completed")[0], tmp_path / "x", "--store", store, "--json")
    assert (found.code, found.error["code"]) == (2, "NOT_FOUND")
    assert manifest.FILE == "checkpoint.json"
    shutil.rmtree(store)
