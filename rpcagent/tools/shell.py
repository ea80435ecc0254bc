"""The built-in tool `shell.run`: one command of the run's agent, in the run's workspace, as the daemon's own user.

Knows: how to start a command so that it shares nothing with the daemon but a pipe for its output, and what to say of the
end. Does not know: policy, runs, the log; what becomes of a long output (`spill.py`); nor how processes are found and ended,
which is the guard's part (`guard.py`: a small process for each command, which outlives the daemon for as long as it takes).

- The command is run by /bin/sh, on every host. It leads its own session; its input is the null device; it inherits no
  descriptor but 1 and 2, which are the same pipe, so that the output stands in the order in which it was written.
- Its environment is ENVIRONMENT, `LC_*`, the names that the configuration adds, and `TERM=dumb`: never a key by accident.
- Whatever it leaves running is stopped when it ends, when its time is up, when the call is cancelled, and when the daemon
  is gone, be it by SIGKILL: there are no survivors to collect. A process that another service starts for it (cron,
  docker, systemd-run) is that service's.
- Of a long output the head and the tail are shown. The whole is kept as a blob, named by its SHA-256, up to OUTPUT_BYTES;
  beyond that the command is stopped.

`at_most_once`: nobody can tell afterwards what a command has done. A command that was stopped at its time limit or for its
output has ended, and says so in its result; one that was cut by a cancelled call has an outcome that nobody knows.
"""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import anyio
import anyio.lowlevel
import msgspec

from rpcagent.runs.events import Trouble
from rpcagent.runs.outcomes import Failed, Lost, NotDone, ToolReply
from rpcagent.runs.ports import ToolRequest
from rpcagent.tools.process import Ended, Running
from rpcagent.tools.results import text_result
from rpcagent.tools.spill import OUTPUT_BYTES, Blobs, Output, named
from rpcagent.tools.workspace import Refused, Workspace

COMMAND_BYTES = 120_000
"""Below what the kernel takes as one argument (128 KiB)."""
TIMEOUT_MS = 120_000
TIMEOUT_MS_MAX = 600_000
STOPPING_MS = 4_000
"""A command is stopped by this much before the tool's own time limit, so that the end of it is still seen."""

SHELL = "/bin/sh"
ENVIRONMENT = ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TMPDIR")

_AGAIN = frozenset({errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE})


