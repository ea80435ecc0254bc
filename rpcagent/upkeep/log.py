"""`rpcagent log`: what is recorded, record by record, read from the files. Never a daemon, never a change.

Knows: how a record looks to a person and to a program, and how to follow a log that its owner shortens by checkpoints. Does not
know: what an event means to the run (`narrator` has the words).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable
from typing import Any

import msgspec

from rpcagent.batch import exits
from rpcagent.batch.desk import Desk
from rpcagent.batch.narrator import Narrator
from rpcagent.batch.session import short_ids
from rpcagent.batch.text import visible
from rpcagent.journal import reading, record, seal
from rpcagent.journal.checkpoint import read_manifest
from rpcagent.journal.disk import Disk
from rpcagent.journal.runfiles import Line
from rpcagent.upkeep.place import Place
from rpcagent.upkeep.stories import Story, opened, resolve, story_of

POLL_S = 0.2
_SHORT = 14
_MARGIN = 24


def command(desk: Desk, place: Place, options: argparse.Namespace) -> int:
    """Follows until it is interrupted; else 0."""
    disk = place.disk()
    if options.run is not None:
        return _one_run(desk, place, disk, options)
    base = _base(disk)
    start = max(base, options.since - 1)
    if base and options.since <= base and not desk.as_json:
        desk.say(f"Records 1 to {base} are in the files of the runs; --run shows them.", "dim")
    follower = reading.Follower(disk, start)
    store_id = reading.read_store(disk).store_id if place.ring is not None else ""
    printer = _Printer(desk, place.seal(store_id), options.bodies)
    while True:
        for found in follower.poll():
            if isinstance(found, range):
                printer.skipped(found)
            else:
                printer.record(found)
        if not options.follow:
            break
        time.sleep(POLL_S)
    return exits.DONE


def _base(disk: Disk) -> int:
    told = read_manifest(disk)
    return told.base.seq if told is not None else 0


def _one_run(desk: Desk, place: Place, disk: Disk, options: argparse.Namespace) -> int:
    """The whole story of a run; with --follow what comes after it too."""

    def read() -> tuple[str, int, Story]:
        snapshot, entries = reading.read_all(disk)
        run = resolve(disk, entries, options.run)
        story = story_of(disk, snapshot, entries, run, place.seal(snapshot.store_id))
        return snapshot.store_id, snapshot.end.seq, story

    store_id, seq, story = reading.again(read)
    printer = _Printer(desk, place.seal(store_id), options.bodies, narrate=True)
    told = _tell(printer, story, 0, options.since)
    follower = reading.Follower(disk, seq)
    while options.follow:
        for found in follower.poll():
            if isinstance(found, range):  # a checkpoint was faster; what it took is in the files of the run
                _, _, story = reading.again(read)
                told = _tell(printer, story, told, 0)
            elif found.run == story.run and found.first > told:
                told = found.first + found.count - 1
                printer.commit(found.run, Line(found.first, found.count, found.body), found.seq)
        time.sleep(POLL_S)
    return exits.DONE


def _tell(printer: _Printer, story: Story, told: int, since: int) -> int:
    """Shows what comes after event `told`; returns the last one."""
    for line in story.lines:
        last = line.first + line.count - 1
        if last > told and last >= since:
            printer.commit(story.run, line, story.numbers.get(line.first))
    return max(told, story.last)


class _Printer:
    """Records as lines or objects. `narrate`: of one run, each event with what it says."""

    def __init__(self, desk: Desk, sealing: seal.Seal, bodies: bool, *, narrate: bool = False) -> None:
        self._desk, self._seal = desk, sealing
        self._bodies = bodies
        self._narrator = Narrator(desk.width - _MARGIN) if narrate else None

    def skipped(self, gone: range) -> None:
        what = f"records {gone.start} to {gone.stop - 1} went into the files of their runs before they could be shown"
        if self._desk.as_json:
            self._desk.fact({"skipped": {"first": gone.start, "last": gone.stop - 1}})
        else:
            self._desk.say(what, "ask")

    def record(self, line: record.Line) -> None:
        if line.kind == record.COMMIT:
            self.commit(line.run, Line(line.first, line.count, line.body), line.seq)
            return
        told = msgspec.json.decode(line.body)
        if self._desk.as_json:
            self._desk.fact({"record": line.seq, "opening": told})
        else:
            self._desk.tell(
                f"{line.seq:>7}  {_moment(told.get('at'))}  {'-':<{_SHORT}}  opened: epoch {told.get('epoch')}", "dim"
            )

    def commit(self, run: str, line: Line, number: int | None) -> None:
        kid: str | None = None
        try:
            body = opened(self._seal, run, line)
        except seal.KeyMissing as error:
            kid, body = str(error.details["kid"]), b""
        if kid is not None:
            self._sealed(run, line, number, kid)
            return
        told = msgspec.json.decode(body)
        elements = [
            {"runId": run, "seq": told["seq"] + place, "at": told["at"], "event": event}
            for place, event in enumerate(told["events"])
        ]
        if self._desk.as_json:
            for element in elements:
                self._desk.fact({"record": number, **element} if number is not None else element)
        elif self._narrator is not None:
            self._narrated(elements, number)
        else:
            types = " ".join(visible(str(event["type"])) for event in told["events"])
            self._line(run, line, number, _moment(told["at"]), types)
            self._body(elements)

    def _sealed(self, run: str, line: Line, number: int | None, kid: str) -> None:
        if self._desk.as_json:
            shown: dict[str, Any] = {"record": number} if number is not None else {}
            self._desk.fact({**shown, "runId": run, "seq": line.first, "count": line.count, "sealed": kid})
        else:
            self._line(run, line, number, " " * 20, f"sealed ({kid})")

    def _line(self, run: str, line: Line, number: int | None, moment: str, what: str) -> None:
        last = line.first + line.count - 1
        events = str(line.first) if last == line.first else f"{line.first}-{last}"
        short = short_ids([run])[run]
        self._desk.tell(f"{number or '':>7}  {moment}  {short:<{_SHORT}}  {events:<9} {what}  ({len(line.body)} bytes)")

    def _narrated(self, elements: Iterable[dict[str, Any]], number: int | None) -> None:
        assert self._narrator is not None
        for element in elements:
            line = self._narrator.told(element)
            laid = line.laid_out().replace("\n", "\n" + " " * 39)
            self._desk.tell(
                f"{number or '':>7}  {_moment(element['at'])}  {element['seq']:>5}  {laid}".rstrip(), line.tone
            )
            self._body([element])

    def _body(self, elements: Iterable[dict[str, Any]]) -> None:
        for element in elements if self._bodies else ():
            text = msgspec.json.format(msgspec.json.encode(element["event"]), indent=2).decode()
            for each in text.splitlines():
                self._desk.tell(f"           {visible(each)}", "dim")


def _moment(at: object) -> str:
    return visible(str(at))[:19].replace("T", " ").ljust(19) + "Z"
