"""Stores whose files were put back, replaced or lost, through the real daemon and the real commands: no effect is made again, and
whoever asks gets an answer. F031, F032."""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.process import disks
from tests.process.disk_rigs import take_all
from tests.process.wire_driver import Daemon, refused
from tests.upkeep.commands import damage, said

pytestmark = pytest.mark.process

TALKER: dict[str, Any] = {"model": {"script": [{"text": "done"}]}}
FILED = ("--checkpoint-every", "1", "--retry", "20")


def shell(command: str) -> dict[str, Any]:
    return {"calls": [{"tool": "shell.run", "arguments": {"command": command}}]}


PAYS: dict[str, Any] = {
    "tools": ["shell"],
    "model": {"script": [shell("echo paid >> pay.txt"), shell("echo second >> two.txt"), {"text": "done"}]},
}


def waits(daemon: Daemon, run: str, events: int) -> dict[str, Any]:
    """Its open question, once it waits at such an event or a later one."""
    shown = daemon.until(run, lambda shown: shown["run"]["status"] == "waiting" and shown["run"]["lastSeq"] >= events)
    [question] = [each for each in shown["approvals"] if each["status"] == "open"]
    return {"run": run, "seq": shown["run"]["lastSeq"], **question}


def allow(daemon: Daemon, question: dict[str, Any], key: str) -> dict[str, Any]:
    return daemon.call(
        "approve", runId=question["run"], clientRequestId=key, approvalId=question["approvalId"],
        digest=question["digest"], decision="allow",
    )  # fmt: skip


@pytest.mark.parametrize("put_back", ["one run", "its state"])
def test_files_of_a_run_that_are_older_than_the_manifest_make_no_effect_happen_twice_f031(
    tmp_path: Path, put_back: str
):
    store, old, paid = tmp_path / "store", tmp_path / "old", tmp_path / "pay.txt"
    with Daemon(store, rig=FILED) as daemon:
        daemon.listen()
        run = daemon.call("start", clientRequestId="pays", agent=PAYS, input="", waitMs=9_000)["runId"]
        first = waits(daemon, run, 1)
        assert daemon.stop() == 0
    shutil.copytree(store / "runs", old)
    with Daemon(store, rig=FILED) as daemon:
        daemon.listen()
        allow(daemon, first, "allows")
        second = waits(daemon, run, first["seq"] + 1)
        assert (second["seq"] > first["seq"], paid.read_text()) == (True, "paid\n")
        assert daemon.stop() == 0
    files = {"one run": run, "its state": f"{run}/state.json"}[put_back]
    target = store / "runs" / files
    if target.is_dir():
        shutil.rmtree(target)
        shutil.copytree(old / files, target)
    else:
        shutil.copy(old / files, target)
    with Daemon(store, rig=FILED) as daemon:
        daemon.listen()
        shown = daemon.call("status", runId=run)["run"]
        assert (shown["status"], f"event {second['seq']} was recorded" in shown["damaged"]) == ("damaged", True)
        with refused("STORE_DAMAGED"):
            allow(daemon, first, "allows")
        with refused("STORE_DAMAGED") as caught:
            daemon.call("start", clientRequestId="pays", agent=PAYS, input="")
        assert caught[0].data["runs"] == [run]
        assert daemon.call("start", clientRequestId="other", agent=TALKER, input="", waitMs=9_000)["replayed"] is False
        assert daemon.stop() == 0
    assert paid.read_text() == "paid\n"
    found = said("verify", "--store", store, "--json")
    assert (found.code, [finding["runs"] for finding in damage(found)]) == (1, [[run]])


@pytest.mark.parametrize("name", ["checkpoint.json", "wal", "state.json"])
def test_a_pipe_in_the_place_of_a_file_holds_nobody_up(tmp_path: Path, name: str):
    store = tmp_path / "store"
    with Daemon(store, rig=FILED) as daemon:
        daemon.listen()
        run = daemon.call("start", clientRequestId="past", agent=TALKER, input="", waitMs=9_000)["runId"]
        assert daemon.stop() == 0
    own = name == "state.json"
    [path] = (store / "wal").iterdir() if name == "wal" else [store / "runs" / run / name if own else store / name]
    path.unlink()
    os.mkfifo(path, 0o600)
    with Daemon(store, "--lock-wait", "1") as daemon:
        asked = [
            daemon.send("status", runId=run),
            daemon.send("list"),
            daemon.send("start", clientRequestId="new", agent=TALKER, input="", waitMs=9_000),
        ]
        answers = [daemon.answer(ident, timeout=8) for ident in asked]
        told = [answer["error"]["data"]["code"] if "error" in answer else "" for answer in answers]
        assert told == (["STORAGE", "", ""] if own else ["STORAGE"] * 3)
        assert daemon.stop() == (0 if own else 1)


