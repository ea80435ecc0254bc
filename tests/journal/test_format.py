"""The written format is what the code does: its example and its table are checked word for word."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

from rpcagent.journal import record
from rpcagent.journal.record import Item
from rpcagent.journal.tail import TABLE, Cell
from rpcagent.journal.wal import Wal

from .simdisk import SimDisk

PAGE = Path(__file__).parents[2] / "protocol" / "journal-format.md"


def example() -> str:
    disk = SimDisk()
    wal = Wal.open(disk, draw_store_id=lambda: "sto_example", app="0.1.0", at="2030-01-01T00:00:00Z")
    wal.append([Item("run_a", 1, 2, b'{"events":["started","asked"]}'), Item("run_b", 1, 1, b'{"events":["started"]}')])
    wal.append([Item("run_a", 3, 1, b'{"events":["done"]}')])
    return disk.read("wal/0000000000000001.jsonl").decode()


def table() -> str:
    def cell(value: Cell) -> str:
        return {True: "yes", False: "no", None: ""}[value]

    head = (
        "",
        "first line expected",
        "no byte left",
        "intact, but not x",
        "a later segment",
        "x <= watermark",
        "later batch",
    )
    rows = [[row.label, *map(cell, row.cells), row.outcome] for row in TABLE]
    lines = [[*head, "outcome"], ["---"] * 8, *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def test_the_example_in_the_specification_is_what_the_log_writes() -> None:
    assert f"```jsonl\n{example()}```" in PAGE.read_text()


def test_the_table_in_the_specification_is_the_table_of_the_code() -> None:
    assert f"\n\n{table()}\n" in PAGE.read_text()


def test_a_reader_made_from_the_specification_alone_reads_the_example() -> None:
    previous, number = "00000000", 0
    for line in example().encode().splitlines(keepends=True):
        found = json.loads(line)
        assert found["c"] == f"{zlib.crc32(line[16:]):08x}"
        assert found["p"] == previous
        if found["k"] != "seg":
            number += 1
            previous = found["c"]
        assert found["q"] == number
    assert number == 4


def test_the_format_is_zero_as_long_as_it_may_change() -> None:
    assert record.FORMAT == 0
    assert "# Journal format 0" in PAGE.read_text()
