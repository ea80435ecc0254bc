"""The wire against real pipes, sockets, terminals, files and the null device, with the program in `echo_peer.py`."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import pty
import select
import socket
import subprocess
import sys
import termios
import tty
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rpcagent.transport.framing import FRAME_BYTES_MAX, Framer
from rpcagent.transport.stdio import FRAMES_PER_RECV, Claimed, Wire

PEER = [sys.executable, str(Path(__file__).with_name("echo_peer.py"))]
LIMIT_S = 60
MIB = 1 << 20


def report(err: bytes) -> dict[str, Any]:
    return json.loads(err.splitlines()[-1])


def ended(answered: int, *, dead: bool = False) -> dict[str, Any]:
    return {"answered": answered, "eof": True, "dead": dead, "left": 0, "nonblock": False}


def run(data: bytes, *args: str) -> tuple[bytes, bytes]:
    done = subprocess.run([*PEER, *args], input=data, capture_output=True, timeout=LIMIT_S, check=True)
    return done.stdout, done.stderr


@contextlib.contextmanager
def peer(stdin: Any, stdout: Any, *args: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [*PEER, *args], stdin=stdin, stdout=stdout, stderr=subprocess.PIPE, bufsize=0, close_fds=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait(LIMIT_S)
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                stream.close()


def read_exactly(fd: int, count: int) -> bytes:
    data = b""
    while len(data) < count:
        assert select.select([fd], [], [], LIMIT_S)[0], f"only {data!r}"
        part = os.read(fd, count - len(data))
        assert part, f"ended after {data!r}"
        data += part
    return data


def end(process: subprocess.Popen[bytes]) -> dict[str, Any]:
    _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0
    return report(err)


def test_messages_written_together_are_answered_in_order() -> None:
    lines = [b'{"n":%d}' % n for n in range(10_000)]
    out, err = run(b"\n".join(lines) + b"\n\r\n\n")
    assert out.split(b"\n") == [*lines, b""]
    assert report(err) == ended(10_000)


def test_headers_are_answered_with_headers() -> None:
    out, err = run(b"Content-Length: 3\r\n\r\nabcContent-Length: 2\r\nContent-Type: x\r\n\r\nde")
    assert out == b"Content-Length: 3\r\n\r\nabcContent-Length: 2\r\n\r\nde"
    assert report(err) == ended(2)


def test_a_character_that_is_cut_between_two_writes_arrives_whole_f001() -> None:
    message = '{"t":"删除 🍸 café"}\n'.encode()
    cut = message.index("🍸".encode()) + 2
    with peer(subprocess.PIPE, subprocess.PIPE) as process:
        assert process.stdin and process.stdout
        process.stdin.write(b"1\n" + message[:cut])
        assert read_exactly(process.stdout.fileno(), 2) == b"1\n"
        process.stdin.write(message[cut:])
        assert read_exactly(process.stdout.fileno(), len(message)) == message
        assert end(process) == ended(2)


def test_unicode_line_ends_inside_a_message_do_not_end_it_f005() -> None:
    message = '{"t":"a\u2028b\u2029c\u0085d"}\n'.encode()
    assert run(message * 2)[0] == message * 2


def test_invalid_utf8_passes_the_framing_unchanged_f003() -> None:
    out, err = run(b'\xff\xfe\n{"t":"\xff"}\n{}\n')
    assert out == b'\xff\xfe\n{"t":"\xff"}\n{}\n'
    assert report(err) == ended(3)


def test_prints_and_children_leave_the_wire_clean_f007() -> None:
    out, err = run(b"print\n{}\n")
    assert out == b"print\n{}\n"
    assert {line for line in err.splitlines() if line.startswith(b"stray")} >= {b"stray print"}
    assert b"stray child" in err
    assert b"stray write" in err
    assert report(err) == ended(2)


def test_a_child_cannot_read_the_next_request_f008() -> None:
    """The child's `cat` of its inherited standard input ends at once, though ours is still open."""
    with peer(subprocess.PIPE, subprocess.PIPE) as process:
        assert process.stdin and process.stdout
        process.stdin.write(b"print\n")
        assert read_exactly(process.stdout.fileno(), 6) == b"print\n"
        process.stdin.write(b"{}\n")
        assert end(process) == ended(2)


