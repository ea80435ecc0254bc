"""The story that a golden store tells: a run of every kind, over several lives of the daemon, most ended by SIGKILL.

Knows: what is started, killed and answered, and in which order; it speaks to the real daemon over its wire. Does not know
what the store must say afterwards; that is `looking`.

The store and the workspace stand at PLACE while they are made, because a store names both: nothing of this machine's own,
such as a home or a temporary folder of a test, is in what is kept.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.process.outside import ALLOW, act, agent
from tests.process.wire_driver import Daemon
from tests.service.driver import CountingService

PLACE = Path("/var/tmp/rpcagent-golden")
STORE = PLACE / "store"
WORKSPACE = PLACE / "workspace"
BEFORE_CALL = ("--pause", "before_call")
ENDED = ("completed", "failed", "cancelled")
TEN_YEARS_MS = 315_360_000_000

_CLERK = """\
[agents.clerk]
model = "main"
tools = ["files"]
policy = {{ rules = [{{ tool = "files.write", do = "{do}" }}] }}

[models.main]
provider = "scripted"
script = [
    {{ calls = [{{ tool = "files.write", arguments = {{ path = "ledger.txt", content = "1\\n" }} }}] }},
    {{ text = "So it stays unwritten." }},
]
"""

Asked = list[dict[str, Any]]


class Maker:
    """Asks the daemon of the moment, and remembers every request that took a key."""

    def __init__(self, service: CountingService) -> None:
        self.service = service
        self.asked: Asked = []
        self.runs: dict[str, str] = {}

    @contextmanager
    def life(self, *options: str, rig: tuple[str, ...] = ()) -> Iterator[None]:
        """One life of the daemon, ended by SIGKILL."""
        with Daemon(STORE, *options, rig=rig, workspace=WORKSPACE, log=PLACE / "daemon.log") as daemon:
            self._daemon = daemon
            daemon.listen()
            yield

    def start(self, key: str, described: dict[str, Any] | str, **more: Any) -> str:
        answer = self.ask("start", clientRequestId=key, agent=described, **{"input": f"Run {key}.", **more})
        self.runs[key] = answer["runId"]
        return self.runs[key]

    def of(self, key: str, method: str, name: str, **more: Any) -> dict[str, Any]:
        """A keyed request about the run that `key` started."""
        return self.ask(method, runId=self.runs[key], clientRequestId=f"{key}/{name}", **more)

    def answer(self, key: str, decision: str, **more: Any) -> None:
        [question] = self.until(key, "waiting")["approvals"]
        named = {"approvalId": question["approvalId"], "digest": question["digest"]}
        self.of(key, "approve", decision, decision=decision, decidedBy="ada", **named, **more)

    def until(self, key: str, *statuses: str) -> dict[str, Any]:
        return self._daemon.until(self.runs[key], lambda shown: shown["run"]["status"] in statuses)

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        answer = self._daemon.call(method, **params)
        self.asked.append({"method": method, "params": params})
        return answer

    def parked(self, count: int) -> None:
        """So many calls of a rigged life are about to leave."""
        self._daemon.reports(count)


def make() -> Asked:
    """Makes the store at PLACE, which must not be there. Returns the keyed requests, in the order in which they were sent."""
    WORKSPACE.mkdir(parents=True)
    (WORKSPACE / "notes.txt").write_text("one\ntwo\n")
    for do in ("ask", "deny"):
        (PLACE / f"{do}.toml").write_text(_CLERK.format(do=do))
    with CountingService(PLACE / "truth") as service:
        maker = Maker(service)
        with maker.life("--config", str(PLACE / "ask.toml")):
            _ended(maker)
            _open(maker)
            _manual(maker)
            _in_mid_effect(maker)
        service.release()
        _tear()
        _let_go()
        with maker.life("--hold", "--config", str(PLACE / "ask.toml")):
            maker.answer("voided", "allow")
        with maker.life("--config", str(PLACE / "deny.toml")):
            _after_the_kill(maker)
        with maker.life("--config", str(PLACE / "deny.toml"), rig=BEFORE_CALL):
            _in_flight_at_the_end(maker)
        _tear()
    return maker.asked


def _said(*turns: dict[str, Any], tools: tuple[Any, ...] = (), rules: tuple[Any, ...] = ALLOW) -> dict[str, Any]:
    return {"model": {"script": list(turns)}, "tools": list(tools), "policy": {"rules": list(rules)}}


def _call(tool: str, **arguments: Any) -> dict[str, Any]:
    return {"calls": [{"tool": tool, "arguments": arguments}]}


WRITE = _call("files.write", path="out.txt", content="a line, café 🍸\n")


def _ended(maker: Maker) -> None:
    """Runs that are over in the first life."""
    usage = {"usage": {"inputTokens": 120, "outputTokens": 30, "costUsd": 0.25}}
    turns = [
        _call("files.read", path="notes.txt") | usage,
        WRITE,
        _call("shell.run", command="seq 1 20000"),  # longer than what is shown: the whole of it becomes a blob
        _call("files.read", path="missing.txt"),
        {"calls": [{"tool": "files.nothing", "arguments": {}}, {"tool": "files.read", "arguments": "no json"}]},
        {"text": "All done."},
    ]
    parts = [{"type": "text", "text": "Read, write,"}, {"type": "text", "text": "and count."}]
    described = _said(*turns, tools=("files", "shell")) | {"name": "all-round", "instructions": "Be brief."}
    maker.start("completed", described, input=parts, namespace="team-a", labels={"ticket": "T-1", "who": "ada"})
    maker.start("labelled", _said({"text": "Same label."}), namespace="team-a", labels={"ticket": "T-1"})
    maker.start("failed", _said({"fail": {"kind": "refused", "message": "Not this."}}), namespace="team-b")
    maker.start("denied", _said(WRITE, {"text": "No, then."}, tools=("files",), rules=({"do": "deny"},)))
    expiring = ({"do": "ask", "expires": "1ms"},)
    maker.start("expired", _said(WRITE, {"text": "Too late."}, tools=("files",), rules=expiring))
    maker.start("allowed", _said(WRITE, {"text": "Written."}, tools=("files",), rules=()))
    maker.answer("allowed", "allow")
    maker.start("refused", _said(WRITE, {"text": "Not written."}, tools=("files",), rules=()))
    maker.answer("refused", "deny", comment="not today")
    maker.start("stopped", _said(WRITE, tools=("files",), rules=()), labels={"ticket": "T-2"})
    maker.until("stopped", "waiting")
    maker.of("stopped", "cancel", "stop", reason="changed my mind")
    maker.start("extended", _said(WRITE, {"text": "Enough."}, tools=("files",)), budget={"steps": 1})
    maker.answer("extended", "extend", extend={"steps": 10})
    for key in ("deleted", "kept"):
        maker.start(key, _said({"text": "One of two."}), labels={"passing": ""})
        maker.until(key, *ENDED)
    for key in maker.runs:
        maker.until(key, *ENDED)


def _open(maker: Maker) -> None:
    """Runs that wait, for a person or for the clock."""
    command = _call("shell.run", command="printf allowed")
    described = _said(command, {"text": "It was allowed."}, tools=("shell",), rules=())
    maker.start("asks", described, workspace="/", namespace="team-a")
    maker.start("asks-too", _said(WRITE, {"text": "It was denied."}, tools=("files",), rules=()))
    maker.start("asks-for-more", _said(WRITE, {"text": "More."}, tools=("files",)), budget={"steps": 1})
    busy = {"fail": {"kind": "busy", "message": "Come back later.", "retryAfterMs": TEN_YEARS_MS}}
    waits = _said(busy) | {"model": {"script": [busy], "retryFor": "3650d"}}
    maker.start("retries", waits)
    maker.start("voided", "clerk", namespace="team-b")
    for key in ("asks", "asks-too", "asks-for-more", "retries", "voided"):
        maker.until(key, "waiting")


def _manual(maker: Maker) -> None:
    described = _said(_call("files.read", path="notes.txt"), {"text": "Step by step."}, tools=("files",))
    maker.start("by-hand", described, drive="manual", labels={"ticket": "T-1"})
    maker.of("by-hand", "step", "1", waitMs=20_000)


def _in_mid_effect(maker: Maker) -> None:
    """The effect of each happens, and the daemon dies before it hears of it."""
    service = maker.service
    service.park("after_effect", times=5)
    for key in ("happened", "unresolved"):
        maker.start(key, agent(service, "at_most_once", key))
    maker.start("found", agent(service, "reconcilable", "found"))
    maker.start("again", agent(service, "idempotent", "again"), recovery="manual")
    maker.start("held", agent(service, "idempotent", "held"), recovery="confirm")
    service.wait_parked(20, count=5)


def _after_the_kill(maker: Maker) -> None:
    maker.answer("happened", "happened", result="The receipt is 7.")
    maker.until("unresolved", "waiting")
    maker.of("unresolved", "cancel", "stop", reason="nobody knows")
    maker.until("again", "ready")
    maker.of("again", "resume", "go")
    for key in ("happened", "unresolved", "found", "again", "voided"):
        maker.until(key, *ENDED)


def _in_flight_at_the_end(maker: Maker) -> None:
    """What the next opening finds in mid-air; a command of each kind, neither of which has left."""
    described = _said(act("read"), {"text": "done"}) | {"tools": agent(maker.service, "read_only", "read")["tools"]}
    maker.start("reading", described, recovery="manual")
    maker.start("in-doubt", _said(_call("shell.run", command="true"), {"text": "done"}, tools=("shell",)))
    maker.parked(2)


def _let_go() -> None:
    """A checkpoint, the deletion of the older one of two runs, and another checkpoint."""
    (PLACE / "keep.toml").write_text('[retention]\nrules = [{ label = "passing", keep = 1 }]\n')
    words = ("gc", "--store", str(STORE), "--workspace", str(WORKSPACE), "--config", str(PLACE / "keep.toml"), "--json")
    done = subprocess.run(
        [sys.executable, "-P", "-m", "rpcagent", *words], capture_output=True, text=True, check=True, timeout=60
    )
    assert json.loads(done.stdout.splitlines()[-1])["summary"]["runs"] == 1


def _tear() -> None:
    """What a power cut leaves of a record that was being written: its beginning. Nobody was told of it."""
    last = max((STORE / "wal").glob("*.jsonl"))
    line = last.read_bytes().splitlines(keepends=True)[-1]
    with last.open("ab") as file:
        file.write(line[: len(line) * 2 // 3])


def keep(folder: Path) -> None:
    """Moves the store to `folder`, without what is only the machine's (who held the lock) and what is made anew."""
    shutil.copytree(STORE, folder, ignore=shutil.ignore_patterns("RESERVE", "index.sqlite*"))
    (folder / "LOCK").write_bytes(b"")
    shutil.rmtree(PLACE)


def dump(value: Any) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False) + "\n"
