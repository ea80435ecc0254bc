"""One short life of a store with checkpoints and deletions, and what must be true of every disk that it may leave behind."""

from __future__ import annotations

import contextlib
import copy
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self

from rpcagent import errors
from rpcagent.journal import runfiles
from rpcagent.journal.checkpoint import Change, Checkpointer, read_manifest
from rpcagent.journal.manifest import Header, TombstoneFile
from rpcagent.journal.record import Item
from rpcagent.journal.runfiles import Line
from rpcagent.journal.wal import Wal

from .simdisk import Crash, SimDisk

SEGMENT = 900
REOPEN, KILL, CHECKPOINT = "reopen", "kill", "checkpoint"
ENDED = "d"  # a run that is in no manifest: the index would name it


@dataclass(frozen=True)
class Delete:
    run: str


Batch = tuple[tuple[str, int], ...]  # run and size of the body
LIFE: tuple[Batch | str | Delete, ...] = (
    (("a", 20), ("b", 5)), CHECKPOINT, (("a", 5),), (("c", 300), ("a", 5)), REOPEN, (("b", 5),), CHECKPOINT, KILL,
    (("c", 5), ("d", 9)), Delete("b"), (("a", 600),), (("d", 4),), CHECKPOINT, CHECKPOINT, KILL, (("d", 5), ("e", 1)),
    Delete("c"), REOPEN, (("a", 5),), (("e", 400),), KILL, CHECKPOINT, (("d", 9),),
)  # fmt: skip


@dataclass
class Witness:
    """What was handed to the store, how much of it was acknowledged, and what was deleted or perhaps."""

    issued: list[Item] = field(default_factory=list)
    acknowledged: int = 0
    ends: dict[str, int] = field(default_factory=dict)
    deleted: set[str] = field(default_factory=set)
    perhaps: set[str] = field(default_factory=set)
    refusals: int = 0
    serial: int = 0

    def next(self, run: str, size: int) -> Item:
        first = self.ends.get(run, 0) + 1
        self.serial += 1
        item = Item(run, first, 2, b'{"i":%04d,"x":"%b"}' % (1000 + self.serial, b"x" * size))
        self.issued.append(item)
        self.ends[run] = first + 1
        return item

    def take_back(self, items: list[Item]) -> None:
        self.refusals += 1
        for item in reversed(items):
            assert self.issued.pop() == item
            self.ends[item.run] = item.first - 1


def summary_of(run: str, last: int) -> bytes:
    return b'{"run":"%b","lastSeq":%d}' % (run.encode(), last)


def identity(run: str) -> bytes:
    return hashlib.blake2b(run.encode(), digest_size=16).digest()