@disks.needs_mounts
def test_retention_makes_room_on_a_full_disk_f025(tmp_path: Path):
    config = tmp_path / "retention.toml"
    config.write_text('[retention]\nrules = [{ label = "old", after = "2s" }]\n')
    rig = ("--checkpoint-every", "25", "--retry", "20", "--tidy-every", "500")
    with disks.tmpfs(tmp_path / "small", 6 << 20) as place:
        store = place / "store"
        with Daemon(store, "--config", str(config), rig=rig, workspace=tmp_path, log=tmp_path / "log") as daemon:
            daemon.listen()
            begin = {"agent": TALKER, "input": "y" * 40_000, "waitMs": 9_000}
            for number in range(20):
                daemon.call("start", clientRequestId=f"k{number}", labels={"old": "1"}, **begin)
            daemon.once(lambda shown: shown["checkpoint"]["tailRecords"] == 0)  # only what is in files can go
            daemon.call("list", limit=1)
            take_all(place / "filler")
            with refused("STORAGE"):
                daemon.call("start", clientRequestId="new", **begin)
            shown = daemon.call("status")
            assert (shown["journal"]["state"], shown["counts"]) == ("full", {"completed": 20})
            daemon.once(lambda shown: not shown["counts"] and not list((store / "runs").iterdir()))
            (place / "filler").unlink()
            daemon.call("start", clientRequestId="new", **begin)
            assert daemon.call("status")["journal"]["state"] == "ok"
            assert daemon.stop() == 0
        found = said("verify", "--store", store, "--json")
        assert (found.code, damage(found)) == (0, [])


@disks.needs_mounts
@pytest.mark.parametrize(
    ("index", "runs", "size"), [("there", 20, 40_000), ("missing", 20, 40_000), ("there", 1_100, 1)]
)
def test_a_daemon_that_is_started_on_a_full_disk_makes_room_by_retention_f025(
    tmp_path: Path, index: str, runs: int, size: int
):
    """Also where more is to be deleted than the reserve has room to record."""
    config = tmp_path / "retention.toml"
    config.write_text('[retention]\nrules = [{ label = "old", after = "1ms" }]\n')
    begin = {"agent": TALKER, "input": "y" * size, "waitMs": 20_000}
    keys = [f"k{number}" for number in range(runs)]
    with disks.tmpfs(tmp_path / "small", 32 << 20) as place:
        store = place / "store"
        with Daemon(
            store, rig=("--checkpoint-every", "1", "--retry", "20"), workspace=tmp_path, log=tmp_path / "log"
        ) as daemon:
            for first in range(0, runs, 100):
                sent = [
                    daemon.send("start", clientRequestId=key, labels={"old": "1"}, **begin)
                    for key in keys[first : first + 100]
                ]
                assert {daemon.result(ident)["run"]["status"] for ident in sent} == {"completed"}
            kept = daemon.call("start", clientRequestId="kept", **begin)["runId"]
            daemon.once(lambda shown: shown["checkpoint"]["tailRecords"] == 0)  # only what is in files can go
            assert daemon.stop() == 0
        if index == "missing":
            (store / "index.sqlite").unlink()
        take_all(place / "filler")
        rig = ("--checkpoint-every", "100000", "--retry", "20", "--tidy-every", "300")
        with Daemon(store, "--config", str(config), rig=rig, workspace=tmp_path, log=tmp_path / "log") as daemon:
            assert daemon.call("status")["counts"] == {"completed": runs + 1}
            with refused("STORAGE"):
                daemon.call("start", clientRequestId="new", **begin)
            daemon.once(lambda _: [path.name for path in (store / "runs").iterdir()] == [kept])
            shown = daemon.once(lambda shown: shown["status"] == "ok")
            assert (shown["counts"], shown["checkpoint"].get("trouble")) == ({"completed": 1}, None)
            assert [run["runId"] for run in daemon.call("list")["runs"]] == [kept]
            for key in (keys[0], keys[-1]):
                with refused("KEY_EXPIRED"):
                    daemon.call("start", clientRequestId=key, labels={"old": "1"}, **begin)
            assert daemon.stop() == 0
        with Daemon(store, workspace=tmp_path, log=tmp_path / "log") as daemon:
            for key in (keys[0], keys[-1]):
                with refused("KEY_EXPIRED"):
                    daemon.call("start", clientRequestId=key, labels={"old": "1"}, **begin)
            assert daemon.call("start", clientRequestId="kept", **begin)["replayed"] is True
            assert daemon.call("start", clientRequestId="new", **begin)["run"]["status"] == "completed"
            assert daemon.stop() == 0
        found = said("verify", "--store", store, "--json")
        assert (found.code, damage(found)) == (0, [])


def put(path: Path, what: str) -> None:
    path.unlink(missing_ok=True)
    if what == "a pipe":
        os.mkfifo(path)
        path.chmod(0o644)  # it is not opened, to be closed to others
    elif what == "a socket":
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(os.path.relpath(path))  # a path of a socket may not be long
        path.chmod(0o755)
    else:
        path.mkdir(mode=0o700)
        if what == "a folder":
            (path / "theirs").write_text("kept")


