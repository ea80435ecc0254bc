"""A process with few descriptors that makes checkpoints of many runs. `python many_runs.py STORE RUNS [alone]`.

`alone`: each name is synced by itself, as on a platform that cannot do all at once. Prints what it took."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import sys
import time

from rpcagent.journal import disk as disks
from rpcagent.journal import runfiles
from rpcagent.journal.checkpoint import Change, Checkpointer, read_manifest
from rpcagent.journal.disk import RealDisk
from rpcagent.journal.manifest import Header
from rpcagent.journal.record import Item
from rpcagent.journal.runfiles import Line
from rpcagent.journal.wal import Wal

BODY = b'{"x":"%b"}' % (b"x" * 1000)


def open_descriptors() -> int:
    count = 0
    for number in range(256):
        with contextlib.suppress(OSError):
            os.fstat(number)
            count += 1
    return count


def main() -> int:
    store, runs = sys.argv[1], int(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    if "alone" in sys.argv:
        disks._sync_of_all = lambda _: None
    wal = Wal.open(RealDisk(store), draw_store_id=lambda: "s", app="0", at="now")
    names = [f"run_{number:06d}" for number in range(runs)]
    disk = RealDisk(store)
    checkpointer = Checkpointer(disk)
    for event in (1, 2):
        wal.append([Item(name, event, 1, BODY) for name in names])
        mark = wal.mark()
        header = Header(store_id="s", app="0", epoch=wal.epoch, at="now", places=runs, ended={})
        changes = (Change(name, [Line(event, 1, BODY)], b'{"n":%d}' % event) for name in names)
        begin, cpu = time.monotonic(), time.process_time()
        left = checkpointer.write(mark, header, changes, ((name, b"{}") for name in names), (), None, lambda: None)
        print(json.dumps({
            "left": left, "wall": round(time.monotonic() - begin, 2), "cpu": round(time.process_time() - cpu, 2),
            "descriptors": open_descriptors(), "rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        }), flush=True)  # fmt: skip
    found = read_manifest(disk)
    assert found is not None
    assert (found.base.seq, list(found.live)) == (wal.last_seq, names)
    for name in names:
        read = runfiles.read_bodies(disk, name, named=True)
        assert read is not None
        assert read[1] == [Line(1, 1, BODY), Line(2, 1, BODY)]
    return 0


if __name__ == "__main__":
    sys.exit(main())
