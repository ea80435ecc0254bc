"""SIGKILL at every call that may change the disk, one after the other; the next daemon must know all that was acknowledged.
P2-P6; S0-02, S1-33, S4-49.

Twice: at the seam to the file system, where each call of the daemon's own is met, and by strace, where the kernel's are (also
those of the lock, of SQLite, and of what is none of the seam).
"""

from __future__ import annotations

import json
import os
import select
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from tests.process import disks
from tests.process.disk_story import RIG, Died, Story
from tests.process.nursery import Nursery
from tests.process.wire_driver import WAIT_S, Daemon, refused
from tests.service.driver import CountingService

pytestmark = pytest.mark.process

AT_ONCE = 3
SAMPLE = 12
STORE_ID = "0" * 24


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CountingService]:
    with CountingService(tmp_path_factory.mktemp("service") / "truth") as service:
        yield service


def calls_in(file: Path) -> list[str]:
    return file.read_text().splitlines() if file.exists() else []


def tell(nursery: Nursery, story: Story, store: Path, number: int | None) -> str | None:
    """The whole story, with SIGKILL before the N-th mutating call of its two daemons. The call, or None: it came to its end."""
    calls = store.parent / "calls"
    for part in (story.first, story.second):
        left = () if number is None else ("--kill-before", str(number - len(calls_in(calls))))
        with nursery.daemon(store, rig=(*RIG, "--calls", str(calls), *left)) as daemon:
            try:
                story.until_death(part, daemon)
            except Died:
                return calls_in(calls)[-1]
    return None


def go_on(nursery: Nursery, story: Story, store: Path) -> None:
    """What comes after a kill: a look at what is there, and the same requests once more, to the end."""
    with nursery.daemon(store, rig=RIG) as daemon:
        story.look(daemon)
        story.first(daemon)
        story.second(daemon)
        story.stop(daemon)
    story.count(final=True)


def test_a_kill_at_any_mutating_call_of_the_seam_loses_nothing_acknowledged_and_doubles_nothing_s4_49(
    service: CountingService, nursery: Nursery, tmp_path: Path
):
    (tmp_path / "undisturbed").mkdir()
    undisturbed = Story(service, "undisturbed")
    assert tell(nursery, undisturbed, tmp_path / "undisturbed" / "store", None) is None
    undisturbed.count(final=True)
    every = calls_in(tmp_path / "undisturbed" / "calls")

    def die_at(number: int) -> str | None:
        place = tmp_path / str(number)
        place.mkdir()
        story = Story(service, str(place))
        call = tell(nursery, story, place / "store", number)
        go_on(nursery, story, place / "store")
        return call

    with ThreadPoolExecutor(AT_ONCE) as pool:
        met = [call for call in pool.map(die_at, range(1, len(every) + 1)) if call is not None]
    print(f"{len(met)} kills, each at another of {len(every)} calls; acknowledged and lost: 0")
    assert {call.split()[0] for call in met} == {call.split()[0] for call in every}
    assert len(met) >= len(every) - 3  # two commits may have shared a batch


RETENTION = '[retention]\nrules = [{ label = "brief", after = "1ms" }]\n'
BRIEF: dict[str, Any] = {
    "agent": {"model": {"script": [{"text": "done"}]}, "tools": []}, "input": "", "labels": {"brief": ""},
    "clientRequestId": "brief",
}  # fmt: skip
KEPT: dict[str, Any] = {**BRIEF, "clientRequestId": "kept", "labels": {}}


def tidying(nursery: Nursery, place: Path, *rig: str) -> Daemon:
    """A daemon that moves all it has, and deletes what retention lets go, as soon as it has nothing to do."""
    (place / "config.toml").write_text(RETENTION)
    return nursery.daemon(place / "store", "--config", str(place / "config.toml"), rig=("--tidy-every", "20", *rig))


def until_deleted(daemon: Daemon) -> None:
    """The brief run is gone, by name and by its files."""
    end = time.monotonic() + WAIT_S
    while len(daemon.call("list")["runs"]) > 1 or len(list((daemon.store / "runs").iterdir())) > 1:
        assert time.monotonic() < end, "it is not deleted"
        select.select([daemon._out()], [], [], 0.01)


