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
from typing import Any, Self

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
    """A signal asked for the end."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.exit_code = 128 + number


class Signals:
    """SIGINT, SIGTERM and SIGHUP: the first raises Stopped where the command is. The next kills the daemon, for which `close`
    then need not wait; one more ends this process, whatever it hangs on.

    None but the first raises, and none once the command is `ending`: an exception that comes while a lock is being taken
    can leave it taken, and then `close` would wait for it for ever. What this process was started to ignore (`nohup`) stays
    ignored.
    """

    def __init__(self, client: Client) -> None:
        self.ending = False
        self._client = client
        self._killed = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._came)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _came(self, number: int, _frame: FrameType | None) -> None:
        if not self.ending:
            self.ending = True
            raise Stopped(number)
        if self._killed:
            os._exit(128 + number)
        self._killed = True
        self._client.strike()


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
        return perform_on(desk, place, connect, options, log.tail)
    except Stopped as stopped:  # before anything was begun, or when there was nothing left to say
        return stopped.exit_code
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
    client = connect(feed, desk.streams)
    with Signals(client) as signals, client, _notes(desk):
        session = Session(client, feed, desk, place)
        try:
            session.begin()
            for note in plain_lines(log_tail()):
                desk.say(visible(note), "ask")
            code = COMMANDS[options.command](session, options)
            signals.ending = True
        except (Mistake, ClientError) as error:
            signals.ending = True
            return complained(desk, error, log_tail())
        except BrokenPipeError:
            signals.ending = True
            with suppress(OSError, ValueError):
                desk.closed()
            return exits.PIPE_CLOSED
        except Stopped as stopped:
            _say_interrupted(session)
            client.close()  # what is in flight gets its grace time
            return stopped.exit_code
        client.close()
        return code


def complained(desk: Desk, error: Mistake | ClientError, log_tail: str = "") -> int:
    """Says what went wrong; with --json as an object. Returns the exit code."""
    fault = fault_of(error, log_tail)
    if desk.as_json:
        desk.fact(fault.value())
    for line in fault.lines() if not desk.as_json else ():
        desk.say(line, "bad")
    return fault.exit_code


def _say_interrupted(session: Session) -> None:
    desk = session.desk
    with suppress(OSError):  # nobody may read any more
        desk.say()
        desk.say("Interrupted. The daemon ends in order; interrupt again to end it at once.", "ask")
        if session.run_id or session.key:
            go_on = session.place.hint(
                *(("run", "--key", session.key) if session.key else ("show", str(session.run_id)))
            )
            desk.say(f"{session.run_id or 'The run'} is safe: what was done stays recorded. Go on with:", "ask")
            desk.say(f"  {go_on}", "strong")


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
