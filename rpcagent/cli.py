"""The command line: what to run, on which store. Parses, and calls; no logic lives here."""

from __future__ import annotations

import argparse
import gc
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rpcagent import __version__
from rpcagent.batch.options import add_commands, add_keys, folder
from rpcagent.upkeep.options import add_upkeep

_ABOUT = """\
A JSON-RPC 2.0 daemon on stdio that runs agents durably: killed anywhere, the next process on the same store goes on from
the last confirmed step, repeats no external effect on its own, and answers a retried request from the record.
"""

_GROUPS = {
    "run": ("run", "approve", "resume", "cancel"),
    "serve": ("serve",),
    "look": (),
    "keep": ("verify", "repair", "backup", "export", "import", "log", "blob", "gc", "key"),
    "configure": ("init", "check", "trust"),
    "demo": ("demo",),
}
"""The commands as `--help` shows them; what is in no group stands under `look`."""

_FIRST = """\
begin here:
  rpcagent demo                  a run that is killed six times and repeats nothing
  rpcagent init && rpcagent check && rpcagent trust
                                 a configuration of your own, what it comes to, and your word for it
  printf '{"jsonrpc":"2.0","id":1,"method":"status"}\\n' | rpcagent serve
                                 the daemon answers on standard output, a JSON object a line

`rpcagent COMMAND --help` tells the rest. Without a configuration there is one agent, `default`; any other can be sent in
`start` as an object.
"""

_SERVE = """\
Serves one connection: requests on standard input, answers on standard output, one JSON object a line (or
Content-Length frames, if that is how the first one comes). Everything else goes to standard error.

  printf '{"jsonrpc":"2.0","id":1,"method":"status"}\\n' | rpcagent serve

Agents, models and tool servers come from --config, else from rpcagent.toml in the workspace, if a person has trusted it
as it is now; if not, nothing of it is used, and one line on standard error says so.

Ends with exit code 0 at the end of input, on `shutdown` and on SIGTERM; 1 where the store could not be opened; 2 for a
mistake in the command line or in the configuration; 70 where the disk failed a sync, so that what was written may not
last.
"""

_INIT = """\
Writes rpcagent.toml: an agent that works at once, with a model that answers from a script, and examples in comments of a
real model, an MCP server, an HTTP tool, policy and budget. Never touches a file that is there.
"""

_CHECK = """\
Reads the configuration as `serve` would and says what it comes to: each agent's model (and whether its key is set), its
tools, what each promises and who says so, and what policy makes of a call. All that is wrong is told at once, each with
its line; exit code 1 if anything is.

MCP servers are started to be asked for their tools, and stopped. Not those of a file in the workspace that nobody has
trusted; --config FILE is trusted by naming it.
"""

_TRUST = """\
Records that you trust rpcagent.toml in the workspace as it is now, and prints what that lets it do: which programs it
starts, and what it allows unasked. A file that came with a workspace is used only after that; a change of it, or another
place, needs your word again. What is trusted stands in the store, never in the workspace. `rpcagent check` shows the same
without trusting it. The programs that the file names can change without being asked about.
"""

_KEY = """\
Writes a new random key to FILE, which only you can read (mode 0600), and prints its id. The id reveals nothing of the key; the
store names it wherever the key was used. Keep FILE apart from the store, and keep a copy: without it what was encrypted
cannot be read by anyone.

  rpcagent key new ~/.rpcagent.key
  rpcagent serve --encryption-key file:~/.rpcagent.key

To change the key, name the new one with --encryption-key and the present one with --old-encryption-key: what is written from
then on is under the new one. `rpcagent backup DEST --reseal` makes a copy in which all is under the new one.
"""

