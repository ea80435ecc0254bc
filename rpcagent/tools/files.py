"""The built-in tools `files.*`: read, list, search, write and edit text files below the run's workspace.

Knows: what each does, its limits, and why a repeat is harmless. Does not know: policy, runs, or the log. Small work is
done in place, for a file operation is shorter than handing it to a thread; long work yields between pieces; a search runs
in its own process.

Why `write` and `edit` are `idempotent` without remembering anything:

- `write` compares first. Bytes that are already there are left alone (`alreadyApplied`), not written again.
- `edit` names the file that it was made for by its SHA-256 (`sha256`, from `files.read`), and applies to no other content.
  An edit changes the content, so the same edit can never apply twice, also where `new` contains `old`. If the content is
  another, the edit is undone in memory: where that gives the named SHA-256, it was applied before, and the answer says so.
  Where that cannot be shown, a first attempt is a conflict; a later one answers that it cannot tell, and changes nothing.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from typing import Annotated, Any

import anyio
import anyio.lowlevel
import msgspec

from rpcagent.runs.events import Trouble
from rpcagent.runs.outcomes import Failed, Lost, NotDone, ToolReply
from rpcagent.runs.ports import ToolRequest
from rpcagent.tools.results import text_result
from rpcagent.tools.workspace import TEMPORARY, Refused, Workspace, is_temporary, open_regular, readable

PAGE_BYTES = 48 * 1024
WHOLE_BYTES = 8 * 1024 * 1024
ENTRIES = 1_000
SCANNED = 20_000
LIST_DEPTH = 64
PIECE = 1024 * 1024
UNDO_BYTES = 256 * 1024 * 1024
SEARCH_ANSWER_BYTES = 8 * 1024 * 1024

_AGAIN = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOMEM})
_LEFT_OUT = "[what policy denies is left out]"
_Digest = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{16,64}\Z")]


class _Args(msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    pass


class _Read(_Args, frozen=True, kw_only=True):
    path: str
    offset: Annotated[int, msgspec.Meta(ge=0)] = 0
    limit: Annotated[int, msgspec.Meta(ge=16, le=PAGE_BYTES)] = PAGE_BYTES


class _List(_Args, frozen=True, kw_only=True):
    path: str = "."
    recursive: bool = False


class _Search(_Args, frozen=True, kw_only=True):
    pattern: Annotated[str, msgspec.Meta(min_length=1, max_length=1_000)]
    path: str = "."
    glob: str | None = None
    limit: Annotated[int, msgspec.Meta(ge=1, le=500)] = 100


class _Write(_Args, frozen=True, kw_only=True):
    path: str
    content: str
    sha256: _Digest | None = None


class _Edit(_Args, frozen=True, kw_only=True):
    path: str
    old: Annotated[str, msgspec.Meta(min_length=1)]
    new: str
    sha256: _Digest
    replace_all: bool = False


class Files:
    """The adapter. `store` is the daemon's own directory; nothing in it, and no workspace inside of it, is touched."""

    def __init__(self, store: str | None = None) -> None:
        self._store = store

    async def call(self, request: ToolRequest) -> ToolReply | Failed | NotDone | Lost:
        if request.workspace is None:
            return _failed("no_workspace", "This run has no workspace.")
        action = _ACTIONS.get(request.spec.name)
        if action is None:
            return _failed("incompatible", f"This version has no tool {request.spec.name}.")
        args_type, perform = action
        try:
            args = msgspec.convert(request.arguments, args_type)
        except msgspec.ValidationError as error:
            return _failed("invalid_arguments", str(error))
        try:
            await anyio.lowlevel.checkpoint()
            outcome: ToolReply | Failed = await perform(
                Workspace(request.workspace, self._store, request.hidden), args, request
            )
        except Refused as refused:
            return _failed(refused.kind, refused.message)
        except _NotDurable:
            return Lost(reason="crashed")
        except OSError as error:
            return _trouble(error)
        return outcome


class _NotDurable(Exception):
    """It is in place, and the disk did not say that it will stay."""


async def _read(workspace: Workspace, args: _Read, _request: ToolRequest) -> ToolReply:
    parts = workspace.split(args.path)
    with workspace.file(parts) as (descriptor, entry):
        size = entry.st_size
        raw = os.pread(descriptor, args.limit, args.offset)
        text, start, end = _page(raw, args.offset, at_end=args.offset + len(raw) >= size)
        sha256 = hashlib.sha256(await _whole(descriptor)).hexdigest() if size <= WHOLE_BYTES else None
    following = end if end < size else None
    shown = {"path": "/".join(parts), "size": size, "offset": start, "nextOffset": following, "sha256": sha256}
    note = f"[bytes {start} to {end} of {size}; sha256 {sha256 or 'not computed, too large to edit'}"
    note += f"; go on with offset {following}]" if following is not None else "]"
    result = text_result(text, shown)
    result["content"].append({"type": "text", "text": note})
    return ToolReply(result=result)


