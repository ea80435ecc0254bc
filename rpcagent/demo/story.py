"""The demonstration, act by act. It is a client like any other: everything it does, a program of yours can do.

Knows: the public client, and the ticket service's own count. Does not know: anything of the daemon's inside.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, Literal, Protocol

from rpcagent.demo.agent import ASSIGN, CLOSE, CONTRACTS, EXPECTED, FIRST, NOTIFY, READ, REFUND, SECOND, agent
from rpcagent.demo.tickets import Tickets
from rpcagent.demo.transcript import GREEN, RED, Transcript
from rpcagent_client import Client, ClientError

# The keys are the caller's own, and known before the calls: a caller that dies as well makes the same calls again.
START_KEY = "demo/tickets/start"
REFUND_KEY = "demo/tickets/refund"
REFUND_TRUTH_KEY = "demo/tickets/refund-truth"
NOTIFY_TRUTH_KEY = "demo/tickets/notify-truth"

REST_S = 30.0
KEPT_LOG_LINES = 20
INTERRUPTED = 130


class Surprise(Exception):
    """The daemon did not keep its promise. The message is for the reader of the transcript."""


class Story:
    """One run of an agent over two tickets, and the moments at which its daemon is killed."""

    def __init__(self, client: Client, tickets: Tickets, told: Transcript, pool: ThreadPoolExecutor) -> None:
        self._client = client
        self._tickets = tickets
        self._told = told
        self._pool = pool
        self._run_id = ""
        self._seen = 0

    def tell(self) -> None:
        """Raises Surprise, or ClientError where the daemon cannot be asked any more."""
        self._lost_answer()
        question = self._pending_approval()
        self._refund_in_doubt(question)
        self._assign_in_doubt()
        self._close_in_doubt()
        self._message_in_doubt()
        shown = self._client.wait(self._run_id, REST_S)
        self._show_events()
        _expect(shown["run"]["status"] == "completed", f"the run is {shown['run']['status']}, not completed")

    def _lost_answer(self) -> None:
        told, client, tickets = self._told, self._client, self._tickets
        told.act("The answer of `start` is lost")
        tickets.hold(READ, FIRST, "before")
        # The call waits for the run to come to rest, so its answer is still to come when the daemon dies.
        started = self._pool.submit(
            client.start, agent(tickets.url), "Settle the tickets.", client_request_id=START_KEY, wait=REST_S
        )
        tickets.wait_held()
        self._run_id = client.status(client_request_id=START_KEY)["run"]["runId"]
        told.say(f"`start` is accepted as {self._run_id}; the agent reads {FIRST}; nobody was answered yet.")
        self._kill()
        answer = started.result(REST_S)
        self._restarted()
        self._show_events()
        told.say(f"The same key gets the same run: {answer['runId']}, replayed: {answer['replayed']}.")
        _expect(answer["runId"] == self._run_id and answer["replayed"], "a retried `start` made another run")

    def _pending_approval(self) -> dict[str, Any]:
        told, client = self._told, self._client
        told.act("An approval is pending")
        before = _question(client.wait(self._run_id, REST_S), "tool_call")
        told.say(f"{before['approvalId']} asks for {before['subject']['tool']} {before['subject']['arguments']}")
        told.say(f"digest {before['digest']}")
        self._kill()
        after = _question(client.wait(self._run_id, REST_S), "tool_call")
        self._restarted()
        self._show_events()
        told.say(f"{after['approvalId']} is still open.")
        told.say(f"digest {after['digest']}")
        _expect(before == after, "the question is not the same after the restart")
        return after

    def _refund_in_doubt(self, question: dict[str, Any]) -> None:
        told, client, tickets = self._told, self._client, self._tickets
        told.act(f"Between an effect and its record: refund, {CONTRACTS[REFUND]}")
        tickets.hold(REFUND, FIRST, "after")

        def allow() -> dict[str, Any]:
            return client.approve(
                self._run_id, question["approvalId"], question["digest"], "allow", client_request_id=REFUND_KEY
            )

        allow()
        tickets.wait_held()
        told.say("Allowed. The service has paid the refund, and its answer is not out.")
        self._kill()
        self._restarted()
        answer = allow()
        told.say(f"The caller is not sure either, and allows again with the same key: replayed: {answer['replayed']}.")
        _expect(answer["replayed"], "a repeated `approve` was taken for a new one")
        # What the next acts need is set up before the answer, because the run goes on with it.
        tickets.hold(ASSIGN, SECOND, "after")
        self._answer_from_the_books(REFUND_TRUTH_KEY, expected="happened")

    def _assign_in_doubt(self) -> None:
        told = self._told
        told.act(f"Between an effect and its record: assign, {CONTRACTS[ASSIGN]}")
        self._tickets.wait_held()
        told.say(f"{SECOND} has its owner, and the daemon does not know.")
        self._kill()
        self._tickets.hold(CLOSE, FIRST, "after")
        self._restarted()
        self._tickets.wait_held()
        self._show_events()
        sent = [line for line in self._tickets.lines() if (line["ticket"], line["operation"]) == (SECOND, "assign")]
        calls = [line["key"] for line in sent if line["kind"] == "call"]
        told.say(f"Sent again with the same Idempotency-Key: {len(calls)} calls, {len(sent) - len(calls)} effect.")
        _expect(len(calls) == 2 and len(set(calls)) == 1, f"the calls had the keys {calls}")

    def _close_in_doubt(self) -> None:
        told = self._told
        told.act(f"Between an effect and its record: close, {CONTRACTS[CLOSE]}")
        told.say(f"{FIRST} is closed, and the daemon does not know.")
        self._kill()
        self._tickets.hold(NOTIFY, SECOND, "before")
        self._restarted()
        self._tickets.wait_held()
        self._show_events()
        told.say("The ticket was looked up and found closed: that is the outcome, and close was not sent again.")
        calls = self._tickets.counts("call")[FIRST, CLOSE]
        _expect(calls == 1, f"close was sent {calls} times")

    def _message_in_doubt(self) -> None:
        told = self._told
        told.act(f"Between an intent and its effect: notify, {CONTRACTS[NOTIFY]}")
        told.say("The service has the call and has sent no message. To the daemon this looks just like the refund.")
        self._kill()
        self._restarted()
        self._answer_from_the_books(NOTIFY_TRUTH_KEY, expected="did_not_happen")

    def _answer_from_the_books(self, key: str, *, expected: str) -> None:
        """The question that stands where a blind second call would: answered by what the service knows."""
        told = self._told
        question = _question(self._client.wait(self._run_id, REST_S), "unknown_outcome")
        self._show_events()
        told.say(f"Not repeated: the run asks a person: {', '.join(question['choices'])}?")
        times = self._tickets.effects_of_key(question["subject"]["key"])
        decision = "happened" if times else "did_not_happen"
        told.say(f"The service's own books have {times} effects of {question['subject']['key']}: {decision}.")
        _expect(decision == expected, f"the books should have said {expected}")
        self._client.approve(
            self._run_id,
            question["approvalId"],
            question["digest"],
            decision,
            client_request_id=key,
            decided_by="the ticket service's books",
        )

    def _kill(self) -> None:
        self._told.killed(self._client.pid)
        self._client.kill()
        self._tickets.drop()

    def _restarted(self) -> None:
        """Any call starts a new daemon on the same store; nothing else is needed to go on."""
        health = self._client.status()
        self._told.say(f"daemon {health['pid']} goes on, epoch {health['epoch']} of the store")

    def _show_events(self) -> None:
        """Those since the last look, over any number of restarts: `seq` has no gap."""
        while True:
            page = self._client.events(self._run_id, after_seq=self._seen)
            for element in page["events"]:
                self._told.event(element)
                self._seen = element["seq"]
            if self._seen >= page["lastSeq"]:
                return


def demo(keep: bool) -> int:
    """Runs the demonstration. 0: every effect happened once. 1: not so, or it broke off. 130: interrupted.

    Leaves no process behind, and no file, unless `keep`: then the store, the daemon's log and the service's count stay, in
    a temporary directory whose place is printed.
    """
    told = Transcript(sys.stdout)
    folder = Path(tempfile.mkdtemp(prefix="rpcagent-demo-"))
    try:
        with _ends_on_signals(), _shown(told):
            return _told_in(folder, told)
    except KeyboardInterrupt:
        sys.stderr.write("\nrpcagent demo: interrupted\n")
        return INTERRUPTED
    except BrokenPipeError:  # the reader of the transcript has gone; Python would complain once more at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    finally:
        if keep:
            with suppress(OSError):
                told.line(f"\nKept: {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)


def _told_in(folder: Path, told: Transcript) -> int:
    began = time.monotonic()
    log_file = folder / "daemon.log"
    (folder / "workspace").mkdir()
    try:
        with (
            ThreadPoolExecutor(1) as pool,
            Tickets(folder / "ledger.jsonl") as tickets,
            Client(
                # The daemon of this very installation, whatever PATH says.
                [sys.executable, "-P", "-m", "rpcagent", "serve"],
                store=folder / "store",
                workspace=folder / "workspace",
                stderr=log_file,
            ) as client,
        ):
            told.line("rpcagent demo: one agent, two tickets, six times kill -9")
            told.say(f"ticket service {tickets.pid}: counts every effect in a file of its own")
            told.say(f"daemon {client.status()['pid']}: its store is {folder / 'store'}")
            Story(client, tickets, told, pool).tell()
            return verdict(tickets, told, time.monotonic() - began)
    except (Surprise, ClientError, RuntimeError, TimeoutError) as error:
        told.line(f"\nThe demonstration failed: {error}", RED)
        if log_file.exists():
            for line in log_file.read_text(errors="replace").splitlines()[-KEPT_LOG_LINES:]:
                told.line(f"   [daemon] {line}")
        return 1


class Books(Protocol):
    """The outside's own count of what was asked and what happened, by ticket and tool."""

    def counts(self, kind: Literal["call", "effect"]) -> Counter[tuple[str, str]]: ...


