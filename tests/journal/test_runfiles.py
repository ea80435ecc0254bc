"""The files of one run. S0-34, S2-24, F023, F027."""

from __future__ import annotations

import errno
import itertools
import json
import random
import zlib

import pytest
from msgspec.structs import replace
from rpcagent import errors
from rpcagent.journal import runfiles
from rpcagent.journal.record import framed
from rpcagent.journal.runfiles import TABLE, Facts, Line, State, classify, fitting

from .simdisk import SimDisk

EVERY = [Facts(*bits) for bits in itertools.product((False, True), repeat=8)]
HISTORY, STATE = "runs/run_a/history.jsonl", "runs/run_a/state.json"


def files(lines: list[Line], run: str = "run_a", summary: bytes = b'{"place":1}') -> tuple[dict[str, bytes], State]:
    parts, chain, last = [], zlib.crc32(run.encode()), 0
    for line in lines:
        more, chain = runfiles.history_line(chain, line)
        parts.append(more)
        last = line.first + line.count - 1
    data = b"".join(parts)
    state = State(last_seq=last, lines=len(lines), size=len(data), chain=chain, summary=summary)
    folder = f"runs/{run}/"
    return {folder + "history.jsonl": data, folder + "state.json": runfiles.encode_state(run, state)}, state


def lines_of(*sizes: int) -> list[Line]:
    first, lines = 1, []
    for number, size in enumerate(sizes):
        count = 1 + number % 3
        lines.append(Line(first, count, b'"%b"' % (b"x" * size)))
        first += count
    return lines


def damage(image: dict[str, bytes], named: bool = True) -> dict[str, object]:
    with pytest.raises(errors.StoreDamaged) as caught:
        runfiles.read_bodies(SimDisk(image), "run_a", named)
    assert caught.value.details.pop("runs") == ["run_a"]
    return caught.value.details


# The table


def test_exactly_one_row_fits_every_combination_of_facts() -> None:
    assert len(EVERY) == 256
    assert {len(fitting(facts)) for facts in EVERY} == {1}


def test_every_row_is_the_answer_to_some_combination_and_has_its_own_label() -> None:
    hit = {classify(facts).label for facts in EVERY}
    assert hit == {row.label for row in TABLE}
    assert len(hit) == len(TABLE)


def test_only_a_whole_history_under_a_good_state_is_good_and_only_an_unnamed_run_without_state_is_none() -> None:
    for facts in EVERY:
        good = facts.state and all(facts._replace(named=True)[1:])
        none = not facts.state and not facts.named
        assert classify(facts).outcome == ("good" if good else "none" if none else "damaged")


# Bytes


def test_a_history_and_a_state_read_back_as_they_were_written_and_are_plain_json() -> None:
    lines = lines_of(3, 0, 2000)
    image, state = files(lines)
    assert runfiles.read_state(SimDisk(image), "run_a") == state
    assert runfiles.read_bodies(SimDisk(image), "run_a", named=True) == (state, lines)
    told = json.loads(image[STATE])
    assert told["d"] == {
        "format": 1, "lastSeq": 6, "lines": 3, "bytes": state.size, "chain": f"{state.chain:08x}", "summary": {"place": 1},
    }  # fmt: skip
    assert (told["k"], told["r"]) == ("state", "run_a")
    previous = f"{zlib.crc32(b'run_a'):08x}"
    for line in image[HISTORY].splitlines(keepends=True):
        found = json.loads(line)
        assert (found["c"], found["p"]) == (f"{zlib.crc32(line[16:]):08x}", previous)
        previous = found["c"]


def test_an_empty_history_is_a_history_and_must_be_there() -> None:
    image, state = files([])
    assert state == runfiles.empty("run_a", b'{"place":1}')
    assert runfiles.read_bodies(SimDisk(image), "run_a", named=True) == (state, [])
    del image[HISTORY]
    assert damage(image)["reason"] == "history.jsonl is missing"


@pytest.mark.parametrize("run", ["", ".", "..", "a/b", "../up", "x" * 129])
def test_a_run_whose_name_leads_elsewhere_has_no_folder_s2_24(run: str) -> None:
    with pytest.raises(ValueError, match="no folder"):
        runfiles.read_state(SimDisk(), run)