def _page(raw: bytes, offset: int, *, at_end: bool) -> tuple[str, int, int]:
    """The text of a page, where it starts and where it ends: whole characters, and whole lines where it has a line end."""
    start = 0
    while offset and start < min(3, len(raw)) and raw[start] & 0xC0 == 0x80:
        start += 1  # the page was asked for from the middle of a character
    page = raw[start:]
    if not at_end and (line_end := page.rfind(b"\n")) >= 0:
        page = page[: line_end + 1]
    if b"\0" in page:
        raise Refused("not_text", "This is a binary file.")
    try:
        text = page.decode()
    except UnicodeDecodeError as error:
        cut_off = not at_end and error.reason == "unexpected end of data" and len(page) - error.start < 4
        if not cut_off or error.start == 0:
            raise Refused("not_text", f"This is not UTF-8 (at byte {offset + start + error.start}).") from None
        page = page[: error.start]
        text = page.decode()
    return text, offset + start, offset + start + len(page)


async def _list(workspace: Workspace, args: _List, _request: ToolRequest) -> ToolReply:
    start = workspace.split(args.path)
    entries: list[dict[str, Any]] = []
    todo, scanned, truncated = [start], 0, False
    while todo and not truncated:
        parts = todo.pop()
        try:
            with workspace.directory(parts) as directory:
                names = sorted(os.listdir(directory))  # noqa: PTH208  (of a descriptor)
                found = _entries(workspace, directory, parts, names[: SCANNED - scanned])
        except Refused:
            if parts == start:
                raise
            continue  # gone or changed meanwhile
        scanned += len(names)
        truncated = scanned > SCANNED or len(entries) + len(found) > ENTRIES
        entries.extend(found[: ENTRIES - len(entries)])
        if args.recursive and len(parts) < LIST_DEPTH:
            todo.extend((*parts, e["path"].rpartition("/")[2]) for e in reversed(found) if _entered(e))
        await anyio.lowlevel.checkpoint()
    lines = [f"{e['path']}/" if e["kind"] == "directory" else _line(e) for e in entries]
    if truncated:
        lines.append(f"[cut: more than {ENTRIES} entries were found or {SCANNED} looked at; list a directory below]")
    if workspace.hidden:
        lines.append(_LEFT_OUT)
    text = "\n".join(lines) or "[empty]"
    return ToolReply(result=text_result(text, {"entries": entries, "truncated": truncated}))


