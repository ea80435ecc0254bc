"""Asking in the terminal: shows the question, takes one choice, and what belongs to it. Enter alone is never an answer."""

from __future__ import annotations

import fnmatch
import getpass
import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from rpcagent.batch.desk import Desk
from rpcagent.batch.questions import AMOUNTS, Question, described, meaning

_LETTERS = {
    "allow": "y",
    "deny": "n",
    "happened": "h",
    "did_not_happen": "n",
    "abandon": "a",
    "extend": "e",
    "retry": "r",
    "stop": "s",
    "accept": "y",
}


@dataclass(frozen=True)
class Answer:
    """What goes into `approve` beside the ids and the digest."""

    decision: str
    result: str | None = None
    extend: dict[str, float] | None = None
    comment: str | None = None
    decided_by: str | None = None


def whoever() -> str:
    """The name under which an answer is recorded."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user id without a name
        return "unnamed user"


def allowed_beforehand(question: Question, patterns: Sequence[str]) -> Answer | None:
    """What `--yes-to` says to a question. It answers nothing but whether a tool may run."""
    if question["kind"] != "tool_call":
        return None
    tool = str(question["subject"].get("tool", ""))
    pattern = next((one for one in patterns if fnmatch.fnmatchcase(tool, one)), None)
    return None if pattern is None else Answer("allow", comment=f"--yes-to {pattern}", decided_by=whoever())


def ask(desk: Desk, question: Question, now: datetime) -> Answer | None:
    """The person's answer; None where it is left open (`q`, or the end of input)."""
    desk.say()
    for text, tone in described(question, now):
        desk.say(text, tone)
    letters = _choices(desk, question)
    while (typed := desk.ask("? ")) is not None:
        word, _, rest = typed.partition(" ")
        if word in {"q", "quit"}:
            return None
        if word in {"d", "details"}:
            for text, tone in described(question, now, whole=True):
                desk.say(text, tone)
            continue
        decision = letters.get(word.lower())
        if decision is None:
            desk.say(f"Type one of: {', '.join(letters)}, d, q.", "ask")
            continue
        answer = _completed(desk, question, decision, rest.strip())
        if answer is not None:
            return answer
    return None


def confirmed(desk: Desk, prompt: str) -> bool:
    """Whether the person says yes to it, in so many letters."""
    while (typed := desk.ask(prompt + " [y/n] ")) is not None:
        if typed.lower() in {"y", "yes"}:
            return True
        if typed.lower() in {"n", "no", "q"}:
            return False
    return False


def _choices(desk: Desk, question: Question) -> dict[str, str]:
    """Prints them; a choice that has no letter of its own is typed in full, as each may be."""
    letters: dict[str, str] = {}
    for choice in question["choices"]:
        letter = _LETTERS.get(choice, "")
        if letter and letter not in letters:
            letters[letter] = choice
        words = choice.replace("_", " ")
        desk.say(f"  {letter or choice}  {words}: {meaning(question['kind'], choice)}".rstrip(": "), "ask")
    desk.say("  d  details: all of it, cut nowhere, with the digest that binds the answer", "ask")
    desk.say("  q  leave it open: the run waits", "ask")
    return letters | {choice: choice for choice in question["choices"]}


def _completed(desk: Desk, question: Question, decision: str, rest: str) -> Answer | None:
    """With what the decision needs. None: not given; the choices stand again."""
    who = whoever()
    if decision == "deny":
        reason = rest or desk.ask("Why? The model is told (Enter: no reason) ")
        return None if reason is None else Answer(decision, comment=reason or None, decided_by=who)
    if decision == "happened":
        result = rest or desk.ask("What did it return? (Enter: nothing known) ")
        return None if result is None else Answer(decision, result=result or None, decided_by=who)
    if decision == "extend":
        limit = str(question["subject"].get("limit"))
        typed = rest or desk.ask(f"How many more {limit}? ")
        amount = amount_of(limit, typed or "")
        if amount is None:
            desk.say("Not a number above zero.", "ask")
            return None
        return Answer(decision, extend=amount, decided_by=who)
    return Answer(decision, decided_by=who)


def amount_of(limit: str, typed: str) -> dict[str, Any] | None:
    """The member of `extend` for a limit; whole numbers for what is counted."""
    name = AMOUNTS.get(limit)
    try:
        number = float(typed)
    except ValueError:
        return None
    if name is None or not math.isfinite(number) or number <= 0:
        return None
    if name in {"costUsd", "activeS"}:
        return {name: number}
    return {name: int(number)} if number.is_integer() else None