def test_bytes_behind_what_counts_are_never_read() -> None:
    image, state = files(lines_of(3, 4))
    for more in (b"{", b"\0" * 5000, image[HISTORY], b"\n"):
        longer = image | {HISTORY: image[HISTORY] + more}
        assert runfiles.read_bodies(SimDisk(longer), "run_a", named=True) == (state, lines_of(3, 4))
        assert runfiles.read_page(SimDisk(longer), "run_a", state, 0, 10_000) == lines_of(3, 4)


# Damage


def test_each_way_in_which_the_files_of_a_run_are_damaged_has_its_reason_and_place() -> None:
    image, state = files(lines_of(3, 4, 5))
    data = image[HISTORY]
    second = data.index(b"\n") + 1
    third = data.index(b"\n", second) + 1

    def with_state(**changed: int) -> dict[str, bytes]:
        return image | {STATE: runfiles.encode_state("run_a", replace(state, **changed))}

    other, _ = files(lines_of(3, 4, 5), run="run_b")
    for bad, file, offset, reason in (
        ({HISTORY: data}, STATE, 0, "state.json is missing"),
        (image | {STATE: b""}, STATE, 0, "state.json is bad"),
        (image | {STATE: image[STATE] + b"\n"}, STATE, 0, "state.json is bad"),
        (image | {STATE: other["runs/run_b/state.json"]}, STATE, 0, "it is the state of another run"),
        ({STATE: image[STATE]}, HISTORY, 0, "history.jsonl is missing"),
        (image | {HISTORY: data[:-1]}, HISTORY, len(data) - 1, "the history ends before what state.json counts"),
        (image | {HISTORY: data[:third] + b"?" + data[third + 1 :]}, HISTORY, third, "a bad line in the history"),
        (with_state(size=state.size - 1), HISTORY, third, "a bad line in the history"),
        (image | {HISTORY: other["runs/run_b/history.jsonl"]}, HISTORY, 0, "an intact line that does not follow the one before it"),
        (image | {HISTORY: data[second:third] + data[:second] + data[third:]}, HISTORY, 0, "an intact line that does not follow the one before it"),
        (with_state(size=third, lines=2), HISTORY, second, "the history does not end as state.json says"),
        (with_state(last_seq=7), HISTORY, third, "the history does not end as state.json says"),
        (with_state(lines=4), HISTORY, third, "the history does not end as state.json says"),
        (with_state(chain=1), HISTORY, third, "the history does not end as state.json says"),
    ):  # fmt: skip
        assert damage(bad) == {"file": file, "offset": offset, "reason": reason}


def test_a_run_that_nothing_names_and_that_has_no_state_is_no_run() -> None:
    image, _ = files(lines_of(3))
    for left in ({}, {HISTORY: image[HISTORY]}, {"runs/run_a/": b""}, {STATE + ".tmp": image[STATE]}):
        assert runfiles.read_bodies(SimDisk(left), "run_a", named=False) is None
        assert runfiles.read_state(SimDisk(left), "run_a") is None


def test_a_later_state_or_line_is_too_new() -> None:
    image, _ = files(lines_of(3))
    inner = json.loads(image[STATE])["d"]
    for changed in ({"format": 2}, {"more": 1}):
        data = framed(b'"k":"state","r":"run_a","d":%b}\n' % json.dumps(inner | changed).encode())[0]
        with pytest.raises(errors.StoreTooNew):
            runfiles.read_state(SimDisk(image | {STATE: data}), "run_a")
    line, _ = framed(b'"p":"00000000","z":1,"s":1,"n":1,"d":1}\n')
    state = State(last_seq=1, lines=1, size=len(line), chain=0, summary=b"1")
    image = {HISTORY: line, STATE: runfiles.encode_state("run_a", state)}
    with pytest.raises(errors.StoreTooNew):
        runfiles.read_bodies(SimDisk(image), "run_a", named=True)


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES, errno.EMFILE])
@pytest.mark.parametrize("name", [HISTORY, STATE])
def test_what_cannot_be_read_is_never_taken_for_missing_f027(name: str, code: int) -> None:
    image, state = files(lines_of(3))
    disk = SimDisk(image)
    disk.read_error = {name: code}
    with pytest.raises(errors.StorageError) as caught:
        runfiles.read_bodies(disk, "run_a", named=False)
    assert caught.value.data == {"code": "STORAGE", "retryable": True, "errno": errno.errorcode[code]}
    if name == HISTORY:
        with pytest.raises(errors.StorageError):
            runfiles.read_page(disk, "run_a", state, 0, 100)


