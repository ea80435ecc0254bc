"""`rpcagent verify`: a whole store is said to be whole, any other is not, and neither is touched."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path

import pytest
from rpcagent.journal import manifest, reading, runfiles
from rpcagent.journal.disk import RealDisk, StoreLock
from rpcagent.journal.record import Item
from rpcagent.upkeep.checking import Check
from rpcagent.upkeep.place import Place, owner_of
from tests.process.wire_driver import Daemon

from .commands import damage, fingerprint, said
from .stores import GOLDEN, Owner, commits, golden, runs


def found_in(store: Path, **how) -> list:
    findings: list = []
    Check(Place(store), findings.append, **how).run()
    return findings


def trouble_in(store: Path, **how) -> list:
    """All but notes, of a store that was made without its large outputs."""
    return [
        f for f in found_in(store, **how) if f.severity != "note" and not f.what.startswith("a large output is missing")
    ]


def segments(store: Path) -> list[Path]:
    disk = RealDisk(store)
    names = reading.read_store(disk).segments
    disk.close()
    return [store / name for name in names]


def flipped(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 0x10
    path.write_bytes(content)


def about(found, file: str) -> list:
    return [finding for finding in found.findings if finding.get("file") == file]


def test_a_whole_store_is_whole_and_is_not_touched(store: Path):
    before = fingerprint(store)
    found = said("verify", "--store", store, "--json", "--replay")
    assert (found.code, found.err, found.findings) == (0, "", [])
    summary = found.summary
    assert {name: summary[name] for name in ("storeId", "owner", "damage", "warnings", "notes", "runs", "exitCode")} == {
        "storeId": "sto_becebc636e5eaa9383d24b8d", "owner": None, "damage": 0, "warnings": 0, "notes": 0, "runs": 21,
        "exitCode": 0,
    }  # fmt: skip
    rows = {row["part"]: (row["files"], row["records"], row["runs"]) for row in summary["table"]}
    assert rows == {
        "log": (3, 27, 16), "runs": (42, 53, 21), "tombstones": (1, 1, 0), "manifest": (1, 0, 16), "blobs": (1, 0, 0), "index": (1, 0, 5),
    }  # fmt: skip
    assert fingerprint(store) == before


def test_a_person_gets_a_table_and_one_sentence(store: Path):
    found = said("verify", "--store", store)
    assert found.code == 0
    assert found.out.splitlines()[-1] == f"No damage was found. {store}: all is as it was written."
    assert [line.split()[0] for line in found.out.splitlines() if line.startswith(("part", "log", "all"))] == [
        "part",
        "log",
        "all",
    ]


def test_a_store_of_format_0_is_checked_as_it_is(tmp_path: Path):
    store = Path(shutil.copytree(GOLDEN, tmp_path / "store"))
    found = said("verify", "--store", store, "--json", "--replay")
    assert (found.code, damage(found), found.summary["runs"]) == (0, [], 22)


@pytest.mark.parametrize("part", ["wal", "history", "state.json", "checkpoint.json", "tombstones", "blobs"])
def test_any_changed_byte_is_found_in_its_file(store: Path, part: str):
    paths = [path for path in store.rglob("*") if path.is_file() and part in str(path.relative_to(store))]
    if part == "wal":
        paths = segments(store)
    assert paths
    tried = 0
    for path in paths[:6]:
        content = path.read_bytes()
        for place in {0, 20, len(content) // 3, len(content) // 2, len(content) - 2, len(content) - 1} & set(
            range(len(content))
        ):
            flipped(path, place)
            name = str(path.relative_to(store))
            found = [finding for finding in found_in(store) if finding.severity == "damage"]
            assert found, (name, place)
            assert name in {finding.file for finding in found}, (name, place, found)
            assert all(finding.remedy for finding in found)
            path.write_bytes(content)
            tried += 1
    assert tried >= 3
    assert [finding for finding in found_in(store) if finding.severity == "damage"] == []


def test_any_missing_file_is_found(store: Path, tmp_path: Path):
    harmless = {"LOCK", "HEAD", "index.sqlite"}
    names = [str(path.relative_to(store)) for path in store.rglob("*") if path.is_file()]
    for name in names:
        if name in harmless or name.startswith("blobs/"):
            continue
        moved = (store / name).rename(tmp_path / "away")
        found = [finding for finding in found_in(store) if finding.severity == "damage"]
        assert found, name
        moved.rename(store / name)
    assert len(names) > 45


def test_damage_in_the_log_names_records_runs_and_place(store: Path):
    path = segments(store)[1]
    content = path.read_bytes()
    lines = content.splitlines(keepends=True)
    disk = RealDisk(store)
    entry = next(entry for entry in reading.read_store(disk).entries() if b'"q":%d,' % entry.seq in lines[3])
    disk.close()
    flipped(path, len(b"".join(lines[:3])) + len(lines[3]) // 2)
    found = said("verify", "--store", store, "--json")
    assert found.code == 1
    hit = next(finding for finding in damage(found) if finding.get("records"))
    assert hit == {
        "severity": "damage",
        "what": "1 acknowledged records cannot be read",
        "file": str(path.relative_to(store)),
        "offset": len(b"".join(lines[:3])),
        "records": [entry.seq, entry.seq],
        "runs": [entry.run],
        "remedy": "restore it from a backup; without one: `rpcagent repair --dry-run` says what can be kept",
    }


def test_a_torn_tail_is_no_damage_and_is_told(store: Path):
    path = segments(store)[-1]
    path.write_bytes(path.read_bytes() + b'{"c":"1234')
    found = said("verify", "--store", store, "--json")
    assert found.code == 0
    assert found.findings[0]["what"] == (
        "0 records and 10 bytes above the watermark are not confirmed: the process that wrote it was cut off; the next one "
        "decides"
    )


def test_a_lost_or_worthless_head_is_a_warning_since_it_can_be_made_anew(store: Path):
    (store / "HEAD").write_bytes(b"x" * 128)
    found = said("verify", "--store", store, "--json")
    assert (found.code, [f["what"] for f in about(found, "HEAD")]) == (0, ["neither of its slots is intact"])
    (store / "HEAD").unlink()
    found = said("verify", "--store", store, "--json")
    assert [(f["severity"], f["what"]) for f in about(found, "HEAD")] == [("warning", "the file is missing")]


def test_an_index_that_does_not_agree_is_a_warning(store: Path):
    (store / "index.sqlite").write_bytes(b"no database")
    found = said("verify", "--store", store, "--json")
    assert (found.code, found.findings[-1]["severity"], found.findings[-1]["file"]) == (0, "warning", "index.sqlite")
    assert (store / "index.sqlite").read_bytes() == b"no database"


def test_an_ended_run_that_is_gone_is_damage_although_only_its_number_is_known(store: Path):
    disk = RealDisk(store)
    live = manifest.decode(disk.read("checkpoint.json")).live
    gone = runs("completed")[2]
    assert gone not in live
    disk.close()
    shutil.rmtree(store / "runs" / gone)
    found = said("verify", "--store", store, "--json")
    assert found.code == 1
    assert [finding["what"] for finding in damage(found)] == ["1 completed runs are missing: the manifest counts 4"]
    assert gone in next(f for f in found.findings if f.get("file") == "index.sqlite")["runs"]


def test_modes_and_links_are_told_with_the_command_that_helps(store: Path):
    (store / "runs").chmod(0o755)
    history = next((store / "runs").rglob("history.jsonl"))
    target = store.parent / "elsewhere"
    history.rename(target)
    history.symlink_to(target)
    found = said("verify", "--store", store, "--json")
    assert found.code == 1
    by_file = {finding["file"]: finding for finding in found.findings}
    assert by_file["runs"]["severity"] == "warning"
    assert "chmod -R go=" in by_file["runs"]["what"]
    assert by_file[str(history.relative_to(store))]["severity"] == "damage"


def test_events_that_cannot_follow_each_other_are_found_by_a_replay_only(tmp_path: Path):
    folder = tmp_path / "store"
    disk = RealDisk(folder)
    Owner(disk).record(
        [*commits(runs("completed")[1]), Item("run_" + "a" * 26, 1, 1, commits(runs("failed")[0])[1].body)]
    ).close()
    assert said("verify", "--store", folder, "--json").code == 0
    found = said("verify", "--store", folder, "--json", "--replay")
    assert found.code == 1
    assert damage(found)[0]["runs"] == ["run_" + "a" * 26]


@pytest.mark.process
def test_beside_a_daemon_nothing_is_touched_and_the_owner_is_named(tmp_path: Path):
    store = tmp_path / "store"
    shutil.copytree(GOLDEN, store)
    for path in (store, *store.rglob("*")):
        path.chmod(0o700 if path.is_dir() else 0o600)
    with Daemon(store, "--hold") as daemon:
        daemon.call("status")
        before = fingerprint(store)
        found = said("verify", "--store", store, "--json", "--replay")
        assert (found.code, damage(found)) == (0, [])
        assert found.summary["owner"]["pid"] == daemon.pid
        assert fingerprint(store) == before
        assert daemon.call("status")["status"] == "ok"
    assert owner_of(store) is None


def test_beside_an_owner_who_writes_and_makes_checkpoints_nothing_looks_damaged(tmp_path: Path):
    folder = tmp_path / "store"
    folder.mkdir(mode=0o700)
    lock = StoreLock.take(folder, since="now")
    disk = RealDisk(folder)
    owner = Owner(disk, segment=4_000)
    owner.record(golden()[:4])
    over = threading.Event()
    done = []

    def go_on() -> None:
        every = list(golden()[4:])
        while every and not over.is_set():
            owner.record(every[:3])
            del every[:3]
            owner.checkpoint()
        done.append(len(every))

    writer = threading.Thread(target=go_on)
    writer.start()
    checks = 0
    try:
        while writer.is_alive():
            assert [finding for finding in trouble_in(folder, replay=True) if finding.severity == "damage"] == []
            checks += 1
    finally:
        over.set()
        writer.join()
        lock.close()
    assert done == [0]
    assert checks > 2
    assert trouble_in(folder, replay=True) == []


@pytest.mark.parametrize(
    ("name", "code", "word"),
    [
        ("nothing", 2, "there is no store"),
        ("a_file", 2, "is a file"),
        ("foreign", 2, "is not a store"),
        ("empty", 2, "is empty"),
    ],
)
def test_what_is_no_store_is_told_in_a_sentence(tmp_path: Path, name: str, code: int, word: str):
    (tmp_path / "a_file").write_text("")
    (tmp_path / "empty").mkdir()
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "letter.txt").write_text("")
    for command in (
        ["verify"],
        ["repair"],
        ["log"],
        ["export", "run_x"],
        ["backup", tmp_path / "d"],
        ["blob", "run_x"],
    ):
        found = said(*command, "--store", tmp_path / name)
        assert (found.code, found.out) == (code, ""), command
        assert word in found.err
        assert "Traceback" not in found.err
        as_json = said(*command, "--store", tmp_path / name, "--json")
        assert (as_json.code, as_json.facts[-1]["exitCode"]) == (code, code)
    assert not (tmp_path / "nothing").exists()


def test_a_store_of_a_later_version_is_named_as_such(store: Path):
    path = segments(store)[0]
    line = path.read_bytes().split(b"\n")[0].replace(b'"format":1', b'"format":2')
    path.write_bytes(line + b"\n")
    found = said("verify", "--store", store, "--json")
    assert (found.code, found.error["code"]) == (5, "INCOMPATIBLE")


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_folder_that_may_not_be_read_is_told(store: Path):
    store.chmod(0)
    try:
        found = said("verify", "--store", store, "--json")
    finally:
        store.chmod(0o700)
    assert (found.code, found.error["code"]) == (5, "STORAGE")


def test_a_run_that_is_ahead_of_the_manifest_is_none_that_is_damaged(tmp_path: Path):
    folder = tmp_path / "store"
    folder.mkdir(mode=0o700)
    disk = RealDisk(folder)
    owner = Owner(disk)
    owner.record(golden()[:20]).checkpoint()
    before = (folder / "checkpoint.json").read_bytes()
    segment = {path.name: path.read_bytes() for path in (folder / "wal").iterdir()}
    owner.record(golden()[20:50])
    kept = {path.name: path.read_bytes() for path in (folder / "wal").iterdir()}
    owner.checkpoint()
    owner.close()
    # As a power cut leaves it that takes the manifest back, and nothing else.
    for path in (folder / "wal").iterdir():
        path.unlink()
    for name, content in (segment | kept).items():
        (folder / "wal" / name).write_bytes(content)
        (folder / "wal" / name).chmod(0o600)
    (folder / "checkpoint.json").write_bytes(before)
    assert trouble_in(folder) == []
    run = next(iter(manifest.decode(before).live))
    assert (folder / runfiles.state_of(run)).exists()
