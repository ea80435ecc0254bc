"""A question as a person must see it before the answer: all of its subject, and what each choice means.

Knows: the kinds of questions and how the arguments of the built-in tools are best read (a command line, a difference). What is
shown beyond the subject, such as the present content of a file, is said to be so: the digest does not bind it.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from rpcagent.batch.narrator import Tone, ordinal
from rpcagent.batch.text import until, visible

Shown = tuple[str, Tone]
Question = Mapping[str, Any]

FILE_BYTES = 1 << 20
LINES_SHOWN = 120
"""Of one argument; the rest stands under `details`."""
_NAME_WIDTH = 11

MEANINGS: dict[tuple[str, str], str] = {
    ("tool_call", "allow"): "it runs once, exactly as shown",
    ("tool_call", "deny"): "it does not run; the model is told, and the run goes on",
    ("unknown_outcome", "happened"): "it is taken for done, with what you say it returned",
    ("unknown_outcome", "did_not_happen"): "it is done once more; this answer is also its approval",
    ("unknown_outcome", "abandon"): "it stays unknown for good; the model is told, and the run goes on",
    ("budget", "extend"): "the run goes on with as much more as you say",
    ("budget", "stop"): "the run fails",
    ("retry", "retry"): "it is tried again, for as long as at first",
    ("retry", "stop"): "the run fails",
}

_TITLES = {
    "tool_call": "may this tool call run?",
    "unknown_outcome": "did this happen? The daemon cannot know",
    "budget": "the budget is spent",
    "retry": "this does not work; go on trying?",
}

_EFFECTS = {
    "read_only": "it only reads",
    "idempotent": "after a crash it is sent again with the same key, which makes one effect",
    "reconcilable": "after a crash it is looked up before anything is sent again",
    "at_most_once": "after a crash it is never sent again by itself: you would be asked whether it happened",
}

AMOUNTS = {
    "steps": "steps",
    "attempts": "attempts",
    "repeats": "repeats",
    "tokens": "tokens",
    "cost_usd": "costUsd",
    "active_s": "activeS",
}
"""The limit as a `budget` question names it, and the member of `extend` that adds to it."""


def described(question: Question, now: datetime, *, whole: bool = False) -> list[Shown]:
    """The question, from its title to when it expires. `whole`: nothing is cut and nothing compared, and the ids and the
    digest that the answer is bound to are told as well."""
    subject = question["subject"]
    title = _TITLES.get(question["kind"], question["kind"].replace("_", " "))
    lines: list[Shown] = [(f"Question {ordinal(question['approvalId'])}: {title}", "strong")]
    for name, value in subject.items():
        if name == "arguments" and isinstance(value, dict):
            if whole:
                lines += [line for key, part in value.items() for line in _value(key, part, whole=True)]
            else:
                lines += _arguments(str(subject.get("tool", "")), value, subject.get("workspace"))
        elif name == "effect":
            lines.append((_named("effect", f"{value}: {_EFFECTS.get(str(value), '')}"), "plain"))
        elif name in {"error", "spent"} and isinstance(value, dict):
            told = ", ".join(f"{key} {part}" for key, part in value.items() if part)
            lines.append((_named(name, visible(told, lines=True)), "plain"))
        elif name == "diff" and isinstance(value, str):
            lines += _diff_lines(value.splitlines())
        elif value is not None:
            lines += _value(name, value, whole=whole)
    if question.get("expiresAt"):
        lines.append((_named("expires", until(question["expiresAt"], now)), "ask"))
    if whole:
        for name in ("approvalId", "runId", "stepId", "requestedAt", "digest"):
            lines += [(_named(name, visible(str(question[name]))), "dim")] if question.get(name) else []
    return lines


def meaning(kind: str, choice: str) -> str:
    return MEANINGS.get((kind, choice), "")


def _named(name: str, text: str) -> str:
    first, *rest = text.split("\n")
    return "\n".join(
        [f"  {visible(name):<{_NAME_WIDTH - 1}} {first}".rstrip(), *(" " * (_NAME_WIDTH + 2) + line for line in rest)]
    )


def _value(name: str, value: Any, *, whole: bool = False) -> list[Shown]:
    """A value in full, a text of many lines as a block under its name."""
    if not isinstance(value, str):
        value = json.dumps(value, ensure_ascii=False)
    lines = value.split("\n")
    if len(lines) == 1:
        return [(_named(name, visible(value)), "plain")]
    block: list[Shown] = [(f"    |{visible(line)}", "plain") for line in lines]
    return [(_named(name, f"{len(lines)} lines"), "plain"), *(block if whole else _cut(block))]


def _arguments(tool: str, given: dict[str, Any], workspace: Any) -> list[Shown]:
    rest = dict(given)
    lines: list[Shown] = []
    if tool == "shell.run" and isinstance(given.get("command"), str):
        command = rest.pop("command").split("\n")
        lines += [
            (f"  $ {visible(command[0])}", "strong"),
            *((f"    {visible(line)}", "strong") for line in command[1:]),
        ]
    elif tool == "files.edit" and isinstance(given.get("old"), str) and isinstance(given.get("new"), str):
        difference = _cut(_difference(rest.pop("old"), rest.pop("new")))
        lines += [*_shown_rest(rest), (_named("change", ""), "plain"), *difference]
        return lines
    elif tool == "files.write" and isinstance(given.get("content"), str):
        content = rest.pop("content")
        present, said = _present(workspace, given.get("path"))
        size = f"{len(content.encode('utf-8', 'replace'))} bytes; {said}"
        lines += [*_shown_rest(rest), (_named("content", size), "plain"), *_cut(_difference(present, content))]
        return lines
    return lines + _shown_rest(rest)


def _shown_rest(given: dict[str, Any]) -> list[Shown]:
    return [line for name, value in given.items() for line in _value(name, value)]


def _difference(old: str, new: str) -> list[Shown]:
    lines = list(difflib.unified_diff(old.splitlines(), new.splitlines(), lineterm="", n=2))[2 if old else 3 :]
    return list(_diff_lines(lines)) if lines else [("    no difference", "dim")]


def _diff_lines(lines: list[str]) -> Iterator[Shown]:
    tones: dict[str, Tone] = {"+": "added", "-": "removed", "@": "dim"}
    for line in lines:
        yield f"    {visible(line)}", tones.get(line[:1], "plain")


def _cut(lines: list[Shown]) -> list[Shown]:
    """Long blocks loudly lack their middle: the end is where surprises stand."""
    if len(lines) <= LINES_SHOWN:
        return lines
    half = LINES_SHOWN // 2
    left_out: Shown = (
        f"    [{len(lines) - 2 * half} lines are not shown here; `d` shows them all, so does `rpcagent show --json`]",
        "ask",
    )
    return [*lines[:half], left_out, *lines[-half:]]


def _present(workspace: Any, path: Any) -> tuple[str, str]:
    """The file as it is now, where it can be shown, and what was found."""
    if not isinstance(workspace, str) or not isinstance(path, str):
        return "", "as a new file"
    root = Path(workspace).resolve()
    try:
        file = (root / path).resolve()
        if not file.is_relative_to(root):
            return "", "outside the workspace"
        if not file.exists():
            return "", "a new file"
        if not file.is_file() or file.stat().st_size > FILE_BYTES:
            return "", "the present content cannot be compared"
        return file.read_text(encoding="utf-8"), "compared with the file as it is now"
    except (OSError, ValueError):
        return "", "the present content cannot be compared"
