"""`rpcagent verify` and `backup` again and again beside real daemons that run, make checkpoints, delete, start and are killed: all
clean, unless something is damaged. F025."""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from rpcagent.upkeep.checking import Check
from rpcagent.upkeep.findings import Finding
from rpcagent.upkeep.place import Place
from tests.process.calls import TALKER, start
from tests.process.nursery import Nursery
from tests.process.wire_driver import WAIT_S, Daemon, refused
from tests.upkeep.commands import said

pytestmark = pytest.mark.process

AT_ONCE = ("--checkpoint-every", "1", "--retry", "20")
OLD = {"labels": {"old": "1"}}


class Checks(threading.Thread):
    """One check after the other until it is told to stop; `found`: all that was told."""

    def __init__(self, store: Path) -> None:
        super().__init__()
        self.found: list[Finding] = []
        self.made = 0
        self.trouble: BaseException | None = None
        self._store, self._over, self._one = store, threading.Event(), threading.Condition()

    def run(self) -> None:
        try:
            while not self._over.is_set():
                Check(Place(self._store), self.found.append, replay=True).run()
                with self._one:
                    self.made += 1
                    self._one.notify_all()
        except BaseException as error:
            self.trouble = error
            raise

    def more(self, count: int) -> None:
        """Returns when so many more were begun and made."""
        with self._one:
            wanted = self.made + count + 1
            assert self._one.wait_for(lambda: self.made >= wanted or self.trouble is not None, WAIT_S)

    def wrong(self) -> list[Finding]:
        """What was told but notes, once they have ended."""
        assert self.trouble is None
        return [each for each in self.found if each.severity != "note"]

    def stop(self) -> None:
        self._over.set()
        self.join(WAIT_S)


@contextlib.contextmanager
def checking(store: Path) -> Iterator[Checks]:
    checks = Checks(store)
    checks.start()
    try:
        yield checks
    finally:
        checks.stop()


def many(daemon: Daemon, name: str, count: int) -> dict[str, str]:
    return {f"{name}{number}": start(daemon, f"{name}{number}", **OLD) for number in range(count)}


def test_while_files_go_before_their_checkpoint_checks_are_clean_and_what_was_deleted_stays_so_f025(
    nursery: Nursery, tmp_path: Path
):
    store, marker, copy = tmp_path / "store", tmp_path / "no-room", tmp_path / "copy"
    config = tmp_path / "retention.toml"
    config.write_text('[retention]\nrules = [{ label = "old", keep = 2 }]\n')
    with nursery.daemon(store, rig=AT_ONCE) as daemon:
        old = many(daemon, "old", 12)
        assert daemon.stop() == 0
    marker.touch()
    rig = (*AT_ONCE, "--tidy-every", "20", "--fail", "create:ENOSPC:checkpoint.json", "--while", str(marker))
    with nursery.daemon(store, "--config", str(config), rig=rig) as daemon, checking(store) as checks:
        for turn in range(4):
            old |= many(daemon, f"more{turn}", 3)
            checks.more(2)
        daemon.once(lambda shown: shown["counts"]["completed"] < len(old))
        daemon.once(lambda _shown: len(list((store / "runs").iterdir())) < len(old) - 5)
        checks.more(3)
        found = said("backup", copy, "--store", store, "--json")
        assert found.code == 0, found.out
        marker.unlink()
        daemon.once(lambda shown: shown["counts"] == {"completed": 2} and len(list((store / "runs").iterdir())) == 2)
        checks.more(3)
        left = {run["runId"] for run in daemon.call("list")["runs"]}
        daemon.kill()
        checks.more(2)
    assert checks.wrong() == []
    for place in (store, copy):
        found = said("verify", "--store", place, "--json", "--replay")
        assert (found.code, found.summary["warnings"]) == (0, 0), found.out
        with nursery.daemon(place, "--hold") as daemon:
            listed = {run["runId"] for run in daemon.call("list", limit=100)["runs"]}
            assert (left <= listed, place == copy or left == listed) == (True, True)
            gone = {key for key, run in old.items() if run not in listed}
            assert len(gone) > 5
            for key in gone:
                with refused("KEY_EXPIRED"):
                    daemon.call("start", clientRequestId=key, agent=TALKER, input="", **OLD)
            assert daemon.call("status")["counts"] == {"completed": len(listed)}
            assert daemon.stop() == 0


def test_daemons_that_start_work_and_are_killed_while_a_check_reads_are_no_finding(nursery: Nursery, tmp_path: Path):
    store, config = tmp_path / "store", tmp_path / "retention.toml"
    config.write_text('[retention]\nrules = [{ label = "old", keep = 3 }]\n')
    with nursery.daemon(store, rig=AT_ONCE) as daemon:
        many(daemon, "first", 6)
        assert daemon.stop() == 0
    with checking(store) as checks:
        for turn in range(12):
            with nursery.daemon(store, "--config", str(config), rig=(*AT_ONCE, "--tidy-every", "20")) as daemon:
                many(daemon, f"turn{turn}-", 3)
                if turn % 3:
                    daemon.kill()
                else:
                    assert daemon.stop() == 0
            if turn % 2:
                checks.more(1)
    assert checks.wrong() == []
    assert checks.made > 6


def test_real_damage_beside_a_daemon_that_deletes_and_makes_checkpoints_is_told_each_time(
    nursery: Nursery, tmp_path: Path
):
    store, config = tmp_path / "store", tmp_path / "retention.toml"
    config.write_text('[retention]\nrules = [{ label = "old", keep = 2 }]\n')
    with nursery.daemon(store, "--config", str(config), rig=(*AT_ONCE, "--tidy-every", "20")) as daemon:
        cut, lost = start(daemon, "cut"), start(daemon, "lost")
        daemon.once(lambda shown: shown["checkpoint"]["tailRecords"] == 0)
        with (store / "runs" / cut / "history.jsonl").open("r+b") as file:
            file.truncate(40)
        shutil.rmtree(store / "runs" / lost)
        with checking(store) as checks:
            for turn in range(6):
                many(daemon, f"turn{turn}-", 4)
                checks.more(1)
        assert daemon.stop() == 0
    assert checks.trouble is None
    assert {(each.file, each.severity) for each in checks.wrong()} == {
        (f"runs/{cut}/history.jsonl", "damage"), ("runs", "damage"),
    }  # fmt: skip
    uncounted = sum("were not counted" in each.what for each in checks.found)  # checkpoints were faster
    assert len(checks.wrong()) == 2 * checks.made - uncounted
    assert {each.what.partition(":")[0] for each in checks.wrong() if each.file == "runs"} == {
        "1 completed runs are missing"
    }
