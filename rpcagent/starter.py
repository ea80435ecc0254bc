"""The command `init`: a configuration to begin with, which works as it is and shows what else there is.

Knows: the text. Each example in it is right once its comment signs are taken away; a test takes them away.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from rpcagent.config import FILE_NAME

STARTER = """\
# What `rpcagent serve` may use in this workspace. `rpcagent check` says what it comes to, line by line.
# After each change a person has to say `rpcagent trust` again: until then serve uses nothing of it.

# An agent is a model that chooses among tools. Start it by its name: {"agent": "first", "input": "..."}
[agents.first]
instructions = "Answer in one paragraph. Look before you write."
model = "main"
tools = ["files"]                   # read, list, search, write, edit, inside the workspace
# instruction_files = ["AGENTS.md"] # read when a run starts, if they are there

# This model reads its answers from here: no key, no network, the same every time.
[models.main]
provider = "scripted"
script = [
    { text = "I look at what is here.", calls = [{ tool = "files.list", arguments = { path = "." } }] },
    { text = "This is what the workspace holds." },
]

# Who may do what. Deny beats ask beats allow; what no rule names is asked, unless it only reads.
[policy]
rules = [
    { tool = "files.write", do = "deny", paths = [".git/*", "rpcagent.toml"] },
    { tool = "files.edit", do = "deny", paths = [".git/*", "rpcagent.toml"] },
    { effect = "idempotent", do = "ask", expires = "24h" },
]

# The limits of one run. At a limit the run stops and a person is asked whether to extend it.
[budget]
steps = 200
tokens = 200_000

# --- Examples: take the `#` away ---

# A real model: any endpoint that speaks like OpenAI's. Then say model = "real" above.
# [models.real]
# provider = "openai"
# base_url = "http://127.0.0.1:8080/v1"
# model = "qwen3-coder"
# api_key_env = "OPENAI_API_KEY"    # the variable's name; the key itself never stands in a file
# max_output_tokens = 8_000
# timeout_s = 600

# An MCP server on stdio, and what its tools promise. Say tools = ["files", "mcp:tickets"] above.
# What is not declared is at_most_once: never repeated by itself, and after a crash a person is asked.
# [mcp.tickets]
# command = ["python3", "tickets_server.py"]
# env = { TICKETS_TOKEN = "${TICKETS_TOKEN}" }
# [mcp.tickets.tools.get_ticket]
# effect = "read_only"
# [mcp.tickets.tools.close_ticket]
# effect = "reconcilable"           # after a crash it is looked up, not guessed
# lookup = { tool = "get_ticket", arguments = { id = "{id}" }, found = "status == 'closed'" }

# An agent with a tool of its own behind HTTP, and the shell.
# [agents.closer]
# model = "main"
# tools = [
#     "files.read",
#     "shell",
#     { name = "tickets.assign", effect = "idempotent", http = { url = "http://127.0.0.1:8000/tickets/{id}/owner" }, \
parameters = { type = "object", properties = { id = { type = "string" }, owner = { type = "string" } } } },
# ]
# read_only_commands = ["default", "npm ls"]
# policy = { rules = [{ tool = "shell.run", do = "ask", expires = "8h" }] }
# budget = { cost_usd = 1.5, active_s = 3600 }

# Which ended runs are deleted, and when; without this none is. The first rule that fits a run decides.
# The key of a deleted run is never taken again. `rpcagent gc --dry-run` says what would go now.
# [retention]
# rules = [
#     { label = "kind=demo", after = "1d" },
#     { statuses = ["failed"], after = "90d" },
#     { after = "30d", keep = 100 },   # gone after 30 days, but never the newest 100
# ]
"""

_NEXT = """\
wrote {file}

  rpcagent check{at}   what each agent may do, and what is wrong
  rpcagent trust{at}   lets serve use it, until it is changed
  rpcagent serve{at}   then start the agent:
  {{"jsonrpc":"2.0","id":1,"method":"start","params":{{"agent":"first","input":"Look around.","clientRequestId":"first-1","waitMs":5000}}}}
"""


def init(folder: Path) -> int:
    """Writes the file, never over another one. 1: there is one, or it cannot be written."""
    file = folder / FILE_NAME
    try:
        with file.open("x", encoding="utf-8") as stream:
            stream.write(STARTER)
    except FileExistsError:
        sys.stderr.write(f"rpcagent: {file} is there already and was left as it is; `rpcagent check` reads it\n")
        return 1
    except OSError as error:
        sys.stderr.write(f"rpcagent: {file} cannot be written: {error.strerror}\n")
        return 1
    at = "" if folder.resolve() == Path.cwd() else f" --workspace {shlex.quote(str(folder))}"
    sys.stdout.write(_NEXT.format(file=file, at=at))
    return 0
