"""Allow, ask or deny: pure rules over a call. Deny beats ask beats allow; what no rule names is asked unless it only reads.

The argument `path` is compared in one spelling, relative to the workspace: `./a//b` and `/workspace/a/b` are `a/b`, so that no
rule is passed by writing the same place another way.
"""

from __future__ import annotations

import posixpath
from fnmatch import fnmatchcase
from typing import Any

from rpcagent.runs.definition import Definition, Rule, Verdict
from rpcagent.runs.effects import ToolSpec

_STRICT: dict[Verdict, int] = {"allow": 0, "ask": 1, "deny": 2}
_LOOKING = ("files.read", "files.list", "files.search")


def verdict(
    rules: tuple[Rule, ...], spec: ToolSpec, arguments: dict[str, Any], workspace: str | None = None
) -> tuple[Verdict, Rule | None]:
    """What the rules say, and the rule that said it (None: the default)."""
    if isinstance(arguments.get("path"), str):
        arguments = {**arguments, "path": _one_spelling(arguments["path"], workspace)}
    best: tuple[Verdict, Rule | None] | None = None
    for rule in rules:
        if _matches(rule, spec, arguments) and (best is None or _STRICT[rule.do] > _STRICT[best[0]]):
            best = (rule.do, rule)
    return best or (("allow" if spec.effect == "read_only" else "ask"), None)


def stricter(
    pinned: tuple[Rule, ...],
    present: tuple[Rule, ...] | None,
    spec: ToolSpec,
    arguments: dict[str, Any],
    workspace: str | None = None,
) -> tuple[Verdict, Rule | None]:
    """The stricter of the policy that the run pinned and today's. `present` None: today's configuration says nothing."""
    first = verdict(pinned, spec, arguments, workspace)
    if present is None:
        return first
    second = verdict(present, spec, arguments, workspace)
    return second if _STRICT[second[0]] > _STRICT[first[0]] else first


def _matches(rule: Rule, spec: ToolSpec, arguments: dict[str, Any]) -> bool:
    if rule.tool is not None and not fnmatchcase(spec.name, rule.tool):
        return False
    if rule.effect is not None and rule.effect != spec.effect:
        return False
    for name, pattern in rule.arguments.items():
        if name not in arguments or not fnmatchcase(_text(arguments[name]), pattern):
            return False
    if not rule.paths:
        return True
    path = arguments.get("path")
    return isinstance(path, str) and any(fnmatchcase(path, pattern) for pattern in rule.paths)


def _one_spelling(path: str, workspace: str | None) -> str:
    whole = posixpath.normpath(posixpath.join(workspace or "/", path))
    below = whole.removeprefix((workspace or "").rstrip("/") + "/")
    return below.lstrip("/") if workspace is None else below


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return value if isinstance(value, str) else str(value)


def hidden_paths(definition: Definition, present: dict[str, tuple[Rule, ...]]) -> tuple[str, ...]:
    """The paths that nothing may look at whatever else it asks for, by the pinned rules and by today's. A rule that denies
    writing alone hides nothing."""
    rules = definition.rules + present.get(definition.agent, ())
    return tuple(
        pattern
        for rule in rules
        if rule.do == "deny" and not rule.arguments and _is_about_looking(rule)
        for pattern in rule.paths
    )


def _is_about_looking(rule: Rule) -> bool:
    tools = rule.tool is None or any(fnmatchcase(name, rule.tool) for name in _LOOKING)
    return tools and rule.effect in {None, "read_only"}
