"""A real task in a real repository, asked of a model over HTTP: unbroken, and killed five times on its way.

Look around (side by side), run the tests, edit, run them again, look at the change, commit. However often the daemon is
killed, the repository is the same in the end, and no command that is not read-only has done its work twice. F047, F075.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.process import repository
from tests.process.repository import COMMIT, DIFF, LIST, MESSAGE, NO_OUTPUT, STATUS, TEST, Repository, gone, history
from tests.process.wire_driver import Daemon
from tests.service.model_driver import ModelCall, ModelServer
from tests.service.model_server import history_problem

pytestmark = pytest.mark.process

KEY = "sk-real-0123456789abcdef"
GOAL = "A test fails. Mend it, and commit."
TURNS = repository.turns()
COMMIT_AS_ARGUMENTS = f"git commit -q -a -m {MESSAGE}"


class Stage:
    """One copy of the repository and one model server, over as many daemons as it takes."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("MODEL_KEY", KEY)
        self.folder = folder
        self.repository = Repository(folder, monkeypatch)
        self.server = ModelServer(folder / "model.log", TURNS, key=KEY).start()
        self.run_id = ""
        self.asked: list[tuple[str, str]] = []
        self.deltas = ""

    def close(self) -> None:
        self.server.stop()
        self.repository.close()

    def opened(self, *, rig: tuple[str, ...] = ()) -> Daemon:
        """A daemon that has been sent `start`, with the same key and params as each one before it."""
        folder = self.folder
        daemon = Daemon(folder / "store", rig=rig, workspace=self.repository.workspace, log=folder / "daemon.log")
        daemon.call("initialize", protocolVersion=1, capabilities={"events": "all", "deltas": True})
        agent = repository.agent(self.server.base_url)
        started = daemon.call("start", clientRequestId="mend", agent=agent, input=GOAL)
        assert started["replayed"] is bool(self.run_id)
        self.run_id = self.run_id or started["runId"]
        assert started["runId"] == self.run_id
        return daemon

    def answer(self, daemon: Daemon) -> None:
        """The open question, as somebody answers it who has looked."""
        (question,) = daemon.call("status", runId=self.run_id)["approvals"]
        assert question["kind"] == "unknown_outcome"
        command = question["subject"]["arguments"]["command"]
        decision = self.repository.truth(command)
        named = {name: question[name] for name in ("approvalId", "digest")}
        result = {"result": NO_OUTPUT} if decision == "happened" else {}
        key = f"truth/{len(self.asked)}"
        daemon.call("approve", clientRequestId=key, runId=self.run_id, decision=decision, **named, **result)
        self.asked.append((command, decision))

    def finished(self, daemon: Daemon) -> dict[str, Any]:
        shown = daemon.until(self.run_id, lambda answer: answer["run"]["status"] not in {"ready", "running"})
        assert (shown["run"]["status"], shown["run"]["output"]) == ("completed", TURNS[-1]["text"]), shown
        return shown

    def calls(self) -> list[ModelCall]:
        """What the model was asked; each history was one that a strict provider takes."""
        calls = self.server.calls()
        assert [history_problem(call.body) for call in calls] == [""] * len(calls)
        assert {call.key for call in calls} == {"right"}
        return calls

    def told(self) -> list[Any]:
        return history(self.calls()[-1].messages, self.repository.workspace)


