"""The commands that look: `runs`, `show`, `tail`. They ask for nothing to be done.

A daemon is started to look through, and lets nothing go on; only `tail -f` follows runs that do.
"""

from __future__ import annotations

import argparse
from typing import Any

from rpcagent.batch import exits
from rpcagent.batch.follow import ENDED, Follower
from rpcagent.batch.going import commands_of, plan_lines
from rpcagent.batch.narrator import WORD_WIDTH, Narrator, Tone, ordinal
from rpcagent.batch.questions import described
from rpcagent.batch.session import Session, now, short_ids
from rpcagent.batch.text import arguments, clock, goal_text, instant, one_line, result_summary, span, until, visible
from rpcagent_client import RpcError

Json = dict[str, Any]

NEWEST = 20
_TONES: dict[str, Tone] = {"completed": "good", "failed": "bad", "cancelled": "dim", "waiting": "ask", "damaged": "bad"}


def runs(session: Session, options: argparse.Namespace) -> int:
    """The table of runs, newest first: those that have not ended, and the newest of the others."""
    every = list(session.runs())[::-1]
    wanted = [run for run in every if not options.status or run["status"] in options.status]
    chosen = wanted if options.all else _newest(wanted)
    if session.desk.as_json:
        for run in chosen:
            session.desk.fact(run)
        return exits.DONE
    short = short_ids([run["runId"] for run in every])
    rows = [row for run in chosen if (row := _row(session, run, short[run["runId"]])) is not None]
    if rows:
        session.desk.table(("run", "status", "agent", "steps", "age", "waits for", "goal"), rows)
    else:
        session.desk.say("no runs")
    if len(chosen) < len(wanted):
        session.desk.say(f"{len(wanted) - len(chosen)} more that have ended: --all", "dim")
    return exits.DONE


def _newest(wanted: list[Json]) -> list[Json]:
    chosen: list[Json] = []
    room = NEWEST - sum(run["status"] not in ENDED for run in wanted)
    for run in wanted:
        if run["status"] not in ENDED:
            chosen.append(run)
        elif room > 0:
            chosen.append(run)
            room -= 1
    return chosen


def _row(session: Session, run: Json, short: str) -> tuple[list[object], Tone] | None:
    """None: it was deleted since it was listed."""
    try:
        shown = session.client.status(run["runId"])
    except RpcError as error:
        if error.code == "NOT_FOUND":
            return None
        raise
    age = span((now() - instant(run["startedAt"])).total_seconds()) if run.get("startedAt") else ""
    steps = shown.get("budget", {}).get("spent", {}).get("steps", "")
    goal = one_line(goal_text(shown.get("input")), 200)
    cells = [short, run["status"], run.get("agent", ""), steps, age, _waits_for(shown), goal]
    return cells, _TONES.get(run["status"], "plain")


def _waits_for(shown: Json) -> str:
    run = shown["run"]
    if run.get("resumeRequired"):
        return "resume"
    if shown.get("approvals"):
        first = shown["approvals"][0]
        about = first["subject"].get("tool") or first["subject"].get("limit") or first["subject"].get("step") or ""
        more = f" +{len(shown['approvals']) - 1}" if len(shown["approvals"]) > 1 else ""
        return one_line(f"{first['kind']} {about}{more}", 40)
    if run.get("retryAt"):
        return f"the clock, {span((instant(run['retryAt']) - now()).total_seconds())}"
    return "a `step`" if run["status"] == "ready" else ""


def show(session: Session, options: argparse.Namespace) -> int:
    """Everything about one run."""
    shown = session.client.status(session.resolve(options.run))
    desk = session.desk
    if desk.as_json:
        desk.fact(shown)
        return exits.DONE
    for name, text in _facts(shown):
        desk.tell(f"{name:<{WORD_WIDTH}}{text}".rstrip(), "strong" if name == "run" else "plain")
    if shown.get("steps"):
        desk.tell()
        rows = [_step_row(step) for step in shown["steps"]]
        desk.table(("step", "name", "status", "attempt", "effect", "what came of it"), rows)
    for question in shown.get("approvals", ()):
        desk.tell()
        for text, tone in described(question, now()):
            desk.tell(text, tone)
        for command, means in commands_of(session, question):
            desk.tell(f"  {command}", "strong")
            desk.tell(f"      {means}", "dim")
    plan = shown["run"].get("recoveryPlan")
    if plan:
        desk.tell()
        desk.tell("A restart holds this run. If it is resumed:", "ask")
        for text in plan_lines(plan):
            desk.tell(text)
        desk.tell(f"  {session.place.hint('resume', shown['run']['runId'], '--plan', plan['planDigest'])}", "strong")
    if shown["run"].get("output") is not None:
        desk.tell()
        desk.tell("output:", "strong")
        desk.tell(visible(shown["run"]["output"], lines=True).rstrip("\n"))
    return exits.DONE


