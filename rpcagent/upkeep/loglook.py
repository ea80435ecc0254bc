"""What is wrong with the log, HEAD, the manifest and the tombstones of a store, as a person is told.

Knows: what each finding means. Does not know: how they are read (`views`, `salvage`), or whether an owner disturbed it.
"""

from __future__ import annotations

from rpcagent import errors
from rpcagent.journal import manifest, opening, reading, runfiles, tombstones
from rpcagent.journal.disk import Disk
from rpcagent.upkeep import salvage
from rpcagent.upkeep.findings import REPAIR, TRY, Finding
from rpcagent.upkeep.views import View


def about(disk: Disk, view: View, *, owned: bool) -> list[Finding]:
    """All of it. Raises StorageError."""
    told = _about_manifest(view)
    told += _about_log(disk, view, owned=owned) + _about_head(disk, view)
    for error in view.grave_damage:
        told.append(of_damage(error, "keys of deleted runs may be free again; " + TRY + REPAIR))
    named = {each.name for each in view.manifest.tombstones} if view.manifest else set()
    for name in _names(disk, tombstones.FOLDER) if view.manifest is not None and not owned else ():
        if name not in named:
            what = "not named in the manifest, deleted at the next start"
            told.append(Finding(severity="note", what=what, file=f"{tombstones.FOLDER}/{name}"))
    return told


def of_damage(error: errors.StoreDamaged, remedy: str, *, records: tuple[int, int] | None = None) -> Finding:
    """As the journal tells it."""
    told = error.details
    return Finding(
        severity="damage", what=str(told["reason"]), file=str(told.get("file", "")), offset=told.get("offset"),
        runs=told.get("runs", []), remedy=remedy, records=records,
    )  # fmt: skip


def _about_manifest(view: View) -> list[Finding]:
    if view.manifest_damage is None:
        return []
    return [of_damage(view.manifest_damage, "`rpcagent repair` makes it anew from the files of the runs")]


def _about_log(disk: Disk, view: View, *, owned: bool) -> list[Finding]:
    log, told = view.log, list[Finding]()
    places = {(hole.file, hole.offset) for hole in log.holes if hole.missing}
    for error in log.damage:
        if (error.details["file"], error.details["offset"]) not in places:
            told.append(of_damage(error, TRY + REPAIR))
    for hole in log.holes:
        if hole.missing:
            runs = sorted({each.run for each in hole.told if each.run and hole.first <= each.seq <= hole.last})
            told.append(Finding(
                severity="damage", what=f"{hole.missing} acknowledged records cannot be read", file=hole.file,
                offset=hole.offset, records=(hole.first, hole.last), runs=runs, remedy=TRY + REPAIR,
            ))  # fmt: skip
    strangers = log.store_ids - {view.store_id}
    if strangers:
        what = f"segments belong to another store ({', '.join(sorted(strangers))})"
        told.append(Finding(severity="damage", what=what, file=opening.FOLDER, remedy="restore it from a backup"))
    if view.manifest is None and not told and log.base.seq:
        what = "the log does not begin at record 1, and there is no manifest that says why"
        told.append(Finding(severity="damage", what=what, file=manifest.FILE, remedy="`rpcagent repair` makes it anew"))
    if view.manifest is None and not (told or log.segments or log.base.seq):
        for name in (runfiles.FOLDER, tombstones.FOLDER):  # as an opening refuses it
            if _names(disk, name):
                what = "the files of runs are there but no log: the segments are missing"
                told.append(Finding(severity="damage", what=what, file=name, remedy=TRY + REPAIR))
    return told + _about_what_is_left(log, owned=owned)


def _about_what_is_left(log: salvage.Log, *, owned: bool) -> list[Finding]:
    spare = "a leftover, deleted at the next start or repair"
    told = [Finding(severity="note", what=spare, file=name) for name in (*log.leftovers, *log.unfinished)]
    if log.unfinished:
        what = "a repair was cut off"
        told.append(Finding(severity="damage", what=what, file=log.unfinished[0], remedy="run `rpcagent repair` again"))
    if log.unconfirmed or log.torn_bytes:
        why = "a daemon is writing it" if owned else "the process that wrote it was cut off; the next one decides"
        what = f"{log.unconfirmed} records and {log.torn_bytes} bytes above the watermark are not confirmed: {why}"
        told.append(Finding(severity="note", what=what, file=log.segments[-1]))
    return told


def _about_head(disk: Disk, view: View) -> list[Finding]:
    head, data = salvage.read_head(disk)
    if head is None:
        what = "the file is missing" if data is None else "neither of its slots is intact"
        remedy = "it is made anew at the next start; until then a cut at the end of the log cannot be seen"
        return [Finding(severity="warning", what=what, file="HEAD", remedy=remedy)]
    base = view.log.base
    if view.manifest and head.seq == base.seq and head.checksum != base.checksum:
        what = "HEAD and the manifest name another line with the same number"
        return [Finding(severity="damage", what=what, file="HEAD", remedy=REPAIR)]
    return []


def _names(disk: Disk, folder: str) -> list[str]:
    try:
        return disk.names(folder)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise reading.unreadable(folder, error) from error
