"""What one run's records cannot do to the others when a store is opened. F032."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import anyio
import pytest
from rpcagent.policy.rules import hidden_paths
from rpcagent.runs import decide, supervisor
from rpcagent.runs import events as ev
from rpcagent.runs.definition import Definition, Rule
from rpcagent.runs.ports import Recorded
from rpcagent.runs.supervisor import Supervisor

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
BAD, GOOD = "run_" + "a" * 26, "run_" + "b" * 26


class Nothing:
    """Stands for every port: what is opened here performs nothing."""

    store_id, epoch = "sto_1", 2

    def now(self) -> datetime:
        return NOON

    async def append(self, *_: Any, **__: Any) -> str:
        return "ok"


def opened(incidents: list[str]) -> Supervisor:
    nothing: Any = Nothing()
    return Supervisor(
        journal=nothing,
        clock=nothing,
        model=nothing,
        tools=nothing,
        rules=decide.Rules(epoch=2),
        spawn=lambda *_: None,
        incident=lambda error, _what: incidents.append(type(error).__name__) or "inc_1",
        fatal=lambda _error: None,
    )


def record() -> bytes:
    started = ev.RunStarted(
        client_request_id="k", namespace="", fingerprint="f", definition=Definition(agent="a"), input="go", epoch=1
    )
    called = ev.ModelCallStarted(step_id="stp_1", attempt=1, request_hash="h")
    return ev.encode(ev.Commit(seq=1, at=NOON, events=(started, called)))


@pytest.mark.anyio
async def test_whatever_one_run_raises_at_the_open_pass_all_others_open(monkeypatch: pytest.MonkeyPatch):
    real = supervisor.open_pass

    def raising(state: Any, *rest: Any) -> Any:
        if state.run_id == BAD:
            raise OverflowError("days=1157407407")
        return real(state, *rest)

    monkeypatch.setattr(supervisor, "open_pass", raising)
    incidents: list[str] = []
    with anyio.fail_after(10):
        runs = opened(incidents)
        await runs.replay((run_id, Recorded(1, 2, record())) for run_id in (BAD, GOOD))
        await runs.open()
    assert incidents == ["OverflowError"]
    assert {a.run_id: runs.status_of(a) for a in runs.actors.values()} == {BAD: "damaged", GOOD: "running"}
    assert runs.roster.attention(9) == [{"runId": BAD, "kind": "damaged"}]


@pytest.mark.anyio
async def test_whatever_one_record_raises_when_it_is_replayed_all_others_load(monkeypatch: pytest.MonkeyPatch):
    real = supervisor.apply

    def raising(state: Any, commit: Any, run_id: str) -> Any:
        if run_id == BAD:
            raise RecursionError
        return real(state, commit, run_id)

    monkeypatch.setattr(supervisor, "apply", raising)
    incidents: list[str] = []
    runs = opened(incidents)
    await runs.replay((run_id, Recorded(1, 2, record())) for run_id in (BAD, GOOD))
    assert incidents == ["RecursionError"]
    assert {a.run_id: runs.status_of(a) for a in runs.actors.values()} == {BAD: "damaged", GOOD: "running"}


def test_paths_are_hidden_from_the_files_tools_by_every_rule_that_denies_them():
    rules = (
        Rule(do="deny", paths=("secret/*", ".env")),
        Rule(do="deny", tool="files.read", paths=("keys/*",)),
        Rule(do="deny", tool="tickets.*", paths=("not-a-file/*",)),
        Rule(do="ask", paths=("asked/*",)),
        Rule(do="deny", paths=("only-with/*",), arguments={"pattern": "x"}),
    )
    today = {"a": (Rule(do="deny", tool="*", paths=("today/*",)),), "b": (Rule(do="deny", paths=("other/*",)),)}
    assert hidden_paths(Definition(agent="a", rules=rules), today) == ("secret/*", ".env", "keys/*", "today/*")
