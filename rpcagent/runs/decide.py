"""`decide(state, in_flight, rules, now) -> Decision`: what comes next. Pure, total and ordered.

Knows: the run's state, the attempts this process is performing, the rules and the time it is given. Does not know: how
anything is performed or stored, and whether the process has just started. There is no recovery here: an intent without an
outcome that is not in flight is *in doubt*, whatever interrupted it, and its effect class says what follows.

`advance` repeats `decide` until nothing more follows, so that the outcome of one step and the intent of the next share one
commit. What it returns to append must be durable before anything it returns to perform is begun.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Any, Literal

import msgspec

from rpcagent.ids import digest_of, effect_key, step_id
from rpcagent.policy import approvals, budgets
from rpcagent.policy import rules as policy
from rpcagent.runs import events as ev
from rpcagent.runs.context import context_after_turn
from rpcagent.runs.definition import Rule
from rpcagent.runs.fold import fold
from rpcagent.runs.instants import after
from rpcagent.runs.state import Approval, RunState, Step, question_of
from rpcagent.runs.transitions import IllegalTransition

InFlight = frozenset[tuple[str, int]]
"""(step id, attempt) of everything that this process is performing, look-ups included; empty after a start."""

MOST_ROUNDS = 10_000
MOST_REPAIRS = 3
"""Answers in a row that could not be used and are answered with what was wrong; one more, and the run fails."""


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """What is true of this process and not of the run: the store's epoch, today's policy by agent, and limits.

    `draining`: the process is about to end; outcomes are recorded, nothing new begins.
    """

    epoch: int
    present: dict[str, tuple[Rule, ...]] = {}
    reads_at_once: int = 8
    draining: bool = False


class ModelAction(msgspec.Struct, frozen=True):
    step_id: str
    attempt: int


class ToolAction(msgspec.Struct, frozen=True):
    step_id: str
    attempt: int


class LookUpAction(msgspec.Struct, frozen=True):
    """Asks the outside about an earlier attempt; reads only, so it needs no intent."""

    step_id: str
    attempt: int


Action = ModelAction | ToolAction | LookUpAction


class Decision(msgspec.Struct, frozen=True):
    """`append` must be durable before `perform` begins. Both empty: wait for a report, a request, or `wake`."""

    append: tuple[ev.AnyEvent, ...] = ()
    perform: tuple[Action, ...] = ()
    wake: datetime | None = None


class Advance(msgspec.Struct, frozen=True):
    """`state` is a candidate: it is published only when `append` is durable."""

    state: RunState
    append: tuple[ev.AnyEvent, ...]
    perform: tuple[Action, ...]
    wake: datetime | None


def advance(state: RunState, in_flight: InFlight, rules: Rules, now: datetime) -> Advance:
    """Everything that follows from `state` until something must be waited for."""
    now = max(now, state.last_at)
    appended: list[ev.AnyEvent] = []
    performed: list[Action] = []
    for _ in range(MOST_ROUNDS):
        decision = decide(state, in_flight, rules, now)
        if not decision.append and not decision.perform:
            return Advance(state, tuple(appended), tuple(performed), decision.wake)
        for event in decision.append:
            state = fold(state, event, now)
        appended += decision.append
        performed += decision.perform
        in_flight |= {(action.step_id, action.attempt) for action in decision.perform}
    raise IllegalTransition(f"{state.run_id}: decide does not come to rest")


def open_pass(state: RunState, rules: Rules, now: datetime) -> tuple[ev.AnyEvent, ...]:
    """What a newly opened store owes a run before any answer, in every recovery mode, touching nothing outside.

    Attempts that were in flight are interrupted, unknowable ones UNKNOWN with their question, due approvals expired.
    """
    now = max(now, state.last_at)
    appended: list[ev.AnyEvent] = []
    if not state.ended and any(s.status == "started" and not s.interrupted for s in state.steps.values()):
        appended.append(ev.RunReopened(epoch=rules.epoch))
        state = fold(state, appended[0], now)
    while events := _settle_step_request(state) or _owed(state, now):
        for event in events:
            state = fold(state, event, now)
        appended += events
    return tuple(appended)


def _owed(state: RunState, now: datetime) -> tuple[ev.AnyEvent, ...]:
    return () if state.ended else _expire(state, now) or _doubt(state, frozenset(), now)


def decide(state: RunState, in_flight: InFlight, rules: Rules, now: datetime) -> Decision:
    """The next thing to append and perform, or what to wait for. The order of the cases is the order of precedence."""
    if events := _settle_step_request(state):
        return Decision(append=events)
    if state.ended:
        return Decision()
    if events := _expire(state, now) or _doubt(state, in_flight, now):
        return Decision(append=events)
    if state.phase == "cancelling":
        return _cancel(state, in_flight)
    if state.held(rules.epoch):
        looks = _look_ups(state, in_flight, rules, now) if state.recovery == "confirm" else ()
        return Decision(perform=looks, wake=_wake(state, now))
    if looks := _look_ups(state, in_flight, rules, now):
        return Decision(perform=looks)
    if state.stopping is not None:
        if in_flight:
            return Decision()
        return Decision(append=(_failed(state, state.stopping),))
    if any(a.kind != "tool_call" for a in state.open_approvals()):
        return Decision(wake=_wake(state, now))  # in doubt or in question: only look-ups run
    return _next(state, in_flight, rules, now)


# What is owed whatever the mode: nothing here touches the outside


def _settle_step_request(state: RunState) -> tuple[ev.AnyEvent, ...]:
    """Whatever ends a step settles the request that asked for it, in the same commit."""
    key = state.step_request
    if key is None:
        return ()
    shown: dict[str, Any] | None = None
    step = state.step(state.step_request_step) if state.step_request_step else None
    if step is not None and (step.settled or step.status == "unknown"):
        asked = (a for a in state.open_approvals() if a.kind == "unknown_outcome" and a.step_id == step.step_id)
        shown = step_decision(step, next(asked, None))
    elif (question := question_of(state)) is not None:
        shown = gate_decision(question)  # no request is held open for a person
    elif not state.ended:
        return ()
    request = state.requests[key]
    return (
        ev.RequestSettled(
            client_request_id=key, method=request.method, fingerprint=request.fingerprint, decision={"step": shown}
        ),
    )


def step_decision(step: Step, question: Approval | None) -> dict[str, Any]:
    """How a step ended, as the request that asked for it is answered for ever; `question`: the one about its outcome."""
    shown: dict[str, Any] = {
        "stepId": step.step_id,
        "kind": step.kind,
        "name": step.name,
        "status": step.status,
        "attempt": step.attempt,
    }
    if step.kind == "tool_call":
        shown |= {"effect": step.effect, "arguments": step.arguments}
    optional = {
        "approvalId": question.approval_id if question is not None else step.approval_id,
        "result": step.result,
        "error": step.error,
        "source": step.source,
        "usage": step.usage,
    }
    shown.update(msgspec.to_builtins({k: v for k, v in optional.items() if v is not None}))
    return shown


def gate_decision(question: Approval) -> dict[str, Any]:
    """A step that reached a question instead of an action."""
    return {
        "stepId": question.step_id,
        "kind": "gate",
        "name": question.kind,
        "status": "waiting_approval",
        "attempt": 0,
        "approvalId": question.approval_id,
    }


def _expire(state: RunState, now: datetime) -> tuple[ev.AnyEvent, ...]:
    """Silence is never consent: an expired question is a named state, allowed but unconsumed ones included."""
    for approval in state.approvals.values():
        if approval.expires_at is None or approval.expires_at > now or state.phase != "active":
            continue
        expired = ev.ApprovalExpired(approval_id=approval.approval_id)
        step = state.steps.get(approval.step_id or "")
        if step is not None:
            return (expired, *_refuse_expired(state, expired, step, now))
        return (
            expired,
            _failed(state, ev.Trouble(kind="expired", message=f"the {approval.kind} question expired")),
        )
    return ()


def _refuse_expired(state: RunState, expired: ev.ApprovalExpired, step: Step, now: datetime) -> tuple[ev.AnyEvent, ...]:
    after_it = fold(state, expired, now)
    return _refuse(after_it, step, "expired", "the question about it expired unanswered")


def _doubt(state: RunState, in_flight: InFlight, now: datetime) -> tuple[ev.AnyEvent, ...]:
    """Intents without an outcome that nobody performs: the interruption, and UNKNOWN where only a person can tell."""
    for step in state.steps.values():
        # A later attempt did nothing, or is not allowed yet; an earlier one may have acted.
        waits = step.doubt and step.status in {"not_started", "waiting_approval"}
        if (step.status != "started" and not waits) or (step.step_id, step.attempt) in in_flight:
            continue
        if not step.interrupted and not waits:
            return (ev.AttemptInterrupted(step_id=step.step_id, attempt=step.attempt, reason="restart"),)
        if _unknowable(state, step, now):
            return _unknown(state, step, step.error)
    return ()


def _unknown(state: RunState, step: Step, error: ev.Trouble | None) -> tuple[ev.AnyEvent, ...]:
    """Whether it happened is asked; that it may run (again) no longer is."""
    unknown = ev.StepUnknown(step_id=step.step_id, attempt=step.attempt, error=error)
    events = (unknown, approvals.unknown_outcome(state, step))
    approval = state.approvals.get(step.approval_id or "")
    if approval is None:
        return events
    return (ev.ApprovalVoided(approval_id=approval.approval_id, reason="whether it happened is asked instead"), *events)


def _unknowable(state: RunState, step: Step, now: datetime) -> bool:
    """Nothing that may be done without asking can settle this interrupted attempt."""
    if step.kind == "model_call" or step.effect == "read_only":
        return False
    if step.effect == "reconcilable" and step.look_up == "absent":
        return False  # known not to have happened
    if state.phase == "cancelling" or state.stopping is not None or step.effect == "at_most_once":
        return True
    if step.effect == "reconcilable":
        return step.look_up == "unsure"
    spec = state.definition.tool(step.name)
    if spec is None or spec.key_ttl_ms is None or step.first_started_at is None:
        return spec is None
    return now >= after(step.first_started_at, spec.key_ttl_ms)


def _cancel(state: RunState, in_flight: InFlight) -> Decision:
    if in_flight:
        return Decision()  # asked to stop; their outcomes, or their interruption, are reported within the grace time
    return Decision(append=(ev.RunCancelled(unresolved=_unresolved(state)),))


def _unresolved(state: RunState) -> tuple[str, ...]:
    return tuple(s.step_id for s in state.steps.values() if s.status == "unknown" and not s.abandoned)


def _failed(state: RunState, error: ev.Trouble) -> ev.RunFailed:
    return ev.RunFailed(error=error, unresolved=_unresolved(state))


def _look_ups(state: RunState, in_flight: InFlight, rules: Rules, now: datetime) -> tuple[Action, ...]:
    if rules.draining:
        return ()
    return tuple(
        LookUpAction(step.step_id, step.attempt)
        for step in state.steps.values()
        if step.status == "started"
        and step.interrupted
        and step.effect == "reconcilable"
        and step.kind == "tool_call"
        and step.look_up != "absent"
        and (step.retry_at is None or step.retry_at <= now)
        and (step.step_id, step.attempt) not in in_flight
    )


def _wake(state: RunState, now: datetime) -> datetime | None:
    """The earliest instant at which time alone changes something."""
    due = [a.expires_at for a in state.approvals.values() if a.expires_at is not None]
    due += [s.retry_at for s in state.steps.values() if s.retry_at is not None and s.retry_at > now]
    return min(due, default=None)


# What may act


def _next(state: RunState, in_flight: InFlight, rules: Rules, now: datetime) -> Decision:
    model = state.steps[state.model_step] if state.model_step else None
    if model is None or not model.settled:
        return _model_call(state, model, in_flight, rules, now)
    if model.status == "failed":
        return Decision(append=(_failed(state, model.error or ev.Trouble(kind="model")),))
    if events := _gates(state, rules, now):
        return Decision(append=events)
    if opened := state.open_steps():
        return _calls(state, opened, in_flight, rules, now)
    if state.repairs > MOST_REPAIRS:
        told = state.problem or "every call that it asked for was one that cannot be run"
        message = f"{state.repairs} answers in a row could not be used. The last one: {told}"
        return Decision(append=(_failed(state, ev.Trouble(kind="bad_output", message=message)),))
    if state.turn or state.problem:
        return _model_call(state, None, in_flight, rules, now)
    answer = state.messages[-1].content
    return Decision(append=(ev.RunCompleted(output=answer if isinstance(answer, str) else ""),))


def _gates(state: RunState, rules: Rules, now: datetime) -> tuple[ev.AnyEvent, ...]:
    """Policy for all open calls of one answer together: questions open side by side, whatever the order of execution."""
    refused: list[ev.AnyEvent] = []
    asked: list[ev.AnyEvent] = []
    for step in state.open_steps():
        if step.problem and step.status == "not_started":
            refused.append(ev.StepDenied(step_id=step.step_id, reason="invalid", message=step.problem))
            continue
        spec = state.spec_of(step)
        if spec is None or not (step.status in {"not_started", "waiting_approval"} or _would_go_again(step)):
            continue
        approval = state.approval(step.approval_id) if step.approval_id else None
        if approval is not None and approval.status == "denied":
            refused += _refuse(state, step, "person", _words(approval))
            continue
        verdict, rule = policy.stricter(
            state.definition.rules, rules.present.get(state.definition.agent), spec, step.arguments, state.workspace
        )
        if verdict == "deny":
            refused += _refuse(state, step, "policy", _DENIED)
        elif verdict == "ask" and step.approval_id is None and step.status == "not_started":
            asked.append(approvals.tool_call(state, step, rule, now, ahead=len(asked)))
    return tuple(refused) or tuple(asked)


def _would_go_again(step: Step) -> bool:
    """Interrupted, and sent again without a person: what policy says today counts for that, too."""
    if step.status != "started" or not step.interrupted:
        return False
    return step.effect in {"read_only", "idempotent"} or step.look_up == "absent"


def _words(approval: Approval) -> str:
    return "a person denied it" + (f": {approval.comment}" if approval.comment else "")


_DENIED = "policy denies this call"


def _refuse(
    state: RunState, step: Step, reason: Literal["policy", "person", "expired"], message: str
) -> tuple[ev.AnyEvent, ...]:
    """It does not run, or not again. Where an earlier attempt may have acted, whether it did is asked."""
    error = ev.Trouble(kind=reason, message=message)
    if step.doubt:
        return _unknown(state, step, error)
    if step.status == "started":
        return (ev.StepFailed(step_id=step.step_id, attempt=step.attempt, error=error),)
    denied = ev.StepDenied(step_id=step.step_id, reason=reason, message=message)
    approval = state.approvals.get(step.approval_id or "")
    if approval is None:
        return (denied,)
    return (ev.ApprovalVoided(approval_id=approval.approval_id, reason=message), denied)


def _calls(state: RunState, opened: list[Step], in_flight: InFlight, rules: Rules, now: datetime) -> Decision:
    """Calls run in the order given. A maximal run of neighbouring reads may go side by side; an effect goes alone, when
    all earlier calls are settled, and later ones wait for it."""
    room = rules.reads_at_once - len(in_flight)
    for step in _side_by_side(state, opened[0]):
        if room > 0 and (step.step_id, step.attempt) not in in_flight and _can_start(state, step, now):
            return _start_call(state, step, in_flight, rules, now)
    return Decision(wake=_wake(state, now))


def _side_by_side(state: RunState, first: Step) -> Iterator[Step]:
    """The first open call, and in auto drive the open reads after it up to the next effect, settled effects included: so
    order is kept."""
    yield first
    if first.effect != "read_only" or state.drive != "auto":
        return
    for ident in state.turn[state.turn.index(first.step_id) + 1 :]:
        step = state.steps[ident]
        if step.effect != "read_only":
            return
        if not step.settled:
            yield step


def _can_start(state: RunState, step: Step, now: datetime) -> bool:
    if step.retry_at is not None and step.retry_at > now and not _trouble(state, step):
        return False
    if step.status == "waiting_approval":
        approval = state.approvals.get(step.approval_id or "")
        return approval is not None and approval.status == "allowed"
    if step.status == "started" and step.interrupted:
        return step.effect != "reconcilable" or step.look_up == "absent"
    return step.status == "not_started"


def _may_begin(state: RunState, step: Step | None) -> bool:
    """In manual drive only a `step` request begins anything; what it began goes on by itself to its end."""
    if state.drive == "auto":
        return True
    if step is not None and state.step_request is not None and state.step_request_step == step.step_id:
        return True
    return state.step_request is not None and state.step_request_step is None


def _trouble(state: RunState, step: Step) -> bool:
    """Retried for long enough: its last attempt began when the bound was over. A person is asked; the run does not fail
    for trouble around it."""
    return step.asking or (
        step.status in {"not_started", "started"}
        and step.waiting_since is not None
        and step.started_at is not None
        and step.started_at >= after(step.waiting_since, state.definition.model.retry_for_ms)
    )


def _hold_up(state: RunState, step: Step | None, in_flight: InFlight, rules: Rules, now: datetime) -> Decision | None:
    """What stands between a step and its next attempt: the process's end, the drive, lasting trouble, the budget."""
    if rules.draining or not _may_begin(state, step):
        return Decision(wake=_wake(state, now))
    if step is not None and _trouble(state, step):
        return Decision(append=(approvals.retry(state, step),))
    reserve = state.definition.model.max_output_tokens if step is None or step.kind == "model_call" else 0
    limit = budgets.exceeded(state, new_step=step is None or step.attempt == 0, reserve_tokens=reserve)
    if limit is None:
        return None
    return Decision() if in_flight else Decision(append=(approvals.budget(state, limit),))


