"""Gets the other systems: each into a virtual environment of its own in a cache folder, by package name, pinned.

Knows: pip, npm, and where a cache lies. Does not know: what the packages are for. Never touches the environment that the
benchmark runs in. What is there already is used; what could not be finished is made anew.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

TIMEOUT_S = 600


class CannotInstall(Exception):
    """Says in one line which step failed, and how."""


@dataclass(frozen=True, kw_only=True)
class Packages:
    """`pip` and `npm` are requirements with exact versions."""

    name: str
    pip: tuple[str, ...]
    npm: tuple[str, ...] = ()


def cache_folder() -> Path:
    """Where the environments stay from one run of the benchmark to the next."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rpcagent-bench"


def installed(packages: Packages, cache: Path) -> Path:
    """The folder of the environment: `bin/python`, and `node_modules` where npm was asked. Its name follows from the pins.

    Raises CannotInstall.
    """
    pins = "\n".join((sys.version, *packages.pip, *packages.npm))
    folder = cache / f"{packages.name}-{hashlib.sha256(pins.encode()).hexdigest()[:12]}"
    complete = folder / "complete"
    if complete.exists():
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    try:
        _say(packages.name, f"making an environment in {folder}")
        venv.create(folder, with_pip=True)
        _run(packages.name, [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", *packages.pip], folder)
        if packages.npm:
            quiet = ("--no-audit", "--no-fund", "--ignore-scripts", "--loglevel=error")
            _run(packages.name, ["npm", "install", "--prefix", str(folder), *quiet, *packages.npm], folder)
    except (OSError, subprocess.CalledProcessError) as error:
        raise CannotInstall(str(error)) from error
    complete.touch()
    return folder


def _run(name: str, command: Sequence[str], folder: Path) -> None:
    """Raises CannotInstall with the last line of what the command said."""
    _say(name, " ".join(Path(word).name if os.sep in word else word for word in command))
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise CannotInstall(f"{Path(command[0]).name} took more than {TIMEOUT_S} s") from error
    except FileNotFoundError as error:
        raise CannotInstall(f"there is no {Path(command[0]).name} here") from error
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip() or "nothing").splitlines()[-1]
        raise CannotInstall(f"{Path(command[0]).name} ended with {done.returncode}: {said}")


def _say(name: str, what: str) -> None:
    sys.stderr.write(f"  {name}: {what}\n")
    sys.stderr.flush()
