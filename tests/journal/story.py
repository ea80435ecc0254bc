"""One short life of a store, and what must be true of every disk that it may leave behind."""

from __future__ import annotations

import contextlib
import copy
from dataclasses import dataclass, field

from rpcagent import errors
from rpcagent.journal.record import Entry, Item
from rpcagent.journal.wal import Wal

from .simdisk import Crash, SimDisk

SEGMENT = 900
REOPEN, KILL = "reopen", "kill"
# Sizes of batches. The long body spans sectors; the small segments make several rotations.
LIFE: tuple[tuple[int, ...] | str, ...] = (
    (1,), (2, 3, 4), REOPEN, (5, 6), (7, 700, 8), (9,), KILL, (10, 11), (12,), REOPEN, REOPEN, (600, 600), (13, 14, 15, 16),
    KILL, KILL, (17,), (18, 30), (19,),
)  # fmt: skip


@dataclass
class Witness:
    """What was handed to the log, and how much of it was acknowledged."""

    issued: list[Item] = field(default_factory=list)
    acknowledged: int = 0
    ends: dict[str, int] = field(default_factory=dict)
    refusals: int = 0
    serial: int = 0

    def next(self, size: int) -> Item:
        run = f"run_{len(self.issued) % 3}"
        first = self.ends.get(run, 0) + 1
        self.serial += 1
        body = b'{"i":%04d,"x":"%b"}' % (1000 + self.serial, b"\xc3\xa9" * (size // 2))
        item = Item(run, first, 2, body)
        self.issued.append(item)
        self.ends[run] = first + 1
        return item

    def take_back(self, items: list[Item]) -> None:
        self.refusals += 1
        for item in reversed(items):
            assert self.issued.pop() == item
            self.ends[item.run] = item.first - 1


def open_log(disk: SimDisk, kind: type[Wal] = Wal) -> Wal:
    return kind.open(
        disk, draw_store_id=lambda: "store-1", app="0.1.0", at="2030-01-01T00:00:00Z", segment_bytes=SEGMENT
    )


def open_legal(disk: SimDisk, kind: type[Wal] = Wal) -> Wal:
    """As `open_log`, on a disk that may be full once, but is never damaged."""
    for _ in range(2):
        try:
            return open_log(disk, kind)
        except errors.StoragePoisoned:
            raise
        except errors.StorageError:
            continue
        except errors.RpcAgentError as error:
            raise AssertionError(f"a legal disk was refused: {error}") from error
    raise AssertionError("a disk with space was refused")


def as_item(entry: Entry) -> Item:
    return Item(entry.run, entry.first, entry.count, entry.body)


def replay(wal: Wal) -> list[Item]:
    return [as_item(entry) for entry in wal.entries()]


def live(disk: SimDisk, witness: Witness, kind: type[Wal] = Wal) -> None:
    """The whole life. Whatever it raises ends it."""
    wal = open_legal(disk, kind)
    for act in LIFE:
        if isinstance(act, str):
            if act == REOPEN:
                wal.close()
            wal = open_legal(disk, kind)
            assert replay(wal) == witness.issued[: witness.acknowledged]
            continue
        items = [witness.next(size) for size in act]
        try:
            wal.append(items)
        except errors.StoragePoisoned:
            raise
        except errors.StorageError:
            # The disk has space again. Another batch comes, shorter, its line as long as the first one of the old batch.
            witness.take_back(items)
            wal.append([witness.next(act[0])])
        witness.acknowledged = len(witness.issued)
    wal.close()


def must_hold(disk: SimDisk, witness: Witness, kind: type[Wal] = Wal, *, cuts: int = 5) -> int:
    """Opens `disk`, which is legal. Returns how many further cuts it went through."""
    wal = open_legal(disk, kind)
    got = replay(wal)
    assert got == witness.issued[: len(got)], "what came back is no prefix of what was issued"
    assert len(got) >= witness.acknowledged, "an acknowledged record was lost"
    done = 0
    for image in disk.after_cut(seed=len(got), cap=cuts):
        done += 1
        again = replay(open_legal(SimDisk(image), kind))
        assert len(again) >= len(got), "a record was served after the restart, then lost"
        assert again == witness.issued[: len(again)]
    more = Item("run_new", 1, 1, b'"more"')
    wal.append([more])
    assert replay(open_legal(disk.killed(), kind)) == [*got, more], "an append after recovery fused with something"
    return done


def crash_everywhere(kind: type[Wal] = Wal, disk_kind: type[SimDisk] = SimDisk, *, cap: int = 200) -> tuple[int, int]:
    """Crash points and disks gone through."""
    whole = disk_kind()
    live(whole, Witness(), kind)
    disks = 0
    for point in range(whole.calls + 1):
        disk, witness = disk_kind(crash_at=point), Witness()
        _until_crash(disk, witness, kind)
        for image in disk.after_cut(seed=point, cap=cap):
            disks += 1 + must_hold(disk_kind(image), witness, kind)
        disks += 1 + must_hold(disk.killed(), witness, kind)
    return whole.calls, disks


def crash_in_recovery(kind: type[Wal] = Wal, disk_kind: type[SimDisk] = SimDisk, *, every: int = 1) -> tuple[int, int]:
    """Crashes again at every call of the next opening, on disks that the first crash left. Points and disks."""
    whole = disk_kind()
    live(whole, Witness(), kind)
    points = disks = 0
    for point in range(0, whole.calls + 1, every):
        disk, witness = disk_kind(crash_at=point), Witness()
        _until_crash(disk, witness, kind)
        starts = [disk_kind(image) for image in disk.after_cut(seed=point, cap=5)]
        for start in [*starts, disk.killed()]:
            inner = 0
            while True:
                second = copy.deepcopy(start)
                second.crash_at = inner
                finished = _opens(second, kind)
                points += 1
                for again in second.after_cut(seed=inner, cap=3):
                    disks += 1 + must_hold(disk_kind(again), witness, kind, cuts=2)
                if finished:
                    break
                inner += 1
    return points, disks


def fail_each_sync(kind: type[Wal] = Wal, disk_kind: type[SimDisk] = SimDisk) -> int:
    """The k-th sync fails, for each k; then a kill, a restart, a cut. Disks gone through."""
    whole = disk_kind()
    live(whole, Witness(), kind)
    disks = 0
    for failing in range(1, whole.syncs + 1):
        disk, witness = disk_kind(fail_sync=frozenset({failing})), Witness()
        with contextlib.suppress(errors.StoragePoisoned):
            live(disk, witness, kind)
        for image in disk.after_cut(seed=failing, cap=20):
            disks += 1 + must_hold(disk_kind(image), witness, kind)
        disks += 1 + must_hold(disk.killed(), witness, kind)
    return disks


def full_at_each_write(kind: type[Wal] = Wal, disk_kind: type[SimDisk] = SimDisk, *, after: int = 3) -> tuple[int, int]:
    """A write stops half way, at each of them; the log goes on, and crashes 1 to `after` calls later, or lives to its
    end. Refusals seen, disks gone through."""
    whole = disk_kind()
    live(whole, Witness(), kind)
    refusals = disks = 0
    for point in (i for i, what in enumerate(whole.log) if what.startswith("write")):
        for crash in (*range(point + 1, point + 1 + after), None):
            disk, witness = disk_kind(fail_write=frozenset({point}), crash_at=crash), Witness()
            _until_crash(disk, witness, kind)
            refusals += witness.refusals
            for image in disk.after_cut(seed=point, cap=20):
                disks += 1 + must_hold(disk_kind(image), witness, kind)
            disks += 1 + must_hold(disk.killed(), witness, kind)
    return refusals, disks


def _until_crash(disk: SimDisk, witness: Witness, kind: type[Wal]) -> None:
    with contextlib.suppress(Crash):
        live(disk, witness, kind)


def _opens(disk: SimDisk, kind: type[Wal]) -> bool:
    try:
        open_log(disk, kind)
    except Crash:
        return False
    return True
