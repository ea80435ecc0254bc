"""`rpcagent backup --reseal` and `--unseal`: one key for all of a copy, or none, and nothing else is another."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rpcagent import keys
from rpcagent.journal import blobs, reading, record, runfiles, seal
from rpcagent.journal.disk import RealDisk
from rpcagent.journal.seal import MAGIC, AesGcm, Plain
from rpcagent.keys import Key, KeyRing
from rpcagent.upkeep import resealing
from rpcagent.upkeep.copying import Copy
from tests.process.wire_driver import Daemon

from .commands import Said, damage, fingerprint, said
from .stores import GOLDEN, STORE_ID, Owner, commits, golden, runs

CONTENTS = (b"plain from before", MAGIC + b"\x01 like a sealed one", b"under the first key", b"under the second key")


class Keys:
    """Three keys in files: two that the store was under, and the one that is to come."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.files = [folder / name for name in "abc"]
        self.a, self.b, self.c = (keys.new_key_file(path) for path in self.files)

    def words(self, *names: str) -> list[str]:
        """The options for the keys a, b, c; the first one is the present one."""
        found = []
        for place, name in enumerate(names):
            found += ["--old-encryption-key" if place else "--encryption-key", f"file:{self.files['abc'.index(name)]}"]
        return found


def mixed_store(folder: Path, a: Key, b: Key) -> Path:
    """Plain at first, then under key `a`, then under `b`: files of runs, manifest, a log of several segments with lines that
    a later one supersedes, an index, outputs, and a run that was deleted."""
    folder.mkdir(mode=0o700)
    disk = RealDisk(folder)
    owner = Owner(disk, folder, segment=12_000)
    gone = runs("completed")[0]
    items = [item for item in golden() if item.run != gone]
    third = len(items) // 3
    owner.record(commits(gone)).record(items[:third]).checkpoint()
    owner.seal = AesGcm(KeyRing(a), STORE_ID)
    owner.record(items[third : 2 * third - 6]).checkpoint([gone]).record(items[2 * third - 6 : 2 * third])
    owner.seal = AesGcm(KeyRing(b, a), STORE_ID)
    owner.record(items[2 * third : -6])
    owner.close()
    (folder / "HEAD").write_bytes(
        b" " * 128
    )  # behind, as a power cut leaves it: all of the last segment is copied anew
    owner = Owner(RealDisk(folder), folder, sealing=AesGcm(KeyRing(b, a), STORE_ID))
    owner.record(items[-6:])
    owner.close()
    kept = next((GOLDEN / "blobs").iterdir()).read_bytes()
    for seals, content in (
        (Plain(), CONTENTS[0]),
        (Plain(), CONTENTS[1]),
        (AesGcm(KeyRing(a), STORE_ID), CONTENTS[2]),
        (AesGcm(KeyRing(a), STORE_ID), kept),
        (AesGcm(KeyRing(b), STORE_ID), CONTENTS[3]),
    ):
        writer = blobs.Blobs(folder / "blobs", seals).create()
        writer.write(content)
        writer.keep()
    (folder / "LOCK").write_bytes(b"")
    (folder / "LOCK").chmod(0o600)
    return folder


@pytest.fixture(scope="session")
def rings(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    return Keys(tmp_path_factory.mktemp("rings") / "keys")


@pytest.fixture(scope="session")
def made_mixed(tmp_path_factory: pytest.TempPathFactory, rings: Keys) -> Path:
    return mixed_store(tmp_path_factory.mktemp("mixed") / "store", rings.a, rings.b)


@pytest.fixture
def mixed(made_mixed: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made_mixed, tmp_path / "mixed"))


def recorded(store: Path, words: list[str]) -> dict[str, list[dict[str, Any]]]:
    """The shared log with its numbers, and all of each run."""
    disk = RealDisk(store)
    names = disk.names("runs")
    disk.close()
    found = {"": said("log", "--store", store, "--json", *words).facts}
    every = sorted({*names, *(fact["runId"] for fact in found[""] if "runId" in fact)})
    return found | {run: said("log", "--store", store, "--json", "--run", run, *words).facts for run in every}