def _facts(shown: Json) -> list[tuple[str, str]]:
    run = shown["run"]
    facts = [("run", run["runId"])]
    if "input" in shown:
        facts.append(("goal", visible(goal_text(shown["input"]), lines=True).replace("\n", "\n" + " " * WORD_WIDTH)))
    held = [name for name, flag in (("held", run.get("resumeRequired")), ("cancelling", run.get("cancelling"))) if flag]
    facts.append(("status", ", ".join([run["status"], *held])))
    error = run.get("error")
    optional = {
        "error": error and ": ".join(part for part in (error.get("kind"), error.get("message")) if part),
        "damaged": run.get("damaged"),
        "waits": run.get("retryAt") and f"until {until(run['retryAt'], now())}",
        "unresolved": ", ".join(run.get("unresolved", ())),
        "agent": run.get("agent") and f"{run['agent']}, drive {run['drive']}, recovery {run['recovery']}",
        "key": run.get("clientRequestId"),
        "namespace": run.get("namespace"),
        "workspace": run.get("workspace"),
        "labels": ", ".join(f"{name}={value}" for name, value in run.get("labels", {}).items()),
        "started": run.get("startedAt") and clock(run["startedAt"]),
        "last event": run.get("updatedAt") and f"{run['lastSeq']} at {clock(run['updatedAt'])}",
        "budget": _budget(shown.get("budget")),
        "definition": _definition(shown.get("definition")),
    }
    return facts + [(name, visible(str(text))) for name, text in optional.items() if text]


def _definition(definition: Json | None) -> str:
    if definition is None:
        return ""
    other = "; the agent is configured otherwise now, and this run keeps its own" if definition.get("differs") else ""
    return f"{definition['pinned']}{other}"


def _budget(budget: Json | None) -> str:
    if budget is None:
        return ""
    spent, limits = budget["spent"], budget["limits"]
    parts = []
    for name in dict.fromkeys([*spent, *limits]):
        used, limit = spent.get(name, 0), limits.get(name)
        if used or (limit is not None and name in spent):
            of = f" of {limit:g}" if limit is not None else ""
            parts.append(f"{name} {round(used, 4):g}{of}")
    near = budget.get("near", ())
    warning = f"; near its limit: {', '.join(near)}" if near else ""
    return ", ".join(parts) + warning


def _step_row(step: Json) -> tuple[list[object], Tone]:
    number = str(step["stepId"] or "").rsplit("_", 1)[-1]
    name = "the model" if step["kind"] == "model_call" else step["name"]
    error = step.get("error")
    if error:
        came = ": ".join(part for part in (error.get("kind", ""), error.get("message", "")) if part)
    elif step.get("result") is not None:
        came = result_summary(step["result"], 200)
    else:
        came = arguments(step.get("arguments") or {}, 200)
    notes = [
        text
        for text in (
            "interrupted" if step.get("interrupted") and step["status"] in {"started", "unknown"} else "",
            "abandoned" if step.get("abandoned") else "",
            f"look-up: {step['lookUp']}" if step.get("lookUp") else "",
            f"source: {step['source'].replace('_', ' ')}" if step.get("source", "tool") != "tool" else "",
            f"question {ordinal(step['approvalId'])}"
            if step["status"] in {"waiting_approval", "unknown"} and step.get("approvalId")
            else "",
            f"again at {clock(step['retryAt'])}" if step.get("retryAt") else "",
        )
        if text
    ]
    tones: dict[str, Tone] = {"completed": "plain", "failed": "bad", "denied": "bad", "unknown": "bad"}
    cells = [
        number,
        name,
        step["status"].replace("_", " "),
        step["attempt"],
        step.get("effect", ""),
        "; ".join([*notes, came]),
    ]
    return cells, tones.get(step["status"], "ask")


def tail(session: Session, options: argparse.Namespace) -> int:
    """A run's events as lines; with -f until it has ended."""
    run_id = session.run_id = session.resolve(options.run)
    desk = session.desk
    narrator = Narrator(desk.width - 16)

    def told(element: Json) -> None:
        line = narrator.told(element)
        if element["seq"] <= options.after:
            return
        if desk.as_json:
            desk.fact(element)
        else:
            moment = instant(element["at"]).strftime("%H:%M:%S")
            laid = line.laid_out().replace("\n", "\n" + " " * 16)
            desk.tell(f"{element['seq']:>5}  {moment}  {laid}".rstrip(), line.tone)

    follower = Follower(session.client, session.feed, run_id, event=told)
    if not options.follow:
        follower.look()
        return exits.DONE
    follower.until(lambda shown: shown["run"]["status"] in ENDED or shown["run"]["status"] == "damaged", None)
    return exits.DONE
