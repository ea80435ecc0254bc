"""The bytes of a line. S0-34, S2-24, S2-25."""

from __future__ import annotations

import json
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rpcagent.journal import record
from rpcagent.journal.record import Head, Item

NUMBERS = st.integers(min_value=1, max_value=10**15)
CHECKSUMS = st.integers(min_value=0, max_value=2**32 - 1)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
RUNS = st.from_regex(r"[A-Za-z0-9_.-]{1,128}", fullmatch=True)


def body_of(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")


@st.composite
def items(draw: st.DrawFn) -> Item:
    value = draw(JSON.filter(lambda v: not any(0xD800 <= ord(c) < 0xE000 for c in json.dumps(v, ensure_ascii=False))))
    return Item(draw(RUNS), draw(NUMBERS), draw(NUMBERS), body_of(value))


@given(items(), NUMBERS, NUMBERS, CHECKSUMS)
@settings(max_examples=200, deadline=None)
def test_a_line_reads_back_as_it_was_written_and_is_plain_json(item: Item, seq: int, batch: int, previous: int) -> None:
    line, checksum = record.commit_line(seq, batch, previous, item)
    assert line.count(b"\n") == 1
    assert checksum == zlib.crc32(line[16:])
    found = record.decode(line, 0, len(line))
    assert found == record.Line(checksum, seq, batch, previous, "commit", item.run, item.first, item.count, item.body)
    plain = json.loads(line)
    assert plain["d"] == json.loads(item.body)
    assert list(plain) == ["c", "q", "b", "p", "k", "r", "s", "n", "d"]


@given(items(), st.data())
@settings(max_examples=200, deadline=None)
def test_no_changed_byte_and_no_cut_leaves_a_line_intact(item: Item, data: st.DataObject) -> None:
    line, _ = record.commit_line(5, 4, 3, item)
    place = data.draw(st.integers(0, len(line) - 1))
    rotten = bytearray(line)
    rotten[place] ^= data.draw(st.integers(1, 255))
    assert record.decode(bytes(rotten), 0, len(line)) is None
    assert record.decode(line, 0, place) is None


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"1 2",
        b"{",
        b'{"a":1}\n',
        b"[\n]",
        b'"\xff"',
        b'"\xed\xa0\x80"',
        b'"\x00"',
        b"nul",
        b"\0",
        b"[" * 5000 + b"]" * 5000,
    ],
)
def test_a_payload_that_could_not_be_read_back_is_refused_before_anything_is_written(body: bytes) -> None:
    with pytest.raises(ValueError, match="body"):
        Item("run_1", 1, 1, body)


@pytest.mark.parametrize("run", ["", "../up", 'a"b', "a\n", "a/b", "x" * 129, "ü"])
def test_a_run_name_that_could_leave_its_place_is_refused_s2_24(run: str) -> None:
    with pytest.raises(ValueError, match="run"):
        Item(run, 1, 1, b"1")


@pytest.mark.parametrize(("first", "count"), [(0, 1), (1, 0), (-1, 1)])
def test_events_are_numbered_and_counted_from_one(first: int, count: int) -> None:
    with pytest.raises(ValueError, match="start at 1"):
        Item("run_1", first, count, b"1")


def test_a_payload_as_deep_as_is_accepted_is_read_back() -> None:
    depth = 900
    line, _ = record.commit_line(1, 1, 0, Item("run_1", 1, 1, b"[" * depth + b"]" * depth))
    found = record.decode(line, 0, len(line))
    assert found is not None
    assert len(found.body) == 2 * depth


def test_the_envelope_costs_at_most_a_hundred_bytes_beyond_run_name_and_payload() -> None:
    item = Item("run_" + "a" * 26, 1000, 3, b"{}")
    line, _ = record.commit_line(10**6, 10**6, 2**32 - 1, item)
    assert len(line) - len(item.run) - len(item.body) <= 100


def test_a_line_with_a_right_checksum_but_another_shape_is_known_as_foreign_not_as_bad() -> None:
    tail = b'"q":1,"b":1,"p":"00000000","k":"snapshot","d":1}\n'
    line = b'{"c":"%08x",%b' % (zlib.crc32(tail), tail)
    found = record.decode(line, 0, len(line))
    assert found is not None
    assert found.kind == ""


def test_a_first_line_of_a_later_format_is_told_even_if_its_checksum_is_of_another_kind() -> None:
    line = b'{"c":"zz","k":"seg","d":{"format":3,"crc":"crc32c","app":%b}}\n'
    assert record.later_version(line % b'"2.5.0"') == record.Later(3, "2.5.0")
    for app in (b"7", b"null", b'"; rm"', b'"%b"' % (b"1" * 41)):
        assert record.later_version(line % app) == record.Later(3, None)
    for line in (
        b"",
        b"\0\0\n",
        b"[]\n",
        b'{"d":{"format":1}}\n',
        b'{"d":{"format":"x"}}\n',
        b'{"d":[]}\n',
        b"[" * 5000,
    ):
        assert record.later_version(line) is None


@given(NUMBERS, NUMBERS, CHECKSUMS, st.integers(0, 127), st.integers(1, 255))
@settings(max_examples=200, deadline=None)
def test_of_two_head_slots_the_better_intact_one_counts(
    epoch: int, seq: int, checksum: int, place: int, flip: int
) -> None:
    older, newer = Head(epoch, seq, 7), Head(epoch, seq + 1, checksum)
    both = record.head_slot(older) + record.head_slot(newer)
    assert len(both) == 2 * record.SLOT
    assert record.read_head(both) == (newer, 1)
    assert record.read_head(record.head_slot(newer) + record.head_slot(older)) == (newer, 0)
    rotten = bytearray(both)
    rotten[place] ^= flip
    assert record.read_head(bytes(rotten)) == ((newer, 1) if place < record.SLOT else (older, 0))
    assert record.read_head(b"") == (None, 1)
