"""Plays an example: sends what its file sends, and collects everything that comes back, in wire order.

A file has one JSON object a line; `protocol/examples/README.md` says which. After each `send` the daemon works until it has
answered and nothing more can happen at that instant; then a second passes. `"more": true` sends the next one at once.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel

from .loop import QuietLoop, quiet
from .process import Life
from .world import MemoryLog, Outside, WorldClock

EXAMPLES = Path(__file__).parents[2] / "protocol" / "examples"
FILES = sorted(EXAMPLES.glob("*.jsonl"))
MOST_SECONDS = 100_000.0
"""Of virtual time; an example that takes longer is stuck."""

Entry = dict[str, Any]


def read(path: Path) -> list[Entry]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write(path: Path, entries: list[Entry]) -> None:
    lines = [json.dumps(entry, ensure_ascii=False, separators=(", ", ": ")) for entry in entries]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def acts(entries: list[Entry]) -> list[tuple[Entry, list[Any]]]:
    """Each line that does something, with what the file says comes back before the next."""
    found: list[tuple[Entry, list[Any]]] = []
    for entry in entries:
        if "receive" in entry:
            found[-1][1].append(entry["receive"])
        else:
            found.append((entry, []))
    return found


class Player:
    """`adapt` may change a message before it is sent, knowing all that came back before."""

    def __init__(self, folder: Path, adapt: Any = None) -> None:
        self._folder = folder
        self._adapt = adapt or (lambda message, _came: message)
        self._came: list[Any] = []

    async def play(self, todo: list[Entry]) -> list[tuple[Entry, list[Any]]]:
        """Each line, as it was sent, with what came back."""
        (self._folder / "workspace").mkdir()
        self._clock = WorldClock()
        self._log = MemoryLog()
        self._outside = Outside(self._clock.now)
        self._limits: dict[str, int] = {}
        self._done: list[tuple[Entry, list[Any]]] = []
        self._all: list[Any] = []
        lives: list[list[Entry]] = [[]]
        for entry in todo:
            if "restart" in entry:
                lives.append([])
            lives[-1].append(entry)
        for life in lives:
            with anyio.fail_after(MOST_SECONDS):
                async with anyio.create_task_group() as group:
                    await self._live(life, group)
                    group.cancel_scope.cancel()
        return self._done

    async def _live(self, entries: list[Entry], group: Any) -> None:
        for entry in [e for e in entries if "given" in e]:
            self._given(entry["given"])
        how = next((e["restart"] for e in entries if "restart" in e), True)
        if isinstance(how, dict) and "damage" in how:
            how["damage"] = self._adapt(how["damage"], self._all)
            self._log.damage(how["damage"])
        self._log.opened()
        self._came = []
        self._process = Life(
            folder=self._folder,
            log=self._log,
            outside=self._outside,
            clock=self._clock,
            limits=self._limits,
            send=self._take,
            group=group,
        )
        await self._process.open(how.get("store", "") if isinstance(how, dict) else "")
        await quiet()
        for entry in entries:
            done = await self._act(entry)
            self._all += self._came
            self._done.append((done, self._came))
            self._came = []

    def _given(self, given: Entry) -> None:
        for name, text in given.get("files", {}).items():
            (self._folder / "workspace" / name).write_text(text, encoding="utf-8")
        self._limits = given.get("limits", {})

    async def _act(self, entry: Entry) -> Entry:
        match entry:
            case {"send": message}:
                entry = {**entry, "send": self._adapt(message, self._all)}
                await self._send(json.dumps(entry["send"]).encode(), more="more" in entry)
            case {"sendText": text}:
                await self._send(text.encode(), more="more" in entry)
            case {"wait": seconds}:
                await anyio.sleep(seconds)
                await quiet()
            case {"outside": answers}:
                self._outside.answers.update({name: list(said) for name, said in answers.items()})
            case {"disk": state}:
                self._log.state = state
            case {"peer": "slow"}:
                self._process.slow = True
            case {"peer": "reads"}:
                self._process.slow = False
                self._process.notifier.catch_up()
            case {"comment": _} | {"given": _} | {"restart": _}:
                pass
            case _:
                raise ValueError(f"no such line: {sorted(entry)}")
        return entry

    async def _send(self, raw: bytes, *, more: bool) -> None:
        await self._process.feed(raw + b"\n")
        if more:
            return
        await self._process.settled()
        await quiet()
        await anyio.sleep(1)
        await quiet()

    def _take(self, raw: bytes) -> None:
        self._came.append(json.loads(raw))


def play(todo: list[Entry], adapt: Any = None) -> tuple[list[tuple[Entry, list[Any]]], list[str]]:
    """What came back, act by act, and the paths of all files that were there at the end."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "a" / "b"
        folder.mkdir(parents=True)
        player = Player(folder, adapt)
        done = anyio.run(player.play, todo, backend="asyncio", backend_options={"loop_factory": QuietLoop})
        return done, sorted(_files(Path(name)))


def _files(folder: Path) -> Iterator[str]:
    return (str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