def verdict(tickets: Books, told: Transcript, seconds: float) -> int:
    """The table, from the service's own count; 1 where any effect is missing, doubled, or was never asked for."""
    effects, calls = tickets.counts("effect"), tickets.counts("call")
    asked_for = [*EXPECTED, *(found for found in effects if found not in EXPECTED)]
    good = [effects[row] == 1 and row in EXPECTED for row in asked_for]
    rows = [(ticket, tool, CONTRACTS[tool], calls[ticket, tool], effects[ticket, tool]) for ticket, tool in asked_for]
    told.line()
    told.table(("ticket", "operation", "contract", "calls", "effects"), rows, good=good)
    told.line()
    if not all(good):
        told.line("Not every effect happened exactly once.", RED)
        return 1
    told.line(f"Every effect happened exactly once, over six times kill -9, in {seconds:.1f} seconds.", GREEN)
    return 0


def _question(shown: dict[str, Any], kind: str) -> dict[str, Any]:
    """The open question of a run at rest. Raises Surprise where it is not there."""
    found = next((one for one in shown["approvals"] if one["kind"] == kind), None)
    if found is None:
        raise Surprise(f"the run is {shown['run']['status']} and asks no {kind} question")
    return dict(found)


def _expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise Surprise(otherwise)


@contextmanager
def _ends_on_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP end the demonstration as Ctrl-C does: everything is cleaned up on the way out."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before: dict[signal.Signals, Callable[[int, FrameType | None], Any] | int | None] = {}
    try:
        for number in (signal.SIGTERM, signal.SIGHUP):
            before[number] = signal.signal(number, interrupt)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _shown(told: Transcript) -> Iterator[None]:
    """What the client says it does on its own, such as asking again, becomes part of the transcript."""
    log = logging.getLogger("rpcagent_client")
    level, propagate = log.level, log.propagate
    log.addHandler(told)
    log.setLevel(logging.INFO)
    log.propagate = False
    try:
        yield
    finally:
        log.removeHandler(told)
        log.setLevel(level)
        log.propagate = propagate
