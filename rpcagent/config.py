"""What a configuration says, which one counts, and whether it is trusted.

Knows: agents, models, MCP servers, policy and budget by name, as the same objects that `start` takes inline; which ended runs
are deleted, which only a file can say; the file `rpcagent.toml`; and that a file which came with a workspace starts nothing,
widens nothing and deletes nothing until a person has trusted exactly these bytes at exactly this place. Does not know: TOML,
which is read by `config_toml` once there is a file.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from rpcagent import errors
from rpcagent.policy.retention import Retention, RetentionRule
from rpcagent.rpc import wire
from rpcagent.runs.definition import Budget

FILE_NAME = "rpcagent.toml"
FILE_BYTES_MAX = 1024 * 1024
TRUSTED = "trusted"
"""In the store's directory: a line `sha256:... "/path"` for each file that was trusted. Never in the workspace."""
TRUSTED_BYTES_MAX = 4 * 1024 * 1024


class RetentionRuleParams(wire.Params, frozen=True, kw_only=True):
    """As a rule of retention; `after` is a duration such as `12h`, `7d`. At least one of `after` and `keep` is given."""

    namespace: str | None = None
    label: str | None = None
    statuses: tuple[Literal["completed", "failed", "cancelled"], ...] = ()
    after: str | None = None
    keep: int | None = None


class RetentionParams(wire.Params, frozen=True, kw_only=True):
    """Which ended runs are deleted. Without rules none is."""

    rules: tuple[RetentionRuleParams, ...] = ()


class FileConfig(
    msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True, forbid_unknown_fields=True
):
    """A whole configuration. `policy` adds to that of every agent; `budget` is for agents and runs that have none.
    `retention` is for the whole store."""

    agents: dict[str, wire.AgentParams] = {}
    models: dict[str, wire.ModelParams] = {}
    mcp: dict[str, dict[str, Any]] = {}
    policy: wire.PolicyParams = wire.PolicyParams()
    budget: Budget | None = None
    retention: RetentionParams = RetentionParams()


EMPTY = FileConfig()


