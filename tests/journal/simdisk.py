"""A disk in memory with a crash model, weaker than any file system we run on.

What a living process sees (`cache`) and what a power cut leaves (`disk`) are kept apart, for contents and for names.
Every mutating call is a crash point. After a cut:
- of the unsynced writes to a file any subset is there, each whole, as a prefix, as a suffix, or as zeros under a longer
  file; of unsynced cuts any subset;
- of the unsynced changes of names in a folder any subset is there, a folder that is named with what it holds by its own
  rules; of one that is not named nothing is there;
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
    from collections.abc import Iterable, Iterator, Sequence

SMALL = 300  # outcomes of one file up to which all are taken; beyond, a seeded sample
SAMPLE = 100
SHAPES = 2048  # combinations of names in all folders up to which all are taken; beyond, a seeded sample of as many


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
    def __init__(self) -> None:
        self.cache: dict[str, Node] = {}
        self.disk: dict[str, Node] = {}
        self.unsynced: list[tuple[str | None, str, Node | None]] = []  # name that goes, name that comes, what it names

    def do(self, gone: str | None, come: str, node: Node | None) -> None:
        self._apply(self.cache, (gone, come, node))
        self.unsynced.append((gone, come, node))

    @staticmethod
    def _apply(names: dict[str, Node], op: tuple[str | None, str, Node | None]) -> None:
        gone, come, node = op
        if gone is not None:
            names.pop(gone, None)
        if node is not None:
            names[come] = node

    def settle(self) -> None:
        for op in self.unsynced:
            self._apply(self.disk, op)
        self.unsynced.clear()

    def outcomes(self) -> list[dict[str, Node]]:
        found = []
        count = len(self.unsynced)
        for kept in itertools.product((False, True), repeat=min(count, 5)):
            names = dict(self.disk)
            # Beyond five, the oldest are taken as there: the recent ones are what recovery is about.
            for op, keep in zip(self.unsynced, (True,) * (count - len(kept)) + kept, strict=True):
                if keep:
                    self._apply(names, op)
            if names not in found:
                found.append(names)
        return found

    def all_below(self) -> list[Folder]:
        """This folder and all that may be below it after a cut."""
        found = [self]
        nodes = [*self.disk.values(), *self.cache.values(), *(node for _, _, node in self.unsynced)]
        for node in {id(node): node for node in nodes}.values():
            if isinstance(node, Folder):
                found += node.all_below()
        return found


Node = File | Folder


class SimDisk:
    """Also a `Disk`. `image`: contents by name; a name that ends in a slash is that of a folder.

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
        self.root = Folder()
        for name, content in (image or {}).items():
            *parents, last = name.split("/")
            folder = self.root
            for parent in parents:
                if parent not in folder.cache:
                    folder.cache[parent] = folder.disk[parent] = Folder()
                below = folder.cache[parent]
                assert isinstance(below, Folder)
                folder = below
            if last:
                folder.cache[last] = folder.disk[last] = File(content)
        self.crash_at, self.fail_sync, self.fail_write = crash_at, fail_sync, fail_write
        self.calls = self.syncs = 0
        self.read_error: dict[str, int] = {}  # errno by name
        self.log: list[str] = []

    def killed(self) -> SimDisk:
        """What the next process finds after a kill: this very disk, with nothing planned any more."""
        self.crash_at, self.fail_sync, self.fail_write, self.calls, self.syncs = None, frozenset(), frozenset(), 0, 0
        return self

    def image(self) -> dict[str, bytes]:
        return {
            name: b"" if isinstance(node, Folder) else bytes(node.cache)
            for name, node in _walk(self.root, {}, "")
        }  # fmt: skip

    def after_cut(self, seed: int = 0, cap: int = 40, shapes: int = SHAPES) -> Iterator[dict[str, bytes]]:
        """Distinct disks that a power cut now may leave; all of them where few are possible. `cap`: contents for each
        combination of names, `shapes`: such combinations."""
        rng = random.Random(seed)
        seen = set()
        fates: dict[int, list[bytes]] = {}
        for names in self._shapes(rng, shapes):
            nodes = sorted(_walk(self.root, names, ""), key=lambda found: found[0])
            contents = []
            total = 1
            for _, node in nodes:
                if id(node) not in fates:
                    fates[id(node)] = [b""] if isinstance(node, Folder) else node.outcomes(rng)
                contents.append(fates[id(node)])
                total *= len(contents[-1])
            picks: Iterable[tuple[bytes, ...]] = itertools.product(*contents)
            if total > cap:
                picks = [tuple(rng.choice(each) for each in contents) for _ in range(cap)]
            for pick in picks:
                image = dict(zip((name for name, _ in nodes), pick, strict=True))
                key = tuple(image.items())
                if key not in seen:
                    seen.add(key)
                    yield image

    def _shapes(self, rng: random.Random, most: int) -> Iterator[dict[int, dict[str, Node]]]:
        """For each folder by its identity: names that a cut may leave in it."""
        folders = {id(folder): folder.outcomes() for folder in self.root.all_below()}
        total = 1
        for outcomes in folders.values():
            total *= len(outcomes)
        if total <= most:
            picks: Iterable[tuple[dict[str, Node], ...]] = itertools.product(*folders.values())
        else:
            first, last = (tuple(each[end] for each in folders.values()) for end in (0, -1))
            some = [tuple(rng.choice(each) for each in folders.values()) for _ in range(most - 2)]
            picks = [first, last, *some]
        for pick in picks:
            yield dict(zip(folders, pick, strict=True))

    # The seam

    def names(self, folder: str) -> list[str]:
        self._reading(folder)
        return sorted(self._folder(folder).cache)

    def exists(self, name: str) -> bool:
        self._reading(name)
        folder, _, last = name.rpartition("/")
        try:
            return last in self._folder(folder).cache
        except FileNotFoundError:
            return False

    def read(self, name: str) -> bytes:
        self._reading(name)
        return bytes(self._file(name).cache)

    def read_at(self, name: str, offset: int, size: int) -> bytes:
        self._reading(name)
        return bytes(self._file(name).cache[offset : offset + size])

    def size(self, name: str) -> int:
        self._reading(name)
        return len(self._file(name).cache)

    def create(self, name: str) -> None:
        self._step("create", name)
        self._free(name).do(None, _last(name), File())

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
        assert old.rpartition("/")[0] == new.rpartition("/")[0]
        self._parent(old).do(_last(old), _last(new), self._file(old))

    def unlink(self, name: str) -> None:
        self._step("unlink", name)
        self._file(name)
        self._parent(name).do(_last(name), _last(name), None)

    def mkdir(self, name: str) -> None:
        self._step("mkdir", name)
        self._free(name).do(None, _last(name), Folder())

    def rmdir(self, name: str) -> None:
        self._step("rmdir", name)
        if self._folder(name).cache:
            raise OSError(errno.ENOTEMPTY, name)
        self._parent(name).do(_last(name), _last(name), None)

    def syncdir(self, folder: str) -> None:
        self._sync_step(f"{folder}/", None)
        self._folder(folder).settle()

    def sync_many(self, files: Sequence[str], folders: Sequence[str]) -> None:
        """One by one, a crash point before each: what a sync of all at once may also leave."""
        for name in files:
            self.sync(name)
        for folder in folders:
            self.syncdir(folder)

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

    def _folder(self, path: str) -> Folder:
        found: Node | None = self.root
        for name in path.split("/") if path else ():
            found = found.cache.get(name) if isinstance(found, Folder) else None
        if not isinstance(found, Folder):
            raise FileNotFoundError(errno.ENOENT, path)
        return found

    def _parent(self, name: str) -> Folder:
        return self._folder(name.rpartition("/")[0])

    def _free(self, name: str) -> Folder:
        folder = self._parent(name)
        if _last(name) in folder.cache:
            raise FileExistsError(errno.EEXIST, name)
        return folder

    def _file(self, name: str) -> File:
        found = self._parent(name).cache.get(_last(name))
        if not isinstance(found, File):
            raise FileNotFoundError(errno.ENOENT, name)
        return found


def _last(name: str) -> str:
    return name.rpartition("/")[2]


def _walk(folder: Folder, names: dict[int, dict[str, Node]], path: str) -> Iterator[tuple[str, Node]]:
    """All below `folder`, by name. `names`: what is in a folder, where that is not its cache."""
    for name, node in names.get(id(folder), folder.cache).items():
        if isinstance(node, Folder):
            yield f"{path}{name}/", node
            yield from _walk(node, names, f"{path}{name}/")
        else:
            yield f"{path}{name}", node