class _Run(msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    command: str
    timeout_ms: Annotated[int, msgspec.Meta(ge=1, le=TIMEOUT_MS_MAX)] = TIMEOUT_MS
    cwd: str = "."


class Shell:
    """The adapter. `store` is the daemon's own directory: no command starts in it. `blobs` is where whole outputs are kept
    (None: nowhere). `environment` names variables of the daemon's own that commands may see, beyond the default ones.

    `progress` gets the output as it comes, in pieces of any size; it must not block.
    """

    def __init__(
        self,
        store: str | None = None,
        *,
        blobs: Blobs | None = None,
        environment: Sequence[str] = (),
        progress: Callable[[ToolRequest, bytes], None] | None = None,
    ) -> None:
        self._store = store
        self._blobs = blobs
        self._names = frozenset({*ENVIRONMENT, *environment})
        self._progress = progress

    async def call(self, request: ToolRequest) -> ToolReply | Failed | NotDone | Lost:
        if request.workspace is None:
            return _failed("no_workspace", "This run has no workspace.")
        if request.spec.name != "shell.run":
            return _failed("incompatible", f"This version has no tool {request.spec.name}.")
        try:
            args = msgspec.convert(request.arguments, _Run)
        except msgspec.ValidationError as error:
            return _failed("invalid_arguments", str(error))
        if wrong := _wrong_with(args.command):
            return _failed("invalid_arguments", wrong)
        await anyio.lowlevel.checkpoint()
        output = Output(self._blobs)
        try:
            running = self._start(request, args, output)
        except Refused as refused:
            return _failed(refused.kind, refused.message)
        except OSError as error:
            return _not_started(error.errno or 0)
        try:
            return await self._outcome(await running.wait(), output, _limit_ms(request, args))
        finally:
            running.close()
            output.close()

    def _start(self, request: ToolRequest, args: _Run, output: Output) -> Running:
        progress = self._progress

        def take(piece: bytes) -> bool:
            more = output.add(piece)
            if progress is not None:
                progress(request, piece)
            return more

        assert request.workspace is not None
        workspace = Workspace(request.workspace, self._store)
        with workspace.directory(workspace.split(args.cwd)) as directory:
            return Running(
                (SHELL, args.command),
                directory=directory,
                environment=self._environment(),
                limit_ms=_limit_ms(request, args),
                take=take,
            )

    def _environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if name in self._names or name.startswith("LC_")}
        return {"PATH": os.defpath, "TERM": "dumb", **kept}

    async def _outcome(self, ended: Ended, output: Output, limit_ms: int) -> ToolReply | Failed | NotDone | Lost:
        if ended.errno is not None:
            return _not_started(ended.errno)
        if ended.status is None:
            return Lost(reason="crashed") if ended.dispatched else _not_started(errno.EAGAIN)
        with anyio.CancelScope(shield=True):  # it has ended: a cancellation comes too late
            await output.keep()
        text, cut = output.shown()
        code = os.waitstatus_to_exitcode(ended.status)
        shown: dict[str, Any] = {
            "exitCode": code if code >= 0 else 128 - code,
            "durationMs": ended.took_ms,
            "outputBytes": output.size,
        }
        if code < 0:
            shown["signal"] = _signal_name(-code)
        if ended.timed_out:
            shown["timedOut"] = True
        if output.full:
            shown["outputLimitReached"] = True
        if cut:
            shown |= {"truncated": True, "outputSha256": output.sha256}
        if output.kept is not None:
            shown["outputFile"] = named(output.kept)
        if ended.left:
            shown["leftRunning"] = ended.left
        bad = bool(code) or ended.timed_out or output.full
        result = text_result(text, shown, is_error=bad)
        notes = _notes(shown, limit_ms, ended.remaining, output.trouble)
        if not text:  # some models refuse an empty part
            result["content"] = []
            notes = ["no output", *(notes or ["exit code 0"])]
        if notes:
            result["content"].append({"type": "text", "text": f"[{'; '.join(notes)}]"})
        return ToolReply(result=result, blobs=(output.kept,) if output.kept is not None else ())


def _wrong_with(command: str) -> str:
    try:
        size = len(command.encode())
    except UnicodeEncodeError:
        return "The command is not valid Unicode."
    if "\0" in command:
        return "A command has no NUL."
    if not command.strip():
        return "The command is empty."
    return f"A command has at most {COMMAND_BYTES} bytes; write a script." if size > COMMAND_BYTES else ""


def _limit_ms(request: ToolRequest, args: _Run) -> int:
    whole = request.spec.timeout_ms
    return max(1, min(args.timeout_ms, whole - min(STOPPING_MS, whole // 2)))


def _notes(shown: dict[str, Any], limit_ms: int, remaining: int, trouble: str) -> list[str]:
    notes = []
    if shown.get("timedOut"):
        notes.append(f"stopped at the time limit of {limit_ms} ms")
    if shown.get("outputLimitReached"):
        notes.append(f"stopped at the output limit of {OUTPUT_BYTES} bytes")
    if "signal" in shown:
        notes.append(f"ended by {shown['signal']}")
    elif shown["exitCode"]:
        notes.append(f"exit code {shown['exitCode']}")
    if "leftRunning" in shown:
        notes.append(f"still running at its end, and stopped: {shown['leftRunning']}")
    if remaining:
        notes.append(f"could not be stopped: {remaining}")
    if trouble:
        notes.append(f"the whole output could not be kept ({trouble})")
    return notes


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIG{number}"


def _not_started(number: int) -> Failed | NotDone:
    trouble = Trouble(kind="not_started", message=f"The command could not be started: {os.strerror(number)}.")
    return NotDone(error=trouble) if number in _AGAIN else Failed(error=trouble)


def _failed(kind: str, message: str) -> Failed:
    return Failed(error=Trouble(kind=kind, message=message))
