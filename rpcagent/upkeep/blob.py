"""`rpcagent blob`: a large output that is kept beside the records, and which of them a run refers to."""

from __future__ import annotations

import argparse
import re
import sys

from rpcagent import errors
from rpcagent.batch import exits
from rpcagent.batch.desk import Desk
from rpcagent.batch.faults import Mistake
from rpcagent.journal import blobs, reading, seal
from rpcagent.journal.disk import Disk
from rpcagent.runs.roster import replayed
from rpcagent.upkeep.place import Place
from rpcagent.upkeep.stories import opened, refuse_what_is_deleted, resolve, story_of

FOLDER = "blobs"
_DIGEST = re.compile(r"[0-9a-f]{6,64}")


def command(desk: Desk, place: Place, options: argparse.Namespace) -> int:
    """Exit code 0. Raises NotFound, StoreDamaged, KeyMissing."""
    disk = place.disk()
    snapshot = reading.read_store(disk)
    kept = blobs.Blobs(place.store / FOLDER, place.seal(snapshot.store_id))
    if _DIGEST.fullmatch(options.name):
        digest = _resolved(disk, options.name)
        if desk.as_json:
            desk.fact({"digest": digest, "bytes": sum(map(len, kept.pieces(digest)))})
            return exits.DONE
        for piece in kept.pieces(digest):
            sys.stdout.buffer.write(piece)
        sys.stdout.buffer.flush()
        return exits.DONE
    for digest in referenced(disk, place.seal(snapshot.store_id), options.name):
        try:
            size: int | None = kept.size(digest)
        except errors.NotFound:
            size = None
        if desk.as_json:
            desk.fact({"digest": digest, "bytes": size})
        else:
            desk.tell(f"{digest}  {'missing' if size is None else size}", "bad" if size is None else "plain")
    return exits.DONE


def referenced(disk: Disk, sealing: seal.Seal, name: str) -> list[str]:
    """The digests that a run refers to, in the order in which it came to them. Raises Mistake, KeyMissing."""

    def read() -> list[str]:
        snapshot, entries = reading.read_all(disk)
        run = resolve(disk, entries, name)
        story = story_of(disk, snapshot, entries, run, sealing)
        refuse_what_is_deleted(story, sealing)
        return list(replayed(run, (opened(sealing, run, line) for line in story.lines)).blobs)

    return reading.again(read)


def _resolved(disk: Disk, name: str) -> str:
    try:
        there = disk.names(FOLDER)
    except FileNotFoundError:
        there = []
    found = [digest for digest in there if digest.startswith(name) and len(digest) == 64]
    if len(found) > 1:
        raise Mistake(f"{name!r} may be any of {len(found)} blobs", "give more of the digest")
    if not found:
        raise Mistake(f"this store has no blob {name}", "`rpcagent blob RUN` lists those of a run", code="NOT_FOUND")
    return found[0]
