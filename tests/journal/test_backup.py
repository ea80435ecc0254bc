"""A copy of a store that is made while a daemon works in it, file by file, in the order of the specification. P2, S2-25.

The copy goes on by one file each few calls of the daemon, from each call on. It holds if checkpoint.json is the same in the
end as it was in the beginning; else it is thrown away."""

from __future__ import annotations

import contextlib
import copy
import errno
from collections.abc import Iterator

import pytest

from . import checkpoint_story as story
from .checkpoint_story import Eager, Store, Witness, check
from .simdisk import SimDisk

ORDER = ("checkpoint.json", "states", "histories", "tombstones", "HEAD", "wal", "blobs")
STRIDES = (1, 2, 3, 5)


def files_of(disk: SimDisk, what: str) -> list[str]:
    """As they are listed when their turn comes."""
    if what in ("checkpoint.json", "HEAD"):
        return [what] if disk.exists(what) else []
    if what in ("states", "histories"):
        name = {"states": "state.json", "histories": "history.jsonl"}[what]
        return [f"runs/{run}/{name}" for run in (disk.names("runs") if disk.exists("runs") else ())]
    return [f"{what}/{name}" for name in (disk.names(what) if disk.exists(what) else ())]


class Copied(SimDisk):
    """A disk that a copy is made of: one file each `stride` calls, from call `begin` on. It has room for every other
    manifest only, so that the files of runs run ahead of the manifest for a while."""

    begin, stride = 0, 1
    witness: Witness
    order = ORDER

    def __init__(self) -> None:
        super().__init__()
        self.copier = self._copy()
        self.manifests = 0
        self.image: dict[str, bytes] = {}
        self.before: Witness | None = None
        self.held: bool | None = None  # None: it did not come to its end

    def _step(self, what: str, name: str) -> None:
        super()._step(what, name)
        if self.calls > self.begin and (self.calls - self.begin) % self.stride == 0:
            next(self.copier, None)

    def write(self, name: str, offset: int, data: bytes) -> None:
        if name == "checkpoint.json.tmp":
            self.manifests += 1
            if self.manifests % 2:
                raise OSError(errno.ENOSPC, "no space")
        super().write(name, offset, data)

    def finish(self) -> None:
        for _ in self.copier:
            pass

    def _copy(self) -> Iterator[None]:
        self.before = copy.deepcopy(self.witness)
        for what in self.order:
            for name in files_of(self, what):
                with contextlib.suppress(FileNotFoundError):
                    self.image[name] = self.read(name)
                yield
        now = self.read("checkpoint.json") if self.exists("checkpoint.json") else None
        self.held = now == self.image.get("checkpoint.json")


def copies(kind: type[Store], stride: int, order: tuple[str, ...] = ORDER) -> tuple[int, int]:
    """How many copies held, and how many were thrown away; each that held is opened."""
    calls = story.whole_life(kind).calls + 60
    held = thrown = 0
    for begin in range(14, calls):  # the store is there
        disk, witness = Copied(), Witness()
        disk.begin, disk.stride, disk.witness, disk.order = begin, stride, witness, order
        with contextlib.suppress(StopIteration):
            story.live(disk, witness, kind)
        disk.finish()
        assert disk.before is not None
        if not disk.held:
            thrown += 1
            continue
        held += 1
        store = story.open_legal(SimDisk(disk.image | {"wal/": b""}), kind)
        # At least what was acknowledged when the copy began, and nothing but a beginning of what was handed over.
        witness.acknowledged = disk.before.acknowledged
        witness.perhaps |= witness.deleted
        witness.deleted = disk.before.deleted
        check(store, witness)
    return held, thrown


@pytest.mark.parametrize("kind", [Store, Eager])
def test_a_copy_in_the_order_of_the_specification_opens_with_all_that_was_acknowledged(kind: type[Store]) -> None:
    held = thrown = 0
    for stride in STRIDES:
        some, others = copies(kind, stride)
        held, thrown = held + some, thrown + others
    print(f"{held} copies held, {thrown} thrown away")
    assert held > 200
    assert thrown > 200


@pytest.mark.parametrize(
    "order",
    [
        ("checkpoint.json", "wal", "states", "histories", "tombstones", "HEAD", "blobs"),
        ("checkpoint.json", "states", "histories", "tombstones", "wal", "HEAD", "blobs"),
        ("checkpoint.json", "histories", "states", "tombstones", "HEAD", "wal", "blobs"),
        ("wal", "checkpoint.json", "states", "histories", "tombstones", "HEAD", "blobs"),
    ],
    ids=["runs_after_the_log", "watermark_after_the_log", "histories_before_states", "log_first"],
)
def test_in_another_order_a_copy_that_seems_to_hold_does_not(order: tuple[str, ...]) -> None:
    with pytest.raises(AssertionError):
        for kind in (Store, Eager):
            for stride in STRIDES:
                copies(kind, stride, order)


@pytest.mark.parametrize("kind", [Store, Eager])
def test_a_copy_of_the_whole_folder_while_no_daemon_runs_is_the_store(kind: type[Store]) -> None:
    disk, witness = SimDisk(), Witness()
    story.live(disk, witness, kind)
    assert check(story.open_legal(SimDisk(disk.image()), kind), witness) == sum(
        item.run not in witness.deleted for item in witness.issued
    )
