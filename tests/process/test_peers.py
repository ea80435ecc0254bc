"""How peers of all kinds get their answers: in order, in their own framing, and in bounded memory. P10; F017."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.process.wire_driver import ROOT, SERVE, WAIT_S, Daemon

pytestmark = pytest.mark.process

TALKER: dict[str, Any] = {"model": {"script": [{"text": "one two three"}]}}
LISTER: dict[str, Any] = {"model": {"script": [{"calls": [{"tool": "files.list"}]}] * 5 + [{"text": "done"}]}}
RUNS = 40
RSS_MOST_KB = 150_000


def serve(store: Path, data: bytes) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [*SERVE, "--store", store, "--workspace", store.parent],
        cwd=ROOT, input=data, capture_output=True, timeout=WAIT_S, check=False,
    )  # fmt: skip


def test_a_plain_pipe_is_enough(tmp_path: Path):
    program = shutil.which("rpcagent", path=str(Path(sys.executable).parent))
    assert program is not None
    line = '{"jsonrpc":"2.0","id":1,"method":"status"}'
    command = f"printf '{line}\\n' | {program} serve --store {tmp_path / 'store'}"
    done = subprocess.run(["/bin/sh", "-c", command], capture_output=True, timeout=WAIT_S, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    [answer] = [json.loads(line) for line in done.stdout.splitlines()]
    assert (answer["id"], answer["result"]["status"], answer["result"]["counts"]) == (1, "ok", {})


def test_everything_that_was_sent_before_the_end_of_input_is_answered_in_the_framing_it_came_in(tmp_path: Path):
    start = {"clientRequestId": "run", "agent": TALKER, "input": "", "waitMs": 20_000}
    messages = [{"jsonrpc": "2.0", "id": 1, "method": "start", "params": start}]
    messages += [{"jsonrpc": "2.0", "id": ident, "method": "list"} for ident in range(2, 40)]
    bodies = [json.dumps(message).encode() for message in messages]
    lines = serve(tmp_path / "lines", b"".join(body + b"\n" for body in bodies))
    framed = serve(tmp_path / "framed", b"".join(b"Content-Length: %d\r\n\r\n%s" % (len(b), b) for b in bodies))
    assert (lines.returncode, lines.stderr, framed.returncode, framed.stderr) == (0, b"", 0, b"")
    by_line = {json.loads(line)["id"] for line in lines.stdout.splitlines()}
    by_frame = {answer["id"] for answer in unframed(framed.stdout)}
    assert by_line == by_frame == set(range(1, 40))


def unframed(data: bytes) -> list[dict[str, Any]]:
    found = []
    while data:
        header, _, rest = data.partition(b"\r\n\r\n")
        name, _, length = header.partition(b": ")
        assert name.lower() == b"content-length"
        found.append(json.loads(rest[: int(length)]))
        data = rest[int(length) :]
    return found


def test_all_events_of_a_run_come_before_the_answer_that_tells_of_them_and_none_before_its_start_f017(tmp_path: Path):
    with Daemon(tmp_path / "store") as daemon:
        daemon.call("initialize", protocolVersion=1, capabilities={"events": "own", "deltas": True})
        params = {"agent": LISTER, "input": "", "waitMs": 20_000}
        sent = [daemon.request("start", clientRequestId=f"run-{n}", **params) for n in range(RUNS)]
        daemon.write(b"".join(line for _, line in sent))
        seqs: dict[str, list[int]] = {}
        waiting = {ident for ident, _ in sent}
        while waiting:
            message = daemon.message()
            if message.get("method") == "run/event":
                seqs.setdefault(message["params"]["runId"], []).append(message["params"]["seq"])
            elif "id" in message:
                waiting.remove(message["id"])
                run = message["result"]["run"]
                assert run["status"] == "completed"
                assert seqs[run["runId"]] == list(range(1, run["lastSeq"] + 1))
        for run_id, heard in seqs.items():
            assert [one["seq"] for one in daemon.call("events", runId=run_id, limit=1_000)["events"]] == heard


def resident_kb(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") // 1_024


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc to see another process's memory")
def test_a_peer_that_sends_and_does_not_read_holds_up_itself_and_no_memory_p10(tmp_path: Path):
    with Daemon(tmp_path / "store") as daemon:
        daemon.call("status")
        assert daemon.process.stdin is not None
        descriptor = daemon.process.stdin.fileno()
        line = daemon.request("status")[1]
        ident = json.loads(line)["id"]
        sent = 0
        os.set_blocking(descriptor, False)
        while select.select([], [descriptor], [], 1.0)[1]:  # until it has taken nothing for a second
            sent += os.write(descriptor, line)
        assert sent % len(line) == 0
        assert resident_kb(daemon.pid) < RSS_MOST_KB
        os.set_blocking(descriptor, True)
        answers = sent // len(line)
        assert answers * 300 > 4 << 20  # more than it may hold
        for _ in range(answers):
            assert daemon.message()["id"] == ident
        assert daemon.call("status")["status"] == "ok"
        assert daemon.stop() == 0
