"""`rpcagent log`: every record once, in order, also while its owner moves them away."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rpcagent import keys
from rpcagent.journal import reading
from rpcagent.journal.disk import RealDisk
from rpcagent.journal.seal import AesGcm
from tests.process.wire_driver import Daemon

from .commands import fingerprint, said
from .stores import STORE_ID, commits, golden, real_store, runs

_NUMBERED = re.compile(r"[ \d]{7}  \d{4}-\d\d-\d\d \d\d:\d\d:\d\dZ +(\d+)  \S")


def events_of(run: str) -> list[dict]:
    found = []
    for item in commits(run):
        body = json.loads(item.body)
        found += [(body["seq"] + place, event["type"]) for place, event in enumerate(body["events"])]
    return found


def test_the_shared_log_is_shown_record_by_record_and_nothing_is_touched(store: Path):
    before = fingerprint(store)
    found = said("log", "--store", store, "--json")
    assert found.code == 0
    assert {fact["record"] for fact in found.facts} == set(range(58, 85))
    entry = next(
        item for item in golden() if item.run == found.facts[0]["runId"] and item.first == found.facts[0]["seq"]
    )
    assert found.facts[0]["event"] == json.loads(entry.body)["events"][0]
    assert fingerprint(store) == before


def test_lines_have_number_time_run_events_types_and_size(store: Path):
    found = said("log", "--store", store, "--since", 60)
    first = found.out.splitlines()[0].split()
    assert (first[0], first[1], first[3]) == ("60", "2026-11-29", "run_gykcoq")
    assert found.out.splitlines()[0].endswith("bytes)")
    assert found.err == ""
    assert said("log", "--store", store).err.startswith("Records 1 to 57 are in the files of the runs")


@pytest.mark.parametrize("run", [runs("completed")[2], runs("active")[-1], runs("cancelled")[0]])
def test_a_run_is_told_whole_wherever_its_records_stand(store: Path, run: str):
    found = said("log", "--store", store, "--run", run[:14], "--json")
    assert found.code == 0
    assert [(fact["seq"], fact["event"]["type"]) for fact in found.facts] == events_of(run)
    plain = said("log", "--store", store, "--run", run)
    numbers = [int(found[1]) for line in plain.out.splitlines() if (found := _NUMBERED.match(line))]
    assert numbers == [seq for seq, _ in events_of(run)]
    late = said("log", "--store", store, "--run", run, "--json", "--since", 4)
    assert [fact["seq"] for fact in late.facts][-1] == events_of(run)[-1][0]
    assert '"clientRequestId"' in said("log", "--store", store, "--run", run, "--bodies").out


def test_bodies_are_shown_so_that_no_terminal_obeys_them(store: Path):
    plain = said("log", "--store", store, "--bodies").out
    assert '"type": "' in plain
    assert "\x1b" not in plain


def test_a_sealed_payload_is_named_by_its_key_until_the_key_is_given(tmp_path: Path):
    key = tmp_path / "key"
    ring = keys.KeyRing(keys.new_key_file(key))
    store = real_store(tmp_path / "store", sealing=AesGcm(ring, STORE_ID))
    closed = said("log", "--store", store)
    assert f"sealed ({ring.current.kid})" in closed.out
    shut = said("log", "--store", store, "--json").facts
    assert {fact["sealed"] for fact in shut} == {ring.current.kid}
    opened = said("log", "--store", store, "--json", "--encryption-key", f"file:{key}")
    assert (opened.code, "event" in opened.facts[0]) == (0, True)
    wrong = said("log", "--store", store, "--encryption-key", f"file:{tmp_path / 'none'}")
    assert (wrong.code, "Traceback" in wrong.err) == (2, False)


def test_a_name_that_is_no_run_or_several_is_told(store: Path):
    assert said("log", "--store", store, "--run", "run_zzzzzz", "--json").error["code"] == "NOT_FOUND"
    assert "may be any of" in said("log", "--store", store, "--run", "run_4").err


def test_damage_ends_it_with_the_place_and_what_was_before_it_is_shown(store: Path):
    path = min((store / "wal").iterdir())
    content = bytearray(path.read_bytes())
    place = content.find(b'"q":60,')
    content[place + 100] ^= 1
    path.write_bytes(content)
    found = said("log", "--store", store, "--json")
    assert found.code == 1
    assert {fact["record"] for fact in found.facts[:-1]} == {58, 59}
    assert found.error["code"] == "STORE_DAMAGED"


def number_of(fact: dict) -> int:
    return fact["skipped"]["last"] if "skipped" in fact else fact["record"]


def follow(store: Path, *words: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "rpcagent", "log", "--store", str(store), "--follow", "--json", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


@pytest.mark.process
@pytest.mark.parametrize("whole", [False, True])
def test_a_log_is_followed_while_a_daemon_records_and_moves_the_log_away(tmp_path: Path, whole: bool):
    """_s4_31"""
    store = tmp_path / "store"
    agent = {"model": {"script": [{"text": "done"}]}}
    with Daemon(store, rig=("--checkpoint-every", "12"), workspace=tmp_path) as daemon:
        daemon.listen()
        first = daemon.call("start", clientRequestId="k0", input="x", agent=agent, waitMs=5_000)["runId"]
        watcher = follow(store, *(["--run", first] if whole else []))
        try:
            assert watcher.stdout is not None
            seen = [json.loads(watcher.stdout.readline())]  # it is there: from now on it follows
            started = [
                daemon.call("start", clientRequestId=f"k{n}", input="x", agent=agent, waitMs=5_000)["runId"]
                for n in range(1, 25)
            ]
            disk = RealDisk(store)
            end = reading.read_store(disk).end.seq
            disk.close()
            assert len(started) == 24
            while not (seen[-1]["event"]["type"] == "run_completed" if whole else number_of(seen[-1]) >= end):
                seen.append(json.loads(watcher.stdout.readline()))
        finally:
            watcher.send_signal(signal.SIGINT)
            assert watcher.wait(20) == 130
            watcher.stdout.close()
        tries = 0
        while not (store / "checkpoint.json").exists():
            daemon.call("start", clientRequestId=f"more-{tries}", input="x", agent=agent, waitMs=5_000)
            tries += 1
            assert tries < 200
        assert daemon.stop() == 0
    told = [fact for fact in seen if "event" in fact]
    if whole:
        assert [fact["seq"] for fact in told] == list(range(1, len(told) + 1))
        assert {fact["runId"] for fact in told} == {first}
        return
    numbers = []
    for fact in seen:
        if "skipped" in fact:
            numbers += range(fact["skipped"]["first"], fact["skipped"]["last"] + 1)
        elif not numbers or numbers[-1] != fact["record"]:
            numbers.append(fact["record"])
    assert numbers == list(range(numbers[0], numbers[-1] + 1))
