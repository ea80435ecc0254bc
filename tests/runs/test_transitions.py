"""Every row of the three tables, and every row that is missing."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, get_args

import pytest
from msgspec.structs import replace
from rpcagent.runs import events as ev
from rpcagent.runs.fold import apply, fold
from rpcagent.runs.state import Approval, ApprovalStatus, RunPhase, RunState, Step, StepStatus
from rpcagent.runs.transitions import APPROVAL_TABLE, RUN_TABLE, STEP_TABLE, IllegalTransition

from .story import NOON, Story, sid

TROUBLE = ev.Trouble(kind="busy")
ONE: dict[str, Any] = {"step_id": sid(1), "attempt": 1}
QUESTION = "apr_1"
STEP_EVENTS: dict[type[ev.Event], ev.AnyEvent] = {
    ev.ModelCallStarted: ev.ModelCallStarted(step_id=sid(1), attempt=2, request_hash="h"),
    ev.ModelAnswered: ev.ModelAnswered(**ONE),
    ev.ToolStarted: ev.ToolStarted(step_id=sid(1), attempt=2, request_hash="h", key="k"),
    ev.ToolCompleted: ev.ToolCompleted(**ONE, result={}),
    ev.StepFailed: ev.StepFailed(**ONE, error=TROUBLE),
    ev.AttemptFailed: ev.AttemptFailed(**ONE, error=TROUBLE, retry_at=NOON, wait_ms=0),
    ev.AttemptInterrupted: ev.AttemptInterrupted(**ONE, reason="restart"),
    ev.LookedUp: ev.LookedUp(**ONE, answer="absent"),
    ev.StepUnknown: ev.StepUnknown(**ONE),
    ev.StepDenied: ev.StepDenied(step_id=sid(1), reason="policy"),
    ev.ApprovalRequested: ev.ApprovalRequested(
        approval_id=QUESTION, kind="tool_call", digest="d", subject={}, choices=("allow", "deny"), step_id=sid(1)
    ),
}
STATUSES: tuple[StepStatus, ...] = get_args(StepStatus)
PHASES: tuple[RunPhase, ...] = get_args(RunPhase)
APPROVALS: tuple[ApprovalStatus, ...] = get_args(ApprovalStatus)
OTHER_EVENTS: tuple[ev.AnyEvent, ...] = (
    ev.RequestAccepted(client_request_id="k", method="step", fingerprint="f"),
    ev.RequestSettled(client_request_id="k", method="cancel", fingerprint="f", decision={}),
    ev.LateOutcome(**ONE),
    ev.ApprovalDecided(approval_id=QUESTION, decision="allow"),
    ev.ApprovalExpired(approval_id=QUESTION),
    ev.ApprovalVoided(approval_id=QUESTION, reason="policy"),
    ev.RunReopened(epoch=2),
    ev.RunReleased(epoch=2, plan_digest="d"),
    ev.CancelRequested(),
    ev.RunCancelled(),
    ev.RunCompleted(output="x"),
    ev.RunFailed(error=TROUBLE),
    ev.RunDeleted(status="completed"),
)


def with_step(status: StepStatus, *, interrupted: bool = False, **changes: Any) -> RunState:
    step = Step(
        step_id=sid(1), kind="tool_call", name="t.pay", status=status, attempt=1, interrupted=interrupted, **changes
    )
    return replace(Story().state, steps={sid(1): step}, turn=(sid(1),), model_step=None)


def with_question(status: ApprovalStatus, step: StepStatus = "waiting_approval") -> RunState:
    question = Approval(
        approval_id=QUESTION, kind="tool_call", digest="d", subject={}, choices=("allow", "deny"), requested_at=NOON,
        step_id=sid(1), status=status, decision=None if status == "open" else "allow",
    )  # fmt: skip
    live = status in {"open", "allowed"}
    state = with_step(step, approval_id=QUESTION)
    return replace(state, approvals={QUESTION: question} if live else {}, closed={} if live else {QUESTION: question})


@pytest.mark.parametrize("kind", STEP_EVENTS, ids=lambda k: k.__name__)
@pytest.mark.parametrize("status", STATUSES)
def test_a_step_moves_by_its_table_and_by_nothing_else(status: StepStatus, kind: type[ev.Event]):
    interrupted = status == "started" and kind in {ev.ModelCallStarted, ev.ToolStarted, ev.LookedUp}
    state = with_step(status, interrupted=interrupted)
    expected = STEP_TABLE.get((status, kind))
    if expected is None:
        with pytest.raises(IllegalTransition):
            fold(state, STEP_EVENTS[kind], NOON)
        return
    after = fold(state, STEP_EVENTS[kind], NOON)
    assert after.steps[sid(1)].status == expected
    assert after.last_seq == state.last_seq + 1


def test_the_step_table_names_no_event_that_the_test_leaves_out():
    assert {kind for _, kind in STEP_TABLE} == {*STEP_EVENTS, ev.ApprovalVoided}
    assert len(STEP_TABLE) == 19


@pytest.mark.parametrize("kind", [ev.ModelCallStarted, ev.ToolStarted])
def test_a_second_attempt_never_begins_while_the_first_is_being_performed_f079(kind: type[ev.Event]):
    with pytest.raises(IllegalTransition):
        fold(with_step("started"), STEP_EVENTS[kind], NOON)


def test_an_attempt_is_not_interrupted_twice_and_not_looked_up_while_it_is_performed():
    with pytest.raises(IllegalTransition):
        fold(with_step("started", interrupted=True), STEP_EVENTS[ev.AttemptInterrupted], NOON)
    with pytest.raises(IllegalTransition):
        fold(with_step("started"), STEP_EVENTS[ev.LookedUp], NOON)


@pytest.mark.parametrize("attempt", [0, 2, 3])
@pytest.mark.parametrize("kind", [ev.ToolCompleted, ev.StepFailed, ev.AttemptFailed, ev.StepUnknown])
def test_an_outcome_of_another_attempt_is_illegal(kind: type[ev.Event], attempt: int):
    event: Any = STEP_EVENTS[kind]
    with pytest.raises(IllegalTransition):
        fold(with_step("started"), replace(event, attempt=attempt), NOON)


@pytest.mark.parametrize("event", [*STEP_EVENTS.values(), *OTHER_EVENTS], ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("phase", PHASES)
def test_a_run_takes_an_event_only_in_the_phases_of_its_row(phase: RunPhase, event: ev.AnyEvent):
    state = replace(with_question("open"), phase=phase)
    try:
        fold(state, event, NOON)
    except IllegalTransition as error:
        refused_by_phase = "in phase" in str(error)
        assert refused_by_phase == (phase not in RUN_TABLE[type(event)])
    else:
        assert phase in RUN_TABLE[type(event)]


def test_the_run_table_has_a_row_for_every_event_but_the_first():
    assert set(RUN_TABLE) == {*STEP_EVENTS, *(type(e) for e in OTHER_EVENTS)}
    assert {*RUN_TABLE, ev.RunStarted} == set(get_args(ev.AnyEvent))


@pytest.mark.parametrize("status", APPROVALS)
@pytest.mark.parametrize(
    "event",
    [
        ev.ToolStarted(step_id=sid(1), attempt=2, request_hash="h", key="k", approval_id=QUESTION),
        ev.ApprovalExpired(approval_id=QUESTION),
        ev.ApprovalVoided(approval_id=QUESTION, reason="policy"),
    ],
    ids=lambda e: type(e).__name__,
)
def test_an_approval_moves_by_its_table_and_by_nothing_else(status: ApprovalStatus, event: ev.AnyEvent):
    state = with_question(status)
    expected = APPROVAL_TABLE.get((status, type(event)))
    if expected is None:
        with pytest.raises(IllegalTransition):
            fold(state, event, NOON)
        return
    after = fold(state, event, NOON)
    assert after.approval(QUESTION).status == expected  # type: ignore[union-attr]
    assert after.approvals == {}


@pytest.mark.parametrize("status", APPROVALS)
@pytest.mark.parametrize(("decision", "becomes"), [("allow", "allowed"), ("deny", "denied"), ("happened", None)])
def test_only_an_open_approval_is_decided_and_only_by_one_of_its_choices(
    status: ApprovalStatus, decision: str, becomes: str | None
):
    state = with_question(status)
    event = ev.ApprovalDecided(approval_id=QUESTION, decision=decision)
    if status != "open" or becomes is None:
        with pytest.raises(IllegalTransition):
            fold(state, event, NOON)
        return
    assert fold(state, event, NOON).approval(QUESTION).status == becomes  # type: ignore[union-attr]


def test_a_step_that_waits_for_an_approval_does_not_start_without_it_s2_03():
    bare = ev.ToolStarted(step_id=sid(1), attempt=2, request_hash="h", key="k")
    for status in ("open", "allowed"):
        with pytest.raises(IllegalTransition):
            fold(with_question(status), bare, NOON)  # type: ignore[arg-type]


@pytest.mark.parametrize("event", [*STEP_EVENTS.values(), *OTHER_EVENTS], ids=lambda e: type(e).__name__)
def test_no_event_comes_before_the_run_has_started(event: ev.AnyEvent):
    with pytest.raises(IllegalTransition):
        fold(None, event, NOON, "run_x")


@pytest.mark.parametrize("event", [*STEP_EVENTS.values(), *OTHER_EVENTS], ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("phase", PHASES)
def test_an_event_about_what_is_not_there_is_an_illegal_transition_and_no_other_fault(
    phase: RunPhase, event: ev.AnyEvent
):
    empty = replace(Story().state, steps={}, turn=(), model_step=None, phase=phase)
    try:
        after = fold(empty, event, NOON)
    except IllegalTransition:
        return
    assert after.last_seq == empty.last_seq + 1


@pytest.mark.parametrize("event", [*STEP_EVENTS.values(), *OTHER_EVENTS], ids=lambda e: type(e).__name__)
def test_an_approval_whose_step_is_gone_brings_down_nothing_but_its_run(event: ev.AnyEvent):
    try:
        fold(replace(with_question("open"), steps={}, turn=()), event, NOON)
    except IllegalTransition as error:
        assert Story().state.run_id in str(error)


def test_time_never_runs_backwards_in_a_run():
    state = Story().state
    after = fold(state, ev.RunReopened(epoch=2), NOON - timedelta(days=1))
    assert after.last_at == state.last_at


@pytest.mark.parametrize("seq", [1, 3, 5])
def test_a_commit_that_does_not_continue_the_run_is_illegal(seq: int):
    state = Story().state
    assert state.last_seq == 3
    commit = ev.Commit(seq=seq, at=NOON, events=(ev.RunReopened(epoch=2),))
    with pytest.raises(IllegalTransition):
        apply(state, commit, state.run_id)


def test_a_run_begins_with_its_first_event_at_seq_1():
    started = Story().events[0]
    for commit in (
        ev.Commit(seq=2, at=NOON, events=(started,)),
        ev.Commit(seq=1, at=NOON, events=()),
        ev.Commit(seq=1, at=NOON, events=(started, started)),
    ):
        with pytest.raises(IllegalTransition):
            apply(None, commit, "run_x")
