"""From the text of a configuration to its objects, and every complaint to the line that it is about.

Knows: that keys are written `like_this` in a file and sent `likeThis` on the wire, by walking the very types of the wire, so
that there is no second set of them; what is free text below them (arguments, headers, names) stays as it is. Knows that a
secret is never kept in a file. Does not know: which file counts, or what can only be found out by asking a server.

All that is wrong is told at once, each with its line.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Callable, Iterable
from datetime import date, time
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Struct

from rpcagent import errors
from rpcagent.config import ConfigError, FileConfig, Problem, RetentionParams, retention_rule
from rpcagent.models.scripted import Turn, validate_script
from rpcagent.policy.retention import RetentionRule
from rpcagent.rpc import wire
from rpcagent.runs.definition import Budget
from rpcagent.toml_lines import Keys, lines_of
from rpcagent.tools.builtin import BUILTIN
from rpcagent.tools.inline import InlineTool, inline_tool
from rpcagent.tools.mcp_config import ServerConfig, ToolConfig, server_config

_BELOW: dict[tuple[type[Struct], str], Any] = {
    (FileConfig, "mcp"): dict[str, ServerConfig],
    (wire.AgentParams, "mcp"): dict[str, ServerConfig],
    (wire.AgentParams, "tools"): tuple[str | InlineTool, ...],
    (wire.ModelParams, "script"): tuple[Turn, ...],
    (ServerConfig, "tools"): dict[str, ToolConfig],
}
"""What the wire takes as any object, as its reader takes it."""

_T = TypeVar("_T")
_NAME = re.compile(r"[A-Za-z0-9_-]+")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_WORD = re.compile(r"\w+")
_CAMEL = re.compile(r"(?<=[a-z0-9])([A-Z])")
_STEP = re.compile(r"\.[^.\[]+|\[[^\]]*\]")
_SYNTAX_AT = re.compile(r" \((?:at line (\d+), column \d+|at end of document)\)\Z")
_SECRET_KEY = re.compile(r"(?i)api_?key|(auth|access)?_?token|secret|passw(or)?d|authorization|credentials?")
_SECRET_VARIABLE = re.compile(r"(?i)(\A|_)(api_?key|token|secret|passw(or)?d|access_key)\Z")
_SECRET_HEADERS = frozenset({"authorization", "proxy-authorization", "api-key", "x-api-key", "cookie"})
_SECRET_TEXT = re.compile(
    r"\b(?:sk|pk|rk|gsk|xai|hf|gh[opsu]|github_pat|glpat|xox[abp])[-_](?=\S{0,60}\d)[A-Za-z0-9_-]{16,}"
    r"|\bAKIA[A-Z0-9]{16}\b|-----BEGIN [A-Z ]*PRIVATE KEY|://[^/\s:@$]+:[^/\s@$]{3,}@|\bBearer\s+(?!\$\{)\S{8,}"
)
_SHORT_SECRET = 8
_NO_SECRETS = "a secret is never kept in this file; put it into the environment"
_EXPECTED = re.compile(r"Expected `([a-z |]+)`(.*), got `([a-z]+)`")
_INTEGERS = range(-(2**63), 2**63)
_WORDS = {"str": "a text", "int": "a whole number", "float": "a number", "bool": "true or false", "array": "a list",
          "object": "a table"}  # fmt: skip
_GOT = {**_WORDS, "float": "a number with a point"}


class Document:
    """A configuration that has been read, and where in its file everything stands."""

    def __init__(self, file: str, text: str) -> None:
        self.config = FileConfig()
        self._file = file
        self._lines = lines_of(text)
        self._ways: dict[str, Keys] = {"$": ()}

    def at(self, keys: Keys, reason: str) -> Problem:
        """A complaint about the member at `keys`, or about the nearest one around it that has a line."""
        line = next((line for cut in range(len(keys), 0, -1) if (line := self._lines.get(keys[:cut]))), 0)
        return Problem(file=self._file, line=line, path=_shown(keys), reason=reason)

    def translated(self, error: errors.InvalidParams) -> Problem:
        """A complaint of a part of the daemon, whose paths and words are those of the wire."""
        path, rest = str(error.details["path"]), ""
        while path not in self._ways and path != "$":
            step = [*_STEP.finditer(path)][-1] if _STEP.search(path) else None
            path, rest = (path[: step.start()], step[0] + rest) if step else ("$", "")
        problem = self.at(self._ways.get(path, ()), _respelled(str(error.details["reason"])))
        return msgspec.structs.replace(problem, path=problem.path + _respelled(rest))

    def found(self, way: str, keys: Keys) -> None:
        """Remembers that what the wire calls `way` stands at `keys`."""
        self._ways[way] = keys


def parse(raw: bytes, path: Path) -> Document:
    """Reads a whole file. Relative paths in it are relative to the folder of `path`. Raises ConfigError."""
    file = str(path)
    text = _text(raw, file)
    said = _toml(text, file)
    document = Document(file, text)
    reader = _Reader(document, path.absolute().parent)
    params = reader.struct(said, FileConfig, (), "$")
    if not reader.problems:
        document.config = msgspec.convert(params, FileConfig)
        reader.problems += _Meaning(document).problems()
    if reader.problems:
        raise ConfigError(tuple(sorted(reader.problems, key=lambda problem: problem.line)))
    return document


def _text(raw: bytes, file: str) -> str:
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        reason = "this is not UTF-8; save the file as UTF-8"
        raise ConfigError((Problem(file=file, line=line, reason=reason),)) from None


def _toml(text: str, file: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        place = _SYNTAX_AT.search(str(error))
        line = int(place[1]) if place and place[1] else text.rstrip().count("\n") + 1
        reason = f"this is not TOML: {_SYNTAX_AT.sub('', str(error))}"
        raise ConfigError((Problem(file=file, line=line, reason=reason),)) from None
    except (RecursionError, ValueError):
        reason = "this is not TOML: it is nested too deeply, or has a number or a date that is none"
        raise ConfigError((Problem(file=file, reason=reason),)) from None


class _Reader:
    """Walks what TOML said along the types, and gives it back as the wire would have sent it."""

    def __init__(self, document: Document, folder: Path) -> None:
        self.problems: list[Problem] = []
        self._document = document
        self._folder = folder

    def struct(self, said: dict[str, Any], kind: type[Struct], keys: Keys, way: str) -> dict[str, Any]:
        hints = get_type_hints(kind, include_extras=True)
        fields = {field.name: field for field in msgspec.structs.fields(kind)}
        out: dict[str, Any] = {}
        for key, value in said.items():
            here = (*keys, key)
            if key not in fields:
                self._wrong(here, _unknown(key, kind, list(fields)))
                continue
            field = fields[key]
            there = f"{way}.{field.encode_name}"
            out[field.encode_name] = self._any(value, _BELOW.get((kind, key), hints[key]), here, there)
        for field in fields.values():
            if field.required and field.name not in said:
                self._wrong(keys, f"`{field.name}` is missing")
        if kind is wire.ModelParams:
            self._model(out, keys)
        return out

    def _any(self, value: Any, kind: Any, keys: Keys, way: str) -> Any:
        self._document.found(way, keys)
        for option in _options(kind):
            origin, inner = get_origin(option), get_args(option)
            if isinstance(value, dict) and isinstance(option, type) and issubclass(option, Struct):
                return self.struct(value, option, keys, way)
            if isinstance(value, dict) and origin is dict:
                return {name: self._any(v, inner[1], (*keys, name), f"{way}.{name}") for name, v in value.items()}
            if isinstance(value, list) and origin is tuple:
                return [self._any(v, inner[0], (*keys, i), f"{way}[{i}]") for i, v in enumerate(value)]
        if kind is Any and isinstance(value, dict):
            return {name: self._any(v, Any, (*keys, name), f"{way}.{name}") for name, v in value.items()}
        if kind is Any and isinstance(value, list):
            return [self._any(v, Any, (*keys, i), f"{way}[{i}]") for i, v in enumerate(value)]
        self._leaf(value, kind, keys)
        return value

    def _leaf(self, value: Any, kind: Any, keys: Keys) -> None:
        if isinstance(value, date | time):  # a datetime is a date
            self._wrong(keys, "a date is nothing that JSON has; put it in quotes")
        elif isinstance(value, float) and not math.isfinite(value):
            self._wrong(keys, "a number is finite")
        elif type(value) is int and value not in _INTEGERS:
            self._wrong(keys, "this number is too long; put it in quotes")
        elif isinstance(value, str) and _secret(keys, value):
            self._wrong(keys, f"{_NO_SECRETS}, and write ${{NAME}} here")
        elif kind is not Any:
            try:
                msgspec.convert(value, kind)
            except msgspec.ValidationError as error:
                self._wrong(keys, _in_words(str(error), value, kind))

    def _model(self, out: dict[str, Any], keys: Keys) -> None:
        variable, script = out.get("apiKeyEnv"), out.get("scriptFile")
        if isinstance(variable, str) and variable and not _VARIABLE.fullmatch(variable):
            reason = "this names a variable of the environment, such as OPENAI_API_KEY; the key itself is never kept in a file"
            self._wrong((*keys, "api_key_env"), reason)
        if isinstance(script, str):
            file = self._folder / script
            if "\0" in script or not file.is_file():
                self._wrong((*keys, "script_file"), f"there is no such file in {self._folder}")
            out["scriptFile"] = str(file)

    def _wrong(self, keys: Keys, reason: str) -> None:
        self.problems.append(self._document.at(keys, reason))


class _Meaning:
    """What is well-formed and cannot work: names that nothing has, durations that are none, contracts that do not hold."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self._config = document.config
        self._problems: list[Problem] = []

    def problems(self) -> list[Problem]:
        """All of them."""
        config = self._config
        self._try(wire.rules_of, config.policy, "$.policy")
        self._budget(config.budget, ("budget",))
        self._retention(config.retention)
        for name, model in config.models.items():
            self._model(model, ("models", name))
        for name, server in config.mcp.items():
            self._try(server_config, name, server, f"$.mcp.{name}")
        for name, agent in config.agents.items():
            self._agent(name, agent, ("agents", name))
        return self._problems

    def _agent(self, name: str, agent: wire.AgentParams, keys: Keys) -> None:
        way = f"$.agents.{name}"
        if agent.name not in {name, wire.AgentParams().name}:
            self._wrong((*keys, "name"), f"an agent is named by its table, which says {name!r}; leave this out")
        if isinstance(agent.model, wire.ModelParams):
            self._model(agent.model, (*keys, "model"))
        elif agent.model not in self._config.models:
            self._wrong((*keys, "model"), _no_such("model", agent.model, self._config.models, "models"))
        for server, said in agent.mcp.items():
            self._try(server_config, server, said, f"{way}.mcp.{server}")
        self._try(wire.rules_of, agent.policy, f"{way}.policy")
        self._budget(agent.budget, (*keys, "budget"))
        seen: set[str] = set()
        for place, tool in enumerate(agent.tools):
            here = (*keys, "tools", place)
            for tool_name in self._tool(tool, agent, here, f"{way}.tools[{place}]"):
                if tool_name in seen:
                    self._wrong(here, f"the tool {tool_name!r} is there twice")
                seen.add(tool_name)

    def _tool(self, tool: str | dict[str, Any], agent: wire.AgentParams, keys: Keys, way: str) -> list[str]:
        """The names that it adds, as far as they are known before a server is asked."""
        if isinstance(tool, dict):
            spec = self._try(inline_tool, tool, way)
            return [spec.name] if spec is not None else []
        servers = {**self._config.mcp, **agent.mcp}
        if tool.startswith("mcp:"):
            if (name := tool.removeprefix("mcp:")) not in servers:
                self._wrong(keys, _no_such("MCP server", name, servers, "mcp"))
            return [tool]
        names = [spec.name for spec in BUILTIN if tool in {spec.name, spec.name.partition(".")[0]}]
        if not names:
            known = dict.fromkeys(part for spec in BUILTIN for part in (spec.name.partition(".")[0], spec.name))
            if tool in servers:
                self._wrong(keys, f'the tools of an MCP server are named "mcp:{tool}"')
            else:
                self._wrong(keys, f"there is no built-in tool or server {tool!r}{_nearest(tool, known)}")
        return names

    def _model(self, model: wire.ModelParams, keys: Keys) -> None:
        self._try(wire.duration_ms, model.retry_for, _way((*keys, "retryFor")))
        if model.script and model.script_file is not None:
            self._wrong((*keys, "script_file"), "give `script` or `script_file`, not both")
        if model.script:
            self._try(validate_script, model.script, _way((*keys, "script")))

    def _budget(self, budget: Budget | None, keys: Keys) -> None:
        for name in Budget.__struct_fields__:
            amount = getattr(budget, name, None)
            if amount is not None and not amount > 0:
                self._wrong((*keys, name), "a limit is more than 0; without one, leave it out")
        self._try(wire.check_budget, budget, _way(keys))

    def _retention(self, retention: RetentionParams) -> None:
        right: dict[int, RetentionRule] = {}
        for place, said in enumerate(retention.rules):
            rule = self._try(retention_rule, said, right, f"$.retention.rules[{place}]")
            if rule is not None:
                right[place] = rule

    def _try(self, check: Callable[..., _T], *arguments: Any) -> _T | None:
        try:
            return check(*arguments)
        except errors.InvalidParams as error:
            self._problems.append(self._document.translated(error))
        return None

    def _wrong(self, keys: Keys, reason: str) -> None:
        self._problems.append(self._document.at(keys, reason))