def test_a_kill_at_any_call_of_a_deletion_leaves_the_run_or_its_tombstone_and_never_a_free_key_s1_33(
    nursery: Nursery, tmp_path: Path
):
    def die_at(number: int | None) -> str | None:
        place = tmp_path / str(number)
        place.mkdir()
        calls = place / "calls"
        kill = () if number is None else ("--kill-before", str(number))
        acknowledged = []
        with tidying(nursery, place, "--calls", str(calls), *kill) as daemon:
            try:
                for params in (BRIEF, KEPT):
                    daemon.call("start", **params, waitMs=20_000)
                    acknowledged.append(params["clientRequestId"])
                until_deleted(daemon)
                assert daemon.stop() == 0
            except (AssertionError, OSError):
                assert daemon.exit_code() == -9
        with tidying(nursery, place) as daemon:
            assert {run["status"] for run in daemon.call("list")["runs"]} <= {"completed", "running"}
            for params in (KEPT, BRIEF):
                answer = daemon.answer(daemon.send("start", **params, waitMs=20_000))
                if params["clientRequestId"] in acknowledged:
                    deleted = params is BRIEF and "error" in answer and answer["error"]["data"]["code"] == "KEY_EXPIRED"
                    assert deleted or answer["result"]["replayed"] is True, answer
            until_deleted(daemon)
            with refused("KEY_EXPIRED"):
                daemon.call("start", **BRIEF)
            assert daemon.call("start", **KEPT)["replayed"] is True
        return calls_in(calls)[-1] if number is not None and number <= len(calls_in(calls)) else None

    die_at(None)
    every = calls_in(tmp_path / "None" / "calls")
    with ThreadPoolExecutor(AT_ONCE) as pool:
        met = [call for call in pool.map(die_at, range(1, len(every) + 1)) if call is not None]
    print(f"{len(met)} kills, each at another of {len(every)} calls; keys of deleted runs taken again: 0")
    assert {call.split()[0] for call in met} >= {"rmdir", "unlink", "sync_many", "rename"}
    assert len(met) >= 0.9 * len(every)


@dataclass(frozen=True)
class Point:
    """A system call of the first daemon of the story, or of the second; while it opens the store, or after that."""

    part: int
    opened: bool
    call: disks.SystemCall


def tell_traced(nursery: Nursery, story: Story, store: Path, traced: list[list[str]], *, opened: bool) -> bool:
    """The whole story, its daemons under strace with these arguments. False: one was killed."""
    for part, arguments in zip((story.first, story.second), traced, strict=True):
        told = ("--trace", json.dumps(arguments), *(("--trace-open",) if opened else ())) if arguments else ()
        with nursery.daemon(store, rig=(*RIG, "--store-id", STORE_ID, *told)) as daemon:
            try:
                story.until_death(part, daemon)
            except Died:
                return False
    return True


def system_calls_of_the_story(nursery: Nursery, service: CountingService, place: Path) -> list[Point]:
    """As two undisturbed tellings make them. The folder of the store is left out of the paths."""
    found = []
    for opened in (False, True):
        telling = place / f"opened {opened}"
        telling.mkdir(parents=True)
        store, records = telling / "store", [telling / "first", telling / "second"]
        story = Story(service, str(telling))
        assert tell_traced(nursery, story, store, [disks.recording(record) for record in records], opened=opened)
        story.count(final=True)
        found += [
            Point(part, opened, replace(call, path=call.path.removeprefix(str(store))))
            for part, record in enumerate(records)
            for call in disks.system_calls(record, store, first_thread_only=not opened)
        ]
    return found


def kill_at(nursery: Nursery, service: CountingService, tmp_path: Path, points: list[Point]) -> list[Point]:
    """Those that were met: at each a daemon was killed, and what came after was as it must be."""

    def die_at(place: Path, point: Point) -> Point | None:
        place.mkdir()
        store, story = place / "store", Story(service, str(place))
        traced: list[list[str]] = [[], []]
        traced[point.part] = replace(point.call, path=f"{store}{point.call.path}").killing()
        alive = tell_traced(nursery, story, store, traced, opened=point.opened)
        go_on(nursery, story, store)
        return None if alive else point

    with ThreadPoolExecutor(AT_ONCE) as pool:
        places = [tmp_path / str(number) for number in range(len(points))]
        return [point for point in pool.map(die_at, places, points) if point is not None]


@disks.needs_strace
def test_a_kill_at_some_system_calls_loses_nothing_acknowledged_and_doubles_nothing_s4_49(
    service: CountingService, nursery: Nursery, tmp_path: Path
):
    every = system_calls_of_the_story(nursery, service, tmp_path / "recorded")
    some = [every[number * len(every) // SAMPLE] for number in range(SAMPLE)]
    assert kill_at(nursery, service, tmp_path, some) == some


@disks.needs_strace
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not os.environ.get("RPCAGENT_SLOW"), reason="set RPCAGENT_SLOW=1")
def test_a_kill_at_any_system_call_on_the_store_loses_nothing_acknowledged_and_doubles_nothing_s4_49(
    service: CountingService, nursery: Nursery, tmp_path: Path
):
    every = system_calls_of_the_story(nursery, service, tmp_path / "all")
    met = kill_at(nursery, service, tmp_path, every)
    names = sorted({point.call.name for point in every})
    print(f"{len(met)} kills, each at another of {len(every)} system calls ({', '.join(names)}); lost: 0")
    assert {point.call.name for point in met} == set(names)
    assert len(met) >= len(every) - 3
