"""One store through many lives: what is asked of the daemons, and how each life ends.

Knows: the requests, the service outside, and when to kill. Does not know: what an answer must say (`model`), or how a daemon
is made (`daemons`). All choices come from the seed, life by life; the moments of the kills are the machine's, so a second run
with the same seed meets the same requests, and not always the same moment.
"""

from __future__ import annotations

import json
import math
import random
import select
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from rpcagent.keys import new_key_file
from tests.process.wire_driver import WAIT_S, Refused
from tests.service.driver import CountingService
from tests.soak.agents import KINDS
from tests.soak.commands import Beside
from tests.soak.daemons import Forge, Gone, Killer, Life
from tests.soak.ending import last_life
from tests.soak.model import ENDED, Books, Finding, Model, Promise, Run, expect

RULES = '[retention]\nrules = [{ label = "brief", keep = 5 }]\n'
KEPT_MOST = 150
"""Runs that stay for ever; from then on each new one is brief, and the store grows by tombstones only."""
OPEN_MOST = 40
EARLY_S = 0.12
"""One life in four ends at the latest so long after its fork, and often before it answers anything."""
LIFE_S = 1.2
TRACE = 4_000


@dataclass
class Tally:
    """What a chain came to. `deaf`: killed before the first answer."""

    seed: int
    encrypted: bool
    lives: int = 0
    kills: int = 0
    deaf: int = 0
    operations: int = 0
    runs: int = 0
    deleted: int = 0
    effects: int = 0
    answers: Counter[str] = field(default_factory=Counter)
    checkpoints: int = 0
    commands: Counter[str] = field(default_factory=Counter)
    finding: str = ""

    def text(self) -> str:
        kind = "with a key" if self.encrypted else "plain"
        people = ", ".join(f"{count} {word}" for word, count in sorted(self.answers.items()))
        return (
            f"seed {self.seed} ({kind}): {self.lives} lives, {self.kills} killed ({self.deaf} before an answer), "
            f"{self.operations} operations, {self.runs} runs, {self.deleted} deleted, {self.effects} effects, "
            f"at least {self.checkpoints} checkpoints, {self.commands['verify']} times verified, "
            f"{self.commands['backup']} backups and {self.commands['given up']} given up; answers: {people or 'none'}; finding: {self.finding or 'none'}"
        )


