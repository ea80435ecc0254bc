"""Processes of MCP servers: when they start, start again and end, and that none outlives the daemon."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from rpcagent.runs.outcomes import Lost, NotDone, ToolReply
from rpcagent.tools.mcp_child import Flood, Lines, Overlong
from tests.service.mcp_driver import ROOT, McpFaultServer, World, said, structured

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(90)]

END_S = 15.0
LOST = Lost(reason="connection_lost")


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    made = World(tmp_path)
    yield made
    await made.registry.aclose()
    made.server.close()
    assert made.faults == []


def watch(pid: int) -> int:
    """A descriptor that can be read when the process has ended; it cannot be confused with a later one."""
    return os.pidfd_open(pid)


def has_ended(watched: int, within_s: float = 0.0) -> bool:
    poll = select.poll()
    poll.register(watched, select.POLLIN)
    return bool(poll.poll(within_s * 1_000))


# Starting again


async def test_a_server_that_died_is_started_again_by_the_next_call_and_then_later_and_later(world: World) -> None:
    await world.resolve()
    for _ in range(3):
        world.server.fault("die", "before_effect")
    assert await world.call("charge") == LOST
    assert await world.call("charge") == LOST
    outcome = await world.call("charge")
    assert isinstance(outcome, NotDone)
    assert outcome.error.message == "The MCP server t ended several times; it is started again later."
    assert (1 <= (outcome.retry_after_ms or 0) <= 1_000, outcome.ask) == (True, False)
    assert len(world.server.events("start")) == 2
    assert world.server.effects() == {}


async def test_a_server_that_answered_in_between_is_started_again_at_once(world: World) -> None:
    await world.resolve()
    for _ in range(4):
        world.server.fault("die", "before_effect")
        assert await world.call("charge") == LOST
        assert isinstance(await world.call("read"), ToolReply)
    assert len(world.server.events("start")) == 5


async def test_a_server_that_ends_again_and_again_is_a_matter_for_a_person(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rpcagent.tools.mcp.BACKOFF_FIRST_S", 0.0)
    await world.resolve()
    world.server.fault("die", "before_effect", always=True)
    outcomes = [await world.call("read") for _ in range(5)]
    assert [isinstance(one, NotDone) and one.ask for one in outcomes] == [False] * 4 + [True]


async def test_many_calls_start_one_process_and_one_that_gives_up_does_not_take_it_from_the_others(
    world: World,
) -> None:
    await world.resolve()
    await world.registry.aclose()
    world.registry = world.new_registry()
    world.server.events("start").clear()
    world.server.fault("slow_start", "start")
    outcomes: list[Any] = []

    async def call() -> None:
        outcomes.append(await world.call("read"))

    async with anyio.create_task_group() as others:
        async with anyio.create_task_group() as first:
            first.start_soon(call)
            await world.server.event("parked")
            for _ in range(5):
                others.start_soon(call)
            first.cancel_scope.cancel()
        world.server.release()
    assert [structured(one) for one in outcomes] == [said("read", 0)] * 5
    assert len(world.server.events("start")) == 2


# Ending


async def test_an_idle_server_is_let_go_and_comes_back_when_it_is_needed(world: World) -> None:
    world.registry = world.new_registry(idle_s=0.2)
    await world.resolve()
    pid = (await world.server.event("start"))["pid"]
    await world.server.event("input_ended")
    assert isinstance(await world.call("read"), ToolReply)
    assert (await world.server.event("start"))["pid"] != pid
    assert isinstance(await world.call("read"), ToolReply)


async def test_a_server_is_not_idle_while_it_is_asked(world: World) -> None:
    world.registry = world.new_registry(idle_s=0.1)
    await world.resolve()
    world.server.fault("hang")
    assert (await world.call("charge", 600)).reason == "timeout"  # type: ignore[union-attr]
    assert len(world.server.events("start")) <= 2


@pytest.mark.parametrize("stubborn", [False, True])
async def test_f011_all_servers_end_with_the_daemon_within_its_bound(world: World, stubborn: bool) -> None:
    if stubborn:
        world.server.fault("ignore_input_end", "start")
        world.server.fault("grandchild", "start")
    await world.resolve()
    watched = [watch((await world.server.event("start"))["pid"])]
    if stubborn:
        watched.append(watch((await world.server.event("grandchild"))["child"]))
    began = time.monotonic()
    with anyio.fail_after(3.0):
        await world.registry.aclose()
    assert time.monotonic() - began < 3.0
    assert [has_ended(one, END_S) for one in watched] == [True] * len(watched)
    outcome = await world.call("read")
    assert isinstance(outcome, NotDone)
    assert outcome.error.kind == "stopping"


async def test_a_kernel_that_does_not_tell_of_ends_is_asked(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_pid: int) -> int:
        raise OSError

    monkeypatch.setattr("rpcagent.tools.mcp_child.os.pidfd_open", refused)
    world.server.fault("grandchild", "start")
    await world.resolve()
    world.server.fault("die")
    assert await world.call("charge") == LOST
    assert isinstance(await world.call("read"), ToolReply)


async def test_an_end_that_is_not_waited_for_kills(world: World) -> None:
    world.server.fault("ignore_input_end", "start")
    await world.resolve()
    watched = watch((await world.server.event("start"))["pid"])
    with anyio.move_on_after(0.05):
        await world.registry.aclose()
    await anyio.wait_readable(watched)


async def test_a_call_that_is_in_flight_when_the_server_is_ended_is_lost(world: World) -> None:
    await world.resolve()
    world.server.fault("hang")
    outcomes: list[Any] = []

    async def call() -> None:
        outcomes.append(await world.call("charge"))

    async with anyio.create_task_group() as calls:
        calls.start_soon(call)
        await world.server.event("parked")
        await world.registry.aclose()
    assert outcomes == [LOST]


async def test_f099_who_inherits_the_pipes_of_a_dead_server_holds_nobody_up_and_ends_too(world: World) -> None:
    world.server.fault("grandchild", "start")
    await world.resolve()
    watched = watch((await world.server.event("grandchild"))["child"])
    world.server.fault("die", "after_effect")
    began = time.monotonic()
    assert await world.call("charge") == LOST
    assert time.monotonic() - began < 5.0
    await anyio.wait_readable(watched)
    assert isinstance(await world.call("read"), ToolReply)


async def test_a_servers_whole_life_leaves_no_descriptor_behind(world: World) -> None:
    await world.resolve()
    await world.call("read")
    before = sorted(os.listdir("/proc/self/fd"))
    for fault in ("die", "close_output", "flood"):
        world.server.fault(fault)
        await world.call("charge")
        assert isinstance(await world.call("read"), ToolReply)
    assert sorted(os.listdir("/proc/self/fd")) == before


async def test_a_server_inherits_three_pipes_and_nothing_else(world: World, tmp_path: Path) -> None:
    kept = os.open(tmp_path, os.O_RDONLY)
    os.set_inheritable(kept, True)
    await world.resolve()
    pid = (await world.server.event("start"))["pid"]
    kinds = {int(fd): os.readlink(f"/proc/{pid}/fd/{fd}").partition(":")[0] for fd in os.listdir(f"/proc/{pid}/fd")}
    os.close(kept)
    own = [kind for kind in kinds.values() if kind.startswith(str(world.server.folder))]
    assert [kinds[fd] for fd in range(3)] == ["pipe"] * 3
    assert len(kinds) == 3 + len(own)
    assert os.getsid(pid) == os.getpgid(pid) == pid


# The daemon is killed

PARENT = """
import sys, anyio
from rpcagent.tools.registry import Registry

