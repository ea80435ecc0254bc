"""What the demonstration prints: plain text, coloured only on a terminal."""

from __future__ import annotations

import logging
import os
import textwrap
import threading
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

WIDTH = 110
_WORTH_TELLING = ("kind", "decision", "answer", "text", "output", "method", "clientRequestId")
BOLD, DIM, RED, GREEN = "1", "2", "31", "32"


class Transcript(logging.Handler):
    """Writes to `out`, line by line. As a log handler it shows what the client does on its own."""

    def __init__(self, out: TextIO) -> None:
        super().__init__(logging.INFO)
        self._out = out
        self._colour = out.isatty() and "NO_COLOR" not in os.environ
        self._lines = threading.Lock()
        self._tools: dict[str, str] = {}
        self._acts = 0

    def line(self, text: str = "", style: str = "") -> None:
        with self._lines:
            self._out.write(f"\x1b[{style}m{text}\x1b[0m\n" if style and self._colour else f"{text}\n")
            self._out.flush()

    def act(self, title: str) -> None:
        self._acts += 1
        self.line()
        self.line(f"{self._acts}. {title}", BOLD)

    def say(self, text: str) -> None:
        for part in textwrap.wrap(text, WIDTH - 3):
            self.line(f"   {part}")

    def killed(self, pid: int | None) -> None:
        self.line(f"   kill -9 {pid}", RED)

    def emit(self, record: logging.LogRecord) -> None:
        for part in textwrap.wrap(f"[client] {record.getMessage()}", WIDTH - 3):
            self.line(f"   {part}", DIM)

    def event(self, element: Mapping[str, Any]) -> None:
        """One durable event, as `events` gives it."""
        event = element["event"]
        for call in event.get("calls", ()):
            arguments = ", ".join(str(value) for value in call["arguments"].values())
            self._tools[call["stepId"]] = f"{call['tool']}({arguments})"
        told = [self._tools.get(event.get("stepId", ""), "")]
        if event.get("attempt", 1) > 1:
            told.append(f"attempt {event['attempt']}")
        told += [str(event[name]) for name in _WORTH_TELLING if isinstance(event.get(name), str)]
        told += [f"source {event['source']}"] if event.get("source", "tool") != "tool" else []
        self.line(
            f"   {element['seq']:>4}  {event['type']:<20} {'  '.join(word for word in told if word)}".rstrip(), DIM
        )

    def table(self, head: Sequence[str], rows: Sequence[Sequence[object]], *, good: Sequence[bool]) -> None:
        """One row a line; a row that is not `good` is red."""
        texts = [[str(cell) for cell in row] for row in rows]
        widths = [max(len(row[place]) for row in [list(head), *texts]) for place in range(len(head))]

        def laid_out(row: Sequence[str]) -> str:
            return "   " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()

        self.line(laid_out(head), BOLD)
        for row, fine in zip(texts, good, strict=True):
            self.line(laid_out(row), GREEN if fine else RED)