def shown(store: Path, scratch: Path, words: list[str]) -> list[Any]:
    """What a daemon says of each run, on a copy: it lets nothing go on."""
    copy = shutil.copytree(store, scratch)
    with Daemon(copy, "--hold", *words) as daemon:
        listed, cursor = [], None
        while True:
            page = daemon.call("list", limit=100, **({"cursor": cursor} if cursor else {}))
            listed += page["runs"]
            if (cursor := page.get("nextCursor")) is None:
                break
        told = [daemon.call("status", runId=run["runId"]) for run in listed]
        events = [daemon.call("events", runId=run["runId"], afterSeq=0, limit=1000) for run in listed]
        attention = daemon.call("status")["needsAttention"]
        assert daemon.stop() == 0
    # The opening cut off what was under way, at the time of the checkpoint and a moment.
    masked = re.sub(r"2031-04-01T00:00:\d\d(\.\d+)?Z", "then", json.dumps([listed, told, events, attention]))
    found: list[Any] = json.loads(masked)
    return found


def holding(store: Path, *secrets: Key) -> list[str]:
    """The files in which the id of one of the keys stands, in either form."""
    forms = [form for key in secrets for form in (key.kid.encode(), MAGIC + b"\x01" + bytes.fromhex(key.kid))]
    return [
        str(path.relative_to(store))
        for path in sorted(store.rglob("*"))
        if path.is_file() and any(form in path.read_bytes() for form in forms)
    ]


def without(folder: Path, dest: Path) -> bool:
    """Neither the copy is there nor a draft of it."""
    return [path.name for path in folder.iterdir() if dest.name in path.name] == []


@pytest.mark.process
@pytest.mark.parametrize("target", ["another", "present", "none"])
def test_all_of_a_copy_is_under_one_key_or_none_and_nothing_else_is_another(
    target: str, mixed: Path, rings: Keys, tmp_path: Path
):
    were, copy, before = rings.words("b", "a"), tmp_path / "copy", fingerprint(mixed)
    assert {path.split("/")[0] for path in holding(mixed, rings.a)} == {
        "runs",
        "checkpoint.json",
        "wal",
        "blobs",
        "index.sqlite",
    }
    assert {path.split("/")[0] for path in holding(mixed, rings.b)} >= {"wal", "blobs"}
    words, now, gone, kid = {
        "another": (["--reseal", *rings.words("c", "b", "a")], rings.words("c"), (rings.a, rings.b), rings.c.kid),
        "present": (["--reseal", *were], rings.words("b"), (rings.a,), rings.b.kid),
        "none": (["--unseal", *were], [], (rings.a, rings.b), None),
    }[target]
    found = said("backup", copy, "--store", mixed, "--json", *words)
    assert (found.code, found.facts[0]["backup"]["key"]) == (0, kid)
    assert fingerprint(mixed) == before
    assert holding(copy, *gone) == []
    verified = said("verify", "--store", copy, "--json", "--replay", *now)
    assert (verified.code, [finding["what"] for finding in verified.findings]) == (
        0,
        [
            "4 files that no run refers to; the daemon takes them away in time",
            "there is none; it is made at the next start",
        ],
    )
    assert recorded(copy, now) == recorded(mixed, were)
    after, before_it = shown(copy, tmp_path / "after", now), shown(mixed, tmp_path / "before", were)
    assert after == before_it
    assert len(after[0]) == found.facts[0]["backup"]["runs"] == 21
    for path in (mixed / "blobs").iterdir():
        seals = AesGcm(KeyRing(rings.b, rings.a), STORE_ID)
        after = AesGcm(KeyRing({"another": rings.c, "present": rings.b}[target]), STORE_ID) if kid else Plain()
        assert blobs.Blobs(copy / "blobs", after).read(path.name) == blobs.Blobs(mixed / "blobs", seals).read(path.name)
    tombs = [path.name for path in (mixed / "tombstones").iterdir()]
    assert [path.name for path in (copy / "tombstones").iterdir()] == tombs != []


