"""A process that owns a store and appends until it is killed. `python writer.py STORE [LIMIT [EVERY]]`.

Writes one line to standard output for each acknowledged record, after its acknowledgement; first `ready` and what it
found. LIMIT: bytes that a file may have, lifted after the first refusal; 0 for none. EVERY: batches from one checkpoint to
the next, which a thread makes while the log goes on; 0 for none."""

from __future__ import annotations

import json
import resource
import sys
import threading

from rpcagent import errors
from rpcagent.journal import runfiles
from rpcagent.journal.checkpoint import Change, Checkpointer, read_manifest
from rpcagent.journal.disk import RealDisk, StoreLock
from rpcagent.journal.manifest import Header
from rpcagent.journal.record import Item
from rpcagent.journal.runfiles import Line
from rpcagent.journal.wal import Wal

RUN = "run_1"


def say(**what: object) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


class Saver:
    """Makes checkpoints of the one run, in a thread."""

    def __init__(self, store: str, wal: Wal, named: bool, lock: StoreLock) -> None:
        self.disk = RealDisk(store)
        self.wal = wal
        self.checkpointer = Checkpointer(self.disk, lock)
        assert self.checkpointer.sweep() == 0
        read = runfiles.read_bodies(self.disk, RUN, named)
        self.held = [line.first for line in read[1]] if read else []
        self.fresh: list[Line] = []
        self.thread: threading.Thread | None = None

    def take(self, record) -> bool:
        """Whether the history does not hold it."""
        if self.held and record.first <= self.held[-1]:
            return False
        self.fresh.append(Line(record.first, record.count, record.body))
        return True

    def save(self) -> None:
        if self.thread is not None:
            self.thread.join()
        mark, lines, self.fresh = self.wal.mark(), self.fresh, []
        self.thread = threading.Thread(target=self._save, args=(mark, lines), daemon=True)
        self.thread.start()

    def _save(self, mark, lines: list[Line]) -> None:
        header = Header(store_id="s", app="0", epoch=self.wal.epoch, at="now", places=1, ended={})
        changes = [Change(RUN, lines, b"{}")] if lines else []
        left = self.checkpointer.write(mark, header, changes, [(RUN, b"{}")], (), None, lambda: None)
        say(checkpoint=mark.seq, left=left)


def main() -> int:
    try:
        lock = StoreLock.take(sys.argv[1], since="2030-01-01T00:00:00Z")
    except errors.StoreLocked as error:
        say(**error.data)
        return 75
    disk = RealDisk(sys.argv[1])
    manifest = read_manifest(disk)
    base = {"base": manifest.base, "store_id": manifest.store_id, "least_epoch": manifest.epoch} if manifest else {}
    wal = Wal.open(disk, draw_store_id=lambda: "s", app="0", at="now", segment_bytes=20_000, lock=lock, **base)
    saver = Saver(sys.argv[1], wal, manifest is not None, lock)
    found = saver.held + [entry.first for entry in wal.entries() if saver.take(entry)]
    assert found == list(range(1, len(found) + 1))
    say(ready=len(found), epoch=wal.epoch, dropped=wal.dropped_tail_bytes, held=len(saver.held), tail=wal.tail_records)
    limit, every = (int(sys.argv[place]) if len(sys.argv) > place else 0 for place in (2, 3))
    if limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    number = len(found)
    while number < 100_000:
        if every and number // 3 % every == every - 1:
            saver.save()
        items = [Item(RUN, number + i, 1, b'"%b"' % (b"x" * (37 * (number + i) % 900))) for i in (1, 2, 3)]
        try:
            wal.append(items)
        except errors.StorageError as error:
            say(refused=error.data["errno"], at=number)
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            continue
        number += 3
        for item in items:
            saver.take(item)
        say(durable=number)
    return 0


if __name__ == "__main__":
    sys.exit(main())
