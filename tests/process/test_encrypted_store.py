"""A store under a key, through the real daemon: nothing that runs hold can be read in its files, and nothing is done without it."""

from __future__ import annotations

import base64
import hashlib
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from rpcagent import keys
from rpcagent.batch import exits
from rpcagent.journal import reading
from rpcagent.journal.disk import RealDisk
from tests.process.wire_driver import Daemon, refused
from tests.upkeep.commands import damage, fingerprint, said

pytestmark = pytest.mark.process

CHECKPOINTS = ("--checkpoint-every", "6")
MARKERS = (
    "goal-of-the-run", "words-of-the-system", "text-of-the-model", "text-at-the-end", "argument-of-the-tool",
    "output-of-the-tool", "large-output", "key-of-the-client", "comment-of-a-person", "reason-of-a-person",
)  # fmt: skip
LABELS = {"kind": "seen"}
LARGE = "large-output " * 8_000
TALKER: dict[str, Any] = {
    "name": "talker",
    "instructions": "words-of-the-system",
    "model": {"script": [{"text": "text-at-the-end"}]},
}


def asker(*, large: bool) -> dict[str, Any]:
    """Runs a command unasked, and then asks to write a file."""
    command = f"echo output-of-the-tool; {'cat large.txt' if large else ':'}"
    write = {"path": "argument-of-the-tool.txt", "content": "argument-of-the-tool"}
    return {
        "name": "asker",
        "instructions": "words-of-the-system",
        "tools": ["files", "shell"],
        "policy": {"rules": [{"tool": "shell.run", "do": "allow"}]},
        "model": {
            "script": [
                {
                    "text": "text-of-the-model",
                    "calls": [{"tool": "shell.run", "arguments": {"command": command}}],
                },
                {"calls": [{"tool": "files.write", "arguments": write}]},
                {"text": "text-at-the-end"},
            ]
        },
    }


def start(daemon: Daemon, key: str, agent: dict[str, Any]) -> dict[str, Any]:
    started = daemon.call(
        "start", clientRequestId=f"key-of-the-client-{key}", agent=agent, input="goal-of-the-run", labels=LABELS
    )
    return daemon.until(started["runId"], lambda shown: shown["run"]["status"] not in {"ready", "running"})


class Worked(NamedTuple):
    """What stands in the store: a run that waits, one that was refused, one that has ended, one that was cancelled."""

    waits: dict[str, Any]
    denied: str
    ended: str
    cancelled: str


def work(daemon: Daemon) -> Worked:
    """Everything that a store can hold of a run, and a checkpoint behind it."""
    daemon.listen()
    ended = start(daemon, "ended", TALKER)["run"]["runId"]
    waits = start(daemon, "waits", asker(large=True))
    denied = start(daemon, "denied", asker(large=False))
    question = denied["approvals"][0]
    daemon.call(
        "approve", clientRequestId="key-of-the-client-approve", runId=denied["run"]["runId"], decision="deny",
        approvalId=question["approvalId"], digest=question["digest"], comment="comment-of-a-person",
    )  # fmt: skip
    daemon.until(denied["run"]["runId"], lambda shown: shown["run"]["status"] == "completed")
    cancelled = start(daemon, "cancelled", asker(large=True))["run"]["runId"]
    daemon.call("cancel", clientRequestId="key-of-the-client-cancel", runId=cancelled, reason="reason-of-a-person")
    for number in range(20):
        start(daemon, f"filler-{number}", TALKER)
    return Worked(waits, denied["run"]["runId"], ended, cancelled)


def leaks(*places: Path) -> list[tuple[str, str]]:
    """Every marker that stands in a file or a name, as it is or in base64."""
    found = []
    for place in places:
        for path in [place, *place.rglob("*")]:
            held = path.read_bytes() if path.is_file() else b""
            for marker in MARKERS:
                plain = marker.encode()
                forms = [plain, *(base64.b64encode(plain[cut:])[4:-4] for cut in range(3))]
                if marker in path.name or any(form in held for form in forms):
                    found.append((marker, str(path)))
    return found


@pytest.fixture
def key(tmp_path: Path) -> Path:
    keys.new_key_file(tmp_path / "key")
    return tmp_path / "key"


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "large.txt").write_text(LARGE)
    return tmp_path / "work"


