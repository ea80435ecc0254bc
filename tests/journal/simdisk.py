"""A disk in memory with a crash model, weaker than any file system we run on.

What a living process sees (`cache`) and what a power cut leaves (`disk`) are kept apart, for contents and for names.
Every mutating call is a crash point. After a cut:
- of the unsynced writes to a file any subset is there, each whole, as a prefix, as a suffix, or as zeros under a longer
  file; of unsynced cuts any subset;
- of the unsynced changes of names in a folder any subset is there;
- what a failed sync should have written is there or not, and no later sync writes it, though it reads as if it were;
  only cuts are made durable by the next sync of the file (lengths are metadata, journaled in order).
A killed process loses nothing of the cache.
"""

from __future__ import annotations

import errno
import itertools
import random
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

SMALL = 300  # outcomes of one file up to which all are taken; beyond, a seeded sample
SAMPLE = 100


class Crash(BaseException):
    """The process ends here."""


class Op(NamedTuple):
    offset: int
    data: bytes | None  # None: cut to `offset`

    def apply(self, content: bytearray) -> None:
        if self.data is None:
            del content[self.offset :]
            return
        if len(content) < self.offset:
            content.extend(bytes(self.offset - len(content)))
        content[self.offset : self.offset + len(self.data)] = self.data


class File:
    def __init__(self, content: bytes = b"") -> None:
        self.cache = bytearray(content)
        self.disk = content
        self.unsynced: list[Op] = []
        self.past: list[tuple[Op, bool]] = []  # since the first failed sync: what was done, and whether it is durable

    def do(self, op: Op) -> None:
        op.apply(self.cache)
        self.unsynced.append(op)

    def sync(self) -> None:
        if self.past:
            self.past = [(op, sure or op.data is None) for op, sure in self.past]
            self.past += [(op, True) for op in self.unsynced]
        else:
            content = bytearray(self.disk)
            for op in self.unsynced:
                op.apply(content)
            self.disk = bytes(content)
        self.unsynced.clear()

    def fail_sync(self) -> None:
        self.past += [(op, False) for op in self.unsynced]
        self.unsynced.clear()

    def outcomes(self, rng: random.Random) -> list[bytes]:
        """Contents that a cut may leave."""
        ops = [op for op, _ in self.past] + self.unsynced
        if not ops:
            return [self.disk]
        choices = [[op] if sure else self._fates(op) for op, sure in self.past]
        choices += [self._fates(op) for op in self.unsynced]
        total = 1
        for fates in choices:
            total *= len(fates)
        picks: Iterable[tuple[Op | None, ...]] = itertools.product(*choices)
        if total > SMALL:
            some = [tuple(rng.choice(fates) for fates in choices) for _ in range(SAMPLE)]
            picks = [tuple(fates[0] for fates in choices), tuple(ops), *some]
        found = set()
        for pick in picks:
            content = bytearray(self.disk)
            for op in pick:
                if op is not None:
                    op.apply(content)
            found.add(bytes(content))
        return sorted(found)

    def _fates(self, op: Op) -> list[Op | None]:
        fates: list[Op | None] = [None, op]
        data = op.data
        if data is None:
            return fates
        fresh = op.offset >= len(self.disk)  # only new space can read as zeros
        cuts = {1, len(data) // 2, len(data) - 1} | {i + 1 for i, byte in enumerate(data) if byte == 10}
        cuts |= {edge - op.offset for edge in range((op.offset // 512 + 1) * 512, op.offset + len(data), 512)}
        if fresh:
            fates.append(Op(op.offset, bytes(len(data))))
        for cut in sorted(c for c in cuts if 0 < c < len(data)):
            fates.append(Op(op.offset, data[:cut]))
            fates.append(Op(op.offset, bytes(cut) + data[cut:]) if fresh else Op(op.offset + cut, data[cut:]))
            if fresh:
                fates.append(Op(op.offset, data[:cut] + bytes(len(data) - cut)))
        return fates


class Folder:
    def __init__(self, names: dict[str, File] | None = None) -> None:
        self.cache = dict(names or {})
        self.disk = dict(self.cache)
        self.unsynced: list[tuple[str | None, str, File | None]] = []  # name that goes, name that comes, its file

    def do(self, gone: str | None, come: str, file: File | None) -> None:
        self._apply(self.cache, (gone, come, file))
        self.unsynced.append((gone, come, file))

    @staticmethod
    def _apply(names: dict[str, File], op: tuple[str | None, str, File | None]) -> None:
        gone, come, file = op
        if gone is not None:
            names.pop(gone, None)
        if file is not None:
            names[come] = file

    def settle(self) -> None:
        for op in self.unsynced:
            self._apply(self.disk, op)
        self.unsynced.clear()

    def outcomes(self) -> Iterator[dict[str, File]]:
        count = len(self.unsynced)
        for kept in itertools.product((False, True), repeat=min(count, 5)):
            names = dict(self.disk)
            # Beyond five, the oldest are taken as there: the recent ones are what recovery is about.
            for op, keep in zip(self.unsynced, (True,) * (count - len(kept)) + kept, strict=True):
                if keep:
                    self._apply(names, op)
            yield names


class SimDisk:
    """Also a `Disk`. `image`: contents by name (`wal/...` for the folder, which is there if `has_wal`).

    `crash_at`: the mutating call, from 0, that does not happen any more. `fail_sync`: the syncs, from 1, that fail.
    `fail_write`: the mutating calls at which a write stops half way (ENOSPC)."""

    def __init__(
        self,
        image: dict[str, bytes] | None = None,
        *,
        crash_at: int | None = None,
        fail_sync: frozenset[int] = frozenset(),
        fail_write: frozenset[int] = frozenset(),
    ) -> None:
        files = {name: File(content) for name, content in (image or {}).items() if not name.endswith("/")}
        self.folders = {"": Folder({name: file for name, file in files.items() if "/" not in name})}
        self.wal_is_named = any(name.startswith("wal/") for name in image or ())
        self.wal_is_durable = self.wal_is_named
        self.folders["wal"] = Folder({name[4:]: file for name, file in files.items() if name.startswith("wal/")})
        self.crash_at, self.fail_sync, self.fail_write = crash_at, fail_sync, fail_write
        self.calls = self.syncs = 0
        self.read_error: dict[str, int] = {}  # errno by name
        self.log: list[str] = []

    def killed(self) -> SimDisk:
        """What the next process finds after a kill: this very disk, with nothing planned any more."""
        self.crash_at, self.fail_sync, self.fail_write, self.calls, self.syncs = None, frozenset(), frozenset(), 0, 0
        return self

    def image(self) -> dict[str, bytes]:
        found = {name: bytes(file.cache) for name, file in self.folders[""].cache.items()}
        if self.wal_is_named:
            found["wal/"] = b""
            found |= {f"wal/{name}": bytes(file.cache) for name, file in self.folders["wal"].cache.items()}
        return found

    def after_cut(self, seed: int = 0, cap: int = 40) -> Iterator[dict[str, bytes]]:
        """Distinct disks that a power cut now may leave; all of them where few are possible."""
        rng = random.Random(seed)
        seen = set()
        wal_fates = [True] if self.wal_is_durable else [False, True] if self.wal_is_named else [False]
        for top, wal, has_wal in itertools.product(
            self.folders[""].outcomes(), list(self.folders["wal"].outcomes()), wal_fates
        ):
            files = dict(top)
            if has_wal:
                files |= {f"wal/{name}": file for name, file in wal.items()}
            names = sorted(files)
            contents = [files[name].outcomes(rng) for name in names]
            total = 1
            for each in contents:
                total *= len(each)
            picks: Iterable[tuple[bytes, ...]] = itertools.product(*contents)
            if total > cap:
                picks = [tuple(rng.choice(each) for each in contents) for _ in range(cap)]
            for pick in picks:
                image = dict(zip(names, pick, strict=True))
                if has_wal:
                    image["wal/"] = b""
                key = tuple(image.items())
                if key not in seen:
                    seen.add(key)
                    yield image

    # The seam

    def names(self, folder: str) -> list[str]:
        self._reading(folder)
        if folder == "wal" and not self.wal_is_named:
            raise FileNotFoundError(errno.ENOENT, folder)
        found = list(self.folders[folder].cache)
        return sorted([*found, "wal"] if folder == "" and self.wal_is_named else found)

    def exists(self, name: str) -> bool:
        self._reading(name)
        folder, base = self._split(name)
        return base in folder.cache

    def read(self, name: str) -> bytes:
        self._reading(name)
        return bytes(self._file(name).cache)

    def read_at(self, name: str, offset: int, size: int) -> bytes:
        return self.read(name)[offset : offset + size]

    def create(self, name: str) -> None:
        self._step("create", name)
        folder, base = self._split(name)
        if base in folder.cache:
            raise FileExistsError(errno.EEXIST, name)
        folder.do(None, base, File())

    def write(self, name: str, offset: int, data: bytes) -> None:
        stopped = self.calls in self.fail_write
        self._step("write", name)
        if stopped:
            self._file(name).do(Op(offset, data[: len(data) // 2]))
            raise OSError(errno.ENOSPC, "no space")
        self._file(name).do(Op(offset, bytes(data)))

    def truncate(self, name: str, size: int) -> None:
        self._step("truncate", name)
        self._file(name).do(Op(size, None))

    def sync(self, name: str) -> None:
        file = self._file(name)
        self._sync_step(name, file)
        file.sync()

    def sync_full(self, name: str) -> None:
        self.sync(name)

    def rename(self, old: str, new: str) -> None:
        self._step("rename", new)
        folder, base = self._split(old)
        folder.do(base, self._split(new)[1], self._file(old))

    def unlink(self, name: str) -> None:
        self._step("unlink", name)
        folder, base = self._split(name)
        folder.do(base, base, None)

    def mkdir(self, name: str) -> None:
        self._step("mkdir", name)
        assert name == "wal"
        self.wal_is_named = True

    def syncdir(self, folder: str) -> None:
        self._sync_step(f"{folder}/", None)
        self.folders[folder].settle()
        if folder == "":
            self.wal_is_durable = self.wal_is_named

    def release(self, name: str) -> None:
        pass

    def _reading(self, name: str) -> None:
        if name in self.read_error:
            raise OSError(self.read_error[name], "cannot be read")

    def _step(self, what: str, name: str) -> None:
        if self.crash_at is not None and self.calls >= self.crash_at:
            raise Crash(what, name)
        self.calls += 1
        self.log.append(f"{what} {name}")

    def _sync_step(self, name: str, file: File | None) -> None:
        self._step("sync", name)
        self.syncs += 1
        if self.syncs in self.fail_sync:
            if file is not None:
                file.fail_sync()
            raise OSError(errno.EIO, "sync failed")

    def _split(self, name: str) -> tuple[Folder, str]:
        folder, _, base = name.rpartition("/")
        return self.folders[folder], base

    def _file(self, name: str) -> File:
        folder, base = self._split(name)
        if base not in folder.cache:
            raise FileNotFoundError(errno.ENOENT, name)
        return folder.cache[base]
