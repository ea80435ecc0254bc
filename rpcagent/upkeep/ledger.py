"""The index of ended runs as a check and a repair see it: against the files of the runs, which alone are true.

Knows: how to read it without touching it. Does not know: SQL (`journal.index`).
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from rpcagent import errors
from rpcagent.journal.index import FILE_NAME, Ended, Index, IndexUnusable, is_strange
from rpcagent.runs.summary import Summary
from rpcagent.upkeep.findings import Finding, Row, Tell

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


def check_index(store: Path, due: Mapping[str, Summary], ended: Mapping[str, Summary], tell: Tell, row: Row) -> None:
    """Tells where the index and the files do not agree: `ended` runs, of which those that are `due` must be named. Never
    damage: it can be made anew."""
    try:
        rows = rows_of(store)
    except FileNotFoundError:
        if ended:
            tell(Finding(severity="note", what="there is none; it is made at the next start", file=FILE_NAME))
        return
    except (IndexUnusable, errors.StorageError) as error:
        tell(Finding(severity="warning", what=f"it cannot be used: {error}", file=FILE_NAME, remedy=_ANEW))
        return
    row.files, row.bytes, row.runs = 1, (store / FILE_NAME).stat().st_size, len(rows)
    both = rows.keys() & ended.keys()
    odd = {run for run in both if (rows[run].place, rows[run].status) != (ended[run].place, ended[run].status)}
    found = {
        "it names runs that have no files, or have not ended": rows.keys() - ended.keys(),
        "it does not name these runs, which have ended": due.keys() - rows.keys(),
        "what it says of these runs is not what their files say": odd,
    }
    for what, runs in found.items():
        if runs:
            tell(Finding(severity="warning", what=what, file=FILE_NAME, runs=sorted(runs), remedy=_ANEW))
