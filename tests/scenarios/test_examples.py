"""The examples of the wire: each replays to exactly what its file says, and all of it fits the documented types.

`python -m tests.scenarios --update` rewrites what is received; read the difference before you keep it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from rpcagent import errors
from rpcagent.rpc.methods import METHODS
from rpcagent.rpc.results import NOTIFICATIONS, RESULTS
from rpcagent.runs.events import AnyEvent, Event

from . import shapes
from .replay import EXAMPLES, FILES, acts, play, read

NOT_HERE = {
    "CANCELLED": "reserved",
    "KEY_EXPIRED": "reserved until runs can be deleted",
}
"""Error codes that no example shows, and why."""

_ENDS = "the process ends with exit code 70, or has ended"
RARE = {
    "Journal.state=poisoned": _ENDS,
    "StatusResult.inputTruncated": "needs an input above 64 KiB",
    "StatusResult.status=poisoned": _ENDS,
    "StatusResult.status=closed": _ENDS,
    "Checkpoints.trouble": "needs a disk that fails while a checkpoint is made",
    "run_deleted": "needs a rule of retention, and time",
    "DeltaShown.stream": "no command runs in-process; see the process tests of the client",
    "DeltaShown.stream=answer": "the default, which is left out",
    "DeltaShown.stream=output": "no command runs in-process; see the process tests of the client",
    "Journal.freeBytes": "no disk is looked at in-process",
    "Journal.low": "no disk is looked at in-process",
    "WarningShown.kind=storage_low": "needs a disk that is nearly full",
    "WarningShown.kind": "the disk failed a sync: the process ends",
    "WarningShown.kind=storage_poisoned": "the disk failed a sync: the process ends",
    "WarningShown.message": "the disk failed a sync: the process ends",
    "approval_voided": "needs a policy of today that is stricter than the pinned one, which a client cannot send",
    "late_outcome": "needs an outcome that comes when its step was decided otherwise",
}
"""Members of results, values of their closed sets, and event types that no example shows, and why."""


@cache
def replayed(path: Path) -> tuple[list[tuple[Any, list[Any]]], list[str]]:
    return play([entry for entry, _ in acts(read(path))])


def received() -> Iterator[tuple[str, Any, Any]]:
    """(file, what it answers or None, message) of everything that comes back, batches item by item."""
    for path in FILES:
        sent: dict[str, Any] = {}
        for entry, came in acts(read(path)):
            message = entry.get("send")
            for item in message if isinstance(message, list) else [message]:
                if isinstance(item, dict) and "id" in item:
                    sent[json.dumps(item["id"])] = item.get("method")
            for back in came:
                for item in back if isinstance(back, list) else [back]:
                    yield path.stem, sent.get(json.dumps(item.get("id"))), item


def text_of(value: Any) -> str:
    """So that 1, 1.0 and true differ; the order of members does not count."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


@pytest.mark.parametrize("path", FILES, ids=[p.stem for p in FILES])
def test_an_example_replays_to_exactly_what_its_file_says_f013_f015_f017_s4_53(path: Path):
    done, _ = replayed(path)
    expected = acts(read(path))
    assert len(done) == len(expected)
    for number, ((_, came), (entry, wanted)) in enumerate(zip(done, expected, strict=True), 1):
        assert [text_of(m) for m in came] == [text_of(m) for m in wanted], f"{path.name}: {number}: {entry}"


@pytest.mark.parametrize("path", FILES, ids=[p.stem for p in FILES])
def test_nothing_is_written_but_what_the_example_puts_into_the_workspace_f041(path: Path):
    given = {f"a/b/workspace/{name}" for e in read(path) for name in e.get("given", {}).get("files", {})}
    assert set(replayed(path)[1]) == given


