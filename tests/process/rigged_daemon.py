"""The daemon with its parts held up or made to misbehave from outside, for tests: `python -m tests.process.rigged_daemon`.

It imports the daemon, wraps the commit port (`GroupCommit.append`) and the tools' port (`Registry.call`), and serves. What
meets the wrapped point says so on a pipe of its own (`--report-fd`, one JSON object a line) and then waits for ever, so that
the test can kill the process exactly there. Only what meets it waits: other runs go on to the same point.

`--pause before_append:TYPE` or `after_append:TYPE`: around the commit that holds an event of TYPE; before: nothing of it is
written; after: it is durable, and nobody was told. `before_call` and `after_reply`: around a tool call; before: its intent is
durable and nothing has left; after: its reply came and is not recorded.
`--fail-sync N`: the N-th sync of a log segment fails with EIO, after the data was written.
The rigs of disk and clock are told in `disk_rigs`.
`--noise`: every tool call writes to standard output in all the ways there are. `--crash`: every tool call raises.
"""

from __future__ import annotations

import argparse
import asyncio
import errno
import itertools
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Sequence
from typing import Any, NoReturn

from rpcagent import cli
from rpcagent.journal.commit import GroupCommit
from rpcagent.journal.disk import RealDisk
from rpcagent.tools.registry import Registry
from tests.process import disk_rigs


class Rig:
    def __init__(self, report_fd: int) -> None:
        self._report_fd = report_fd

    async def park(self, point: str, run_id: str) -> NoReturn:
        os.write(self._report_fd, json.dumps({"point": point, "runId": run_id}).encode() + b"\n")
        await asyncio.get_running_loop().create_future()
        raise AssertionError("a parked call went on")

    def append(self, point: str, kind: str) -> None:
        original = GroupCommit.append
        mark = json.dumps({"type": kind}, separators=(",", ":"))[1:-1].encode()

        async def append(
            journal: GroupCommit, run_id: str, epoch: int, seq: int, count: int, body: bytes, *, outcome: bool = False
        ) -> Any:
            if mark not in body:
                return await original(journal, run_id, epoch, seq, count, body, outcome=outcome)
            if point == "before_append":
                await self.park(point, run_id)
            answer = await original(journal, run_id, epoch, seq, count, body, outcome=outcome)
            assert answer == "ok"
            return await self.park(point, run_id)

        GroupCommit.append = append  # type: ignore[method-assign]

    def call(self, point: str) -> None:
        original = Registry.call

        async def call(registry: Registry, request: Any) -> Any:
            if point == "before_call":
                await self.park(point, request.run_id)
            await original(registry, request)
            await self.park(point, request.run_id)

        Registry.call = call  # type: ignore[method-assign]


def fail_sync(number: int) -> None:
    original = RealDisk.sync
    syncs = itertools.count(1)

    def sync(disk: RealDisk, name: str) -> None:
        if name.startswith("wal/") and next(syncs) == number:
            raise OSError(errno.EIO, "as told")
        original(disk, name)

    RealDisk.sync = sync  # type: ignore[method-assign]


def make_noise() -> None:
    original = Registry.call

    async def call(registry: Registry, request: Any) -> Any:
        print("a banner of the tool", flush=True)
        sys.stdout.write('{"jsonrpc":"2.0","id":1,"result":"forged"}\n')
        sys.stdout.flush()
        os.write(1, b"straight to descriptor 1\n")
        warnings.warn("a warning of the tool", stacklevel=1)
        subprocess.run(["/bin/sh", "-c", "echo from a child; cat"], check=True, timeout=20)  # noqa: ASYNC221
        return await original(registry, request)

    Registry.call = call  # type: ignore[method-assign]


def crash() -> None:
    from rpcagent.tools.files import Files

    async def call(_files: Files, _request: Any) -> Any:
        raise RuntimeError("x" * 4_000)

    Files.call = call  # type: ignore[method-assign]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--report-fd", type=int, required=True)
    parser.add_argument("--pause", action="append", default=[])
    parser.add_argument("--fail-sync", type=int)
    parser.add_argument("--noise", action="store_true")
    parser.add_argument("--crash", action="store_true")
    disk_rigs.add_options(parser)
    options, serve = parser.parse_known_args(argv)
    os.set_inheritable(options.report_fd, False)
    rig = Rig(options.report_fd)
    for pause in options.pause:
        point, _, kind = pause.partition(":")
        if kind:
            rig.append(point, kind)
        else:
            rig.call(point)
    if options.fail_sync:
        fail_sync(options.fail_sync)
    if options.noise:
        make_noise()
    if options.crash:
        crash()
    disk_rigs.set_up(options)
    return cli.main(["serve", *serve])


if __name__ == "__main__":
    sys.exit(main())
