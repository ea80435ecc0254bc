"""What the tests of promises ask of a daemon again and again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.process.wire_driver import Daemon
from tests.upkeep.commands import damage, said

TALKER: dict[str, Any] = {"model": {"script": [{"text": "done"}]}}


def start(daemon: Daemon, key: str, **more: Any) -> str:
    run_id: str = daemon.call(
        "start", **{"clientRequestId": key, "agent": TALKER, "input": "", "waitMs": 20_000} | more
    )["runId"]
    return run_id


def question_of(daemon: Daemon, run_id: str) -> dict[str, Any]:
    """The one open question, as params of `approve`."""
    [asked] = daemon.call("status", runId=run_id)["approvals"]
    return {"runId": run_id, "approvalId": asked["approvalId"], "digest": asked["digest"]}


def write_raw(daemon: Daemon, text: str) -> dict[str, Any]:
    ident = json.loads(text)["id"]
    daemon.write(text.encode() + b"\n")
    return daemon.answer(ident)


def verified(store: Path) -> None:
    found = said("verify", "--replay", "--store", store, "--json")
    assert (found.code, damage(found)) == (0, [])
