"""`check`, `trust` and `serve` with a configuration, as processes: what they print, what they start, how they end."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rpcagent import config
from tests.service.mcp_driver import McpFaultServer

pytestmark = [pytest.mark.process, pytest.mark.anyio]

CONFIG = """\
[agents.closer]
model = "main"
tools = [
    "files.read", "files.write", "shell", "mcp:bank",
    {{ name = "tickets.assign", http = {{ url = "http://127.0.0.1:9/{{id}}" }}, parameters = {{ type = "object", \
properties = {{ id = {{ type = "string" }} }} }} }},
]
[models.main]
provider = "openai"
base_url = "http://127.0.0.1:9/v1"
model = "qwen"
api_key_env = "BANK_TEST_KEY"
headers = {{ X-Org = "${{BANK_TEST_ORG}}" }}
[mcp.bank]
command = {command}
env = {env}
trust_read_only = true
[mcp.bank.tools.charge_once]
effect = "idempotent"
key_argument = "idempotency_key"
[mcp.bank.tools.wipe]
effect = "at_most_once"
[policy]
rules = [
    {{ tool = "shell.*", do = "ask", expires = "24h" }},
    {{ tool = "bank.charge*", do = "allow" }},
    {{ tool = "files.write", do = "allow" }},
    {{ tool = "files.write", do = "deny", paths = [".git/*"] }},
    {{ tool = "shell.run", do = "deny", arguments = {{ command = "*sudo*" }} }},
    {{ tool = "file.*", do = "deny" }},
]
"""

REPORT = """\
{file}
  {digest}, trusted

starts
  mcp:bank  {command}

agent closer
  model   main: openai, qwen, http://127.0.0.1:9/v1, BANK_TEST_KEY is set, BANK_TEST_ORG is not set
  budget  500 steps, 2000 attempts, 20 repeats

  tool                               effect        declared by          policy
  files.read                         read_only     built in             allow by default
  files.write                        idempotent    built in             allow; deny where path is like '.git/*'
  shell.run                          at_most_once  built in             ask, for 24h; deny where command is like '*sudo*'
  bank.read                          read_only     its server, trusted  allow by default
  bank.charge                        at_most_once  nobody               allow
  bank.charge_once                   idempotent    this file            allow
  bank.charge_findable               at_most_once  nobody               allow
  bank.find                          read_only     its server, trusted  allow by default
  bank.wipe                          at_most_once  this file            ask by default
  bank.a_name__with_blanks_69f0f288  at_most_once  nobody               ask by default
  tickets.assign                     at_most_once  nobody               ask by default

  left out
  bank.odd  providers refuse oneOf at the root of a schema

  warning: BANK_TEST_ORG is not set here; where `serve` runs it must be
  warning: no limit of tokens or cost: set `tokens` or `cost_usd` under [budget]
  warning: bank.charge acts unasked and is at_most_once: when it is interrupted, only a person can tell whether \
it happened. Declare its effect, or let policy ask
  warning: bank.charge_findable acts unasked and is at_most_once: when it is interrupted, only a person can tell whether \
it happened. Declare its effect, or let policy ask

  warning: {file}:29: $.policy.rules[5]: this is about no tool that any agent has