@pytest.mark.parametrize("path", FILES, ids=[p.stem for p in FILES])
def test_an_example_begins_with_what_it_is_about_and_knows_no_other_lines(path: Path):
    entries = read(path)
    assert list(entries[0]) == ["comment"]
    known = {"comment", "given", "send", "sendText", "receive", "more", "wait", "outside", "disk", "peer", "restart"}
    assert {name for entry in entries for name in entry} <= known
    assert "<" not in "".join(json.dumps(e["send"]) for e in entries if "send" in e)


def test_every_result_and_notification_fits_its_documented_type():
    for name, method, message in received():
        if "method" in message:
            shapes.convert(NOTIFICATIONS[message["method"]], message["params"])
        elif "result" in message:
            assert method in RESULTS, (name, message)
            shapes.convert(RESULTS[method], message["result"])


def test_every_event_fits_the_union_of_events_in_notifications_and_in_pages():
    for _, method, message in received():
        if message.get("method") == "run/event":
            shapes.convert(AnyEvent, message["params"]["event"])
        for shown in message.get("result", {}).get("events", ()) if method == "events" else ():
            shapes.convert(AnyEvent, shown["event"])


def test_every_member_of_the_documented_types_occurs_somewhere():
    types = [*RESULTS.values(), *NOTIFICATIONS.values()]
    seen: set[str] = set()
    for _, method, message in received():
        if "method" in message:
            seen |= shapes.occurring(NOTIFICATIONS[message["method"]], message["params"])
        elif "result" in message:
            seen |= shapes.occurring(RESULTS[method], message["result"])
    assert shapes.members(types) - seen == {name for name in RARE if "." in name}


def test_every_type_of_event_occurs_somewhere():
    seen = set(re.findall(r'"event": \{"type": "(\w+)"', "".join(p.read_text("utf-8") for p in FILES)))
    known = {str(e.__struct_config__.tag) for e in Event.__subclasses__()}
    assert known - seen == {name for name in RARE if "." not in name}


def test_every_error_code_occurs_with_its_number_its_retryable_and_its_details():
    seen: dict[str, set[str]] = {}
    numbers = {e.code: e.number for e in errors.ALL}
    for name, _, message in received():
        if "error" in message:
            error = message["error"]
            assert set(error) == {"code", "message", "data"}, name
            assert error["code"] == numbers[error["data"]["code"]], name
            assert isinstance(error["data"]["retryable"], bool), name
            seen.setdefault(error["data"]["code"], set()).update(error["data"])
    assert numbers.keys() - seen.keys() == NOT_HERE.keys()


def test_a_refusal_of_params_names_the_path_and_the_reason():
    for name, _, message in received():
        if message.get("error", {}).get("code") == errors.InvalidParams.number:
            data, shown = message["error"]["data"], message["error"]["message"]
            assert data["path"].startswith(("$", "/none")), name  # or the script file at fault
            assert shown == f"{data['path']}: {data['reason']}", name


def test_every_method_is_refused_something_and_answers_something():
    refused = {m for _, m, message in received() if message.get("error", {}).get("code") == -32602}
    answered = {m for _, m, message in received() if "result" in message}
    assert refused == answered == METHODS.keys()


def test_events_up_to_last_seq_come_before_the_answer_that_names_it_f017():
    checked = 0
    for path in FILES:
        last: dict[str, int] = {}
        for entry, came in acts(read(path)):
            if {"restart", "peer"} & entry.keys() or "initialize" in json.dumps(entry):
                last = {}  # nobody listens until somebody subscribes
            for message in came:
                if isinstance(message, dict) and message.get("method") == "run/event":
                    params = message["params"]
                    assert params["seq"] == last.get(params["runId"], params["seq"] - 1) + 1, path.name
                    last[params["runId"]] = params["seq"]
                elif isinstance(message, dict) and "run" in message.get("result", {}):
                    run = message["result"]["run"]
                    assert run["lastSeq"] == last.get(run["runId"], run["lastSeq"]), path.name
                    checked += run["runId"] in last
    assert checked > 40


def test_each_example_stands_in_the_readme_of_the_examples():
    text = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert set(re.findall(r"\]\((\S+)\.jsonl\)", text)) == {p.stem for p in FILES}
