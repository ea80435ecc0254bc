"""Recovery `confirm` and `manual`: after a kill nothing acts before `resume`. S0-24, S0-25."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.process.outside import Effect, Seen, act, agent, seen, step_of
from tests.process.wire_driver import Daemon, refused
from tests.service.driver import CountingService

pytestmark = pytest.mark.process

NEVER = "sha256:" + "0" * 64
BEFORE_CALL = ("--pause", "before_call")


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CountingService]:
    with CountingService(tmp_path_factory.mktemp("service") / "truth") as service:
        yield service


def start(daemon: Daemon, described: dict[str, Any], recovery: str, **more: Any) -> str:
    run_id: str = daemon.call("start", clientRequestId="run", agent=described, input="", recovery=recovery, **more)[
        "runId"
    ]
    return run_id


def killed_in_mid_effect(
    store: Path, service: CountingService, effect: Effect, operation: str, recovery: str, *, arrived: bool
) -> str:
    """A run whose daemon died with the call in flight; `arrived`: its effect happened (F2), else nothing left (F1)."""
    with Daemon(store, rig=() if arrived else BEFORE_CALL) as daemon:
        if arrived:
            service.park("after_effect")
        run_id = start(daemon, agent(service, effect, operation), recovery)
        if arrived:
            service.wait_parked(20)
        else:
            daemon.reports(1)
        daemon.kill()
    service.release()
    return run_id


def let_others_work(daemon: Daemon, service: CountingService, operation: str) -> None:
    """A run of this process goes all its way meanwhile: whoever was free to act has had every chance to."""
    described = agent(service, "at_most_once", operation, script=[act(operation), act(operation), {"text": "done"}])
    run = daemon.call(
        "start", clientRequestId=f"other-{operation}".replace(" ", "-"), agent=described, input="", waitMs=20_000
    )
    assert run["run"]["status"] == "completed"


def plan_of(shown: dict[str, Any]) -> dict[str, str]:
    """What is going to be done about which step."""
    assert (shown["run"]["status"], shown["run"]["resumeRequired"]) == ("ready", True)
    return {step["name"]: step["action"] for step in shown["run"]["recoveryPlan"]["steps"]}


def has_looked_up(shown: dict[str, Any], action: str) -> bool:
    """Not while it still asks; then the run is `running`."""
    return shown["run"]["status"] == "ready" and plan_of(shown)["outside.act"] == action


def resume(daemon: Daemon, run_id: str, shown: dict[str, Any]) -> dict[str, Any]:
    digest = shown["run"]["recoveryPlan"]["planDigest"]
    with refused("STALE_DIGEST") as caught:
        daemon.call("resume", runId=run_id, clientRequestId="stale", planDigest=NEVER)
    assert caught[0].data["digest"] == digest
    answer = daemon.call("resume", runId=run_id, clientRequestId="go", planDigest=digest, waitMs=20_000)
    assert answer["recovery"] == {"released": True, **shown["run"]["recoveryPlan"]}
    return answer


WHAT_FOLLOWS: list[tuple[Effect, bool, str, Seen, Seen, int]] = [
    ("read_only", True, "again", Seen(1, 0, 0), Seen(2, 0, 0), 2),
    ("idempotent", True, "again", Seen(1, 1), Seen(2, 1), 2),
    ("idempotent", False, "again", Seen(0, 0, 0), Seen(1, 1), 2),
    ("reconcilable", True, "look_up", Seen(1, 1), Seen(1, 1), 1),
    ("reconcilable", False, "look_up", Seen(0, 0, 0), Seen(1, 1), 2),
]


@pytest.mark.parametrize(("effect", "arrived", "action", "before", "after", "attempt"), WHAT_FOLLOWS)
@pytest.mark.parametrize("recovery", ["manual", "confirm"])
def test_after_a_kill_a_held_run_shows_its_plan_and_does_exactly_that_when_it_is_released_s0_24_s0_25(
    service: CountingService, tmp_path: Path, recovery: str, effect: Effect, arrived: bool, action: str, before: Seen,
    after: Seen, attempt: int, request: pytest.FixtureRequest,
):  # fmt: skip
    operation = request.node.callspec.id
    run_id = killed_in_mid_effect(tmp_path / "store", service, effect, operation, recovery, arrived=arrived)
    with Daemon(tmp_path / "store") as daemon:
        daemon.listen()
        if recovery == "confirm" and effect == "reconcilable":
            # Only this is done without a word of anybody: it reads, and makes the plan a better one.
            action = "reuse" if arrived else "again"
            looked = daemon.until(run_id, lambda shown: has_looked_up(shown, action))
            assert step_of(looked).get("lookUp") == (None if arrived else "absent")
        let_others_work(daemon, service, f"beside {operation}")
        shown = daemon.call("status", runId=run_id)
        assert plan_of(shown) == {"default": "reuse", "outside.act": action}
        assert {"runId": run_id, "kind": "resume", "since": shown["run"]["updatedAt"]} in daemon.call("status")[
            "needsAttention"
        ]
        assert seen(service, operation) == before

        answer = resume(daemon, run_id, shown)

        assert (answer["run"]["status"], answer["run"]["output"]) == ("completed", "done")
        done = step_of(daemon.call("status", runId=run_id))
        assert (done["attempt"], done.get("source")) == (attempt, "tool" if attempt == 2 else "look_up")
        plan = shown["run"]["recoveryPlan"]
        again = daemon.call("resume", runId=run_id, clientRequestId="go", planDigest=plan["planDigest"])
        assert (again["recovery"], again["replayed"]) == (answer["recovery"], True)
    assert seen(service, operation) == after


@pytest.mark.parametrize("recovery", ["manual", "confirm"])
def test_the_answer_about_an_unknown_outcome_does_not_release_a_held_run_s0_24(
    service: CountingService, tmp_path: Path, recovery: str
):
    operation = f"unknown {recovery}"
    run_id = killed_in_mid_effect(tmp_path / "store", service, "at_most_once", operation, recovery, arrived=False)
    with Daemon(tmp_path / "store") as daemon:
        shown = daemon.call("status", runId=run_id)
        assert plan_of(shown) == {"default": "reuse", "outside.act": "ask"}
        [question] = shown["approvals"]
        named = {"runId": run_id, "approvalId": question["approvalId"], "digest": question["digest"]}
        decided = daemon.call("approve", clientRequestId="answer", decision="did_not_happen", **named)
        assert (decided["run"]["status"], decided["run"]["resumeRequired"]) == ("ready", True)
        let_others_work(daemon, service, f"beside {operation}")
        assert seen(service, operation) == Seen(0, 0, 0)
        with refused("STALE_DIGEST"):  # it was asked about a plan that the answer has changed
            digest = shown["run"]["recoveryPlan"]["planDigest"]
            daemon.call("resume", runId=run_id, clientRequestId="old", planDigest=digest)
        shown = daemon.call("status", runId=run_id)
        assert plan_of(shown) == {"default": "reuse", "outside.act": "start"}
        assert resume(daemon, run_id, shown)["run"]["status"] == "completed"
    assert seen(service, operation) == Seen(1, 1)


@pytest.mark.parametrize("recovery", ["manual", "confirm"])
def test_an_approved_call_waits_for_resume_after_a_restart_s0_24(
    service: CountingService, tmp_path: Path, recovery: str
):
    operation = f"approved {recovery}"
    with Daemon(tmp_path / "store") as daemon:
        run_id = start(daemon, agent(service, "at_most_once", operation, rules=()), recovery, waitMs=20_000)
        [question] = daemon.call("status", runId=run_id)["approvals"]
        daemon.kill()
    with Daemon(tmp_path / "store") as daemon:
        named = {"runId": run_id, "approvalId": question["approvalId"], "digest": question["digest"]}
        daemon.call("approve", clientRequestId="answer", decision="allow", **named)
        let_others_work(daemon, service, f"beside {operation}")
        shown = daemon.call("status", runId=run_id)
        assert plan_of(shown) == {"default": "reuse", "outside.act": "start"}
        assert seen(service, operation) == Seen(0, 0, 0)
        daemon.kill()
    with Daemon(tmp_path / "store") as daemon:  # an earlier process's answer does not release it either
        let_others_work(daemon, service, f"beside {operation}")
        assert seen(service, operation) == Seen(0, 0, 0)
        assert resume(daemon, run_id, daemon.call("status", runId=run_id))["run"]["status"] == "completed"
    assert seen(service, operation) == Seen(1, 1)


@pytest.mark.parametrize("recovery", ["manual", "confirm"])
def test_a_timer_that_is_due_does_not_release_a_held_run_s0_24(service: CountingService, tmp_path: Path, recovery: str):
    operation = f"timer {recovery}"
    busy = {"fail": {"kind": "busy", "times": 1, "retryAfterMs": 1_500}, **act(operation)}
    with Daemon(tmp_path / "store") as daemon:
        described = agent(service, "at_most_once", operation, script=[busy, {"text": "done"}])
        run_id = start(daemon, described, recovery, waitMs=20_000)
        waiting = daemon.call("status", runId=run_id)["run"]
        assert waiting["status"] == "waiting"
        daemon.kill()
    with Daemon(tmp_path / "store") as daemon:
        daemon.listen()
        # Another wait, which began later and is as long, is over: so is the first one's.
        other = agent(service, "at_most_once", f"other {operation}", script=[busy, {"text": "done"}])
        other_id = daemon.call("start", clientRequestId="other", agent=other, input="")["runId"]
        daemon.until(other_id, lambda shown: shown["run"]["status"] == "completed")
        shown = daemon.call("status", runId=run_id)
        assert plan_of(shown) == {"default": "start"}
        assert seen(service, operation) == Seen(1, 1)  # that of the other
        assert resume(daemon, run_id, shown)["run"]["status"] == "completed"
    assert seen(service, operation).effects == 2


@pytest.mark.parametrize("recovery", ["manual", "confirm"])
def test_a_step_key_in_progress_waits_for_resume_and_is_then_brought_to_its_end_s0_24(
    service: CountingService, tmp_path: Path, recovery: str
):
    operation = f"key {recovery}"
    with Daemon(tmp_path / "store", rig=BEFORE_CALL) as daemon:
        run_id = start(daemon, agent(service, "idempotent", operation), recovery, drive="manual")
        daemon.call("step", runId=run_id, clientRequestId="model")
        daemon.send("step", runId=run_id, clientRequestId="act")
        daemon.reports(1)
        daemon.kill()
    with Daemon(tmp_path / "store") as daemon:
        joined = daemon.call("step", runId=run_id, clientRequestId="act", waitMs=1)
        assert joined["request"]["state"] == "in_progress"
        with refused("INVALID_STATE") as caught:
            daemon.call("step", runId=run_id, clientRequestId="another")
        assert (caught[0].data["resumeRequired"], caught[0].data["retryable"]) == (True, True)
        let_others_work(daemon, service, f"beside {operation}")
        assert seen(service, operation) == Seen(0, 0, 0)
        waiting = daemon.send("step", runId=run_id, clientRequestId="act", waitMs=20_000)
        resume(daemon, run_id, daemon.call("status", runId=run_id))
        step = daemon.result(waiting)["step"]
        assert (step["status"], step["attempt"]) == ("completed", 2)
    assert seen(service, operation) == Seen(1, 1)


def test_a_run_that_was_not_interrupted_is_held_after_a_restart_too_and_auto_ones_are_not_s0_24(tmp_path: Path):
    talker = {"model": {"script": [{"text": "done"}]}}
    with Daemon(tmp_path / "store") as daemon:
        run_ids = {
            recovery: daemon.call(
                "start", clientRequestId=recovery, agent=talker, input="", recovery=recovery, drive="manual"
            )["runId"]
            for recovery in ("auto", "confirm", "manual")
        }
        daemon.kill()
    with Daemon(tmp_path / "store") as daemon:
        for recovery, run_id in run_ids.items():
            shown = daemon.call("status", runId=run_id)["run"]
            assert (shown["status"], shown["resumeRequired"]) == ("ready", recovery != "auto")
            if recovery == "auto":
                daemon.call("step", runId=run_id, clientRequestId="model")
                continue
            with refused("INVALID_STATE"):
                daemon.call("step", runId=run_id, clientRequestId="model")
            assert daemon.call("resume", runId=run_id, clientRequestId="go")["recovery"]["released"] is True
            assert daemon.call("step", runId=run_id, clientRequestId="model")["run"]["status"] == "completed"
