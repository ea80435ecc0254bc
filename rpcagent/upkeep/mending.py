"""How a damaged store becomes one that opens: what is written, in which order, so that a crash at any point can be repaired.

Knows: the steps, and what is durable after each. Does not know: what is kept (`damage` decided that), or what a person is told.

Everything takes effect with one rename, that of the manifest:

1. a copy of all that will be touched goes to `damaged/<time>/`, durable;
2. a new log is written behind all numbers that were ever taken: the certain records that no good files hold, and the closings.
   Its segments say who made them, so that they are known for leftovers as long as no manifest leads to them;
3. a file of tombstones, if ids must be remembered, those of runs that the old log deletes among them;
4. the manifest, whose log begins there: from now on nothing of the old log counts;
5. HEAD, where it was bad; then old segments, files of runs that stand in the log now, and leftovers are deleted.

Before 4 the store is as damaged as it was, after it whole. A crash behind 4 leaves files that no longer count; of a run whose
bad files are still there, the next repair finds all records in the log, and takes them away.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime

import msgspec

from rpcagent import __version__, errors
from rpcagent.journal import manifest, opening, record, runfiles, seal, tombstones
from rpcagent.journal.checkpoint import Checkpointer
from rpcagent.journal.disk import Disk
from rpcagent.journal.manifest import Base, Manifest, TombstoneFile
from rpcagent.journal.record import Item
from rpcagent.runs import summary
from rpcagent.upkeep import salvage
from rpcagent.upkeep.damage import Fate, Found, Run, closing_item, lines_of

FOLDER = "damaged"
SEGMENT_BYTES = 8 << 20
_PIECE = 1 << 20
_DRAFT = ".tmp"
_GONE: frozenset[Fate] = frozenset({"buried", "deleted"})


def mend(
    disk: Disk, found: Found, *, stamp: str, now: datetime, report: bytes, index: Callable[[int], None]
) -> str | None:
    """Does all of it; the caller holds the lock. `stamp`: the name of the folder of copies; `report`: what is said there of the
    repair; `index(through)` makes the index anew, once all else is durable. Returns the folder, None where nothing was copied.

    Raises StorageError: the store is as before, or mended in part; run it again."""
    try:
        return _Mender(disk, found, now).mend(stamp, report, index)
    except OSError as error:
        name = errors.name_of(error)
        raise errors.StorageError(f"The repair did not get through ({name}); run it again.", errno=name) from error


class _Mender:
    def __init__(self, disk: Disk, found: Found, now: datetime) -> None:
        self._disk = disk
        self._found = found
        self._now = now
        self._anew = found.must_begin_anew
        self._gone = [run for run in found.runs.values() if run.fate in {"moved", "closed"} and run.state is None]
        self._gone += [run for run in found.runs.values() if run.fate == "buried"]

    def mend(self, stamp: str, report: bytes, index: Callable[[int], None]) -> str | None:
        copies = self._copy(f"{FOLDER}/{stamp}", report)
        base = self._found.log.base
        head = record.Head(self._found.epoch, base.seq, base.checksum)
        if self._anew:
            new = self._begin_anew()
            head = record.Head(self._found.epoch, new.seq, new.checksum)
        if not self._found.head_is_good:
            self._write_head(head)
        self._delete()
        index(head.seq)
        return copies

    # 1

    def _copy(self, target: str, report: bytes) -> str | None:
        names = list(self._touched())
        if not names:
            return None
        folders = [target]
        for name in names:
            parts = name.split("/")[:-1]
            folders += [f"{target}/{'/'.join(parts[:depth])}" for depth in range(1, len(parts) + 1)]
        parents = [FOLDER, *dict.fromkeys(folders)]
        for folder in parents:
            if not self._disk.exists(folder):
                self._disk.mkdir(folder)
        for name in names:
            self._copy_one(name, f"{target}/{name}")
        self._new(f"{target}/repair.json", report)
        files = [f"{target}/{name}" for name in (*names, "repair.json")]
        self._disk.sync_many(files, [*reversed(parents), ""])
        return target

    def _copy_one(self, name: str, to: str) -> None:
        self._disk.create(to)
        offset = 0
        while data := self._disk.read_at(name, offset, _PIECE):
            self._disk.write(to, offset, data)
            offset += len(data)

    def _touched(self) -> Iterator[str]:
        """All names that are changed or deleted and hold something."""
        found = self._found
        if not found.head_is_good and self._disk.exists("HEAD"):
            yield "HEAD"
        if not self._anew:
            return
        yield from (name for name in found.log.segments if self._disk.exists(name))
        if self._disk.exists(manifest.FILE):
            yield manifest.FILE
        named = {file.name for file in found.graves}
        yield from (f"{tombstones.FOLDER}/{name}" for name in self._names(tombstones.FOLDER) if name not in named)
        for run in self._gone:
            folder = runfiles.folder_of(run.name)
            yield from (f"{folder}/{name}" for name in self._names(folder))

    # 2 to 4

    def _begin_anew(self) -> Base:
        found = self._found
        base = Base(found.log.top + 1, found.log.end.checksum, found.log.top + 1)
        self._write_log(base)
        files = tuple(TombstoneFile(file.name, file.count, file.sum) for file in found.graves)
        gone = [run for run in found.runs.values() if run.fate in _GONE]
        buried = {tombstones.tombstone_id(run.name) for run in gone}
        ids = found.saved_graves | buried | {tombstones.tombstone_id(run) for run in found.strays}
        if ids:
            files = (*files, self._write_graves(tombstones.encode(ids)))
        self._write_manifest(base, files)
        return base

    def _write_log(self, base: Base) -> None:
        writer = _LogWriter(self._disk, base, self._found.store_id)
        runs = {name: run for name, run in self._found.runs.items() if run.fate not in _GONE}
        ends = {name: run.state.last_seq if run.state is not None else 0 for name, run in runs.items()}
        for run in runs.values():
            if run.state is None and run.prefix:
                for line in lines_of(self._disk, run):
                    writer.add(Item(run.name, line.first, line.count, line.body))
                    ends[run.name] += line.count

        def keep(line: record.Line) -> None:
            last = line.first + line.count - 1
            if line.kind != record.COMMIT or line.first != ends.get(line.run, -1) + 1 or last > runs[line.run].certain:
                return
            ends[line.run] = last
            writer.add(Item(line.run, line.first, line.count, line.body))

        salvage.read_log(self._disk, self._found.known.base if self._found.known else None, keep)
        for run in runs.values():
            item = closing_item(run)
            if item is not None:
                writer.add(item)
        writer.end()

    def _write_graves(self, data: bytes) -> TombstoneFile:
        names = self._names(tombstones.FOLDER)
        if not names and not self._disk.exists(tombstones.FOLDER):
            self._disk.mkdir(tombstones.FOLDER)
        taken = [int(name[:16]) for name in names if name[:16].isdigit()]
        name = f"{max(taken, default=0) + 1:016d}.bin"
        full = f"{tombstones.FOLDER}/{name}"
        self._new(full, data)
        self._disk.sync_many([full], [tombstones.FOLDER, ""])
        return TombstoneFile(name, len(data) // tombstones.ID_BYTES, hashlib.sha256(data).hexdigest())

    def _write_manifest(self, base: Base, files: tuple[TombstoneFile, ...]) -> None:
        known = self._found.known
        kept = [run for run in self._found.runs.values() if run.state is not None and run.fate not in _GONE]
        places = max([known.places if known else 1, *(run.place + 1 for run in kept)])
        at = self._now if known is None else max(self._now, datetime.fromisoformat(known.at))
        header = Manifest(
            store_id=self._found.store_id, app=__version__, epoch=self._found.epoch,
            at=at.astimezone(UTC).isoformat().replace("+00:00", "Z"), places=places,
            ended=dict(Counter(run.status for run in kept if not run.live)), tombstones=files, base=base,
            kid=known.kid if known else _kid(kept),
        )  # fmt: skip
        live = ((run.name, run.state.summary) for run in kept if run.state is not None and run.live)
        self._replace(manifest.FILE, manifest.encode(header, live))

    def _replace(self, name: str, data: bytes) -> None:
        """A file of the store's own folder, with this content or as it was."""
        self._new(name + _DRAFT, data)
        self._disk.sync_full(name + _DRAFT)
        self._disk.rename(name + _DRAFT, name)
        self._disk.syncdir("")

    # 5

    def _write_head(self, head: record.Head) -> None:
        slot = record.head_slot(head)
        self._replace("HEAD", slot + b" " * (record.SLOT - 1) + b"\n")

    def _delete(self) -> None:
        for name in self._found.log.unfinished:
            self._unlink(name)
        if self._anew:
            for run in self._gone:
                self._delete_run(run)
        if "HEAD" + _DRAFT in self._names(""):
            self._unlink("HEAD" + _DRAFT)
        Checkpointer(self._disk).sweep()
        for folder in (runfiles.FOLDER, opening.FOLDER, ""):
            if not folder or self._disk.exists(folder):
                self._disk.syncdir(folder)

    def _delete_run(self, run: Run) -> None:
        folder = runfiles.folder_of(run.name)
        state = runfiles.state_of(run.name)
        names = [f"{folder}/{name}" for name in self._names(folder)]
        for name in sorted(names, key=lambda name: name != state):  # without its state a run is no run
            self._unlink(name)
        with contextlib.suppress(FileNotFoundError):
            self._disk.rmdir(folder)

    def _unlink(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._disk.unlink(name)

    def _new(self, name: str, data: bytes) -> None:
        if self._disk.exists(name):
            self._disk.unlink(name)
        self._disk.create(name)
        self._disk.write(name, 0, data)

    def _names(self, folder: str) -> list[str]:
        try:
            return self._disk.names(folder)
        except FileNotFoundError:
            return []


class _LogWriter:
    """Segments behind `base`, with their names only when all of them are durable. Holds one in memory."""

    def __init__(self, disk: Disk, base: Base, store_id: str) -> None:
        self._disk, self._store_id = disk, store_id
        self._seq, self._checksum = base.seq, base.checksum
        self._before = (base.seq, base.checksum)
        self._lines: list[bytes] = []
        self._size = 0
        self._drafts: list[str] = []

    def add(self, item: Item) -> None:
        if self._size >= SEGMENT_BYTES:
            self._write()
        self._seq += 1
        line, self._checksum = record.commit_line(self._seq, self._seq, self._checksum, item)
        self._lines.append(line)
        self._size += len(line)

    def end(self) -> None:
        """All segments have their names, durable, on return."""
        self._write()
        self._disk.sync_many(self._drafts, [])
        for draft in self._drafts:
            self._disk.rename(draft, draft.removesuffix(_DRAFT))
        self._disk.syncdir(opening.FOLDER)
        self._disk.syncdir("")

    def _write(self) -> None:
        header = record.Header(record.FORMAT, "crc32", self._store_id, __version__ + salvage.REPAIRED, self._seq)
        content = b"".join([record.header_line(*self._before, header), *self._lines])
        draft = f"{opening.FOLDER}/{self._before[0] + 1:016d}.jsonl{_DRAFT}"
        if not self._drafts and not self._disk.exists(opening.FOLDER):
            self._disk.mkdir(opening.FOLDER)
        if self._disk.exists(draft):
            self._disk.unlink(draft)
        self._disk.create(draft)
        self._disk.write(draft, 0, content)
        self._drafts.append(draft)
        self._before, self._lines, self._size = (self._seq, self._checksum), [], 0


def _kid(kept: list[Run]) -> str:
    """A key that payloads are sealed with, where no manifest names it: that of the run that began last."""
    for run in sorted(kept, key=lambda run: run.place, reverse=True):
        with contextlib.suppress(ValueError, msgspec.DecodeError):
            found = seal.kid_of(bytes(summary.decode(run.state.summary).body)) if run.state is not None else None
            if found is not None:
                return found
    return ""


def report_of(lines: list[str]) -> bytes:
    """What is written beside the copies."""
    return msgspec.json.encode({"app": __version__, "repair": lines}) + b"\n"
