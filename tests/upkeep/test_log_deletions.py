"""Runs that the log deletes, before any tombstone does: whatever is left of their files, nothing is damaged, and none comes back."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest
from rpcagent import keys
from rpcagent.journal.seal import AesGcm
from tests.process.wire_driver import Daemon, refused

from .commands import damage, fingerprint, said
from .deleting import deleted_by_the_log, killed_at_each_call, known_as_deleted, left_of
from .stores import STORE_ID, commits, real_store, runs

WHOLE, STATELESS = {"state.json", "history.jsonl"}, {"history.jsonl"}


@pytest.fixture(scope="session")
def killed(made: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("killed")
    return killed_at_each_call(Path(shutil.copytree(made, folder / "store")), folder)


def warned(found) -> list:
    return [finding for finding in found.findings if finding["severity"] != "note"]


def test_the_stages_are_those_that_are_meant(killed: list[Path]):
    run = min(deleted_by_the_log(killed[-1]))
    stages = [left_of(store, run) for store in killed if run in deleted_by_the_log(store)]
    assert [stage for stage in (WHOLE, STATELESS, set(), None) if stage in stages] == [WHOLE, STATELESS, set(), None]
    assert len(deleted_by_the_log(killed[-1])) > 3


def test_a_deletion_that_is_killed_anywhere_is_no_damage_for_any_command(killed: list[Path], tmp_path: Path):
    for number, store in enumerate(killed):
        gone = deleted_by_the_log(store)
        before = fingerprint(store)
        found = said("verify", "--store", store, "--json", "--replay")
        assert (found.code, warned(found)) == (0, []), number
        planned = said("repair", "--dry-run", "--store", store, "--json")
        assert (planned.code, planned.facts[0]["plan"]["loses"]) == (0, False), number
        assert fingerprint(store) == before
        copy = tmp_path / str(number)
        assert said("backup", copy, "--store", store, "--json").code == 0
        found = said("verify", "--store", copy, "--json", "--replay")
        assert (found.code, warned(found)) == (0, []), number
        assert deleted_by_the_log(copy) == gone
        assert [run for run in gone if left_of(copy, run) is not None] == []
        assert known_as_deleted(copy, gone) == gone


STAGES = {"whole": WHOLE, "without its state": STATELESS, "empty": set(), "gone": None}


def at_stage(killed: list[Path], stage: str, to: Path) -> tuple[Path, str]:
    """A store in which a run is deleted by the log, and so much of it is left."""
    for store in killed:
        for run in sorted(deleted_by_the_log(store)):
            if left_of(store, run) == STAGES[stage]:
                return Path(shutil.copytree(store, to)), run
    raise AssertionError(f"no run is {stage}")


def flipped(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def an_older_record(store: Path) -> None:
    flipped(min((store / "wal").iterdir()), 400)


def an_unknown_record(store: Path) -> None:
    path = min((store / "wal").iterdir())
    content = path.read_bytes()
    start = content.index(b"\n") + 1
    path.write_bytes(content[:start] + b"~" * 150 + content[start + 150 :])


def a_line_of_the_manifest(store: Path) -> None:
    flipped(store / "checkpoint.json", -60)


def no_manifest(store: Path) -> None:
    (store / "checkpoint.json").unlink()


def no_head(store: Path) -> None:
    (store / "HEAD").unlink()


def no_index(store: Path) -> None:
    (store / "index.sqlite").write_bytes(b"no database")


def another_run(store: Path) -> None:
    flipped(store / "runs" / runs("active")[-1] / "history.jsonl", 200)


HARMS = (an_older_record, an_unknown_record, a_line_of_the_manifest, no_manifest, no_head, no_index, another_run)


@pytest.mark.parametrize("harm", HARMS, ids=lambda harm: harm.__name__)
@pytest.mark.parametrize("stage", STAGES)
def test_after_a_repair_what_was_deleted_is_deleted_and_counted_no_more(
    killed: list[Path], stage: str, harm, tmp_path: Path
):
    store, run = at_stage(killed, stage, tmp_path / "store")
    gone = deleted_by_the_log(store)
    harm(store)
    found = said("repair", "--store", store, "--yes-lose", "--json")
    assert (found.code, found.summary["damage"]) == (0, 0), found.out
    assert run not in {told["runId"] for told in found.facts[0]["plan"]["runs"]}
    again = said("verify", "--store", store, "--json", "--replay")
    assert (again.code, warned(again)) == (0, [])
    assert list((store / "damaged").rglob(f"{run}/*")) == []
    assert known_as_deleted(store, gone, opening=True) == gone
    assert said("gc", "--store", store, "--workspace", tmp_path).code == 0
    assert [each for each in gone if left_of(store, each) is not None] == []
    again = said("verify", "--store", store, "--json", "--replay")
    assert (again.code, warned(again)) == (0, [])


@pytest.mark.process
@pytest.mark.parametrize("harm", [None, an_unknown_record, no_manifest])
def test_after_a_repair_the_key_of_a_deleted_run_is_expired(killed: list[Path], harm, tmp_path: Path):
    store, run = at_stage(killed, "gone", tmp_path / "store")
    if harm is not None:
        harm(store)
    assert said("repair", "--store", store, "--yes-lose").code == 0
    begun = json.loads(commits(run)[0].body)["events"][0]
    named = {"clientRequestId": begun["clientRequestId"], "namespace": begun["namespace"]}
    with Daemon(store, "--hold", workspace=tmp_path) as daemon:
        with refused("KEY_EXPIRED") as caught:
            daemon.call("start", **named, agent="default", input="?")
        assert caught[0].data["runId"] == run
        have = Counter(each["status"] for each in daemon.call("list", limit=100)["runs"])
        assert daemon.call("status")["counts"] == have
        assert daemon.stop() == 0


@pytest.mark.parametrize("stage", STAGES)
def test_each_command_says_that_it_was_deleted(killed: list[Path], stage: str, made: Path, tmp_path: Path):
    store, run = at_stage(killed, stage, tmp_path / "store")
    for command in ("export", "blob"):
        found = said(command, run, *(tmp_path / "file",) * (command == "export"), "--store", store, "--json")
        assert (found.code, found.error["code"]) == (2, "NOT_FOUND")
        assert found.error["message"] == f"the run {run} was deleted"
    lines = said("log", "--run", run, "--store", store).out.splitlines()
    said_last = " ".join(lines[-1].split())
    assert said_last.partition(" deleted ")[2] == "by the rules of retention: rules[0]: it is not among the newest 1"
    assert len(lines) == 1 + (commits(run)[-1].first + commits(run)[-1].count - 1 if stage == "whole" else 0)
    assert said("export", run, tmp_path / "whole", "--store", made).code == 0
    found = said("import", tmp_path / "whole", "--store", store, "--json")
    assert (found.code, found.error["code"]) == (2, "KEY_EXPIRED")


@pytest.mark.parametrize("stage", STAGES)
def test_gc_ends_what_was_begun_and_proposes_nothing_of_it(killed: list[Path], stage: str, tmp_path: Path):
    store, _ = at_stage(killed, stage, tmp_path / "store")
    (tmp_path / "rules.toml").write_text('[retention]\nrules = [{ statuses = ["completed"], keep = 1 }]\n')
    gone = deleted_by_the_log(store)
    words = ("--store", store, "--workspace", tmp_path, "--config", tmp_path / "rules.toml", "--json")
    proposed = {fact["run"] for fact in said("gc", "--dry-run", *words).facts if "run" in fact}
    collected = said("gc", *words)
    deleted = {fact["run"] for fact in collected.facts if "run" in fact}
    assert collected.code == 0
    assert (proposed, gone & proposed) == (deleted, set())
    assert [run for run in gone | deleted if left_of(store, run) is not None] == []
    found = said("verify", "--store", store, "--json")
    assert (found.code, warned(found), deleted_by_the_log(store)) == (0, [], set())


@pytest.mark.parametrize("stage", STAGES)
def test_a_run_that_is_missing_beside_deleted_ones_is_still_told(killed: list[Path], stage: str, tmp_path: Path):
    store, _ = at_stage(killed, stage, tmp_path / "store")
    [kept] = runs("failed")
    shutil.rmtree(store / "runs" / kept)
    found = said("verify", "--store", store, "--json")
    assert [(each["file"], each["what"].partition(":")[0]) for each in damage(found)] == [
        ("runs", "1 failed runs are missing")
    ]
    assert kept in next(each for each in found.findings if each.get("file") == "index.sqlite")["runs"]


def test_without_its_key_a_sealed_deletion_is_no_damage_but_cannot_be_told_from_a_loss(tmp_path: Path):
    file = tmp_path / "key"
    ring = keys.KeyRing(keys.new_key_file(file))
    keyed = ("--encryption-key", f"file:{file}")

    def sealing(_store_id: str) -> AesGcm:
        return AesGcm(ring, STORE_ID)

    made = real_store(tmp_path / "made", sealing=sealing(""))
    for number, store in enumerate(killed_at_each_call(made, tmp_path, sealing)):
        gone = deleted_by_the_log(store, sealing)
        found = said("verify", "--store", store, "--json", *keyed)
        assert (found.code, warned(found)) == (0, []), number
        bare = said("verify", "--store", store, "--json")
        half = {run for run in gone if left_of(store, run) != WHOLE}
        assert (bare.code, {each["file"] for each in warned(bare)}) == (0, {f"runs/{run}" for run in half}), number
        assert {each["severity"] for each in warned(bare)} <= {"warning"}
        for words in ((), keyed) if number % 5 == 0 else ():
            copy = tmp_path / f"copy-{number}-{len(words)}"
            assert said("backup", copy, "--store", store, *words).code == 0
            assert warned(said("verify", "--store", copy, "--json", *keyed)) == []
            assert known_as_deleted(copy, gone, sealing) == gone
