"""What an earlier version wrote is raised step by step, and then is what this version would have written.

Version 1 is the only one that was released, so the steps are tried with two of the tests' own: versions 1 and 2 as they
might have been, of which 3 is the present.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rpcagent.journal.disk import RealDisk
from rpcagent.journal.wal import Wal
from rpcagent.runs import events as ev
from rpcagent.runs.fold import apply
from rpcagent.runs.state import RunState
from rpcagent.runs.upcast import UPCASTS, upcast
from tests.golden import looking

from .story import NOON
from .test_events import EVENTS, structs_of

Body = dict[str, Any]
COMMITS = st.builds(
    lambda seq, events: ev.Commit(seq=seq, at=NOON, events=tuple(events)),
    st.integers(1, 10**9),
    st.lists(st.one_of(*map(structs_of, EVENTS)), max_size=3),
)


def renamed(body: Body, old: str, new: str) -> Body:
    events = [{**event, "type": new} if event["type"] == old else event for event in body["events"]]
    return {**body, "events": events}


def from_1(body: Body) -> Body:
    """Version 2 called the end `run_finished`."""
    return renamed(body, "run_done", "run_finished")


def from_2(body: Body) -> Body:
    """Version 3 numbers events as `seq`, and calls the end as it is called now."""
    body = renamed(body, "run_finished", "run_completed")
    first = body.pop("first", None)  # of the copy that `renamed` made
    return body if first is None else {**body, "seq": first}


@pytest.fixture
def third(monkeypatch: pytest.MonkeyPatch) -> None:
    """This version writes schema 3."""
    monkeypatch.setattr(ev, "VERSION", 3)
    monkeypatch.setitem(UPCASTS, 1, from_1)
    monkeypatch.setitem(UPCASTS, 2, from_2)


def as_written(commit: ev.Commit, version: int) -> Body:
    """The body of a commit, as the version of the tests' own wrote it."""
    body: Body = msgspec.json.decode(msgspec.json.encode(commit))
    if version == 3:
        return body
    body = renamed(body, "run_completed", "run_done" if version == 1 else "run_finished")
    return {"first": body.pop("seq"), **body}


def raw(body: Body, version: int) -> bytes:
    return msgspec.json.encode(body if version == 1 else {"v": version, **body})


def each_commit(check: Callable[[ev.Commit], None]) -> None:
    settings(max_examples=60, deadline=None, database=None)(given(COMMITS)(check))()


@pytest.mark.usefixtures("third")
@pytest.mark.parametrize("version", [1, 2, 3])
def test_a_body_of_each_version_is_the_same_commit(version: int):
    each_commit(lambda commit: equal(ev.decode(raw(as_written(commit, version), version)), commit))


@pytest.mark.usefixtures("third")
def test_what_is_written_says_its_version_first_and_is_read_back():
    def check(commit: ev.Commit) -> None:
        written = ev.encode(commit)
        equal(written, b'{"v":3,' + msgspec.json.encode(commit)[1:])
        equal(ev.decode(written), commit)
        equal(ev.decode(memoryview(written)), commit)

    each_commit(check)


@pytest.mark.usefixtures("third")
def test_raising_over_two_versions_is_raising_over_one_and_then_over_the_other():
    def check(commit: ev.Commit) -> None:
        body = as_written(commit, 1)
        equal(upcast(body, 1, 3), upcast(upcast(body, 1, 2), 2, 3))
        equal(upcast(body, 1, 3), as_written(commit, 3))
        equal(upcast(body, 2, 2), body)

    each_commit(check)


def equal(found: Any, wanted: Any) -> None:
    assert found == wanted


def leaves_its_input(steps: dict[int, Callable[[Body], Body]], bodies: dict[int, list[Body]]) -> list[int]:
    """The versions whose step changed the body that it was given, or answers differently the second time."""
    found = []
    for version, step in steps.items():
        for body in bodies[version]:
            before = copy.deepcopy(body)
            if step(body) != step(copy.deepcopy(before)) or body != before:
                found.append(version)
                break
    return found


