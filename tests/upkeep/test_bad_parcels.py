"""`rpcagent import` of files whose sums are right and whose content nobody should believe; and `gc` beside a damaged
run."""

from __future__ import annotations

import hashlib
import json
import os
import re
import zlib
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from rpcagent.journal import record
from rpcagent.journal.blobs import Blobs
from rpcagent.journal.disk import RealDisk
from rpcagent.upkeep import importing

from .commands import damage, fingerprint, said
from .stores import Owner, commits, runs

ENDED = runs("completed")[2]
ASKS = next(run for run in runs("active") if b"approval_requested" in commits(run)[-1].body)
DEEP = b"[" * 200_000 + b"]" * 200_000


class Sheet:
    """An exported run taken apart: what is changed in it is put under right sums again."""

    def __init__(self, data: bytes) -> None:
        first, *lines, _end = data.splitlines()
        self.head: dict[str, Any] = json.loads(first)["d"]
        self.lines = [(told["s"], told["n"], line[line.index(b'"d":') + 4 : -1]) for line in lines
                      for told in [json.loads(line)]]  # fmt: skip
        self.raw_head: bytes | None = None

    def bodies(self, change: Callable[[bytes], bytes]) -> None:
        changed = [(first, count, change(body)) for first, count, body in self.lines]
        assert changed != self.lines
        self.lines = changed

    def data(self) -> bytes:
        head = self.raw_head or json.dumps(self.head, separators=(",", ":")).encode()
        out = framed(b'"k":"export","d":%b}\n' % head)
        chain = zlib.crc32(str(self.head["runId"]).encode())
        for first, count, body in self.lines:
            line = framed(b'"p":"%08x","s":%d,"n":%d,"d":%b}\n' % (chain, first, count, body))
            chain = int(line[6:14], 16)
            out += line
        end = {"lines": len(self.lines), "blobs": 0, "sha256": hashlib.sha256(out).hexdigest()}
        return out + framed(b'"k":"end","d":%b}\n' % json.dumps(end, separators=(",", ":")).encode())


def framed(text: bytes) -> bytes:
    return record.framed(text)[0]


def exported(run: str, folder: Path) -> Path:
    disk = RealDisk(folder / "from")
    Owner(disk, folder / "from").record(commits(run)).close()
    path = folder / "run.jsonl"
    assert said("export", run, path, "--store", folder / "from").code == 0
    return path


def named(run: str) -> Callable[[Sheet], None]:
    return lambda sheet: sheet.head.update(runId=run)


def saying(**members: Any) -> Callable[[Sheet], None]:
    return lambda sheet: sheet.head.update(members)


def at(instant: datetime) -> Callable[[Sheet], None]:
    text = instant.isoformat().replace("+00:00", "Z").encode()
    return lambda sheet: sheet.bodies(lambda body: re.sub(rb'"at":"[^"]*"', b'"at":"%b"' % text, body))


def epoch(number: int) -> Callable[[Sheet], None]:
    return lambda sheet: sheet.bodies(lambda body: re.sub(rb'"epoch":\d+', b'"epoch":%d' % number, body))


def deep_head(sheet: Sheet) -> None:
    sheet.raw_head = DEEP


def deep_body(sheet: Sheet) -> None:
    first, count, _ = sheet.lines[1]
    sheet.lines[1] = (first, count, DEEP)


REFUSED: dict[str, tuple[Callable[[Sheet], None], tuple[int, str]]] = {
    "a head too deep to read": (deep_head, (1, "STORE_DAMAGED")),
    "a body too deep to read": (deep_body, (2, "STORE_DAMAGED")),
    "the name of the lock": (named("LOCK"), (2, "STORE_DAMAGED")),
    "the name of the folder": (named("runs"), (2, "STORE_DAMAGED")),
    "a short name": (named("run_x"), (2, "STORE_DAMAGED")),
    "another status": (saying(status="cancelled"), (2, "STORE_DAMAGED")),
    "another last event": (saying(lastSeq=1), (1, "STORE_DAMAGED")),
    "the end of all time": (at(datetime(9999, 12, 31, 23, 59, 59, 900_000, tzinfo=UTC)), (2, "INVALID_STATE")),
    "the day after tomorrow": (at(datetime.now(UTC) + timedelta(days=2)), (2, "INVALID_STATE")),
    "an epoch without room": (epoch(10**16 - 1), (2, "STORE_DAMAGED")),
    "an epoch of a thousand million": (epoch(10**9), (2, "STORE_DAMAGED")),
}


@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.parametrize("run", ["ended", "asks"])
def test_what_a_store_cannot_bear_does_not_come_in(tmp_path: Path, what: str, run: str):
    change, told = REFUSED[what]
    path = exported({"ended": ENDED, "asks": ASKS}[run], tmp_path)
    sheet = Sheet(path.read_bytes())
    assert sheet.data() == path.read_bytes()
    change(sheet)
    path.write_bytes(sheet.data())
    store = tmp_path / "store"
    Owner(RealDisk(store), store).record(commits(runs("failed")[0])).checkpoint().close()
    before = fingerprint(store)
    found = said("import", path, "--store", store, "--take-over", "--json")
    assert (found.code, found.error["code"]) == told
    assert fingerprint(store) | {"LOCK": ""} == before | {"LOCK": ""}


def test_what_a_store_can_bear_comes_in(tmp_path: Path):
    path = exported(ASKS, tmp_path)
    sheet = Sheet(path.read_bytes())
    at(datetime.now(UTC) + importing.AHEAD / 2)(sheet)
    epoch(importing.MOST_EPOCH - 1)(sheet)
    path.write_bytes(sheet.data())
    store = tmp_path / "store"
    assert said("import", path, "--store", store, "--take-over").code == 0
    assert Owner(RealDisk(store)).wal.epoch == importing.MOST_EPOCH


# What is not known to be nobody's


def test_gc_keeps_the_outputs_of_a_store_with_a_damaged_run_and_says_so_beforehand(tmp_path: Path):
    store = tmp_path / "store"
    Owner(RealDisk(store), store).record(commits(ENDED)).checkpoint().close()
    writer = Blobs(store / "blobs").create()
    writer.write(b"of whom, is not known")
    kept = store / "blobs" / writer.keep()
    os.utime(kept, (10**9, 10**9))
    state = store / "runs" / ENDED / "state.json"
    state.write_bytes(state.read_bytes()[:-9])
    (store / "index.sqlite").unlink()
    for words in (["--dry-run"], []):
        found = said("gc", "--store", store, "--workspace", tmp_path, "--json", *words)
        assert (found.code, found.summary["outputs"], kept.exists()) == (0, 0, True), words
    assert len(damage(said("verify", "--store", store, "--json"))) == 1
