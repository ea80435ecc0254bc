"""A command for the files of a store, from its options to its exit code. What goes wrong is a sentence, never a traceback."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import signal
import sys
from collections.abc import Callable
from types import FrameType

from rpcagent import errors
from rpcagent.batch import exits
from rpcagent.batch.desk import Desk
from rpcagent.batch.faults import Fault, Mistake, fault_of
from rpcagent.keys import KeyUnusable
from rpcagent.upkeep.place import Place, place_of

Command = Callable[[Desk, Place, argparse.Namespace], int]

MODULES = {
    "verify": "verify",
    "repair": "repair",
    "log": "log",
    "export": "exporting",
    "import": "importing",
    "backup": "backup",
    "blob": "blob",
    "gc": "collecting",
}
"""The module of each command, which has it as `command`: none is loaded before it is needed."""

_USAGE = {"NOT_FOUND", "KEY_EXPIRED", "INVALID_STATE", "INVALID_PARAMS"}
_REMEDIES = {
    "STORE_LOCKED": "end the process that owns the store (closing the input of a daemon ends it) and give the command again",
    "STORE_DAMAGED": "`rpcagent verify` says all that is damaged; `rpcagent repair --dry-run` what can be done about it",
    "STORAGE": "make room on the disk, or mend what the message names, and give the same command again",
    "NOT_FOUND": "`rpcagent runs --all` lists the runs of this store",
}


def conducted(options: argparse.Namespace) -> int:
    """Runs the command on the process's own streams."""
    desk = Desk(sys.stdin, sys.stdout, sys.stderr, as_json=options.json, no_input=True)
    before = signal.signal(signal.SIGTERM, _stop)
    try:
        place = place_of(options, may_be_new=options.command == "import")
        command: Command = importlib.import_module(f"rpcagent.upkeep.{MODULES[options.command]}").command
        with contextlib.closing(place):
            return command(desk, place, options)
    except _Terminated:
        return 128 + signal.SIGTERM
    except KeyboardInterrupt:
        return exits.INTERRUPTED
    except BrokenPipeError:
        desk.closed()
        return exits.PIPE_CLOSED
    except Mistake as mistake:
        return complained(desk, fault_of(mistake))
    except KeyUnusable as error:
        return complained(desk, Fault("KEY", str(error), "", exits.USAGE, {}))
    except errors.RpcAgentError as error:
        return complained(desk, fault_of_error(error))
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        why = f"{os.strerror(error.errno) if error.errno else error}{where}"
        return complained(desk, Fault("STORAGE", why, _REMEDIES["STORAGE"], exits.TROUBLE, {}))
    finally:
        signal.signal(signal.SIGTERM, before)


def fault_of_error(error: errors.RpcAgentError) -> Fault:
    """The exit code is 1 for damage, 2 for what was asked for and cannot be, 5 for a store that cannot be used now."""
    code = str(error.data["code"])
    details = {name: value for name, value in error.data.items() if name not in {"code", "retryable"}}
    message = error.message
    if code == "STORE_LOCKED":
        since = f" since {details['since']}" if details.get("since") else ""
        message = f"another process ({details.get('pid')} on {details.get('host')}) owns this store{since}"
    exit_code = exits.FAILED if code == "STORE_DAMAGED" else exits.USAGE if code in _USAGE else exits.TROUBLE
    return Fault(code, message, _REMEDIES.get(code, ""), exit_code, details)


def complained(desk: Desk, fault: Fault) -> int:
    """Tells what went wrong; returns the exit code."""
    if desk.as_json:
        desk.fact(fault.value())
    for line in fault.lines():
        desk.say(line, "bad")
    return fault.exit_code


class _Terminated(KeyboardInterrupt):
    """SIGTERM: whatever is under way ends as at Ctrl-C."""


def _stop(_number: int, _frame: FrameType | None) -> None:
    raise _Terminated