def _start_call(state: RunState, step: Step, in_flight: InFlight, rules: Rules, now: datetime) -> Decision:
    if held := _hold_up(state, step, in_flight, rules, now):
        return held
    request_hash = digest_of([step.name, step.arguments])
    approval = state.approvals.get(step.approval_id or "")
    started = ev.ToolStarted(
        step_id=step.step_id,
        attempt=step.attempt + 1,
        request_hash=request_hash,
        key=step.key or effect_key(step.step_id, request_hash),
        approval_id=approval.approval_id if approval is not None and approval.status == "allowed" else None,
    )
    return Decision(append=(started,), perform=(ToolAction(step.step_id, step.attempt + 1),))


def _model_call(state: RunState, step: Step | None, in_flight: InFlight, rules: Rules, now: datetime) -> Decision:
    """`step` None: a new one, after the present turn."""
    if step is not None and ((step.step_id, step.attempt) in in_flight or not _can_start(state, step, now)):
        return Decision(wake=_wake(state, now))
    if held := _hold_up(state, step, in_flight, rules, now):
        return held
    ident = step.step_id if step else step_id(state.run_id, state.step_count + 1)
    attempt = step.attempt + 1 if step else 1
    started = ev.ModelCallStarted(
        step_id=ident,
        attempt=attempt,
        request_hash=context_after_turn(state).context_hash if step is None else state.context_hash,
        reserved_tokens=state.definition.model.max_output_tokens,
    )
    return Decision(append=(started,), perform=(ModelAction(ident, attempt),))
