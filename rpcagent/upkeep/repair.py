"""`rpcagent repair`: what is damaged, what would become of it, and then, if nothing is given up or a person agreed, the deed.

Knows: the words for a plan, and when it needs a person's consent. Does not know: what is kept (`damage`), how it is written
(`mending`).
"""

from __future__ import annotations

import argparse
import contextlib
from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from rpcagent import errors
from rpcagent.batch import exits
from rpcagent.batch.desk import Desk
from rpcagent.batch.narrator import Tone
from rpcagent.journal import access, runfiles
from rpcagent.journal.disk import RealDisk, StoreLock
from rpcagent.journal.ended import ended_row
from rpcagent.journal.index import FILE_NAME, Ended, Index, IndexUnusable
from rpcagent.runs import summary
from rpcagent.upkeep import damage, ledger, mending
from rpcagent.upkeep.checking import Check
from rpcagent.upkeep.damage import Found, Run
from rpcagent.upkeep.findings import RUNS_SHOWN, Finding
from rpcagent.upkeep.place import Place
from rpcagent.upkeep.salvage import Hole

_FATES: dict[str, tuple[str, Tone]] = {
    "closed": ("lost or may have lost events; kept up to the last certain one, and ended there", "bad"),
    "buried": ("cannot be kept: moved aside whole, its key stays taken", "bad"),
    "moved": ("files are damaged, and nothing is lost: its records go into the log", "plain"),
    "kept": ("had ended, and lost events that came after its end", "bad"),
}


class Plan:
    """What would be done, as lines for a person and values for a program. `loses`: it takes a person's word."""

    def __init__(self, found: Found, *, index_is_bad: bool) -> None:
        self.found = found
        self.steps: list[str] = []
        self.losses: list[str] = []
        self.runs: dict[str, list[Run]] = {}
        self._log()
        self._rest(index_is_bad)
        for run in found.runs.values():
            if run.fate not in {"kept", "deleted"} or run.loses:
                self.runs.setdefault(run.fate, []).append(run)

    @property
    def loses(self) -> bool:
        return bool(self.losses) or any(run.loses for runs in self.runs.values() for run in runs)

    @property
    def empty(self) -> bool:
        return not (self.steps or self.losses or self.runs)

    def _log(self) -> None:
        found = self.found
        for error in found.log.damage:
            self.steps.append(f"{error.details['file']}, byte {error.details['offset']}: {error.details['reason']}")
        for hole in found.log.holes:
            openings = sum(1 for each in hole.told if not each.run and hole.first <= each.seq <= hole.last)
            missing = hole.missing - openings
            if missing > 0:
                numbers = f"record {hole.first}" if hole.missing == 1 else f"records {hole.first} to {hole.last}"
                self.losses.append(f"{hole.file}, byte {hole.offset}: {numbers}: {self._whose(hole)}")
            elif not hole.sure and not hole.missing:
                self.losses.append(
                    f"{hole.file}, byte {hole.offset}: the lines here are of another history of this store"
                )
        if found.must_begin_anew:
            self.steps.append("a new log begins, behind a new manifest, with every record that is certain")

    def _whose(self, hole: Hole) -> str:
        if hole in self.found.unowned:
            return (
                "whose they were is not known. Every run that was under way and has no later record is closed; a run that had "
                "no other record is gone, and its key is free again"
            )
        return "of " + ", ".join(
            sorted({each.run for each in hole.told if each.run and hole.first <= each.seq <= hole.last})
        )

    def _rest(self, index_is_bad: bool) -> None:
        found = self.found
        if not found.manifest_is_good or (found.known is None and found.log.base.seq):
            self.steps.append("checkpoint.json is made anew from the files of the runs")
        if found.unlisted:
            self.steps.append(f"{len(found.unlisted)} runs that no list names are named again")
        if not found.head_is_good:
            self.steps.append("HEAD is made anew")
        if index_is_bad:
            self.steps.append("index.sqlite is made anew from the files of the runs")
        if found.log.unfinished or found.log.leftovers:
            self.steps.append("leftovers of an interrupted repair or checkpoint are deleted")
        for name in found.graves_lost:
            self.losses.append(
                f"tombstones/{name}: keys of deleted runs may be free again; what can be read of it is kept"
            )
        if found.vanished:
            self.losses.append(
                f"{found.vanished} runs that had ended are gone without a trace; their keys are free again"
            )

    def lines(self) -> list[tuple[str, Tone]]:
        said: list[tuple[str, Tone]] = [(f"repair   {step}", "plain") for step in self.steps]
        said += [(f"loss     {loss}", "bad") for loss in self.losses]
        for fate, runs in self.runs.items():
            words, tone = _FATES[fate]
            said.append((f"runs     {len(runs)}: {words}", tone))
            for run in runs[:RUNS_SHOWN]:
                lost = f" of {run.told}" if run.told > run.certain else ""
                why = f" ({run.trouble.details['file']}: {run.trouble.details['reason']})" if run.trouble else ""
                said.append((f"         {run.name}  events 1 to {run.certain}{lost}{why}", "dim"))
            if len(runs) > RUNS_SHOWN:
                said.append((f"         and {len(runs) - RUNS_SHOWN} more; --json names all", "dim"))
        return said

    def value(self) -> dict[str, object]:
        runs = [
            {"runId": run.name, "fate": fate, "keptEvents": run.certain, "knownEvents": max(run.told, run.certain)}
            for fate, some in self.runs.items()
            for run in some
        ]
        return {"plan": {"steps": self.steps, "losses": self.losses, "runs": runs, "loses": self.loses}}


