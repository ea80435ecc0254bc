"""Torn tail or damage. P9, S0-34, F019, F021, F023."""

from __future__ import annotations

import itertools
import time
import zlib

import pytest
from rpcagent import errors
from rpcagent.journal import record
from rpcagent.journal.record import Head, Header, Item
from rpcagent.journal.tail import TABLE, Facts, Position, classify, fitting, scan


@pytest.mark.parametrize("facts", [Facts(*bits) for bits in itertools.product((False, True), repeat=6)])
def test_exactly_one_row_fits_every_combination_of_facts(facts: Facts) -> None:
    assert len(fitting(facts)) == 1


def test_every_row_is_the_answer_to_some_combination_and_has_its_own_label() -> None:
    hit = {classify(Facts(*bits)).label for bits in itertools.product((False, True), repeat=6)}
    assert hit == {row.label for row in TABLE}
    assert len(hit) == len(TABLE)


class Log:
    """The bytes of one segment, batch by batch."""

    def __init__(self, *, through: int = 0, fmt: int = 1, app: str = "0") -> None:
        self.data = record.header_line(0, 0, Header(fmt, "crc32", "store-1", app, through))
        self.starts: list[int] = []  # of each line
        self.seq = self.checksum = 0

    def batch(self, *sizes: int) -> Log:
        start = self.seq + 1
        for size in sizes:
            self.seq += 1
            self.starts.append(len(self.data))
            line, self.checksum = record.commit_line(
                self.seq, start, self.checksum, Item("run_1", self.seq, 1, b'"%b"' % (b"x" * size))
            )
            self.data += line
        return self

    def read(self, data: bytes | None = None, *, until: int | None = None, head: int = 0) -> tuple[int, int]:
        """Last number and dropped bytes."""
        at = Position()
        mark = Head(1, head, self.checksum) if head else None
        found = scan("seg", self.data if data is None else data, at, until, mark)
        return at.seq, found.dropped


def zeroed(data: bytes, start: int, end: int) -> bytes:
    return data[:start] + bytes(end - start) + data[end:]


def refused(log: Log, data: bytes, **more: int) -> errors.StoreDamaged:
    with pytest.raises(errors.StoreDamaged) as caught:
        log.read(data, **more)
    return caught.value


def test_a_log_cut_at_any_byte_of_its_last_batch_is_a_torn_tail_f019() -> None:
    log = Log().batch(5).batch(5, 6, 7)
    for cut in range(log.starts[1], len(log.data)):
        last, dropped = log.read(log.data[:cut])
        good = sum(1 for start in [*log.starts[1:], len(log.data)] if start <= cut)
        assert last == good
        assert dropped == cut - [*log.starts, len(log.data)][last]


@pytest.mark.parametrize("zeros", [1, 4096, 4 * 2**20])
def test_zeros_to_the_end_are_a_torn_tail_f021(zeros: int) -> None:
    log = Log().batch(5)
    assert log.read(log.data + bytes(zeros)) == (1, zeros)


@pytest.mark.parametrize("zeros", [1, 4096])
def test_zeros_with_a_record_after_them_are_damage_f021(zeros: int) -> None:
    log = Log().batch(5).batch(6).batch(7)
    second, third = log.starts[1:]
    for rest in (log.data[second:], log.data[third:]):
        error = refused(log, log.data[:second] + bytes(zeros) + rest)
        assert error.details == {"file": "seg", "offset": second, "reason": error.details["reason"]}


def test_intact_lines_of_the_same_batch_after_a_bad_one_are_a_tear() -> None:
    log = Log().batch(5).batch(600, 6, 7)
    start, end = log.starts[1], log.starts[2]
    for data in (
        zeroed(log.data, start, end),  # the newline too: the next line follows zeros
        zeroed(log.data, start, end - 1),
        zeroed(log.data, start + 100, start + 300),
        zeroed(log.data, start + 100, end),
    ):
        assert log.read(data) == (1, len(data) - start)


def test_a_tear_inside_a_batch_keeps_what_stands_before_it() -> None:
    log = Log().batch(5).batch(6, 7, 8)
    assert log.read(zeroed(log.data, log.starts[2], log.starts[3]))[0] == 2


def test_a_bad_line_before_a_later_batch_is_damage_even_where_its_newline_is_gone() -> None:
    log = Log().batch(5).batch(6).batch(7)
    start, end = log.starts[1:]
    rotten = log.data[: end - 1] + b"J" + log.data[end:]
    assert refused(log, rotten).details["offset"] == start


def test_wrong_bytes_of_the_right_length_at_the_end_are_refused_where_they_were_acknowledged_f023() -> None:
    log = Log().batch(5).batch(6)
    rotten = log.data[:-16] + b"?" * 15 + b"\n"
    assert "acknowledged" in refused(log, rotten, head=2).details["reason"]
    assert log.read(rotten, head=0) == (1, len(rotten) - log.starts[1])  # power cut: no watermark tells