_DEMO = """\
Starts an agent that closes tickets in a small service of its own (another process, with its own count of effects), kills
the daemon with SIGKILL at the worst moments, restarts it, retries with the same keys, and shows that each ticket was
closed once. Needs no model, no key and no network; takes less than a minute.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command. The exit code is the command's own; 2 is a mistake in the command line."""
    options = _parser().parse_args(argv)
    run = {"demo": _demo, "init": _init, "check": _check, "trust": _trust, "key": _key}.get(options.command, _serve)
    run = getattr(options, "perform", run)
    return run(options)


class _Teaching(argparse.ArgumentParser):
    """Its help lists the commands by what they are for. `commands` is filled as they are added."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands: dict[str, str] = {}

    def format_help(self) -> str:
        if not self.commands:
            return super().format_help()
        named = {name for names in _GROUPS.values() for name in names}
        lines = ["usage: rpcagent COMMAND [OPTION]...", "", _ABOUT]
        for group, names in _GROUPS.items():
            rest = [name for name in self.commands if name not in named] if group == "look" else []
            rows = [f"  {name:<10} {self.commands[name]}" for name in (*names, *rest)]
            lines += [f"{group}:", *rows, ""] if rows else []
        return "\n".join([*lines, _FIRST])


def _parser() -> argparse.ArgumentParser:
    parser = _Teaching(prog="rpcagent", description=_ABOUT)
    parser.add_argument("--version", action="version", version=f"rpcagent {__version__}")
    added = parser.add_subparsers(
        dest="command", required=True, metavar="COMMAND", parser_class=argparse.ArgumentParser
    )

    def command(name: str, purpose: str, description: str) -> argparse.ArgumentParser:
        parser.commands[name] = purpose
        plain = argparse.RawDescriptionHelpFormatter
        return added.add_parser(name, help=purpose, description=description, formatter_class=plain)

    serve = command("serve", "serve JSON-RPC on stdio", _SERVE)
    _add_store(serve)
    _add_workspace(serve)
    _add_config(serve)
    add_keys(serve)
    serve.add_argument(
        "--lock-wait",
        type=_seconds,
        default=6.0,
        metavar="S",
        help="how long to wait for another process on this store before every call is answered STORE_LOCKED; the store "
        "is taken over as soon as it is free (default: 6 seconds)",
    )
    serve.add_argument(
        "--hold",
        action="store_true",
        help="let nothing begin or go on: runs are only looked at, answers are recorded for later, and no call waits",
    )
    init = command("init", "write an rpcagent.toml to begin with", _INIT)
    init.add_argument("folder", nargs="?", type=Path, default=Path(), metavar="DIR", help="where (default: here)")
    check = command("check", "say what the configuration comes to, and what is wrong with it", _CHECK)
    _add_store(check)
    _add_workspace(check)
    _add_config(check)
    check.add_argument("--json", action="store_true", help="the same as one JSON object")
    trust = command("trust", "let serve use the workspace's rpcagent.toml as it is now", _TRUST)
    _add_store(trust)
    _add_workspace(trust)
    add_commands(command)
    key = command("key", "make a key to encrypt a store with", _KEY)
    key.add_argument("action", choices=["new"], metavar="new")
    key.add_argument("file", type=Path, metavar="FILE", help="where; never touched if it is there")
    add_upkeep(command)
    demo = command("demo", "watch a run survive kill -9", _DEMO)
    demo.add_argument("--keep", action="store_true", help="keep the store and print where it is")
    return parser


def _add_store(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--store",
        type=folder,
        metavar="DIR",
        help="where the write-ahead log is (default: $RPCAGENT_STORE, else a directory of this workspace's own under "
        "$XDG_STATE_HOME/rpcagent or ~/.local/state/rpcagent)",
    )


def _add_workspace(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--workspace", type=Path, default=Path(), metavar="DIR", help="what agents work on (default: here)"
    )


def _add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="the configuration, trusted by naming it; the workspace's is not read",
    )
    parser.add_argument(
        "--trust-workspace",
        action="store_true",
        help="use rpcagent.toml in the workspace whatever it says now; `rpcagent trust` does so only until it changes",
    )


def _demo(options: argparse.Namespace) -> int:
    from rpcagent.demo import demo

    return demo(keep=options.keep)


def _init(options: argparse.Namespace) -> int:
    from rpcagent.starter import init

    return init(options.folder)


def _check(options: argparse.Namespace) -> int:
    workspace = _workspace(options)
    if workspace is None:
        return 2
    from rpcagent.check import check

    store = _store(options, workspace)
    return check(workspace, options.config, store, trusted=options.trust_workspace, as_json=options.json)


def _trust(options: argparse.Namespace) -> int:
    workspace = _workspace(options)
    if workspace is None:
        return 2
    from rpcagent.check import trust

    return trust(workspace, _store(options, workspace))


def _key(options: argparse.Namespace) -> int:
    from rpcagent import keys

    try:
        key = keys.new_key_file(options.file.absolute())
    except keys.KeyUnusable as error:
        sys.stderr.write(f"rpcagent: {error}\n")
        return 1
    sys.stdout.write(f"key {key.kid} in {options.file}\n")
    sys.stdout.write(f"use it: rpcagent serve --encryption-key file:{options.file.absolute()}\n")
    return 0


def _ring(options: argparse.Namespace) -> Any:
    """The keys that the command line names, or None. Raises KeyUnusable."""
    if options.encryption_key is None and not options.old_encryption_key:
        return None
    from rpcagent import keys

    if options.encryption_key is None:
        raise keys.KeyUnusable("--old-encryption-key needs --encryption-key, the key that is in use now")
    return keys.load_ring(options.encryption_key, options.old_encryption_key)


def _serve(options: argparse.Namespace) -> int:
    from rpcagent.transport.stdio import claim

    # Before anything else is loaded: from here on a stray print cannot reach the peer.
    claimed = claim()
    gc.disable()  # what is imported stays; to search it for garbage again and again takes a tenth of the start
    from rpcagent import daemon
    from rpcagent.config import ConfigError, find

    gc.freeze()
    gc.enable()
    gc.set_threshold(10_000, 20, 20)  # state is frozen data without cycles: there is little to find

    workspace = _workspace(options)
    if workspace is None:
        return 2
    store = _store(options, workspace)
    try:
        found = find(workspace, options.config, options.trust_workspace, store)
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    try:
        ring = _ring(options)
    except ValueError as error:
        sys.stderr.write(f"rpcagent: {error}\n")
        return 2
    if found.note:
        from rpcagent.log import Log

        Log().warning(found.note, file=str(found.path), digest=found.digest)
    config = daemon.Config(
        store=store,
        workspace=workspace,
        lock_wait_s=max(options.lock_wait, 0.0),
        config=found.config,
        hold=options.hold,
        keys=ring,
    )
    return daemon.run(config, claimed)


def _workspace(options: argparse.Namespace) -> Path | None:
    """None: it was told that there is no such directory."""
    try:
        store = _named_store(options)
        if store is not None and not store.is_absolute():
            Path.cwd()
        workspace: Path = options.workspace.resolve()
        if workspace.is_dir():
            return workspace
        why = f"--workspace {workspace} is not a directory"
    except FileNotFoundError:
        why = "the directory that this was started in is gone; start it in one that exists"
    except (OSError, RuntimeError, ValueError):
        why = f"--workspace {str(options.workspace)!r} cannot be read"
    sys.stderr.write(f"rpcagent: {why}\n")
    return None


def _named_store(options: argparse.Namespace) -> Path | None:
    store: Path | None = options.store
    return store or (Path(os.environ["RPCAGENT_STORE"]) if os.environ.get("RPCAGENT_STORE") else None)


def _seconds(text: str) -> float:
    seconds = float(text)
    if math.isnan(seconds):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds")
    return seconds


def _store(options: argparse.Namespace, workspace: Path) -> Path:
    from rpcagent.daemon import default_store

    return (_named_store(options) or default_store(workspace)).absolute()
