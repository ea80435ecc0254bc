"""The test's side of the fault MCP server: its configuration, its faults, its truth, and what it tells. All bounded."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import anyio
from tests.service.counting import read_truth

ROOT = Path(__file__).resolve().parents[2]
EVENT_S = 20.0


class McpFaultServer:
    """One folder of truth, faults and events, over all lives of the server."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "faults").mkdir(parents=True)
        os.mkfifo(folder / "events")
        os.mkfifo(folder / "releases")
        self._events = os.open(folder / "events", os.O_RDWR | os.O_NONBLOCK)
        self._releases = os.open(folder / "releases", os.O_RDWR | os.O_NONBLOCK)
        self._buffer = b""
        self._heard: list[dict[str, Any]] = []
        self._faults = 0

    def close(self) -> None:
        os.close(self._events)
        os.close(self._releases)

    def config(self, **members: Any) -> dict[str, Any]:
        command = [sys.executable, "-m", "tests.service.mcp_server", str(self.folder)]
        env = {"PYTHONPATH": str(ROOT), **members.pop("env", {})}
        return {"command": command, "env": env, **members}

    def fault(self, name: str, at: str = "after_effect", arg: Any = None, *, always: bool = False) -> None:
        """For the next time that the server comes to `at`: `start`, `list`, `before_effect` or `after_effect`."""
        self._faults += 1
        fault = {"name": name, "at": at, "arg": arg, "always": always}
        (self.folder / "faults" / f"{self._faults:04}").write_text(json.dumps(fault))

    def release(self, count: int = 1) -> None:
        os.write(self._releases, b"x" * count)

    async def event(self, name: str) -> dict[str, Any]:
        """The next event of that name, also one that is past; AssertionError when none comes."""
        with anyio.move_on_after(EVENT_S):
            while True:
                for place, event in enumerate(self._heard):
                    if event["event"] == name:
                        return self._heard.pop(place)
                await anyio.wait_readable(self._events)
                self._take()
        raise AssertionError(f"no event {name!r} within {EVENT_S} s; there were: {self._heard}")

    def events(self, name: str) -> list[dict[str, Any]]:
        """All of that name that have happened and that `event` did not return."""
        self._take()
        return [event for event in self._heard if event["event"] == name]

    def calls(self) -> list[dict[str, Any]]:
        return [line for line in read_truth(self.folder / "truth") if line["kind"] == "call"]

    def effects(self) -> dict[str, int]:
        """Effects by tool."""
        return dict(Counter(line["path"] for line in read_truth(self.folder / "truth") if line["kind"] == "effect"))

    def _take(self) -> None:
        try:
            self._buffer += os.read(self._events, 1 << 20)
        except BlockingIOError:
            return
        *lines, self._buffer = self._buffer.split(b"\n")
        self._heard += [json.loads(line) for line in lines]
