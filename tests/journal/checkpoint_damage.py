"""Rot and loss in a store with checkpoints, after a clean stop and after a kill: each is refused, or changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rpcagent import errors
from rpcagent.journal import runfiles
from rpcagent.journal.checkpoint import read_manifest

from .checkpoint_story import CHECKPOINT, ENDED, Delete, Store, Witness, _checkpoint
from .damage import Tally
from .simdisk import Crash, SimDisk

# Small, with all kinds of files: two tombstones, a run that is live, one that ended, records behind the checkpoint.
ACTS: tuple[Any, ...] = (
    (("a", 4), ("b", 4), ("c", 4)), CHECKPOINT, Delete("b"), (("a", 4), ("d", 4)), Delete("c"), (("a", 4),),
)  # fmt: skip


def clean_stop(kind: type[Store] = Store) -> dict[str, bytes]:
    disk = SimDisk()
    store = kind(disk)
    _live(store)
    store.wal.close()
    return disk.image()


def killed(kind: type[Store] = Store) -> dict[str, bytes]:
    """In the middle of a checkpoint: run a has a history that is ahead of its state, and a draft."""
    disk = SimDisk()
    store = kind(disk)
    _live(store)
    disk.crash_at = disk.calls + 13  # the rename of the draft
    try:
        store.checkpoint()
    except Crash:
        image = disk.image()
        assert "runs/a/state.json.tmp" in image
        return image
    raise AssertionError("the checkpoint was to be interrupted")


def _live(store: Store) -> None:
    witness = Witness()
    for act in ACTS:
        if act == CHECKPOINT:
            _checkpoint(store, witness)
        elif isinstance(act, Delete):
            _checkpoint(store, witness, (act.run,))
        else:
            store.append([witness.next(run, size) for run, size in act])


def content(image: dict[str, bytes], kind: type[Store] = Store) -> tuple[Any, ...]:
    """All that a store says of itself."""
    disk = SimDisk(image)
    manifest = read_manifest(disk)
    store = kind(disk)
    states = {run: runfiles.read_state(disk, run) for run in store.runs}
    pages = {
        run: runfiles.read_page(disk, run, state, after, 300)
        for run, state in states.items()
        if state is not None
        for after in range(state.last_seq)
    }
    return manifest, store.runs, store.dead, states, pages


def judge(base: dict[str, bytes], images: Iterator[tuple[str, dict[str, bytes]]], kind: type[Store] = Store) -> Tally:
    expected = content(base, kind)
    damages = refused = harmless = 0
    for what, image in images:
        damages += 1
        try:
            got = content(image, kind)
        except errors.StoreDamaged as error:
            assert {"file", "offset", "reason"} <= set(error.details)
            refused += 1
            continue
        except errors.StoreTooNew as error:
            assert ", byte " in error.message
            refused += 1
            continue
        assert got == expected, f"silent change: {what}"
        harmless += 1
    return Tally(damages, refused, harmless)


def flip_every_byte(base: dict[str, bytes], bits: tuple[int, ...] = (0, 4, 7), kind: type[Store] = Store) -> Tally:
    def images() -> Iterator[tuple[str, dict[str, bytes]]]:
        for name, data in base.items():
            for place in range(len(data)):
                for bit in bits:
                    rotten = bytearray(data)
                    rotten[place] ^= 1 << bit
                    yield f"{name} byte {place} bit {bit}", {**base, name: bytes(rotten)}

    return judge(base, images(), kind)


def cut_every_byte(base: dict[str, bytes]) -> Tally:
    return judge(
        base,
        (
            (f"{name} cut at {place}", {**base, name: data[:place]})
            for name, data in base.items()
            for place in range(len(data))
        ),
    )


class Indexed(Store):
    """As with an index: it names the run that ended."""

    indexed = frozenset({ENDED})


def lose_each_file(kind: type[Store] = Indexed) -> Tally:
    base = clean_stop(kind)
    return judge(
        base, ((f"{name} gone", {n: c for n, c in base.items() if n != name}) for name in base if name[-1] != "/"), kind
    )
