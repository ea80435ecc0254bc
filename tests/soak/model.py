"""What was acknowledged, and what every later answer must therefore say.

Knows: runs by their keys, decisions by theirs, events, questions, deletions, and what none of them may ever do. Does not
know: daemons, when they die, or what is asked next. Nothing here waits, and nothing is retried.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ENDED = {"completed", "failed", "cancelled"}
LIVE = {"run", "replayed", "request"}
"""Members of an answer that are of the moment; the rest is the decision."""
EFFECTS = {"idempotent", "reconcilable", "at_most_once"}
SHOWN = 100
"""Lines of `needsAttention`, at most."""


class Finding(Exception):
    """Something was promised and is not so."""


def expect(holds: object, what: str, *facts: object) -> None:
    if not holds:
        raise Finding(": ".join([what, *(json.dumps(fact, default=str) for fact in facts)]))


@dataclass
class Promise:
    """A request that changes something. `decision`: what was answered first, and must be for ever."""

    method: str
    params: dict[str, Any]
    decision: dict[str, Any] | None = None

    @property
    def key(self) -> str:
        key: str = self.params["clientRequestId"]
        return key


@dataclass
class Run:
    """`owed`: a request that was sent and not answered; nothing else is asked of the run before it is. `steps`: in manual
    drive, how many were taken; `last_step`: how many there are."""

    key: str
    kind: str
    brief: bool
    start: Promise
    last_step: int = 0
    run_id: str | None = None
    owed: Promise | None = None
    seq: int = 0
    status: str = ""
    events: list[int] = field(default_factory=list)
    questions: dict[str, dict[str, Any]] = field(default_factory=dict)
    answered: dict[str, Promise] = field(default_factory=dict)
    promises: list[Promise] = field(default_factory=list)
    steps: int = 0
    cancelled: bool = False
    deleted: bool = False

    @property
    def ended(self) -> bool:
        return self.status in ENDED

    @property
    def may_have_ended(self) -> bool:
        """As far as it needs people to come to its end."""
        owed = self.owed.method if self.owed is not None else ""
        stopped = self.ended or self.cancelled or owed == "cancel"
        for name, question in self.questions.items():
            answered = owed == "approve" and self.owed is not None and self.owed.params["approvalId"] == name
            withdrawn = stopped and question["kind"] != "unknown_outcome"
            if not (answered or withdrawn):
                return False
        if stopped:
            return True
        if self.last_step:
            return self.steps + (owed == "step") >= self.last_step
        return self.kind not in {"asks", "confirms"} or bool(self.answered) or owed == "approve"


class Books:
    """The truth of the counting service, read on from where it was read last. One effect for each operation."""

    def __init__(self, truth: Path) -> None:
        self._truth, self._read = truth, 0
        self.effects: Counter[str] = Counter()
        self._keys: dict[str, str] = {}

    def look(self) -> Books:
        if self._truth.exists():
            with self._truth.open("rb") as file:
                file.seek(self._read)
                whole, _, _ = file.read().rpartition(b"\n")
            self._read += len(whole) + bool(whole)
            for line in filter(None, whole.split(b"\n")):
                self._enter(json.loads(line))
        return self

    def _enter(self, line: dict[str, Any]) -> None:
        operation, key = line["operation"], line["key"]
        if line["kind"] == "effect":
            self.effects[operation] += 1
        expect(self.effects[operation] <= 1, "an effect was made twice", line)
        expect(self._keys.setdefault(operation, key) == key, "an operation came with two keys", line)


class Model:
    def __init__(self, books: Books) -> None:
        self.books = books
        self.runs: dict[str, Run] = {}
        self.by_id: dict[str, Run] = {}
        self._ranks: dict[str, int] = {}

    # Answers

    def accepted(self, run: Run, promise: Promise, answer: dict[str, Any]) -> None:
        """The answer to a request that changes something, whether it was sent for the first time or again."""
        expect(not run.deleted, "a deleted run came back", run.key, answer)
        known = promise.decision is not None or (promise.method == "start" and run.run_id is not None)
        self.saw(answer["run"])
        if answer.get("request", {}).get("state") == "in_progress":
            expect(promise.decision is None, "a settled step is in progress again", run.key, promise.key, answer)
            return
        decision = {name: value for name, value in answer.items() if name not in LIVE}
        same = promise.decision is None or promise.decision == decision
        expect(same, "another decision for the same key", run.key, promise.params, promise.decision, decision)
        expect(answer["replayed"] or not known, "a decision that was known is made again", run.key, promise.params)
        if promise is run.owed:
            run.owed = None
            self._settled(run, promise)
        promise.decision = decision

    def _settled(self, run: Run, promise: Promise) -> None:
        if promise is not run.start:
            run.promises.append(promise)
        if promise.method == "approve":
            run.answered[promise.params["approvalId"]] = promise
            run.questions.pop(promise.params["approvalId"], None)
        elif promise.method == "step":
            run.steps += 1
        elif promise.method == "cancel":
            run.cancelled = True
            run.questions = {name: one for name, one in run.questions.items() if one["kind"] == "unknown_outcome"}

    def saw(self, view: dict[str, Any]) -> Run:
        """A run as any answer shows it: never further back than it was seen before."""
        run = self.runs.get(view.get("clientRequestId", ""))
        if run is None:
            raise Finding(f"a run that nobody started, or that is damaged: {json.dumps(view)}")
        run_id, status = view["runId"], view["status"]
        expect(run.run_id in {None, run_id}, "another run for the same key", run.key, run.run_id, view)
        run.run_id = run_id
        self.by_id[run_id] = run
        expect(not run.deleted, "a deleted run is shown", run.key, view)
        expect(view["lastSeq"] >= run.seq, "a run lost events", run.key, run.seq, view)
        expect(not run.ended or status == run.status, "a run that has ended did not stay so", run.key, run.status, view)
        expect("damaged" not in view and status != "damaged", "a run is damaged", view)
        expect(not (run.cancelled and status == "completed"), "a cancelled run is completed", view)
        run.seq, run.status = view["lastSeq"], status
        return run

    def showed(self, run: Run, shown: dict[str, Any]) -> None:
        """All of `status` of one run."""
        self.saw(shown["run"])
        self.asked(run, shown["approvals"])
        waits = shown["run"]["status"] != "waiting" or shown["approvals"] or "retryAt" in shown["run"]
        expect(waits, "a run waits for nothing", shown["run"])
        effects = self.books.look().effects
        for step in shown["steps"]:
            if step["kind"] != "tool_call" or step.get("effect") not in EFFECTS:
                continue
            made = effects[step["arguments"]["operation"]]
            if step["status"] == "completed":
                expect(made == 1, "a completed step without its effect", run.key, step)
            if step["status"] in {"waiting_approval", "denied", "withdrawn"}:
                expect(made == 0, "an effect of a step that never began", run.key, step)

    def asked(self, run: Run, approvals: Iterable[dict[str, Any]]) -> None:
        """Exactly the open questions of a run."""
        open_ = {one["approvalId"]: one for one in approvals}
        for name, known in run.questions.items():
            there = open_.get(name)
            if there is None and (run.cancelled or run.owed is not None):
                continue
            same = there is not None and (there["digest"], there["subject"]) == (known["digest"], known["subject"])
            expect(same, "an open question is gone, or another one", run.key, known, there)
        for name, one in open_.items():
            expect(name not in run.answered, "a question that was answered is open again", run.key, one)
        run.questions = open_

    def told(self, run: Run, after: int, answer: dict[str, Any]) -> int:
        """A page of `events` after that number: no gap, and each event as it always was. Returns the last number."""
        found = answer["events"]
        numbers = [one["seq"] for one in found]
        expect(
            numbers == list(range(after + 1, after + 1 + len(found))), "a gap in the events", run.key, after, numbers
        )
        expect(answer["lastSeq"] >= max(run.seq, after + len(found)), "events are lost", run.key, run.seq, answer)
        for one in found:
            mark = hash(json.dumps(one, sort_keys=True))
            if one["seq"] <= len(run.events):
                expect(run.events[one["seq"] - 1] == mark, "an event is not what it was", run.key, one)
            elif one["seq"] == len(run.events) + 1:
                run.events.append(mark)
        run.seq = answer["lastSeq"]
        return after + len(found)

    def gone(self, run: Run, refusal: dict[str, Any]) -> None:
        """The run was answered as deleted."""
        code = refusal.get("code")
        expect(code == "KEY_EXPIRED" or refusal.get("deleted") is True, "a run is not found", run.key, refusal)
        expect(run.brief, "a run is deleted that no rule lets go", run.key, refusal)
        expect(run.deleted or run.may_have_ended, "a run is deleted that has not ended", run.key, refusal)
        run.deleted, run.owed = True, None
        run.questions = {}

    # All of them

    def listed(self, views: list[dict[str, Any]], *, statuses: Iterable[str] = ()) -> list[Run]:
        """A whole `list`: all that must be there, in the order of before, each once, and nothing else. Returns those that
        must be deleted, because they are not there."""
        wanted = set(statuses)
        ids = [view["runId"] for view in views]
        expect(len(ids) == len(set(ids)), "a run is listed twice", [i for i, n in Counter(ids).items() if n > 1])
        for view in views:
            self.saw(view)
            expect(not wanted or view["status"] in wanted, "a run is listed that was not asked for", view)
        there = set(ids)
        if not wanted:
            self._in_order(ids)
        missing = [
            run
            for run in self.runs.values()
            if run.run_id is not None
            and run.run_id not in there
            and not run.deleted
            and (not wanted or run.status in wanted & ENDED)
        ]
        lost = [run.key for run in missing if not run.brief]
        expect(not lost, "runs are not listed", lost)
        return missing

    def _in_order(self, ids: list[str]) -> None:
        for run_id in ids:
            self._ranks.setdefault(run_id, len(self._ranks))
        ranks = [self._ranks[run_id] for run_id in ids]
        expect(ranks == sorted(ranks), "the order of the list has changed", ids)

    def open_listed(self, approvals: list[dict[str, Any]]) -> None:
        """All pages of `list openApprovals`."""
        by_run: dict[str, list[dict[str, Any]]] = {}
        for one in approvals:
            by_run.setdefault(one["runId"], []).append(one)
        for run in self.runs.values():
            if run.run_id is not None and not run.deleted:
                self.asked(run, by_run.get(run.run_id, []))

    def attended(self, lines: list[dict[str, Any]]) -> None:
        """`needsAttention`: every known question, unless there are more than it shows."""
        there = {line.get("approvalId") for line in lines}
        wrong = [line for line in lines if line["kind"] in {"damaged", "resume"}]
        expect(not wrong, "a run needs attention that should not", wrong)
        if len(lines) < SHOWN:
            missing = [
                name for run in self.runs.values() if run.owed is None and not run.cancelled for name in run.questions
                if name not in there
            ]  # fmt: skip
            expect(not missing, "questions need no attention", missing)
