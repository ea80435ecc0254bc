"""A stage for the batch commands: a daemon that the test writes, streams that it reads, and runs made of a few words."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass
from typing import Any

from rpcagent import cli
from rpcagent.batch.conduct import complained, perform_on, prepare
from rpcagent.batch.desk import Desk
from rpcagent.batch.faults import Mistake
from rpcagent.batch.follow import Feed
from rpcagent.batch.place import Place
from tests.clients.fake import Fake

from rpcagent_client import Client

Json = dict[str, Any]

NAME = "abcdefghijklmnopqrstuvwxyz"
RUN = f"run_{NAME}"
AT = "2031-04-01T12:00:00Z"


@dataclass(frozen=True)
class Played:
    code: int
    out: str
    err: str

    def objects(self) -> list[Json]:
        """The lines of --json."""
        return [json.loads(line) for line in self.out.splitlines()]


class Tty(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


class Stage:
    """Plays one command against the fake daemon, in this process."""

    def __init__(self, fake: Fake) -> None:
        self.fake = fake

    def play(self, *words: str, answers: list[Json], typed: str | None = None, look: Json | None = None) -> Played:
        """`answers`: what the daemon says to each request after `look`, the first one. `typed`: what a person types, at a
        terminal."""
        self.fake.does([{"result": {}}, look or {"result": {"status": "ok"}}, *answers])
        options = cli._parser().parse_args(words)
        out, err = io.StringIO(), io.StringIO() if typed is None else Tty()
        stdin = io.StringIO() if typed is None else Tty(typed)
        desk = Desk(stdin, out, err, as_json=options.json, no_input=getattr(options, "no_input", True))
        desk.width = 100

        def connect(feed: Feed, streams: bool) -> Client:
            return self.fake.client(on_event=feed.on_event, on_delta=feed.on_delta if streams else None)

        try:
            prepare(options)
        except Mistake as mistake:
            return Played(complained(desk, mistake), out.getvalue(), err.getvalue())
        code = perform_on(desk, Place.of(options), connect, options)
        return Played(code, out.getvalue(), err.getvalue())

    def sent(self, method: str) -> list[Json]:
        """The params of all requests of this method."""
        return [params for _, name, params in self.fake.received() if name == method]


def run(status: str, **members: Any) -> Json:
    """A run as the daemon shows it."""
    return {
        "runId": RUN,
        "status": status,
        "lastSeq": 0,
        "clientRequestId": "k",
        "namespace": "",
        "agent": "writer",
        "drive": "auto",
        "recovery": "auto",
        "resumeRequired": False,
        "cancelling": False,
        "startedAt": AT,
        "updatedAt": AT,
        "openApprovals": [],
        "workspace": "/w",
        **members,
    }


def started(status: str = "running", *, replayed: bool = False, **members: Any) -> Json:
    """The answer of `start`."""
    return {"result": {"runId": RUN, "run": run(status, **members), "replayed": replayed}}


def shown(status: str, *approvals: Json, steps: list[Json] | None = None, **members: Any) -> Json:
    """The answer of `status`."""
    members = {"openApprovals": [one["approvalId"] for one in approvals]} | members
    return {
        "result": {
            "run": run(status, **members),
            "input": "Write it.",
            "steps": steps or [],
            "approvals": list(approvals),
            "budget": {"spent": {"steps": 3, "attempts": 4, "activeS": 0.25}, "limits": {"steps": 500}},
            "definition": {"pinned": "sha256:00", "contextVersion": 1},
        }
    }


def page(*events: Json) -> Json:
    """The answer of `events`, from the first one."""
    return {"result": {"events": elements(*events), "lastSeq": len(events)}}


def elements(*events: Json, first: int = 1) -> list[Json]:
    return [{"runId": RUN, "seq": first + place, "at": AT, "event": event} for place, event in enumerate(events)]


def question(kind: str, subject: Json, choices: list[str], number: int = 1, **members: Any) -> Json:
    return {
        "approvalId": f"apr_{NAME}_{number}",
        "runId": RUN,
        "kind": kind,
        "status": "open",
        "digest": "sha256:d1",
        "subject": subject,
        "choices": choices,
        "requestedAt": AT,
        **members,
    }


def may_write(number: int = 1, tool: str = "files.write") -> Json:
    subject = {
        "tool": tool,
        "effect": "idempotent",
        "arguments": {"path": "a", "content": "hello"},
        "workspace": "/none",
    }
    return question("tool_call", subject, ["allow", "deny"], number)


def decided(decision: str, *, already: bool = False, status: str = "running") -> Json:
    """The answer of `approve`."""
    approval = {"approvalId": f"apr_{NAME}_1", "kind": "tool_call", "decision": decision, "already": already}
    return {"result": {"approval": approval, "run": run(status), "replayed": False}}


STARTED: Json = {"type": "run_started", "clientRequestId": "k", "input": "Write it.", "definition": {"agent": "writer"}}
ANSWERED: Json = {"type": "model_answered", "stepId": "stp_1", "attempt": 1, "text": "Done.", "usage": {}}
COMPLETED: Json = {"type": "run_completed", "output": "Done."}
