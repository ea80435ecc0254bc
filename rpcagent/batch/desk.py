"""The three streams of a command: what is printed where, and whether a person sits in front of it.

Progress goes to standard error and the run's output to standard output, so that `rpcagent run ... > answer.txt` holds the
answer alone. With `--json` everything that a program may want goes to standard output, one object a line.

`rich` is loaded only where standard output is a terminal; everywhere else the lines are plain.
"""

from __future__ import annotations

import io
import json
import logging
import os
import shutil
from collections.abc import Iterable
from typing import Any, Protocol, TextIO

from rpcagent.batch.narrator import Tone
from rpcagent.batch.text import one_line, visible

WIDTH = 100
_STYLES: dict[Tone, str] = {
    "plain": "",
    "dim": "dim",
    "good": "green",
    "bad": "red",
    "ask": "yellow",
    "strong": "bold",
    "added": "green",
    "removed": "red",
}


class Paper(Protocol):
    """Where lines for a person go. `live`: pieces of a line may be shown as they come."""

    live: bool

    def line(self, text: str, tone: Tone) -> None: ...

    def piece(self, text: str) -> None: ...


class PlainPaper:
    """Lines as they are."""

    live = False

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def line(self, text: str, tone: Tone) -> None:  # noqa: ARG002  (plain)
        self._out.write(text + "\n")
        self._out.flush()

    def piece(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()


class RichPaper:
    """Lines in colour, as far as the terminal and NO_COLOR allow. Nothing in a text is taken for markup."""

    live = True

    def __init__(self, out: TextIO) -> None:
        from rich.console import Console
        from rich.text import Text

        self._text = Text
        self._console = Console(file=out, highlight=False, markup=False, emoji=False, soft_wrap=True)

    def line(self, text: str, tone: Tone) -> None:
        self._console.print(self._text(text, _STYLES[tone]))

    def piece(self, text: str) -> None:
        self._console.print(self._text(text), end="")
        self._console.file.flush()


class Desk:
    """One command's streams. `interactive`: questions may be asked here and now."""

    def __init__(self, stdin: TextIO, stdout: TextIO, stderr: TextIO, *, as_json: bool, no_input: bool) -> None:
        for stream in (stdout, stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")  # what a terminal cannot show ends no command
        self._stdin, self._stdout = stdin, stdout
        self._stderr = stderr
        self.as_json = as_json
        self.interactive = stdin.isatty() and stderr.isatty() and not as_json and not no_input
        self.on_screen = stdout.isatty() and not as_json
        self.width = shutil.get_terminal_size((WIDTH, 24)).columns if stderr.isatty() or self.on_screen else WIDTH
        self._progress = self._paper(stderr)
        self._result = self._paper(stdout)
        self._open_line = False

    def _paper(self, out: TextIO) -> Paper:
        return RichPaper(out) if self.on_screen and out.isatty() else PlainPaper(out)

    @property
    def streams(self) -> bool:
        """Whether a model's text is shown piece by piece; it need not be shown again where the output goes to a screen."""
        return self._progress.live and not self.as_json

    # For a person

    def say(self, text: str = "", tone: Tone = "plain") -> None:
        """A line of progress; nothing with `--json`, whose reader gets the same as objects."""
        if self.as_json:
            return
        self.end_piece()
        self._progress.line(text, tone)

    def piece(self, text: str) -> None:
        self._open_line = True
        self._progress.piece(text)

    def end_piece(self) -> None:
        """Ends the line that pieces have begun."""
        if self._open_line:
            self._open_line = False
            self._progress.piece("\n")

    def tell(self, text: str = "", tone: Tone = "plain") -> None:
        """A line that the command was called for, on standard output."""
        self._result.line(text, tone)

    def table(self, head: Iterable[str], rows: Iterable[tuple[Iterable[object], Tone]]) -> None:
        """Columns as wide as they must be; the last one takes what is left of the line."""
        titles = list(head)
        laid = [([visible(str(cell)) for cell in cells], tone) for cells, tone in rows]
        widths = [
            max(len(cells[place]) for cells in [titles, *(row for row, _ in laid)]) for place in range(len(titles))
        ]

        def one(cells: list[str]) -> str:
            *first, last = cells
            text = "".join(f"{cell:<{width}}  " for cell, width in zip(first, widths, strict=False))
            return (text + one_line(last, max(self.width - len(text), 20))).rstrip()

        self.tell(one(titles), "strong")
        for cells, tone in laid:
            self.tell(one(cells), tone)

    def output(self, text: str) -> None:
        """The run's own output: to a screen only what it can show, to a file or a pipe as it is."""
        shown = visible(text, lines=True) if self.on_screen else text
        self.end_piece()
        self._stdout.write(shown if shown.endswith("\n") else shown + "\n")
        self._stdout.flush()

    def ask(self, prompt: str) -> str | None:
        """A line from the person; None at the end of input. What was typed before the question was shown is no answer."""
        self.end_piece()
        _forget_typed(self._stdin)
        self._stderr.write(prompt)
        self._stderr.flush()
        answer = self._stdin.readline()
        return answer.strip() if answer else None

    # For a program

    def fact(self, value: Any) -> None:
        """One JSON object, on a line of its own."""
        self._stdout.write(json.dumps(value, ensure_ascii=False, separators=(",", ":")) + "\n")
        self._stdout.flush()

    def closed(self) -> None:
        """The reader has gone: Python would complain once more at its end."""
        os.dup2(os.open(os.devnull, os.O_WRONLY), self._stdout.fileno())


class ClientNotes(logging.Handler):
    """What the client does on its own, such as asking a new daemon again, becomes part of the progress."""

    def __init__(self, desk: Desk) -> None:
        super().__init__(logging.INFO)
        self._desk = desk

    def emit(self, record: logging.LogRecord) -> None:
        self._desk.say(f"{'client':<11}{one_line(record.getMessage(), 400)}", "dim")


def _forget_typed(stdin: TextIO) -> None:
    import termios

    try:
        termios.tcflush(stdin.fileno(), termios.TCIFLUSH)
    except (OSError, ValueError, termios.error):
        return  # no terminal: a test, or it went away; the answer then decides
