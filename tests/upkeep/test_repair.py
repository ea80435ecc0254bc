"""`rpcagent repair`: the plan, the consent, the deed, and a daemon that opens what comes out."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

import pytest
from rpcagent import keys
from rpcagent.journal import manifest, record
from rpcagent.journal.disk import RealDisk, StoreLock
from rpcagent.journal.reading import segments_of
from rpcagent.journal.seal import AesGcm
from tests.process.wire_driver import Daemon, refused

from .commands import damage, fingerprint, said
from .stores import STORE_ID, commits, real_store, runs


def without_copies(store: Path) -> dict[str, str]:
    return {
        name: found for name, found in fingerprint(store).items() if not name.startswith("damaged") and name != "LOCK"
    }


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def flip_a_record(store: Path, number: int) -> None:
    """In the middle of the line of this record."""
    disk = RealDisk(store)
    for name, _ in segments_of(disk):
        content = (store / name).read_bytes()
        if (place := content.find(b'"q":%d,' % number)) >= 0:
            flip(store / name, place + 150)
    disk.close()


def test_a_whole_store_is_left_as_it_is(store: Path):
    before = without_copies(store)
    found = said("repair", "--store", store)
    assert (found.code, found.out.splitlines()[0]) == (0, "There is nothing to repair.")
    assert without_copies(store) == before
    assert not (store / "damaged").exists()


def test_a_loss_is_told_and_needs_a_word_and_until_then_nothing_is_changed(store: Path):
    flip_a_record(store, 64)
    before = fingerprint(store)
    found = said("repair", "--store", store)
    assert found.code == 1
    assert "loss     wal/0000000000000062.jsonl" in found.out
    assert f"Nothing was changed. To give up what is lost: rpcagent repair --yes-lose --store {store}" in found.out
    after = fingerprint(store)
    assert {name: after[name] for name in before if name != "LOCK"} == {
        name: before[name] for name in before if name != "LOCK"
    }


def test_a_log_that_is_gone_with_its_watermark_is_a_loss_of_nobody_knows_how_much(store: Path):
    shutil.rmtree(store / "wal")
    (store / "HEAD").unlink()
    before = fingerprint(store / "runs")
    found = said("repair", "--store", store)
    assert found.code == 1
    assert "loss     wal/" in found.out
    assert "--yes-lose" in found.out
    assert fingerprint(store / "runs") == before
    assert not (store / "HEAD").exists()


def test_a_dry_run_says_the_same_and_takes_no_lock(store: Path):
    flip_a_record(store, 64)
    before = fingerprint(store)
    lock = StoreLock.take(store, since="now")
    try:
        locked = said("repair", "--store", store, "--yes-lose", "--json")
        assert (locked.code, locked.error["code"]) == (5, "STORE_LOCKED")
        found = said("repair", "--store", store, "--dry-run", "--json")
    finally:
        lock.close()
    (store / "LOCK").write_bytes(b"")
    assert fingerprint(store) == before
    plan = found.facts[0]["plan"]
    assert plan["loses"] is True
    assert [(run["fate"], run["keptEvents"], run["knownEvents"]) for run in plan["runs"]] == [("closed", 19, 25)]
    assert found.summary["exitCode"] == 1


def test_after_the_repair_the_store_is_clean_and_the_originals_are_kept(store: Path):
    flip_a_record(store, 64)
    before = {path.name: path.read_bytes() for path in (store / "wal").iterdir()}
    found = said("repair", "--store", store, "--yes-lose")
    assert (found.code, found.out.splitlines()[-1]) == (0, f"No damage is left. {store} opens.")
    [kept] = (store / "damaged").iterdir()
    assert {path.name: path.read_bytes() for path in (kept / "wal").iterdir()} == before
    told = json.loads((kept / "repair.json").read_bytes())
    assert any("record 64" in line for line in told["repair"])
    assert {path.stat().st_mode & 0o077 for path in (store / "damaged").rglob("*")} == {0}
    verified = said("verify", "--store", store, "--json", "--replay")
    assert (verified.code, damage(verified), verified.summary["warnings"]) == (0, [], 0)


def test_the_manifest_the_head_and_the_index_are_made_anew_without_a_word(store: Path):
    for name in ("checkpoint.json", "HEAD", "index.sqlite"):
        (store / name).write_bytes(b"\x00" * 300)
    found = said("repair", "--store", store, "--json")
    assert found.code == 0
    assert found.facts[0]["plan"]["loses"] is False
    verified = said("verify", "--store", store, "--json", "--replay")
    assert (verified.code, damage(verified), verified.summary["warnings"], verified.summary["runs"]) == (0, [], 0, 21)


@pytest.mark.process
def test_a_daemon_opens_what_was_repaired_and_the_keys_of_lost_runs_stay_taken(store: Path, tmp_path: Path):
    ended, beheaded = runs("completed")[2], runs("active")[-1]
    flip(store / "runs" / ended / "state.json", 50)
    (store / "runs" / beheaded / "history.jsonl").unlink()
    for name in ("index.sqlite", "checkpoint.json"):
        (store / name).unlink()
    found = said("repair", "--store", store, "--yes-lose", "--json")
    assert found.code == 0, found.out
    fates = {run["runId"]: run["fate"] for run in found.facts[0]["plan"]["runs"]}
    assert fates[beheaded] == "buried"
    begun = json.loads(commits(beheaded)[0].body)["events"][0]
    with Daemon(store, "--hold", workspace=tmp_path) as daemon:
        daemon.listen()
        assert daemon.call("status")["status"] == "ok"
        assert daemon.call("status", runId=ended)["run"]["status"] == "completed"
        with refused("NOT_FOUND") as caught:
            daemon.call("status", runId=beheaded)
        assert caught[0].data["deleted"] is True
        with refused("KEY_EXPIRED"):
            daemon.call(
                "start",
                clientRequestId=begun["clientRequestId"],
                namespace=begun["namespace"],
                agent="default",
                input="?",
            )
        listed = {run["runId"] for run in daemon.call("list", limit=100)["runs"]}
        assert beheaded not in listed
        assert ended in listed
        assert daemon.stop() == 0
    assert said("verify", "--store", store, "--json").code == 0


@pytest.mark.process
def test_a_closed_run_is_shown_as_failed_and_its_effects_are_not_repeated(store: Path, tmp_path: Path):
    flip_a_record(store, 64)
    plan = said("repair", "--store", store, "--yes-lose", "--json").facts[0]["plan"]
    [closed] = [run["runId"] for run in plan["runs"]]
    begun = json.loads(commits(closed)[0].body)["events"][0]
    with Daemon(store, workspace=tmp_path) as daemon:
        daemon.listen()
        shown = daemon.call("status", runId=closed)["run"]
        assert (shown["status"], shown["error"]["kind"]) == ("failed", "store_damaged")
        with refused("IDEMPOTENCY_CONFLICT"):  # the key is taken, whatever comes with it
            daemon.call(
                "start",
                clientRequestId=begun["clientRequestId"],
                namespace=begun["namespace"],
                agent="default",
                input="?",
            )
        assert daemon.stop() == 0


def test_missing_outputs_are_told_and_cannot_be_repaired(store: Path):
    shutil.rmtree(store / "runs" / runs("completed")[1])
    found = said("repair", "--store", store, "--yes-lose", "--json")
    assert found.code == 0
    assert {run["runId"]: run["fate"] for run in found.facts[0]["plan"]["runs"]} == {runs("completed")[1]: "buried"}


def test_a_sealed_store_is_repaired_without_its_key_and_better_with_it(tmp_path: Path):
    key = tmp_path / "key"
    ring = keys.KeyRing(keys.new_key_file(key))
    made = real_store(tmp_path / "made", sealing=AesGcm(ring, STORE_ID))
    assert said("verify", "--store", made, "--json").code == 0
    assert said("verify", "--store", made, "--json", "--replay").summary["notes"] > 10
    with_key = said("verify", "--store", made, "--json", "--replay", "--encryption-key", f"file:{key}")
    assert (with_key.code, with_key.summary["notes"]) == (0, 0)
    flip_a_record(made, 64)
    for words, fate in (((), "buried"), (("--encryption-key", f"file:{key}"), "closed")):
        store = Path(shutil.copytree(made, tmp_path / fate))
        before = said("repair", "--store", store, *words)
        assert shlex.join(["rpcagent", "repair", "--yes-lose", "--store", str(store), *words]) + "\n" in before.out
        found = said("repair", "--store", store, "--yes-lose", "--json", *words)
        assert found.code == 0
        assert [run["fate"] for run in found.facts[0]["plan"]["runs"]] == [fate]
        verified = said("verify", "--store", store, "--json", "--replay", "--encryption-key", f"file:{key}")
        assert (verified.code, damage(verified)) == (0, [])


@pytest.mark.parametrize("first_line_is_intact", [True, False])
def test_which_key_a_store_is_under_is_known_after_its_manifest_was_damaged(first_line_is_intact: bool, tmp_path: Path):
    key = keys.new_key_file(tmp_path / "key")
    store = real_store(tmp_path / "store", sealing=AesGcm(keys.KeyRing(key), STORE_ID))
    path = store / "checkpoint.json"
    content = bytearray(path.read_bytes())
    content[-10 if first_line_is_intact else 40] ^= 1
    path.write_bytes(content)
    assert said("repair", "--store", store, "--yes-lose", "--encryption-key", f"file:{tmp_path / 'key'}").code == 0
    assert manifest.decode(path.read_bytes()).kid == key.kid


def test_parts_of_two_stores_are_not_mixed(store: Path):
    segment = sorted((store / "wal").iterdir())[1]
    first, _, rest = segment.read_bytes().partition(b"\n")
    line = record.decode(first + b"\n", 0, len(first) + 1)
    header = record.Header(1, "crc32", "sto_" + "0" * 24, "0.1.0", line.seq)
    segment.write_bytes(record.header_line(line.seq, line.previous, header) + rest)
    before = fingerprint(store)
    found = said("repair", "--store", store, "--yes-lose", "--json")
    assert (found.code, found.error["code"]) == (1, "STORE_DAMAGED")
    assert "parts of several stores are in it" in found.error["message"]
    assert fingerprint(store) | {"LOCK": ""} == before | {"LOCK": ""}
    assert damage(said("verify", "--store", store, "--json"))[0]["what"].startswith("segments belong to another store")


def test_what_other_users_could_read_is_closed(store: Path):
    (store / "runs").chmod(0o755)
    assert said("repair", "--store", store).code == 0
    assert (store / "runs").stat().st_mode & 0o777 == 0o700
