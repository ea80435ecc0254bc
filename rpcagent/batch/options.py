"""The command lines of the batch commands. Costs nothing but argparse until one of them is performed."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from rpcagent.batch import exits

_RUN = f"""\
Starts an agent on a goal and follows it until it is at rest. The run is durable: it lives in the store, and the key that is
printed first goes on with it after any crash, of this command, of the daemon, or of the machine. Nothing that was done is
done again.

  rpcagent run "Tidy up the notes." --agent fixer
  rpcagent run "Bring the changelog up to date." --agent @agent.json --key release-17 > answer.txt
  rpcagent run --key release-17                       go on with that run, whatever happened

The output of the run goes to standard output, progress to standard error. With --json everything goes to standard output, one
JSON object a line: the events (as in `events` of the protocol), at the end {{"summary": {{run, approvals, exitCode, next}}}},
and {{"error": {{code, message, remedy, data}}, exitCode}} where something went wrong.

In a terminal the agent's questions are asked here. Elsewhere, and with --no-input or --json, the command prints how each
question is answered (`rpcagent approve RUN 1 allow`) and ends with exit code 3; the question stays open.

A wait for the clock (a provider that is overloaded, say) of more than 5 minutes, or beyond --timeout, ends the command with
exit code 4. Ctrl-C ends it in order: the run is safe.

{exits.ABOUT}"""

_RUNS = f"""\
Lists the runs of the store, newest first: all that have not ended, and the newest of those that have, 20 in all.
RUN in the other commands is an id, a beginning of one that is no other's (as shown here), or the run's key.

{exits.ABOUT}"""

_SHOW = f"""\
Everything about a run: goal, status, steps with attempts, effects and results, open questions with the exact command for each
answer, budget, recovery plan, output. With --json the answer of `status`, on one line.

{exits.ABOUT}"""

_TAIL = f"""\
The events of a run as lines, from the first one, or from the one after --after; -f stays until the run has ended. With --json
the events themselves, one a line.

-f follows through a daemon of its own, which goes on with every run that it finds unfinished (those with recovery `auto`).
While another process (an editor, another `rpcagent` command) owns the store, only that one knows what happens; this command
then says which process it is, and ends with exit code 5.

{exits.ABOUT}"""

_APPROVE = f"""\
Answers an open question of a run, and goes on with it as `run` does. APPROVAL is the question's number (`rpcagent show RUN`
tells it) or its id. The answer is bound to the digest of what is asked; with --digest to the one that you were shown.

  kind             decisions
  tool_call        allow, deny
  unknown_outcome  happened (with --result TEXT), did_not_happen, abandon
  budget           extend (with --steps N, --tokens N, ...), stop
  retry            retry, stop

The same answer twice is no mistake; another one than the first is refused.

{exits.ABOUT}"""

_RESUME = f"""\
Lets a run go on that a restart holds (recovery `confirm` or `manual`), as its recovery plan says, and goes on with it as `run`
does. Without --plan the plan is printed and taken as it is; with it, only that very plan.

{exits.ABOUT}"""

_CANCEL = f"""\
Cancels a run: nothing new begins, and an effect in flight may end. Waits for that, at most 30 seconds. Exit code 0: it is
cancelled, now or before.

