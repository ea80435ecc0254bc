"""The commands `check` and `trust`: the report about a configuration, for a person or as JSON, and the exit code.

Knows: how a report is laid out, and in which words the next step is told. Does not know: how it was found out.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path

import msgspec

from rpcagent import config
from rpcagent.config import printable
from rpcagent.errors import RpcAgentError
from rpcagent.examine import AgentShown, ModelShown, Report, RetentionShown, ToolShown, examine

_COLUMNS = ("tool", "effect", "declared by", "policy")


def check(workspace: Path, named: Path | None, store: Path, *, trusted: bool, as_json: bool) -> int:
    """Prints what the configuration comes to. 0: it can be used; 1: it cannot, or there is none."""
    report = examine(named or workspace / config.FILE_NAME, workspace, store, trusted=trusted or named is not None)
    if as_json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(report)).decode() + "\n")
    else:
        _write(_text(report))
        if report.ok and not report.trusted:
            _write(["", *_not_trusted(workspace, store)])
    return 0 if report.ok else 1


def trust(workspace: Path, store: Path) -> int:
    """Records that a person trusts the workspace's file as it is now, and prints what that lets it do. 1: it is not fit to
    be used, and nothing is recorded."""
    path = workspace / config.FILE_NAME
    report = examine(path, workspace, store, trusted=True, ask_servers=False)
    _write(_text(report))
    if not report.ok:
        _write(["", "Not trusted: put it right first."])
        return 1
    try:
        config.trust(path, report.digest, store)
    except (OSError, RpcAgentError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        _write(["", f"Not trusted: it cannot be recorded in {store}: {why}"])
        return 1
    _write(
        [
            "",
            f"Trusted in {store}: the next `rpcagent serve` on this store uses this file, until it is changed.",
            "The programs and scripts that it names are not part of it, and can change without a word.",
        ]
    )
    return 0


def _not_trusted(workspace: Path, store: Path) -> list[str]:
    return [
        "Not trusted: `rpcagent serve` uses nothing of this file. If you want all of the above:",
        f"  rpcagent trust --workspace {shlex.quote(str(workspace))} --store {shlex.quote(str(store))}",
    ]


def _text(report: Report) -> list[str]:
    lines = [report.file, *([f"  {report.digest}, {_trust(report)}"] if report.digest else [])]
    if report.starts:
        lines += ["", "starts"]
        lines += _table([(f"  mcp:{name}", shlex.join(command)) for name, command in report.starts.items()])
    for agent in report.agents:
        lines += ["", *_agent(agent)]
    if report.retention:
        lines += ["", "retention: the first line that fits an ended run decides; all others stay"]
        lines += _table([("  runs", "are deleted"), *map(_retention, report.retention)])
    if report.warnings:
        lines += ["", *(f"  warning: {warning}" for warning in report.warnings)]
    if report.problems:
        lines += ["", *(str(problem) for problem in report.problems)]
    warnings = len(report.warnings) + sum(len(agent.warnings) for agent in report.agents)
    counts = [(len(report.problems), "problem"), (warnings, "warning"), (len(report.agents), "agent")]
    said = ", ".join(
        f"{count} {word}{'' if count == 1 else 's'}" for count, word in counts if count or word == "problem"
    )
    return [*lines, "", f"{'ok' if report.ok else 'not ok'}: {said}"]


def _trust(report: Report) -> str:
    return "trusted" if report.trusted else "not trusted"


def _retention(rule: RetentionShown) -> tuple[str, str]:
    parts = [" or ".join(rule.statuses)] if rule.statuses else []
    parts += [f"namespace {rule.namespace or 'none'}"] if rule.namespace is not None else []
    parts += [f"label {rule.label}"] if rule.label is not None else []
    after = f"{_duration(rule.after_ms)} after their end" if rule.after_ms is not None else ""
    kept = f"the newest {rule.keep} of each namespace" if rule.keep is not None else ""
    goes = f"{after}, but not {kept}" if after and kept else after or f"all but {kept}"
    return f"  {', '.join(parts) or 'any'}", goes


def _agent(agent: AgentShown) -> list[str]:
    amounts = (f"{amount:g} {name}" for name, amount in agent.budget.items())
    lines = [f"agent {agent.name}", f"  model   {_model(agent.model)}", f"  budget  {', '.join(amounts) or 'none'}", ""]
    rows = [_COLUMNS, *(_tool(tool) for tool in agent.tools)]
    if agent.tools:
        lines += _table([("  " + first, *rest) for first, *rest in rows])
    if agent.skipped:
        lines += ["", "  left out"]
        lines += _table([(f"  {name}", reason) for name, reason in agent.skipped.items()])
    if agent.warnings:
        lines += ["", *(f"  warning: {warning}" for warning in agent.warnings)]
    return lines


def _model(model: ModelShown) -> str:
    parts = [model.provider] if model.provider == "scripted" else [model.provider, model.model]
    if model.base_url:
        parts.append(model.base_url)
    parts += [f"{key} is {'set' if is_set else 'not set'}" for key, is_set in model.keys.items()]
    return (f"{model.name}: " if model.name else "") + ", ".join(parts)


def _tool(tool: ToolShown) -> tuple[str, str, str, str]:
    policy = f"{tool.policy}{' by default' if tool.by_default else ''}"
    if tool.expires_ms is not None and tool.policy == "ask":
        policy += f", for {_duration(tool.expires_ms)}"
    return tool.name, tool.effect, tool.declared_by, "; ".join([policy, *tool.unless])


def _duration(ms: int) -> str:
    units = (("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1_000))
    # `24h` rather than `1d`: people write it so.
    return next((f"{ms // size}{unit}" for unit, size in units if ms >= 2 * size and not ms % size), f"{ms}ms")


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _write(lines: Iterable[str]) -> None:
    bold = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    for line in lines:
        shown = printable(line)
        heading = bold and shown and not shown.startswith(" ")
        sys.stdout.write(f"\x1b[1m{shown}\x1b[0m\n" if heading else shown + "\n")
