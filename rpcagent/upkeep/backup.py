"""`rpcagent backup`: a copy of a store, made while a daemon goes on with it, checked, and then given its name.

Knows: under which keys the copy is to be, and what a check of it means. Does not know: how it is made (`copying`, `resealing`).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from rpcagent.batch import exits
from rpcagent.batch.desk import Desk
from rpcagent.batch.faults import Mistake
from rpcagent.journal.reading import MovedOn, Snapshot
from rpcagent.journal.seal import Seal
from rpcagent.keys import KeyRing
from rpcagent.upkeep.checking import Check
from rpcagent.upkeep.copying import Copy
from rpcagent.upkeep.exporting import sync_folder
from rpcagent.upkeep.findings import Finding
from rpcagent.upkeep.place import Place
from rpcagent.upkeep.resealing import Resealing, Unsealing, check_payloads

TRIES = 5


class Copied(NamedTuple):
    """A draft that is whole and durable. `lost`: what could not be taken along."""

    snapshot: Snapshot
    lost: list[Finding]


def command(desk: Desk, place: Place, options: argparse.Namespace) -> int:
    """Exit code 0: DEST is a whole store, durable. 1: damage was copied along, and is told."""
    dest: Path = options.dest.absolute()
    if os.path.lexists(dest):
        raise Mistake(f"{dest} is there already", "name a folder that is not")
    if not dest.parent.is_dir():
        raise Mistake(f"{dest.parent} is not a directory")
    if options.reseal and place.ring is None:
        raise Mistake(
            "--reseal goes with --encryption-key, which names the key that the copy is to be under",
            "`rpcagent key new FILE` makes one; the keys of before are named with --old-encryption-key",
        )
    anew = options.reseal or options.unseal
    ring = KeyRing(place.ring.current) if options.reseal and place.ring else None if options.unseal else place.ring
    draft = dest.with_name(f".{dest.name}.{secrets.token_hex(4)}.tmp")
    try:
        snapshot, findings = _copied(place, draft, _sealing(place, options) if anew else None)
        with contextlib.closing(Place(draft, ring)) as copy:
            if anew:
                check_payloads(draft, copy.disk(), copy.seal)
            check = Check(copy, findings.append)
            check.run()
        draft.rename(dest)
        sync_folder(dest.parent)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    damaged = [finding for finding in findings if finding.severity == "damage"]
    exit_code = exits.FAILED if damaged else exits.DONE
    if desk.as_json:
        for finding in damaged:
            desk.fact(finding.value())
        told: dict[str, Any] = {
            "dest": str(dest),
            "storeId": snapshot.store_id,
            "epoch": snapshot.epoch,
            "lastRecord": snapshot.end.seq,
            "runs": check.runs,
        }
        if anew:
            told["key"] = ring.current.kid if ring is not None else None
        desk.fact({"backup": told, "exitCode": exit_code})
        return exit_code
    for finding in damaged:
        for line in finding.lines():
            desk.tell(line, "bad")
    word = "its damage is copied along" if damaged else "checked"
    if anew:
        word += f"; all of it is under the key {ring.current.kid}" if ring else "; nothing in it is encrypted"
    desk.tell(
        f"{dest}: {check.runs} runs up to record {snapshot.end.seq}, epoch {snapshot.epoch}, {word}",
        "bad" if damaged else "good",
    )
    return exit_code


def _sealing(place: Place, options: argparse.Namespace) -> Callable[[str], Seal]:
    """What opens the payloads of the store with an id, and seals them for the copy."""
    return (lambda store_id: Unsealing(place.seal(store_id))) if options.unseal else place.seal


def _copied(place: Place, draft: Path, sealing: Callable[[str], Seal] | None = None) -> Copied:
    """`sealing`: as of `Resealing`; None: all bytes stay as they are."""
    for _ in range(TRIES):
        try:
            if sealing is None:
                return Copied(Copy(place.store, place.disk(), draft, place.seal).make(), [])
            resealing = Resealing(place.store, place.disk(), draft, sealing)
            return Copied(resealing.make(), resealing.lost)
        except (MovedOn, FileNotFoundError):
            shutil.rmtree(draft, ignore_errors=True)
    raise MovedOn("The store changes faster than it can be copied; try again when less goes on.", errno="ESTALE")
