"""The search of `files.search`, as a process of its own.

Knows: the request on its standard input and the answer on its standard output, both one JSON object. It is a process
because a regular expression from a model can take for ever on a short line, and nothing in the daemon could stop it; here
a timer ends it, and killing the process ends it for certain. Does not know: tools, runs, or the daemon.

Standard library only, so that it starts quickly.
"""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from types import FrameType
from typing import Any

from rpcagent.tools.workspace import Refused, Workspace, is_temporary, open_regular, readable

FILE_BYTES = 4 * 1024 * 1024
LINE_CHARACTERS = 400
DEPTH = 64
FILES = 100_000
SECONDS = 10.0
CPU_SECONDS = 15


class _TooLong(Exception):
    """The time is over, wherever the search stands."""


class _Search:
    def __init__(self, request: dict[str, Any]) -> None:
        self.workspace = Workspace(request["root"], request.get("store"), request.get("hidden", ()))
        self.pattern = re.compile(request["pattern"])
        self.glob: str | None = request.get("glob")
        self.limit: int = request["limit"]
        self.seconds: float = request.get("seconds", SECONDS)
        self.start = self.workspace.split(request.get("path") or ".")
        self.matches: list[dict[str, Any]] = []
        self.skipped = {"binary": 0, "tooBig": 0, "unreadable": 0}
        self.files = 0
        self.stopped = ""
        self.at = ""

    def run(self) -> dict[str, Any]:
        try:
            with _deadline(self.seconds):
                self._walk(self.start)
        except _TooLong:
            self.stopped = f"time ({self.seconds:g} s), in {self.at!r}"
        skipped = {reason: count for reason, count in self.skipped.items() if count}
        return {"matches": self.matches, "files": self.files, "skipped": skipped, "stopped": self.stopped}

    def _walk(self, start: tuple[str, ...]) -> None:
        try:
            with self.workspace.directory(start):
                pass
        except Refused as refused:
            if not start or refused.kind != "path_refused":
                raise
            with self.workspace.directory(start[:-1]) as parent:  # not a directory: a file, or it is refused there
                os.close(open_regular(parent, start[-1], "/".join(start)))
                self._file(parent, start)
            return
        todo = [start]
        while todo and not self.stopped:
            parts = todo.pop()
            try:
                with self.workspace.directory(parts) as directory:
                    below = self._entries(directory, parts)
            except (Refused, OSError):
                self.skipped["unreadable"] += 1
                continue
            todo.extend(reversed(below))

    def _entries(self, directory: int, parts: tuple[str, ...]) -> list[tuple[str, ...]]:
        """Searches the directory's files, and returns the directories in it."""
        below: list[tuple[str, ...]] = []
        for name in sorted(os.listdir(directory)):
            try:
                mode = os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode
            except OSError:  # gone meanwhile
                continue
            if stat.S_ISDIR(mode):
                if name != ".git" and len(parts) < DEPTH and not self.workspace.hides((*parts, name)):
                    below.append((*parts, name))
            elif stat.S_ISREG(mode) and not is_temporary(name) and self._wanted((*parts, name)):
                self._file(directory, (*parts, name))
            if self.stopped:
                break
        return below

    def _wanted(self, parts: tuple[str, ...]) -> bool:
        if self.glob is None:
            return True
        path = "/".join(parts)
        return fnmatchcase(path, self.glob) or fnmatchcase(parts[-1], self.glob)

    def _file(self, directory: int, parts: tuple[str, ...]) -> None:
        if self.workspace.hides(parts):
            return
        self.at = readable("/".join(parts))
        if self.files >= FILES:
            self.stopped = f"files ({FILES})"
            return
        self.files += 1
        try:
            with os.fdopen(open_regular(directory, parts[-1], self.at), "rb") as stream:
                raw = stream.read(FILE_BYTES + 1)
        except (Refused, OSError):
            self.skipped["unreadable"] += 1
            return
        if len(raw) > FILE_BYTES:
            self.skipped["tooBig"] += 1
        elif b"\0" in raw:
            self.skipped["binary"] += 1
        else:
            self._lines(raw)

    def _lines(self, raw: bytes) -> None:
        offset = 0
        for number, line in enumerate(raw.split(b"\n"), 1):
            text = line.decode("utf-8", "replace").rstrip("\r")
            if self.pattern.search(text):
                if len(self.matches) >= self.limit:
                    self.stopped = f"matches ({self.limit})"
                    return
                self.matches.append({"path": self.at, "line": number, "offset": offset, "text": text[:LINE_CHARACTERS]})
            offset += len(line) + 1


@contextmanager
def _deadline(seconds: float) -> Iterator[None]:
    """Raises _TooLong in the middle of anything, regular expressions included: they look for signals."""

    def ring(_number: int, _frame: FrameType | None) -> None:
        raise _TooLong

    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """`{matches, files, skipped, stopped}`, or `{kind, message}` where there is nothing to search."""
    try:
        return _Search(request).run()
    except Refused as refused:
        return {"kind": refused.kind, "message": refused.message}
    except (re.error, RecursionError, OverflowError) as error:
        return {"kind": "invalid_arguments", "message": f"The pattern is no regular expression: {error}."}


def main() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 1))
    json.dump(answer(json.load(sys.stdin)), sys.stdout)


if __name__ == "__main__":
    main()
