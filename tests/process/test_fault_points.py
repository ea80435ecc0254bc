"""SIGKILL at every fault point of a step, for every effect class. P1-P4; S0-32, S4-49, F047, F075.

F0 before the intent is durable; F1 intent durable, nothing has left; F2 the effect happened, its reply did not come; F3 the
reply came, its record is not durable; F4 the record is durable, nobody was told; F5 the answer was written and not read.

F2 is made by the service, which parks the call after its effect; F5 by a reader that throws the answers away; the others by
`rigged_daemon`. The daemon after the kill is always the ordinary one. Counts are those of the service, another process.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
from tests.process.outside import Effect, Seen, act, agent, keys_seen, seen, step_of
from tests.process.wire_driver import Daemon, refused
from tests.service.driver import CountingService

pytestmark = pytest.mark.process

Fault = Literal["F0", "F1", "F2", "F3", "F4", "F5"]
RIGS: dict[Fault, tuple[str, ...]] = {
    "F0": ("--pause", "before_append:tool_started"),
    "F1": ("--pause", "before_call"),
    "F2": (),
    "F3": ("--pause", "after_reply"),
    "F4": ("--pause", "after_append:tool_completed"),
    "F5": (),
}
SUBJECTS: dict[str, Effect] = {
    "read_only": "read_only",
    "idempotent": "idempotent",
    "reconcilable": "reconcilable",
    "at_most_once": "at_most_once",
    "at_most_once did_not_happen": "at_most_once",
    "at_most_once abandon": "at_most_once",
}
"""The third word is what the person says, where one is asked; without it: happened."""

REPLY, LOOKED_UP, PERSON, NOBODY = '"ok": true', '"status": "done"', "receipt 7", "Unknown outcome"


@dataclass(frozen=True)
class Cell:
    """What must be so in the end: what the service saw, the attempt, where the outcome came from, what the model was told."""

    seen: Seen
    attempt: int = 1
    source: str | None = "tool"
    told: str = REPLY
    asked: bool = False


ONCE = Cell(Seen(1, 1))
READ_ONCE = Cell(Seen(1, 0, 0))
READ_TWICE = Cell(Seen(2, 0, 0), attempt=2)
KEYED = Cell(Seen(2, 1), attempt=2)
FOUND = Cell(Seen(1, 1), source="look_up", told=LOOKED_UP)
TOLD = Cell(Seen(1, 1), source="person", told=PERSON, asked=True)
ABANDONED = Cell(Seen(1, 1), source=None, told=NOBODY, asked=True)
AFTER_F2: dict[str, Cell] = {
    "read_only": READ_TWICE,
    "idempotent": KEYED,
    "reconcilable": FOUND,
    "at_most_once": TOLD,
    # The person was wrong, and was obeyed: the price of a tool without a contract.
    "at_most_once did_not_happen": Cell(Seen(2, 2), attempt=2, asked=True),
    "at_most_once abandon": ABANDONED,
}
CONFIRMED = {name: READ_ONCE if effect == "read_only" else ONCE for name, effect in SUBJECTS.items()}
EXPECTED: dict[Fault, dict[str, Cell]] = {
    "F0": CONFIRMED,
    "F1": {
        "read_only": Cell(Seen(1, 0, 0), attempt=2),
        "idempotent": Cell(Seen(1, 1), attempt=2),
        "reconcilable": Cell(Seen(1, 1), attempt=2),
        # Here it is `happened` that is wrong.
        "at_most_once": Cell(Seen(0, 0, 0), source="person", told=PERSON, asked=True),
        "at_most_once did_not_happen": Cell(Seen(1, 1), attempt=2, asked=True),
        "at_most_once abandon": Cell(Seen(0, 0, 0), source=None, told=NOBODY, asked=True),
    },
    "F2": AFTER_F2,
    "F3": AFTER_F2,
    "F4": CONFIRMED,
    "F5": CONFIRMED,
}
WRONG_ANSWERS = {
    ("F1", "at_most_once"), ("F2", "at_most_once did_not_happen"), ("F3", "at_most_once did_not_happen"),
}  # fmt: skip
ABANDONED_UNDONE = ("F1", "at_most_once abandon")


@dataclass
class Killed:
    """A store whose daemon was killed with all its runs at one fault point, and the ordinary daemon after it."""

    fault: Fault
    daemon: Daemon
    service: CountingService
    runs: dict[str, str]

    def operation(self, subject: str) -> str:
        return f"{self.fault} {subject}"


def begin(daemon: Daemon, service: CountingService, fault: Fault) -> dict[str, str]:
    """One run of each subject, with its model's answer recorded: the next step is the call."""
    runs = {}
    for subject, effect in SUBJECTS.items():
        operation = f"{fault} {subject}"
        script = [act(operation), {"expect": EXPECTED[fault][subject].told, "text": "done"}]
        run_id = daemon.call(
            "start",
            clientRequestId=operation.replace(" ", "-"),
            agent=agent(service, effect, operation, script=script),
            input=operation,
            drive="manual",
        )["runId"]
        daemon.call("step", runId=run_id, clientRequestId="model")
        runs[subject] = run_id
    return runs


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CountingService]:
    with CountingService(tmp_path_factory.mktemp("service") / "truth") as service:
        yield service


