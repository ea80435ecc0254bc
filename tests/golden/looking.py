"""What a golden store must say: every run, its events, the list, the answers to old keys, and how its runs go on.

Knows: how a copy is opened by the real daemon, twice: once held, so that nothing moves, and once to go on. What is recorded
after the store was made carries times of today; those read `later`, and all other values are compared as they are.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from pathlib import Path
from typing import Any

from tests.golden.making import Asked
from tests.process.wire_driver import Daemon, Refused

STORES = Path(__file__).parent / "stores"
DELETED = "deleted"
"""The key of the run that retention let go, where the format knows that."""
MOMENTARY = ("version", "pid", "uptimeS", "store", "journal", "checkpoint", "droppedLogLines")
_INSTANT = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?Z")


def copied(name: str, folder: Path) -> Path:
    """A copy of the store, with the modes that the daemon gives its files: git keeps none."""
    store = folder / "store"
    shutil.copytree(STORES / name / "store", store)
    for path in (store, *store.rglob("*")):
        path.chmod(0o700 if path.is_dir() else 0o600)
    return store


def held(store: Path, asked: Asked, made: str) -> dict[str, Any]:
    """What is seen of the store where nothing may go on. `made`: times after it are masked."""
    with Daemon(store, "--hold", workspace=store.parent) as daemon:
        recovery = daemon.listen()["recovery"]
        listed = daemon.call("list", limit=1_000, openApprovals=False)
        runs = [run["runId"] for run in listed["runs"]]
        seen = {
            "recovery": recovery,
            "daemon": {k: v for k, v in daemon.call("status").items() if k not in MOMENTARY},
            "list": listed,
            "questions": daemon.call("list", limit=1_000, openApprovals=True),
            "runs": [_run(daemon, run) for run in runs],
            "answers": [_answer(daemon, one["method"], one["params"]) for one in asked],
        }
        assert daemon.stop() == 0
    return _masked(seen, made)


def gone_on(store: Path, asked: Asked, made: str) -> dict[str, Any]:
    """The same runs after a person has answered what can be answered, by their `start` keys; not the one for which the
    clock may have acted by now."""
    with Daemon(store, workspace=store.parent) as daemon:
        daemon.listen()
        runs = {
            one["params"]["clientRequestId"]: daemon.call("start", **one["params"])["runId"]
            for one in asked
            if one["method"] == "start" and one["params"]["clientRequestId"] != DELETED
        }
        for key, decision in {"asks": "allow", "asks-too": "deny", "asks-for-more": "stop"}.items():
            [question] = daemon.call("status", runId=runs[key])["approvals"]
            named = {"runId": runs[key], "approvalId": question["approvalId"], "digest": question["digest"]}
            daemon.call("approve", clientRequestId="golden/answer", decision=decision, **named)
        for number in range(2):
            daemon.call("step", runId=runs["by-hand"], clientRequestId=f"golden/step-{number}", waitMs=20_000)
        for key in ("asks", "asks-too", "asks-for-more", "by-hand"):
            daemon.until(runs[key], lambda shown: shown["run"]["status"] in {"completed", "failed"})
        seen = {key: daemon.call("status", runId=run)["run"] for key, run in runs.items() if key != "retries"}
        assert daemon.stop() == 0
    return _masked(seen, made)


def sums(store: Path) -> dict[str, str]:
    """The SHA-256 of every file, by its name."""
    files = sorted(path for path in store.rglob("*") if path.is_file())
    return {str(path.relative_to(store)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def latest(store: Path) -> str:
    """The last instant that the log of a store names before a second opening adds to it."""
    files = [*(store / "wal").glob("*.jsonl"), *(store / "runs").glob("*/history.jsonl")]
    return max((at for file in files for at in _happened(file.read_text())), key=_ordered)


def _happened(text: str) -> list[str]:
    return [found for found in re.findall(r'"at":"([^"]+)"', text) if _INSTANT.fullmatch(found)]


def _run(daemon: Daemon, run_id: str) -> dict[str, Any]:
    """What is compared with the present agents is no matter of the store; warnings came after it was made."""
    status = daemon.call("status", runId=run_id)
    if "definition" in status:
        status["definition"] = {k: v for k, v in status["definition"].items() if k not in {"current", "differs"}}
    status.get("budget", {}).pop("near", None)
    return {
        "status": status,
        "events": daemon.call("events", runId=run_id, limit=1_000),
    }


def _answer(daemon: Daemon, method: str, params: dict[str, Any]) -> dict[str, Any]:
    """The recorded half of an answer that is asked for again; `run` is live, and stands elsewhere."""
    try:
        answer = daemon.call(method, **{k: v for k, v in params.items() if k != "waitMs"})
    except Refused as refusal:
        answer = {"refused": refusal.code}
    return {name: value for name, value in answer.items() if name != "run"}


def _masked(value: Any, made: str) -> Any:
    if isinstance(value, dict):
        return {name: _masked(member, made) for name, member in value.items()}
    if isinstance(value, list):
        return [_masked(member, made) for member in value]
    if isinstance(value, str) and _INSTANT.fullmatch(value) and _ordered(value) > _ordered(made):
        return "later"
    return value


def _ordered(instant: str) -> tuple[str, float]:
    """Fractions of a second are as long as they need to be, so text alone does not order them."""
    return instant[:19], float("0" + instant[19:-1] if len(instant) > 20 else 0)
