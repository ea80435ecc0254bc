"""Stores of real runs, made by the journal's own modules: on a real disk or on a simulated one, with checkpoints and deletions.

Knows: the commits of the golden store (runs of every kind, as the daemon recorded them) and how an owner files them. Does not
know: the daemon.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rpcagent.journal import reading, runfiles, seal, tombstones
from rpcagent.journal.checkpoint import Change, Checkpointer, read_manifest
from rpcagent.journal.disk import RealDisk
from rpcagent.journal.ended import ended_row
from rpcagent.journal.index import FILE_NAME, Index
from rpcagent.journal.manifest import Header, TombstoneFile
from rpcagent.journal.record import Item
from rpcagent.journal.runfiles import Line
from rpcagent.journal.wal import Wal
from rpcagent.runs import events as ev
from rpcagent.runs import summary
from rpcagent.runs.fold import apply
from rpcagent.runs.state import RunState
from rpcagent.runs.summary import Summary

GOLDEN = Path(__file__).parents[1] / "golden" / "stores" / "format-0" / "store"
STORE_ID = "sto_becebc636e5eaa9383d24b8d"
AT = datetime(2031, 4, 1, tzinfo=UTC)


@functools.cache
def golden() -> tuple[Item, ...]:
    """All commits of the golden store, in the order of its log."""
    disk = RealDisk(GOLDEN)
    _, entries = reading.read_all(disk)
    disk.close()
    return tuple(Item(each.run, each.first, each.count, each.body) for each in entries)


def folded(bodies: Iterable[bytes], run: str) -> RunState | None:
    state = None
    for body in bodies:
        state = apply(state, ev.decode(body), run)
    return state


def commits(run: str) -> list[Item]:
    return [item for item in golden() if item.run == run]


@functools.cache
def runs(phase: str) -> tuple[str, ...]:
    """The golden runs that end in this phase, shortest first."""
    found = list(dict.fromkeys(item.run for item in golden()))
    states = {run: folded((item.body for item in commits(run)), run) for run in found}
    return tuple(sorted((run for run in found if states[run].phase == phase), key=lambda run: len(commits(run))))


class Owner:
    """A process that owns the store on `disk`, as the daemon would. `folder`: of a real disk; then there is an index."""

    def __init__(self, disk: Any, folder: Path | None = None, *, segment: int = 1 << 20, sealing: Any = None) -> None:
        self.disk, self.folder, self.seal = disk, folder, sealing or seal.Plain()
        found = read_manifest(disk)
        known = {"base": found.base, "store_id": found.store_id, "least_epoch": found.epoch} if found else {}
        self.wal = Wal.open(
            disk, draw_store_id=lambda: STORE_ID, app="0.1.0", at="2031-04-01T00:00:00Z", segment_bytes=segment, **known
        )
        self.checkpointer = Checkpointer(disk)
        self.checkpointer.sweep()
        self.places, self.named = (found.places, found.tombstones) if found else (1, ())
        self.live = dict(found.live) if found else {}
        self.ended = dict(found.ended) if found else {}
        self.place: dict[str, int] = {run: summary.decode(raw).place for run, raw in self.live.items()}
        self.fresh: dict[str, list[Line]] = {}
        self.statuses: dict[str, str] = {}
        self.wal_entries = list(self.wal.entries())
        for entry in self.wal_entries:
            self._note(Item(entry.run, entry.first, entry.count, entry.body))

    def record(self, items: Iterable[Item], batch: int = 4) -> Owner:
        """The commits, in batches of `batch`; as they are, or sealed."""
        every = [self._sealed(item) for item in items]
        for place in range(0, len(every), batch):
            self.wal.append(every[place : place + batch])
        for item in every:
            self._note(item)
        return self

    def _sealed(self, item: Item) -> Item:
        body = self.seal.seal(seal.record_context(item.run, item.first), item.body)
        return Item(item.run, item.first, item.count, body)

    def _note(self, item: Item) -> None:
        if item.run not in self.place:
            self.place[item.run] = self.places
            self.places += 1
        self.fresh.setdefault(item.run, []).append(Line(item.first, item.count, item.body))

    def checkpoint(self, deleted: Iterable[str] = ()) -> Owner:
        mark, gone = self.wal.mark(), list(deleted)
        grave, named = None, self.named
        if gone:
            filed = tombstones.Tombstones(self.disk, [tombstones.Named(f.name, f.count, f.sum) for f in named])
            for run in gone:
                filed.add(run)
            file = filed.next_file(self.disk.names("tombstones") if self.disk.exists("tombstones") else [])
            grave, named = (file.name, file.data), tuple(TombstoneFile(f.name, f.count, f.sum) for f in file.named)
        heads = {run: self._heads(run, lines) for run, lines in self.fresh.items() if run not in gone}
        changes = [Change(run, self.fresh[run], raw) for run, (_, raw) in heads.items()]
        for run, (found, raw) in heads.items():
            if found.live:
                self.live[run] = raw
                continue
            self.live.pop(run, None)
            self.ended[found.status] = self.ended.get(found.status, 0) + 1
            self.statuses[run] = found.status
        for run in gone:
            state = runfiles.read_state(self.disk, run)
            status = summary.decode(state.summary).status if state else self.statuses.get(run)
            self.live.pop(run, None)
            if status in self.ended:
                self.ended[status] -= 1
        header = Header(
            store_id=self.wal.store_id, app="0.1.0", epoch=self.wal.epoch, at="2031-04-01T00:00:00Z", places=self.places,
            ended=self.ended, tombstones=named, kid=self.seal.kid or "",
        )  # fmt: skip
        index = functools.partial(
            self._index, [run for run, (found, _) in heads.items() if not found.live], gone, mark.seq
        )
        assert self.checkpointer.write(mark, header, changes, self.live.items(), gone, grave, index) == 0
        self.named, self.fresh = named, {}
        return self

    def _heads(self, run: str, lines: list[Line]) -> tuple[Summary, bytes]:
        held = runfiles.read_bodies(self.disk, run, run in self.live)
        before = [line for line in held[1] if line.first < lines[0].first] if held else []
        state = folded((self.seal.open(seal.record_context(run, x.first), x.body) for x in [*before, *lines]), run)
        assert state is not None
        heads, body = summary.summarise(state, self.place[run], "")
        return heads, summary.encode(heads, self.seal.seal(seal.summary_context(run, heads.last_seq), body))

    def _index(self, ended: list[str], gone: list[str], through: int) -> None:
        if self.folder is None:
            return
        index = Index(self.folder / FILE_NAME)
        rows = []
        for run in ended:
            state = runfiles.read_state(self.disk, run)
            rows.append(ended_row(run, state, summary.decode(state.summary)))
        index.update(rows, gone, through, self.wal.store_id)
        index.close()

    def close(self) -> None:
        self.wal.close()
        if self.folder is not None:
            self.disk.close()


def shorter(items: Iterable[Item]) -> tuple[list[Item], list[Item]]:
    """Each run in two parts: what a checkpoint files, and what comes after it; of some that end, all is filed."""
    every, whole = list(items), {*runs("completed")[:5], *runs("failed")}
    filed, later = [], []
    for item in every:
        mine = [each for each in every if each.run == item.run]
        (filed if item.run in whole or mine.index(item) < (len(mine) + 1) // 2 else later).append(item)
    return filed, later


def real_store(folder: Path, *, sealing: Any = None) -> Path:
    """All golden runs: half of most in its files, the rest in a log of several segments; five have ended before the
    checkpoint, one was deleted. Everything that a store can have but jobs."""
    folder.mkdir(mode=0o700)
    disk = RealDisk(folder)
    owner = Owner(disk, folder, segment=12_000, sealing=sealing)
    filed, later = shorter(golden())
    gone = runs("completed")[0]
    mine = commits(gone)
    owner.record([item for item in filed if item.run != gone]).record(mine).checkpoint()
    ends = mine[-1].first + mine[-1].count
    said = ev.encode(ev.Commit(seq=ends, at=AT, events=(ev.RunDeleted(status="completed", reason="test"),)))
    owner.record([Item(gone, ends, 1, said)]).checkpoint([gone])
    owner.record([item for item in later if item.run != gone])
    owner.close()
    digest = next((GOLDEN / "blobs").iterdir())
    (folder / "blobs").mkdir(mode=0o700)
    (folder / "blobs" / digest.name).write_bytes(digest.read_bytes())
    (folder / "LOCK").write_bytes(b"")
    for path in (folder / "LOCK", folder / "blobs" / digest.name):
        path.chmod(0o600)
    return folder
