"""`rpcagent verify`: every byte of a store, read once, and what was found, for a person or a program."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from typing import Any

import msgspec

from rpcagent.batch import exits
from rpcagent.batch.desk import Desk
from rpcagent.upkeep.checking import Check
from rpcagent.upkeep.findings import TONES, Finding, Row
from rpcagent.upkeep.place import Place

PROGRESS_S = 0.5


def command(desk: Desk, place: Place, options: argparse.Namespace) -> int:
    """The exit code: 0 where nothing is damaged, 1 where something is."""
    counts: Counter[str] = Counter()

    def tell(finding: Finding) -> None:
        counts[finding.severity] += 1
        if desk.as_json:
            desk.fact(finding.value())
            return
        for line in finding.lines():
            desk.tell(line, TONES[finding.severity])

    progress = Progress(desk, wanted=options.progress)
    check = Check(place, tell, replay=options.replay, progress=progress)
    check.run()
    progress.done()
    exit_code = exits.FAILED if counts["damage"] else exits.DONE
    show(desk, check, counts, exit_code)
    return exit_code


def show(desk: Desk, check: Check, counts: Counter[str], exit_code: int) -> None:
    """The table, and one sentence."""
    rows = [row for row in check.table.values() if row.files]
    if desk.as_json:
        told: dict[str, Any] = {
            "store": str(check.place.store),
            "storeId": check.store_id,
            "owner": msgspec.to_builtins(check.owner) if check.owner else None,
            "damage": counts["damage"],
            "warnings": counts["warning"],
            "notes": counts["note"],
            "runs": check.runs,
            "table": [row.value() for row in rows],
            "exitCode": exit_code,
        }
        desk.fact({"summary": told})
        return
    total = Row("all", runs=check.runs)
    for row in rows:
        total.files, total.bytes, total.records = (
            total.files + row.files,
            total.bytes + row.bytes,
            total.records + row.records,
        )
    cells = [([row.part, row.files, row.bytes, row.records or "", row.runs or ""], "plain") for row in [*rows, total]]
    desk.tell()
    desk.table(("part", "files", "bytes", "records", "runs"), cells)  # type: ignore[arg-type]
    desk.tell()
    said = [f"{counts[name]} {word}" for name, word in (("damage", "damaged"), ("warning", "warnings")) if counts[name]]
    verdict = "No damage was found." if not counts["damage"] else "The store is damaged."
    desk.tell(
        f"{verdict} {check.place.store}: {', '.join(said) or 'all is as it was written'}.",
        "bad" if exit_code else "good",
    )


class Progress:
    """How far it is, on standard error: where a person sits, or wants it."""

    def __init__(self, desk: Desk, *, wanted: bool) -> None:
        self._on = wanted or (sys.stderr.isatty() and not desk.as_json)
        self._last = time.monotonic()
        self._shown = False

    def __call__(self, text: str) -> None:
        now = time.monotonic()
        if self._on and now - self._last >= PROGRESS_S:
            self._last, self._shown = now, True
            sys.stderr.write(f"\r\033[K{text}" if sys.stderr.isatty() else f"{text}\n")
            sys.stderr.flush()

    def done(self) -> None:
        if self._shown and sys.stderr.isatty():
            sys.stderr.write("\r\033[K")