def moment(store: Path) -> tuple[Any, ...]:
    disk = RealDisk(store)
    found = reading.read_store(disk)
    manifest = found.manifest
    counts = (manifest.places, manifest.ended, manifest.base, manifest.tombstones, manifest.at) if manifest else ()
    disk.close()
    return found.store_id, found.epoch, found.end.seq, found.records, counts


def test_numbers_ids_and_epoch_stay(mixed: Path, rings: Keys, tmp_path: Path):
    assert said("backup", tmp_path / "copy", "--store", mixed, "--reseal", *rings.words("c", "b", "a")).code == 0
    assert moment(tmp_path / "copy") == moment(mixed)


def test_a_store_of_the_first_format_is_encrypted_and_no_earlier_version_takes_it_for_its_own(
    rings: Keys, tmp_path: Path
):
    plain, copy = Path(shutil.copytree(GOLDEN, tmp_path / "plain")), tmp_path / "copy"
    for path in [plain, *plain.rglob("*")]:
        path.chmod(0o700 if path.is_dir() else 0o600)
    found = said("backup", copy, "--store", plain, "--reseal", *rings.words("c"))
    assert (found.code, f"all of it is under the key {rings.c.kid}" in found.out) == (0, True)
    marks = (b'"clientRequestId"', b'"events"')
    assert [path for path in copy.rglob("*") if path.is_file() and any(m in path.read_bytes() for m in marks)] == []
    headers = [path.read_bytes().partition(b"\n")[0] + b"\n" for path in (copy / "wal").iterdir()]
    formats = {json.loads(record.decode(line, 0, len(line)).body)["format"] for line in headers}
    assert formats == {record.FORMAT}
    assert said("verify", "--store", copy, "--replay", *rings.words("c")).code == 0
    assert moment(copy) == moment(plain)


@pytest.mark.parametrize("missing", ["a", "b"])
@pytest.mark.parametrize("way", ["--reseal", "--unseal"])
def test_where_a_key_is_missing_it_is_named_and_no_copy_is_made(
    way: str, missing: str, mixed: Path, rings: Keys, tmp_path: Path
):
    kid = getattr(rings, missing).kid
    named = rings.words("c", "a" if missing == "b" else "b")
    found = said("backup", tmp_path / "copy", "--store", mixed, "--json", way, *named)
    assert (found.code, found.error["code"], found.error["data"]["kid"]) == (5, "INCOMPATIBLE", kid)
    assert "--old-encryption-key" in found.error["message"]
    assert without(tmp_path, tmp_path / "copy")


def test_a_plain_way_back_without_any_key_names_the_one_that_it_takes(mixed: Path, tmp_path: Path):
    found = said("backup", tmp_path / "copy", "--store", mixed, "--unseal", "--json")
    assert (found.code, found.error["code"]) == (5, "INCOMPATIBLE")
    assert "Name it with --encryption-key" in found.error["message"]
    assert without(tmp_path, tmp_path / "copy")


def test_what_cannot_be_meant_is_a_mistake(mixed: Path, rings: Keys, tmp_path: Path):
    found = said("backup", tmp_path / "copy", "--store", mixed, "--reseal")
    assert (found.code, "--reseal goes with --encryption-key" in found.err) == (2, True)
    both = said("backup", tmp_path / "copy", "--store", mixed, "--reseal", "--unseal", *rings.words("c"))
    assert (both.code, "not allowed with" in both.err) == (2, True)
    assert without(tmp_path, tmp_path / "copy")