async def main():
    registry = Registry()
    config = {"command": sys.argv[2:], "env": {"PYTHONPATH": sys.argv[1]}}
    await registry.resolve_mcp("t", config, "/", "$")
    print("ready", flush=True)
    await anyio.sleep_forever()

anyio.run(main)
"""


def parent_of(command: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)})


@pytest.mark.parametrize("stubborn", [False, True])
async def test_f011_no_server_and_none_of_its_children_outlives_a_daemon_that_was_killed(
    tmp_path: Path, stubborn: bool
) -> None:
    server = McpFaultServer(tmp_path / "server")
    if stubborn:
        server.fault("ignore_input_end", "start")
        server.fault("grandchild", "start")
    command = [sys.executable, "-c", PARENT, str(ROOT), *server.config()["command"]]
    with parent_of(command) as parent:
        watched = [watch((await server.event("start"))["pid"])]
        if stubborn:
            watched.append(watch((await server.event("grandchild"))["child"]))
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"ready\n"
        parent.send_signal(signal.SIGKILL)
    assert [has_ended(one, END_S) for one in watched] == [True] * len(watched)
    server.close()


# Lines


def test_f045_lines_are_whole_or_known_to_be_too_long_however_they_come() -> None:
    data = b"one\n\n" + b"x" * 11 + b"\nabcdefghij\nrest"
    expected = [b"one", b"", Overlong(b"x" * 11, 11), b"abcdefghij"]
    for size in (1, 2, 3, 7, 100):
        lines = Lines(most=10)
        assert [line for at in range(0, len(data), size) for line in lines.feed(data[at : at + size])] == expected
        assert list(lines.feed(b"\n")) == [b"rest"]


def test_f045_a_line_without_end_is_given_up_at_the_bound() -> None:
    lines = Lines(most=10, flood=1_000)
    with pytest.raises(Flood):
        for _ in range(1_001):
            list(lines.feed(b"x"))