@pytest.fixture(scope="module", params=list(RIGS))
def killed(
    request: pytest.FixtureRequest, service: CountingService, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Killed]:
    fault: Fault = request.param
    store = tmp_path_factory.mktemp(fault) / "store"
    with Daemon(store, rig=RIGS[fault]) as daemon:
        runs = begin(daemon, service, fault)
        if fault == "F2":
            service.park("after_effect", times=len(runs))
        for run_id in runs.values():
            daemon.send("step", runId=run_id, clientRequestId="act")
        if fault == "F2":
            service.wait_parked(20, point="after_effect", count=len(runs))
        elif fault == "F5":
            daemon.throw_away(lines=len(runs))
        else:
            assert {report["runId"] for report in daemon.reports(len(runs))} == set(runs.values())
        daemon.kill()
    with Daemon(store) as daemon:
        yield Killed(fault, daemon, service, runs)
        assert daemon.stop() == 0
    service.release()


def answer_the_question(killed: Killed, run_id: str, decision: str) -> None:
    daemon = killed.daemon
    with refused("UNKNOWN_OUTCOME") as caught:
        daemon.call("step", runId=run_id, clientRequestId="too-early")
    [question] = daemon.call("status", runId=run_id)["approvals"]
    assert (question["kind"], question["choices"]) == ("unknown_outcome", ["happened", "did_not_happen", "abandon"])
    assert [one["approvalId"] for one in caught[0].data["approvals"]] == [question["approvalId"]]
    answer = {"runId": run_id, "approvalId": question["approvalId"], "digest": question["digest"]}
    more = {"result": PERSON} if decision == "happened" else {}
    decided = daemon.call("approve", clientRequestId="answer", decision=decision, **answer, **more)
    told = {"approvalId": question["approvalId"], "kind": "unknown_outcome", "decision": decision, "already": False}
    assert decided["approval"] == told
    if decision == "did_not_happen":
        again = daemon.call("step", runId=run_id, clientRequestId="again")["step"]
        assert (again["status"], again["attempt"]) == ("completed", 2)


def request_state(killed: Killed, run_id: str) -> str:
    shown = killed.daemon.call("status", runId=run_id, clientRequestId="act")["request"]
    state: str = shown["state"]
    return state