def test_a_line_of_70_mib_is_answered_as_too_large_and_the_next_one_is_read() -> None:
    out, err = run(b"z" * (70 * MIB) + b"\n{}\n" + b"rss\n")
    too_large, next_, rss, rest = out.split(b"\n")
    assert json.loads(too_large) == [-32600, f"the message is larger than {FRAME_BYTES_MAX} bytes"]
    assert (next_, rest) == (b"{}", b"")
    assert int(rss) < 130 * 1024
    assert report(err) == ended(3)


def test_a_line_of_60_mib_is_echoed_in_bounded_memory() -> None:
    big = b"y" * (60 * MIB)
    out, err = run(big + b"\nrss\n")
    assert out[: 60 * MIB] == big
    assert int(out[60 * MIB + 1 :]) < 190 * 1024  # KiB: three times the message, and the interpreter
    assert report(err) == ended(2)


def test_a_peer_that_never_reads_is_held_in_bounded_memory_and_later_gets_every_byte() -> None:
    line = b"q" * 1023 + b"\n"
    with peer(subprocess.PIPE, subprocess.PIPE, "--high", str(MIB)) as process:
        assert process.stdin and process.stdout
        into = process.stdin.fileno()
        os.set_blocking(into, False)
        sent = 0
        while select.select([], [into], [], 2)[1] and sent < 64 * MIB:
            with contextlib.suppress(BlockingIOError):
                sent += os.write(into, line * 4)  # PIPE_BUF bytes: all of them, or none
        assert MIB < sent < 4 * MIB
        peak = int(Path(f"/proc/{process.pid}/status").read_text().split("VmHWM:")[1].split()[0])
        assert peak < 64 * 1024
        process.stdin.close()
        process.stdin = None
        out, err = process.communicate(timeout=LIMIT_S)
        assert out == line * (sent // len(line))
        assert report(err) == ended(sent // len(line))


def test_a_peer_that_closes_its_reading_end_does_not_end_the_process() -> None:
    with peer(subprocess.PIPE, subprocess.PIPE) as process:
        assert process.stdin and process.stdout
        process.stdin.write(b"1\n")
        assert read_exactly(process.stdout.fileno(), 2) == b"1\n"
        process.stdout.close()
        process.stdout = None
        process.stdin.write(b"2\n3\n")
        process.stdin.write(b"4\n")
        assert end(process) == ended(4, dead=True)


def test_an_output_without_any_reader_at_the_start_does_not_end_the_process() -> None:
    read, write = os.pipe()
    os.close(read)
    with peer(subprocess.PIPE, write) as process:
        os.close(write)
        assert process.stdin
        process.stdin.write(b"1\n")
        assert end(process) == ended(1, dead=True)


def test_end_of_input_in_mid_message_is_answered_and_not_taken_for_a_message() -> None:
    out, err = run(b'{"a":1}\n{"b":')
    assert out == b'{"a":1}\n[-32700, "the input ended in the middle of a message"]\n'
    assert report(err) == ended(2)


def test_a_last_line_without_newline_is_answered() -> None:
    assert run(b'{"a":1}\n{"b":2}')[0] == b'{"a":1}\n{"b":2}\n'


def test_regular_files_work_as_input_and_output(tmp_path: Path) -> None:
    data = b"".join(b'{"n":%d}\n' % n for n in range(50_000))
    (tmp_path / "in").write_bytes(data)
    with (
        (tmp_path / "in").open("rb") as stdin,
        (tmp_path / "out").open("wb") as stdout,
        peer(stdin, stdout, "--high", "65536") as process,
    ):
        assert end(process) == ended(50_000)
    assert (tmp_path / "out").read_bytes() == data


def test_the_null_device_is_an_input_that_has_ended() -> None:
    with peer(subprocess.DEVNULL, subprocess.DEVNULL) as process:
        assert end(process) == ended(0)


@pytest.mark.parametrize("closed", ["0", "1", "2"])
def test_a_standard_descriptor_that_is_closed_counts_as_the_null_device(closed: str) -> None:
    command = f'exec "$@" {closed}{"<" if closed == "0" else ">"}&-'
    done = subprocess.run(
        ["sh", "-c", command, "sh", *PEER], input=b"1\n", capture_output=True, timeout=LIMIT_S, check=False
    )
    assert done.stdout == {"0": b"", "1": b"", "2": b"1\n"}[closed]
    if closed != "2":
        assert report(done.stderr) == ended(0 if closed == "0" else 1)


def test_one_socket_works_as_input_and_output() -> None:
    ours, theirs = socket.socketpair()
    ours.settimeout(LIMIT_S)
    with ours, peer(theirs, theirs) as process:
        theirs.close()
        big = b"s" * (2 * MIB) + b"\n"
        ours.sendall(b"hi\n")
        assert read_exactly(ours.fileno(), 3) == b"hi\n"
        ours.sendall(big)
        assert read_exactly(ours.fileno(), len(big)) == big
        ours.shutdown(socket.SHUT_WR)
        assert end(process) == ended(2)


def test_a_terminal_works_and_its_hang_up_is_the_end_of_input() -> None:
    ours, theirs = pty.openpty()
    tty.setraw(theirs)
    assert not termios.tcgetattr(theirs)[3] & termios.ECHO
    with peer(theirs, theirs) as process:
        os.close(theirs)
        os.write(ours, b"hi\n")
        assert read_exactly(ours, 3) == b"hi\n"
        os.close(ours)
        assert end(process) == ended(1)


def test_the_descriptors_of_the_parent_stay_blocking() -> None:
    read, theirs_out = os.pipe()
    theirs_in, write = os.pipe()
    with peer(theirs_in, theirs_out) as process:
        os.write(write, b"1\n")
        assert read_exactly(read, 2) == b"1\n"
        flags = [fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_NONBLOCK for fd in (theirs_in, theirs_out)]
        os.close(write)
        assert end(process) == ended(1)
    for fd in (read, theirs_in, theirs_out):
        os.close(fd)
    assert flags == [0, 0]


def test_descriptors_that_the_parent_made_non_blocking_work_too() -> None:
    ours, theirs = pty.openpty()
    tty.setraw(theirs)
    os.set_blocking(theirs, False)
    big = b"n" * (256 << 10) + b"\n"
    with peer(subprocess.PIPE, theirs) as process:
        os.close(theirs)
        assert process.stdin
        process.stdin.write(big)
        assert read_exactly(ours, len(big)) == big
        assert end(process) == {**ended(1), "nonblock": False}
    os.close(ours)


# -- inside this process: what a subprocess cannot show


@pytest.fixture
async def pipes() -> Any:
    read, far_write = os.pipe()
    far_read, write = os.pipe()
    wire = Wire(Claimed(read, write), Framer(), high_bytes=100_000)
    yield wire, far_read, far_write
    wire.close()
    for fd in (far_read, far_write):
        with contextlib.suppress(OSError):
            os.close(fd)


@pytest.mark.anyio
async def test_recv_gives_few_frames_at_a_time_and_then_the_end_for_ever(pipes: Any) -> None:
    wire, _, far_write = pipes
    os.write(far_write, b"1\n" * (FRAMES_PER_RECV + 1))
    os.close(far_write)
    async with asyncio.timeout(LIMIT_S):
        got = [await wire.recv() for _ in range(4)]
    assert got == [[b"1"] * FRAMES_PER_RECV, [b"1"], [], []]
    assert wire.eof


@pytest.mark.anyio
async def test_a_peer_that_pipelines_does_not_keep_others_from_their_turn(pipes: Any) -> None:
    wire, _, far_write = pipes
    os.write(far_write, b"1\n" * (FRAMES_PER_RECV * 3))
    turns: list[int] = []
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(LIMIT_S):
        for n in range(3):
            assert len(await wire.recv()) == FRAMES_PER_RECV
            assert turns == list(range(n))
            loop.call_soon(turns.append, n)


@pytest.mark.anyio
@pytest.mark.parametrize("waiting_already", [True, False])
async def test_recv_gives_nothing_out_while_too_much_output_waits(pipes: Any, waiting_already: bool) -> None:
    wire, far_read, far_write = pipes
    if waiting_already:
        os.write(far_write, b"{}\n" * (FRAMES_PER_RECV + 1))
        assert await wire.recv() == [b"{}"] * FRAMES_PER_RECV
    wire.send(b"o" * 300_000)
    wire.flush()
    held = wire.out_bytes
    assert held > 100_000
    if not waiting_already:
        os.write(far_write, b"{}\n")
    receiving = asyncio.create_task(wire.recv())
    done, _ = await asyncio.wait([receiving], timeout=0.2)
    assert done == set()
    assert wire.out_bytes == held
    async with asyncio.timeout(LIMIT_S):
        out = await asyncio.to_thread(read_exactly, far_read, 300_001)
        assert await receiving == [b"{}"]
        await wire.drained()
    assert out == b"o" * 300_000 + b"\n"
    assert wire.out_bytes == 0


@pytest.mark.anyio
async def test_messages_of_one_turn_leave_in_one_write_and_in_order(pipes: Any) -> None:
    wire, far_read, _ = pipes
    for n in range(100):
        wire.send(b"%d" % n)
    os.set_blocking(far_read, False)
    with pytest.raises(BlockingIOError):
        os.read(far_read, 1)
    async with asyncio.timeout(LIMIT_S):
        await wire.drained()
    assert os.read(far_read, 1 << 16) == b"".join(b"%d\n" % n for n in range(100))


@pytest.mark.anyio
async def test_messages_leave_without_a_flush(pipes: Any) -> None:
    wire, far_read, _ = pipes
    wire.send(b"{}")
    async with asyncio.timeout(LIMIT_S):
        assert await asyncio.to_thread(read_exactly, far_read, 3) == b"{}\n"


@pytest.mark.anyio
async def test_close_ends_a_recv_that_waits(pipes: Any) -> None:
    wire, _, _ = pipes
    receiving = asyncio.create_task(wire.recv())
    await asyncio.wait([receiving], timeout=0.05)
    wire.close()
    async with asyncio.timeout(LIMIT_S):
        assert await receiving == []
    wire.send(b"dropped")
    assert wire.out_bytes == 0


# -- a peer that has said all and does not read


@pytest.fixture
async def impatient() -> Any:
    read, far_write = os.pipe()
    far_read, write = os.pipe()
    wire = Wire(Claimed(read, write), Framer(), high_bytes=100_000, patience_s=0.05)
    yield wire, far_read, far_write
    wire.close()
    for fd in (far_read, far_write):
        with contextlib.suppress(OSError):
            os.close(fd)


@pytest.mark.anyio
@pytest.mark.parametrize("seen", [True, False], ids=["the end was read", "the end stands behind what is not read"])
async def test_a_peer_that_has_ended_its_input_and_takes_nothing_more_is_gone(impatient: Any, seen: bool) -> None:
    wire, _, far_write = impatient
    async with asyncio.timeout(LIMIT_S):
        if not seen:
            wire.send(b"o" * 300_000)
        os.write(far_write, b"{}\n")
        os.close(far_write)
        if seen:
            assert await wire.recv() == [b"{}"]
            wire.send(b"o" * 300_000)
        await wire.room()
        assert (wire.dead, wire.out_bytes) == (True, 0)
        assert [await wire.recv() for _ in range(2)] == ([[], []] if seen else [[b"{}"], []])


@pytest.mark.anyio
async def test_a_peer_that_may_still_speak_is_waited_for_without_an_end(impatient: Any) -> None:
    wire, far_read, _ = impatient
    wire.send(b"o" * 300_000)
    waiting = asyncio.create_task(wire.room())
    done, _ = await asyncio.wait([waiting], timeout=0.3)
    assert (done, wire.dead) == (set(), False)
    async with asyncio.timeout(LIMIT_S):
        await asyncio.to_thread(read_exactly, far_read, 300_001)
        await waiting
