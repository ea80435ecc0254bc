"""`rpcagent gc`: deletes what the rules of retention let go, and large outputs to which no run refers any more.

A running daemon does the same by itself once an hour; this is for a look beforehand, and for stores that no daemon serves.
With --dry-run nothing is written, no lock is taken, and a daemon may go on.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import anyio
import msgspec

from rpcagent import errors
from rpcagent.batch import exits
from rpcagent.batch.desk import Desk
from rpcagent.batch.faults import Mistake
from rpcagent.config import ConfigError, find, retention_of
from rpcagent.journal import runfiles
from rpcagent.journal.blobs import Blobs
from rpcagent.journal.disk import RealDisk, StoreLock
from rpcagent.journal.ended import ended_row
from rpcagent.journal.index import Ended
from rpcagent.models.catalog import Catalog
from rpcagent.policy.retention import Retention, due
from rpcagent.runs import summary
from rpcagent.runs.decide import Rules
from rpcagent.runs.ports import Archive, Clock, Journal
from rpcagent.runs.summary import Summary
from rpcagent.runs.supervisor import Supervisor
from rpcagent.store import look_at_store, open_store, utc
from rpcagent.tools.registry import Registry
from rpcagent.upkeep.place import Place

Gone = tuple[str, str, int]
"""Run, the rule that lets it go, bytes."""


def command(desk: Desk, place: Place, options: argparse.Namespace) -> int:
    """Exit code 0, whether or not there was anything to delete. Raises StoreLocked unless nothing is to be changed."""
    rules = _rules(place, options)
    if options.dry_run:
        runs, outputs = anyio.run(_look, place, rules)
    else:
        runs, outputs = anyio.run(_collect, place, rules)
    for run_id, reason, size in runs:
        if desk.as_json:
            desk.fact({"run": run_id, "reason": reason, "bytes": size})
        else:
            desk.tell(f"{run_id}  {size:>10,} bytes  {reason}")
    freed = sum(size for _, _, size in runs) + sum(size for _, size in outputs)
    if desk.as_json:
        fact: dict[str, Any] = {"runs": len(runs), "outputs": len(outputs), "bytes": freed, "dryRun": options.dry_run}
        desk.fact({"summary": fact})
        return exits.DONE
    done = "would be deleted" if options.dry_run else "deleted"
    desk.say(f"{len(runs)} runs and {len(outputs)} outputs {done}, {freed:,} bytes")
    if not rules.rules:
        desk.say(
            "There are no rules of retention: every run is kept. They stand under [retention] in the configuration."
        )
    return exits.DONE


def _rules(place: Place, options: argparse.Namespace) -> Retention:
    workspace = (options.workspace or Path()).resolve()
    try:
        found = find(workspace, options.config, options.trust_workspace, place.store)
    except ConfigError as error:
        raise Mistake(str(error)) from None
    return retention_of(found.config.retention)


async def _look(place: Place, rules: Retention) -> tuple[list[Gone], list[tuple[str, int]]]:
    """What would go: by the files of the runs, and by the log for those that it holds."""
    store = await look_at_store(place.store, _idle, sealing=place.seal, note=lambda _text: None)
    rows: dict[str, Ended] = {}
    needed: set[str] = set()
    disk = place.disk()
    whole = all(actor.failed is None for actor in store.supervisor.actors.values())
    for run_id, state, heads in _states(disk):
        if store.archive.deleted(run_id):
            continue  # what is left of its files goes with the next checkpoint
        if state is None or heads is None:
            whole = False  # what it refers to is not known
            continue
        needed.update(heads.blobs)
        if (row := ended_row(run_id, state, heads)) is not None:
            rows[run_id] = row
    disk.close()
    for actor in store.supervisor.actors.values():
        if actor.state is not None:
            heads, body = summary.summarise(actor.state, actor.place, "")
            needed.update(heads.blobs)
            known = rows.pop(actor.run_id, None)
            size = (known.bytes if known is not None else 0) + sum(len(record.body) for record in actor.tail)
            state = runfiles.State(last_seq=heads.last_seq, lines=0, size=size, chain=0, summary=body)
            if (row := ended_row(actor.run_id, state, heads)) is not None:
                rows[actor.run_id] = row
    await store.close()
    gone = [(one.run, one.reason, rows[one.run].bytes) for one in due(rows.values(), datetime.now(UTC), rules)]
    needed -= {blob for run_id, _, _ in gone for blob in rows[run_id].blobs}
    needed |= {blob for run_id, row in rows.items() if run_id not in {run for run, _, _ in gone} for blob in row.blobs}
    # What only a step under way refers to is younger than the grace time.
    return gone, [] if not whole else Blobs(place.store / "blobs").collect(needed, now=time.time(), dry_run=True)


def _states(disk: RealDisk) -> Iterator[tuple[str, runfiles.State | None, Summary | None]]:
    """Of all runs that have files, what these say; None of both for one whose files cannot be used."""
    try:
        names = disk.names(runfiles.FOLDER)
    except FileNotFoundError:
        return
    for run_id in filter(runfiles.names_a_run, names):
        try:
            state = runfiles.read_state(disk, run_id)
            heads = summary.decode(state.summary) if state is not None else None
        except (errors.StoreDamaged, errors.StorageError, errors.Incompatible, msgspec.DecodeError):
            yield run_id, None, None
            continue
        if state is not None:
            yield run_id, state, heads


async def _collect(place: Place, rules: Retention) -> tuple[list[Gone], list[tuple[str, int]]]:
    lock = StoreLock.take(place.store, since=utc())
    try:
        before = {path.name: path.stat().st_size for path in (place.store / "blobs").glob("*")}
        store = await open_store(place.store, lock, _idle, sealing=place.seal, retention=rules)
        try:
            deleted = await store.keeper.tidy()
        finally:
            await store.close()
        left = {path.name for path in (place.store / "blobs").glob("*")}
        gone = [(one.run_id, one.reason, one.size) for one in deleted]
        return gone, [(name, size) for name, size in before.items() if name not in left]
    finally:
        lock.close()


def _idle(journal: Journal, archive: Archive, clock: Clock, _blobs: Blobs) -> Supervisor:
    """Runs are looked at; none goes on."""

    def never(*_: Any) -> None:
        raise RuntimeError("nothing is performed here")

    def incident(error: BaseException, _what: str) -> str:
        return type(error).__name__

    return Supervisor(
        journal=journal,
        archive=archive,
        clock=clock,
        model=Catalog(),
        tools=Registry(store=""),
        rules=Rules(epoch=journal.epoch, draining=True),
        spawn=never,
        incident=incident,
        fatal=never,
    )
