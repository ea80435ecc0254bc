"""Goes on with a run until it is at rest: shows what happens, lets questions be answered, and says how it stands.

Knows: when a run is at rest, and that every rest has its exit code and its next command. `run`, `approve` and `resume` end here.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rpcagent.batch import exits
from rpcagent.batch.ask import Answer, allowed_beforehand, ask, confirmed
from rpcagent.batch.faults import Mistake
from rpcagent.batch.follow import ENDED, Follower
from rpcagent.batch.narrator import WORD_WIDTH, ordinal
from rpcagent.batch.progress import Progress
from rpcagent.batch.questions import Question, described, meaning
from rpcagent.batch.session import Session, now
from rpcagent.batch.text import instant, until, visible
from rpcagent_client import RpcError

Json = dict[str, Any]

PATIENCE_S = 300.0
"""How long a wait for the clock is waited for where no --timeout says it."""
RECENT = 20
"""Of a run that began earlier so many events are shown; all of them with `tail`, or with --json."""

_OVERTAKEN = {"ALREADY_DECIDED", "INVALID_STATE", "NOT_FOUND", "STALE_DIGEST"}


@dataclass(frozen=True)
class Manner:
    """How the caller wants it: which tools may run unasked, and until when (`time.monotonic`) it is waited for."""

    yes_to: Sequence[str] = ()
    deadline: float | None = None

    @classmethod
    def of(cls, yes_to: Sequence[str] | None, timeout: float | None) -> Manner:
        return cls(yes_to or (), None if timeout is None else time.monotonic() + timeout)


def go_on(session: Session, run_id: str, manner: Manner, *, shown_until: int = 0) -> int:
    """Returns the exit code. `shown_until`: the last event that the reader knows, or need not see."""
    session.run_id = run_id
    progress = Progress(session.desk, shown_until, questions=bool(manner.yes_to))
    streams = progress.delta if session.desk.streams else None
    follower = Follower(session.client, session.feed, run_id, event=progress.event, delta=streams)
    while True:
        shown, rests = follower.until(lambda seen: _at_rest(seen, manner), manner.deadline)
        run = shown["run"]
        if not rests or (run["status"] == "waiting" and not shown["approvals"]):
            return _waits_for_clock(session, shown, rests)
        if run["status"] in ENDED:
            return _ended(session, shown, progress)
        if run["status"] == "damaged":
            raise Mistake(
                f"the run {run_id} is damaged: {run.get('damaged', '')}",
                "its records are kept as they are; other runs of the store go on",
                code="DAMAGED",
                exit_code=exits.TROUBLE,
            )
        if not _person_acted(session, shown, manner):
            return _waits_for_person(session, shown)


def _at_rest(shown: Json, manner: Manner) -> bool:
    run = shown["run"]
    if run["status"] != "waiting" or shown["approvals"]:
        return bool(run["status"] != "running")
    retry_at = run.get("retryAt")
    if retry_at is None:
        return False
    left = PATIENCE_S if manner.deadline is None else manner.deadline - time.monotonic()
    return (instant(retry_at) - now()).total_seconds() > left


# Questions


def _person_acted(session: Session, shown: Json, manner: Manner) -> bool:
    """Whether something was decided, so that the run may go on."""
    acted = False
    run = shown["run"]
    if run["resumeRequired"]:
        if not session.desk.interactive:
            return False
        _show_plan(session, run)
        if not confirmed(session.desk, "Let exactly this happen?"):
            return False
        session.client.resume(run["runId"], plan_digest=run["recoveryPlan"]["planDigest"])
        return True
    for question in shown["approvals"]:
        answer = allowed_beforehand(question, manner.yes_to)
        asked = answer is None and session.desk.interactive
        if asked:
            answer = ask(session.desk, question, now())
            if answer is None:
                return False
        if answer is None:
            continue  # what --yes-to covers is answered all the same
        try:
            decide(session, question, answer)
        except RpcError as error:
            if not asked or error.code not in _OVERTAKEN:
                raise
            # It expired, or the run was cancelled, while the person was reading.
            session.desk.say(f"{'overtaken':<{WORD_WIDTH}}{error.code}: {visible(error.message)}", "bad")
        acted = True
    return acted


def decide(session: Session, question: Question, answer: Answer) -> Json:
    """Sends the answer, bound to the digest of what was shown."""
    return session.client.approve(
        question["runId"],
        question["approvalId"],
        question["digest"],
        answer.decision,
        result=answer.result,
        extend=answer.extend,
        comment=answer.comment,
        decided_by=answer.decided_by,
    )


def show_question(session: Session, question: Question) -> None:
    """The question in full and the command for each answer."""
    for text, tone in described(question, now()):
        session.desk.say(text, tone)
    _show_commands(session, question)


def _show_commands(session: Session, question: Question) -> None:
    for command, means in commands_of(session, question):
        session.desk.say(f"  {command}", "strong")
        session.desk.say(f"      {means}", "dim")


def commands_of(session: Session, question: Question) -> list[tuple[str, str]]:
    """For each choice the exact command, and what it means."""
    more = {"extend": _amount_flag(question)}
    return [
        (
            session.place.hint("approve", question["runId"], ordinal(question["approvalId"]), choice)
            + more.get(choice, ""),
            meaning(question["kind"], choice),
        )
        for choice in question["choices"]
    ]


def _amount_flag(question: Question) -> str:
    return f" --{str(question['subject'].get('limit', 'steps')).replace('_', '-')} N"


def _show_plan(session: Session, run: Json) -> None:
    plan = run["recoveryPlan"]
    session.desk.say("A restart holds this run. If it is resumed:", "ask")
    for text in plan_lines(plan):
        session.desk.say(text)


def plan_lines(plan: Json) -> list[str]:
    """What `resume` would let happen, step by step."""
    if not plan["steps"]:
        return ["  nothing was in progress: the model is asked next"]
    return [f"  {step['action'].replace('_', ' '):<10}{visible(step['name'])}" for step in plan["steps"]]


# How it stands


def _ended(session: Session, shown: Json, progress: Progress) -> int:
    run, desk = shown["run"], session.desk
    code = exits.DONE if run["status"] == "completed" else exits.FAILED
    if desk.as_json:
        return _summed_up(session, shown, code, [])
    output = run.get("output")
    on_screen = desk.streams and output is not None and output.strip() == progress.last_text != ""
    if output is not None and not on_screen:
        desk.output(output)
    for question in shown["approvals"]:
        desk.say("The run has ended; this can still be answered, as evidence:", "ask")
        show_question(session, question)
    return code


def _waits_for_clock(session: Session, shown: Json, rests: bool) -> int:
    run, desk = shown["run"], session.desk
    again = session.place.hint("run", "--key", run["clientRequestId"])
    if run.get("retryAt"):
        desk.say(f"{'waits':<{WORD_WIDTH}}until {until(run['retryAt'], now())}", "ask")
    if not rests:
        desk.say(f"{'time is up':<{WORD_WIDTH}}the run is {run['status']}, and safe", "ask")
    desk.say(f"{'go on with':<{WORD_WIDTH}}{again}")
    return _summed_up(session, shown, exits.CLOCK, [again])


def _waits_for_person(session: Session, shown: Json) -> int:
    run, desk = shown["run"], session.desk
    commands: list[str] = []
    if run["resumeRequired"]:
        commands = [session.place.hint("resume", run["runId"], "--plan", run["recoveryPlan"]["planDigest"])]
        _show_plan(session, run)
        desk.say(f"  {commands[0]}", "strong")
    elif not shown["approvals"]:
        desk.say("The run is in manual drive: only a client's `step` moves it.", "ask")
    for question in shown["approvals"]:
        desk.say()
        if desk.interactive:
            desk.say(f"Question {ordinal(question['approvalId'])} stays open. To answer it later:", "ask")
            _show_commands(session, question)
        else:
            show_question(session, question)
        commands += [command for command, _ in commands_of(session, question)]
    desk.say()
    desk.say(f"{'waits':<{WORD_WIDTH}}for a person; the question stays, over any restart", "ask")
    return _summed_up(session, shown, exits.PERSON, commands)


def _summed_up(session: Session, shown: Json, code: int, commands: list[str]) -> int:
    if session.desk.as_json:
        session.desk.fact(summary(shown, code, commands))
    return code


def summary(shown: Json, code: int, commands: list[str]) -> Json:
    """The last line of --json: the run as `status` shows it, the open questions, and how to go on."""
    return {"summary": {"run": shown["run"], "approvals": shown["approvals"], "exitCode": code, "next": commands}}