def _entries(workspace: Workspace, directory: int, parts: tuple[str, ...], names: list[str]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for name in names:
        try:
            entry = os.stat(name, dir_fd=directory, follow_symlinks=False)
        except OSError:  # gone meanwhile
            continue
        if is_temporary(name) or workspace.is_store(entry) or workspace.hides((*parts, name)):
            continue
        kind = _kind(entry.st_mode)
        shown: dict[str, Any] = {"path": readable("/".join((*parts, name))), "kind": kind}
        if kind == "file":
            shown["size"] = entry.st_size
        found.append(shown)
    return found


def _kind(mode: int) -> str:
    if stat.S_ISDIR(mode):
        return "directory"
    if stat.S_ISREG(mode):
        return "file"
    return "link" if stat.S_ISLNK(mode) else "special"


def _entered(entry: dict[str, Any]) -> bool:
    return entry["kind"] == "directory" and not entry["path"].endswith(("/.git",)) and entry["path"] != ".git"


def _line(entry: dict[str, Any]) -> str:
    return f"{entry['path']}\t{entry['size']}" if entry["kind"] == "file" else f"{entry['path']}\t({entry['kind']})"


async def _search(workspace: Workspace, args: _Search, _request: ToolRequest) -> ToolReply | Failed:
    workspace.split(args.path)
    _encoded(args.pattern + (args.glob or ""))
    asked = {**msgspec.to_builtins(args), "root": workspace.root, "store": workspace.store, "hidden": workspace.hidden}
    command = [sys.executable, "-I", "-m", "rpcagent.tools.search"]
    process = await anyio.run_process(
        command, input=msgspec.json.encode(asked), check=False, stderr=subprocess.DEVNULL, start_new_session=True
    )
    if process.returncode or len(process.stdout) > SEARCH_ANSWER_BYTES:
        return _failed("too_slow", "The search was stopped; use a simpler pattern or a smaller part of the workspace.")
    found = msgspec.json.decode(process.stdout)
    if "kind" in found:
        return _failed(found["kind"], found["message"])
    lines = [f"{match['path']}:{match['line']}: {match['text']}" for match in found["matches"]]
    notes = [f"{found['files']} files searched"]
    notes += [f"{count} skipped ({reason})" for reason, count in found["skipped"].items()]
    notes += [_LEFT_OUT[1:-1]] if workspace.hidden else []
    notes += [f"stopped at the limit of {found['stopped']}"] if found["stopped"] else []
    return ToolReply(result=text_result("\n".join([*lines, f"[{'; '.join(notes)}]"]), found))


async def _write(workspace: Workspace, args: _Write, request: ToolRequest) -> ToolReply | Failed:
    parts = workspace.split(args.path)
    if not parts:
        raise Refused("not_a_file", "The workspace is a directory, not a file.")
    content = _encoded(args.content)
    if len(content) > WHOLE_BYTES:
        raise Refused("too_large", f"At most {WHOLE_BYTES} bytes can be written.")
    wanted = hashlib.sha256(content).hexdigest()
    with workspace.directory(parts[:-1], create=args.sha256 is None) as parent:
        before = await _before(parent, parts, None if args.sha256 else len(content))
        if before is not None and before[0] == wanted:
            _settle(parent, parts)
            return _written(parts, wanted, len(content), already=True)
        if args.sha256 is not None and (before is None or not before[0].startswith(args.sha256)):
            return _failed("conflict", "The file is not the one that `sha256` names. Read it again.")
        _replace(parent, parts, content, request.key, before[1] if before else None)
    return _written(parts, wanted, len(content), already=False)


async def _before(parent: int, parts: tuple[str, ...], size: int | None) -> tuple[str, os.stat_result] | None:
    """The present file's SHA-256 and state; None where there is none. A file of another size than `size` is not read
    (SHA-256 empty): whatever it holds, it is not what will be written."""
    try:
        descriptor = open_regular(parent, parts[-1], "/".join(parts))
    except Refused as refused:
        if refused.kind == "not_found":
            return None
        raise
    try:
        entry = os.fstat(descriptor)
        if size is not None and entry.st_size != size:
            return "", entry
        return hashlib.sha256(await _whole(descriptor)).hexdigest(), entry
    finally:
        os.close(descriptor)


async def _edit(workspace: Workspace, args: _Edit, request: ToolRequest) -> ToolReply | Failed:
    parts = workspace.split(args.path)
    old, new = _encoded(args.old), _encoded(args.new)
    if old == new:
        return _failed("invalid_arguments", "`old` and `new` are the same.")
    with workspace.file(parts) as (descriptor, entry):
        content = await _whole(descriptor)
    _page(content, 0, at_end=True)  # refuses what is no text
    sha256 = hashlib.sha256(content).hexdigest()
    if not sha256.startswith(args.sha256):
        if await _was_applied(content, old, new, args):
            with workspace.directory(parts[:-1]) as parent:
                _settle(parent, parts)
            return _written(parts, sha256, len(content), already=True)
        return _not_this_file(request, parts, sha256)
    count = content.count(old)
    if count == 0:
        return _failed("no_match", "`old` does not occur in the file.")
    if count > 1 and not args.replace_all:
        return _failed("not_unique", f"`old` occurs {count} times. Give more of its surroundings, or `replaceAll`.")
    changed = content.replace(old, new)
    if len(changed) > WHOLE_BYTES:
        raise Refused("too_large", f"At most {WHOLE_BYTES} bytes can be written.")
    with workspace.directory(parts[:-1]) as parent:
        _replace(parent, parts, changed, request.key, entry)
    return _written(parts, hashlib.sha256(changed).hexdigest(), len(changed), already=False)


async def _was_applied(content: bytes, old: bytes, new: bytes, args: _Edit) -> bool:
    """Whether `content` is what this very edit makes of the file that `sha256` names: undone, it gives that digest."""
    if args.replace_all:
        if not new:
            return False  # where the parts stood that were taken out cannot be told
        undone = content.replace(new, old)
        return undone.replace(old, new) == content and hashlib.sha256(undone).hexdigest().startswith(args.sha256)
    hashed, hashed_to, work, yielded = hashlib.sha256(), 0, 0, 0
    for place in _places(content, new):
        hashed.update(content[hashed_to:place])
        hashed_to = place
        candidate = hashed.copy()
        candidate.update(old)
        candidate.update(content[place + len(new) :])
        if candidate.hexdigest().startswith(args.sha256):
            return True
        work += len(old) + len(content) - place
        if work > UNDO_BYTES:
            return False
        if work - yielded > PIECE:
            yielded = work
            await anyio.lowlevel.checkpoint()
    return False


def _places(content: bytes, new: bytes) -> Iterator[int]:
    """Where `new` may have been put. What was taken out may have stood anywhere; in a large file, only the starts of
    lines are looked at, which are the likeliest."""
    if not new and len(content) ** 2 <= 2 * UNDO_BYTES:
        yield from range(len(content) + 1)
        return
    wanted, shift = (new, 0) if new else (b"\n", 1)
    if not new:
        yield 0
    place = content.find(wanted)
    while place >= 0:
        yield place + shift
        place = content.find(wanted, place + 1)


def _not_this_file(request: ToolRequest, parts: tuple[str, ...], sha256: str) -> ToolReply | Failed:
    if request.attempt == 1:
        return _failed("conflict", f"The file changed since it was read; its sha256 is now {sha256}. Read it again.")
    text = (
        "Nothing was changed by this attempt. An earlier attempt may have made this edit, and the file changed since: "
        f"its sha256 is now {sha256}. Read it again."
    )
    shown = {"path": "/".join(parts), "sha256": sha256, "alreadyApplied": None}
    return ToolReply(result=text_result(text, shown, is_error=True))


def _written(parts: tuple[str, ...], sha256: str, size: int, *, already: bool) -> ToolReply:
    path = "/".join(parts)
    text = f"{path} {'was already so' if already else 'is written'}: {size} bytes, sha256 {sha256}."
    shown = {"path": path, "sha256": sha256, "size": size, "alreadyApplied": already}
    return ToolReply(result=text_result(text, shown))


def _replace(parent: int, parts: tuple[str, ...], content: bytes, key: str, before: os.stat_result | None) -> None:
    """Puts `content` in the file's place, whole or not at all, durable on return. `before`: the file that it replaces.

    Its temporary file is named by the step's key: what a crash leaves behind, the repeat takes away.
    """
    temporary = f"{TEMPORARY[0]}{hashlib.sha256(key.encode()).hexdigest()[:32]}{TEMPORARY[1]}"
    _remove(parent, temporary)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(temporary, flags, 0o666, dir_fd=parent)
    try:
        try:
            if before is not None:
                os.fchmod(descriptor, stat.S_IMODE(before.st_mode) & 0o777)
            left = memoryview(content)
            while left:
                left = left[os.write(descriptor, left) :]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        _unchanged(parent, parts[-1], before)
        os.replace(temporary, parts[-1], src_dir_fd=parent, dst_dir_fd=parent)
    except BaseException:
        _remove(parent, temporary)
        raise
    _sync(parent)


def _unchanged(parent: int, name: str, before: os.stat_result | None) -> None:
    """Refuses where another program changed the file since it was looked at."""
    try:
        now = os.stat(name, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        now = None
    same = (now is None) == (before is None)
    if now is not None and before is not None:
        same = (now.st_ino, now.st_mtime_ns, now.st_size) == (before.st_ino, before.st_mtime_ns, before.st_size)
    if not same:
        raise Refused("conflict", "Another program changed the file meanwhile.")


def _remove(parent: int, name: str) -> None:
    try:
        os.unlink(name, dir_fd=parent)
    except FileNotFoundError:
        return


def _settle(parent: int, parts: tuple[str, ...]) -> None:
    """Makes durable what an earlier attempt may have put in place just before it ended."""
    descriptor = open_regular(parent, parts[-1], "/".join(parts))
    try:
        _sync(descriptor)
    finally:
        os.close(descriptor)
    _sync(parent)


def _sync(descriptor: int) -> None:
    try:
        os.fsync(descriptor)
    except OSError:
        raise _NotDurable from None


async def _whole(descriptor: int) -> bytes:
    pieces: list[bytes] = []
    size = 0
    while piece := os.pread(descriptor, PIECE, size):
        size += len(piece)
        if size > WHOLE_BYTES:
            raise Refused("too_large", f"The file is larger than {WHOLE_BYTES} bytes.")
        pieces.append(piece)
        if len(piece) == PIECE:
            await anyio.lowlevel.checkpoint()
    return b"".join(pieces)


def _encoded(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise Refused("invalid_arguments", "A text is not valid Unicode.") from None


def _trouble(error: OSError) -> Failed | NotDone:
    """What the system refused. Writes are whole or not at all, so nothing happened."""
    trouble = Trouble(kind="io_error", message=f"The system refused: {os.strerror(error.errno or 0)}.")
    return NotDone(error=trouble) if error.errno in _AGAIN else Failed(error=trouble)


def _failed(kind: str, message: str) -> Failed:
    return Failed(error=Trouble(kind=kind, message=message))


_ACTIONS: dict[str, tuple[Any, Any]] = {
    "files.read": (_Read, _read),
    "files.list": (_List, _list),
    "files.search": (_Search, _search),
    "files.write": (_Write, _write),
    "files.edit": (_Edit, _edit),
}