{exits.ABOUT}"""


def folder(text: str) -> Path:
    """What `--store` names. An empty name, of a variable that is not set, say, is not the present directory."""
    if not text:
        raise argparse.ArgumentTypeError("the name of a folder is empty")
    return Path(text)


def add_keys(parser: argparse._ActionsContainer) -> None:
    """The options of a store that is encrypted. Keys are named, never given: a command line is no secret."""
    parser.add_argument(
        "--encryption-key",
        metavar="REF",
        help="encrypt what runs hold (payloads; ids, status, labels, sizes and times stay readable) with this key: file:PATH, "
        "env:NAME or keyring:SERVICE/NAME. `rpcagent key new FILE` makes one. Keep it apart from the store, and keep a copy: "
        "without it what is encrypted is lost",
    )
    parser.add_argument(
        "--old-encryption-key",
        action="append",
        default=[],
        metavar="REF",
        help="a key that the store was encrypted with before; may be repeated. It opens, and never encrypts",
    )


AddCommand = Callable[[str, str, str], argparse.ArgumentParser]
"""(name, purpose, description) -> its parser."""


def add_commands(command: AddCommand) -> None:
    """Adds `run` and its kin; the options of each carry `perform`, which runs it."""
    run = _command(command, "run", "run an agent on a goal, durably", _RUN)
    run.add_argument("goal", nargs="?", metavar="GOAL", help="what is to be done; `-` reads standard input")
    run.add_argument(
        "--agent", default="default", metavar="NAME|@FILE", help="an agent by name, or @file.json with one"
    )
    run.add_argument(
        "--key", metavar="KEY", help="the run's name: the same key goes on with the same run (default: drawn)"
    )
    _going(run)
    runs = _command(command, "runs", "list the runs of the store", _RUNS)
    runs.add_argument(
        "--status",
        action="append",
        choices=["ready", "running", "waiting", "completed", "failed", "cancelled", "damaged"],
        help="only these; may be repeated",
    )
    runs.add_argument("--all", action="store_true", help="all of them")
    show = _command(command, "show", "everything about a run", _SHOW)
    show.add_argument("run", metavar="RUN")
    tail = _command(command, "tail", "a run's events as lines", _TAIL)
    tail.add_argument("run", metavar="RUN")
    tail.add_argument("-f", "--follow", action="store_true", help="stay until the run has ended")
    tail.add_argument("--after", type=int, default=0, metavar="N", help="only events after this one")
    _add_approve(command)
    resume = _command(command, "resume", "let a run go on that a restart holds", _RESUME)
    resume.add_argument("run", metavar="RUN")
    resume.add_argument("--plan", metavar="DIGEST", help="only if the recovery plan is this one")
    _going(resume, no_wait=True)
    cancel = _command(command, "cancel", "cancel a run", _CANCEL)
    cancel.add_argument("run", metavar="RUN")
    cancel.add_argument("--reason", metavar="TEXT", help="kept with the run")


def _add_approve(command: AddCommand) -> None:
    approve = _command(command, "approve", "answer a question of a run", _APPROVE)
    approve.add_argument("run", metavar="RUN")
    approve.add_argument("approval", metavar="APPROVAL", help="the question's number, or its id")
    approve.add_argument(
        "decision",
        metavar="DECISION",
        choices=["allow", "deny", "happened", "did_not_happen", "abandon", "extend", "retry", "stop"],
        help="one of the question's choices",
    )
    approve.add_argument("--comment", metavar="TEXT", help="kept with the answer; a denial's is told to the model")
    approve.add_argument("--result", metavar="TEXT", help="what it returned, for `happened`")
    approve.add_argument("--digest", metavar="DIGEST", help="only if the question is still this one")
    amounts = approve.add_argument_group("for `extend`: how much more")
    for name in ("steps", "attempts", "repeats", "tokens"):
        amounts.add_argument(f"--{name}", type=int, metavar="N")
    amounts.add_argument("--cost-usd", type=float, metavar="X", help="dollars")
    amounts.add_argument("--active-s", type=float, metavar="S", help="seconds of activity")
    _going(approve, no_wait=True)


def _command(command: AddCommand, name: str, purpose: str, about: str) -> argparse.ArgumentParser:
    parser = command(name, purpose, about)
    parser.set_defaults(perform=perform)
    parser.add_argument("--json", action="store_true", help="one JSON object a line, on standard output")
    place = parser.add_argument_group("which store (as in `rpcagent serve`)")
    place.add_argument("--store", type=folder, metavar="DIR", help="default: $RPCAGENT_STORE, else the workspace's own")
    place.add_argument("--workspace", type=Path, metavar="DIR", help="what the agent works on (default: here)")
    place.add_argument("--config", type=Path, metavar="FILE", help="the configuration, trusted by naming it")
    place.add_argument("--trust-workspace", action="store_true", help="use the workspace's rpcagent.toml as it is")
    add_keys(place)
    return parser


def _going(parser: argparse.ArgumentParser, *, no_wait: bool = False) -> None:
    parser.add_argument(
        "--yes-to",
        action="append",
        metavar="PATTERN",
        help="allow calls of the tools that match, such as `files.*`, without asking; may be repeated. Each is recorded as "
        "an answer of yours. Other questions are asked all the same",
    )
    parser.add_argument("--timeout", type=float, metavar="S", help="stop waiting after so many seconds (exit code 4)")
    parser.add_argument("--no-input", action="store_true", help="ask nothing: stop at the first question (exit code 3)")
    if no_wait:
        parser.add_argument("--no-wait", action="store_true", help="do not go on with the run: end at once")


def perform(options: argparse.Namespace) -> int:
    """Runs a command that `add_commands` has parsed."""
    from rpcagent.batch.conduct import conducted

    return conducted(options)