# Pages


class Counted(SimDisk):
    """Counts what is read of a history."""

    read_bytes = reads = 0

    def read_at(self, name: str, offset: int, size: int) -> bytes:
        data = super().read_at(name, offset, size)
        self.read_bytes, self.reads = self.read_bytes + len(data), self.reads + 1
        return data


@pytest.mark.parametrize("seed", range(6))
def test_each_page_of_a_history_is_what_stands_there(seed: int) -> None:
    rng = random.Random(seed)
    sizes = [rng.choice((0, 3, 50, 700, 5000)) if rng.random() < 0.97 else 40_000 for _ in range(rng.randrange(1, 120))]
    lines = lines_of(*sizes)
    image, state = files(lines)
    disk = SimDisk(image)
    for after in range(-1, state.last_seq + 2):
        most = rng.choice((1, 500, 20_000, 10**9))
        page = runfiles.read_page(disk, "run_a", state, after, most)
        begin = next((i for i, line in enumerate(lines) if line.first + line.count > max(1, after + 1)), len(lines))
        assert page == lines[begin : begin + len(page)]
        if begin == len(lines):
            assert page == []
            continue
        size = [len(runfiles.history_line(0, line)[0]) for line in lines]
        fit = next(
            (n for n in range(1, len(lines) - begin) if sum(size[begin : begin + n + 1]) > most), len(lines) - begin
        )
        assert len(page) == fit


def test_a_page_of_a_long_history_is_found_in_a_few_small_reads() -> None:
    lines = lines_of(*[900] * 20_000)
    image, state = files(lines)
    disk = Counted(image)
    for after in (0, state.last_seq // 3, state.last_seq - 1):
        disk.read_bytes = disk.reads = 0
        assert runfiles.read_page(disk, "run_a", state, after, 10_000)
        assert disk.reads < 60
        assert disk.read_bytes < 200_000 < state.size // 90


def test_one_long_line_is_searched_in_time_with_its_length() -> None:
    lines = lines_of(3, 3_000_000, 3)
    image, state = files(lines)
    disk = Counted(image)
    assert runfiles.read_page(disk, "run_a", state, 3, 100) == lines[2:]
    assert disk.read_bytes < 4 * state.size


def test_a_page_shows_no_flipped_bit_and_says_where_it_is_s0_34() -> None:
    lines = lines_of(3, 40, 3, 60, 3)
    image, state = files(lines)
    data = image[HISTORY]
    starts = [0, *(i + 1 for i, byte in enumerate(data) if byte == 10)]
    unseen = 0
    for place in range(len(data)):
        for bit in (0, 3, 6):
            rotten = bytearray(data)
            rotten[place] ^= 1 << bit
            disk = SimDisk({HISTORY: bytes(rotten)})
            for after in range(state.last_seq):
                begin = next(i for i, line in enumerate(lines) if line.first + line.count > after + 1)
                try:
                    page = runfiles.read_page(disk, "run_a", state, after, 1)
                except errors.StoreDamaged as error:
                    assert error.details["file"] == HISTORY
                    assert error.details["runs"] == ["run_a"]
                    assert error.details["offset"] in starts
                    continue
                assert page == lines[begin : begin + 1]  # the damage is elsewhere
                assert not starts[begin] <= place < starts[begin + 1]
                unseen += 1
    assert unseen > 0


def test_a_page_that_is_asked_of_the_wrong_state_is_damage_not_another_page() -> None:
    image, _ = files(lines_of(3, 4, 5))
    _, longer = files(lines_of(3, 4, 5, 6))
    with pytest.raises(errors.StoreDamaged):
        runfiles.read_page(SimDisk(image), "run_a", longer, 6, 100)
    shorter = State(last_seq=9, lines=3, size=len(image[HISTORY]), chain=0, summary=b"1")
    with pytest.raises(errors.StoreDamaged):
        runfiles.read_page(SimDisk(image), "run_a", shorter, 8, 100)