@pytest.mark.usefixtures("third")
def test_a_step_that_changes_what_it_was_given_is_found():
    def careless(body: Body) -> Body:
        body["seq"] = body.pop("first", 1)
        return body

    ended = ev.Commit(seq=3, at=NOON, events=(ev.RunCompleted(output="x"),))
    bodies = {version: [as_written(ended, version)] for version in (1, 2)}
    assert leaves_its_input(UPCASTS, bodies) == []
    assert leaves_its_input({1: careless, 2: from_2}, bodies) == [1]


def test_every_version_before_the_present_has_its_step_and_no_other_has():
    assert set(UPCASTS) == set(range(1, ev.VERSION))


@pytest.mark.usefixtures("third")
@pytest.mark.parametrize("missing", [1, 2])
def test_a_missing_step_is_an_error_and_not_a_guess(missing: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(UPCASTS, missing)
    with pytest.raises(KeyError) as caught:
        ev.decode(b'{"seq":1,"at":"2026-03-01T12:00:00Z","events":[]}')
    assert caught.value.args == (missing,)


@pytest.mark.usefixtures("third")
def test_a_version_after_the_present_is_not_read():
    with pytest.raises(ev.WrittenLater) as caught:
        ev.decode(b'{"v":4,"seq":1,"at":"2026-03-01T12:00:00Z","events":[]}')
    assert (caught.value.kind, caught.value.found) == ("version", "4")


@pytest.mark.parametrize("version", ["0", "-1", "true", "1.0", '"1"', "null", "[]"])
def test_a_version_that_is_no_number_from_1_is_no_version(version: str):
    with pytest.raises(msgspec.ValidationError) as caught:
        ev.decode(f'{{"v":{version},"seq":1,"at":"2026-03-01T12:00:00Z","events":[]}}'.encode())
    assert str(caught.value) == "a version is a whole number from 1 - at `$.v`"


def test_a_body_may_say_that_it_is_of_version_1():
    assert ev.decode(b'{"v":1,"seq":1,"at":"2026-03-01T12:00:00Z","events":[]}') == ev.Commit(seq=1, at=NOON, events=())


def test_nothing_is_written_that_tells_of_a_version_as_long_as_it_is_1():
    assert ev.encode(ev.Commit(seq=1, at=NOON, events=())) == b'{"seq":1,"at":"2026-03-01T12:00:00Z","events":[]}'


# The bytes of a released version


def golden_bodies(folder: Path) -> Iterator[tuple[str, bytes]]:
    store = looking.copied("format-0", folder)
    wal = Wal.open(RealDisk(store), draw_store_id=lambda: "", app="", at="")
    for entry in wal.entries():
        yield entry.run, bytes(entry.body)


def folded(bodies: list[tuple[str, bytes]]) -> dict[str, RunState]:
    states: dict[str, RunState] = {}
    for run, body in bodies:
        states[run] = apply(states.get(run), ev.decode(body), run)
    return states


def test_the_bytes_of_version_1_fold_to_the_same_states_by_every_way_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    bodies = list(golden_bodies(tmp_path))
    fast = folded(bodies)
    assert len(fast) == 22
    said = [(run, b'{"v":1,' + body[1:]) for run, body in bodies]
    assert folded(said) == fast
    monkeypatch.setattr(ev, "VERSION", 3)
    monkeypatch.setitem(UPCASTS, 1, from_1)
    monkeypatch.setitem(UPCASTS, 2, from_2)
    assert folded(bodies) == fast
    rewritten = [(run, ev.encode(ev.decode(body))) for run, body in bodies]
    assert all(body.startswith(b'{"v":3,') for _, body in rewritten)
    assert folded(rewritten) == fast


def test_the_bytes_of_version_1_are_what_version_1_writes(tmp_path: Path):
    for _, body in golden_bodies(tmp_path):
        assert ev.encode(ev.decode(body)) == body


def test_the_steps_leave_the_bytes_of_version_1_as_they_are(tmp_path: Path):
    bodies = [json.loads(body) for _, body in golden_bodies(tmp_path)]
    by_version = {1: bodies}
    for version in range(1, ev.VERSION):
        by_version[version + 1] = [upcast(body, version, version + 1) for body in by_version[version]]
    assert leaves_its_input(UPCASTS, by_version) == []
