"""`rpcagent verify` and `backup` as processes of their own, on a store that a daemon owns, or several one after the other.

Knows: that neither may find damage, whatever happens to the store meanwhile, and that a backup may give up. Does not know:
what happens to it.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

from tests.process.wire_driver import ROOT
from tests.soak.model import expect

WAIT_S = 300.0


class Beside:
    """One command at a time. `keyed`: the options that open an encrypted store."""

    def __init__(self, store: Path, keyed: tuple[str, ...]) -> None:
        self.done: Counter[str] = Counter()
        self._store, self._keyed = store, keyed
        self._process: subprocess.Popen[str] | None = None
        self._name, self._copies = "", 0

    def verify(self, store: Path | None = None) -> None:
        self._begin("verify", "--replay", "--store", str(store or self._store))

    def backup(self) -> Path:
        """Where the copy will be."""
        self._copies += 1
        copy = self._store.parent / f"copy-{self._copies}"
        self._begin("backup", str(copy), "--store", str(self._store))
        return copy

    def ended(self) -> bool:
        """There is none that still goes on."""
        return self._process is None or self._process.poll() is not None

    def finish(self) -> bool:
        """Waits for it. False: a backup gave up, because the store changed faster than it could be copied, and left nothing.
        It must not even warn, although lives may have come and gone meanwhile. Raises Finding."""
        process, self._process = self._process, None
        if process is None:
            return True
        said, _ = process.communicate(timeout=WAIT_S)
        lines = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
        errors = [line["error"] for line in lines if "error" in line]
        if self._name == "backup" and [error["data"].get("errno") for error in errors] == ["ESTALE"]:
            self.done["given up"] += 1
            return False
        found = [line["finding"] for line in lines if line.get("finding", {}).get("severity") in {"damage", "warning"}]
        expect(process.returncode == 0 and not found, f"{self._name} is not content", found, said[-2_000:])
        self.done[self._name] += 1
        return True

    def drop_copies(self) -> None:
        for number in range(1, self._copies + 1):
            shutil.rmtree(self._store.parent / f"copy-{number}", ignore_errors=True)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()

    def _begin(self, name: str, *options: str) -> None:
        assert self._process is None
        self._name = name
        command = [sys.executable, "-m", "rpcagent", name, *options, *self._keyed, "--json"]
        self._process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
