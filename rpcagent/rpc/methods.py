"""The methods: params in, one call of the supervisor, result out. No state and no rule lives here."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import msgspec

from rpcagent import __version__, errors
from rpcagent.rpc import wire
from rpcagent.rpc.dispatch import Method
from rpcagent.rpc.notify import Notifier, elements
from rpcagent.runs import events as ev
from rpcagent.runs.definition import Definition
from rpcagent.runs.engine import Actor
from rpcagent.runs.ports import Recorded
from rpcagent.runs.requests import ApproveCommand, Ask, CancelCommand, Command, ResumeCommand, StepCommand
from rpcagent.runs.summary import Summary, view_of
from rpcagent.runs.supervisor import Answer, Supervisor
from rpcagent.runs.view import approval_view, request_view, run_view, status_view, step_view

MOST_ATTENTION = 100
PAGE_BYTES = 1 << 20
"""A page ends with the element that reaches it."""
_CHUNK = 500
INPUT_SHOWN = 64 << 10
INPUT_CUT = " [...]"

_PLACE = re.compile(r"[0-9]{1,12}")
_encode = msgspec.json.Encoder().encode


class Waits:
    """Of calls that could be answered and only wait, at most `most` do so; one more is answered with the present state."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.waiting = 0

    @contextmanager
    def granted(self, wait_ms: int) -> Iterator[int]:
        """How long the call may wait."""
        if wait_ms <= 0 or self.waiting >= self._most:
            yield 0
            return
        self.waiting += 1
        try:
            yield wait_ms
        finally:
            self.waiting -= 1


class Context(msgspec.Struct, kw_only=True):
    """What the handlers of one connection stand on. `define` makes the pinned definition from the params of `start`,
    `workspace` the real path of the directory that it names; `current` is the digest of what a run of the same agent would pin
    now, None where that cannot be told at once;
    `health` tells of store and process; `shutdown` begins the end, with a grace time in milliseconds or None."""

    supervisor: Supervisor
    notifier: Notifier
    define: Callable[[wire.StartParams, str], Awaitable[Definition]]
    current: Callable[[Definition], str | None]
    workspace: Callable[[str | None], str]
    health: Callable[[], dict[str, Any]]
    shutdown: Callable[[int | None], None]
    limits: dict[str, int]
    recovery: dict[str, Any]
    waits: Waits = msgspec.field(default_factory=lambda: Waits(768))


async def initialize(ctx: Context, params: wire.InitializeParams) -> dict[str, Any]:
    if params.protocol_version < 1:
        raise errors.UnsupportedVersion("protocol versions begin at 1", supported=[wire.PROTOCOL_VERSION])
    journal = ctx.supervisor.journal
    expect = params.expect
    if expect.store_id not in {None, journal.store_id} or expect.min_epoch > journal.epoch:
        raise errors.InvalidState(
            "this is not the store that the caller expects, or an older copy of it",
            storeId=journal.store_id,
            epoch=journal.epoch,
        )
    ctx.notifier.subscribe(params.capabilities)
    return {
        "protocolVersion": wire.PROTOCOL_VERSION,
        "serverInfo": {"name": "rpcagent", "version": __version__},
        "storeId": journal.store_id,
        "epoch": journal.epoch,
        "capabilities": {"events": params.capabilities.events, "deltas": params.capabilities.deltas},
        "limits": ctx.limits,
        "recovery": ctx.recovery,
    }


async def start(ctx: Context, params: wire.StartParams) -> dict[str, Any]:
    wire.check_keyed(params)
    if params.from_ is not None:
        raise errors.InvalidParams("forks are not available in this version", path="$.from")
    if params.durability != "sync":
        raise errors.InvalidParams("only `sync` is available; the other names are reserved", path="$.durability")
    wire.check_budgets(params)
    print_of_it = wire.fingerprint("start", params)
    supervisor = ctx.supervisor
    run_id = supervisor.run_id_of(params.namespace, params.client_request_id)
    if supervisor.roster.at_hand(run_id) is not None:
        ctx.notifier.names(run_id)
    with ctx.waits.granted(params.wait_ms) as wait_ms:
        known = await supervisor.started(params.namespace, params.client_request_id, print_of_it, wait_ms)
    if known is not None:
        return _answer(ctx, known)
    workspace = ctx.workspace(params.workspace)
    event = ev.RunStarted(
        client_request_id=params.client_request_id,
        namespace=params.namespace,
        fingerprint=print_of_it,
        definition=await ctx.define(params, workspace),
        input=params.input,
        epoch=supervisor.rules.epoch,
        drive=params.drive,
        recovery=params.recovery,
        workspace=workspace,
        labels=params.labels,
    )
    ctx.notifier.names(run_id)  # before there is one, to be told of its first event
    try:
        with ctx.waits.granted(params.wait_ms) as wait_ms:
            return _answer(ctx, await supervisor.start(event, wait_ms))
    finally:
        if supervisor.roster.at_hand(run_id) is None:
            ctx.notifier.forgets(run_id)


