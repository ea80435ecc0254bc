"""On which line of a TOML text each member stands, so that a complaint can name it.

Knows: the grammar of TOML as far as it is needed to step over values. Does not know: what a value is; `tomllib` has read
the text before and found it right, so nothing is checked here, and a line that is not found is no error.
"""

from __future__ import annotations

import contextlib
import re
import tomllib
from bisect import bisect_right

Keys = tuple[str | int, ...]
"""The way to a member: names of tables and keys, and places in lists."""

_BLANK = re.compile(r"[ \t]*")
_GAP = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_BARE = re.compile(r"[A-Za-z0-9_-]+")
_SCALAR = re.compile(r"[^,\]}#\n]+")
_TEXTS = tuple(
    re.compile(pattern, re.DOTALL)
    for pattern in (
        r'"""(?:\\.|[^\\])*?"{3,5}(?!")',
        r"'''.*?'{3,5}(?!')",
        r'"(?:\\.|[^"\\])*"',
        r"'[^']*'",
    )
)


def lines_of(text: str) -> dict[Keys, int]:
    """The line, counted from 1, of the header of each table, of each key, and of each element of a list."""
    scan = _Scan(text)
    with contextlib.suppress(IndexError, RecursionError, tomllib.TOMLDecodeError):  # some lines are better than none
        scan.document()
    return scan.lines


class _Scan:
    def __init__(self, text: str) -> None:
        self.lines: dict[Keys, int] = {}
        self._text = text
        self._at = 0
        self._ends = [place for place, character in enumerate(text) if character == "\n"]
        self._elements: dict[Keys, int] = {}

    def document(self) -> None:
        table: Keys = ()
        while True:
            self._skip(_GAP)
            if self._at >= len(self._text):
                return
            if self._text[self._at] == "[":
                table = self._header()
            else:
                self._pair(table)

    def _header(self) -> Keys:
        line = self._line()
        many = self._text.startswith("[[", self._at)
        self._at += 2 if many else 1
        table: Keys = ()
        names = self._key()
        for place, name in enumerate(names):
            table = (*table, name)
            if many and place == len(names) - 1:
                self._elements[table] = self._elements.get(table, 0) + 1
                self.lines.setdefault(table, line)
            if table in self._elements:
                table = (*table, self._elements[table] - 1)
            self.lines.setdefault(table, line)
        self.lines[table] = line  # a table may have been named before, by the header of one inside it
        self._skip(_BLANK)
        self._at += 2 if many else 1
        return table

    def _pair(self, table: Keys) -> None:
        line = self._line()
        for name in self._key():
            table = (*table, name)
            self.lines.setdefault(table, line)
        self._skip(_BLANK)
        self._at += 1  # the equals sign
        self._skip(_BLANK)
        self._value(table)

    def _key(self) -> list[str]:
        names: list[str] = []
        while True:
            self._skip(_BLANK)
            if self._text[self._at] in "\"'":
                names.append(tomllib.loads("key = " + self._string())["key"])
            else:
                names.append(self._skip(_BARE))
            self._skip(_BLANK)
            if self._text[self._at] != ".":
                return names
            self._at += 1

    def _value(self, table: Keys) -> None:
        match self._text[self._at]:
            case '"' | "'":
                self._string()
            case "[":
                self._list(table)
            case "{":
                self._inline_table(table)
            case _:
                self._skip(_SCALAR)

    def _list(self, table: Keys) -> None:
        self._at += 1
        place = 0
        while True:
            self._skip(_GAP)
            if self._text[self._at] == "]":
                break
            if self._text[self._at] == ",":
                self._at += 1
                continue
            self.lines[(*table, place)] = self._line()
            self._value((*table, place))
            place += 1
        self._at += 1

    def _inline_table(self, table: Keys) -> None:
        self._at += 1
        while True:
            self._skip(_GAP)
            if self._text[self._at] == "}":
                break
            if self._text[self._at] == ",":
                self._at += 1
                continue
            self._pair(table)
        self._at += 1

    def _string(self) -> str:
        for pattern in _TEXTS:
            if pattern.match(self._text, self._at):
                return self._skip(pattern)
        raise IndexError

    def _skip(self, pattern: re.Pattern[str]) -> str:
        found = pattern.match(self._text, self._at)
        if found is None:
            raise IndexError
        self._at = found.end()
        return found[0]

    def _line(self) -> int:
        return bisect_right(self._ends, self._at - 1) + 1
