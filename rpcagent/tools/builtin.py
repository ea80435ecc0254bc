"""The built-in tools as a run pins them: names, what the model is told, and contracts. Data only."""

from __future__ import annotations

from typing import Any

from rpcagent.runs.effects import ToolSpec

_PATH: dict[str, Any] = {"type": "string", "description": "Relative to the workspace; no `..`, no symbolic links."}
_SHA256: dict[str, Any] = {"type": "string", "pattern": "^[0-9a-f]{16,64}$"}


def _object(required: list[str], **properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


BUILTIN: tuple[ToolSpec, ...] = (
    ToolSpec(
        name="files.read",
        description=(
            "Reads a text file (UTF-8), at most 48 KiB at a time. The last part of the answer names the file's sha256, "
            "which files.edit needs, and the offset to go on with."
        ),
        parameters=_object(
            ["path"],
            path=_PATH,
            offset={"type": "integer", "minimum": 0, "description": "First byte; default 0."},
            limit={"type": "integer", "minimum": 16, "maximum": 49152, "description": "Bytes; default 49152."},
        ),
        effect="read_only",
    ),
    ToolSpec(
        name="files.list",
        description="Lists a directory: files with their size, directories with a trailing slash. At most 1000 entries.",
        parameters=_object([], path={**_PATH, "default": "."}, recursive={"type": "boolean", "default": False}),
        effect="read_only",
    ),
    ToolSpec(
        name="files.search",
        description=(
            "Searches text files line by line for a Python regular expression. Skips .git, binary files and files above "
            "4 MiB. Each match has its line number and the byte offset to read from."
        ),
        parameters=_object(
            ["pattern"],
            pattern={"type": "string", "minLength": 1, "maxLength": 1000},
            path={**_PATH, "default": "."},
            glob={"type": "string", "description": "Shell pattern of a file's path or name, such as `*.py`."},
            limit={"type": "integer", "minimum": 1, "maximum": 500, "default": 100},
        ),
        effect="read_only",
        timeout_ms=20_000,
    ),
    ToolSpec(
        name="files.write",
        description=(
            "Writes a whole text file, and the directories it needs. With `sha256` (from files.read) only if the file "
            "is still that one."
        ),
        parameters=_object(["path", "content"], path=_PATH, content={"type": "string"}, sha256=_SHA256),
        effect="idempotent",
    ),
    ToolSpec(
        name="files.edit",
        description=(
            "Replaces `old`, which must occur exactly once, by `new`; with `replaceAll`, every occurrence. `sha256` is "
            "the file's, as files.read or the last edit of it gave it (at least the first 16 digits)."
        ),
        parameters=_object(
            ["path", "old", "new", "sha256"],
            path=_PATH,
            old={"type": "string", "minLength": 1},
            new={"type": "string"},
            sha256=_SHA256,
            replaceAll={"type": "boolean", "default": False},
        ),
        effect="idempotent",
    ),
    ToolSpec(
        name="shell.run",
        description=(
            "Runs a command with /bin/sh in the workspace and answers with its output, standard error included, and its "
            "exit code. Input is empty and there is no terminal. Of a long output the head and the tail are shown. What "
            "the command leaves running in the background is stopped when it ends."
        ),
        parameters=_object(
            ["command"],
            command={"type": "string", "minLength": 1, "description": "POSIX shell; at most 120000 bytes."},
            timeoutMs={"type": "integer", "minimum": 1, "maximum": 600_000, "default": 120_000},
            cwd={**_PATH, "default": "."},
        ),
        effect="at_most_once",
        timeout_ms=610_000,
    ),
)
