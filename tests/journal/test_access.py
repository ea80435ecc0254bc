"""A store is this user's alone: what the daemon makes is, and what was opened since is closed again or refused."""

from __future__ import annotations

import errno
import itertools
import os
import shlex
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from rpcagent import errors
from rpcagent.journal import access
from rpcagent.journal.access import Finding, advice, check_modes, judge, secure
from tests.process.wire_driver import Daemon

ME = os.geteuid()


def test_every_combination_of_name_mode_owner_and_link_has_one_verdict():
    kinds = {"": stat.S_IFDIR, "wal": stat.S_IFDIR, "HEAD": stat.S_IFREG, "runs/r/state.json": stat.S_IFREG}
    seen: dict[str, int] = {}
    for (name, kind), bits, special, uid, is_link in itertools.product(
        kinds.items(), range(0o1000), (0, stat.S_ISGID, stat.S_ISVTX), (0, 1000, 1001), (False, True)
    ):
        verdict = judge(name, kind | special | bits, uid, is_link, 1000)
        if is_link and name != "":
            wanted = "link"
        elif uid != 1000:
            wanted = "foreign"
        else:
            wanted = "good" if bits in {owner << 6 for owner in range(8)} else "open"
        assert verdict == wanted, (name, oct(bits), uid, is_link)
        seen[verdict] = seen.get(verdict, 0) + 1
    # of 4 x 512 x 3 x 3 x 2: three of four names can be links; of the rest a third is ours, an eighth of 8 closed
    assert seen == {"link": 13_824, "foreign": 15_360, "good": 120, "open": 7_560}


def made(store: Path) -> Path:
    """A store with a part of each kind, closed to others."""
    for name in ("wal", "runs/run_a", "blobs"):
        (store / name).mkdir(parents=True, mode=0o700)
    for name in ("LOCK", "HEAD", "wal/0000000000000001.jsonl", "runs/run_a/state.json", "blobs/00"):
        (store / name).touch(mode=0o600)
    for path in (store, store / "runs"):
        path.chmod(0o700)
    return store


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def test_a_store_that_nobody_touched_is_left_as_it_is(tmp_path: Path):
    store = made(tmp_path / "store")
    assert check_modes(store, whole=True) == []
    assert secure(store) == []


@pytest.mark.parametrize("name", ["", "LOCK", "HEAD", "wal", "runs", "blobs"])
@pytest.mark.parametrize("bits", [0o755, 0o770, 0o707, 0o640, 0o2750])
def test_what_was_opened_to_others_is_closed_and_told(tmp_path: Path, name: str, bits: int):
    store = made(tmp_path / "store")
    (store / name).chmod(bits)
    assert secure(store) == [Finding(name=name, verdict="open", mode=bits, uid=ME)]
    assert mode_of(store / name) == bits & ~0o077
    assert secure(store) == []


def test_a_store_that_is_reached_by_a_link_is_judged_and_closed_where_it_is(tmp_path: Path):
    store = made(tmp_path / "real")
    store.chmod(0o755)
    (tmp_path / "store").symlink_to(store)
    assert secure(tmp_path / "store") == [Finding(name="", verdict="open", mode=0o755, uid=ME)]
    assert mode_of(store) == 0o700


@pytest.mark.parametrize("name", ["LOCK", "HEAD", "wal", "runs"])
@pytest.mark.parametrize("dangling", [True, False])
def test_a_link_in_the_place_of_a_part_is_refused_and_nothing_is_changed(tmp_path: Path, name: str, dangling: bool):
    store = made(tmp_path / "store")
    elsewhere = tmp_path / "elsewhere"
    (store / name).rename(elsewhere)
    elsewhere.chmod(0o755)
    (store / name).symlink_to(tmp_path / "nowhere" if dangling else elsewhere)
    store.chmod(0o755)
    with pytest.raises(errors.StorageError) as caught:
        secure(store)
    assert caught.value.data == {"code": "STORAGE", "retryable": False, "errno": "ELOOP"}
    assert caught.value.message == (
        f"{store / name} is a symbolic link, and a part of a store never is: put what it points to in its place"
    )
    assert (mode_of(elsewhere), mode_of(store)) == (0o755, 0o755)


def test_a_store_of_another_user_is_refused_with_the_command_that_helps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    store = made(tmp_path / "a store")
    store.chmod(0o755)
    monkeypatch.setattr(access.os, "geteuid", lambda: ME + 1)
    with pytest.raises(errors.StorageError) as caught:
        secure(store)
    assert caught.value.data == {"code": "STORAGE", "retryable": False, "errno": "EPERM"}
    assert caught.value.message == (
        f"'{store}' belongs to another user (uid {ME}, and this is uid {ME + 1}): run as that user, or make it yours: "
        f"chown -R {ME + 1} '{store}'"
    )
    assert mode_of(store) == 0o755


@pytest.mark.skipif(ME != 0, reason="only root can give a file away")
def test_a_part_that_is_another_users_is_refused(tmp_path: Path):
    store = made(tmp_path / "store")
    os.chown(store / "wal", 12_345, -1)
    with pytest.raises(errors.StorageError) as caught:
        secure(store)
    assert caught.value.data["errno"] == "EPERM"
    assert str(store / "wal") in caught.value.message
    assert "uid 12345" in caught.value.message


