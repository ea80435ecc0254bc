"""The commands that change something: `run`, `approve`, `resume`, `cancel`."""

from __future__ import annotations

import argparse
import json
import secrets
import sys
import time
from pathlib import Path
from typing import Any

from rpcagent.batch import exits
from rpcagent.batch.ask import Answer, whoever
from rpcagent.batch.faults import Mistake
from rpcagent.batch.follow import ENDED, Follower
from rpcagent.batch.going import RECENT, Manner, decide, go_on, plan_lines, summary
from rpcagent.batch.narrator import WORD_WIDTH, headline, ordinal
from rpcagent.batch.progress import Progress
from rpcagent.batch.questions import AMOUNTS, Question
from rpcagent.batch.session import Session
from rpcagent.batch.text import goal_text, one_line, visible
from rpcagent.ids import is_request_key
from rpcagent_client import RpcError

Json = dict[str, Any]

AGENT_BYTES = 32 << 20
CANCEL_WAIT_S = 30.0


def prepare(options: argparse.Namespace) -> None:
    """What can be known to be wrong with `run` before anything is started: goal, key, and agent are read here. Raises
    Mistake."""
    if options.key is not None and not is_request_key(options.key):
        raise Mistake(f"{options.key!r} is no key", "a key is 1 to 128 characters of A-Z a-z 0-9 . _ : / -")
    if options.goal is None and options.key is None:
        raise Mistake("there is no goal", 'give one: rpcagent run "Tidy up the notes."; or --key KEY of a run to go on')
    if options.goal == "-":
        options.goal = sys.stdin.read()
    options.key = options.key or "cli-" + secrets.token_hex(6)
    options.agent = _agent(options.agent)


def run(session: Session, options: argparse.Namespace) -> int:
    """Starts a run, or goes on with the one that the key stands for. The options have been prepared."""
    manner = Manner.of(options.yes_to, options.timeout)
    key = session.key = options.key
    again = session.place.hint("run", "--key", key)
    # Before anything is sent: whatever happens from here on, the reader can go on.
    session.desk.say(f"{'key':<{WORD_WIDTH}}{key}   (go on at any time: {again})", "dim")
    if options.goal is None:
        shown = session.client.status(client_request_id=key)
        return _known(session, shown["run"], manner)
    answer = _started(session, options)
    if answer["replayed"]:
        return _known(session, answer["run"], manner)
    session.desk.say(
        f"{'run':<{WORD_WIDTH}}{answer['runId']}   in {visible(answer['run'].get('workspace') or '')}", "dim"
    )
    return go_on(session, answer["runId"], manner)


def _started(session: Session, options: argparse.Namespace) -> Json:
    key = options.key
    # The workspace is part of what the key stands for: the same key in another directory is a conflict, not a surprise.
    workspace = str((options.workspace or Path()).resolve())
    try:
        return session.client.start(options.agent, options.goal, client_request_id=key, workspace=workspace)
    except RpcError as error:
        if error.code != "IDEMPOTENCY_CONFLICT":
            raise
        shown = session.client.status(client_request_id=key)
        found, other = shown["run"]["runId"], one_line(goal_text(shown.get("input")), 80)
        raise Mistake(
            f"the key {key} stands for the run {found} ({other}), with another goal, agent or workspace",
            f"to go on with that run: {session.place.hint('run', '--key', key)}; for a new one give another --key",
            code=error.code,
        ) from None


def _known(session: Session, run: Json, manner: Manner) -> int:
    """A run that began earlier: what came before is shown in part."""
    session.run_id = run["runId"]
    last = int(run.get("lastSeq", 0))
    quiet = last - RECENT if last > 2 * RECENT else 0
    session.desk.say(f"{'run':<{WORD_WIDTH}}{run['runId']}   {run['status']}, began earlier", "dim")
    if quiet:
        more = session.place.hint("tail", run["runId"])
        session.desk.say(f"{'':<{WORD_WIDTH}}{quiet} earlier events: {more}", "dim")
    return go_on(session, run["runId"], manner, shown_until=quiet)