async def step(ctx: Context, params: wire.StepParams) -> dict[str, Any]:
    return await _submit(ctx, "step", params, StepCommand(), params.wait_ms)


async def resume(ctx: Context, params: wire.ResumeParams) -> dict[str, Any]:
    return await _submit(ctx, "resume", params, ResumeCommand(plan_digest=params.plan_digest), params.wait_ms)


async def approve(ctx: Context, params: wire.ApproveParams) -> dict[str, Any]:
    if params.arguments is not None:
        raise errors.InvalidParams("edited arguments are not available in this version", path="$.arguments")
    if params.scope != "call":
        raise errors.InvalidParams("only the scope `call` is available in this version", path="$.scope")
    result = params.result
    if isinstance(result, str):
        result = {"content": [{"type": "text", "text": result}]}
    command = ApproveCommand(
        approval_id=params.approval_id,
        digest=params.digest,
        decision=params.decision,
        result=result,
        extend=params.extend.amounts() if params.extend is not None else {},
        comment=params.comment,
        decided_by=params.decided_by,
    )
    return await _submit(ctx, "approve", params, command, 0)


async def cancel(ctx: Context, params: wire.CancelParams) -> dict[str, Any]:
    if params.compensate:
        raise errors.InvalidParams("compensation is not available in this version", path="$.compensate")
    return await _submit(ctx, "cancel", params, CancelCommand(reason=params.reason), 0)


async def status(ctx: Context, params: wire.StatusParams) -> dict[str, Any]:
    supervisor = ctx.supervisor
    wire.check_status(params)
    if params.run_id is None and params.client_request_id is None:
        return _health(ctx)
    if params.run_id is not None:
        run_id = params.run_id
    else:
        run_id = supervisor.run_id_of(params.namespace, params.client_request_id or "")
    actor = await _reach(supervisor, run_id)
    ctx.notifier.names(run_id)
    if actor.state is None:
        return {"run": _run(ctx, actor)}
    shown = status_view(actor.state, supervisor.rules.epoch, busy=actor.busy) | {"run": _run(ctx, actor)}
    shown |= _input_shown(actor.state.input)
    current = ctx.current(actor.state.definition)
    differs = None if current is None else current != actor.state.definition_digest
    shown["definition"] |= {"current": current, "differs": differs}
    if params.client_request_id is not None:
        shown["request"] = request_view(actor.state.requests.get(params.client_request_id))
    return shown


async def list_runs(ctx: Context, params: wire.ListParams) -> dict[str, Any]:
    """Oldest first. The cursor is the place after the last one given; runs never change their place."""
    supervisor = ctx.supervisor
    if params.namespace is not None:
        wire.check_namespace(params.namespace)
    page = _Page(ctx, params)
    place = last = _place(params.cursor, supervisor.journal.store_id)
    while True:
        rows, end = await _rows(supervisor, params, place)
        for where, run_id, found in rows:
            if page.full and where != last:  # two runs at one place, which an import can leave, come together
                return page.shown(f"{supervisor.journal.store_id}.{where}")
            await page.add(run_id, found)
            last = where
        if end is None:
            return page.shown(None)
        place = end


_Row = tuple[int, str, Actor | Summary]


async def _rows(supervisor: Supervisor, params: wire.ListParams, place: int) -> tuple[list[_Row], int | None]:
    """Some rows from `place` on, in order, and the place after the last one; None where there are no others.

    Memory first, then the index: a run that a checkpoint takes out of memory meanwhile is in the index by then."""
    roster = supervisor.roster
    present = list(roster.in_memory(place))
    if params.open_approvals:
        filed = []  # a run that has ended asks for nothing
    else:
        filed = await supervisor.archive.ended(
            place, _CHUNK, namespace=params.namespace, agent=params.agent, statuses=params.status or ()
        )
    end = filed[-1][1].place + 1 if len(filed) == _CHUNK else None
    here = {run_id for _, run_id, _ in present}
    rows: list[_Row] = [(heads.place, i, heads) for i, heads in filed if i not in here]
    for row in present:
        if end is not None and row[0] >= end:
            break
        if _listed(supervisor, row[2], params) and not supervisor.archive.deleted(row[1]):
            rows.append(row)
    return sorted(rows, key=lambda row: row[0]), end