class Problem(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One thing that is wrong: where (`line` 0 and `path` empty: the file as a whole), why, and what to do."""

    file: str
    reason: str
    line: int = 0
    path: str = ""

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.line else self.file
        return printable(": ".join(part for part in (place, self.path, self.reason) if part))


class ConfigError(Exception):
    """A configuration that cannot be used. It is told before anything is served, so it is no error of the wire."""

    def __init__(self, problems: tuple[Problem, ...]) -> None:
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = problems


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration that counts. `path` None: there is none. Not `trusted`: `config` is empty, and `note` is the one
    line that says which file is not used and how it would be."""

    config: FileConfig = EMPTY
    path: Path | None = None
    digest: str = ""
    trusted: bool = True
    note: str = ""


NOTHING = Found()


def load(path: Path) -> FileConfig:
    """The configuration in a TOML file. Raises ConfigError with all that is wrong with it."""
    from rpcagent.config_toml import parse

    return parse(read(path), path).config


def retention_of(params: RetentionParams, path: str = "$.retention") -> Retention:
    """The rules as they are applied. Raises InvalidParams with the path of the first member at fault."""
    rules: dict[int, RetentionRule] = {}
    for place, said in enumerate(params.rules):
        rules[place] = retention_rule(said, rules, f"{path}.rules[{place}]")
    return Retention(tuple(rules.values()))


def retention_rule(said: RetentionRuleParams, before: Mapping[int, RetentionRule], path: str) -> RetentionRule:
    """One rule, which the rules `before` leave something to decide. Raises InvalidParams with the path of the member at fault."""
    if said.after is None and said.keep is None:
        raise errors.InvalidParams(
            'this deletes nothing; say when a run may go: after = "30d", keep = 100, or both', path=path
        )
    if said.keep is not None and said.keep < 1:
        raise errors.InvalidParams(
            "at least 1 run is kept; to delete by age alone, leave this out", path=f"{path}.keep"
        )
    if said.namespace is not None:
        _check_namespace(said.namespace, f"{path}.namespace")
    if said.label is not None and not said.label.partition("=")[0]:
        raise errors.InvalidParams("a label is a name, or name=value", path=f"{path}.label")
    after_ms = None if said.after is None else wire.duration_ms(said.after, f"{path}.after")
    if after_ms == 0:
        raise errors.InvalidParams("a duration here is more than 0, such as `7d`", path=f"{path}.after")
    rule = RetentionRule(
        namespace=said.namespace, label=said.label, statuses=said.statuses, after_ms=after_ms, keep=said.keep
    )
    for place, other in before.items():
        if other.covers(rule):
            reason = f"no run comes this far, rules[{place}] decides about all of these; put this rule before it"
            raise errors.InvalidParams(reason, path=path)
    return rule


def _check_namespace(namespace: str, path: str) -> None:
    try:
        wire.check_namespace(namespace)
    except errors.InvalidParams as error:
        raise errors.InvalidParams(error.details["reason"], path=path) from None


def find(workspace: Path, explicit: Path | None, trust: bool, store: Path) -> Found:
    """`explicit`, which the caller trusts by naming it; else the workspace's own file if `trust` says so or its bytes were
    trusted before; else nothing. Raises ConfigError for a file that counts and cannot be used."""
    path = explicit or workspace / FILE_NAME
    if explicit is None and not os.path.lexists(path):
        return NOTHING
    if explicit is not None or trust:
        return _used(path, read(path))
    try:
        raw = read(path)
    except ConfigError as error:
        return Found(path=path, trusted=False, note=f"a file in the workspace is not used: {error}")
    if is_trusted(path, raw, store):
        return _used(path, raw)
    note = (
        f"{path} is not used: nobody has trusted its present content ({digest_of(raw)}). To see what it asks for: "
        f"rpcagent check{_options(workspace, store)}. To trust it: rpcagent trust{_options(workspace, store)}"
    )
    return Found(path=path, digest=digest_of(raw), trusted=False, note=note)


def is_trusted(path: Path, raw: bytes, store: Path) -> bool:
    """Whether a person has said so of these bytes at this place."""
    return _line(path, digest_of(raw)) in _trusted_lines(store)


def trust(path: Path, digest: str, store: Path) -> None:
    """Records that a person trusts these bytes at this place; it lasts until one of the two is another. Makes the store if
    there is none yet. Raises OSError, and RpcAgentError where the store cannot be made."""
    if _line(path, digest) in _trusted_lines(store):
        return
    from rpcagent.journal.disk import make_store_folder

    make_store_folder(store)
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(store / TRUSTED, flags, 0o600), "wb") as stream:
        stream.write(_line(path, digest).encode() + b"\n")


def read(path: Path) -> bytes:
    """The bytes of a configuration. Raises ConfigError. A pipe or a device is refused, not waited for."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise ConfigError((Problem(file=str(path), reason="this is not a file"),))
        with os.fdopen(descriptor, "rb") as stream:
            raw = stream.read(FILE_BYTES_MAX + 1)
    except FileNotFoundError:
        reason = "there is no such file; `rpcagent init` writes one to begin with"
        raise ConfigError((Problem(file=str(path), reason=reason),)) from None
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "this is no path"
        raise ConfigError((Problem(file=str(path), reason=f"it cannot be read: {why}"),)) from None
    if len(raw) > FILE_BYTES_MAX:
        reason = f"it has more than {FILE_BYTES_MAX} bytes; a long text belongs into a file named in instruction_files"
        raise ConfigError((Problem(file=str(path), reason=reason),))
    return raw


def printable(text: str) -> str:
    """One line that does nothing to a terminal, whatever names a file has in it."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def digest_of(raw: bytes) -> str:
    return "sha256:" + hashlib.sha256(raw).hexdigest()


def _used(path: Path, raw: bytes) -> Found:
    from rpcagent.config_toml import parse

    return Found(config=parse(raw, path).config, path=path, digest=digest_of(raw))


def _line(path: Path, digest: str) -> str:
    # The place counts as well: the same bytes elsewhere may name other programs by the same words.
    return f"{digest} {json.dumps(str(path.parent.resolve() / path.name))}"


def _trusted_lines(store: Path) -> set[str]:
    try:
        with os.fdopen(os.open(store / TRUSTED, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as stream:
            return set(stream.read(TRUSTED_BYTES_MAX).decode("ascii", "replace").splitlines())
    except OSError:
        return set()


def _options(workspace: Path, store: Path) -> str:
    return f" --workspace {shlex.quote(str(workspace))} --store {shlex.quote(str(store))}"
