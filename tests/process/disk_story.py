"""One story of requests that is told to a daemon until it dies, and then to the next one from the beginning.

Knows: what was acknowledged (each request's decision by its key, each open question), and that all of it must be there for
ever. People answer by the service's own books. Does not know: how and when the daemon dies.

The story: a payment at once (at_most_once), one by manual steps (idempotent), one that a person allows (reconcilable), one
that is asked about and denied after a restart, one whose question stays open, a run that is cancelled, and reads in between.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.process.outside import Seen, agent, seen
from tests.process.wire_driver import WAIT_S, Daemon
from tests.service.counting import read_truth
from tests.service.driver import CountingService

CHECKPOINT_EVERY = 14
"""Records of the log, for the daemons that the story is told to: some are made in the middle of it."""
RIG = ("--checkpoint-every", str(CHECKPOINT_EVERY))
LIVE = {"run", "replayed", "request"}
EXPECTED = {
    "pay": Seen(1, 1), "steps": Seen(1, 1), "asked": Seen(1, 1), "denied": Seen(0, 0, 0), "open": Seen(0, 0, 0),
    "dropped": Seen(0, 0, 0), "later": Seen(1, 1),
}  # fmt: skip


class Died(Exception):
    """The daemon ended in the middle of the story, by SIGKILL."""


class Story:
    """Told on one store; `mark` keeps its operations apart from those of other stories at the same service."""

    def __init__(self, service: CountingService, mark: str) -> None:
        self.acknowledged: dict[str, dict[str, Any]] = {}
        self.questions: dict[str, dict[str, Any]] = {}
        self._service = service
        self._mark = mark
        self._answering: set[str] = set()
        self._seen_whole = False

    # Telling

    def first(self, daemon: Daemon) -> None:
        daemon.listen()
        pay = self._start(daemon, "pay", "at_most_once")
        self._until_over(daemon, pay)
        steps = self._start(daemon, "steps", "idempotent", drive="manual")
        for key in ("model", "act", "say"):
            self._ask(daemon, "step", f"steps-{key}", runId=steps)
        asked = self._start(daemon, "asked", "reconcilable", rules=())
        self._answer(daemon, asked, "asked", "allow")
        self._until_over(daemon, asked)
        self._question(daemon, self._start(daemon, "open", "at_most_once", rules=()), "open")
        self._question(daemon, self._start(daemon, "denied", "at_most_once", rules=()), "denied")
        dropped = self._start(daemon, "dropped", "at_most_once", drive="manual")
        self._ask(daemon, "cancel", "dropped-no", runId=dropped, reason="no longer wanted")

    def second(self, daemon: Daemon) -> None:
        """On the same store, by the same daemon or the next."""
        daemon.listen()
        run_id = self.acknowledged["denied"]["runId"]
        self._answer(daemon, run_id, "denied", "deny")
        self._until_over(daemon, run_id)
        self._until_over(daemon, self._start(daemon, "later", "at_most_once"))
        self._seen_whole = True

    def stop(self, daemon: Daemon) -> None:
        """Cleanly, when no checkpoint is due any more."""
        health = daemon.once(lambda health: health["checkpoint"]["tailRecords"] < CHECKPOINT_EVERY)
        assert "trouble" not in health["checkpoint"]
        assert daemon.stop() == 0

    def until_death(self, tell: Callable[[Daemon], None], daemon: Daemon) -> None:
        """A part of the story, and a clean stop. Raises Died where the daemon was killed; whatever else went wrong goes up as
        it is."""
        try:
            tell(daemon)
            self.stop(daemon)
        except (AssertionError, OSError) as error:
            if daemon.exit_code(WAIT_S) == -9:
                raise Died from error
            raise

    # What must be so

    def look(self, daemon: Daemon) -> None:
        """By the first daemon after a death: everything that was acknowledged is there, and nothing else."""
        shown = {run["clientRequestId"]: run for run in daemon.call("list", limit=1_000)["runs"]}
        assert shown.keys() <= EXPECTED.keys()
        assert [run for run in shown.values() if run["status"] == "damaged"] == []
        for key, decision in self.acknowledged.items():
            if key in EXPECTED:
                assert shown[key]["runId"] == decision["runId"], key
        for key, question in self.questions.items():
            status = daemon.call("status", runId=question["runId"])
            if key not in self._answering:
                assert status["approvals"] == [question], key
        for run in shown.values():
            known = daemon.call("status", runId=run["runId"], clientRequestId=run["clientRequestId"])["request"]
            assert known["state"] == "settled"
        self.count(final=False)

    def count(self, *, final: bool) -> None:
        """No effect is there twice; at the end each is there once."""
        mine = [line for line in read_truth(self._service.truth) if line["operation"].startswith(f"{self._mark} ")]
        found = {key: _seen(mine, f"{self._mark} {key}") for key in EXPECTED}
        if final:
            effects = {key: (one.effects, one.keys) for key, one in found.items()}
            assert effects == {key: (one.effects, one.keys) for key, one in EXPECTED.items()}
            assert self._seen_whole
        assert all(one.effects <= 1 and one.keys <= 1 for one in found.values()), found

    # Requests

    def _ask(self, daemon: Daemon, method: str, key: str, **params: Any) -> dict[str, Any]:
        """The same key gets the same decision as ever, and one that was acknowledged is not decided again."""
        answer = daemon.call(method, clientRequestId=key, **params)
        decision = {name: value for name, value in answer.items() if name not in LIVE}
        assert decision, answer
        known = self.acknowledged.get(key)
        if known is not None:
            assert (decision, answer["replayed"]) == (known, True), key
        self.acknowledged[key] = decision
        return answer

    def _start(self, daemon: Daemon, key: str, effect: Any, **more: Any) -> str:
        rules = {"rules": more.pop("rules")} if "rules" in more else {}
        described = agent(self._service, effect, f"{self._mark} {key}", **rules)
        run_id: str = self._ask(daemon, "start", key, agent=described, input="", **more)["runId"]
        return run_id

    def _question(self, daemon: Daemon, run_id: str, key: str) -> dict[str, Any]:
        """The one open question of the run, once it is asked: that of before, if it was shown before. One that was answered,
        or may have been, is not waited for."""
        if key in self._answering:
            return self.questions[key]
        shown = daemon.until(run_id, lambda shown: bool(shown["approvals"]))
        [question] = shown["approvals"]
        assert self.questions.setdefault(key, question) == question
        return question

    def _answer(self, daemon: Daemon, run_id: str, key: str, decision: str) -> None:
        question = self._question(daemon, run_id, key)
        self._answering.add(key)
        named = {"runId": run_id, "approvalId": question["approvalId"], "digest": question["digest"]}
        self._ask(daemon, "approve", f"{key}-{decision}", decision=decision, **named)

    def _until_over(self, daemon: Daemon, run_id: str) -> None:
        """Asked what became of a call, a person looks at the service's books."""
        key = next(key for key, decision in self.acknowledged.items() if decision.get("runId") == run_id)
        shown = daemon.until(run_id, lambda shown: shown["run"]["status"] in {"waiting", "completed"})
        if shown["run"]["status"] == "waiting":
            [question] = shown["approvals"]
            assert question["kind"] == "unknown_outcome", question
            happened = seen(self._service, f"{self._mark} {key}").effects == 1
            self._ask(
                daemon,
                "approve",
                f"{key}-told",
                runId=run_id,
                approvalId=question["approvalId"],
                digest=question["digest"],
                decision="happened" if happened else "did_not_happen",
            )
            shown = daemon.until(run_id, lambda shown: shown["run"]["status"] == "completed")
        assert shown["run"]["output"] == "done"


def _seen(lines: list[dict[str, Any]], operation: str) -> Seen:
    mine = [line for line in lines if line["operation"] == operation]
    kinds = [line["kind"] for line in mine]
    return Seen(kinds.count("call"), kinds.count("effect"), len({line["key"] for line in mine}))