def test_a_last_line_without_its_newline_is_torn_or_damaged_by_the_watermark() -> None:
    log = Log().batch(5)
    assert log.read(log.data[:-1]) == (0, len(log.data) - 1 - log.starts[0])
    refused(log, log.data[:-1], head=1)


def test_what_was_in_a_segment_when_it_got_its_name_counts_as_acknowledged() -> None:
    log = Log(through=1).batch(5)
    refused(log, log.data[:-1])
    refused(log, log.data[: log.starts[0]])


def test_a_segment_that_another_one_follows_must_be_complete_and_what_it_supersedes_is_not_read() -> None:
    log = Log().batch(5).batch(6)
    assert log.read(until=3) == (2, 0)
    assert log.read(log.data + b"torn", until=3) == (2, 0)
    assert log.read(until=2) == (1, 0)
    assert "next one begins" in refused(log, log.data, until=4).details["reason"]
    assert "follows" in refused(log, log.data[: log.starts[1]] + b"torn", until=3).details["reason"]


def test_an_intact_line_out_of_its_place_is_damage() -> None:
    log = Log().batch(5).batch(6).batch(7)
    first, second, third = log.starts
    for data in (
        log.data[:second] + log.data[third:],  # one is missing
        log.data[:second] + log.data[first:],  # one is there twice
        log.data + Log().data,  # a segment inside a segment
        log.data[:second] + Log().batch(9).batch(6).data[second:],  # of another history
    ):
        refused(log, data)


def test_head_that_names_another_line_is_damage() -> None:
    log = Log().batch(5)
    other = Head(1, 1, log.checksum ^ 1)
    with pytest.raises(errors.StoreDamaged, match="HEAD"):
        scan("seg", log.data, Position(), None, other)


def test_a_segment_without_its_first_line_is_damage_since_it_had_it_before_its_name() -> None:
    log = Log().batch(5)
    for data in (b"", b"\0" * 500, log.data[: log.starts[0] - 1], log.data[log.starts[0] :]):
        assert refused(log, data).details["offset"] == 0


def test_a_later_format_kind_or_shape_is_too_new_never_damaged_and_never_dropped() -> None:
    def line(text: bytes) -> bytes:
        return b'{"c":"%08x",%b' % (zlib.crc32(text), text)

    base = Log()
    kind = line(b'"q":1,"b":1,"p":"00000000","k":"snapshot","d":1}\n')
    member = line(b'"q":1,"b":1,"p":"00000000","k":"commit","z":1,"r":"a","s":1,"n":1,"d":1}\n')
    other_sum = base.data.replace(b'"format":1,"crc":"crc32"', b'"format":2,"crc":"crc32c"')
    for data in (Log(fmt=2).data, base.data + kind, base.data + member, other_sum, kind):
        with pytest.raises(errors.StoreTooNew) as caught:
            base.read(data)
        assert caught.value.details["supported"] == [0, 1]


@pytest.mark.parametrize("fmt", [0, 1])
def test_segments_of_both_formats_are_read(fmt: int) -> None:
    assert Log(fmt=fmt).batch(5).read() == (1, 0)


def test_a_later_format_is_answered_with_the_version_to_install() -> None:
    with pytest.raises(errors.StoreTooNew) as caught:
        Log(fmt=2, app="3.1.0").read()
    assert caught.value.data == {"code": "INCOMPATIBLE", "retryable": False, "format": 2, "supported": [0, 1]}
    assert caught.value.message == (
        "The store was written by rpcagent 3.1.0 (seg, byte 0): install rpcagent 3.1.0 or later. Nothing was changed."
    )


def test_a_payload_that_looks_like_a_line_does_not_pass_for_one() -> None:
    inner = Log().batch(3)
    text = inner.data[inner.starts[0] : -1]
    line, _ = record.commit_line(1, 1, 0, Item("run_1", 1, 1, b"[" + b",".join([text] * 50) + b"]"))
    data = Log().data + line
    assert Log().read(data) == (1, 0)
    assert Log().read(data[:-2])[0] == 0


def test_judging_a_tail_takes_time_in_proportion_to_its_length() -> None:
    """CPU time, on a tail made to be slow: one line of starts of lines, then the same twice as long."""

    def cost(starts: int) -> float:
        data = Log().batch(5).data + b'\0{"c":"00000000","q":1' * starts + b"}\n"
        best = 9.0
        for _ in range(3):
            begin = time.process_time()
            assert Log().read(data)[0] == 1
            best = min(best, time.process_time() - begin)
        return best

    assert cost(80_000) < 8 * cost(20_000) + 0.05