def _options(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in {Union, UnionType} else (kind,)


def _unknown(key: str, kind: type[Struct], known: list[str]) -> str:
    if kind is wire.ModelParams and _SECRET_KEY.fullmatch(key):
        return f'{_NO_SECRETS}, and its name here: api_key_env = "OPENAI_API_KEY"'
    if _SECRET_KEY.fullmatch(key) and kind is not Budget:  # whose `token` is a number that lacks a letter
        return _NO_SECRETS
    snake = _in_snake(key).replace("-", "_")
    if snake in known:
        return f"there is no such key; did you mean `{snake}`?"
    return f"there is no such key{_nearest(key, known, '`')}"


def _no_such(what: str, name: str, known: Iterable[str], table: str) -> str:
    return f"there is no {what} named {name!r}{_nearest(name, known) or f'; add a table [{table}.{name}]'}"


def _nearest(name: str, known: Iterable[str], quote: str = "'") -> str:
    near = get_close_matches(name, known, 1)
    if near:
        return f"; did you mean {quote}{near[0]}{quote}?"
    listed = ", ".join(known)
    return f"; there are: {listed}" if listed else ""


def _secret(keys: Keys, value: str) -> bool:
    """A value that looks like a secret, or stands where secrets stand and does not come from the environment."""
    if keys[-1:] == ("api_key_env",):
        return False  # it has a complaint of its own
    if _SECRET_TEXT.search(value):
        return True
    if len(keys) < 2 or len(value) < _SHORT_SECRET or "${" in value:
        return False
    name = str(keys[-1])
    if keys[-2] == "headers":
        return name.lower() in _SECRET_HEADERS
    return keys[-2] == "env" and _SECRET_VARIABLE.search(name) is not None


def _in_words(error: str, value: Any, kind: Any) -> str:
    """What msgspec says about a value, in the words of TOML."""
    reason = error.partition(" - at `")[0]
    expected = _EXPECTED.fullmatch(reason)
    if expected:
        wanted = " or ".join(_WORDS.get(word, word) for word in expected[1].split(" | ") if word != "null")
        remedy = "; put it in square brackets" if wanted == _WORDS["array"] and not isinstance(value, dict) else ""
        return f"{wanted}{expected[2]} is wanted, and this is {_GOT.get(expected[3], expected[3])}{remedy}"
    choices = [str(choice) for option in _options(kind) if get_origin(option) is Literal for choice in get_args(option)]
    if choices:
        return f"{value!r} is not one of {', '.join(choices)}{_nearest(str(value), choices).partition('; there')[0]}"
    return reason.replace("`", "").removeprefix("Expected ") + " is wanted"


def _respelled(text: str) -> str:
    """The keys in it as a file spells them; all other words, names of tools among them, as they are."""
    return _WORD.sub(lambda word: _spellings().get(word[0], word[0]), text)


@cache
def _spellings() -> dict[str, str]:
    kinds = (wire.AgentParams, wire.ModelParams, Budget, ServerConfig, ToolConfig, InlineTool, Turn)
    return {field.encode_name: field.name for kind in kinds for field in msgspec.structs.fields(kind)}


def _in_snake(text: str) -> str:
    return _CAMEL.sub(lambda found: "_" + found[1].lower(), text)


def _way(keys: Keys) -> str:
    return "$" + "".join(f".{key}" for key in keys)


def _shown(keys: Keys) -> str:
    """`$.agents.fixer.tools[1]`; a name that TOML would quote is quoted."""
    parts = (f"[{key}]" if isinstance(key, int) else f".{key}" if _NAME.fullmatch(key) else f'."{key}"' for key in keys)
    return "$" + "".join(parts)