def events_of(daemon: Daemon, run_id: str) -> list[dict[str, Any]]:
    elements = daemon.call("events", runId=run_id, limit=1_000)["events"]
    assert [element["seq"] for element in elements] == list(range(1, len(elements) + 1))
    return [element["event"] for element in elements]


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    stage = Stage(tmp_path / "broken", monkeypatch)
    yield stage
    stage.close()


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """What came of it where nothing was killed."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        stage = Stage(tmp_path_factory.mktemp("unbroken") / "copy", monkeypatch)
        with stage.opened() as daemon:
            status = stage.finished(daemon)
            events = events_of(daemon, stage.run_id)
            notes = daemon.notes
        yield {
            "status": status,
            "events": events,
            "deltas": "".join(
                n["params"]["text"]
                for n in notes
                if n["method"] == "run/delta" and n["params"].get("stream", "answer") == "answer"
            ),
            "printed": "".join(
                n["params"]["text"]
                for n in notes
                if n["method"] == "run/delta" and n["params"].get("stream") == "output"
            ),
            "calls": stage.calls(),
            "told": stage.told(),
            "trace": stage.repository.trace(),
            "result": stage.repository.result(),
        }
        stage.close()


def test_unbroken_each_command_is_run_once_and_each_answer_is_asked_for_once(unbroken: dict[str, Any]) -> None:
    assert unbroken["trace"] == {
        STATUS: (2, 2),
        LIST: (1, 1),
        TEST: (2, 2),
        DIFF: (1, 1),
        COMMIT_AS_ARGUMENTS: (1, 1),
    }
    assert [(call.turn, call.ended) for call in unbroken["calls"]] == [(n, "answered") for n in range(6)]
    assert unbroken["deltas"] == "".join(turn["text"] for turn in TURNS)
    assert "FAILED (failures=1)" in unbroken["printed"]
    assert "+    return sum(price * count for price, count in items)" in unbroken["printed"]
    assert unbroken["status"]["budget"]["spent"]["tokens"] == 6 * 18
    result = unbroken["result"]
    assert (result["left over"], result["tests pass"], result["messages"]) == ("", True, f"{MESSAGE}\n\nTotals\n\n")


def test_unbroken_the_model_is_told_what_really_happened(unbroken: dict[str, Any]) -> None:
    system = "You mend programs. Be brief.\n\n# AGENTS.md\n\n" + repository.FILES["AGENTS.md"]
    assert unbroken["told"][:2] == [("system", system, []), ("user", GOAL, [])]
    texts = [text for role, text, _ in unbroken["told"] if role == "tool"]
    assert texts[:2] == [NO_OUTPUT, "AGENTS.md\nprices\ntests\n"]
    assert [
        text.startswith(repository.FILES[f"{name}.py"])
        for text, name in zip(texts[2:4], ("prices/total", "tests/test_total"), strict=True)
    ] == [True, True]
    assert "AssertionError: 350 != 600" in texts[4]
    assert texts[4].startswith("Error: ")
    assert texts[4].endswith("\n[exit code 1]")
    assert texts[5].startswith("prices/total.py is written: ")
    assert texts[6].endswith("Ran 2 tests in TIME\n\nOK\n")
    assert f"-    return {repository.WRONG}\n+    return {repository.RIGHT}\n" in texts[7]
    assert texts[8:] == [" M prices/total.py\n", NO_OUTPUT]


def test_unbroken_what_only_reads_goes_side_by_side_and_what_does_not_goes_alone(unbroken: dict[str, Any]) -> None:
    kinds = [event["type"] for event in unbroken["events"] if event["type"] in {"tool_started", "tool_completed"}]
    begin, end = "tool_started", "tool_completed"
    assert kinds == [*[begin] * 4, *[end] * 4, *[begin, end] * 3, begin, begin, end, end, begin, end]


@pytest.mark.parametrize("commit", ["before", "after"])
def test_f047_f075_killed_five_times_the_repository_is_the_same_and_nothing_was_done_twice(
    stage: Stage, unbroken: dict[str, Any], commit: str
) -> None:
    in_a_command_that_reads(stage)
    inside_the_tests(stage)
    while_an_answer_streams(stage)
    between_an_edit_and_its_record(stage)
    around_the_commit(stage, commit)
    with stage.opened() as daemon:
        stage.answer(daemon)
        status = stage.finished(daemon)
        answers = [event for event in events_of(daemon, stage.run_id) if event["type"] == "model_answered"]

    happened = commit == "after"
    assert stage.asked == [(TEST, "did_not_happen"), (COMMIT, "happened" if happened else "did_not_happen")]
    assert stage.repository.result() == unbroken["result"]
    assert stage.repository.trace() == {
        STATUS: (3, 2),  # the first one was cut off, and may be run again
        LIST: (1, 1),
        TEST: (3, 2),  # the first one was cut off, and a person said so
        DIFF: (1, 1),
        COMMIT_AS_ARGUMENTS: (1, 1) if happened else (2, 1),
    }
    expected = [(0, "answered"), (1, "answered"), (2, "gone"), *[(n, "answered") for n in range(2, 6)]]
    assert [(call.turn, call.ended) for call in stage.calls()] == expected
    assert [answer["text"] for answer in answers] == [turn["text"] for turn in TURNS]
    assert status["budget"]["spent"]["tokens"] == 6 * 18
    # To the model it looks as if nothing had happened, but for the one word about an edit that was sent again.
    assert [(role, text.replace("was already so", "is written"), asked) for role, text, asked in stage.told()] == (
        unbroken["told"]
    )


def in_a_command_that_reads(stage: Stage) -> None:
    """Its neighbours of the same answer have ended and are recorded; they are not run again."""
    stage.repository.park("before", "git status")
    with stage.opened() as daemon:
        pid = stage.repository.parked()
        daemon.until(stage.run_id, lambda answer: [step["status"] for step in answer["steps"]].count("completed") == 4)
        daemon.kill()
    gone(pid)


def inside_the_tests(stage: Stage) -> None:
    stage.repository.park("before", "python3 -m")
    with stage.opened() as daemon:
        pid = stage.repository.parked()
        daemon.kill()
    gone(pid)


def while_an_answer_streams(stage: Stage) -> None:
    stage.server.fault("park", after=4)
    with stage.opened() as daemon:
        stage.answer(daemon)
        stage.server.wait("held")
        daemon.kill()
    stage.server.wait("gone")


def between_an_edit_and_its_record(stage: Stage) -> None:
    with stage.opened(rig=("--pause", "after_reply")) as daemon:
        daemon.reports(1)
        daemon.kill()
    assert repository.RIGHT in (stage.repository.workspace / "prices/total.py").read_text()


def around_the_commit(stage: Stage, point: str) -> None:
    """`before`: the command has begun and has not committed; `after`: it has, and that is not recorded."""
    stage.repository.park(point, "git commit")
    with stage.opened() as daemon:
        pid = stage.repository.parked()
        daemon.kill()
    gone(pid)