@pytest.mark.parametrize("name", ["index.sqlite", "index.sqlite-wal"])
@pytest.mark.parametrize("what", ["an empty folder", "a folder", "a pipe", "a socket"])
def test_what_is_no_file_in_the_place_of_the_index_stops_no_checkpoint(tmp_path: Path, name: str, what: str):
    store, log = tmp_path / "store", tmp_path / "log"
    path, aside = store / name, store / f"{name}.aside-1"
    begin = {"agent": TALKER, "input": "", "waitMs": 9_000}
    with Daemon(store, rig=FILED) as daemon:
        runs = [daemon.call("start", clientRequestId="first", **begin)["runId"]]
        daemon.once(lambda shown: shown["checkpoint"]["tailRecords"] == 0)
        assert daemon.stop() == 0
    put(path, what)
    assert said("verify", "--store", store).code == 0  # the index is no part of what is true
    for key in ("second", "third"):
        with Daemon(store, rig=FILED, log=log) as daemon:
            runs.append(daemon.call("start", clientRequestId=key, **begin)["runId"])
            shown = daemon.once(lambda shown: shown["checkpoint"]["made"] and not shown["checkpoint"]["tailRecords"])
            assert "trouble" not in shown["checkpoint"]
            assert [run["runId"] for run in daemon.call("list")["runs"]] == runs
            assert daemon.stop() == 0
    told = [line for line in map(json.loads, log.read_text().splitlines()) if name in line["event"]]
    assert [line["level"] for line in told] == ["warning"]
    assert ((store / "index.sqlite").is_file(), os.path.lexists(aside)) == (True, what != "an empty folder")
    if what == "a folder":
        assert (aside / "theirs").read_text() == "kept"
    found = said("verify", "--store", store, "--json")
    assert (found.code, found.findings) == (0, [])


@pytest.mark.parametrize("name", ["index.sqlite", "index.sqlite-wal", "index.sqlite-journal"])
def test_a_link_to_itself_in_the_place_of_the_index_is_told_as_any_link(tmp_path: Path, name: str):
    store = tmp_path / "store"
    with Daemon(store, rig=FILED) as daemon:
        daemon.call("start", clientRequestId="first", agent=TALKER, input="", waitMs=9_000)
        daemon.once(lambda shown: shown["checkpoint"]["tailRecords"] == 0)
        assert daemon.stop() == 0
    (store / name).unlink(missing_ok=True)
    (store / name).symlink_to(store / name)
    found = said("verify", "--store", store, "--json")
    [link] = [each for each in found.findings if each["file"] == name and each["severity"] == "damage"]
    assert (found.code, "is a symbolic link" in link["what"]) == (1, True)


# The commands


def strangers(store: Path) -> None:
    (store / "runs" / ".DS_Store").touch(mode=0o600)
    (store / "runs" / "notarun").touch(mode=0o600)
    os.close(os.open(os.fsencode(store / "runs") + b"/caf\xe9", os.O_CREAT | os.O_WRONLY, 0o600))


@pytest.fixture
def made(tmp_path: Path) -> tuple[Path, str]:
    """A store with two runs that have ended, one of them named."""
    store = tmp_path / "store"
    with Daemon(store, rig=FILED) as daemon:
        daemon.listen()
        for key in ("a", "b"):
            run = daemon.call("start", clientRequestId=key, agent=TALKER, input="", waitMs=9_000)["runId"]
        assert daemon.stop() == 0
    return store, run


COMMANDS: dict[str, Callable[[Path, Path], list[object]]] = {
    "verify": lambda store, _other: ["verify", "--replay", "--store", store],
    "repair": lambda store, _other: ["repair", "--store", store],
    "backup": lambda store, other: ["backup", other, "--store", store],
    "log": lambda store, _other: ["log", "--store", store],
    "gc": lambda store, other: ["gc", "--store", store, "--workspace", other.parent],
    "gc --dry-run": lambda store, other: ["gc", "--dry-run", "--store", store, "--workspace", other.parent],
}


def test_what_is_no_run_in_runs_is_neither_read_nor_touched_by_any_command(made: tuple[Path, str], tmp_path: Path):
    store, _ = made
    strangers(store)
    (store / "index.sqlite").unlink()
    codes = {}
    for name, words in COMMANDS.items():
        found = said(*words(store, tmp_path / "copy"))
        codes[name] = (found.code, found.err if found.code else "")
    assert codes == dict.fromkeys(COMMANDS, (0, ""))
    assert {path.name for path in (store / "runs").iterdir()} >= {".DS_Store", "notarun", "caf\udce9"}
    assert {path.name[:4] for path in (tmp_path / "copy" / "runs").iterdir()} == {"run_"}


@pytest.mark.parametrize("left", [("runs",), ("index.sqlite", "runs")])
def test_files_of_runs_without_a_log_are_no_sound_store(made: tuple[Path, str], left: tuple[str, ...]):
    store, _ = made
    for path in store.iterdir():
        if path.name not in left:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    [found, *_] = damage(said("verify", "--store", store, "--json"))
    assert found["what"] == "the files of runs are there but no log: the segments are missing"
    with Daemon(store, "--lock-wait", "1") as daemon:
        with refused("STORE_DAMAGED"):
            daemon.call("status")
        daemon.kill()
