"""The wall clock is set by days, under the daemon and between two of them. S4-74, F105.

While a daemon runs, its time goes on by a clock that nobody can set: nothing comes due early, nothing late. Between two, what
the wall says counts, for time passes while no daemon runs; it never counts back behind what the log has seen.
"""

from __future__ import annotations

import select
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.process.nursery import Nursery
from tests.process.outside import Seen, agent, seen, step_of
from tests.process.wire_driver import WAIT_S, Daemon, refused
from tests.service.driver import CountingService

pytestmark = pytest.mark.process

DAYS = 3 * 86_400
ASK = ({"effect": "at_most_once", "do": "ask", "expires": "1h"},)
ASK_FOR_EVER = ({"effect": "at_most_once", "do": "ask"},)
HOUR_S = 3_600


@pytest.fixture
def service(tmp_path: Path) -> Iterator[CountingService]:
    with CountingService(tmp_path / "truth") as service:
        yield service


@dataclass
class Clocked:
    """Daemons on one store whose wall clock the test sets."""

    nursery: Nursery
    service: CountingService
    store: Path
    wall: Path

    def daemon(self, *options: str, rig: tuple[str, ...] = ()) -> Daemon:
        return self.nursery.daemon(self.store, *options, rig=("--wall-clock", str(self.wall), *rig))

    def set(self, seconds: int) -> None:
        """Off by so much from now on; at once, as a reader sees it."""
        new = self.wall.with_suffix(".new")
        new.write_text(str(seconds))
        new.rename(self.wall)

    def start(
        self, daemon: Daemon, key: str, effect: Any = "at_most_once", labels: dict[str, str] | None = None, **more: Any
    ) -> str:
        """Answered when the run rests: it waits for a person or the clock, or is over."""
        params = {"clientRequestId": key, "agent": agent(self.service, effect, key, **more), "input": ""}
        run_id: str = daemon.call("start", **params, labels=labels or {}, waitMs=20_000)["runId"]
        return run_id

    def put_off(self, daemon: Daemon, key: str, seconds: int) -> str:
        """A run whose call is to be sent again after so long."""
        self.service.fault("before_effect", f"error:503:{seconds}", operation=key)
        run_id = self.start(daemon, key, "idempotent")
        shown = daemon.call("status", runId=run_id)
        assert shown["run"]["retryAt"]
        return run_id


@pytest.fixture
def clocked(nursery: Nursery, service: CountingService, tmp_path: Path) -> Clocked:
    clocked = Clocked(nursery, service, tmp_path / "store", tmp_path / "wall")
    clocked.set(0)
    return clocked


def question_of(daemon: Daemon, run_id: str) -> dict[str, Any]:
    [question] = daemon.call("status", runId=run_id)["approvals"]
    return dict(question)


def answer_to(question: dict[str, Any], decision: str) -> dict[str, Any]:
    named = {name: question[name] for name in ("runId", "approvalId", "digest")}
    return {**named, "decision": decision, "clientRequestId": "answer"}


def instants(daemon: Daemon, run_id: str) -> list[datetime]:
    return [datetime.fromisoformat(one["at"]) for one in daemon.call("events", runId=run_id, limit=1_000)["events"]]


def over(shown: dict[str, Any]) -> bool:
    return bool(shown["run"]["status"] == "completed")


@pytest.mark.parametrize("jump", [DAYS, -DAYS], ids=["forwards", "backwards"])
def test_a_clock_that_is_set_under_the_daemon_makes_nothing_due_early_or_late(clocked: Clocked, jump: int):
    with clocked.daemon() as daemon:
        daemon.listen()
        asked, later = clocked.start(daemon, "asked", rules=ASK), clocked.put_off(daemon, "later", HOUR_S)
        question, put_off = question_of(daemon, asked), daemon.call("status", runId=later)["run"]
        soon = clocked.put_off(daemon, "soon", 1)
        clocked.set(jump)
        daemon.until(soon, over)  # not three days later
        took = instants(daemon, soon)[-1] - instants(daemon, soon)[0]
        assert timedelta(seconds=1) <= took < timedelta(seconds=60)
        new = clocked.start(daemon, "new", "idempotent")
        every = [
            *instants(daemon, asked),
            *instants(daemon, later),
            *instants(daemon, soon)[-1:],
            *instants(daemon, new),
        ]
        assert (every, every[-1] - every[0] < timedelta(seconds=60)) == (sorted(every), True)
        assert question_of(daemon, asked) == question
        assert daemon.call("status", runId=later)["run"] == put_off
        assert daemon.call("approve", **answer_to(question, "allow"))["approval"]["decision"] == "allow"
        daemon.until(asked, over)
    effects = {key: seen(clocked.service, key) for key in ("asked", "later", "soon", "new")}
    assert effects == {"asked": Seen(1, 1), "later": Seen(1, 0), "soon": Seen(2, 1), "new": Seen(1, 1)}


