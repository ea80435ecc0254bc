"""`rpcagent verify` and `backup` while an owner records, makes checkpoints and deletes between any two reads: no false alarm, and
real damage is told all the same."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rpcagent.journal import manifest, reading
from rpcagent.journal.disk import RealDisk, StoreLock
from rpcagent.journal.record import Item
from rpcagent.runs import events as ev
from rpcagent.upkeep.checking import Check
from rpcagent.upkeep.copying import Copy
from rpcagent.upkeep.findings import Finding
from rpcagent.upkeep.place import Place

from .deleting import deleted_by_the_log, known_as_deleted
from .stores import AT, Owner, commits, runs

GONE, KEPT = runs("completed")[:2]
LATER = runs("completed")[2]
READS = {"names", "exists", "read", "read_at", "size"}


class Busy:
    """The disk as a check sees it: before read number `at`, and before each `step`-th after it, the owner acts once."""

    def __init__(self, disk: RealDisk, acts: list[Callable[[], object]], at: int, step: int = 1) -> None:
        self._disk, self._acts, self._at, self._step, self.reads = disk, acts, at, step, 0

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._disk, name)
        if name not in READS:
            return call

        def reads(*args: Any) -> Any:
            if self.reads >= self._at and not (self.reads - self._at) % self._step and self._acts:
                self._acts.pop(0)()
            self.reads += 1
            return call(*args)

        return reads


def checked(store: Path, monkeypatch: pytest.MonkeyPatch, acts: list, at: int, step: int) -> tuple[list[Finding], int]:
    """All findings but notes, and how many reads there were."""
    busy = Busy(RealDisk(store), acts, at, step)
    found: list[Finding] = []
    monkeypatch.setattr(Place, "disk", lambda _place: busy)
    Check(Place(store), found.append, replay=True).run()
    monkeypatch.undo()
    busy.close()
    return [
        each for each in found if each.severity != "note" and not each.what.startswith("a large output is missing")
    ], busy.reads


def owned(folder: Path) -> Owner:
    folder.mkdir(mode=0o700)
    mine = [*commits(GONE), *commits(KEPT), *commits(runs("failed")[0]), *commits(runs("active")[0])]
    return Owner(RealDisk(folder), folder).record(mine).checkpoint()


def said_deleted(owner: Owner, run: str = GONE) -> None:
    ends = commits(run)[-1].first + commits(run)[-1].count
    commit = ev.Commit(seq=ends, at=AT, events=(ev.RunDeleted(status="completed", reason="test"),))
    owner.record([Item(run, ends, 1, ev.encode(commit))])


def files_first(owner: Owner) -> list[Callable[[], object]]:
    """As on a full disk: the deletion, the files, other work, and the checkpoint when there is room."""
    disk = owner.disk
    return [
        lambda: said_deleted(owner),
        lambda: disk.unlink(f"runs/{GONE}/state.json"),
        lambda: disk.unlink(f"runs/{GONE}/history.jsonl"),
        lambda: disk.rmdir(f"runs/{GONE}"),
        lambda: owner.record(commits(LATER)),
        lambda: owner.checkpoint([GONE]),
    ]


def one_after_the_other(owner: Owner) -> list[Callable[[], object]]:
    """A run begins and ends, and two go, each with a checkpoint of its own."""
    return [
        lambda: owner.record(commits(LATER)),
        owner.checkpoint,
        lambda: said_deleted(owner),
        lambda: owner.checkpoint([GONE]),
        lambda: said_deleted(owner, LATER),
        lambda: owner.checkpoint([LATER]),
    ]


def comes_and_goes(owner: Owner) -> list[Callable[[], object]]:
    """Nobody owned it; a process comes, does all of it, and goes."""
    folder = owner.folder
    assert folder is not None

    def all_at_once() -> None:
        lock = StoreLock.take(folder, since="now")
        other = Owner(RealDisk(folder), folder)
        for act in one_after_the_other(other):
            act()
        other.record(commits(runs("active")[1])).checkpoint().close()
        lock.close()

    return [all_at_once]


ACTIONS = (files_first, one_after_the_other, comes_and_goes)


@pytest.mark.parametrize("step", [1, 5])
@pytest.mark.parametrize("acts", ACTIONS, ids=lambda acts: acts.__name__)
def test_what_an_owner_does_between_any_two_reads_of_a_check_is_no_finding(
    acts, step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    at, reads = 0, 1
    while at < reads:
        owner = owned(tmp_path / f"store{at}")
        found, reads = checked(tmp_path / f"store{at}", monkeypatch, acts(owner), at, step)
        assert found == [], at
        at += 1
        owner.close()
    assert at > 20


@pytest.mark.parametrize("acts", ACTIONS, ids=lambda acts: acts.__name__)
@pytest.mark.parametrize("lost", ["an ended run", "a live run", "a history"])
def test_damage_is_told_whatever_an_owner_does_meanwhile(
    acts, lost: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run = {"an ended run": KEPT, "a live run": runs("active")[0], "a history": runs("failed")[0]}[lost]
    file = {"an ended run": "runs", "a live run": f"runs/{run}/state.json", "a history": f"runs/{run}/history.jsonl"}
    for at in range(0, 60, 7):
        store = tmp_path / f"store{at}"
        owner = owned(store)
        if lost == "a history":
            (store / "runs" / run / "history.jsonl").unlink()
        else:
            shutil.rmtree(store / "runs" / run)
        found, _ = checked(store, monkeypatch, acts(owner), at, 3)
        assert [each.file for each in found if each.severity == "damage"] == [file[lost]], (at, found)
        owner.close()


def copies(
    folder: Path, made: Callable[[Path], tuple[Owner, list[Callable[[], object]]]], step: int = 1
) -> Iterator[tuple[int, Path]]:
    """A copy, where one comes to be, of a store whose owner begins to act before read 0, before read 1, and so on to the last."""
    at, reads = 0, 1
    while at < reads:
        store, copy = folder / f"store{at}", folder / f"copy{at}"
        owner, acts = made(store)
        busy = Busy(RealDisk(store), acts, at, step)
        try:
            Copy(store, busy, copy).make()
            whole = True
        except (reading.MovedOn, FileNotFoundError):
            whole = False
        finally:
            busy.close()
            owner.close()
        if whole:
            yield at, copy
        at, reads = at + 1, max(reads, busy.reads + (not whole))


@pytest.mark.parametrize("step", [1, 5])
@pytest.mark.parametrize("acts", ACTIONS[:2], ids=lambda acts: acts.__name__)
def test_a_backup_of_any_moment_of_a_deletion_is_whole_and_has_the_run_or_its_deletion(acts, step: int, tmp_path: Path):
    def made(store: Path) -> tuple[Owner, list[Callable[[], object]]]:
        owner = owned(store)
        return owner, acts(owner)

    count = 0
    for at, copy in copies(tmp_path, made, step):
        found: list[Finding] = []
        Check(Place(copy), found.append, replay=True).run()
        assert [each for each in found if each.severity != "note"] == [], at
        deleted = known_as_deleted(copy, {GONE})
        assert deleted == {GONE} or (copy / "runs" / GONE / "state.json").exists(), at
        count += 1
    assert count > 10


def test_a_backup_of_a_log_that_deletes_a_run_counts_it_until_the_deletion_is_taken_off(tmp_path: Path):
    def made(store: Path) -> tuple[Owner, list[Callable[[], object]]]:
        owner = owned(store)
        said_deleted(owner)
        return owner, [lambda: owner.checkpoint([GONE])]

    count = 0
    for at, copy in copies(tmp_path, made):
        told = manifest.decode((copy / "checkpoint.json").read_bytes()).ended
        log_deletes = GONE in deleted_by_the_log(copy)
        assert (told["completed"], known_as_deleted(copy, {GONE})) == (2 if log_deletes else 1, {GONE}), at
        count += 1
    assert count > 5


@pytest.mark.parametrize("acts", ACTIONS[:2], ids=lambda acts: acts.__name__)
def test_a_backup_of_a_store_that_has_lost_a_run_down_to_its_name_does_not_hide_it_f032(acts, tmp_path: Path):
    def made(store: Path) -> tuple[Owner, list[Callable[[], object]]]:
        owner = owned(store)
        shutil.rmtree(store / "runs" / KEPT)
        return owner, acts(owner)

    count = 0
    for at, copy in copies(tmp_path, made):
        found: list[Finding] = []
        Check(Place(copy), found.append).run()
        told = [each.what.split(":")[0] for each in found if each.severity == "damage"]
        assert told == ["1 completed runs are missing"], at
        count += 1
    assert count > 10
