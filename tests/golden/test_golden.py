"""Every store that a released version left behind opens with this one, and says and does what it did then."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from rpcagent.journal import record
from tests.golden import __main__ as command
from tests.golden import looking

pytestmark = pytest.mark.process

NAMES = sorted(path.name for path in looking.STORES.iterdir())
KINDS = {"completed", "failed", "cancelled", "waiting", "ready"}


def told(name: str, file: str) -> Any:
    return json.loads((looking.STORES / name / file).read_text())


@pytest.mark.parametrize("name", NAMES)
def test_a_golden_store_shows_every_run_event_question_and_answer_as_it_did(name: str, tmp_path: Path):
    manifest = told(name, "manifest.json")
    seen = looking.held(looking.copied(name, tmp_path), manifest["asked"], manifest["made"])
    for part, value in told(name, "expected.json")["held"].items():
        assert seen[part] == value, part
    assert seen.keys() == told(name, "expected.json")["held"].keys()


@pytest.mark.parametrize("name", NAMES)
def test_the_runs_of_a_golden_store_go_on(name: str, tmp_path: Path):
    manifest = told(name, "manifest.json")
    seen = looking.gone_on(looking.copied(name, tmp_path), manifest["asked"], manifest["made"])
    assert seen == told(name, "expected.json")["goneOn"]


@pytest.mark.parametrize("name", NAMES)
def test_the_bytes_of_a_golden_store_are_those_that_were_made(name: str):
    assert looking.sums(looking.STORES / name / "store") == told(name, "manifest.json")["files"]


@pytest.mark.parametrize("name", NAMES)
def test_opening_a_golden_store_changes_no_blob(name: str, tmp_path: Path):
    manifest = told(name, "manifest.json")
    store = looking.copied(name, tmp_path)
    looking.gone_on(store, manifest["asked"], manifest["made"])
    blobs = {file: sum_ for file, sum_ in looking.sums(store).items() if file.startswith("blobs/")}
    assert blobs == {file: sum_ for file, sum_ in manifest["files"].items() if file.startswith("blobs/")} != {}
    assert all(file == f"blobs/{sum_}" for file, sum_ in blobs.items())


@pytest.mark.parametrize("name", NAMES)
def test_a_golden_store_holds_runs_of_every_kind_questions_labels_and_what_a_crash_leaves(name: str):
    held = told(name, "expected.json")["held"]
    runs = [run["status"]["run"] for run in held["runs"]]
    assert {run["status"] for run in runs} == KINDS
    assert {run["namespace"] for run in runs} == {"", "team-a", "team-b"}
    assert {"labels", "unresolved", "retryAt", "recoveryPlan"} <= {member for run in runs for member in run}
    assert {question["kind"] for question in held["questions"]["approvals"]} == {
        "tool_call",
        "unknown_outcome",
        "budget",
    }
    assert held["recovery"]["interruptedRuns"] == 2
    assert held["recovery"]["droppedTailBytes"] > 0
    assert held["recovery"]["damagedRuns"] == []
    assert held["daemon"]["epoch"] == (5 if name == "format-0" else 6)
    refused = [answer for answer in held["answers"] if "refused" in answer]
    assert refused == ([] if name == "format-0" else [{"refused": "KEY_EXPIRED"}])
    assert all(answer["replayed"] for answer in held["answers"] if answer not in refused)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "format-0"])
def test_a_golden_store_has_every_kind_of_file(name: str):
    files = {re.sub(r"run_\w+|[0-9a-f]{64}|\d{16}", "*", file) for file in told(name, "manifest.json")["files"]}
    assert files == {
        "HEAD", "LOCK", "checkpoint.json", "wal/*.jsonl", "runs/*/history.jsonl", "runs/*/state.json", "blobs/*",
        "tombstones/*.bin",
    }  # fmt: skip


def test_there_is_a_golden_store_of_every_format_up_to_the_one_that_is_written():
    assert {f"format-{number}" for number in range(record.FORMAT + 1)} == {*NAMES}


def test_a_golden_store_that_is_there_is_never_made_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(sys, "argv", ["golden", "--make", "format-0"])
    monkeypatch.setattr(command.making, "make", lambda: pytest.fail("it was made"))
    assert command.main() == 1
    assert capsys.readouterr().err == f"{looking.STORES / 'format-0'} is there; nothing was made\n"