class Store:
    """A process that owns the store, as the daemon would: opens it, replays it, appends, makes checkpoints."""

    log: type[Wal] = Wal
    checkpoints: type[Checkpointer] = Checkpointer
    indexed: frozenset[str] = frozenset()  # runs that an index names
    eager = False  # files what was recorded after the mark, and has no change for what its files hold

    def __init__(self, disk: SimDisk) -> None:
        self.disk = disk
        found = read_manifest(disk)
        self.wal = self.open_log(found)
        self.checkpointer = self.checkpoints(disk)
        assert self.checkpointer.sweep() == 0
        self.tombstones = found.tombstones if found else ()
        graves = self._read_tombstones()
        self.dead = {graves[i : i + 16] for i in range(0, len(graves), 16)}
        self.runs: dict[str, list[Line]] = {}
        self.fresh: dict[str, list[Line]] = {}
        self._load({*found.live, *self.indexed} if found else set())

    def open_log(self, found) -> Wal:
        known = {"base": found.base, "store_id": found.store_id, "least_epoch": found.epoch} if found else {}
        return self.log.open(
            self.disk, draw_store_id=lambda: "store-1", app="0.1.0", at="now", segment_bytes=SEGMENT, **known
        )

    def _read_tombstones(self) -> bytes:
        return b"".join(self.disk.read(f"tombstones/{file.name}") for file in self.tombstones)

    def _load(self, live: set[str]) -> None:
        folders = set(self.disk.names("runs")) if self.disk.exists("runs") else set()
        for run in sorted(folders | live):
            assert identity(run) not in self.dead, f"{run} was deleted and has a folder"
            found = runfiles.read_bodies(self.disk, run, run in live)
            if found is not None:
                state, self.runs[run] = found
                assert state.summary == summary_of(run, state.last_seq)
        for entry in self.wal.entries():
            if identity(entry.run) in self.dead:
                continue
            line = Line(entry.first, entry.count, entry.body)
            # What a checkpoint moved before it was interrupted stands in both places.
            if not self.is_held(entry.run, line):
                self.runs.setdefault(entry.run, []).append(line)
            elif self.eager:
                continue
            self.fresh.setdefault(entry.run, []).append(line)

    def is_held(self, run: str, line: Line) -> bool:
        lines = self.runs.get(run)
        return bool(lines) and line.first <= lines[-1].first

    def append(self, items: list[Item]) -> None:
        self.wal.append(items)
        for item in items:
            line = Line(item.first, item.count, item.body)
            self.runs.setdefault(item.run, []).append(line)
            self.fresh.setdefault(item.run, []).append(line)

    def checkpoint(self, deleted: tuple[str, ...] = (), more: Callable[[], None] = lambda: None) -> None:
        mark = self.wal.mark()
        more()
        grave, files = None, self.tombstones
        if deleted:
            ids = sorted(self.dead | {identity(run) for run in deleted})
            data = b"".join(ids)
            name = f"{max([int(file.name[:16]) for file in files], default=0) + 1:016d}.bin"
            grave, files = (name, data), (TombstoneFile(name, len(ids), hashlib.sha256(data).hexdigest()),)
        kept = {run: lines for run, lines in self.runs.items() if run not in deleted}
        ends = {run: lines[-1].first + lines[-1].count - 1 for run, lines in kept.items()}
        header = Header(
            store_id=self.wal.store_id,
            app="0.1.0",
            epoch=self.wal.epoch,
            at="now",
            places=7,
            ended={},
            tombstones=files,
        )
        changes = [Change(run, lines, summary_of(run, ends[run])) for run, lines in self.fresh.items() if run in kept]
        live = [(run, summary_of(run, end)) for run, end in ends.items() if run != ENDED]
        assert self.checkpointer.write(mark, header, changes, live, deleted, grave, lambda: None) == 0
        self.tombstones, self.runs, self.fresh = files, kept, {}
        self.dead |= {identity(run) for run in deleted}

    def items(self) -> set[Item]:
        found = [Item(run, line.first, line.count, line.body) for run, lines in self.runs.items() for line in lines]
        return set(found)


Open = Callable[[SimDisk], Store]


def open_legal(disk: SimDisk, kind: Open = Store) -> Store:
    """Opens a disk that may be full once, but is never damaged."""
    for _ in range(2):
        try:
            return kind(disk)
        except errors.StoragePoisoned:
            raise
        except errors.StorageError:
            continue
        except (errors.RpcAgentError, ValueError) as error:
            raise AssertionError(f"a legal disk was refused: {error}") from error
    raise AssertionError("a disk with space was refused")


def check(store: Store, witness: Witness) -> int:
    """What is in the store is a beginning of what was handed over, with all that was acknowledged, once and in order, but
    for runs that were deleted: they are gone whole. Returns how much of what was handed over is there."""
    gone = {run for run in witness.deleted | witness.perhaps if identity(run) in store.dead}
    assert witness.deleted <= gone, "what was deleted came back"
    assert not gone & store.runs.keys(), "a run is deleted and there"
    expected = [item for item in witness.issued if item.run not in gone]
    got = store.items()
    there = [item in got for item in expected]
    count = sum(there)
    assert there == [True] * count + [False] * (len(there) - count), "what came back is no prefix of what was issued"
    assert count == sum(map(len, store.runs.values())), "something is there twice, or was never handed over"
    for run, lines in store.runs.items():
        assert [Item(run, x.first, x.count, x.body) for x in lines] == [i for i in expected if i.run == run][
            : len(lines)
        ]
    acknowledged = sum(item.run not in gone for item in witness.issued[: witness.acknowledged])
    assert count >= acknowledged, "an acknowledged record was lost"
    return count


