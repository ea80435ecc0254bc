"""Stores in the middle of a deletion by retention on a full disk, as the keeper's own code leaves them, killed before any call.

Knows: that no manifest can be written, so that the log alone says what is deleted, and files go before the tombstone. Does not
know: the commands.
"""

from __future__ import annotations

import contextlib
import errno
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from rpcagent import errors
from rpcagent.journal import reading, seal
from rpcagent.journal.disk import RealDisk, StoreLock
from rpcagent.policy.retention import Retention, RetentionRule
from rpcagent.store import look_at_store, open_store
from rpcagent.upkeep.collecting import _idle
from rpcagent.upkeep.deletions import deletions_in
from tests.process.disk_rigs import mutating

KEEP_ONE = Retention((RetentionRule(statuses=("completed",), keep=1),))
Sealing = Callable[[str], seal.Seal]


def plain(_store_id: str) -> seal.Seal:
    return seal.Plain()


@contextlib.contextmanager
def before_each_call(act: Callable[[str, str], None]) -> Iterator[None]:
    """`act(call, name)` before whatever may change the disk."""
    with pytest.MonkeyPatch.context() as patch:
        for call in mutating():
            original = getattr(RealDisk, call)

            def around(disk: RealDisk, *args: Any, _call: str = call, _original: Any = original, **named: Any) -> Any:
                act(_call, args[0] if args and isinstance(args[0], str) else "")
                return _original(disk, *args, **named)

            patch.setattr(RealDisk, call, around)
        yield


def no_room(call: str, name: str) -> None:
    if (call, name) == ("create", "checkpoint.json.tmp"):
        raise OSError(errno.ENOSPC, "as told")


def tidied(store: Path, act: Callable[[str, str], None] = no_room, sealing: Sealing = plain) -> list[str]:
    """Opens the store, lets retention keep one run, and closes it; `act` from the opening on. Returns what was deleted."""

    async def work() -> list[str]:
        lock = StoreLock.take(store, since="now")
        opened = await open_store(store, lock, _idle, sealing=sealing, retention=KEEP_ONE)
        try:
            with before_each_call(act), contextlib.suppress(errors.StorageError):
                await opened.keeper.tidy()
            return list(opened.keeper.deleted)
        finally:
            await opened.close()
            lock.close()

    return anyio.run(work)


def deleted_by_the_log(store: Path, sealing: Sealing = plain) -> set[str]:
    disk = RealDisk(store)
    snapshot, entries = reading.read_all(disk)
    disk.close()
    return set(deletions_in(entries, sealing(snapshot.store_id)).status)


def known_as_deleted(store: Path, runs: set[str], sealing: Sealing = plain, *, opening: bool = False) -> set[str]:
    """Those of the runs that a process which looks at the store knows as deleted, or one that opens it."""

    async def work() -> set[str]:
        lock = StoreLock.take(store, since="now") if opening else None
        if opening:
            found = await open_store(store, lock, _idle, sealing=sealing)
        else:
            found = await look_at_store(store, _idle, sealing=sealing, note=lambda _text: None)
        try:
            return {run for run in runs if found.archive.deleted(run)}
        finally:
            await found.close()
            if lock is not None:
                lock.close()

    return anyio.run(work)


def killed_at_each_call(store: Path, to: Path, sealing: Sealing = plain) -> list[Path]:
    """The store as a kill before each call leaves it, and at the end."""
    kept: list[Path] = []

    def keep(call: str, name: str) -> None:
        kept.append(Path(shutil.copytree(store, to / str(len(kept)))))
        no_room(call, name)

    tidied(store, keep, sealing)
    return [*kept, Path(shutil.copytree(store, to / "end"))]


def left_of(store: Path, run: str) -> set[str] | None:
    folder = store / "runs" / run
    return {path.name for path in folder.iterdir()} if folder.is_dir() else None
