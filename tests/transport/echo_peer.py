"""A program that claims its standard streams and echoes each frame. Run as a subprocess by the tests of the wire.

Frames with a meaning: `print` pollutes fd 1 in every way there is, `rss` answers the peak resident memory in KiB.
`--limit` and `--high` are in bytes. The last line on standard error is a report.
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

from rpcagent.transport.framing import FRAME_BYTES_MAX, Framer
from rpcagent.transport.stdio import HIGH_BYTES, Claimed, Wire, claim


def pollute() -> None:
    print("stray print", flush=True)
    sys.stdout.write("no newline")
    sys.stdout.flush()
    os.write(1, b"stray write")
    subprocess.run(["sh", "-c", "echo stray child; cat"], check=True)


def answer(frame: bytes) -> bytes:
    if frame == b"print":
        pollute()
    if frame == b"rss":
        # Not getrusage: its peak is inherited from the parent over exec.
        return Path("/proc/self/status").read_bytes().split(b"VmHWM:")[1].split()[0]
    return frame


async def echo(claimed: Claimed, limit: int, high: int) -> None:
    wire = Wire(claimed, Framer(limit), high_bytes=high)
    answered = 0
    while frames := await wire.recv():
        for frame in frames:
            if isinstance(frame, bytes):
                wire.send(answer(frame))
            else:
                wire.send(json.dumps(list(frame)).encode())
            answered += 1
    await wire.drained()
    flags = [bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_NONBLOCK) for fd in (0, 1, claimed.read)]
    report = {"answered": answered, "eof": wire.eof, "dead": wire.dead, "left": wire.out_bytes, "nonblock": any(flags)}
    wire.close()
    wire.close()
    sys.stderr.write("\n" + json.dumps(report) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--limit", type=int, default=FRAME_BYTES_MAX)
    parser.add_argument("--high", type=int, default=HIGH_BYTES)
    args = parser.parse_args()
    asyncio.run(echo(claim(), args.limit, args.high))