@pytest.mark.parametrize("subject", SUBJECTS)
def test_after_a_kill_an_effect_is_neither_repeated_nor_lost_s0_32_s2_27_s4_48_s4_49_f047_f075(
    killed: Killed, subject: str
):
    daemon, run_id, cell = killed.daemon, killed.runs[subject], EXPECTED[killed.fault][subject]
    if killed.fault in {"F0", "F4", "F5"} or cell.asked:
        assert request_state(killed, run_id) == ("unknown" if killed.fault == "F0" else "settled")

    answer = daemon.call("step", runId=run_id, clientRequestId="act")

    if cell.asked:
        assert (answer["step"]["status"], answer["step"]["attempt"], answer["replayed"]) == ("unknown", 1, True)
        answer_the_question(killed, run_id, subject.partition(" ")[2] or "happened")
    else:
        assert (answer["step"]["status"], answer["step"]["attempt"]) == ("completed", cell.attempt)
    if killed.fault in {"F0", "F4", "F5"}:
        assert answer["replayed"] is (killed.fault != "F0")
    daemon.call("step", runId=run_id, clientRequestId="finish")
    shown = daemon.call("status", runId=run_id)
    assert (shown["run"]["status"], shown["run"].get("output"), shown["run"].get("error")) == (
        "completed",
        "done",
        None,
    )
    step = step_of(shown)
    assert (step["attempt"], step.get("source")) == (cell.attempt, cell.source)
    assert step["status"] == ("unknown" if cell.source is None else "completed")
    assert seen(killed.service, killed.operation(subject)) == cell.seen
    if cell.seen.keys:
        assert keys_seen(killed.service, killed.operation(subject)) == {step["key"]}
    once_more = daemon.call("step", runId=run_id, clientRequestId="act")
    assert (once_more["step"], once_more["replayed"]) == (answer["step"], True)


def test_the_whole_matrix_has_no_double_and_no_lost_effect_where_the_answers_of_people_were_true(
    service: CountingService,
):
    doubles, lost, cells = [], [], 0
    for fault, row in EXPECTED.items():
        for subject in row:
            if SUBJECTS[subject] == "read_only" or (fault, subject) in {*WRONG_ANSWERS, ABANDONED_UNDONE}:
                continue
            cells += 1
            effects = seen(service, f"{fault} {subject}").effects
            doubles += [(fault, subject)] * (effects > 1)
            lost += [(fault, subject)] * (effects < 1)
    print(f"{cells} cells with an effect: {len(doubles)} doubles, {len(lost)} lost")
    assert (cells, doubles, lost) == (26, [], [])


def test_a_request_that_outlives_the_daemon_is_still_one_effect_f075(service: CountingService, tmp_path: Path):
    """The call is parked at the service before its effect. On disk this is F1; but what left will arrive after the kill."""
    store, fault = tmp_path / "store", "F1"
    effects: tuple[Effect, ...] = ("idempotent", "reconcilable", "at_most_once")
    script: dict[Effect, list[dict[str, Any]]] = {e: [act(f"late {e}"), {"text": "done"}] for e in effects}
    with Daemon(store) as daemon:
        service.park("before_effect", times=3)
        runs = {
            effect: daemon.call(
                "start", clientRequestId=effect, agent=agent(service, effect, fault, script=script[effect]), input=""
            )["runId"]
            for effect in effects
        }
        service.wait_parked(20, point="before_effect", count=3)
        daemon.kill()
    with Daemon(store) as daemon:
        daemon.listen()
        daemon.until(runs["idempotent"], lambda shown: shown["run"]["status"] == "completed")
        shown = daemon.until(runs["reconcilable"], lambda shown: step_of(shown).get("lookUp") == "pending")
        assert (shown["run"]["status"], step_of(shown)["attempt"]) == ("waiting", 1)
        [question] = daemon.call("status", runId=runs["at_most_once"])["approvals"]
        service.release("before_effect")
        daemon.until(runs["reconcilable"], lambda shown: shown["run"]["status"] == "completed")
        decision = {"approvalId": question["approvalId"], "digest": question["digest"], "decision": "happened"}
        daemon.call("approve", runId=runs["at_most_once"], clientRequestId="yes", **decision)
        daemon.until(runs["at_most_once"], lambda shown: shown["run"]["status"] == "completed")
    assert {effect: seen(service, f"late {effect}") for effect in effects} == {
        "idempotent": Seen(2, 1),
        "reconcilable": Seen(1, 1),
        "at_most_once": Seen(1, 1),
    }
