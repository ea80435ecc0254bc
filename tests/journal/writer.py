"""A process that owns a store and appends until it is killed. `python writer.py STORE [LIMIT]`.

Writes one line to standard output for each acknowledged record, after its acknowledgement; first `ready` and what it
found. LIMIT: bytes that a file may have, lifted after the first refusal."""

from __future__ import annotations

import json
import resource
import sys

from rpcagent import errors
from rpcagent.journal.disk import RealDisk, StoreLock
from rpcagent.journal.record import Item
from rpcagent.journal.wal import Wal


def say(**what: object) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def main() -> int:
    try:
        lock = StoreLock.take(sys.argv[1], since="2030-01-01T00:00:00Z")
    except errors.StoreLocked as error:
        say(**error.data)
        return 75
    wal = Wal.open(RealDisk(sys.argv[1]), draw_store_id=lambda: "s", app="0", at="now", segment_bytes=20_000, lock=lock)
    found = [entry.first for entry in wal.entries()]
    assert found == list(range(1, len(found) + 1))
    say(ready=len(found), epoch=wal.epoch, dropped=wal.dropped_tail_bytes)
    limit = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    if limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    number = len(found)
    while number < 100_000:
        items = [Item("run_1", number + i, 1, b'"%b"' % (b"x" * (37 * (number + i) % 900))) for i in (1, 2, 3)]
        try:
            wal.append(items)
        except errors.StorageError as error:
            say(refused=error.data["errno"], at=number)
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            continue
        number += 3
        say(durable=number)
    return 0


if __name__ == "__main__":
    sys.exit(main())
