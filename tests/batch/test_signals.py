"""Signals that come at the worst moment: the first says what is safe, the next ends the daemon, and none leaves a lock taken."""

from __future__ import annotations

import argparse
import io
import os
import signal
import sys
import time

import pytest
from rpcagent import cli
from rpcagent.batch import conduct
from rpcagent.batch.desk import Desk
from rpcagent.batch.follow import Feed
from rpcagent.batch.place import Place
from rpcagent.batch.session import Session
from tests.batch.stage import Stage
from tests.clients.fake import FAKE, Fake

from rpcagent_client import Client

pytestmark = pytest.mark.timeout(30)


class Unlucky(Client):
    """SIGINT comes while `close` holds a lock that the next `close` needs."""

    ended: int | None = None

    def close(self, grace: float = 10.0) -> None:
        connection = self._connection
        self._connecting.acquire()
        signal.raise_signal(signal.SIGINT)
        self._connecting.release()
        super().close(grace)
        if connection is not None:
            self.ended = connection._process.returncode


@pytest.fixture
def stubborn(stage: Stage) -> Fake:
    """A daemon that ends at SIGKILL only."""
    stage.fake.does([{"result": {"status": "ok"}}])
    return stage.fake


def _played(fake: Fake, monkeypatch: pytest.MonkeyPatch, *signals: signal.Signals) -> tuple[int, str, Unlucky]:
    """A command that gets these signals while it is at work, and one more while the client closes."""

    def command(session: Session, options: argparse.Namespace) -> int:
        session.key = "k"
        for number in signals:
            signal.raise_signal(number)
        return 0

    monkeypatch.setitem(conduct.COMMANDS, "runs", command)
    client = Unlucky([sys.executable, "-S", str(FAKE), str(fake.folder), "ignore-signals"], timeout=10.0)
    options = cli._parser().parse_args(["runs"])
    err = io.StringIO()
    desk = Desk(io.StringIO(), io.StringIO(), err, as_json=False, no_input=True)

    def connect(feed: Feed, streams: bool) -> Client:
        return client

    return conduct.perform_on(desk, Place.of(options), connect, options), err.getvalue(), client


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_second_signal_in_the_middle_of_closing_kills_the_daemon_and_leaves_no_lock_taken(
    stubborn: Fake, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, code: int
) -> None:
    monkeypatch.setattr(conduct.os, "_exit", lambda code: None)  # `close` is called again on the way out
    began = time.monotonic()
    got, err, client = _played(stubborn, monkeypatch, number)
    assert (got, client.ended) == (code, -signal.SIGKILL), err
    assert "The run is safe" in err
    assert time.monotonic() - began < 5  # the grace time is 10 seconds, and 2 more after SIGTERM


def test_a_signal_when_the_command_is_done_hurries_the_end_and_changes_nothing_of_it(
    stubborn: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conduct.os, "_exit", lambda code: None)
    got, err, client = _played(stubborn, monkeypatch)
    assert (got, err, client.ended) == (0, "", -signal.SIGKILL)


def test_a_third_signal_ends_the_process_whatever_it_hangs_on(monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    before = signal.getsignal(signal.SIGINT)
    with conduct.Signals(Client(["false"])), pytest.raises(conduct.Stopped) as stopped:
        signal.raise_signal(signal.SIGTERM)
    assert (stopped.value.exit_code, codes) == (143, [])
    with conduct.Signals(Client(["false"])) as signals:
        signals.ending = True
        signal.raise_signal(signal.SIGINT)
        assert codes == []
        signal.raise_signal(signal.SIGINT)
    assert codes == [130]
    assert signal.getsignal(signal.SIGINT) is before


def test_what_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with conduct.Signals(Client(["false"])):
            signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