@pytest.mark.parametrize("part", ["_summary", "_anew", "_blob", "_files_of"])
def test_a_copy_that_holds_a_payload_under_another_key_does_not_get_its_name(
    part: str, mixed: Path, rings: Keys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    as_it_is = getattr(Copy, part, lambda _self, _context, payload: payload)
    monkeypatch.setattr(resealing.Resealing, part, as_it_is)
    found = said("backup", tmp_path / "copy", "--store", mixed, "--json", "--reseal", *rings.words("c", "b", "a"))
    assert (found.code, found.error["code"]) == (1, "STORE_DAMAGED")
    assert f"should be under {rings.c.kid}" in found.error["message"]
    assert without(tmp_path, tmp_path / "copy")


def reseal(store: Path, dest: Path, rings: Keys) -> Said:
    return said("backup", dest, "--store", store, "--json", "--reseal", *rings.words("c", "b", "a"))


def test_a_damaged_run_is_to_be_repaired_first(mixed: Path, rings: Keys, tmp_path: Path):
    path = max(mixed.glob("runs/*/history.jsonl"), key=lambda each: each.stat().st_size)
    content = bytearray(path.read_bytes())
    content[300] ^= 1
    path.write_bytes(content)
    found = reseal(mixed, tmp_path / "copy", rings)
    assert (found.code, found.error["code"]) == (1, "STORE_DAMAGED")
    assert (found.error["data"]["file"], found.error["data"]["runs"]) == (
        f"runs/{path.parent.name}/history.jsonl",
        [path.parent.name],
    )
    assert "rpcagent repair" in found.error["remedy"]
    assert without(tmp_path, tmp_path / "copy")


def test_a_payload_that_was_moved_to_another_place_does_not_come_along(mixed: Path, rings: Keys, tmp_path: Path):
    run = next(run for run in runs("active") if (mixed / "runs" / run).is_dir())
    disk = RealDisk(mixed)
    state = runfiles.read_state(disk, run)
    heads = resealing.summary.decode(state.summary)
    moved = AesGcm(KeyRing(rings.a), STORE_ID).seal(seal.summary_context(run, heads.last_seq + 1), b"{}")
    state = runfiles.State(
        last_seq=state.last_seq, lines=state.lines, size=state.size, chain=state.chain,
        summary=resealing.summary.encode(heads, moved),
    )  # fmt: skip
    disk.close()
    (mixed / runfiles.state_of(run)).write_bytes(runfiles.encode_state(run, state))
    found = reseal(mixed, tmp_path / "copy", rings)
    assert (found.code, found.error["code"]) == (1, "STORE_DAMAGED")
    assert "belongs to another place" in found.error["message"]
    assert without(tmp_path, tmp_path / "copy")


def test_an_output_whose_content_is_lost_is_left_out_and_told(mixed: Path, rings: Keys, tmp_path: Path):
    lost = next((GOLDEN / "blobs").iterdir()).name
    content = bytearray((mixed / "blobs" / lost).read_bytes())
    content[-1] ^= 1
    (mixed / "blobs" / lost).write_bytes(content)
    found = reseal(mixed, tmp_path / "copy", rings)
    assert found.code == 1
    assert [(each["file"], each["what"][:30]) for each in damage(found)] == [
        (f"blobs/{lost}", "it was changed, or belongs to "),
        (f"blobs/{lost}", f"a large output is missing: {lost}"[:30]),
    ]
    assert (tmp_path / "copy" / "HEAD").is_file()
    assert holding(tmp_path / "copy", rings.a, rings.b) == []


def test_what_is_left_of_a_deleted_run_stands_in_nobodys_way(mixed: Path, rings: Keys, tmp_path: Path):
    gone = runs("completed")[0]
    left = next(path for path in (mixed / "runs").iterdir())
    shutil.copytree(left, mixed / "runs" / gone)  # whose state it is not
    assert reseal(mixed, tmp_path / "copy", rings).code == 0
    assert not (tmp_path / "copy" / "runs" / gone).exists()


CUT_OFF = """
import os, sys
from pathlib import Path
from rpcagent import cli
from rpcagent.upkeep.copying import Copy
left, write = [int(sys.argv[1])], Copy._write
def counted(self, name, data):
    write(self, name, data)
    left[0] -= 1
    if not left[0]:
        os._exit(9)
Copy._write = counted
sys.exit(cli.main(sys.argv[2:]))
"""


@pytest.mark.process
@pytest.mark.parametrize("writes", [1, 12, 24])
def test_cut_off_it_leaves_a_folder_that_is_called_a_draft_and_the_next_one_does_it(
    writes: int, mixed: Path, rings: Keys, tmp_path: Path
):
    before, copy = fingerprint(mixed), tmp_path / "copy"
    words = ["backup", str(copy), "--store", str(mixed), "--reseal", *rings.words("c", "b", "a")]
    done = subprocess.run([sys.executable, "-c", CUT_OFF, str(writes), *words], timeout=60, check=False)
    assert done.returncode == 9
    assert not copy.exists()
    drafts = [path.name for path in tmp_path.iterdir() if "copy" in path.name]
    assert [(name[:6], name[-4:]) for name in drafts] == [(".copy.", ".tmp")]
    assert fingerprint(mixed) == before
    assert (reseal(mixed, copy, rings).code, holding(copy, rings.a, rings.b)) == (0, [])


@pytest.mark.process
def test_beside_a_daemon_a_store_is_put_under_a_new_key_which_then_goes_on_with_all_of_it(rings: Keys, tmp_path: Path):
    store, copy = tmp_path / "store", tmp_path / "copy"
    talker = {"model": {"script": [{"text": "done"}]}}
    write = {"tool": "files.write", "arguments": {"path": "a.txt", "content": "x"}}
    asker = {"tools": ["files"], "model": {"script": [{"calls": [write]}, {"text": "written"}]}}
    started: dict[str, str] = {}
    asked: dict[str, dict[str, Any]] = {}
    for names in ("", "a", "ba"):
        with Daemon(store, *rings.words(*names), rig=("--checkpoint-every", "9"), workspace=tmp_path) as daemon:
            daemon.listen()
            for number in range(4):
                key = f"under-{names}-{number}"
                started[key] = daemon.call("start", clientRequestId=key, agent=talker, input="", waitMs=20_000)["runId"]
            key = f"asks-{names}"
            run = daemon.call("start", clientRequestId=key, agent=asker, input="", waitMs=20_000)["runId"]
            asked[run] = daemon.until(run, lambda shown: shown["approvals"])["approvals"][0]
            if names == "ba":
                found = reseal(store, copy, rings)
                assert (found.code, damage(found)) == (0, [])
                daemon.call("start", clientRequestId="later", agent=talker, input="", waitMs=20_000)
                listed = [run["runId"] for run in daemon.call("list", limit=100)["runs"]][:-1]
                told = [daemon.call("status", runId=run) for run in listed]
            daemon.kill()
    assert holding(copy, rings.a, rings.b) == []
    shutil.rmtree(store)
    copy.rename(store)
    with Daemon(store, *rings.words("c"), workspace=tmp_path) as daemon:
        daemon.listen()
        assert [run["runId"] for run in daemon.call("list", limit=100)["runs"]] == listed
        assert [daemon.call("status", runId=run)["steps"] for run in listed] == [each["steps"] for each in told]
        for key, run in started.items():
            again = daemon.call("start", clientRequestId=key, agent=talker, input="")
            assert (again["runId"], again["replayed"], again["run"]["status"]) == (run, True, "completed")
        for run, question in asked.items():
            assert daemon.call("status", runId=run)["approvals"] == [question]
            daemon.call(
                "approve", clientRequestId="yes", runId=run, approvalId=question["approvalId"],
                digest=question["digest"], decision="allow",
            )  # fmt: skip
            assert daemon.until(run, lambda shown: shown["run"]["status"] == "completed")["run"]["output"] == "written"
        assert daemon.stop() == 0
    assert holding(store, rings.a, rings.b) == []
