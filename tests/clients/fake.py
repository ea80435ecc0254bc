"""A daemon that the test writes, and clients of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from rpcagent_client import Client

FAKE = Path(__file__).with_name("fake_daemon.py")


class Fake:
    """What the daemon does at each start, and what it received."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._clients: list[Client] = []

    def does(self, *starts: list[dict[str, Any]]) -> None:
        for number, script in enumerate(starts):
            (self.folder / f"{number}.json").write_text(json.dumps(script))

    def client(self, *flags: str, **settings: Any) -> Client:
        settings = {"timeout": 10.0} | settings
        client = Client([sys.executable, "-S", str(FAKE), str(self.folder), *flags], **settings)
        self._clients.append(client)
        return client

    def received(self) -> list[tuple[int, str, dict[str, Any]]]:
        """(which start of the daemon, method, params) of every request, in order."""
        file = self.folder / "received.jsonl"
        lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        return [(line["start"], line["request"]["method"], line["request"]["params"]) for line in lines]

    def starts(self) -> int:
        file = self.folder / "starts"
        return len(file.read_text()) if file.exists() else 0

    def close(self) -> None:
        for client in self._clients:
            client.close(grace=1.0)
