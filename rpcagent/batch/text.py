"""Foreign text made fit to be read: short, on one line, and without a character that a terminal would obey.

What a model or a tool wrote is shown to a person who decides by it. An escape sequence, a carriage return or a change of
direction could show another text than the one that is bound by the digest, so each of them is shown as its number.
"""

from __future__ import annotations

import json
import unicodedata
from datetime import datetime
from typing import Any

_OBEYED = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
_JOINERS = "\u200c\u200d"
"""Letters and emoji are written with these, and they move nothing."""

ELLIPSIS = "..."


def visible(text: str, *, lines: bool = False) -> str:
    """Every character that a terminal would obey, as its number; with `lines`, newlines and tabs stay."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or (lines and c in "\n\t") else _shown(c) for c in text)


def _shown(character: str) -> str:
    if character in _JOINERS or unicodedata.category(character) not in _OBEYED:
        return character
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")


def one_line(text: str, width: int) -> str:
    """On one line of at most `width` characters; white space is folded."""
    # A long text is cut before it is looked at, so that a megabyte costs no more than a line.
    folded = visible(" ".join(text[: width * 4 + 64].split()))
    short = len(text) <= width * 4 + 64 and len(folded) <= width
    return folded if short else folded[: max(width - len(ELLIPSIS), 0)] + ELLIPSIS


def compact(value: Any, width: int) -> str:
    """A JSON value in few characters: text as it is where it is one plain word, else as JSON."""
    if isinstance(value, str):
        plain = value.isprintable() and value and not any(c in value for c in " \"'=\\")
        return one_line(value, width) if plain else one_line(json.dumps(value, ensure_ascii=False), width)
    return one_line(json.dumps(value, ensure_ascii=False), width)


def arguments(given: Any, width: int) -> str:
    """The arguments of a call as `name=value`, each shortened, all of them in `width`."""
    if not isinstance(given, dict):
        return compact(given, width)
    return one_line(" ".join(f"{visible(name)}={compact(value, 60)}" for name, value in given.items()), width)


def result_text(result: Any) -> str:
    """What a tool result (as in MCP) says, as text."""
    if not isinstance(result, dict):
        return "" if result is None else json.dumps(result, ensure_ascii=False)
    parts = [str(part.get("text", f"[{part.get('type', 'part')}]")) for part in result.get("content") or ()]
    return "\n".join(parts) if parts else json.dumps(result, ensure_ascii=False)


def result_summary(result: Any, width: int) -> str:
    """The first line of a result, and how much more there is."""
    text = result_text(result).strip()
    first, _, rest = text.partition("\n")
    more = f" (+{rest.count(chr(10)) + 1} lines)" if rest else ""
    return one_line(first, max(width - len(more), 20)) + more


def goal_text(given: Any) -> str:
    """The input of a run, whose parts that are no text are named."""
    if isinstance(given, str):
        return given
    return " ".join(str(part.get("text", f"[{part.get('type', 'part')}]")) for part in given or ())


def span(seconds: float) -> str:
    """A duration in its largest unit: `40s`, `12m`, `3h`, `5d`."""
    seconds = max(seconds, 0.0)
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "m")):
        if seconds >= size:
            return f"{int(seconds // size)}{unit}"
    return f"{int(seconds)}s"


def instant(text: str) -> datetime:
    return datetime.fromisoformat(text)


def clock(text: str) -> str:
    """An instant of the wire for a reader: UTC, to the second."""
    return instant(text).strftime("%Y-%m-%d %H:%M:%SZ")


def until(then: str, now: datetime) -> str:
    """`2031-04-01 12:30:00Z (in 4m)`."""
    return f"{clock(then)} (in {span((instant(then) - now).total_seconds())})"
