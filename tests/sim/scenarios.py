"""The scenarios: what the model asks for, and what the client does."""

from __future__ import annotations

import anyio
from rpcagent.runs.definition import Budget, Rule
from rpcagent.runs.requests import ApproveCommand, CancelCommand

from .client import Client, Refused
from .outside import Habits, Turn
from .scenario import ALLOW, Scenario

MAIN = (
    Turn("looks", (("fs.read", "a"), ("fs.read", "b"), ("kv.put", "put"))),
    Turn("acts", (("tickets.close", "close"), ("bank.pay", "pay"))),
    Turn("The end."),
)
PAYS = (Turn("pays", (("bank.pay", "pay"),)), Turn("The end."))
ASK = (*ALLOW, Rule(do="ask", tool="bank.pay", expires_ms=60_000))


async def plain(client: Client, run: str) -> str:
    return await client.see_through(run)


async def denied(client: Client, run: str) -> str:
    return await client.see_through(run, verdicts={"bank.pay": "deny"})


async def silent(client: Client, run: str) -> str:
    """Nobody answers; the question expires."""
    return await client.until(run, "completed", "failed")


async def stops(client: Client, run: str) -> str:
    return await client.see_through(run, verdicts={"budget": "stop"})


async def races(client: Client, run: str) -> str:
    """Two people answer at the same time, each without knowing of the other."""
    await client.until(run, "waiting", "completed")
    opened = (await client.state(run)).open_approvals()
    told: dict[str, object] = {}

    async def decide(verdict: str) -> None:
        question = opened[0]
        command = ApproveCommand(approval_id=question.approval_id, digest=question.digest, decision=verdict)
        told[verdict] = await client.ask(run, f"{verdict}-{question.approval_id}", command)

    async with anyio.create_task_group() as both:
        both.start_soon(decide, "allow")
        both.start_soon(decide, "deny")
    lost = [t.code for t in told.values() if isinstance(t, Refused)]
    if lost != ["ALREADY_DECIDED"]:
        client.world.breach(f"two deciders were told {told}")
    return await client.see_through(run)


async def cancels(client: Client, run: str) -> str:
    """Cancels while the payment is under way; what stays unresolved is answered as evidence."""
    state = await client.state(run)
    while not state.ended and not any(
        s.status in {"started", "unknown"} for s in state.steps.values() if s.kind == "tool_call"
    ):
        opened = state.open_approvals()
        if opened and opened[0].kind == "tool_call":
            await client.answer(run, opened[0], "allow")
        await anyio.sleep(0.01)
        state = await client.state(run)
    told = await client.ask(run, "cancel-1", CancelCommand(reason="enough"))
    if told != {"cancel": {"already": False}}:
        client.world.breach(f"cancel answered {told}")
    status = await client.until(run, "cancelled", "completed", "failed")
    for approval in (await client.state(run)).open_approvals():
        await client.tell(run, approval)
    if await client.ask(run, "cancel-2", CancelCommand()) != {"cancel": {"already": True}}:
        client.world.breach("a second cancel is not `already`")
    if (await client.state(run)).unresolved and client.told != "abandon":
        client.world.breach("answered, and still unresolved")
    return status


A = Scenario(name="main", script=MAIN, drama=plain)
EXPIRES = Scenario(
    name="approval expired", script=MAIN, drama=silent, rules=ASK, undone=frozenset({"pay"}), most_seconds=1_000.0,
)  # fmt: skip
OTHERS = (
    Scenario(name="manual drive", script=MAIN, drama=plain, drive="manual"),
    Scenario(name="recovery confirm", script=MAIN, drama=plain, recovery="confirm"),
    Scenario(name="recovery manual", script=MAIN, drama=plain, recovery="manual"),
    Scenario(name="manual drive, recovery confirm", script=MAIN, drama=plain, drive="manual", recovery="confirm"),
    Scenario(
        name="cancel, outcome within the grace time", script=PAYS, drama=cancels, habits=Habits(slow={"pay": 2.0}),
        ends=frozenset({"cancelled"}), undone=frozenset({"pay"}),
    ),
    Scenario(
        name="cancel, no outcome", script=PAYS, drama=cancels, habits=Habits(slow={"pay": 20.0}),
        ends=frozenset({"cancelled"}), undone=frozenset({"pay"}),
    ),
    Scenario(name="approval denied", script=MAIN, drama=denied, undone=frozenset({"pay"})),
    EXPIRES,
    Scenario(name="two deciders", script=PAYS, drama=races, undone=frozenset({"pay"})),
    Scenario(name="budget extended", script=MAIN, drama=plain, budget=Budget(attempts=4)),
    Scenario(
        name="budget stopped", script=MAIN, drama=stops, budget=Budget(attempts=4), ends=frozenset({"failed"}),
        undone=frozenset({"put", "close", "pay"}),
    ),
    Scenario(name="rate limit", script=(Turn("limited", (("kv.put", "put"),), limited=2), Turn("The end.")), drama=plain),
    Scenario(
        name="replies lost", script=MAIN, drama=plain, habits=Habits(loses=frozenset({"a", "put", "close", "pay"})),
    ),
    Scenario(
        name="requests lost", script=MAIN, drama=plain, habits=Habits(drops=frozenset({"b", "put", "close", "pay"})),
    ),
)  # fmt: skip


NEIGHBOUR = "neighbour"
LATER = "later"


async def deleted(client: Client, run: str) -> str:
    """The run ends and is deleted, beside one that waits all the time; its key is never taken again."""
    neighbour = await client.start("start-2", DELETED.definition(NEIGHBOUR))
    status = await client.see_through(run)
    await client.until(neighbour, "waiting")
    await client.start("start-1", DELETED.definition())  # a repeat is answered from the files
    await client.delete(run)
    for moment in ("at once", "later"):
        told = await client.try_start("start-1", DELETED.definition())
        if not isinstance(told, Refused) or told.code != "KEY_EXPIRED":
            client.world.breach(f"the key of a deleted run is answered {told} {moment}")
        if moment == "at once":
            later = await client.start("start-3", DELETED.definition(LATER))
            if await client.see_through(later) != "completed":
                client.world.breach("a run that began after the deletion did not complete")
    if await client.see_through(neighbour) != "completed":
        client.world.breach("the run that waited did not complete")
    return status


DELETED = Scenario(
    name="deleted", script=PAYS, drama=deleted,
    others={
        NEIGHBOUR: (Turn("pays", (("bank.pay", "rent"),)), Turn("The end.")),
        LATER: (Turn("puts", (("kv.put", "late"),)), Turn("The end.")),
    },
)  # fmt: skip
"""Needs files: nothing is deleted without."""
