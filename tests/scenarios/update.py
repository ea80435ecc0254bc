"""Rewrites what the examples receive. What they send keeps its meaning: an id or digest that the daemon gave before is
replaced by the one that it gives now, at the same place.

A new example may name what came back: `<runId>` is the last value of a member of this name, `<digest:2>` the last but one.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from .replay import Entry, acts, play, read, write

_NAMED = re.compile(r"<([A-Za-z]+)(?::([1-9]))?>")


def update(path: Path) -> bool:
    """Whether the file has changed."""
    before = read(path)
    known = acts(before)
    old = [message for _, received in known for message in received]

    def adapt(message: Any, came: list[Any]) -> Any:
        return _replaced(message, came, _renamed(old, came))

    after: list[Entry] = []
    done, _ = play([entry for entry, _ in known], adapt)
    for entry, received in done:
        after += [entry, *({"receive": message} for message in received)]
    write(path, after)
    return after != before


def _renamed(old: list[Any], new: list[Any]) -> dict[str, str]:
    """Texts that came before, and what stands in their place now; ids and digests only."""
    names: dict[str, str] = {}

    def walk(a: Any, b: Any) -> None:
        if isinstance(a, dict) and isinstance(b, dict):
            for name in a.keys() & b.keys():
                walk(a[name], b[name])
        elif isinstance(a, list) and isinstance(b, list):
            for x, y in zip(a, b, strict=False):
                walk(x, y)
        elif isinstance(a, str) and isinstance(b, str) and a != b and re.match(r"(run|apr|stp)_|sha256:|sto_", a):
            names.setdefault(a, b)

    for a, b in zip(old, new, strict=False):
        walk(a, b)
    return names


def _replaced(value: Any, came: list[Any], names: dict[str, str]) -> Any:
    if isinstance(value, dict):
        return {name: _replaced(member, came, names) for name, member in value.items()}
    if isinstance(value, list):
        return [_replaced(member, came, names) for member in value]
    if not isinstance(value, str):
        return value
    named = _NAMED.fullmatch(value)
    if named is None:
        return names.get(value, value)
    found: list[str] = []
    for message in came:
        _values(message, named[1], found)
    distinct = list(dict.fromkeys(reversed(found)))
    place = int(named[2] or 1) - 1
    if place >= len(distinct):
        raise LookupError(f"nothing came back yet for {value}")
    return distinct[place]


def _values(value: Any, name: str, found: list[str]) -> None:
    if isinstance(value, dict):
        for key, member in value.items():
            if key == name and isinstance(member, str):
                found.append(member)
            _values(member, name, found)
    elif isinstance(value, list):
        for member in value:
            _values(member, name, found)
