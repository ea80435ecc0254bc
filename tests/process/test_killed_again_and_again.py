"""SIGKILL at moments that nobody chose, many times over the same store: every effect once, every run at its end. P1-P5.

A person answers each question about an unknown outcome by what the service really saw, as an honest person would.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.process.outside import Effect, act, agent, seen
from tests.process.wire_driver import Daemon
from tests.service.driver import CountingService

pytestmark = pytest.mark.process

EFFECTS: tuple[Effect, ...] = ("read_only", "idempotent", "reconcilable", "at_most_once")
RUNS_OF_EACH = 3
ACTS = 6
KILLS = 20


@pytest.fixture
def service(tmp_path: Path) -> Iterator[CountingService]:
    with CountingService(tmp_path / "truth") as service:
        yield service


def operations(key: str) -> list[str]:
    return [f"{key} {number}" for number in range(ACTS)]


def start_all(daemon: Daemon, service: CountingService) -> dict[str, str]:
    """The same requests each time: the answers of the first time may be lost, so all of it is sent again."""
    sent = {}
    for effect in EFFECTS:
        for number in range(RUNS_OF_EACH):
            key = f"{effect}-{number}"
            script = [*(act(operation) for operation in operations(key)), {"text": "done"}]
            described = agent(service, effect, key, script=script)
            sent[key] = daemon.send("start", clientRequestId=key, agent=described, input=key)
    return {key: daemon.result(ident)["runId"] for key, ident in sent.items()}


def answer_honestly(daemon: Daemon, service: CountingService) -> int:
    """Answers all open questions; how many there were."""
    answered = 0
    for question in daemon.call("list", openApprovals=True, limit=100)["approvals"]:
        assert question["kind"] == "unknown_outcome"
        service.clear()  # a round trip: what the dead daemon had sent has arrived before it
        operation = question["subject"]["arguments"]["operation"]
        named = {name: question[name] for name in ("runId", "approvalId", "digest")}
        decision = "happened" if seen(service, operation).effects else "did_not_happen"
        daemon.call("approve", clientRequestId=f"answer-{question['approvalId']}", decision=decision, **named)
        answered += 1
    return answered


def let_it_work(daemon: Daemon, events: int) -> None:
    """Until so many events of runs have come, or nothing goes on without an answer of a person."""
    end = len(daemon.notes) + events
    while len(daemon.notes) < end:
        health = daemon.call("status")
        moving = sum(health["counts"].get(status, 0) for status in ("running", "waiting")) - len(
            health["needsAttention"]
        )
        if len(daemon.notes) < end:
            if moving <= 0:
                return
            daemon.take(daemon.message())


@pytest.mark.parametrize("seed", [1, 2])
def test_after_many_kills_every_effect_happened_once_and_every_run_is_at_its_end(
    service: CountingService, tmp_path: Path, seed: int
):
    chance = random.Random(seed)
    store, questions = tmp_path / "store", 0
    runs: dict[str, str] = {}
    for _ in range(KILLS):
        with Daemon(store) as daemon:
            daemon.listen()
            again = start_all(daemon, service)
            assert all(again[key] == run_id for key, run_id in runs.items())
            runs = again
            questions += answer_honestly(daemon, service)
            if daemon.call("status")["counts"].get("completed") == len(runs):
                break
            let_it_work(daemon, chance.randrange(1, 12))
            daemon.kill()
    with Daemon(store) as daemon:
        daemon.listen()
        while daemon.call("status")["counts"] != {"completed": len(runs)}:
            questions += answer_honestly(daemon, service)
            let_it_work(daemon, 1)
        attempts = check_each(daemon, service, runs)
    print(f"seed {seed}: {len(runs)} runs, {attempts} attempts at {len(runs) * ACTS} calls, {questions} questions")
    assert attempts > len(runs) * ACTS  # the kills did hit something


def check_each(daemon: Daemon, service: CountingService, runs: dict[str, str]) -> int:
    attempts = 0
    for key, run_id in runs.items():
        shown = daemon.call("status", runId=run_id)
        calls = [step for step in shown["steps"] if step["kind"] == "tool_call"]
        attempts += sum(step["attempt"] for step in calls)
        assert shown["run"]["output"] == "done"
        assert [step["status"] for step in calls] == ["completed"] * ACTS
        assert [step["arguments"]["operation"] for step in calls] == operations(key)
        effect = key.rpartition("-")[0]
        for operation, step in zip(operations(key), calls, strict=True):
            found = seen(service, operation)
            assert found.effects == (0 if effect == "read_only" else 1), (operation, found, step)
            assert found.calls <= step["attempt"]
            assert found.keys <= 1
        elements: list[dict[str, Any]] = daemon.call("events", runId=run_id, limit=1_000)["events"]
        assert [element["seq"] for element in elements] == list(range(1, shown["run"]["lastSeq"] + 1))
    return attempts
