"""Framing: the same bytes give the same frames, however they are cut, and no input ends the stream."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rpcagent.transport.framing import (
    HEADER_BYTES_MAX,
    INVALID_REQUEST,
    PARSE_ERROR,
    Broken,
    Frame,
    Framer,
    Framing,
)

LIMIT = 64
TOO_LARGE = Broken(INVALID_REQUEST, f"the message is larger than {LIMIT} bytes")
CUT = Broken(PARSE_ERROR, "the input ended in the middle of a message")


def lost(why: str) -> Broken:
    return Broken(PARSE_ERROR, f"{why}; input is dropped up to the next Content-Length header")


NO_HEADER = lost("the header has a line that is no header")


def read(*chunks: bytes, limit: int = LIMIT) -> list[Frame]:
    framer = Framer(limit)
    frames: list[Frame] = []
    for chunk in chunks:
        frames += framer.feed(chunk)
    return frames + framer.finish()


def with_header(body: bytes, length: int | None = None) -> bytes:
    return b"Content-Length: %d\r\n\r\n%b" % (len(body) if length is None else length, body)


STREAMS = {
    "lines": b'{"a":1}\n{"b":"\xf0\x9f\x8d\xb8 caf\xc3\xa9 \xe5\x88\xa0"}\r\n\n  \t\n[1]\n7',
    "oversized lines": b"{}\n" + b"x" * 65 + b"\n[]\n" + b"y" * 200 + b"\n" + b"z" * 64 + b"\n" + b"w" * 65,
    "half a message at the end": b'{}\n{"a":',
    "headers": with_header(b"{}") + b"Content-Type: x\r\ncontent-length:3\r\n\r\n[1]" + b"Content-Length: 0\n\n",
    "blank lines between": with_header(b"{}") + b"\r\n\n" + with_header(b'{"a":1}'),
    "oversized bodies": with_header(b"x" * 65) + with_header(b"{}") + with_header(b"\n" * 300) + with_header(b"[]"),
    "length too small": with_header('{"t":"é🍸"}'.encode(), 10) + with_header(b"{}") + with_header(b"[]"),
    "length too large": with_header(b'{"t":1}', 12) + with_header(b"{}") + with_header(b"[]") + with_header(b"[2]"),
    "no length": b"Content-Type: x\r\n\r\n{}" + with_header(b"{}"),
    "length is no number": b"Content-Length: five\r\n\r\n{}" + with_header(b"{}"),
    "negative length": b"Content-Length: -5\r\n\r\n{}" + with_header(b"{}"),
    "two lengths": b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}" + with_header(b"{}"),
    "endless header": b"C" * (HEADER_BYTES_MAX + 1) + with_header(b"{}") + with_header(b"[]"),
    "many headers": b"Content-Type: x\r\n" * 500 + b"\r\n" + with_header(b"{}"),
    "a header with much space": b"C?\nContent-Length:" + b" " * 80 + b"2\r\n\r\n{}" + with_header(b"[]"),
    "ends in a header": with_header(b"{}") + b"Content-Le",
    "ends in a body": with_header(b"{}") + b"Content-Length: 5\r\n\r\n[1",
}


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_cut_at_every_byte_gives_the_same_frames_f001(name: str) -> None:
    stream = STREAMS[name]
    whole = read(stream)
    assert read(*(stream[i : i + 1] for i in range(len(stream)))) == whole
    for cut in range(1, min(len(stream), 600)):
        assert read(stream[:cut], stream[cut:]) == whole


@given(
    st.sampled_from(sorted(STREAMS)), st.lists(st.integers(1, 40), max_size=30), st.binary(max_size=80), st.booleans()
)
@settings(max_examples=200, deadline=None)
def test_any_chunking_of_any_bytes_gives_the_same_frames(
    name: str, sizes: list[int], noise: bytes, before: bool
) -> None:
    stream = noise + STREAMS[name] if before else STREAMS[name][:700] + noise + STREAMS[name]
    chunks, at = [], 0
    for size in sizes:
        chunks.append(stream[at : at + size])
        at += size
    assert read(*chunks, stream[at:]) == read(stream)


@given(st.lists(st.binary(max_size=LIMIT).filter(lambda b: b"\n" not in b and b.strip(b" \t\r")), max_size=12))
def test_what_is_encoded_as_lines_is_read_back(messages: list[bytes]) -> None:
    framer = Framer(LIMIT)
    stream = b"".join(framer.encode(m) for m in messages)
    assert read(b"\n" + stream) == messages


@given(st.lists(st.binary(min_size=1, max_size=LIMIT), min_size=1, max_size=12))
def test_what_is_encoded_with_headers_is_read_back(messages: list[bytes]) -> None:
    framer = Framer(LIMIT)
    framer.feed(b"C")
    assert framer.framing is Framing.HEADERS
    assert read(b"".join(framer.encode(m) for m in messages)) == messages


@pytest.mark.parametrize(
    ("first", "framing", "encoded"),
    [
        (b"C", Framing.HEADERS, b"Content-Length: 2\r\n\r\n{}"),
        (b"c", Framing.HEADERS, b"Content-Length: 2\r\n\r\n{}"),
        (b"{", Framing.LINES, b"{}\n"),
        (b"\xff", Framing.LINES, b"{}\n"),
        (b"\n", Framing.LINES, b"{}\n"),
        (b"", Framing.UNDECIDED, b"{}\n"),
    ],
)
def test_the_first_byte_decides_the_framing_of_both_directions(first: bytes, framing: Framing, encoded: bytes) -> None:
    framer = Framer()
    framer.feed(first)
    assert (framer.framing, framer.encode(b"{}")) == (framing, encoded)


def test_lines_are_split_on_0a_only_and_keep_unicode_line_ends_f005() -> None:
    message = '{"t":"a\u2028b\u2029c\u0085d\u000be\u000cf\rg"}'.encode()
    assert read(message + b"\n" + message + b"\n") == [message, message]


def test_blank_lines_are_skipped_and_others_are_not() -> None:
    assert read(b"\n\r\n \t \n\x0c\n1\n") == [b"\x0c", b"1"]


def test_an_oversized_line_is_answered_once_and_the_next_line_is_read() -> None:
    assert read(STREAMS["oversized lines"]) == [b"{}", TOO_LARGE, b"[]", TOO_LARGE, b"z" * 64, TOO_LARGE]


def test_an_oversized_line_is_answered_before_it_ends() -> None:
    framer = Framer(LIMIT)
    assert framer.feed(b"x" * 64) == []
    assert framer.feed(b"x") == [TOO_LARGE]
    assert framer.feed(b"x" * 1000) == []
    assert framer.feed(b"x\n{}\n") == [b"{}"]


@pytest.mark.parametrize(
    ("last", "frame"),
    [
        (b'{"id":1}', b'{"id":1}'),
        (b' [{"id":1}] \r', b' [{"id":1}] \r'),
        (b'{"id":1', CUT),
        (b'{"t":"\xf0\x9f', CUT),
        (b"[" * 60, CUT),
        (b"{} {}", CUT),
    ],
)
def test_a_last_line_without_newline_is_a_message_if_it_is_whole(last: bytes, frame: Frame) -> None:
    assert read(b"1\n" + last) == [b"1", frame]


def test_a_last_line_that_nests_too_deeply_is_answered() -> None:
    assert read(b"[" * 100_000, limit=1 << 20) == [CUT]


def test_after_the_end_there_is_nothing_more() -> None:
    framer = Framer()
    framer.feed(b'{"a":')
    assert framer.finish() == [CUT]
    assert framer.finish() == []


@pytest.mark.parametrize(
    ("name", "frames"),
    [
        ("headers", [b"{}", b"[1]", b""]),
        ("blank lines between", [b"{}", b'{"a":1}']),
        ("oversized bodies", [TOO_LARGE, b"{}", TOO_LARGE, b"[]"]),
        ("length too small", ['{"t":"é🍸'.encode()[:10], NO_HEADER, b"{}", b"[]"]),
        ("length too large", [b'{"t":1}Conte', lost("the header has no Content-Length"), b"[]", b"[2]"]),
        ("no length", [lost("the header has no Content-Length"), b"{}"]),
        ("length is no number", [lost("Content-Length is no number"), b"{}"]),
        ("negative length", [lost("Content-Length is no number"), b"{}"]),
        ("two lengths", [lost("two different Content-Length headers"), b"{}"]),
        ("endless header", [lost("the header is larger than 8192 bytes"), b"{}", b"[]"]),
        ("many headers", [lost("the header is larger than 8192 bytes"), b"{}"]),
        ("ends in a header", [b"{}", CUT]),
        ("ends in a body", [b"{}", CUT]),
    ],
)
def test_a_stream_with_headers_gives_these_frames_f001(name: str, frames: list[Frame]) -> None:
    assert read(STREAMS[name]) == frames


def test_the_words_of_a_header_inside_a_string_are_no_header() -> None:
    body = json.dumps({"t": "Content-Length: 5\r\n\r\nhello"}).encode()
    assert read(b"Content-Length: x\r\n\r\n" + body + with_header(b"{}")) == [
        lost("Content-Length is no number"),
        b"{}",
    ]


def test_input_that_is_dropped_is_not_held() -> None:
    for head in (b"{", b"Content-Length: x\r\n"):
        framer = Framer(LIMIT)
        framer.feed(head)
        for _ in range(100):
            framer.feed(b"x" * 1000)
        assert len(framer._held) <= LIMIT


def test_a_body_of_the_limit_is_read_and_one_byte_more_is_not() -> None:
    assert read(with_header(b"x" * 64) + with_header(b"x" * 65)) == [b"x" * 64, TOO_LARGE]


@pytest.mark.parametrize("head", [b"", b"Content-Length: 33554432\r\n\r\n"])
def test_a_message_in_small_chunks_costs_time_in_proportion_to_its_size(head: bytes) -> None:
    """Quadratic copying would move 32 MiB 8,192 times: minutes instead of a fraction of a second."""
    body, chunk = b"x" * (32 << 20), b"x" * 4096
    framer = Framer()
    begun = time.process_time()
    framer.feed(head)
    frames: list[Frame] = []
    for _ in range(len(body) // len(chunk)):
        frames += framer.feed(chunk)
    frames += framer.feed(b"\n")
    assert frames == [body]
    assert time.process_time() - begun < 5


@pytest.mark.parametrize("count", [100_000])
def test_many_messages_in_one_chunk_cost_time_in_proportion_to_their_number(count: int) -> None:
    begun = time.process_time()
    assert read(with_header(b"{}") * count) == [b"{}"] * count
    assert read(b"{}\n" * count) == [b"{}"] * count
    assert time.process_time() - begun < 5
