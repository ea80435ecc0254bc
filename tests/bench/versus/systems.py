"""Each system that does the work, behind one small interface: ours, and others that stand in processes of their own.

Knows: how each is started on a folder of its own, asked, and ended; and which versions are pinned. Does not know: what is
measured. Restate has a module of its own, for its server.
"""

from __future__ import annotations

import json
import select
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from tests.bench.peer import NO_LIMITS, Daemon, Peer, Scratch, reading_agent
from tests.bench.versus.install import Packages, installed

PROGRAMS = Path(__file__).with_name("programs")
WORK_S = 600


class Running(Protocol):
    """A system that has been started and has done a little, so that its first work is not its start."""

    @property
    def pids(self) -> list[int]:
        """All its processes."""

    def work(self, runs: int, steps: int) -> None:
        """Returns when so many runs, all begun at once, have ended after so many steps each, with every step durable.

        Raises AssertionError where that is not so.
        """

    def close(self) -> None:
        """Ends it in order."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class System(Protocol):
    """`about`: its versions and settings, and what counts as a step of it."""

    name: str
    about: str
    packages: Packages | None

    def start(self, scratch: Scratch, store: Path, environment: Path) -> Running:
        """On a folder that exists and is empty."""


def environment_of(system: System, cache: Path) -> Path:
    """Where its packages are, installed if need be. Raises CannotInstall."""
    return cache if system.packages is None else installed(system.packages, cache)


class OurRunning(Daemon):
    """The daemon over its pipes, as any client has it."""

    @property
    def pids(self) -> list[int]:
        return [self.pid]

    def work(self, runs: int, steps: int) -> None:
        turns, rest = divmod(steps, 2)
        assert rest == 1, "a run of the reading agent has an odd number of steps"
        self._asked = getattr(self, "_asked", 0) + 1
        for number in range(runs):
            self.send(
                "start",
                clientRequestId=f"work-{self._asked}-{number}",
                agent=reading_agent(turns),
                input="go",
                budget=NO_LIMITS,
                waitMs=WORK_S * 1_000,
            )
        for _ in range(runs):
            run = self.result()["run"]
            assert run["status"] == "completed", run
        assert self.call("status", runId=run["runId"])["budget"]["spent"]["steps"] == steps


@dataclass(frozen=True, kw_only=True)
class Ours:
    name: str = "rpcagent"
    about: str = (
        "the daemon over stdio; a step: a scripted model turn, or files.read, with the next intent in its record"
    )
    packages: None = None

    def start(self, scratch: Scratch, store: Path, environment: Path) -> OurRunning:
        daemon = OurRunning(scratch, store)
        daemon.call("status")
        return daemon


class ProgramRunning(Peer):
    """One of the programs beside this module: a line of work, a line of what is kept of it."""

    def __init__(self, scratch: Scratch, command: list[str], errors: Path) -> None:
        super().__init__(scratch, command, errors)
        self._errors = errors

    @property
    def pids(self) -> list[int]:
        return [self.pid]

    def work(self, runs: int, steps: int) -> None:
        """Raises EOFError with the last thing that it said, TimeoutError."""
        try:
            answer = self.ask(json.dumps({"runs": runs, "steps": steps}).encode() + b"\n")
        except (EOFError, BrokenPipeError) as error:
            said = self._errors.read_text(errors="replace").strip()
            raise EOFError(said.splitlines()[-1] if said else str(error)) from error
        kept = json.loads(answer)["kept"]
        assert kept >= runs * steps, f"{kept} records of {runs * steps} steps"

    def _read(self) -> None:
        ready, _, _ = select.select([self._from], [], [], WORK_S)
        if not ready:
            raise TimeoutError(f"no answer within {WORK_S} s")
        super()._read()


@dataclass(frozen=True, kw_only=True)
class InPython:
    """A library: the program is its only process."""

    name: str
    about: str
    program: str
    packages: Packages = field(repr=False)

    def start(self, scratch: Scratch, store: Path, environment: Path) -> ProgramRunning:
        python = environment / "bin" / "python"
        return ProgramRunning(scratch, [str(python), str(PROGRAMS / self.program), str(store)], store / "errors.txt")


LANGGRAPH = InPython(
    name="LangGraph",
    about="1.2.24, SqliteSaver 3.1.2, durability=sync, a thread a run; a step: a node that adds one, its writes, a checkpoint",
    program="run_langgraph.py",
    packages=Packages(name="langgraph", pip=("langgraph==1.2.24", "langgraph-checkpoint-sqlite==3.1.2")),
)
DBOS = InPython(
    name="DBOS",
    about="3.4.0 on SQLite; a step: a step function that returns 400 characters, its recorded output",
    program="run_dbos.py",
    packages=Packages(name="dbos", pip=("dbos==3.4.0",)),
)