def _agent(named: str) -> str | Json:
    """An agent's name, or the object that `@file.json` has. Raises Mistake."""
    if not named.startswith("@"):
        return named
    file = Path(named[1:])
    try:
        with file.open("rb") as stream:
            raw = stream.read(AGENT_BYTES)
        agent = json.loads(raw)
    except OSError as error:
        raise Mistake(f"{file} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        where = f" (line {error.lineno}, column {error.colno})" if isinstance(error, json.JSONDecodeError) else ""
        raise Mistake(f"{file} is no JSON{where}") from None
    if not isinstance(agent, dict):
        raise Mistake(f"{file} has no agent: an agent is a JSON object")
    return agent


def approve(session: Session, options: argparse.Namespace) -> int:
    """Answers a question, and goes on with the run."""
    run_id = session.run_id = session.resolve(options.run)
    shown = session.client.status(run_id)
    session.key = shown["run"].get("clientRequestId")
    question = _question(session, shown, options.approval)
    amounts = {AMOUNTS[limit]: value for limit in AMOUNTS if (value := getattr(options, limit)) is not None}
    if options.decision == "extend" and not amounts:
        limit = str(question["subject"].get("limit", "steps")).replace("_", "-")
        raise Mistake("how much more?", f"say it with --{limit} N")
    if options.digest is not None and options.digest != question["digest"]:
        raise Mistake(
            f"the question {question['approvalId']} has the digest {question['digest']}",
            f"it is not what you were shown: {session.place.hint('show', run_id)}",
            code="STALE_DIGEST",
        )
    number = ordinal(question["approvalId"])
    session.desk.say(f"{'question':<{WORD_WIDTH}}{number}: {one_line(headline(question), session.desk.width)}", "ask")
    session.desk.say(f"{'digest':<{WORD_WIDTH}}{question['digest']}", "dim")
    answer = Answer(options.decision, options.result, amounts or None, options.comment, whoever())
    decided = decide(session, question, answer)
    if decided["approval"]["already"]:
        session.desk.say(f"{'answer':<{WORD_WIDTH}}{number}: was decided so before", "dim")
    return _after(session, shown, options)


def _question(session: Session, shown: Json, named: str) -> Question:
    """The question that is meant by its number, its id, or the beginning of one; also one that was answered before."""
    run_id = shown["run"]["runId"]
    found: list[Question] = [one for one in shown["approvals"] if _is_meant(one["approvalId"], named)]
    if not found:
        found = [one for one in _asked_before(session, run_id) if _is_meant(one["approvalId"], named)]
    if len(found) == 1:
        return found[0]
    still = ", ".join(ordinal(one["approvalId"]) for one in shown["approvals"]) or "none"
    if found:
        raise Mistake(f"{named!r} may be any of {len(found)} questions", f"open are: {still}")
    raise Mistake(f"the run {run_id} has no question {named!r}", f"open are: {still}", code="NOT_FOUND")


def _asked_before(session: Session, run_id: str) -> list[Question]:
    """All questions that the run ever asked: an answer given twice must arrive at the same one."""
    questions: list[Question] = []

    def keep(element: Json) -> None:
        if element["event"]["type"] == "approval_requested":
            questions.append({**element["event"], "runId": run_id})

    Follower(session.client, session.feed, run_id, event=keep).look()
    return questions


def _is_meant(approval_id: str, named: str) -> bool:
    return approval_id == named or ordinal(approval_id) == named or (len(named) > 4 and approval_id.startswith(named))


def _after(session: Session, before: Json, options: argparse.Namespace) -> int:
    """Goes on with the run, showing what is new since `before`; or, with --no-wait, says how it stands."""
    run_id = before["run"]["runId"]
    if not options.no_wait:
        shown_until = int(before["run"].get("lastSeq", 0))
        return go_on(session, run_id, Manner.of(options.yes_to, options.timeout), shown_until=shown_until)
    shown = session.client.status(run_id)
    if session.desk.as_json:
        session.desk.fact(summary(shown, exits.DONE, []))
    session.desk.say(f"{'run':<{WORD_WIDTH}}{run_id}   {shown['run']['status']}")
    return exits.DONE


def resume(session: Session, options: argparse.Namespace) -> int:
    """Lets a held run go on, and goes on with it."""
    run_id = session.run_id = session.resolve(options.run)
    shown = session.client.status(run_id)
    session.key = shown["run"].get("clientRequestId")
    plan = shown["run"].get("recoveryPlan")
    for text in plan_lines(plan) if plan else ["  the run is not held; nothing to resume"]:
        session.desk.say(text)
    if plan:
        session.desk.say(f"  digest {plan['planDigest']}", "dim")
    # Without --plan the digest is the one just shown: what the reader saw is what happens.
    digest = options.plan or (plan["planDigest"] if plan else None)
    if shown["run"]["status"] not in ENDED:
        session.client.resume(run_id, plan_digest=digest)
    return _after(session, shown, options)


def cancel(session: Session, options: argparse.Namespace) -> int:
    """Cancels, and waits until an effect in flight has ended or its time is up."""
    run_id = session.run_id = session.resolve(options.run)
    before = session.client.status(run_id)
    answer = session.client.cancel(run_id, reason=options.reason)
    progress = Progress(session.desk, int(before["run"].get("lastSeq", 0)))
    follower = Follower(session.client, session.feed, run_id, event=progress.event)
    deadline = time.monotonic() + CANCEL_WAIT_S
    shown, ended = follower.until(lambda seen: seen["run"]["status"] in ENDED, deadline)
    if answer["cancel"]["already"]:
        session.desk.say(f"{'cancelled':<{WORD_WIDTH}}it was so before", "dim")
    for step_id in shown["run"].get("unresolved", ()):
        session.desk.say(f"{'unknown':<{WORD_WIDTH}}{step_id}; {session.place.hint('show', run_id)} tells more", "bad")
    code = exits.DONE if ended else exits.CLOCK
    if session.desk.as_json:
        session.desk.fact(summary(shown, code, []))
    return code
