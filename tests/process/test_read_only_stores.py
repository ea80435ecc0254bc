"""Looking at a store in which nothing can be written, as at a backup on a read-only medium: the real commands and the real
daemon tell what is recorded, and change nothing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.process import disks
from tests.process.wire_driver import Daemon, refused
from tests.upkeep.commands import damage, fingerprint, said

pytestmark = pytest.mark.process

TALKER: dict[str, Any] = {"model": {"script": [{"text": "done"}]}}
ASKS: dict[str, Any] = {
    "tools": ["shell"],
    "model": {"script": [{"calls": [{"tool": "shell.run", "arguments": {"command": "echo x"}}]}, {"text": "done"}]},
}
RIG = ("--checkpoint-every", "1", "--retry", "20")


def filled(store: Path, workspace: Path, *, killed: bool = False) -> list[str]:
    """Three runs that have ended and one that waits, all in files but for what the last one recorded; its ids, in order."""
    with Daemon(store, rig=RIG, workspace=workspace, log=workspace / "log") as daemon:
        begin = {"input": "go", "waitMs": 9_000}
        runs = [daemon.call("start", clientRequestId=f"k{n}", agent=TALKER, **begin)["runId"] for n in range(3)]
        runs.append(daemon.call("start", clientRequestId="asks", agent=ASKS, **begin)["runId"])
        daemon.once(lambda shown: shown["checkpoint"]["tailRecords"] == 0)
        assert len(daemon.call("list")["runs"]) == 4
        if not killed:
            assert daemon.stop() == 0
    return runs


def command(*words: str, store: Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-P", "-m", "rpcagent", *words, "--store", str(store)]
    return subprocess.run(line, cwd=cwd, capture_output=True, text=True, timeout=60, check=False)


def statuses(store: Path, cwd: Path) -> dict[str, str]:
    """What `rpcagent runs` lists."""
    done = command("runs", "--all", "--json", store=store, cwd=cwd)
    assert done.returncode == 0, done.stderr
    told = [json.loads(line) for line in done.stdout.splitlines()]
    return {run["runId"]: run["status"] for run in told if "runId" in run}


def read_all_of_it(store: Path, runs: list[str], out: Path) -> None:
    """Every command that only reads, and what a daemon there says."""
    before = fingerprint(store)
    assert statuses(store, out) == dict.fromkeys(runs[:3], "completed") | {runs[3]: "waiting"}
    commands = (["show", runs[0]], ["show", runs[3]], ["show", "k1"], ["tail", runs[0]])
    done = {" ".join(words): command(*words, store=store, cwd=out) for words in commands}
    assert {name: (one.returncode, one.stderr) for name, one in done.items()} == dict.fromkeys(done, (0, ""))
    assert "done" in done[f"show {runs[0]}"].stdout
    assert (found := said("verify", "--replay", "--store", store, "--json")).code == 0, found.out
    assert damage(found) == []
    assert said("log", "--run", runs[0], "--store", store).code == 0
    assert said("export", runs[0], out / "parcel.json", "--store", store).code == 0
    assert said("gc", "--dry-run", "--store", store, "--workspace", out).code == 0
    assert said("backup", out / "copy", "--store", store).code == 0
    with Daemon(store, "--hold", workspace=out, log=out / "log") as daemon:
        assert daemon.call("status")["counts"] == {"completed": 3, "waiting": 1}
        assert daemon.call("status", runId=runs[0])["run"]["output"] == "done"
        with refused("STORAGE") as caught:
            daemon.call("start", clientRequestId="new", agent=TALKER, input="go")
        assert "can only be read" in caught[0].message
        assert "rpcagent backup DIR" in caught[0].message
        assert daemon.stop() == 0
    with Daemon(out / "copy", workspace=out, log=out / "log") as daemon:  # as that message says
        assert daemon.call("start", clientRequestId="new", agent=TALKER, input="", waitMs=9_000)["replayed"] is False
        assert daemon.stop() == 0
    assert fingerprint(store) == before


@disks.needs_mounts
@pytest.mark.parametrize("index", ["there", "missing", "damaged", "of another time"])
@pytest.mark.parametrize("killed", [False, True])
def test_a_store_on_a_read_only_file_system_is_read_by_every_command_that_reads(
    tmp_path: Path, index: str, killed: bool
):
    out = tmp_path / "out"
    out.mkdir()
    with disks.tmpfs(tmp_path / "medium", 16 << 20) as place:
        store = place / "store"
        file = store / "index.sqlite"
        if index == "of another time":
            with Daemon(store, rig=RIG, workspace=out, log=out / "log") as daemon:
                daemon.call("status")
                daemon.stop()
        runs = filled(store, out, killed=killed)
        assert (store / "index.sqlite-wal").exists() is killed
        if index == "missing":
            file.unlink()
        elif index == "damaged":
            file.write_bytes(file.read_bytes()[:100] + b"\xff" * 40_000)
        elif index == "of another time":
            filled(out / "other", out)
            shutil.copy(out / "other" / "index.sqlite", file)
        disks.remount(place, "remount,ro")
        read_all_of_it(store, runs, out)
        with Daemon(store, workspace=out, log=out / "log") as daemon:
            with refused("STORAGE") as caught:
                daemon.call("status")
            assert caught[0].data["errno"] == "EROFS"
            assert "`serve --hold`" in caught[0].message
            assert daemon.stop() == 1
        disks.remount(place, "remount,rw")


@disks.needs_mounts
def test_where_there_is_no_store_on_a_read_only_file_system_that_is_said_and_an_empty_one_has_no_runs(tmp_path: Path):
    with disks.tmpfs(tmp_path / "medium", 1 << 20) as place:
        (place / "empty").mkdir(mode=0o700)
        disks.remount(place, "remount,ro")
        done = command("runs", store=place / "missing", cwd=tmp_path)
        assert (done.returncode, f"there is no store at {place}/missing" in done.stderr) == (5, True)
        assert statuses(place / "empty", tmp_path) == {}


@disks.needs_mounts
def test_a_read_only_view_of_a_store_that_is_owned_elsewhere_shows_what_its_owner_records(tmp_path: Path):
    store, out = tmp_path / "store", tmp_path / "out"
    out.mkdir()
    with Daemon(store, rig=RIG) as daemon:
        begin = {"agent": TALKER, "input": "go", "waitMs": 9_000}
        runs = [daemon.call("start", clientRequestId="first", **begin)["runId"]]
        with disks.mounted(tmp_path / "view", "--bind", store) as view:
            disks.remount(view, "remount,bind,ro")
            for number in range(4):
                assert statuses(view, out) == dict.fromkeys(runs, "completed")
                runs.append(daemon.call("start", clientRequestId=f"k{number}", **begin)["runId"])
                daemon.once(lambda shown: shown["checkpoint"]["tailRecords"] == 0)
                daemon.call("list")
        assert daemon.stop() == 0


@pytest.fixture
def closed(tmp_path: Path) -> Iterator[Path]:
    """A store that is still to be made, in which all can be written again at the end."""
    probe = tmp_path / "probe"
    probe.mkdir(mode=0o500)
    if os.access(probe, os.W_OK):
        pytest.skip("this process may write into any folder")
    yield tmp_path / "store"
    for path in (tmp_path / "store", *(tmp_path / "store").rglob("*")):
        path.chmod(0o700 if path.is_dir() else 0o600)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("killed", [False, True])
def test_a_store_whose_folder_takes_no_names_is_read_by_every_command_that_reads(
    closed: Path, tmp_path: Path, whole: bool, killed: bool
):
    out = tmp_path / "out"
    out.mkdir()
    runs = filled(closed, out, killed=killed)
    for path in (closed, *(closed.rglob("*") if whole else ())):
        path.chmod(path.stat().st_mode & ~0o222)
    read_all_of_it(closed, runs, out)
