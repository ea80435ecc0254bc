"""The last life of a store: a backup beside it, every run brought to its end, everything asked once more, and the files read.

Knows: what must hold when nothing moves any more, of the store and of its copy. Does not know: how it came to be.
"""

from __future__ import annotations

import json
import select
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.process.wire_driver import Refused
from tests.soak.model import Finding, Run, expect

if TYPE_CHECKING:
    from tests.soak.chain import Chain

END_S = 60.0
LEFT_OPEN = 3
KEPT = 5
COMPARED = 40
ATTEMPTS = 3
RIG = ("--checkpoint-every", "25", "--tidy-every", "60")


def last_life(chain: Chain) -> None:
    """Raises Finding."""
    chain.born(*RIG)
    try:
        chain.greet()
        at_least, copy = backup_beside(chain)
        bring_to_the_end(chain)
        until(chain, "the store never comes to rest", lambda: at_rest(chain))
        ask_everything_again(chain)
        chain.doing = "end of input"
        expect(chain.life.end() == 0, "a daemon that was told to end did not end well")
    finally:
        chain.life.kill()
    chain.look_at_log()
    for place in (chain.store, copy):
        chain.doing = f"verify {place.name}"
        chain.beside.verify(place)
        chain.beside.finish()
    compare(chain, copy, at_least)


def until(chain: Chain, otherwise: str, condition: Callable[[], bool]) -> None:
    end = time.monotonic() + END_S
    while not condition():
        expect(time.monotonic() < end, otherwise, chain.life.call("status"))
        select.select([], [], [], 0.02)


@dataclass(frozen=True)
class AtLeast:
    """What a copy must hold: the last event of each run, and the runs that are deleted."""

    seqs: dict[str, int]
    deleted: list[str]


def backup_beside(chain: Chain) -> tuple[AtLeast, Path]:
    """While requests go on, unless that is too much for it."""
    chain.beside.finish()
    for attempt in range(ATTEMPTS):
        runs = chain.model.runs.values()
        at_least = AtLeast(
            seqs={run.key: run.seq for run in runs if run.run_id is not None and not run.deleted},
            deleted=[run.key for run in runs if run.deleted],
        )
        copy = chain.beside.backup()
        if attempt < ATTEMPTS - 1:
            for _ in range(30):
                chain.act()
            while not chain.beside.ended():
                chain.act()
        chain.doing = "backup"
        if chain.beside.finish():
            return at_least, copy
    raise Finding("a backup gives up while nobody asks for anything")


def bring_to_the_end(chain: Chain) -> None:
    """All but a few runs, whose questions stay open."""
    chain.service.clear()
    for run in chain.model.runs.values():
        chain.settle(run)
    asking = [run for run in chain.model.runs.values() if run.kind == "asks" and run.questions and not run.answered]
    left = {run.key for run in asking[:LEFT_OPEN]}

    def over() -> bool:
        going = [run for run in chain.model.runs.values() if not run.ended and not run.deleted and run.key not in left]
        for run in going:
            chain.push(run)
        return not going

    until(chain, "runs do not come to their end", over)


def at_rest(chain: Chain) -> bool:
    """Everything is in files, and the counts are what is listed."""
    return chain.health()["checkpoint"]["tailRecords"] == 0 and chain.census()


def ask_everything_again(chain: Chain) -> None:
    """Every key ever used, and every run with all of its events."""
    chain.list_all()
    chain.list_open()
    for run in chain.model.runs.values():
        if not run.deleted:
            chain.look(run)
        for promise in (run.start, *run.promises):
            try:
                chain.model.accepted(run, promise, chain.ask(promise.method, **promise.params))
            except Refused as refused:
                expect(refused.code == "KEY_EXPIRED", "what was decided is refused", run.key, refused.data)
                chain.model.gone(run, refused.data)
    brief = [run for run in chain.model.runs.values() if run.brief and run.ended]
    kept = sum(not run.deleted for run in brief)
    expect(kept >= min(KEPT, len(brief)), "more is deleted than the rule says", kept, len(brief))


def compare(chain: Chain, copy: Path, at_least: AtLeast) -> None:
    """The copy shows every run at least as far as it was acknowledged when the backup began, and event by event the same."""
    chain.doing = "compare"
    with chain.forge.life(copy, "--hold", *chain.keyed, log=chain.log) as life:
        life.listen()
        there: dict[str, dict[str, Any]] = {}
        cursor: dict[str, str] = {}
        while True:
            page = life.call("list", limit=1_000, **cursor)
            there |= {view["clientRequestId"]: view for view in page["runs"]}
            if "nextCursor" not in page:
                break
            cursor = {"cursor": page["nextCursor"]}
        strangers = [key for key, view in there.items() if chain.model.runs[key].run_id != view["runId"]]
        expect(not strangers, "the copy shows another run", strangers)
        for key, seq in at_least.seqs.items():
            run = chain.model.runs[key]
            expect(key in there or run.deleted, "the copy lacks a run", key)
            if key in there:
                expect(there[key]["lastSeq"] >= seq, "the copy lacks events", run.key, seq, there[key])
                compare_events(life, run, seq)
        for key in at_least.deleted[-COMPARED:]:
            refusal = life.refusal(life.send("start", **chain.model.runs[key].start.params))
            expect(refusal == "KEY_EXPIRED", "the copy does not know that a run was deleted", key, refusal)
        expect(life.end() == 0, "a daemon on the copy did not end well")


def compare_events(life: Any, run: Run, seq: int) -> None:
    after = 0
    while after < min(seq, len(run.events)):
        found = life.call("events", runId=run.run_id, afterSeq=after, limit=1_000)["events"]
        for one in found[: min(seq, len(run.events)) - after]:
            mark = hash(json.dumps(one, sort_keys=True))
            expect(mark == run.events[one["seq"] - 1], "an event of the copy is another one", run.key, one)
        after += len(found)
