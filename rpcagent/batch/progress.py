"""What is shown of a run while it goes on: its events as lines or objects, and the model's text as it comes.

A text is shown once: what was streamed is not repeated by the event that makes it durable, and the final answer, which is
the run's output, is left to whoever prints that.
"""

from __future__ import annotations

from typing import Any

from rpcagent.batch.desk import Desk
from rpcagent.batch.narrator import WORD_WIDTH, Line, Narrator
from rpcagent.batch.text import visible

Json = dict[str, Any]


class Progress:
    """`quiet_until`: events up to this one are not shown in lines; they were shown before, or are many. `questions`
    false: whoever asks them shows them in full."""

    def __init__(self, desk: Desk, quiet_until: int = 0, *, questions: bool = True) -> None:
        self._desk = desk
        self._narrator = Narrator(desk.width)
        self._quiet_until = quiet_until
        self._questions = questions
        self._streamed = ""
        self._stream: tuple[str, int] | None = None
        self._held: Line | None = None
        self.last_text = ""

    def event(self, element: Json) -> None:
        if self._desk.as_json:
            self._desk.fact(element)
            return
        line = self._narrator.told(element)
        if element["seq"] <= self._quiet_until:
            return
        event = element["event"]
        if event["type"] == "model_answered":
            self._answered(event, line)
            return
        held, self._held = self._held, None
        if held is not None and event["type"] != "run_completed":
            self._show(held)
        self._stream = None
        if not line.minor and (self._questions or event["type"] != "approval_requested"):
            self._show(line)

    def delta(self, params: Json) -> None:
        if not self._desk.streams:
            return
        stream = (params["stepId"], params["attempt"])
        if stream != self._stream:
            self._desk.end_piece()
            self._stream, self._streamed = stream, ""
            word = "output" if params.get("stream") == "output" else "model"
            self._desk.piece(f"{word:<{WORD_WIDTH}}")
        self._streamed += params["text"]
        self._desk.piece(visible(params["text"], lines=True).replace("\n", "\n" + " " * WORD_WIDTH))

    def _answered(self, event: Json, line: Line) -> None:
        text = event.get("text", "").strip()
        whole = self._stream == (event["stepId"], event["attempt"]) and self._streamed.strip() == text
        self._stream = None
        if not self._desk.streams and not event.get("calls"):
            self._held = line  # most likely the run's output
        elif whole:
            self._desk.end_piece()
        elif not line.minor:
            self._show(line)
        if self._desk.streams:
            self.last_text = text

    def _show(self, line: Line) -> None:
        self._desk.say(line.laid_out(), line.tone)
