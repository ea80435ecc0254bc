"""Work for Restate: the service whose handler the server calls. Arguments: the port to listen on."""

from __future__ import annotations

import asyncio
import random
import sys

import restate
from hypercorn.asyncio import serve
from hypercorn.config import Config

TEXT = random.Random(1).randbytes(200).hex()
"""What brings a step's record to some 700 bytes."""

bench = restate.Service("bench")


@bench.handler()
async def run(context: restate.Context, steps: int) -> int:
    for number in range(steps):
        await context.run_typed("step", lambda number=number: f"{number} {TEXT}")
    return steps


def main(port: int) -> None:
    settings = Config()
    settings.bind = [f"127.0.0.1:{port}"]
    settings.loglevel = "ERROR"
    settings.accesslog = None
    asyncio.run(serve(restate.app([bench]), settings))


if __name__ == "__main__":
    main(int(sys.argv[1]))