class _Page:
    """What one answer of `list` holds so far."""

    def __init__(self, ctx: Context, params: wire.ListParams) -> None:
        self._ctx, self._params = ctx, params
        self._runs: list[dict[str, Any]] = []
        self._approvals: list[dict[str, Any]] = []
        self._size = 0

    @property
    def full(self) -> bool:
        return len(self._runs) >= self._params.limit or self._size >= PAGE_BYTES

    async def add(self, run_id: str, found: Actor | Summary) -> None:
        if isinstance(found, Summary) and self._params.open_approvals:
            found = await self._ctx.supervisor.find(run_id)  # a summary names the questions, and does not ask them
            if found.state is None or not found.state.open_approvals():
                return  # it asks for something else, or does not ask any more
        if isinstance(found, Summary):
            self._runs.append(view_of(bytes(found.body)))
            self._size += len(bytes(found.body))
            return
        self._runs.append(_run(self._ctx, found))
        self._size += len(_encode(self._runs[-1]))
        if self._params.open_approvals and found.state is not None:
            asked = [approval_view(run_id, a) for a in found.state.open_approvals()]
            self._approvals += asked
            self._size += len(_encode(asked))

    def shown(self, cursor: str | None) -> dict[str, Any]:
        page: dict[str, Any] = {"runs": self._runs}
        if self._params.open_approvals:
            page["approvals"] = self._approvals
        if cursor is not None:
            page["nextCursor"] = cursor
        return page


async def events(ctx: Context, params: wire.EventsParams) -> dict[str, Any]:
    wire.check_run_id(params.run_id)
    supervisor = ctx.supervisor
    actor = await _reach(supervisor, params.run_id)
    ctx.notifier.names(params.run_id)
    last = actor.state.last_seq if actor.state is not None else 0
    if params.after_seq > last:
        raise errors.CursorInvalid(
            f"the run's last event is {last}: the cursor is of another store, or of a later copy of this one; begin with 0",
            lastSeq=last,
        )
    found: list[dict[str, Any]] = []
    size, after = 0, params.after_seq
    while after < last and len(found) < params.limit and size < PAGE_BYTES:
        records = await _records(supervisor, actor, after)
        # What follows the last event of a damaged run cannot be read.
        bodies = (record.body for record in records if record.first <= last)
        for element in (e for body in bodies for e in elements(actor.run_id, ev.decode(body))):
            if len(found) >= params.limit or size >= PAGE_BYTES:
                break
            if after < element["seq"] <= last:
                found.append(element)
                size += len(_encode(element))
                after = element["seq"]
        if not records:
            break
    return {"events": found, "lastSeq": last}


async def _records(supervisor: Supervisor, actor: Actor, after: int) -> list[Recorded]:
    """Some records, from the one that holds event `after` + 1: from memory, else from the run's files."""
    if after < actor.filed:
        return await supervisor.archive.records(actor.run_id, after)
    return [record for record in actor.tail if record.last > after]


async def _reach(supervisor: Supervisor, run_id: str) -> Actor:
    """For those who only look: a run that was deleted is one that is not there."""
    try:
        return await supervisor.find(run_id)
    except errors.KeyExpired as gone:
        store_id = supervisor.journal.store_id
        raise errors.NotFound("the run was deleted", runId=run_id, deleted=True, storeId=store_id) from gone


async def shutdown(ctx: Context, params: wire.ShutdownParams) -> dict[str, Any]:
    ctx.shutdown(params.grace_ms)
    return {}


def _status_at_hand(ctx: Context, params: Any) -> bool:
    """Whether it can be answered from memory; params are as they came, and may be anything."""
    if type(params) is not dict or not ctx.supervisor.archive.any_held:
        return True
    run_id, key = params.get("runId"), params.get("clientRequestId")
    if type(run_id) is not str:
        if type(key) is not str:
            return True
        namespace = params.get("namespace", "")
        run_id = ctx.supervisor.run_id_of(namespace if type(namespace) is str else "", key)
    return ctx.supervisor.roster.at_hand(run_id) is not None


def _all_at_hand(ctx: Context, _params: Any) -> bool:
    return not ctx.supervisor.archive.any_held


def _events_at_hand(ctx: Context, params: Any) -> bool:
    if type(params) is not dict or not ctx.supervisor.archive.any_held:
        return True
    run_id, after = params.get("runId"), params.get("afterSeq", 0)
    actor = ctx.supervisor.roster.at_hand(run_id) if type(run_id) is str else None
    return actor is not None and type(after) is int and after >= actor.filed


