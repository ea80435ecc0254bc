"""Which store and workspace a command works on: the daemon's flags, and how a hint for the reader repeats them."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

from rpcagent_client import Client

LOCK_WAIT_S = 6.0
"""A daemon whose caller was killed takes up to 5 seconds for what it has in hand; then the store is free."""


@dataclass(frozen=True)
class Place:
    """As the command line named it; None is the daemon's own default."""

    store: Path | None = None
    workspace: Path | None = None
    config: Path | None = None
    trust_workspace: bool = False
    encryption_key: str | None = None
    old_encryption_keys: tuple[str, ...] = ()

    @classmethod
    def of(cls, options: argparse.Namespace) -> Place:
        return cls(
            store=options.store,
            workspace=options.workspace,
            config=options.config,
            trust_workspace=options.trust_workspace,
            encryption_key=options.encryption_key,
            old_encryption_keys=tuple(options.old_encryption_key),
        )

    @property
    def flags(self) -> list[str]:
        named = (("--store", self.store), ("--workspace", self.workspace), ("--config", self.config))
        given = [part for flag, path in named if path is not None for part in (flag, str(path))]
        if self.encryption_key is not None:
            given += ["--encryption-key", self.encryption_key]
        for reference in self.old_encryption_keys:
            given += ["--old-encryption-key", reference]
        return [*given, "--trust-workspace"] if self.trust_workspace else given

    def hint(self, *words: str) -> str:
        """The command that a reader may copy: it works on the same store."""
        return shlex.join(["rpcagent", *words, *self.flags])

    def client(
        self,
        *,
        looks: bool,
        on_event: Callable[[dict[str, Any]], None],
        on_delta: Callable[[dict[str, Any]], None] | None,
        log: IO[bytes],
        events: Literal["own", "all"] = "own",
    ) -> Client:
        """A client whose daemon is the one of this very installation, whatever PATH says. Its log goes to `log`.

        `looks`: the daemon lets nothing go on."""
        command = [sys.executable, "-P", "-m", "rpcagent", "serve", f"--lock-wait={LOCK_WAIT_S:g}", *self.flags]
        if looks:
            command.append("--hold")
        return Client(command, on_event=on_event, on_delta=on_delta, events=events, stderr=log)
