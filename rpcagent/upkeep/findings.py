"""What a check of a store has found, and how it is told to a person and to a program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import msgspec

from rpcagent.batch.narrator import Tone

Severity = Literal["damage", "warning", "note"]
RUNS_SHOWN = 20
REPAIR = "`rpcagent repair --dry-run` says what can be kept"
TRY = "restore it from a backup; without one: "
TONES: dict[Severity, Tone] = {"damage": "bad", "warning": "ask", "note": "dim"}


class Finding(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`damage`: something that was recorded cannot be had. `warning`: nothing is lost, and something should be done. `note`:
    nothing need be done. `records`: numbers in the log, from and to. `offset`: in bytes."""

    severity: Severity
    what: str
    file: str = ""
    offset: int | None = None
    records: tuple[int, int] | None = None
    runs: list[str] = []
    remedy: str = ""

    def lines(self) -> list[str]:
        place = self.file + (f", byte {self.offset}" if self.offset is not None else "")
        first = f"{self.severity:<8} {place}: {self.what}" if place else f"{self.severity:<8} {self.what}"
        found = [first]
        if self.records is not None:
            first_one, last = self.records
            found.append(f"         records {first_one} to {last}" if last != first_one else f"         record {last}")
        if self.runs:
            more = f" and {len(self.runs) - RUNS_SHOWN} more" if len(self.runs) > RUNS_SHOWN else ""
            found.append(f"         runs: {', '.join(self.runs[:RUNS_SHOWN])}{more}")
        if self.remedy:
            found.append(f"         {self.remedy}")
        return found

    def value(self) -> dict[str, Any]:
        shown: dict[str, Any] = msgspec.to_builtins(self)
        return {"finding": shown}


Tell = Callable[[Finding], None]


class Row(msgspec.Struct):
    """A line of the table at the end."""

    part: str
    files: int = 0
    bytes: int = 0
    records: int = 0
    runs: int = 0

    def value(self) -> dict[str, Any]:
        shown: dict[str, Any] = msgspec.to_builtins(self)
        return shown