METHODS: dict[str, Method] = {
    "initialize": Method(wire.InitializeParams, initialize, mutating=False, inline=True),
    "start": Method(wire.StartParams, start, mutating=True, inline=False),
    "step": Method(wire.StepParams, step, mutating=True, inline=False),
    "resume": Method(wire.ResumeParams, resume, mutating=True, inline=False),
    "approve": Method(wire.ApproveParams, approve, mutating=True, inline=False, urgent=True),
    "status": Method(wire.StatusParams, status, mutating=False, inline=True, at_hand=_status_at_hand),
    "list": Method(wire.ListParams, list_runs, mutating=False, inline=True, at_hand=_all_at_hand),
    "events": Method(wire.EventsParams, events, mutating=False, inline=True, at_hand=_events_at_hand),
    "cancel": Method(wire.CancelParams, cancel, mutating=True, inline=False, urgent=True),
    "shutdown": Method(wire.ShutdownParams, shutdown, mutating=False, inline=True),
}


async def _submit(
    ctx: Context,
    method: Literal["step", "resume", "approve", "cancel"],
    params: wire.StepParams | wire.ResumeParams | wire.ApproveParams | wire.CancelParams,
    command: Command,
    wait_ms: int,
) -> dict[str, Any]:
    wire.check_keyed(params)
    await ctx.supervisor.find(params.run_id)
    ctx.notifier.names(params.run_id)
    ask = Ask(
        key=params.client_request_id, method=method, fingerprint=wire.fingerprint(method, params), command=command
    )
    with ctx.waits.granted(wait_ms) as granted:
        return _answer(ctx, await ctx.supervisor.submit(params.run_id, ask, granted))


def _answer(ctx: Context, answer: Answer) -> dict[str, Any]:
    """The recorded decision, and a live view of the run. Not settled yet: the step as it stands, and the key joins it."""
    run = _run(ctx, answer.actor)
    if answer.decision is not None:
        return {**answer.decision, "run": run, "replayed": answer.replayed}
    state = answer.actor.state
    moving = state.step(state.step_request_step) if state is not None and state.step_request_step else None
    shown = step_view(moving) if moving is not None else None
    return {"step": shown, "run": run, "replayed": False, "request": {"method": "step", "state": "in_progress"}}


def _run(ctx: Context, actor: Actor) -> dict[str, Any]:
    if actor.state is None:
        return {"runId": actor.run_id, "status": "damaged", "damaged": actor.damaged}
    view = run_view(actor.state, ctx.supervisor.rules.epoch, busy=actor.busy)
    if actor.failed is not None:
        # What could be read is shown; whatever its status was, nothing moves any more.
        view["status"] = ctx.supervisor.status_of(actor)
        view["damaged"] = actor.damaged or actor.failed.message
    return view


def _input_shown(given: str | tuple[dict[str, Any], ...]) -> dict[str, Any]:
    """What the run was given, as long as it is short; its first event has all of it."""
    if isinstance(given, str):
        if len(given) <= INPUT_SHOWN:
            return {"input": given}
        return {"input": given[:INPUT_SHOWN] + INPUT_CUT, "inputTruncated": True}
    whole: list[dict[str, Any]] = []
    size = 0
    for part in given:
        size += len(_encode(part))
        if size > INPUT_SHOWN:
            return {"input": whole, "inputTruncated": True}
        whole.append(part)
    return {"input": given}


def _health(ctx: Context) -> dict[str, Any]:
    supervisor = ctx.supervisor
    return {
        **ctx.health(),
        "storeId": supervisor.journal.store_id,
        "epoch": supervisor.journal.epoch,
        "counts": {status: count for status, count in supervisor.roster.counts.items() if count},
        "needsAttention": supervisor.roster.attention(MOST_ATTENTION),
    }


def _listed(supervisor: Supervisor, found: Actor | Summary, params: wire.ListParams) -> bool:
    if isinstance(found, Summary):
        namespace, agent, status, asks = found.namespace, found.agent, found.status, found.asks
    elif found.state is not None:
        namespace, agent = found.state.namespace, found.state.definition.agent
        status, asks = supervisor.status_of(found), bool(found.state.open_approvals())
    else:
        namespace, agent, status, asks = None, None, "damaged", False
    if params.status and status not in params.status:
        return False
    if params.open_approvals and not asks:
        return False
    return params.namespace in {None, namespace} and params.agent in {None, agent}


def _place(cursor: str | None, store_id: str) -> int:
    if cursor is None:
        return 0
    store, _, place = cursor.rpartition(".")
    if store != store_id or not _PLACE.fullmatch(place):
        raise errors.CursorInvalid("the cursor is not one of this store; begin without one")
    return int(place)
