"""What the real daemon says to what no client should send. P10; F007, F009, F013, F041."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.process.outside import step_of
from tests.process.wire_driver import Daemon, Refused, refused

pytestmark = pytest.mark.process

MIB = 1 << 20
TALKER: dict[str, Any] = {"model": {"script": [{"text": "done"}]}}
LISTER: dict[str, Any] = {"model": {"script": [{"calls": [{"tool": "files.list"}]}, {"text": "done"}]}}
EVIL = {
    "up": "../../x",
    "absolute": "/tmp/x",
    "slash": "a/b",
    "dots": "..",
    "dot": ".",
    "empty": "",
    "long": "a" * 300,
    "nul": "run\x00x",
    "encoded": "%2e%2e",
    "device": "CON",
    "bidi": "run_\u202etxt.exe",
    "newline": "a\nb",
    "surrogate": "\ud800",
}
GOOD_KEYS = {"up", "absolute", "slash", "dots", "dot", "device"}
"""A key is only ever hashed; these are allowed, and must do no harm."""


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with Daemon(tmp_path_factory.mktemp("wire") / "store") as daemon:
        yield daemon


def alive(daemon: Daemon) -> bool:
    return bool(daemon.call("status")["pid"] == daemon.pid)


BROKEN: dict[str, tuple[bytes, int]] = {
    "garbage": (b"what?", -32700),
    "half an object": (b'{"jsonrpc":"2.0","id":1,"method":"sta', -32700),
    "invalid UTF-8": (b'{"jsonrpc":"2.0","id":1,"method":"\xff\xfe"}', -32700),
    "NUL bytes": (b"\x00" * 64, -32700),
    "a number": (b"7", -32600),
    "an empty batch": (b"[]", -32600),
    "another version": (b'{"jsonrpc":"1.0","id":null,"method":"status"}', -32600),
    "an id that is none": (b'{"jsonrpc":"2.0","id":{},"method":"status"}', -32600),
    "nesting without end": (b"[" * 100_000, -32700),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_line_is_answered_and_the_stream_goes_on_p10(daemon: Daemon, what: str):
    line, number = BROKEN[what]
    daemon.write(line + b"\n")
    answer = daemon.answer(None)
    assert (answer["error"]["code"], answer["error"]["data"]["retryable"]) == (number, False)
    assert alive(daemon)


def test_a_line_above_the_limit_is_answered_and_the_stream_goes_on_p10(daemon: Daemon):
    daemon.write(b'{"jsonrpc":"2.0","id":1,"method":"status","params":"' + b"a" * (70 * MIB) + b'"}\n')
    assert daemon.answer(None)["error"]["code"] == -32600
    assert alive(daemon)


def test_an_unknown_method_is_answered_with_those_that_there_are(daemon: Daemon):
    with refused("METHOD_NOT_FOUND") as caught:
        daemon.call("tools/list")
    assert caught[0].number == -32601
    assert {"start", "step", "resume", "approve", "status"} <= set(caught[0].data["methods"])
    assert alive(daemon)


def test_a_batch_is_answered_item_by_item_f013(daemon: Daemon):
    start = {"clientRequestId": "batch", "agent": TALKER, "input": "", "drive": "manual"}
    items: list[Any] = [
        {"jsonrpc": "2.0", "id": "s", "method": "start", "params": start},
        {"jsonrpc": "2.0", "method": "status"},
        {"jsonrpc": "2.0", "id": "u", "method": "no-such-method"},
        1,
        {"jsonrpc": "2.0", "id": "twin", "method": "start", "params": start},
        {"jsonrpc": "2.0", "id": "found", "method": "status", "params": {"clientRequestId": "batch"}},
        {"jsonrpc": "2.0", "method": "start", "params": {**start, "clientRequestId": "nobody"}},
        {"jsonrpc": "2.0", "id": "n", "method": "status", "params": {"clientRequestId": "nobody"}},
    ]
    daemon.write(json.dumps(items).encode() + b"\n")
    answers = daemon.message()
    told = [(one["id"], one.get("error", {}).get("code")) for one in answers]
    assert told == [("s", None), ("u", -32601), (None, -32600), ("twin", None), ("found", None), ("n", -32002)]
    run_ids = {one["result"]["run"]["runId"] for one in answers if "result" in one}
    assert len(run_ids) == 1
    assert alive(daemon)


def test_only_notifications_are_not_answered_and_a_start_among_them_makes_no_run_f013(daemon: Daemon):
    before = daemon.call("list")["runs"]
    start = {"jsonrpc": "2.0", "method": "start", "params": {"clientRequestId": "n", "agent": TALKER, "input": ""}}
    daemon.write(json.dumps(start).encode() + b"\n" + json.dumps([start, start]).encode() + b"\n")
    with refused("NOT_FOUND"):
        daemon.call("status", clientRequestId="n")
    assert daemon.call("list")["runs"] == before
    daemon.send("start", clientRequestId="n", agent=TALKER, input="")  # the key was not used up
    assert daemon.message()["result"]["replayed"] is False


def test_bytes_of_tools_and_of_their_children_never_reach_the_wire_f007(tmp_path: Path):
    with Daemon(tmp_path / "store", rig=("--noise",)) as daemon:
        answer = daemon.call("start", clientRequestId="run", agent=LISTER, input="", waitMs=20_000)
        assert (answer["run"]["status"], answer["run"]["output"]) == ("completed", "done")
        assert step_of(daemon.call("status", runId=answer["runId"]), "files.list")["status"] == "completed"
        daemon.end_input()
        assert daemon.rest() == b""
        said = daemon.log.read_text()
        for noise in ("a banner of the tool", "forged", "straight to descriptor 1", "a warning of", "from a child"):
            assert noise in said


def test_a_peer_that_never_reads_standard_error_stops_nothing_f009(tmp_path: Path):
    many: dict[str, Any] = {"model": {"script": [{"calls": [{"tool": "files.list"}] * 120}, {"text": "done"}]}}
    with Daemon(tmp_path / "store", rig=("--crash",), stderr=subprocess.PIPE) as daemon:
        answer = daemon.call("start", clientRequestId="run", agent=many, input="", waitMs=20_000)
        assert answer["run"]["status"] == "completed"
        health = daemon.result(daemon.send("status"), timeout=1.0)
        assert health["droppedLogLines"] > 60  # a pipe holds 64 KiB of more than 200
        assert daemon.stop() == 0
        assert daemon.process.stderr is not None
        lines = daemon.process.stderr.read().splitlines()
        daemon.process.stderr.close()
    assert {json.loads(line)["event"] for line in lines} == {"incident"}  # whole lines, or none
    assert len(lines) + health["droppedLogLines"] >= 120


@pytest.mark.parametrize("evil", EVIL)
def test_a_name_that_is_none_is_refused_and_touches_no_file_f041(tmp_path: Path, evil: str):
    store, text = tmp_path / "a" / "b" / "store", EVIL[evil]
    with Daemon(store) as daemon:
        good = daemon.call("start", clientRequestId="good", agent=TALKER, input="", drive="manual")["runId"]
        before = tree(tmp_path)
        keyed = {"clientRequestId": "k", "runId": text}
        answer = {"digest": "sha256:0", "decision": "allow"}
        for method, params in (
            ("status", {"runId": text}),
            ("events", {"runId": text}),
            ("step", keyed),
            ("resume", keyed),
            ("cancel", keyed),
            ("approve", {**keyed, **answer, "approvalId": "apr_" + "a" * 26 + "_1"}),
            ("approve", {**keyed, **answer, "runId": good, "approvalId": text}),
        ):
            expect_refusal(daemon, method, params)
        start = {"clientRequestId": text, "agent": TALKER, "input": "", "drive": "manual"}
        if evil in GOOD_KEYS:
            assert daemon.call("start", **start)["runId"] != good
        else:
            expect_refusal(daemon, "start", start)
            expect_refusal(daemon, "step", {"runId": good, "clientRequestId": text})
        assert tree(tmp_path) == before
        assert daemon.call("status", runId=good)["run"]["status"] == "ready"


def expect_refusal(daemon: Daemon, method: str, params: dict[str, Any]) -> None:
    ident, line = daemon.request(method, **params)
    daemon.write(line)
    # A text that is no Unicode is no JSON text either, so its id is not known.
    answer = daemon.answer(None if b"\\ud800" in line else ident)
    assert answer["error"]["code"] == (-32700 if b"\\ud800" in line else -32602), (method, answer)
    if "path" in answer["error"]["data"]:
        assert answer["error"]["data"]["path"] in {"$.runId", "$.approvalId", "$.clientRequestId"}


def tree(root: Path) -> set[Path]:
    return set(root.rglob("*"))


def test_a_refused_key_is_not_used_up(daemon: Daemon):
    with pytest.raises(Refused):
        daemon.call("start", clientRequestId="second-try", agent={"tools": ["no-such-tool"]}, input="")
    again = daemon.call("start", clientRequestId="second-try", agent=TALKER, input="")
    assert again["replayed"] is False