def test_what_came_due_while_no_daemon_ran_is_due_before_any_answer_and_stays_so_when_the_clock_goes_back_s4_74(
    clocked: Clocked,
):
    with clocked.daemon() as daemon:
        asked, later = clocked.start(daemon, "asked", rules=ASK), clocked.put_off(daemon, "later", HOUR_S)
        for_ever = clocked.start(daemon, "for-ever", rules=ASK_FOR_EVER)
        question, kept = question_of(daemon, asked), question_of(daemon, for_ever)
        daemon.kill()
    clocked.set(DAYS)
    with clocked.daemon() as daemon:
        with refused("INVALID_STATE") as caught:
            daemon.call("approve", **answer_to(question, "allow"))
        assert caught[0].data["approval"] == "expired"
        daemon.listen()
        for run_id in (asked, later):
            daemon.until(run_id, over)
        assert step_of(daemon.call("status", runId=asked))["status"] == "denied"
        assert instants(daemon, asked)[-1] - instants(daemon, asked)[0] > timedelta(days=2)
        assert question_of(daemon, for_ever) == kept
        before = {run_id: instants(daemon, run_id) for run_id in (asked, later, for_ever)}
        daemon.kill()
    clocked.set(-DAYS)
    with clocked.daemon() as daemon:
        with refused("INVALID_STATE") as caught:
            daemon.call("approve", **answer_to(question, "allow"))
        assert caught[0].data["approval"] == "expired"
        assert {run_id: instants(daemon, run_id) for run_id in before} == before
        daemon.listen()
        daemon.call("approve", **answer_to(kept, "allow"))
        daemon.until(for_ever, over)
        assert instants(daemon, for_ever) == sorted(instants(daemon, for_ever))
        assert instants(daemon, for_ever)[-1] >= max(instant for run in before.values() for instant in run)
    effects = {key: seen(clocked.service, key) for key in ("asked", "later", "for-ever")}
    assert effects == {"asked": Seen(0, 0, 0), "later": Seen(2, 1), "for-ever": Seen(1, 1)}


def test_a_clock_that_went_back_between_two_daemons_keeps_questions_waits_and_their_order_s4_74(clocked: Clocked):
    with clocked.daemon() as daemon:
        asked, later = clocked.start(daemon, "asked", rules=ASK), clocked.put_off(daemon, "later", HOUR_S)
        question, put_off = question_of(daemon, asked), daemon.call("status", runId=later)["run"]
        daemon.kill()
    clocked.set(-DAYS)
    with clocked.daemon() as daemon:
        daemon.listen()
        assert question_of(daemon, asked) == question
        assert daemon.call("status", runId=later)["run"] == put_off
        new = clocked.start(daemon, "new", "idempotent")
        assert instants(daemon, new)[0] >= max(instants(daemon, asked) + instants(daemon, later))
        assert [run["runId"] for run in daemon.call("list")["runs"]] == [asked, later, new]
        daemon.call("approve", **answer_to(question, "allow"))
        daemon.until(asked, over)
        assert instants(daemon, asked) == sorted(instants(daemon, asked))
    effects = {key: seen(clocked.service, key) for key in ("asked", "later", "new")}
    assert effects == {"asked": Seen(1, 1), "later": Seen(1, 0), "new": Seen(1, 1)}


RETENTION = """
[retention]
rules = [{ label = "brief", after = "1ms" }, { after = "1d" }]
"""
TIDY = ("--checkpoint-every", "4", "--tidy-every", "50")


def until_tidied(clocked: Clocked, daemon: Daemon, key: str) -> None:
    """Runs that need not be kept at all come and go: by then, all that is due was looked at."""
    brief = clocked.start(daemon, key, "read_only", labels={"brief": ""})
    end = time.monotonic() + WAIT_S
    while brief in {run["runId"] for run in daemon.call("list", limit=100)["runs"]}:
        assert time.monotonic() < end, "it is not deleted"
        select.select([daemon._out()], [], [], 0.02)


def test_retention_goes_by_the_time_that_passed_and_not_by_a_clock_that_is_set_under_the_daemon(
    clocked: Clocked, tmp_path: Path
):
    config = tmp_path / "config.toml"
    config.write_text(RETENTION)
    with clocked.daemon("--config", str(config), rig=TIDY) as daemon:
        daemon.listen()
        paid = clocked.start(daemon, "paid")
        for number, seconds in enumerate((DAYS, -DAYS)):
            clocked.set(seconds)
            until_tidied(clocked, daemon, f"brief-{number}")
            assert [run["runId"] for run in daemon.call("list")["runs"]] == [paid]
        daemon.kill()
    with clocked.daemon("--config", str(config), rig=TIDY) as daemon:  # three days ago, by the wall
        until_tidied(clocked, daemon, "brief-2")
        assert clocked.start(daemon, "paid") == paid
        daemon.kill()
    clocked.set(DAYS)
    with clocked.daemon("--config", str(config), rig=TIDY) as daemon:
        until_tidied(clocked, daemon, "brief-3")
        assert daemon.call("list")["runs"] == []
        with refused("KEY_EXPIRED"):
            clocked.start(daemon, "paid")
    assert seen(clocked.service, "paid") == Seen(1, 1)