def live(disk: SimDisk, witness: Witness, kind: Open = Store) -> None:
    """The whole life. Whatever it raises ends it."""
    store = open_legal(disk, kind)
    for act in LIFE:
        if act in (REOPEN, KILL):
            if act == REOPEN:
                store.wal.close()
            store = open_legal(disk, kind)
            assert check(store, witness) == sum(item.run not in witness.deleted for item in witness.issued)
        elif act == CHECKPOINT:
            _checkpoint(store, witness)
        elif isinstance(act, Delete):
            witness.perhaps.add(act.run)
            _checkpoint(store, witness, (act.run,))
            witness.deleted.add(act.run)
        else:
            assert isinstance(act, tuple)
            _append(store, witness, act)
    store.wal.close()


def _append(store: Store, witness: Witness, batch: Batch) -> None:
    items = [witness.next(run, size) for run, size in batch]
    try:
        store.append(items)
    except errors.StoragePoisoned:
        raise
    except errors.StorageError:
        witness.take_back(items)
        store.append([witness.next(*batch[0])])
    witness.acknowledged = len(witness.issued)


class Eager(Store):
    eager = True


def _checkpoint(store: Store, witness: Witness, deleted: tuple[str, ...] = ()) -> None:
    def more() -> None:
        if store.eager:
            _append(store, witness, (("a", 3),))

    try:
        store.checkpoint(deleted, more)
    except errors.StoragePoisoned:
        raise
    except errors.StorageError:
        witness.refusals += 1
        store.checkpoint(deleted)


def must_hold(disk: SimDisk, witness: Witness, kind: Open = Store, *, cuts: int = 3) -> int:
    """Opens `disk`, which is legal, goes on with it. Returns how many further cuts it went through."""
    store = open_legal(disk, kind)
    count = check(store, witness)
    done = 0
    for image in disk.after_cut(seed=count, cap=1, shapes=cuts):
        done += 1
        assert check(open_legal(SimDisk(image), kind), witness) >= count, "served after the restart, then lost"
    more = copy.deepcopy(witness)
    there = store.items()
    more.issued = [item for item in witness.issued if item in there]
    more.ends = {item.run: item.first + 1 for item in more.issued}
    more.acknowledged = len(more.issued)
    more.deleted = {run for run in witness.deleted | witness.perhaps if identity(run) in store.dead}
    more.perhaps = set(more.deleted)
    store.append([more.next("new", 5)])
    store.checkpoint()
    store.append([more.next("new", 5)])
    more.acknowledged = len(more.issued)
    again = open_legal(disk.killed(), kind)
    assert check(again, more) == len(more.issued), "what came after the recovery was lost"
    again.checkpoint()
    # A checkpoint leaves nothing that a power cut could take.
    for image in disk.after_cut(seed=count, cap=1, shapes=cuts):
        done += 1
        assert check(open_legal(SimDisk(image), kind), more) == len(more.issued), "a checkpoint did not last"
    return done


class Tally:
    """Distinct disks that were judged."""

    def __init__(self) -> None:
        self.seen: set[bytes] = set()
        self.points = self.cuts = self.refusals = 0

    def judge(self, disk: SimDisk, witness: Witness, kind: Open) -> None:
        self.seen.add(hashlib.blake2b(repr(sorted(disk.image().items())).encode(), digest_size=12).digest())
        self.cuts += must_hold(disk, witness, kind)

    def __iadd__(self, other: Tally) -> Self:
        self.seen |= other.seen
        self.points, self.cuts = self.points + other.points, self.cuts + other.cuts
        self.refusals += other.refusals
        return self

    def __str__(self) -> str:
        return f"{self.points} points, {len(self.seen)} distinct disks, {self.cuts} further cuts"