def command(desk: Desk, place: Place, options: argparse.Namespace) -> int:
    """The exit code: 0 where the store is whole now, 1 where damage is left."""
    if options.dry_run:
        return _planned(desk, place, options)
    lock = StoreLock.take(place.store, since=_now())
    try:
        access.secure(place.store)
        return _planned(desk, place, options)
    finally:
        lock.close()


def _planned(desk: Desk, place: Place, options: argparse.Namespace) -> int:
    disk = place.disk()
    now = datetime.now(UTC)
    rows, index_is_bad = _index_of(place.store)
    found = damage.survey(disk, rows)
    damage.decide(disk, found, place.seal(found.store_id), now)
    plan = Plan(found, index_is_bad=index_is_bad)
    if desk.as_json:
        desk.fact(plan.value())
    for text, tone in plan.lines() if not desk.as_json else ():
        desk.tell(text, tone)
    if options.dry_run:
        hint = place.hint("repair", *(["--yes-lose"] if plan.loses else []))
        return _end(desk, place, plan, f"Nothing was changed. To do it: {hint}" if not plan.empty else "")
    if plan.loses and not options.yes_lose:
        return _end(
            desk, place, plan, f"Nothing was changed. To give up what is lost: {place.hint('repair', '--yes-lose')}"
        )
    stamp = now.strftime("%Y%m%dT%H%M%S.%fZ")
    report = mending.report_of([text for text, _ in plan.lines()])
    anew = found.must_begin_anew or index_is_bad

    def index(through: int) -> None:
        if anew:
            _new_index(place.store, found.store_id, through)

    copies = mending.mend(disk, found, stamp=stamp, now=now, report=report, index=index)
    return _end(desk, place, plan, f"The originals are in {place.store / copies}" if copies else "")


def _end(desk: Desk, place: Place, plan: Plan, word: str) -> int:
    """Checks the store as it is now, and tells. The exit code."""
    left: list[Finding] = []
    Check(place, left.append).run()
    damaged = [finding for finding in left if finding.severity == "damage"]
    exit_code = exits.FAILED if damaged else exits.DONE
    if desk.as_json:
        counts = Counter(finding.severity for finding in left)
        desk.fact(
            {"summary": {"store": str(place.store), "damage": counts["damage"], "note": word, "exitCode": exit_code}}
        )
        return exit_code
    if plan.empty:
        desk.tell("There is nothing to repair.", "good")
    if word:
        desk.tell(word, "strong")
    for finding in damaged:
        for line in finding.lines():
            desk.tell(f"left: {line}", "bad")
    if not damaged:
        desk.tell(f"No damage is left. {place.store} opens.", "good")
    return exit_code


def _index_of(store: Path) -> tuple[Mapping[str, Ended], bool]:
    """The rows of the index, and whether its file is there and of no use."""
    try:
        return ledger.rows_of(store), False
    except FileNotFoundError:
        return {}, False
    except (IndexUnusable, errors.StorageError):
        return {}, True


def _new_index(store: Path, store_id: str, through: int) -> None:
    disk = RealDisk(store)
    rows = []
    names: list[str] = []
    with contextlib.suppress(FileNotFoundError):
        names = disk.names(runfiles.FOLDER)
    for name in filter(runfiles.names_a_run, names):
        state = runfiles.read_state(disk, name)
        if state is not None and (row := ended_row(name, state, summary.decode(state.summary))) is not None:
            rows.append(row)
    disk.close()
    Index.rebuild(store / FILE_NAME, lambda: rows, through, store_id).close()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
