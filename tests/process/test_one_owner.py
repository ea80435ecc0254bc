"""One process owns a store; a second one says so, and takes over. S0-36, S0-69, F033, F035."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.process.outside import Seen, agent, seen, step_of
from tests.process.wire_driver import Daemon, refused
from tests.service.driver import CountingService

pytestmark = pytest.mark.process

LOCK_TEXTS = {
    "garbage": b"\x00\xff not json {",
    "pid 1": b'{"pid":1,"host":"elsewhere","since":"2015-01-01T00:00:00Z"}\n',
    "a living pid": b'{"pid":%d,"host":"%s","since":"2015-01-01T00:00:00Z"}\n'
    % (os.getpid(), socket.gethostname().encode()),
    "zero bytes": b"",
    "a bare number": b"1\n",
}


@contextmanager
def owner(store: Path) -> Iterator[Daemon]:
    """A daemon that has the store by now."""
    with Daemon(store) as daemon:
        daemon.call("status")
        yield daemon


def log_of(store: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((store / "wal").iterdir())}


def end_of_input(first: Daemon) -> None:
    assert first.stop() == 0


@pytest.mark.parametrize("end", [Daemon.kill, end_of_input], ids=["SIGKILL", "end of input"])
def test_a_second_daemon_says_who_owns_the_store_and_takes_over_when_that_one_ends_s0_36_f033(
    tmp_path: Path, end: Callable[[Daemon], None]
):
    store = tmp_path / "store"
    talker = {"model": {"script": [{"text": "done"}]}}
    with owner(store) as first, Daemon(store, "--lock-wait", "0.2") as second:
        run_id = first.call("start", clientRequestId="run", agent=talker, input="", drive="manual")["runId"]
        before = log_of(store)
        requests: dict[str, dict[str, str]] = {
            "status": {},
            "list": {},
            "step": {"runId": run_id, "clientRequestId": "model"},
            "cancel": {"runId": run_id, "clientRequestId": "stop"},
        }
        for method, params in requests.items():
            with refused("STORE_LOCKED") as caught:
                second.call(method, **params)
            told = caught[0].data
            assert (told["pid"], told["host"], told["retryable"]) == (first.pid, socket.gethostname(), True)
        assert log_of(store) == before
        assert first.call("status", runId=run_id)["run"]["status"] == "ready"
        end(first)
        assert second.once_not("STORE_LOCKED")["epoch"] == 2
        step = second.call("step", runId=run_id, clientRequestId="model")
        assert (step["step"]["status"], step["run"]["output"]) == ("completed", "done")
        assert second.stop() == 0


def test_a_request_waits_for_the_store_as_long_as_it_was_told_to_and_work_in_flight_passes_over_s0_69_f033(
    service: CountingService, tmp_path: Path
):
    store = tmp_path / "store"
    with owner(store) as first, Daemon(store, "--lock-wait", "25") as second:
        service.park("after_effect")
        described = agent(service, "idempotent", "passed over")
        run_id = first.call("start", clientRequestId="run", agent=described, input="")["runId"]
        service.wait_parked(20)
        hello = second.send("initialize", protocolVersion=1, capabilities={"events": "all"})
        first.kill()
        assert second.result(hello)["recovery"]["interruptedRuns"] == 1
        shown = second.until(run_id, lambda shown: shown["run"]["status"] == "completed")
        assert step_of(shown)["attempt"] == 2
    assert seen(service, "passed over") == Seen(2, 1)


def test_a_second_daemon_that_never_gets_the_store_ends_with_a_code_that_says_so(tmp_path: Path):
    store = tmp_path / "store"
    with owner(store) as first, Daemon(store, "--lock-wait", "0") as second:
        ident = second.send("status")
        assert second.refusal(ident) == "STORE_LOCKED"
        assert second.stop() == 1
        assert second.log.read_text() == ""
        assert first.call("status")["status"] == "ok"


@pytest.mark.parametrize("text", LOCK_TEXTS)
def test_what_stands_in_the_lock_file_of_the_dead_keeps_nobody_out_f035(tmp_path: Path, text: str):
    store = tmp_path / "store"
    with Daemon(store) as daemon:
        daemon.call("status")
        daemon.kill()
    (store / "LOCK").write_bytes(LOCK_TEXTS[text])
    with Daemon(store, "--lock-wait", "0") as daemon:
        assert daemon.call("status")["epoch"] == 2
        (store / "LOCK").write_bytes(LOCK_TEXTS[text])
        with Daemon(store, "--lock-wait", "0.2") as second, refused("STORE_LOCKED"):
            second.call("status")  # and lets nobody in while the owner lives
