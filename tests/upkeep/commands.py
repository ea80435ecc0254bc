"""The real command line, in this process: exit code, lines for a person, objects for a program."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
from pathlib import Path
from typing import Any, NamedTuple

from rpcagent import cli


class Said(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def facts(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.splitlines()]

    @property
    def findings(self) -> list[dict[str, Any]]:
        return [fact["finding"] for fact in self.facts if "finding" in fact]

    @property
    def summary(self) -> dict[str, Any]:
        return self.facts[-1]["summary"]

    @property
    def error(self) -> dict[str, Any]:
        return self.facts[-1]["error"]


def said(*words: object) -> Said:
    """`rpcagent` with these words."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = cli.main([str(word) for word in words])
        except SystemExit as exit_:
            code = int(exit_.code or 0)
    return Said(code, out.getvalue(), err.getvalue())


def damage(found: Said) -> list[dict[str, Any]]:
    return [finding for finding in found.findings if finding["severity"] == "damage"]


def fingerprint(folder: Path) -> dict[str, str]:
    """Every name below the folder, with the SHA-256 of what it holds."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        for path in sorted(folder.rglob("*"))
    }
