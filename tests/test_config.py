"""Configurations: what is read, what is refused and at which line, and whose word is needed before one counts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rpcagent import config
from rpcagent.config import ConfigError, FileConfig
from rpcagent.toml_lines import lines_of

DESIGN = """\
[agents.fixer]
instructions = "Fix it."
model = "main"
tools = ["files", "shell", "mcp:tickets"]
[models.main]
provider = "openai"            # any endpoint of that kind
base_url = "http://127.0.0.1:8080/v1"
model = "qwen3-coder"
api_key_env = "OPENAI_API_KEY" # secrets by reference only
[mcp.tickets]
command = ["python", "tickets_server.py"]
[mcp.tickets.tools.close_ticket]
effect = "reconcilable"
lookup = { tool = "get_ticket", arguments = { id = "{id}" }, found = "status == 'closed'" }
[policy]
rules = [ { tool = "files.read", do = "allow" }, { effect = "at_most_once", do = "ask", expires = "24h" } ]
[budget]
tokens = 200_000
steps = 200
active_s = 3600
"""

EVERYTHING = """\
[agents.closer]
instruction_files = ["AGENTS.md"]
read_only_commands = ["default", "npm ls"]
budget = { cost_usd = 1.5 }
policy = { rules = [{ tool = "a_b.*", do = "deny", arguments = { some_name = "x*" }, paths = ["src/*"] }] }
tools = [
  "files.read",
  { name = "tickets.close", effect = "reconcilable", settle_ms = 50, timeout_ms = 9_000, parameters = { type = "object", \
properties = { some_id = { type = "string" } } }, http = { url = "http://127.0.0.1/{some_id}", method = "PUT", \
headers = { x_trace = "t" } }, lookup = { url = "http://127.0.0.1/{some_id}", found = "is_done" } },
]
[agents.closer.model]
base_url = "http://127.0.0.1/v1"
provider = "openai"
max_output_tokens = 10
idle_timeout_s = 1.5
retry_for = "1h"
options = { top_k = 3, nested_option = { some_key = [1, "a_b"] } }
headers = { x_own = "${SOME_NAME}" }
[agents.closer.mcp.own_server]
command = ["true"]
timeout_s = 3
[models.told_in_turns]
script = [{ text = "Hello.", delay_ms = 5, usage = { input_tokens = 3 }, calls = [{ tool = "files.list", arguments = { some_arg = 1 } }] }, \
{ fail = { kind = "busy", retry_after_ms = 7 } }]
[mcp.my_server]
command = ["server"]
env = { SOME_TOKEN = "${SOME_TOKEN}" }
trust_read_only = true
[mcp.my_server.tools.some_tool]
effect = "idempotent"
key_argument = "client_token"
key_ttl_ms = 1000
hidden = true
"""

THE_SAME_INLINE: dict[str, Any] = {
    "agents": {
        "closer": {
            "instructionFiles": ["AGENTS.md"],
            "readOnlyCommands": ["default", "npm ls"],
            "budget": {"costUsd": 1.5},
            "policy": {
                "rules": [{"tool": "a_b.*", "do": "deny", "arguments": {"some_name": "x*"}, "paths": ["src/*"]}]
            },
            "tools": [
                "files.read",
                {
                    "name": "tickets.close",
                    "effect": "reconcilable",
                    "settleMs": 50,
                    "timeoutMs": 9_000,
                    "parameters": {"type": "object", "properties": {"some_id": {"type": "string"}}},
                    "http": {"url": "http://127.0.0.1/{some_id}", "method": "PUT", "headers": {"x_trace": "t"}},
                    "lookup": {"url": "http://127.0.0.1/{some_id}", "found": "is_done"},
                },
            ],
            "model": {
                "baseUrl": "http://127.0.0.1/v1",
                "provider": "openai",
                "maxOutputTokens": 10,
                "idleTimeoutS": 1.5,
                "retryFor": "1h",
                "options": {"top_k": 3, "nested_option": {"some_key": [1, "a_b"]}},
                "headers": {"x_own": "${SOME_NAME}"},
            },
            "mcp": {"own_server": {"command": ["true"], "timeoutS": 3}},
        }
    },
    "models": {
        "told_in_turns": {
            "script": [
                {
                    "text": "Hello.",
                    "delayMs": 5,
                    "usage": {"inputTokens": 3},
                    "calls": [{"tool": "files.list", "arguments": {"some_arg": 1}}],
                },
                {"fail": {"kind": "busy", "retryAfterMs": 7}},
            ]
        }
    },
    "mcp": {
        "my_server": {
            "command": ["server"],
            "env": {"SOME_TOKEN": "${SOME_TOKEN}"},
            "trustReadOnly": True,
            "tools": {
                "some_tool": {"effect": "idempotent", "keyArgument": "client_token", "keyTtlMs": 1000, "hidden": True}
            },
        }
    },
}

NO_SECRET = "a secret is never kept in this file; put it into the environment"
NO_KEY = "this names a variable of the environment, such as OPENAI_API_KEY; the key itself is never kept in a file"
SECRET = "sk-proj-0123456789abcdefghij"

BAD: dict[str, tuple[str, str]] = {
    "a line that is no TOML": ("[agents.a]\nmodel =\n", "2: this is not TOML: Invalid value"),
    "a table that never ends": ('a = [\n  "x",\n', "2: this is not TOML: Invalid value"),
    "a key given twice": (
        '[agents.a]\nmodel = "m"\nmodel = "m"\n',
        "3: this is not TOML: Cannot overwrite a value",
    ),
    "a key with a letter missing": (
        '[agents.fixer]\n\nmodle = "main"\n',
        "3: $.agents.fixer.modle: there is no such key; did you mean `model`?",
    ),
    "a key as it is on the wire": (
        '[models.main]\nbaseUrl = "http://localhost"\n',
        "2: $.models.main.baseUrl: there is no such key; did you mean `base_url`?",
    ),
    "a key like no other": (
        "[budget]\nxyz = 1\n",
        "2: $.budget.xyz: there is no such key; there are: steps, attempts, repeats, tokens, cost_usd, active_s",
    ),
    "a table like no other": (
        "[agent.fixer]\n",
        "1: $.agent: there is no such key; did you mean `agents`?",
    ),
    "a number for a text": (
        "[agents.fixer]\ninstructions = 5\n",
        "2: $.agents.fixer.instructions: a text is wanted, and this is a whole number",
    ),
    "a text for a number": (
        '[models.main]\ntimeout_s = "90"\n',
        "2: $.models.main.timeout_s: a number is wanted, and this is a text",
    ),
    "a fraction for a whole number": (
        "[budget]\nsteps = 1.5\n",
        "2: $.budget.steps: a whole number is wanted, and this is a number with a point",
    ),
    "a text for a list": (
        '[agents.fixer]\ntools = "files"\n',
        "2: $.agents.fixer.tools: a list is wanted, and this is a text; put it in square brackets",
    ),
    "a date": (
        "[policy]\nrules = [\n  { do = 'ask', expires = 2030-01-01 },\n]\n",
        "3: $.policy.rules[0].expires: a date is nothing that JSON has; put it in quotes",
    ),
    "a number that JSON has not": (
        "[models.main]\noptions = { temperature = nan }\n",
        "2: $.models.main.options.temperature: a number is finite",
    ),
    "a word that is almost one": (
        '[policy]\nrules = [{ do = "alow" }]\n',
        "2: $.policy.rules[0].do: 'alow' is not one of allow, ask, deny; did you mean 'allow'?",
    ),
    "a missing key": ('[policy]\nrules = [\n\n{ tool = "x" }]\n', "4: $.policy.rules[0]: `do` is missing"),
    "a duration that is none": (
        '[policy]\nrules = [{ do = "ask", expires = "soon" }]\n',
        "2: $.policy.rules[0].expires: a duration is a whole number and ms, s, m, h or d, such as `24h`",
    ),
    "a limit of nothing": (
        "[agents.fixer]\n[agents.fixer.budget]\ntokens = 0\n",
        "3: $.agents.fixer.budget.tokens: a limit is more than 0; without one, leave it out",
    ),
    "a limit beyond all use": (
        "[budget]\ncost_usd = 1e308\n",
        "2: $.budget.cost_usd: a limit is at most 1000000000",
    ),
    "a model that is not there": (
        '[models.main]\n[agents.fixer]\nmodel = "man"\n',
        "3: $.agents.fixer.model: there is no model named 'man'; did you mean 'main'?",
    ),
    "a model where there is none": (
        '[agents.fixer]\nmodel = "main"\n',
        "2: $.agents.fixer.model: there is no model named 'main'; add a table [models.main]",
    ),
    "a server that is not there": (
        '[agents.fixer]\ntools = [\n  "files",\n  "mcp:tikets",\n]\n[mcp.tickets]\ncommand = ["true"]\n',
        "4: $.agents.fixer.tools[1]: there is no MCP server named 'tikets'; did you mean 'tickets'?",
    ),
    "a server without its prefix": (
        '[agents.fixer]\ntools = ["tickets"]\n[mcp.tickets]\ncommand = ["true"]\n',
        '2: $.agents.fixer.tools[0]: the tools of an MCP server are named "mcp:tickets"',
    ),
    "a tool that is not there": (
        '[agents.fixer]\ntools = ["files.reed"]\n',
        "2: $.agents.fixer.tools[0]: there is no built-in tool or server 'files.reed'; did you mean 'files.read'?",
    ),
    "a tool named twice": (
        '[agents.fixer]\ntools = ["files",\n"files.read"]\n',
        "3: $.agents.fixer.tools[1]: the tool 'files.read' is there twice",
    ),
    "a contract that does not hold": (
        '[agents.fixer]\ntools = [\n{ name = "a.b", effect = "idempotent", key_ttl_ms = 0, http = { url = "http://x/" } }]\n',
        "3: $.agents.fixer.tools[0].key_ttl_ms: 1 to 315360000000",
    ),
    "words of the wire in a reason": (
        '[mcp.t]\ncommand = ["true"]\n[mcp.t.tools.close]\nkey_ttl_ms = 5\n',
        "4: $.mcp.t.tools.close.key_ttl_ms: only an idempotent tool has key_ttl_ms",
    ),
    "a condition that is none": (
        '[mcp.t]\ncommand = ["true"]\n[mcp.t.tools."close it"]\neffect = "reconcilable"\nlookup.tool = "get"\nlookup.found = "=="\n',
        '6: $.mcp.t.tools."close it".lookup.found: this is no JMESPath expression',
    ),
    "a command that is a text": (
        '[mcp.t]\ncommand = "server"\n',
        "2: $.mcp.t.command: a list is wanted, and this is a text; put it in square brackets",
    ),
    "an agent with another name": (
        '[agents.fixer]\nname = "closer"\n',
        "2: $.agents.fixer.name: an agent is named by its table, which says 'fixer'; leave this out",
    ),
    "a script and a file of one": (
        '[models.main]\nscript = [{ text = "x" }]\nscript_file = "bad.toml"\n',
        "3: $.models.main.script_file: give `script` or `script_file`, not both",
    ),
    "a turn that is none": (
        '[[models.main.script]]\ntext = "x"\n[[models.main.script]]\ntext = "y"\ndelay_ms = -1\n',
        "5: $.models.main.script[1].delay_ms: a delay is 0 to 3600000 ms",
    ),
    "a key in the file": (
        f'[models.main]\napi_key = "{SECRET}"\n',
        f'2: $.models.main.api_key: {NO_SECRET}, and its name here: api_key_env = "OPENAI_API_KEY"',
    ),
    "a key for the name of one": (
        f'[models.main]\napi_key_env = "{SECRET}"\n',
        f"2: $.models.main.api_key_env: {NO_KEY}",
    ),
    "a key in a header": (
        '[models.main]\nheaders = { X-Api-Key = "0123456789" }\n',
        f"2: $.models.main.headers.X-Api-Key: {NO_SECRET}, and write ${{NAME}} here",
    ),
    "a key in an environment": (
        '[mcp.t]\ncommand = ["true"]\nenv.API_TOKEN = "0123456789"\n',
        f"3: $.mcp.t.env.API_TOKEN: {NO_SECRET}, and write ${{NAME}} here",
    ),
    "a key in a command": (
        f'[mcp.t]\ncommand = [\n"server",\n"--key={SECRET}"]\n',
        f"4: $.mcp.t.command[1]: {NO_SECRET}, and write ${{NAME}} here",
    ),
    "a password in an address": (
        '[mcp.t]\ncommand = ["server", "postgres://me:hunter22@db/x"]\n',
        f"2: $.mcp.t.command[1]: {NO_SECRET}, and write ${{NAME}} here",
    ),
    "a password by its name": (
        '[mcp.t]\ncommand = ["true"]\npassword = "hunter22"\n',
        f"3: $.mcp.t.password: {NO_SECRET}",
    ),
}


def written(folder: Path, text: str, name: str = "bad.toml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def refusal(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        config.load(path)
    return str(caught.value)


# Reading


def test_a_whole_configuration_is_read(tmp_path: Path):
    read = config.load(written(tmp_path, DESIGN))
    assert read.models["main"].base_url == "http://127.0.0.1:8080/v1"
    assert read.agents["fixer"].tools == ("files", "shell", "mcp:tickets")
    assert read.mcp["tickets"]["tools"]["close_ticket"]["lookup"]["arguments"] == {"id": "{id}"}
    assert [rule.do for rule in read.policy.rules] == ["allow", "ask"]
    assert read.budget is not None
    assert (read.budget.tokens, read.budget.steps, read.budget.active_s) == (200_000, 200, 3600.0)


def test_a_file_says_what_the_same_object_says_inline(tmp_path: Path):
    read = config.load(written(tmp_path, EVERYTHING))
    assert read == msgspec.convert(THE_SAME_INLINE, FileConfig)
    assert msgspec.json.decode(msgspec.json.encode(read), type=FileConfig) == read


def test_a_script_file_is_looked_for_beside_the_configuration(tmp_path: Path):
    (tmp_path / "turns.json").write_text('[{"text": "Hello."}]')
    path = written(tmp_path, '[models.main]\nscript_file = "turns.json"\n')
    assert config.load(path).models["main"].script_file == str(tmp_path / "turns.json")


def test_an_empty_file_is_a_configuration(tmp_path: Path):
    assert config.load(written(tmp_path, "\ufeff# nothing yet\n")) == config.EMPTY


# Refusing


@pytest.mark.parametrize("case", BAD)
def test_what_is_wrong_is_told_with_its_line_and_the_way_out(case: str, tmp_path: Path):
    text, complaint = BAD[case]
    path = written(tmp_path, text)
    assert refusal(path) == f"{path}:{complaint}"


def test_all_that_is_wrong_is_told_at_once_from_top_to_bottom(tmp_path: Path):
    path = written(tmp_path, '[budget]\nstep = 1\n[agents.a]\nmodle = "x"\ntools = 3\n')
    assert [line.removeprefix(str(path))[:3] for line in refusal(path).splitlines()] == [":2:", ":4:", ":5:"]


@pytest.mark.parametrize("place", ["instructions", "model", "name", "mcp.x.command", "budget.steps", "tools"])
def test_a_secret_in_the_wrong_place_is_never_repeated(place: str, tmp_path: Path):
    assert SECRET not in refusal(written(tmp_path, f'[agents.a]\n{place} = "{SECRET}"\n'))


def test_a_name_in_a_complaint_does_nothing_to_a_terminal(tmp_path: Path):
    said = refusal(written(tmp_path, '[agents."\\u001b[2J"]\nmodle = "x"\n'))
    assert said.isprintable()


def test_bytes_that_are_no_text_are_told_with_their_line(tmp_path: Path):
    path = tmp_path / "bad.toml"
    path.write_bytes(b'[agents.a]\ninstructions = "\xff"\n')
    assert refusal(path) == f"{path}:2: this is not UTF-8; save the file as UTF-8"


def test_a_file_that_is_not_there_is_told_with_a_way_to_begin(tmp_path: Path):
    path = tmp_path / "none.toml"
    assert refusal(path) == f"{path}: there is no such file; `rpcagent init` writes one to begin with"


def test_a_file_that_is_too_long_is_not_read_to_its_end(tmp_path: Path):
    path = written(tmp_path, "#" * (config.FILE_BYTES_MAX + 1))
    assert refusal(path).startswith(f"{path}: it has more than 1048576 bytes; ")


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    assert refusal(path) == f"{path}: this is not a file"
    assert refusal(tmp_path) == f"{tmp_path}: this is not a file"


def test_a_nest_without_end_is_refused(tmp_path: Path):
    path = written(tmp_path, "a = " + "[" * 100_000)
    assert refusal(path).startswith(f"{path}: this is not TOML: ")


# Lines

keys = st.one_of(st.from_regex(r"[A-Za-z0-9_-]{1,5}", fullmatch=True), st.text(min_size=1, max_size=4)).filter(
    lambda key: not any(0xD800 <= ord(c) <= 0xDFFF for c in key)
)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(
            keys,
            st.lists(
                st.tuples(keys, st.sampled_from(['"]"', "'''\n[x]\n'''", "[1,\n# ]\n{ a = '}' }]", "2030-01-01", '""']))
            ),
        ),
        unique_by=lambda table: table[0],
    )
)
def test_every_member_has_the_line_that_it_stands_on(tables: list[tuple[str, list[tuple[str, str]]]]):
    text, expected = "", {}
    for table, pairs in tables:
        expected[table,] = text.count("\n") + 1
        text += f"[{json.dumps(table)}] # a table\n"
        for key, value in dict(pairs).items():
            expected[table, key] = text.count("\n") + 1
            text += f'  {json.dumps(key)} = {value} # "\n'
    try:
        tomllib.loads(text)
    except tomllib.TOMLDecodeError:  # an escape that only JSON has
        return
    found = lines_of(text)
    assert {path: found[path] for path in expected} == expected


def test_tables_in_lists_are_counted():
    found = lines_of("[[a.b]]\nc = 1\n[[a.b]]\nc = 2\n[a.b.d]\ne.f = 3\n")
    assert found["a", "b", 0, "c"] == 2
    assert found["a", "b", 1] == 3
    assert found["a", "b", 1, "c"] == 4
    assert found["a", "b", 1, "d", "e", "f"] == 6


# What it costs


def test_a_start_without_a_file_loads_no_reader_of_files(tmp_path: Path):
    program = (
        "import sys; from pathlib import Path; from rpcagent import config; here = Path(sys.argv[1]);"
        "assert config.find(here, None, False, here) is config.NOTHING;"
        "print(sorted({'tomllib', 'difflib', 'rpcagent.config_toml', 'rpcagent.tools'} & sys.modules.keys()))"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"