ok: 0 problems, 5 warnings, 1 agent
"""


@pytest.fixture
def bank(tmp_path: Path) -> Iterator[McpFaultServer]:
    server = McpFaultServer(tmp_path / "bank")
    yield server
    server.close()


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    (tmp_path / "workspace").mkdir()
    return tmp_path / "workspace"


def rpcagent(folder: Path, *argv: str, said: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    at = ["--workspace", str(folder), "--store", str(folder.parent / "store")]
    return subprocess.run(
        [sys.executable, "-P", "-m", "rpcagent", argv[0], *at, *argv[1:]],
        input=said,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, **env},
    )


def trap(workspace: Path) -> Path:
    """Writes a configuration whose server would leave a mark, and is no server. The mark."""
    mark = workspace.parent / "mark"
    program = f"open({str(mark)!r}, 'w')"
    (workspace / "rpcagent.toml").write_text(
        "[agents.trap]\n"
        'tools = ["mcp:trap"]\n'
        "[mcp.trap]\n"
        f"command = {json.dumps([sys.executable, '-c', program])}\n"
        "[mcp.trap.tools.x]\n"
        'effect = "read_only"\n'
    )
    return mark


def start(agent: str) -> str:
    params = {"agent": agent, "input": "go", "clientRequestId": "one", "waitMs": 20_000}
    return json.dumps({"jsonrpc": "2.0", "id": 1, "method": "start", "params": params}) + "\n"


# check


async def test_check_says_what_each_agent_may_do_and_who_says_so(workspace: Path, bank: McpFaultServer):
    said = bank.config()
    env = "{ PYTHONPATH = " + json.dumps(said["env"]["PYTHONPATH"]) + " }"
    file = workspace.parent / "own.toml"
    text = CONFIG.format(command=json.dumps(said["command"]), env=env)
    file.write_text(text)
    done = rpcagent(workspace, "check", "--config", str(file), BANK_TEST_KEY="0123456789")
    assert (done.stderr, done.returncode) == ("", 0)
    digest, command = config.digest_of(text.encode()), shlex.join(said["command"])
    assert done.stdout == REPORT.format(file=file, digest=digest, command=command)
    await bank.event("start")
    await bank.event("input_ended")


def test_check_as_json_is_the_same(workspace: Path):
    (workspace / "rpcagent.toml").write_text('[agents.a]\ntools = ["files.read"]\n')
    done = rpcagent(workspace, "check", "--json")
    report = json.loads(done.stdout)
    assert done.returncode == 0
    assert (report["ok"], report["trusted"], report["problems"]) == (True, False, [])
    assert report["agents"][0]["tools"] == [
        {
            "name": "files.read",
            "effect": "read_only",
            "declaredBy": "built in",
            "policy": "allow",
            "byDefault": True,
            "expiresMs": None,
            "unless": [],
        }
    ]


def test_check_ends_with_1_where_anything_is_wrong_and_prints_no_escape_to_a_pipe(workspace: Path):
    file = workspace / "rpcagent.toml"
    file.write_text('[agents.a]\nmodle = "x"\n[agents.b]\ntools = ["filez"]\n')
    done = rpcagent(workspace, "check")
    assert done.returncode == 1
    assert f"{file}:2: $.agents.a.modle: there is no such key; did you mean `model`?\n" in done.stdout
    assert "\x1b" not in done.stdout


def test_check_without_a_configuration_says_how_to_begin(workspace: Path):
    done = rpcagent(workspace, "check")
    assert done.returncode == 1
    assert "there is no such file; `rpcagent init` writes one to begin with" in done.stdout


def test_a_server_that_cannot_be_asked_is_a_problem_at_its_table(workspace: Path):
    mark = trap(workspace)
    done = rpcagent(workspace, "check", "--trust-workspace")
    assert done.returncode == 1
    assert f"{workspace / 'rpcagent.toml'}:3: $.mcp.trap: " in done.stdout
    assert mark.exists()


def test_names_of_a_server_are_left_as_they_are_in_a_complaint(workspace: Path, bank: McpFaultServer):
    said = bank.config()
    file = workspace.parent / "own.toml"
    file.write_text(
        '[agents.a]\ntools = ["mcp:bank"]\n[mcp.bank]\n'
        f"command = {json.dumps(said['command'])}\n"
        f"env.PYTHONPATH = {json.dumps(said['env']['PYTHONPATH'])}\n"
        "[mcp.bank.tools.chargeOnce]\n"
    )
    done = rpcagent(workspace, "check", "--config", str(file))
    assert done.returncode == 1
    assert f"{file}:6: $.mcp.bank.tools.chargeOnce: the server has no such tool; it has: " in done.stdout


# Trust


def test_a_file_that_nobody_trusts_starts_nothing(workspace: Path):
    mark = trap(workspace)
    checked = rpcagent(workspace, "check")
    served = rpcagent(workspace, "serve", said=start("trap"))
    assert checked.returncode == 0
    assert "mcp:trap  " in checked.stdout
    assert "its server was not started, because nobody has trusted this file" in checked.stdout
    assert json.loads(served.stdout)["error"]["data"]["path"] == "$.agent"
    note = json.loads(served.stderr)
    assert note["level"] == "warning"
    assert note["file"] == str(workspace / "rpcagent.toml")
    assert f"To trust it: rpcagent trust --workspace {workspace} --store {workspace.parent / 'store'}" in note["event"]
    assert not mark.exists()


def test_trusting_a_file_shows_what_it_starts_and_starts_it_only_when_it_is_used(workspace: Path):
    mark = trap(workspace)
    trusted = rpcagent(workspace, "trust")
    assert trusted.returncode == 0
    assert "starts\n  mcp:trap  " in trusted.stdout
    assert not mark.exists()
    served = rpcagent(workspace, "serve", said=start("trap"))
    assert mark.exists()
    assert "is not used" not in served.stderr


def test_a_trusted_file_is_used_until_it_is_changed(workspace: Path):
    file = workspace / "rpcagent.toml"
    file.write_text('[agents.a]\nmodel = "m"\n[models.m]\nscript = [{ text = "Hello." }]\n')
    assert rpcagent(workspace, "trust").returncode == 0
    served = rpcagent(workspace, "serve", said=start("a"))
    assert json.loads(served.stdout)["result"]["run"]["agent"] == "a"
    file.write_text(file.read_text() + "# changed\n")
    served = rpcagent(workspace, "serve", said=start("a").replace('"one"', '"two"'))
    assert json.loads(served.stdout)["error"]["data"]["code"] == "INVALID_PARAMS"
    served = rpcagent(workspace, "serve", "--trust-workspace", said=start("a").replace('"one"', '"three"'))
    assert json.loads(served.stdout)["result"]["run"]["agent"] == "a"


def test_a_file_that_is_wrong_cannot_be_trusted(workspace: Path):
    (workspace / "rpcagent.toml").write_text("[agents.a]\nmodle = 1\n")
    done = rpcagent(workspace, "trust")
    assert done.returncode == 1
    assert done.stdout.endswith("Not trusted: put it right first.\n")
    assert not (workspace.parent / "store").exists()


# serve


def test_serve_ends_with_2_and_the_lines_at_fault(workspace: Path):
    file = workspace.parent / "own.toml"
    file.write_text("[budget]\nstep = 1\ntoken = 2\n")
    done = rpcagent(workspace, "serve", "--config", str(file), said=start("a"))
    assert (done.stdout, done.returncode) == ("", 2)
    assert done.stderr == (
        f"{file}:2: $.budget.step: there is no such key; did you mean `steps`?\n"
        f"{file}:3: $.budget.token: there is no such key; did you mean `tokens`?\n"
    )