def serving(store: Path, workspace: Path, *references: Path, rig: tuple[str, ...] = CHECKPOINTS) -> Daemon:
    names = ("--encryption-key", *["--old-encryption-key"] * len(references))
    named = [part for name, path in zip(names, references, strict=False) for part in (name, f"file:{path}")]
    return Daemon(store, *named, rig=rig, workspace=workspace)


def parts(store: Path) -> set[str]:
    """What the store is made of, as kinds of files."""
    return {path.name if path.parent == store else path.parent.name for path in store.rglob("*") if path.is_file()} | {
        path.name for path in store.rglob("history.jsonl")
    }


def test_nothing_that_runs_hold_stands_in_any_file_of_the_store_or_in_the_log(
    tmp_path: Path, workspace: Path, key: Path
):
    store, plain = tmp_path / "store", tmp_path / "plain"
    with serving(store, workspace, key) as daemon:
        worked = work(daemon)
        assert leaks(store, daemon.log) == []  # while it runs: what SQLite writes ahead is there
        assert {"HEAD", "blobs", "checkpoint.json", "wal", "history.jsonl"} <= parts(store)
        assert any(path.name.startswith("index.sqlite") for path in store.iterdir())
        assert daemon.stop() == 0
    assert (store / "runs" / worked.ended / "state.json").is_file()
    assert leaks(store, daemon.log) == []
    with serving(plain, workspace) as daemon:
        work(daemon)
        assert {marker for marker, _ in leaks(plain)} == set(MARKERS)  # so they would be found
        assert daemon.stop() == 0


def test_killed_and_started_again_with_its_key_it_goes_on_and_the_question_is_the_same(
    tmp_path: Path, workspace: Path, key: Path
):
    store = tmp_path / "store"
    with serving(store, workspace, key) as daemon:
        worked = work(daemon)
        question, run_id = worked.waits["approvals"][0], worked.waits["run"]["runId"]
        daemon.kill()
    with serving(store, workspace, key) as daemon:
        daemon.listen()
        shown = daemon.call("status", runId=run_id)
        assert shown["approvals"] == [question]
        assert daemon.call("status", runId=worked.cancelled)["run"]["status"] == "cancelled"
        again = daemon.call(
            "start", clientRequestId="key-of-the-client-ended", agent=TALKER, input="goal-of-the-run", labels=LABELS
        )
        assert (again["runId"], again["replayed"]) == (worked.ended, True)
        daemon.call(
            "approve", clientRequestId="answer", runId=run_id, approvalId=question["approvalId"],
            digest=question["digest"], decision="allow",
        )  # fmt: skip
        done = daemon.until(run_id, lambda shown: shown["run"]["status"] == "completed")
        assert done["run"]["output"] == "text-at-the-end"
        assert daemon.stop() == 0
    assert (workspace / "argument-of-the-tool.txt").read_text() == "argument-of-the-tool"
    digest = hashlib.sha256(b"output-of-the-tool\n" + LARGE.encode()).hexdigest()
    read = [sys.executable, "-P", "-m", "rpcagent", "blob", digest[:12], "--store", str(store)]
    kept = subprocess.run([*read, "--encryption-key", f"file:{key}"], capture_output=True, check=True, timeout=60)
    assert kept.stdout == b"output-of-the-tool\n" + LARGE.encode()
    assert leaks(store, daemon.log) == []


@pytest.mark.parametrize("given", ["none", "another"])
def test_a_store_whose_runs_have_all_ended_takes_no_new_one_without_its_key(
    given: str, tmp_path: Path, workspace: Path, key: Path
):
    store = tmp_path / "store"
    keys.new_key_file(tmp_path / "wrong")
    with serving(store, workspace, key, rig=("--checkpoint-every", "1")) as daemon:
        daemon.listen()
        start(daemon, "ended", TALKER)
        assert daemon.stop() == 0
    disk = RealDisk(store)
    snapshot = reading.read_store(disk)
    disk.close()
    assert (list(snapshot.entries()), snapshot.manifest.live) == ([], {})  # nothing that would have to be opened
    before = fingerprint(store)
    named = [tmp_path / "wrong"] if given == "another" else []
    with serving(store, workspace, *named) as daemon:
        with refused("INCOMPATIBLE"):
            daemon.call("start", clientRequestId="new", agent=TALKER, input="goal-of-the-run")
        assert daemon.stop() == 1
    assert fingerprint(store) | {"LOCK": ""} == before | {"LOCK": ""}
    with serving(store, workspace, key) as daemon:
        assert [run["status"] for run in daemon.call("list")["runs"]] == ["completed"]
        assert daemon.stop() == 0


