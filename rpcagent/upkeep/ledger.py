"""The index of ended runs as a check and a repair see it: against the files of the runs, which alone are true.

Knows: how to read it without touching it. Does not know: SQL (`journal.index`).
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rpcagent import errors
from rpcagent.journal.index import FILE_NAME, Ended, Index, IndexUnusable, is_strange
from rpcagent.runs.summary import Summary
from rpcagent.upkeep.findings import Finding, Row, Tell

TRIES = 5
_PAGE = 1_000
_ANEW = "nothing is lost: it is made anew at the next start, or by `rpcagent repair`"
_PARTS = ("", "-wal", "-journal")


def rows_of(store: Path) -> dict[str, Ended]:
    """The row of each ended run. Read from a copy: to open the file would change it. Raises IndexUnusable, StorageError,
    FileNotFoundError."""
    with tempfile.TemporaryDirectory(prefix="rpcagent-") as folder:
        copy = Path(folder) / FILE_NAME
        for part in _PARTS:
            path = store / (FILE_NAME + part)
            if is_strange(path):
                raise IndexUnusable(f"{path.name} is no file")
            if not part or path.exists():
                shutil.copyfile(path, copy.with_name(FILE_NAME + part))
        index = Index(copy)
        try:
            return {row.run: row for row in _pages(index)}
        finally:
            index.close()


def _pages(index: Index) -> Iterator[Ended]:
    place = 0
    while page := index.page(place, _PAGE, namespace=None, agent=None, statuses=()):
        yield from page
        place = page[-1].place + 1


@dataclass
class Rows:
    """What was read of the index. `trouble`: why it cannot be used; `size`: in bytes, None where there is none."""

    rows: dict[str, Ended] = field(default_factory=dict)
    trouble: str = ""
    size: int | None = None


def read(store: Path) -> Rows:
    """Its rows, of a moment at which nobody wrote it, as far as that can be had."""
    found = Rows()
    for _ in range(TRIES):
        before = _stamps(store)
        try:
            rows = rows_of(store)
            found = Rows(rows, size=(store / FILE_NAME).stat().st_size)
        except FileNotFoundError:
            found = Rows()
        except (IndexUnusable, errors.StorageError) as error:
            found = Rows(trouble=str(error), size=0)
        if _stamps(store) == before:
            break
    return found


def _stamps(store: Path) -> list[tuple[int, int, int] | None]:
    found: list[tuple[int, int, int] | None] = []
    for part in _PARTS:
        try:
            stat = (store / (FILE_NAME + part)).lstat()
            found.append((stat.st_ino, stat.st_size, stat.st_mtime_ns))
        except FileNotFoundError:
            found.append(None)
    return found


def compare(
    index: Rows,
    rows: Mapping[str, Ended],
    ended: Mapping[str, Summary],
    unsettled: Collection[str],
    tell: Tell,
    row: Row,
) -> None:
    """Tells where the index and the files do not agree. `rows`: those that count; `ended`: runs, as their files say; `unsettled`:
    runs of which the index may say either. Never damage: it can be made anew."""
    if index.size is None:
        if ended:
            tell(Finding(severity="note", what="there is none; it is made at the next start", file=FILE_NAME))
        return
    if index.trouble:
        what = f"it cannot be used: {index.trouble}"
        tell(Finding(severity="warning", what=what, file=FILE_NAME, remedy=_ANEW))
        return
    row.files, row.bytes, row.runs = 1, index.size, len(index.rows)
    both = rows.keys() & ended.keys()
    found = {
        "it names runs that have no files, or have not ended": rows.keys() - ended.keys(),
        "it does not name these runs, which have ended": ended.keys() - rows.keys(),
        "what it says of these runs is not what their files say": {
            run for run in both if (rows[run].place, rows[run].status) != (ended[run].place, ended[run].status)
        },
    }
    for what, runs in found.items():
        if runs := runs - set(unsettled):
            tell(Finding(severity="warning", what=what, file=FILE_NAME, runs=sorted(runs), remedy=_ANEW))
