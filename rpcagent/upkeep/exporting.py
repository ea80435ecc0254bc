"""`rpcagent export`: one run as one file. Changes nothing, also beside a daemon.

Knows: what belongs to a run, and that the file has its name only when it is whole. Does not know: the bytes (`parcel`).
"""

from __future__ import annotations

import argparse
import os
import secrets
import sys
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path

from rpcagent import __version__, errors
from rpcagent.batch import exits
from rpcagent.batch.desk import Desk
from rpcagent.batch.faults import Mistake
from rpcagent.journal import blobs, reading, seal
from rpcagent.journal.runfiles import Line
from rpcagent.runs.roster import replayed
from rpcagent.runs.state import RunState
from rpcagent.runs.summary import summarise
from rpcagent.upkeep import parcel
from rpcagent.upkeep.blob import FOLDER
from rpcagent.upkeep.place import Place
from rpcagent.upkeep.stories import Story, opened, refuse_what_is_deleted, resolve, story_of


def command(desk: Desk, place: Place, options: argparse.Namespace) -> int:
    """Exit code 0. Raises NotFound, StoreDamaged, KeyMissing, OSError."""
    disk = place.disk()
    if options.file is None and desk.as_json:
        raise Mistake("--json says what was written, and needs FILE to write to")

    def read() -> tuple[str, Story]:
        snapshot, entries = reading.read_all(disk)
        run, sealing = resolve(disk, entries, options.run), place.seal(snapshot.store_id)
        return snapshot.store_id, story_of(disk, snapshot, entries, run, sealing)

    store_id, story = reading.again(read)
    sealing = place.seal(store_id)
    refuse_what_is_deleted(story, sealing)
    lines = [Line(line.first, line.count, opened(sealing, story.run, line)) for line in story.lines]
    state = replayed(story.run, (line.body for line in lines))
    head = _head(store_id, state)
    contents = _contents(place, sealing, state.blobs)
    if options.file is None:
        parcel.write(sys.stdout.buffer, head, lines, contents)
        sys.stdout.buffer.flush()
        return exits.DONE
    commits, outputs = _write_file(options.file, head, lines, contents)
    size = options.file.stat().st_size
    if desk.as_json:
        desk.fact(
            {
                "exported": {
                    "runId": story.run,
                    "file": str(options.file),
                    "status": head.status,
                    "commits": commits,
                    "lastSeq": story.last,
                    "blobs": outputs,
                    "bytes": size,
                }
            }
        )
    else:
        desk.tell(
            f"{options.file}: {story.run}, {head.status}, {story.last} events, {outputs} large outputs, {size} bytes",
            "good",
        )
    return exits.DONE


def _head(store_id: str, state: RunState) -> parcel.Head:
    heads, _ = summarise(state, 1, "")
    at = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return parcel.Head(parcel.FORMAT, store_id, state.run_id, __version__, at, state.last_seq, heads.status)


def _contents(place: Place, sealing: seal.Seal, digests: Iterable[str]) -> Iterator[tuple[str, bytes]]:
    kept = blobs.Blobs(place.store / FOLDER, sealing)
    for digest in digests:
        try:
            yield digest, kept.read(digest)
        except errors.NotFound:
            name = f"{FOLDER}/{digest}"
            raise errors.StoreDamaged(
                f"{name} is missing, and the run refers to it.", file=name, offset=0, reason="the file is missing"
            ) from None


def _write_file(
    path: Path, head: parcel.Head, lines: list[Line], contents: Iterator[tuple[str, bytes]]
) -> tuple[int, int]:
    """Durable under its name on return, or not there. Raises OSError."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as out:
            counts = parcel.write(out, head, lines, contents)
            out.flush()
            os.fsync(out.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    sync_folder(path.parent)
    return counts


def sync_folder(folder: Path) -> None:
    """The names in it are durable. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
