"""The written format is what the code does: its example and its table are checked word for word."""

from __future__ import annotations

import itertools
import json
import zlib
from collections.abc import Sequence
from hashlib import blake2b, sha256
from pathlib import Path

from rpcagent.journal import manifest, record, runfiles, tail
from rpcagent.journal.checkpoint import Change, Checkpointer
from rpcagent.journal.manifest import Header, TombstoneFile
from rpcagent.journal.record import Item
from rpcagent.journal.runfiles import Line
from rpcagent.journal.wal import Wal

from .simdisk import SimDisk
from .test_backup import ORDER

PAGE = Path(__file__).parents[2] / "protocol" / "journal-format.md"


COMMITS = (
    [Item("run_a", 1, 2, b'{"events":["started","asked"]}'), Item("run_b", 1, 1, b'{"events":["started"]}')],
    [Item("run_a", 3, 1, b'{"events":["done"]}')],
)


def grown() -> tuple[SimDisk, Wal]:
    disk = SimDisk()
    wal = Wal.open(disk, draw_store_id=lambda: "sto_example", app="0.1.0", at="2030-01-01T00:00:00Z")
    for commits in COMMITS:
        wal.append(commits)
    return disk, wal


def example() -> str:
    return grown()[0].read("wal/0000000000000001.jsonl").decode()


def files() -> str:
    """The files of the same store after a checkpoint and one more commit, each under its name."""
    disk, wal = grown()
    grave = blake2b(b"run_old", digest_size=16).digest()
    name = "0000000000000001.bin"
    header = Header(
        store_id="sto_example", app="0.1.0", epoch=1, at="2030-01-01T01:00:00Z", places=4, ended={"completed": 1},
        tombstones=(TombstoneFile(name, 1, sha256(grave).hexdigest()),),
    )  # fmt: skip
    done, waits = b'{"place":1,"status":"completed"}', b'{"place":2,"status":"waiting"}'
    lines: dict[str, list[Line]] = {"run_a": [], "run_b": []}
    for item in itertools.chain(*COMMITS):
        lines[item.run].append(Line(item.first, item.count, item.body))
    changes = [Change("run_a", lines["run_a"], done), Change("run_b", lines["run_b"], waits)]
    mark = wal.mark()
    Checkpointer(disk).write(mark, header, changes, [("run_b", waits)], ["run_old"], (name, grave), lambda: None)
    wal.append([Item("run_b", 2, 1, b'{"events":["asked"]}')])
    shown = ("checkpoint.json", "runs/run_a/history.jsonl", "runs/run_a/state.json", "wal/0000000000000005.jsonl")
    parts = [f"{file}\n\n```jsonl\n{disk.read(file).decode()}```" for file in shown]
    head = disk.read("HEAD").decode()
    parts.append(f"tombstones/{name}, in hex\n\n```\n{grave.hex()}\n```")
    parts.append(f"HEAD\n\n```\n{head}```")
    return "\n\n".join(parts)


def rows(head: Sequence[str], table: Sequence[tail.Row | runfiles.Row]) -> str:
    def cell(value: tail.Cell) -> str:
        return {True: "yes", False: "no", None: ""}[value]

    lines = [["", *head, "outcome"], ["---"] * (len(head) + 2)]
    lines += [[row.label, *map(cell, row.cells), row.outcome] for row in table]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def table() -> str:
    head = (
        "first line expected",
        "no byte left",
        "intact, but not x",
        "a later segment",
        "x <= watermark",
        "later batch",
    )
    return rows(head, tail.TABLE)


def run_table() -> str:
    head = (
        "state.json there",
        "it is intact",
        "named",
        "history.jsonl there",
        "long enough",
        "lines intact",
        "each follows",
        "ends as said",
    )
    return rows(head, runfiles.TABLE)


def test_the_example_in_the_specification_is_what_the_log_writes() -> None:
    assert f"```jsonl\n{example()}```" in PAGE.read_text()
    assert f"\n\n{files()}\n" in PAGE.read_text()


def test_the_table_in_the_specification_is_the_table_of_the_code() -> None:
    assert f"\n\n{table()}\n" in PAGE.read_text()
    assert f"\n\n{run_table()}\n" in PAGE.read_text()


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


def test_the_order_of_a_backup_in_the_specification_is_the_one_that_is_proven() -> None:
    page = PAGE.read_text()
    named = {"states": "`runs/*/state.json`", "histories": "`runs/*/history.jsonl`", "tombstones": "tombstones/"}
    named |= {"wal": "wal/", "blobs": "blobs/"}
    sentence = page[page.index("in this order: ") : page.index("; then compare checkpoint.json")]
    places = [sentence.index(named.get(what, what)) for what in ORDER]
    assert places == sorted(places)


def test_all_files_of_a_store_name_the_format_that_the_specification_is_of() -> None:
    assert (record.FORMAT, manifest.FORMAT, runfiles.FORMAT) == (1, 1, 1)
    assert PAGE.read_text().startswith("# Journal format 1\n")
