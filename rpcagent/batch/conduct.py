"""One command from its options to its exit code: starts the client, runs the command, and ends both in order.

Knows: how errors and signals become messages and exit codes. The run is safe however this ends: it lives in the store.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from rpcagent.batch import act, exits, look
from rpcagent.batch.desk import ClientNotes, Desk
from rpcagent.batch.faults import Mistake, fault_of, plain_lines
from rpcagent.batch.follow import Feed
from rpcagent.batch.place import Place
from rpcagent.batch.session import Session
from rpcagent.batch.text import visible
from rpcagent_client import Client, ClientError

Command = Callable[[Session, argparse.Namespace], int]
Connect = Callable[[Feed, bool], Client]

COMMANDS: dict[str, Command] = {
    "run": act.run,
    "approve": act.approve,
    "resume": act.resume,
    "cancel": act.cancel,
    "runs": look.runs,
    "show": look.show,
    "tail": look.tail,
}

LOOKING = frozenset({"runs", "show", "tail"})
LOG_TAIL_BYTES = 16 << 10


class Stopped(KeyboardInterrupt):
    """A signal asked for the end, as Ctrl-C does."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.exit_code = 128 + number


def conducted(options: argparse.Namespace) -> int:
    """Runs the command on the process's own streams, with a daemon of its own."""
    desk = Desk(sys.stdin, sys.stdout, sys.stderr, as_json=options.json, no_input=getattr(options, "no_input", True))
    place = Place.of(options)
    try:
        prepare(options)
    except Mistake as mistake:
        return complained(desk, mistake)
    except KeyboardInterrupt:  # while the goal was typed
        return exits.INTERRUPTED
    log = DaemonLog()

    def connect(feed: Feed, streams: bool) -> Client:
        looks = options.command in LOOKING and not getattr(options, "follow", False)
        return place.client(
            looks=looks, on_event=feed.on_event, on_delta=feed.on_delta if streams else None, log=log.file
        )

    try:
        with _ends_on_signals():
            return perform_on(desk, place, connect, options, log.tail)
    finally:
        log.close(desk)


def prepare(options: argparse.Namespace) -> None:
    """Finds the mistakes that can be found before anything is started. Raises Mistake."""
    if options.workspace is not None and not options.workspace.is_dir():
        raise Mistake(f"--workspace {options.workspace} is not a directory")
    if options.command == "run":
        act.prepare(options)


def perform_on(
    desk: Desk, place: Place, connect: Connect, options: argparse.Namespace, log_tail: Callable[[], str] = str
) -> int:
    """Runs the command with the client that `connect` makes. Never raises for what a reader can be told."""
    feed = Feed()
    with connect(feed, desk.streams) as client, _notes(desk):
        session = Session(client, feed, desk, place)
        try:
            session.begin()
            for note in plain_lines(log_tail()):
                desk.say(visible(note), "ask")
            code = COMMANDS[options.command](session, options)
            client.close()
        except (Mistake, ClientError) as error:
            return complained(desk, error, log_tail())
        except BrokenPipeError:
            with suppress(OSError, ValueError):
                desk.closed()
            return exits.PIPE_CLOSED
        except KeyboardInterrupt as interrupt:
            return _interrupted(session, interrupt)
        return code


def complained(desk: Desk, error: Mistake | ClientError, log_tail: str = "") -> int:
    """Says what went wrong; with --json as an object. Returns the exit code."""
    fault = fault_of(error, log_tail)
    if desk.as_json:
        desk.fact(fault.value())
    for line in fault.lines() if not desk.as_json else ():
        desk.say(line, "bad")
    return fault.exit_code


def _interrupted(session: Session, interrupt: KeyboardInterrupt) -> int:
    """The daemon may end in order: what is in flight gets its grace time. A second interrupt ends it at once."""
    code = interrupt.exit_code if isinstance(interrupt, Stopped) else exits.INTERRUPTED
    try:
        desk = session.desk
        desk.say()
        desk.say("Interrupted. The daemon ends in order; interrupt again to end it at once.", "ask")
        if session.run_id or session.key:
            go_on = session.place.hint(
                *(("run", "--key", session.key) if session.key else ("show", str(session.run_id)))
            )
            desk.say(f"{session.run_id or 'The run'} is safe: what was done stays recorded. Go on with:", "ask")
            desk.say(f"  {go_on}", "strong")
        session.client.close()
    except KeyboardInterrupt:
        session.client.kill()
    except OSError:
        session.client.close()  # nobody reads any more
    return code


class DaemonLog:
    """The daemon's standard error, kept for as long as it may explain something. The file has no name, so that nothing stays
    behind however this process ends."""

    def __init__(self) -> None:
        self.file = tempfile.TemporaryFile(mode="a+b", buffering=0)  # noqa: SIM115  (closed by `close`)

    def tail(self) -> str:
        # Read by place: the daemon writes through the same description, whose offset must not move.
        size = os.fstat(self.file.fileno()).st_size
        return os.pread(self.file.fileno(), LOG_TAIL_BYTES, max(size - LOG_TAIL_BYTES, 0)).decode("utf-8", "replace")

    def close(self, desk: Desk) -> None:
        """One that has the story of a fault of ours gets a name, which is told."""
        text = self.tail()
        self.file.close()
        if '"incident"' in text:
            descriptor, name = tempfile.mkstemp(prefix="rpcagent-", suffix=".log")
            with os.fdopen(descriptor, "w") as kept, suppress(OSError, ValueError):
                kept.write(text)
                desk.say(f"The daemon's log is kept: {name}", "dim")


@contextmanager
def _notes(desk: Desk) -> Iterator[None]:
    log = logging.getLogger("rpcagent_client")
    notes, level, propagate = ClientNotes(desk), log.level, log.propagate
    log.addHandler(notes)
    log.setLevel(logging.INFO)
    log.propagate = False
    try:
        yield
    finally:
        log.removeHandler(notes)
        log.setLevel(level)
        log.propagate = propagate


@contextmanager
def _ends_on_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP end a command as Ctrl-C does, with exit codes of their own."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, _frame: FrameType | None) -> None:
        raise Stopped(number)

    before: dict[signal.Signals, Any] = {}
    try:
        for number in (signal.SIGTERM, signal.SIGHUP):
            before[number] = signal.signal(number, stop)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
