"""Stores that have a past: many runs that ended long ago, made in less time than they would take to happen.

One run is done by the daemon. Its records are then written to the log as often as is needed, each time under another run's
id and request, by the journal's own writer; and the daemon, once more, does with that log what it does. So every file is
the product's own. Also: how large a store is, and when a daemon has moved its log into the files of the runs.
"""

from __future__ import annotations

import base64
import hashlib
import time
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

from rpcagent.journal.disk import RealDisk
from rpcagent.journal.wal import Item, Wal
from tests.bench.peer import Daemon, Scratch
from tests.bench.steps import run_once

BATCH = 2_000
KEY = "past-0"
MOVED_BYTES = 256 << 10
"""A log that is shorter has been moved."""
QUIET_S = 12.0
"""Longer than a daemon that has nothing to do waits before it moves its log."""


def store_with_past(scratch: Scratch, runs: int, records: int) -> Path:
    """`runs` completed runs with `records` records each, an even number. Their log has been moved, if this daemon does that."""
    store = scratch.fresh("past")
    with Daemon(scratch, store) as daemon:
        run = run_once(daemon, KEY, records // 2 - 1)
        assert run["status"] == "completed", run
        daemon.kill()
    wal = Wal.open(RealDisk(store), draw_store_id=lambda: "", app="0", at="2030-01-01T00:00:00Z")
    first = [Item(entry.run, entry.first, entry.count, entry.body) for entry in wal.entries()]
    assert len(first) == records, len(first)
    for batch in _batches(_copies(first, runs - 1)):
        wal.append(batch)
    wal.close()
    with Daemon(scratch, store) as daemon:
        counts = daemon.call("status")["counts"]
        assert counts == {"completed": runs}, counts
        wait_until_moved(store)
        daemon.close()
    return store


def _copies(first: list[Item], count: int) -> Iterator[Item]:
    """The same records, each time of another run. What a run's id is in, is in it as text."""
    prefix, _, own = first[0].run.partition("_")
    for number in range(1, count + 1):
        digest = hashlib.sha256(str(number).encode()).digest()
        other = base64.b32encode(digest).decode().lower()[: len(own)]
        for item in first:
            body = item.body.replace(own.encode(), other.encode())
            body = body.replace(f'"{KEY}"'.encode(), f'"past-{number}"'.encode())
            yield Item(f"{prefix}_{other}", item.first, item.count, body)


def _batches(items: Iterator[Item]) -> Iterable[list[Item]]:
    while batch := list(islice(items, BATCH)):
        yield batch


def size_of(folder: Path) -> int:
    """Bytes of all files below it, by their lengths. Files may go meanwhile."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:
            continue
    return total


def wait_until_moved(store: Path) -> bool:
    """Waits until the log of a store in use is short. False: it is not, and nothing has changed for a while."""
    changed, seen = time.monotonic(), -1
    while size_of(store / "wal") >= MOVED_BYTES:
        size = size_of(store)
        if size != seen:
            changed, seen = time.monotonic(), size
        if time.monotonic() - changed > QUIET_S:
            return False
        time.sleep(0.1)
    return True
