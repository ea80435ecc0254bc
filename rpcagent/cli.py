"""The command line: what to run, on which store. Parses, and calls; no logic lives here."""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rpcagent import __version__

_ABOUT = """\
A JSON-RPC 2.0 daemon on stdio that runs agents durably: killed anywhere, the next process on the same store goes on from
the last confirmed step, repeats no external effect on its own, and answers a retried request from the record.
"""

_SERVE = """\
Serves one connection: requests on standard input, answers on standard output, one JSON object a line (or
Content-Length frames, if that is how the first one comes). Everything else goes to standard error.

  printf '{"jsonrpc":"2.0","id":1,"method":"status"}\\n' | rpcagent serve

Ends with exit code 0 at the end of input, on `shutdown` and on SIGTERM; 1 where the store could not be opened; 70 where
the disk failed a sync, so that what was written may not last.
"""

_DEMO = """\
Starts an agent that closes tickets in a small service of its own (another process, with its own count of effects), kills
the daemon with SIGKILL at the worst moments, restarts it, retries with the same keys, and shows that each ticket was
closed once. Needs no model, no key and no network; takes less than a minute.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command. The exit code is the command's own; 2 is a mistake in the command line."""
    options = _parser().parse_args(argv)
    if options.command == "demo":
        from rpcagent.demo import demo

        return demo(keep=options.keep)
    return _serve(options)


def _parser() -> argparse.ArgumentParser:
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="rpcagent", description=_ABOUT, formatter_class=plain)
    parser.add_argument("--version", action="version", version=f"rpcagent {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve = commands.add_parser("serve", help="serve JSON-RPC on stdio", description=_SERVE, formatter_class=plain)
    serve.add_argument(
        "--store",
        type=Path,
        metavar="DIR",
        help="where the write-ahead log is (default: $RPCAGENT_STORE, else a directory of this workspace's own under "
        "$XDG_STATE_HOME/rpcagent or ~/.local/state/rpcagent)",
    )
    serve.add_argument(
        "--workspace", type=Path, default=Path(), metavar="DIR", help="what `files` works on (default: here)"
    )
    serve.add_argument(
        "--lock-wait",
        type=float,
        default=6.0,
        metavar="S",
        help="how long to wait for another process on this store before every call is answered STORE_LOCKED; the store "
        "is taken over as soon as it is free (default: 6 seconds)",
    )
    demo = commands.add_parser("demo", help="watch a run survive kill -9", description=_DEMO, formatter_class=plain)
    demo.add_argument("--keep", action="store_true", help="keep the store and print where it is")
    return parser


def _serve(options: argparse.Namespace) -> int:
    from rpcagent.transport.stdio import claim

    # Before anything else is loaded: from here on a stray print cannot reach the peer.
    claimed = claim()
    gc.disable()  # what is imported stays; to search it for garbage again and again takes a tenth of the start
    from rpcagent import daemon

    gc.freeze()
    gc.enable()
    gc.set_threshold(10_000, 20, 20)  # state is frozen data without cycles: there is little to find

    workspace = options.workspace.resolve()
    if not workspace.is_dir():
        sys.stderr.write(f"rpcagent: --workspace {workspace} is not a directory\n")
        return 2
    named = options.store or (Path(os.environ["RPCAGENT_STORE"]) if os.environ.get("RPCAGENT_STORE") else None)
    store = (named or daemon.default_store(workspace)).absolute()
    config = daemon.Config(store=store, workspace=workspace, lock_wait_s=max(options.lock_wait, 0.0))
    return daemon.run(config, claimed)
