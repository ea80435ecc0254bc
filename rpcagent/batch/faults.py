"""What went wrong, for a reader: the code, the message, and what can be done about it. Never a traceback."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from rpcagent.batch import exits
from rpcagent.batch.text import visible
from rpcagent_client import ClientError, ConnectionLost, DaemonNotStarted, DeadlineExceeded, ProtocolError, RpcError

_AS_GIVEN = {
    "INVALID_PARAMS",
    "NOT_FOUND",
    "IDEMPOTENCY_CONFLICT",
    "ALREADY_DECIDED",
    "STALE_DIGEST",
    "INVALID_STATE",
    "KEY_EXPIRED",
}
_REMEDIES = {
    "NOT_FOUND": "`rpcagent runs --all` lists the runs of this store; each workspace has a store of its own unless --store "
    "names one",
    "IDEMPOTENCY_CONFLICT": "a key stands for one goal, agent and workspace: give another --key, or the same goal again",
    "ALREADY_DECIDED": "the first answer stands; `rpcagent show RUN` tells what the run made of it",
    "STALE_DIGEST": "what would run now is not what was shown: look at it again with `rpcagent show RUN`",
    "INVALID_STATE": "`rpcagent show RUN` tells how the run stands",
    "STORAGE": "make room on the disk (or mend what the message names) and give the same command again: nothing was lost",
    "OVERLOADED": "give the same command again in a moment",
    "STORE_DAMAGED": "`rpcagent verify` says all that is damaged, `rpcagent repair --dry-run` what can be kept",
    "INCOMPATIBLE": "what the run depends on cannot be had, or a later version wrote the store",
    "INTERNAL": "this is a fault of rpcagent; the daemon's log has the story under the incident's id",
    "KEY_EXPIRED": "the run of this key was deleted: give another --key",
}


PLAIN_LINES = 20


class Mistake(Exception):
    """What was asked for cannot be done as it was asked. `remedy` says what can."""

    def __init__(self, message: str, remedy: str = "", *, code: str = "USAGE", exit_code: int = exits.USAGE) -> None:
        super().__init__(message)
        self.code = code
        self.remedy = remedy
        self.exit_code = exit_code


@dataclass(frozen=True)
class Fault:
    """`data`: what the protocol promises with the code, for a program."""

    code: str
    message: str
    remedy: str
    exit_code: int
    data: dict[str, Any]

    def lines(self) -> list[str]:
        remedy = [f"  {self.remedy}"] if self.remedy else []
        return [f"rpcagent: {self.code}: {visible(self.message, lines=True)}", *remedy]

    def value(self) -> dict[str, Any]:
        error = {"code": self.code, "message": self.message, "remedy": self.remedy, "data": self.data}
        return {"error": error, "exitCode": self.exit_code}


def fault_of(error: ClientError | Mistake, log_tail: str = "") -> Fault:
    """`log_tail`: the end of the daemon's own log, which knows why it ended."""
    if isinstance(error, Mistake):
        return Fault(error.code, str(error), error.remedy, error.exit_code, {})
    if isinstance(error, RpcError):
        return _of_answer(error)
    again = "nothing that was recorded is lost: give the same command again"
    match error:
        case ConnectionLost():
            why = _reason(log_tail)
            if error.exit_code == exits.USAGE:  # the daemon's flags are ours, but the configuration is the reader's
                return Fault("CONFIG", why or str(error), "`rpcagent check` tells more", exits.USAGE, {})
            return _trouble("DAEMON_ENDED", f"{error}{': ' + why if why else ''}", again)
        case DeadlineExceeded():
            return _trouble("NO_ANSWER", str(error), again)
        case DaemonNotStarted():
            return _trouble("DAEMON_NOT_STARTED", str(error), "is this installation whole?")
        case ProtocolError():
            return _trouble("PROTOCOL", str(error), "what answered is not the daemon of this version")
        case _:
            return _trouble("CLIENT", str(error), again)


def _of_answer(error: RpcError) -> Fault:
    exit_code = exits.USAGE if error.code in _AS_GIVEN else exits.TROUBLE
    message, remedy = error.message, _REMEDIES.get(error.code, "")
    if error.code == "STORE_LOCKED":
        pid, host = error.data.get("pid"), error.data.get("host")
        since = f" since {error.data['since']}" if error.data.get("since") else ""
        message = f"another daemon (process {pid} on {host}) has owned this store{since}"
        remedy = (
            f"it is the daemon of an editor or of another `rpcagent` command (`ps -fp {pid}` shows whose): use that one, "
            "or end it (closing its input does, so does SIGTERM) and give the same command again"
        )
    elif error.code == "ALREADY_DECIDED" and error.data.get("decision"):
        message = f"{message} ({error.data['decision']})"
    return Fault(error.code, message, remedy, exit_code, error.data)


def _trouble(code: str, message: str, remedy: str) -> Fault:
    return Fault(code, message, remedy, exits.TROUBLE, {})


def _reason(log_tail: str) -> str:
    """What the daemon complained about at its end: plain lines, or the last error in its JSON log."""
    plain = plain_lines(log_tail)
    if plain:
        return "\n".join(plain[-PLAIN_LINES:])
    for line in reversed(log_tail.splitlines()):
        entry = _entry(line)
        if entry is not None and entry.get("level") in {"error", "critical"}:
            return ": ".join(str(entry[name]) for name in ("event", "reason") if entry.get(name))
    return ""


def plain_lines(log: str) -> list[str]:
    """What the daemon wrote for a person before its log began, such as that a configuration is not used."""
    return [line for line in log.splitlines() if line.strip() and _entry(line) is None]


def _entry(line: str) -> dict[str, Any] | None:
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) else None
