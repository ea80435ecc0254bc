"""The bytes of checkpoint.json. S0-34, F023."""

from __future__ import annotations

import json
import zlib

import pytest
from rpcagent import errors
from rpcagent.journal import manifest
from rpcagent.journal.manifest import Base, Manifest, TombstoneFile
from rpcagent.journal.record import framed

SAMPLE = Manifest(
    store_id="sto_1", app="0.1.0", epoch=3, at="2030-01-01T00:00:00Z", places=7, ended={"completed": 2},
    tombstones=(TombstoneFile("0000000000000001.bin", 2, "ab" * 32),), base=Base(41, 0xBEEF, 40),
    live={"run_a": b'{"place":1}', "run_b": b'{"place":2,"body":"\xc3\xa9"}'},
)  # fmt: skip
DATA = manifest.encode(SAMPLE, SAMPLE.live.items())


def test_a_manifest_reads_back_as_it_was_written_and_is_plain_json_lines() -> None:
    assert manifest.decode(DATA) == SAMPLE
    first, *rest = [json.loads(line) for line in DATA.splitlines()]
    assert list(first) == ["c", "k", "d"]
    assert first["d"] == {
        "format": 1, "storeId": "sto_1", "app": "0.1.0", "epoch": 3, "at": "2030-01-01T00:00:00Z", "seq": 41,
        "checksum": "0000beef", "batch": 40, "places": 7, "ended": {"completed": 2},
        "tombstones": [{"name": "0000000000000001.bin", "count": 2, "sum": "ab" * 32}], "live": 2,
        "rest": f"{zlib.crc32(DATA[DATA.index(10) + 1:]):08x}",
    }  # fmt: skip
    assert [(line["k"], line["r"]) for line in rest] == [("run", "run_a"), ("run", "run_b")]
    for line in DATA.splitlines(keepends=True):
        assert line[6:14] == b"%08x" % zlib.crc32(line[16:])


def test_a_manifest_without_live_runs_is_one_line() -> None:
    data = manifest.encode(SAMPLE, ())
    assert data.count(b"\n") == 1
    assert manifest.decode(data).live == {}


def test_no_flipped_bit_and_no_cut_of_a_manifest_goes_unseen_s0_34() -> None:
    for place in range(len(DATA)):
        for bit in range(8):
            rotten = bytearray(DATA)
            rotten[place] ^= 1 << bit
            with pytest.raises((errors.StoreDamaged, errors.StoreTooNew)):
                manifest.decode(bytes(rotten))
        with pytest.raises(errors.StoreDamaged):
            manifest.decode(DATA[:place])


def test_damage_names_the_file_the_line_and_the_reason() -> None:
    lines = DATA.splitlines(keepends=True)
    begin = len(lines[0]) + len(lines[1])
    for data, offset, reason in (
        (b"", 0, "the first line of the manifest is bad"),
        (DATA[:-3] + b"?}\n", begin, "a bad line of a live run"),
        (lines[0] + lines[1], begin, "1 of 2 live runs are named"),
        (lines[0] + lines[2] + lines[1], len(lines[0]), "the lines of the runs are not those that were written"),
        (lines[0] + lines[1] + lines[1], begin, "a run is named twice"),
    ):
        with pytest.raises(errors.StoreDamaged) as caught:
            manifest.decode(data)
        assert caught.value.details == {"file": "checkpoint.json", "offset": offset, "reason": reason}


def test_a_later_manifest_is_too_new_and_says_which_version_to_install() -> None:
    inner = json.loads(DATA.splitlines()[0])["d"]

    def first(**changed: object) -> bytes:
        return framed(b'"k":"checkpoint","d":%b}\n' % json.dumps(inner | changed).encode())[0]

    for data in (
        first(format=2, app="2.0.0"),
        DATA.replace(b'"format":1,', b'"format":2,').replace(b"0.1.0", b"2.0.0"),
    ):
        with pytest.raises(errors.StoreTooNew) as caught:
            manifest.decode(data)
        assert caught.value.details == {"format": 2, "supported": [0, 1]}
        assert "(checkpoint.json, byte 0): install rpcagent 2.0.0 or later" in caught.value.message
    for data in (first(more=1), first(seq="x"), first(checksum="zz"), framed(b'"k":"other","d":{}}\n')[0]):
        with pytest.raises(errors.StoreTooNew):
            manifest.decode(data)
    with pytest.raises(errors.StoreTooNew):
        manifest.decode(DATA + framed(b'"k":"more","r":"run_c","d":{}}\n')[0])


@pytest.mark.parametrize(
    "lines", [[("a", b"1"), ("a", b"1")], [("..", b"1")], [("a/b", b"1")], [("a", b"1\n")]], ids=str
)
def test_what_could_not_be_read_back_is_not_written(lines: list[tuple[str, bytes]]) -> None:
    with pytest.raises(ValueError, match="a live run stands once"):
        manifest.encode(SAMPLE, lines)
