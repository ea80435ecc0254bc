"""Which store a command works on, whether another process owns it, and what opens its payloads.

Knows: how a folder that is no store is told from one that cannot be read, and how to see an owner without touching the lock.
Does not know: what is in the store.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from rpcagent.batch.faults import Mistake
from rpcagent.journal.disk import RealDisk
from rpcagent.journal.seal import AesGcm, Plain, Seal
from rpcagent.journal.wal import stranger_in
from rpcagent.keys import KeyRing, KeyUnusable, load_ring

NO_STORE = "each workspace has a store of its own, made by `rpcagent serve` or `rpcagent run`; another one is named with --store"


class Owner(msgspec.Struct, frozen=True):
    """What the lock file says of the process that holds it; it may be wrong."""

    pid: int | None = None
    host: str | None = None
    since: str | None = None


@dataclass(frozen=True)
class Place:
    """`store` is there, and is one. `ring`: the keys that were named, `keys`: the options that named them."""

    store: Path
    ring: KeyRing | None = None
    keys: tuple[str, ...] = ()
    _disks: list[RealDisk] = field(default_factory=list, compare=False, repr=False)

    def disk(self) -> RealDisk:
        """The files of the store; `close` gives its descriptors back."""
        self._disks.append(RealDisk(self.store))
        return self._disks[-1]

    def close(self) -> None:
        while self._disks:
            self._disks.pop().close()

    def seal(self, store_id: str) -> Seal:
        """What opens payloads of the store with this id. Raises KeyUnusable."""
        return AesGcm(self.ring, store_id) if self.ring is not None else Plain()

    def hint(self, *words: str) -> str:
        """A command that a reader may copy: it works on the same store, with the same keys."""
        return shlex.join(["rpcagent", *words, "--store", str(self.store), *self.keys])


def place_of(options: argparse.Namespace, *, may_be_new: bool = False) -> Place:
    """Raises Mistake for what is no store, or a key that cannot be had. OSError where the folder cannot be looked at."""
    store = _named(options)
    _check(store, may_be_new)
    try:
        named = options.encryption_key
        ring = load_ring(named, options.old_encryption_key) if named is not None else None
    except KeyUnusable as error:
        raise Mistake(str(error), code="KEY") from None
    if ring is None and options.old_encryption_key:
        raise Mistake("--old-encryption-key goes with --encryption-key, which names the present one")
    older = [part for each in options.old_encryption_key for part in ("--old-encryption-key", each)]
    return Place(store, ring, ("--encryption-key", named, *older) if named is not None else ())


def _named(options: argparse.Namespace) -> Path:
    named = options.store or (Path(os.environ["RPCAGENT_STORE"]) if os.environ.get("RPCAGENT_STORE") else None)
    if named is None:
        from rpcagent.daemon import default_store

        workspace = options.workspace or Path()
        if not workspace.is_dir():
            raise Mistake(f"--workspace {workspace} is not a directory")
        named = default_store(workspace)
    return Path(named).absolute()


def _check(store: Path, may_be_new: bool) -> None:
    try:
        names = os.listdir(store)  # noqa: PTH208 - names, not paths
    except FileNotFoundError:
        if may_be_new:
            return
        raise Mistake(f"there is no store at {store}", NO_STORE, code="NOT_FOUND") from None
    except NotADirectoryError:
        raise Mistake(f"{store} is a file, not the folder of a store", NO_STORE) from None
    if (stranger := stranger_in(names)) is not None:
        raise Mistake(f"{store} is not a store: {stranger!r} is in it", NO_STORE)
    if not may_be_new and not set(names) & {"HEAD", "wal", "checkpoint.json", "runs"}:
        raise Mistake(f"{store} is empty: nothing was ever recorded there", NO_STORE, code="NOT_FOUND")


def owner_of(store: Path) -> Owner | None:
    """The process that owns the store now; None if none does, or where this system does not tell. Touches no lock: to try it,
    even for a moment, would turn a daemon away that starts in this moment."""
    path = store / "LOCK"
    try:
        inode = path.stat().st_ino
        locks = Path("/proc/locks").read_text()
    except OSError:
        return None
    if not any(_is_lock_on(line.split(), inode) for line in locks.splitlines()):
        return None
    with contextlib.suppress(OSError, msgspec.DecodeError, RecursionError):
        return msgspec.json.decode(path.read_bytes()[:4096], type=Owner)
    return Owner()


def _is_lock_on(words: list[str], inode: int) -> bool:
    # 1: FLOCK  ADVISORY  WRITE 4711 08:02:1311768 0 EOF
    return len(words) >= 6 and words[1] == "FLOCK" and words[5].rpartition(":")[2] == str(inode)