@pytest.mark.parametrize("given", ["none", "another"])
def test_without_its_key_every_call_is_refused_with_the_remedy_and_nothing_is_changed(
    given: str, tmp_path: Path, workspace: Path, key: Path
):
    store, wrong = tmp_path / "store", tmp_path / "wrong"
    other, kid = keys.new_key_file(wrong), keys.load(f"file:{key}").kid
    with serving(store, workspace, key) as daemon:
        worked = work(daemon)
        daemon.kill()
    before = fingerprint(store)
    for options in ((), ("--hold",)):
        named = ("--encryption-key", f"file:{wrong}") if given == "another" else ()
        with Daemon(store, *named, *options, workspace=workspace) as daemon:
            for method, params in (
                ("status", {}),
                ("status", {"runId": worked.ended}),
                ("list", {}),
                ("start", {"clientRequestId": "new", "agent": TALKER, "input": ""}),
                ("cancel", {"clientRequestId": "c", "runId": worked.waits["run"]["runId"]}),
            ):
                with refused("INCOMPATIBLE") as caught:
                    daemon.call(method, **params)
                assert (caught[0].data["kid"], caught[0].data["retryable"]) == (kid, False)
                remedy = f"Name it with --{'old-' if given == 'another' else ''}encryption-key"
                assert kid in caught[0].message
                assert remedy in caught[0].message
                assert (other.kid in caught[0].message) == (given == "another")
            assert daemon.stop() == 1
        assert kid in daemon.log.read_text()
        owner = {"LOCK": ""}  # who tried
        assert fingerprint(store) | owner == before | owner


def test_a_store_is_verified_without_its_key_which_says_what_was_not_opened(tmp_path: Path, workspace: Path, key: Path):
    store, kid = tmp_path / "store", keys.load(f"file:{key}").kid
    with serving(store, workspace, key) as daemon:
        work(daemon)
        assert daemon.stop() == 0
    found = said("verify", "--store", store, "--json")
    assert (found.code, damage(found), found.summary["warnings"]) == (0, [], 0)
    assert [(finding["what"].split(" were ")[0], finding.get("file")) for finding in found.findings] == [
        ("the content of 1 sealed files was not compared with the SHA-256 that they are named by", "blobs"),
        (f"payloads sealed with {kid}", None),
    ]
    opened = said("verify", "--replay", "--store", store, "--json", "--encryption-key", f"file:{key}")
    assert (opened.code, opened.findings, opened.summary["runs"]) == (0, [], found.summary["runs"])


def batch(workspace: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "rpcagent", *words, "--workspace", str(workspace)]
    return subprocess.run(
        command, cwd=workspace, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False
    )


def test_the_commands_of_a_shell_work_with_the_key_and_their_hints_repeat_it(
    tmp_path: Path, workspace: Path, key: Path
):
    store, described = tmp_path / "store", tmp_path / "agent.json"
    described.write_text(json.dumps(asker(large=True)))
    option = ["--encryption-key", f"file:{key}"]
    own = ["--store", str(store), *option]
    asked = batch(workspace, "run", "goal-of-the-run", "--agent", f"@{described}", "--key", "job", *own)
    assert asked.returncode == exits.PERSON, asked.stderr
    hints = [line for line in (asked.stdout + asked.stderr).splitlines() if "rpcagent " in line]
    assert [line for line in hints if shlex.join(option) not in line] == []
    assert any("rpcagent approve run_" in line for line in hints)
    listed = batch(workspace, "runs", *own)
    assert (listed.returncode, "asker" in listed.stdout) == (0, True)
    shown = batch(workspace, "show", "job", *own)
    assert (shown.returncode, "goal-of-the-run" in shown.stdout) == (0, True)
    assert batch(workspace, "show", "job", "--store", str(store)).returncode == exits.TROUBLE
    answered = batch(workspace, "approve", "job", "1", "allow", *own)
    assert (answered.returncode, answered.stdout.splitlines()[-1]) == (0, "text-at-the-end")
    assert leaks(store) == []
