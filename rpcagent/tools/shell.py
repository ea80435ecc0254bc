"""The built-in tool `shell.run`: one command of the run's agent, in the run's workspace, as the daemon's own user.

Knows: how to start a command so that it shares nothing with the daemon but a pipe for its output, how to read the pipe in
bounded memory, and what to say of the end. Does not know: policy, runs, the log; nor how processes are found and ended,
which is the guard's part (`guard.py`: a small process for each command, which outlives the daemon for as long as it takes).

- The command is run by /bin/sh, on every host. It leads its own session; its input is the null device; it inherits no
  descriptor but 1 and 2, which are the same pipe, so that the output stands in the order in which it was written.
- Its environment is ENVIRONMENT, `LC_*`, the names that the configuration adds, and `TERM=dumb`: never a key by accident.
- Whatever it leaves running is stopped when it ends, when its time is up, when the call is cancelled, and when the daemon
  is gone, be it by SIGKILL: there are no survivors to collect. A process that another service starts for it (cron,
  docker, systemd-run) is that service's.
- Of a long output the head and the tail are shown. The whole is kept in a file of its own, named by its SHA-256, up to
  OUTPUT_BYTES; beyond that the command is stopped.

`at_most_once`: nobody can tell afterwards what a command has done. A command that was stopped at its time limit or for its
output has ended, and says so in its result; one that was cut by a cancelled call has an outcome that nobody knows.
"""

from __future__ import annotations

import codecs
import contextlib
import errno
import hashlib
import os
import secrets
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import msgspec

from rpcagent.runs.events import Trouble
from rpcagent.runs.outcomes import Failed, Lost, NotDone, ToolReply
from rpcagent.runs.ports import ToolRequest
from rpcagent.tools.process import Ended, Running
from rpcagent.tools.results import text_result
from rpcagent.tools.workspace import TEMPORARY, Refused, Workspace

COMMAND_BYTES = 120_000
"""Below what the kernel takes as one argument (128 KiB)."""
OUTPUT_BYTES = 64 * 1024 * 1024
HEAD_BYTES = 24 * 1024
TAIL_BYTES = 24 * 1024
SHOWN_BYTES = 56 * 1024
"""As JSON, in which a control character takes six bytes. With the notes, less than what a result may have."""
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
    """The adapter. `store` is the daemon's own directory: no command starts in it. `spill` is where whole outputs are kept
    (None: in `blobs` of the store, and without one nowhere). `environment` names variables of the daemon's own that commands
    may see, beyond the default ones.

    `progress` gets the output as it comes, in pieces of any size; it must not block.
    """

    def __init__(
        self,
        store: str | None = None,
        *,
        spill: str | None = None,
        environment: Sequence[str] = (),
        progress: Callable[[ToolRequest, bytes], None] | None = None,
    ) -> None:
        self._store = store
        folder = spill or (f"{store}/blobs" if store else None)
        self._spill = _Spill(folder) if folder else None
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
        output = _Output(self._spill)
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

    def _start(self, request: ToolRequest, args: _Run, output: _Output) -> Running:
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

    async def _outcome(self, ended: Ended, output: _Output, limit_ms: int) -> ToolReply | Failed | NotDone | Lost:
        if ended.errno is not None:
            return _not_started(ended.errno)
        if ended.status is None:
            return Lost(reason="crashed") if ended.dispatched else _not_started(errno.EAGAIN)
        text, cut = output.shown()
        kept = None
        with anyio.CancelScope(shield=True):  # it has ended: a cancellation comes too late
            kept = await output.keep() if cut else None
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
        if kept is not None:
            shown["outputFile"] = kept
        if ended.left:
            shown["leftRunning"] = ended.left
        bad = bool(code) or ended.timed_out or output.full
        result = text_result(text, shown, is_error=bad)
        notes = _notes(shown, limit_ms, ended.remaining, output.trouble if cut else "")
        if not text:  # some models refuse an empty part
            result["content"] = []
            notes = ["no output", *(notes or ["exit code 0"])]
        if notes:
            result["content"].append({"type": "text", "text": f"[{'; '.join(notes)}]"})
        return ToolReply(result=result)