def test_a_part_that_is_exchanged_for_a_link_meanwhile_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    store = made(tmp_path / "store")
    (store / "blobs").chmod(0o755)
    found = check_modes(store)
    elsewhere = (store / "blobs").rename(tmp_path / "elsewhere")
    (store / "blobs").symlink_to(elsewhere)
    monkeypatch.setattr(access, "check_modes", lambda _store: found)
    with pytest.raises(errors.StorageError) as caught:
        secure(store)
    assert caught.value.data["errno"] == "ELOOP"
    assert mode_of(elsewhere) == 0o755


def test_a_part_that_is_gone_meanwhile_hinders_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    store = made(tmp_path / "store")
    (store / "HEAD").chmod(0o644)
    found = check_modes(store)
    (store / "HEAD").unlink()
    monkeypatch.setattr(access, "check_modes", lambda _store: found)
    assert secure(store) == found


@pytest.mark.parametrize("how", ["it stays as it is", "it is refused"])
def test_a_file_system_that_keeps_no_modes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str):
    def fchmod(_descriptor: int, _mode: int) -> None:
        if how == "it is refused":
            raise PermissionError(errno.EPERM, "as told")

    store = made(tmp_path / "store")
    store.chmod(0o755)
    monkeypatch.setattr(access.os, "fchmod", fchmod)
    with pytest.raises(errors.StorageError) as caught:
        secure(store)
    assert caught.value.data == {"code": "STORAGE", "retryable": False, "errno": "EPERM"}
    assert caught.value.message == f"{store} is open to other users (mode 0755): chmod -R go= {store}"


def test_the_command_in_the_advice_closes_all_of_it(tmp_path: Path):
    store = made(tmp_path / "it's a store")
    for path in (store, *store.rglob("*")):
        path.chmod(0o777)
    [first, *rest] = check_modes(store, whole=True)
    assert (first.name, len(rest)) == ("", 9)
    command = advice(store, first).partition(": ")[2]
    subprocess.run(shlex.split(command), check=True, timeout=20)
    assert check_modes(store, whole=True) == []


def test_a_start_looks_at_the_names_in_the_folder_and_a_whole_check_at_every_file(tmp_path: Path):
    store = made(tmp_path / "store")
    (store / "runs/run_a/state.json").chmod(0o644)
    (store / "runs/run_a").chmod(0o750)
    (store / "blobs/link").symlink_to("00")
    (store / "blobs/out").symlink_to("/")  # is not gone into
    assert check_modes(store) == []
    found = {finding.name: (finding.verdict, oct(finding.mode)) for finding in check_modes(store, whole=True)}
    link = oct(mode_of(store / "blobs/link"))
    assert found == {
        "runs/run_a": ("open", "0o750"),
        "runs/run_a/state.json": ("open", "0o644"),
        "blobs/link": ("link", link),
        "blobs/out": ("link", link),
    }


def test_what_is_not_the_stores_own_is_not_judged(tmp_path: Path):
    store = made(tmp_path / "store")
    (store / "lost+found").mkdir(mode=0o755)
    (store / "README").touch(mode=0o644)
    (store / "current").symlink_to("wal")
    assert check_modes(store, whole=True) == []
    assert secure(store) == []


def test_what_cannot_be_looked_at_is_an_error_and_not_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    store = made(tmp_path / "store")

    def lstat(path: Path) -> os.stat_result:
        raise OSError(errno.EIO, "as told", str(path))

    monkeypatch.setattr(Path, "lstat", lstat)
    with pytest.raises(OSError, match="as told") as caught:
        secure(store)
    assert caught.value.errno == errno.EIO


def without_umask() -> None:
    os.umask(0)


WORK = {
    "model": {
        "script": [
            {"calls": [{"tool": "shell.run", "arguments": {"command": "umask 077; seq 1 20000"}}]},
            {"text": "counted"},
        ]
    },
    "tools": ["shell"],
    "policy": {"rules": [{"do": "allow"}]},
}


@pytest.mark.process
def test_all_that_the_daemon_makes_is_closed_to_others_whatever_the_umask(tmp_path: Path):
    workspace, store = tmp_path / "workspace", tmp_path / "deep" / "store"
    workspace.mkdir()
    init = [sys.executable, "-m", "rpcagent", "init", str(workspace)]
    subprocess.run(init, check=True, timeout=60, stdout=subprocess.DEVNULL)
    trust = [sys.executable, "-m", "rpcagent", "trust", "--store", str(store), "--workspace", str(workspace)]
    subprocess.run(trust, check=True, timeout=60, preexec_fn=without_umask, stdout=subprocess.DEVNULL)
    for life in ("one", "two"):
        log = tmp_path / "log"
        with Daemon(store, workspace=workspace, log=log, before_exec=without_umask) as daemon:
            done = daemon.call("start", clientRequestId=life, agent=WORK, input="", waitMs=20_000)
            assert done["run"]["status"] == "completed"
            if life == "two":
                assert daemon.stop() == 0
    names = {str(path.relative_to(store)) for path in store.rglob("*")}
    assert names > {"LOCK", "HEAD", "wal", "wal/0000000000000001.jsonl", "blobs", "trusted"}
    assert {name.split("/")[0] for name in names} <= set(access.PARTS)
    paths = [store.parent, store, *store.rglob("*")]
    assert {path: oct(mode_of(path)) for path in paths} == {
        path: "0o700" if path.is_dir() else "0o600" for path in paths
    }
    assert check_modes(store, whole=True) == []