def _life_on(disk: SimDisk, kind: Open) -> Witness:
    witness = Witness()
    with contextlib.suppress(Crash, errors.StoragePoisoned):
        live(disk, witness, kind)
    return witness


def whole_life(kind: Open = Store, disk_kind: type[SimDisk] = SimDisk) -> SimDisk:
    disk = disk_kind()
    live(disk, Witness(), kind)
    return disk


def crash_everywhere(
    kind: Open = Store,
    disk_kind: type[SimDisk] = SimDisk,
    *,
    cap: int = 2,
    shapes: int = 6,
    part: tuple[int, int] = (0, 1),
) -> Tally:
    """A crash at each call of the life: what a power cut then leaves, and what a kill leaves."""
    tally = Tally()
    for point in range(part[0], whole_life(kind, disk_kind).calls + 1, part[1]):
        tally.points += 1
        disk = disk_kind(crash_at=point)
        witness = _life_on(disk, kind)
        for image in disk.after_cut(seed=point, cap=cap, shapes=shapes):
            tally.judge(disk_kind(image), witness, kind)
        tally.judge(disk.killed(), witness, kind)
    return tally


def _second_life(disk: SimDisk, kind: Open) -> bool:
    """An opening, its sweep and a checkpoint. Whether it came to its end."""
    try:
        kind(disk).checkpoint()
    except Crash:
        return False
    return True


def crash_in_recovery(
    kind: Open = Store, disk_kind: type[SimDisk] = SimDisk, *, every: int = 7, part: tuple[int, int] = (0, 1)
) -> Tally:
    """A crash at each call of what comes after a crash: recovery, sweep, the next checkpoint."""
    tally = Tally()
    for point in range(part[0] * every, whole_life(kind, disk_kind).calls + 1, every * part[1]):
        disk = disk_kind(crash_at=point)
        witness = _life_on(disk, kind)
        starts = [disk_kind(image) for image in disk.after_cut(seed=point, cap=1, shapes=2)]
        for start in [*starts, disk.killed()]:
            inner, finished = 0, False
            while not finished:
                second = copy.deepcopy(start)
                second.crash_at = inner
                finished = _second_life(second, kind)
                tally.points += 1
                for image in second.after_cut(seed=inner, cap=1, shapes=2):
                    tally.judge(disk_kind(image), witness, kind)
                inner += 1
    return tally


def fail_each_sync(
    kind: Open = Store,
    disk_kind: type[SimDisk] = SimDisk,
    *,
    cap: int = 2,
    shapes: int = 4,
    part: tuple[int, int] = (0, 1),
) -> Tally:
    """The k-th sync fails, for each k; then a kill, a restart, a cut."""
    tally = Tally()
    for failing in range(1 + part[0], whole_life(kind, disk_kind).syncs + 1, part[1]):
        tally.points += 1
        disk = disk_kind(fail_sync=frozenset({failing}))
        witness = _life_on(disk, kind)
        for image in disk.after_cut(seed=failing, cap=cap, shapes=shapes):
            tally.judge(disk_kind(image), witness, kind)
        tally.judge(disk.killed(), witness, kind)
    return tally


def full_at_each_write(
    kind: Open = Store,
    disk_kind: type[SimDisk] = SimDisk,
    *,
    after: int = 2,
    shapes: int = 3,
    part: tuple[int, int] = (0, 1),
) -> Tally:
    """A write stops half way, at each of them; the life goes on, and crashes 1 to `after` calls later, or ends well."""
    tally = Tally()
    writes = [i for i, what in enumerate(whole_life(kind, disk_kind).log) if what.startswith("write")]
    for point in writes[part[0] :: part[1]]:
        for crash in (*range(point + 1, point + 1 + after), None):
            tally.points += 1
            disk = disk_kind(fail_write=frozenset({point}), crash_at=crash)
            witness = _life_on(disk, kind)
            tally.refusals += witness.refusals
            for image in disk.after_cut(seed=point, cap=1, shapes=shapes):
                tally.judge(disk_kind(image), witness, kind)
            tally.judge(disk.killed(), witness, kind)
    return tally
