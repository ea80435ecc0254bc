"""Peers that send and do not read: memory stays bounded, whatever it is that they ask for. P10."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from tests.process.wire_driver import Daemon

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc to see another process's memory"),
]

TALKER: dict[str, Any] = {"model": {"script": [{"text": "done"}]}}
INPUT_BYTES = 8_000_000
PEAK_MORE_KB = 150_000
"""What unread answers may add to the peak; each of those asked for below is 8 MB, and there are a hundred."""


def peak_kb(pid: int) -> int:
    return int(Path(f"/proc/{pid}/status").read_text().split("VmHWM:")[1].split()[0])


def with_large_input(daemon: Daemon) -> str:
    params = {"clientRequestId": "large", "agent": TALKER, "input": "x" * INPUT_BYTES, "waitMs": 20_000}
    run_id: str = daemon.call("start", **params)["runId"]
    return run_id


def unread(daemon: Daemon, data: bytes) -> None:
    """Writes it all, and reads nothing."""
    assert daemon.process.stdin is not None
    view = memoryview(data)
    while view:
        view = view[os.write(daemon.process.stdin.fileno(), view) :]


def first_event(daemon: Daemon, run_id: str) -> tuple[int, bytes]:
    return daemon.request("events", runId=run_id, limit=1)


def test_pipelined_answers_that_nobody_reads_are_not_made_p10(tmp_path: Path):
    with Daemon(tmp_path / "store") as daemon:
        run_id = with_large_input(daemon)
        before = peak_kb(daemon.pid)
        sent = [first_event(daemon, run_id) for _ in range(100)]
        unread(daemon, b"".join(line for _, line in sent))
        for ident, _ in sent:
            assert daemon.answer(ident)["result"]["events"][0]["seq"] == 1
        assert peak_kb(daemon.pid) - before < PEAK_MORE_KB
        assert daemon.stop() == 0


def test_a_batch_of_large_answers_is_cut_off_at_a_limit_with_a_name_p10(tmp_path: Path):
    with Daemon(tmp_path / "store") as daemon:
        limits = daemon.call("initialize", protocolVersion=1)["limits"]
        run_id = with_large_input(daemon)
        before = peak_kb(daemon.pid)
        sent = [first_event(daemon, run_id) for _ in range(100)]
        unread(daemon, b"[" + b",".join(line.strip() for _, line in sent) + b"]\n")
        answers = [daemon.answer(ident) for ident, _ in sent]
        given = [answer for answer in answers if "result" in answer]
        assert len(given) == limits["maxBatchBytes"] // INPUT_BYTES + 1
        assert {a["error"]["data"]["limit"] for a in answers if "error" in a} == {"maxBatchBytes"}
        assert peak_kb(daemon.pid) - before < PEAK_MORE_KB
        assert daemon.stop() == 0


def test_a_page_of_events_and_of_runs_ends_with_what_reaches_a_mebibyte_p10(tmp_path: Path):
    with Daemon(tmp_path / "store") as daemon:
        run_id = with_large_input(daemon)
        last = daemon.call("status", runId=run_id)["run"]["lastSeq"]
        page = daemon.call("events", runId=run_id)
        assert ([event["seq"] for event in page["events"]], page["lastSeq"]) == ([1], last)
        rest = daemon.call("events", runId=run_id, afterSeq=1)["events"]
        assert [event["seq"] for event in rest] == list(range(2, last + 1))
        for key in ("a", "b", "c"):
            labels = {"long": "x" * 700_000}
            daemon.call("start", clientRequestId=key, agent=TALKER, input="", labels=labels)
        pages = [daemon.call("list")]
        while "nextCursor" in pages[-1]:
            pages.append(daemon.call("list", cursor=pages[-1]["nextCursor"]))
        assert [len(page["runs"]) for page in pages] == [3, 1]


def test_status_shows_the_beginning_of_a_long_input_and_says_so_p10(tmp_path: Path):
    parts = [{"type": "text", "text": "x" * 40_000}] * 2
    with Daemon(tmp_path / "store") as daemon:
        shown = daemon.call("status", runId=with_large_input(daemon))
        assert (shown["input"], shown["inputTruncated"]) == ("x" * 65_536 + " [...]", True)
        short = daemon.call("start", clientRequestId="short", agent=TALKER, input="x" * 65_536)["runId"]
        shown = daemon.call("status", runId=short)
        assert (len(shown["input"]), "inputTruncated" in shown) == (65_536, False)
        many = daemon.call("start", clientRequestId="parts", agent=TALKER, input=parts)["runId"]
        shown = daemon.call("status", runId=many)
        assert (shown["input"], shown["inputTruncated"]) == (parts[:1], True)


def test_a_peer_that_ends_its_input_and_never_reads_does_not_keep_the_store(tmp_path: Path):
    with Daemon(tmp_path / "store") as daemon:
        run_id = with_large_input(daemon)
        sent = [first_event(daemon, run_id)[1] for _ in range(5)]
        late = daemon.request("start", clientRequestId="late", agent=TALKER, input="")[1]
        unread(daemon, b"".join([*sent, late]))
        daemon.end_input()
        assert daemon.exit_code(timeout=20) == 0
    with Daemon(tmp_path / "store") as daemon:
        assert daemon.call("status", clientRequestId="late")["run"]["agent"] == "inline"