class Chain:
    """`with Chain(folder, seed) as chain: tally = chain.run(seconds=60)`. The folder is new, and keeps what a finding needs.
    `life_s`: a life lasts half of it on average, from its first answer on."""

    def __init__(self, folder: Path, seed: int, *, planted: tuple[str, ...] = (), life_s: float = LIFE_S) -> None:
        self.folder, self.seed, self.life_s = folder, seed, life_s
        self.tally = Tally(seed, encrypted=seed % 3 == 0)
        self.store = folder / "store"
        (folder / "work").mkdir(parents=True)
        self.log = folder / "work" / "daemon.log"
        (folder / "rules.toml").write_text(RULES)
        self.keyed: tuple[str, ...] = ()
        if self.tally.encrypted:
            new_key_file(folder / "key")
            self.keyed = ("--encryption-key", f"file:{folder / 'key'}")
        self.service = CountingService(folder / "truth")
        self.model = Model(Books(folder / "truth"))
        self.beside = Beside(self.store, self.keyed)
        self.forge = Forge(planted)
        self.chance = random.Random(seed)
        self.epoch, self.store_id = 0, None
        self._made = 0
        self.last = False
        self.doing = "opening"
        self.trace: deque[dict[str, Any]] = deque(maxlen=TRACE)
        self.life: Life

    def __enter__(self) -> Self:
        self.service.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.beside.stop()
        self.service.stop()
        self.forge.__exit__()

    def run(self, *, seconds: float = math.inf, lives: float = math.inf) -> Tally:
        """Lives for so long, or so many, and then a last one in which everything comes to its end and is counted."""
        end = time.monotonic() + seconds
        try:
            while time.monotonic() < end and self.tally.lives < lives:
                self._live()
            self.last = True
            last_life(self)
        except (Finding, AssertionError, Refused) as found:
            kind = "" if isinstance(found, Finding) else f"{type(found).__name__}: "
            self.tally.finding = f"seed {self.seed}, life {self.tally.lives}, operation {self.tally.operations} ({self.doing}): {kind}{found}"
            (self.folder / "operations.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in self.trace))
        self._count()
        return self.tally

    def _count(self) -> None:
        runs = self.model.runs.values()
        self.tally.runs, self.tally.deleted = len(runs), sum(run.deleted for run in runs)
        self.tally.commands = self.beside.done
        self.tally.effects = self.model.books.effects.total()

    # Lives

    def born(self, *rig: str) -> Life:
        """A daemon on the store, when nothing is under way any more that the one before had sent."""
        self.tally.lives += 1
        self.doing = "opening"
        self.chance = random.Random(f"{self.seed} {self.tally.lives}")
        self._made = 0
        self.quiet_outside()
        rig = rig or (
            "--checkpoint-every", str(self.chance.choice((5, 12, 25, 60))),
            "--tidy-every", str(self.chance.choice((60, 200, 500))),
        )  # fmt: skip
        self.life = self.forge.life(
            self.store, "--config", str(self.folder / "rules.toml"), *self.keyed, rig=rig, log=self.log
        )
        return self.life

    def _live(self) -> None:
        life = self.born()
        early, killed = self.chance.random() < 0.25, self.chance.random() < 0.92
        delay = self.chance.uniform(0, EARLY_S) if early else self.chance.uniform(0, self.life_s)
        try:
            if early:
                with Killer(life.pid, delay):
                    self.greet(early=True)
                    self._ask_for_ever()
            self.greet()
            if killed:
                with Killer(life.pid, delay):
                    self._ask_for_ever()
            end = time.monotonic() + delay
            while time.monotonic() < end:
                self.act()
            self.doing = "end of input"
            expect(life.end() == 0, "a daemon that was told to end did not end well", life.process.returncode)
        except Gone:
            code = life.exit_code()
            expect((early or killed) and code == -9, "the daemon ended by itself", code, self.log.read_text()[-2_000:])
            self.tally.kills += 1
        finally:
            life.kill()
        self.look_at_log()
        self.model.books.look()

    def _ask_for_ever(self) -> None:
        while True:
            self.act()

    def greet(self, *, early: bool = False) -> None:
        self.tally.deaf += early
        expected = {"storeId": self.store_id, "minEpoch": self.epoch} if self.store_id else {}
        events = self.chance.choice(("none", "own", "all"))
        known = self.ask("initialize", protocolVersion=1, capabilities={"events": events}, expect=expected)
        expect(known["epoch"] > self.epoch, "an epoch was given twice", self.epoch, known)
        expect(not known["recovery"]["damagedRuns"], "the opening found damage", known)
        self.epoch, self.store_id = known["epoch"], known["storeId"]
        self.tally.deaf -= early

    def look_at_log(self) -> None:
        told = [line for line in self.log.read_text().splitlines() if "incident" in line or "Traceback" in line]
        expect(not told, "the daemon tells of a fault", told[-1:])

    def quiet_outside(self) -> None:
        """Whatever dead daemons had sent has been served, so that the books say what happened. By the connections that the
        service has."""
        end = time.monotonic() + WAIT_S
        while _connections(self.service.port):
            assert time.monotonic() < end, "the service never comes to rest"
            select.select([], [], [], 0.002)

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        """Raises Refused, Gone."""
        self.tally.operations += 1
        self.doing = f"{method} {params.get('clientRequestId') or params.get('runId') or ''}".strip()
        told = {"life": self.tally.lives, "operation": self.tally.operations, "method": method, "params": params}
        self.trace.append(told)
        self.life.notes.clear()
        try:
            answer = told["result"] = self.life.call(method, **params)
        except Refused as refused:
            told["error"] = refused.data
            expect(refused.code != "INTERNAL", "a fault of the daemon", method, params, refused.data)
            raise
        return answer

    # What is asked

    def act(self) -> None:
        """One thing of all that clients do."""
        acts: list[tuple[int, Callable[[], None]]] = [
            (12, self.start), (12, self.again), (12, self.look), (12, self.answer), (12, self.step), (2, self.cancel),
            (2, self.list_all), (2, self.list_open), (2, self.census), (2, self.trouble), (4, self.what_became),
            (2, self.burst), (1, self.files),
        ]  # fmt: skip
        self.chance.choices([one for _, one in acts], [weight for weight, _ in acts])[0]()

    def some(self, fits: Callable[[Run], bool] = lambda _: True) -> Run | None:
        found = [run for run in self.model.runs.values() if fits(run)]
        if not found:
            return None
        return self.chance.choice(found[-60:] if self.chance.random() < 0.7 else found)

    def start(self) -> None:
        going = [run for run in self.model.runs.values() if not run.ended and not run.deleted]
        if len(going) >= OPEN_MOST:
            self.push(self.chance.choice(going))
            return
        key = f"k{len(self.model.runs)}"
        run = self.model.runs[key] = self._new(key, self.chance.choice(tuple(KINDS)), brief=self._is_brief())
        self.owe(run, run.start)

    def burst(self) -> None:
        """Several starts in one write, one of them twice: what the kill meets are requests that share a commit."""
        runs = []
        for number in range(len(self.model.runs), len(self.model.runs) + self.chance.randrange(2, 9)):
            key = f"k{number}"
            run = self._new(key, self.chance.choice(("reads", "charges", "asks")), brief=self._is_brief())
            run.owed = run.start
            self.model.runs[key] = run
            runs.append(run)
        sent = [*runs, runs[0]]
        requests = [self.life.request("start", **run.start.params) for run in sent]
        self.doing = f"start {runs[0].key} to {runs[-1].key}"
        self.tally.operations += len(sent)
        self.trace.append({"life": self.tally.lives, "starts": [run.key for run in sent]})
        self.life.write(b"".join(line for _, line in requests))
        for run, (ident, _) in zip(sent, requests, strict=True):
            try:
                self.model.accepted(run, run.start, self.life.result(ident))
            except Refused as refused:
                self._refused(run, run.start, refused)

    def _is_brief(self) -> bool:
        kept = sum(not run.brief for run in self.model.runs.values())
        return kept >= KEPT_MOST or self.chance.random() < 0.5

    def _new(self, key: str, kind: str, *, brief: bool) -> Run:
        described, last_step = KINDS[kind](self.service, key)
        params: dict[str, Any] = {"clientRequestId": key, "agent": {"name": kind, **described}, "input": f"go {key}"}
        params["waitMs"] = self.chance.choice((0, 0, 300))
        if last_step:
            params["drive"] = "manual"
        if brief:
            params["labels"] = {"brief": ""}
        return Run(key, kind, brief, Promise("start", params), last_step)

    def owe(self, run: Run, promise: Promise) -> None:
        """Sends a request that is the run's only one until it is answered."""
        run.owed = promise
        self.settle(run)

    def settle(self, run: Run) -> bool:
        """Sends again what was not answered. False: it still is not, or never will be."""
        promise = run.owed
        if promise is None:
            return True
        try:
            self.model.accepted(run, promise, self.ask(promise.method, **promise.params))
        except Refused as refused:
            self._refused(run, promise, refused)
        return run.owed is None

    def _refused(self, run: Run, promise: Promise, refused: Refused) -> None:
        if refused.code == "KEY_EXPIRED":
            self.model.gone(run, refused.data)
            return
        over = refused.code == "INVALID_STATE" and promise.method == "cancel" and refused.data.get("status") in ENDED
        busy = promise.method == "step" and refused.code in {"RUN_BUSY", "UNKNOWN_OUTCOME", "APPROVAL_REQUIRED"}
        expect(promise.decision is None, "what was decided is refused", run.key, promise.params, refused.data)
        expect(over or busy, "a request is refused", run.key, run.status, promise.params, refused.data)
        run.owed = None

    def again(self) -> None:
        """A request of long ago, once more."""
        run = self.some()
        if run is None or not self.settle(run):
            return
        promise = self.chance.choice([run.start, *run.promises])
        try:
            answer = self.ask(promise.method, **promise.params)
        except Refused as refused:
            expect(refused.code == "KEY_EXPIRED", "what was decided is refused", run.key, promise.params, refused.data)
            self.model.gone(run, refused.data)
        else:
            self.model.accepted(run, promise, answer)

    def what_became(self) -> None:
        """`status` of a key that was answered."""
        run = self.some(lambda run: run.run_id is not None)
        if run is None:
            return
        promise = self.chance.choice([run.start, *run.promises])
        shown = self.status(run, clientRequestId=promise.key)
        if shown is not None and promise.decision is not None:
            became = shown["request"]
            same = (became["state"], became.get("method"), became.get("result")) == (
                "settled", promise.method, promise.decision,
            )  # fmt: skip
            expect(same, "a request is not what it was settled as", run.key, promise.decision, became)

    def status(self, run: Run, **more: Any) -> dict[str, Any] | None:
        """None: it is deleted."""
        try:
            shown = self.ask("status", runId=run.run_id, **more)
        except Refused as refused:
            expect(refused.code == "NOT_FOUND", "a run cannot be looked at", run.key, refused.data)
            self.model.gone(run, refused.data)
            return None
        self.model.showed(run, shown)
        return shown

    def look(self, run: Run | None = None) -> None:
        """A run, and its events from the beginning or from where they were read last."""
        run = run or self.some(lambda run: run.run_id is not None)
        if run is None or self.status(run) is None:
            return
        after = self.chance.choice((0, len(run.events)))
        limit = self.chance.choice((4, 1_000))
        while True:
            try:
                answer = self.ask("events", runId=run.run_id, afterSeq=after, limit=limit)
            except Refused as refused:
                self.model.gone(run, refused.data)
                return
            after = self.model.told(run, after, answer)
            if after == answer["lastSeq"]:
                return
            expect(answer["events"], "an empty page in the middle of the events", run.key, after, answer)

    def answer(self, run: Run | None = None) -> None:
        """A person decides one question, by the service's own books where it is about what happened."""
        run = run or self.some(lambda run: bool(run.questions))
        if run is None or not self.settle(run) or not run.questions:
            return
        question = self.chance.choice(list(run.questions.values()))
        word = self.decide(question)
        self.tally.answers[word] += 1
        named = {name: question[name] for name in ("approvalId", "digest")}
        params = {"runId": run.run_id, "clientRequestId": f"a-{question['approvalId']}", "decision": word, **named}
        self.owe(run, Promise("approve", params))

    def decide(self, question: dict[str, Any]) -> str:
        kind = question["kind"]
        expect(kind in {"tool_call", "unknown_outcome", "retry"}, "a question that nothing gave reason for", question)
        if kind == "retry":
            return "retry"
        if kind == "tool_call":
            return self.chance.choice(("allow", "allow", "deny"))
        if self.chance.random() < 0.15:
            return "abandon"
        happened = self.model.books.look().effects[question["subject"]["arguments"]["operation"]]
        return "happened" if happened else "did_not_happen"

    def step(self, run: Run | None = None) -> None:
        run = run or self.some(lambda run: bool(run.last_step) and run.run_id is not None and not run.ended)
        if run is None or not self.settle(run) or run.ended or run.deleted:
            return
        params = {"runId": run.run_id, "clientRequestId": f"s{run.steps}", "waitMs": 2_000}
        self.owe(run, Promise("step", params))

    def cancel(self) -> None:
        run = self.some(lambda run: run.run_id is not None and not run.ended and not run.deleted)
        if run is None or not self.settle(run) or run.ended or run.deleted or run.cancelled:
            return
        self.owe(run, Promise("cancel", {"runId": run.run_id, "clientRequestId": "cancel", "reason": "enough"}))

    def push(self, run: Run) -> None:
        """Whatever brings this run nearer to its end."""
        if not self.settle(run) or run.deleted or self.status(run) is None or run.ended:
            return
        if run.questions:
            self.answer(run)
        elif run.last_step:
            self.step(run)

    def pages(self, **params: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """All pages of `list`: runs, and open approvals."""
        limit = self.chance.choice((13, 100, 1_000))
        runs: list[dict[str, Any]] = []
        approvals: list[dict[str, Any]] = []
        cursor: dict[str, str] = {}
        while True:
            page = self.ask("list", limit=limit, **cursor, **params)
            runs += page["runs"]
            approvals += page.get("approvals", [])
            if "nextCursor" not in page:
                return runs, approvals
            cursor = {"cursor": page["nextCursor"]}

    def list_all(self) -> None:
        status = self.chance.choice(((), (), ("completed",), ("cancelled", "failed")))
        self.listed(self.pages(status=status)[0], status)

    def listed(self, runs: list[dict[str, Any]], status: tuple[str, ...] = ()) -> None:
        for run in self.model.listed(runs, statuses=status):
            expect(self.status(run) is None, "a run is not listed, and is there", run.key, run.status)

    def list_open(self) -> None:
        self.model.open_listed(self.pages(openApprovals=True)[1])

    def health(self) -> dict[str, Any]:
        health = self.ask("status")
        expect(health["status"] == "ok", "the store is in trouble", health)
        expect("trouble" not in health["checkpoint"], "checkpoints are in trouble", health["checkpoint"])
        self.tally.checkpoints += health["checkpoint"]["made"] - self._made
        self._made = health["checkpoint"]["made"]
        self.model.attended(health["needsAttention"])
        return health

    def census(self) -> bool:
        """Counts are what `list` shows, where nothing was recorded meanwhile. False: something was."""
        before = self.health()
        runs, _ = self.pages()
        after = self.health()
        self.listed(runs)
        if (before["journal"]["records"], before["counts"]) != (after["journal"]["records"], after["counts"]):
            return False
        counted, listed = _at_rest(after["counts"]), _at_rest(Counter(run["status"] for run in runs))
        expect(counted == listed, "the counts are not what is listed", counted, listed)
        return True

    def files(self) -> None:
        """A command that reads the files, if none is at it; which of the lives to come it meets is left to chance."""
        if self.last or not self.beside.ended():
            return
        self.beside.finish()
        self.beside.drop_copies()
        if self.chance.random() < 0.5:
            self.beside.verify()
        else:
            self.beside.backup()

    def trouble(self) -> None:
        """The service becomes slow, or drops what is sent to it."""
        point = self.chance.choice(("before_effect", "after_effect"))
        action = self.chance.choice(("delay:40", "delay:120", "drop"))
        self.service.fault(point, action, times=self.chance.randrange(1, 4))


def _at_rest(counts: dict[str, int]) -> dict[str, int]:
    """`ready` and `running` are one: which of them it is depends on the moment."""
    moving = counts.get("ready", 0) + counts.get("running", 0)
    rest = {status: count for status, count in counts.items() if status not in {"ready", "running"}}
    return {**rest, "moving": moving}


def _connections(port: int) -> int:
    """Connections that the process which listens on this port has not closed."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(int(row[1].rpartition(":")[2], 16) == port and row[3] in {"01", "03", "04", "05", "08"} for row in rows)