class _Spill:
    """The directory of whole outputs. What a killed daemon left half-written in it goes when it is first used again."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._swept = False

    def create(self) -> tuple[int, Path]:
        self._folder.mkdir(mode=0o700, exist_ok=True)
        if not self._swept:
            for path in self._folder.glob(f"{TEMPORARY[0]}*{TEMPORARY[1]}"):
                path.unlink(missing_ok=True)
            self._swept = True
        path = self._folder / f"{TEMPORARY[0]}{secrets.token_hex(8)}{TEMPORARY[1]}"
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600), path


class _Output:
    """What a command has printed: head and tail in memory, the whole in a file once it is longer than those."""

    def __init__(self, spill: _Spill | None) -> None:
        self.size = 0
        self.full = False
        self.trouble = ""
        self._spill = spill
        self._file: int | None = None
        self._path = Path()
        self._hash = hashlib.sha256()
        self._head = bytearray()
        self._tail = bytearray()

    @property
    def sha256(self) -> str:
        return self._hash.hexdigest()

    def add(self, piece: bytes) -> bool:
        """False: this was the last that is wanted."""
        if self.size + len(piece) > OUTPUT_BYTES:
            self.full = True
            piece = piece[: OUTPUT_BYTES - self.size]
        if self._file is None and self.size + len(piece) > HEAD_BYTES + TAIL_BYTES:
            self._open()
        self._write(piece)
        self._hash.update(piece)
        self.size += len(piece)
        room = HEAD_BYTES - len(self._head)
        self._head += piece[:room]
        self._tail += piece[room:] if room else piece
        if len(self._tail) > 4 * TAIL_BYTES:
            del self._tail[:-TAIL_BYTES]
        return not self.full

    def shown(self) -> tuple[str, bool]:
        """The text, and whether it is only a part of the output."""
        if self.size <= HEAD_BYTES + TAIL_BYTES:
            text = (self._head + self._tail).decode("utf-8", "replace")
            if _json_bytes(text) <= SHOWN_BYTES:
                return text, False
        head = codecs.getincrementaldecoder("utf-8")("replace").decode(
            bytes(self._head)
        )  # leaves a character cut in two
        tail = bytes(self._tail[-TAIL_BYTES:])
        for _ in range(3):
            tail = tail[1:] if tail and tail[0] & 0xC0 == 0x80 else tail
        ending = tail.decode("utf-8", "replace")
        half = SHOWN_BYTES // 2
        head, ending = _fitting(head, half), _fitting(ending[::-1], half)[::-1]
        marker = f"[cut: this is the head and the tail; the whole output has {self.size} bytes, sha256 {self.sha256}]"
        return f"{head}\n{marker}\n{ending}", True

    async def keep(self) -> str | None:
        """The name of the file with the whole output, durable; None where it could not be kept: `trouble` says why."""
        if self._file is None:
            self._open()
        if self._file is None:
            return None
        path = self._path.with_name(self.sha256)
        try:
            await anyio.to_thread.run_sync(_make_durable, self._file, self._path, path)
        except OSError as error:
            self._give_up(error)
            return None
        self.close(unlink=False)
        return str(path)

    def close(self, *, unlink: bool = True) -> None:
        if self._file is None:
            return
        os.close(self._file)
        self._file = None
        if unlink:
            with contextlib.suppress(OSError):
                self._path.unlink()

    def _open(self) -> None:
        """Everything so far is still in memory: the file begins with it."""
        if self._spill is None or self.trouble:
            return
        try:
            self._file, self._path = self._spill.create()
        except OSError as error:
            self._give_up(error)
        self._write(bytes(self._head + self._tail))

    def _write(self, piece: bytes) -> None:
        if self._file is None:
            return
        left = memoryview(piece)
        try:
            while left:
                left = left[os.write(self._file, left) :]
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        """The command goes on: what it does matters more than what it says."""
        self.trouble = errno.errorcode.get(error.errno or 0, "EIO")
        self.close()


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


def _json_bytes(text: str) -> int:
    return len(msgspec.json.encode(text))


def _fitting(text: str, most: int) -> str:
    """The longest start of `text`, or nearly so, that has at most `most` bytes as JSON."""
    while (size := _json_bytes(text)) > most:
        text = text[: len(text) * most // size]
    return text


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


def _make_durable(descriptor: int, path: Path, final: Path) -> None:
    os.fsync(descriptor)
    path.replace(final)
    folder = os.open(final.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _not_started(number: int) -> Failed | NotDone:
    trouble = Trouble(kind="not_started", message=f"The command could not be started: {os.strerror(number)}.")
    return NotDone(error=trouble) if number in _AGAIN else Failed(error=trouble)


def _failed(kind: str, message: str) -> Failed:
    return Failed(error=Trouble(kind=kind, message=message))
