"""What the figures are set beside: the least that could be done, by other processes and by the bare file system."""

from __future__ import annotations

import os
import sqlite3
import sys
import time
from pathlib import Path
from typing import NamedTuple

from tests.bench.peer import Peer, Scratch

ECHO = """
import sys
for line in sys.stdin.buffer:
    sys.stdout.buffer.write(line)
    sys.stdout.buffer.flush()
"""
"""Each line back as it came, blocking."""

JSON_ECHO = """
import json, sys
for line in sys.stdin.buffer:
    call = json.loads(line)
    answer = {"id": call["id"], "result": {}, "jsonrpc": "2.0"}
    sys.stdout.buffer.write(json.dumps(answer).encode() + b"\\n")
    sys.stdout.buffer.flush()
"""
"""A JSON answer to each line, with nothing but the standard library."""

SAME_IMPORTS = (
    """
import anyio, anyio._backends._asyncio, argparse, asyncio, hashlib, msgspec, pathlib
import rpcagent.rpc.dispatch
"""
    + JSON_ECHO
)
"""The same, after the import of every library that the daemon's answer stands on; jsonrpcserver as the daemon does it."""


def child(scratch: Scratch, program: str) -> Peer:
    return Peer(scratch, [sys.executable, "-c", program])


class Took(NamedTuple):
    """Seconds by the wall, and seconds of CPU."""

    wall: float
    cpu: float


def raw_appends(path: Path, count: int, size: int) -> Took:
    """`count` times: write `size` bytes at the end, sync. The file is new and is gone afterwards."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    sync = getattr(os, "fdatasync", os.fsync)
    data = b"x" * size
    try:
        began, used = time.perf_counter(), time.process_time()
        for place in range(count):
            os.pwrite(descriptor, data, place * size)
            sync(descriptor)
        return Took(time.perf_counter() - began, time.process_time() - used)
    finally:
        os.close(descriptor)
        path.unlink()


def sqlite_appends(path: Path, count: int, size: int, batch: int = 1) -> Took:
    """`count` transactions of `batch` inserts of `size` bytes, by one writer, each synced before `commit` returns. The file is
    new and is gone afterwards."""
    rows = [(b"x" * size,)] * batch
    connection = sqlite3.connect(path, isolation_level=None)
    try:
        mode = connection.execute("pragma journal_mode=wal").fetchone()
        assert mode == ("wal",), mode
        connection.execute("pragma synchronous=full")
        connection.execute("create table record(number integer primary key, body blob)")
        began, used = time.perf_counter(), time.process_time()
        for _ in range(count):
            connection.execute("begin")
            connection.executemany("insert into record(body) values(?)", rows)
            connection.execute("commit")
        return Took(time.perf_counter() - began, time.process_time() - used)
    finally:
        connection.close()
        path.unlink()
