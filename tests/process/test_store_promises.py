"""What the store promises, looked at from outside: what is on the disk before anything acts, what a kill may cost, how large a
run becomes, and that its state is the store and nothing else. P1, P2; S0-14, S0-20, S1-33, S4-20.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.process import disks
from tests.process.nursery import Nursery
from tests.process.outside import Seen, act, agent, seen
from tests.process.wire_driver import Daemon
from tests.service.counting import read_truth
from tests.service.driver import CountingService

pytestmark = pytest.mark.process

KILLS = 200 if os.environ.get("RPCAGENT_SLOW") else 40
UNBOUNDED = {"budget": {"steps": 10_000, "attempts": 10_000}}
TRACED = ("pwrite64", "write", "fdatasync", "fsync", "syncfs", "rename", "unlink", "connect", "recvfrom")
_WHOLE = re.compile(r"(\d+) +(\w+)\((.*)")
_RESUMED = re.compile(r"(\d+) +<\.\.\. (\w+) resumed>(.*)")
_PLACE = re.compile(r'(?:\d+<([^>]*)>|"([^"]*)"(?:, "([^"]*)")?)')


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CountingService]:
    with CountingService(tmp_path_factory.mktemp("service") / "truth") as service:
        yield service


def records(store: Path) -> list[dict[str, Any]]:
    """The commits of the log, line by line, as the specification says."""
    lines = [line for file in sorted((store / "wal").glob("*.jsonl")) for line in file.read_bytes().splitlines()]
    return [found for line in lines if (found := json.loads(line))["k"] == "commit"]


def types(record: dict[str, Any]) -> list[str]:
    return [event["type"] for event in record["d"]["events"]]


def told(daemon: Daemon) -> dict[str, Any]:
    """All that the daemon says of its runs: how they stand, every step with its result, every event, every question."""
    listed = daemon.call("list", limit=1_000)["runs"]
    runs = [run["runId"] for run in listed]
    return {
        "list": listed,
        "questions": daemon.call("list", limit=1_000, openApprovals=True)["approvals"],
        "status": [daemon.call("status", runId=run) for run in runs],
        "events": [daemon.call("events", runId=run, limit=1_000) for run in runs],
    }


def looked_at(nursery: Nursery, store: Path) -> dict[str, Any]:
    """As `told`, by a daemon that lets nothing go on."""
    with nursery.daemon(store, "--hold", log=store.parent / "look.log") as daemon:
        seen = told(daemon)
        assert daemon.stop() == 0
    return seen


def several(daemon: Daemon, service: CountingService, mark: str) -> dict[str, str]:
    """A run that ends in each way there is, one that waits for an answer, and one in mid-way; by name."""
    acts = {name: f"{mark} {name}" for name in ("done", "asks", "half", "dropped")}
    stopped = agent(service, "read_only", f"{mark} stopped", script=[{"fail": {"kind": "no_such_model"}}])
    runs = {}
    for name, described, more in (
        ("done", agent(service, "at_most_once", acts["done"]), {"waitMs": 20_000}),
        ("asks", agent(service, "at_most_once", acts["asks"], rules=()), {"waitMs": 20_000}),
        ("half", agent(service, "idempotent", acts["half"]), {"drive": "manual"}),
        ("dropped", agent(service, "idempotent", acts["dropped"]), {"drive": "manual"}),
        ("failed", stopped, {"waitMs": 20_000}),
    ):
        runs[name] = daemon.call("start", clientRequestId=name, agent=described, input="go", **more)["runId"]
    for key in ("model", "act"):
        daemon.call("step", runId=runs["half"], clientRequestId=key)
    daemon.call("cancel", runId=runs["dropped"], clientRequestId="drop", reason="no longer wanted")
    return runs


ENDED = {"done": "completed", "failed": "failed", "dropped": "cancelled"}
AT_REST = {**ENDED, "asks": "waiting", "half": "ready"}


# In which order


@dataclass
class Call:
    """A system call: when it began and when it had ended, in the order of all such moments of all threads."""

    name: str
    text: str
    began: int
    ended: int


class Trace:
    def __init__(self, record: Path) -> None:
        self.calls: list[Call] = []
        open_: dict[str, Call] = {}
        moments = itertools.count()
        for line in record.read_text().splitlines():
            if found := _RESUMED.match(line):
                call = open_.pop(found[1])
                call.text += found[3]
                call.ended = next(moments)
            elif found := _WHOLE.match(line):
                began = next(moments)
                call = Call(found[2], found[3], began, began)
                self.calls.append(call)
                if "<unfinished" in line:
                    open_[found[1]] = call
                else:
                    call.ended = next(moments)

    def find(self, name: str, *words: str, after: int = -1) -> Call:
        """The first such call that began after that moment. Raises StopIteration where there is none."""
        return next(
            c for c in self.calls if c.began > after and c.name == name and all(word in c.text for word in words)
        )

    def synced(self, path: str, *, after: int) -> int:
        """When the first sync of that file or folder that began after that moment had ended."""
        syncs = (call for call in self.calls if call.name in {"fdatasync", "fsync"} and f"<{path}>" in call.text)
        return next(call.ended for call in syncs if call.began > after)


def traced(file: Path) -> str:
    return json.dumps(["-o", str(file), "-s", "6000", "-y", "-e", f"trace={','.join(TRACED)}"])


@disks.needs_strace
def test_an_intent_is_synced_before_its_call_leaves_and_an_outcome_before_it_is_told_s1_33_s4_20_s4_47(
    service: CountingService, nursery: Nursery, tmp_path: Path
):
    store, trace = tmp_path / "store", tmp_path / "trace"
    with nursery.daemon(store, rig=("--trace", traced(trace))) as daemon:
        described = agent(service, "at_most_once", "in order")
        run_id = daemon.call("start", clientRequestId="run", agent=described, input="", drive="manual")["runId"]
        daemon.call("step", runId=run_id, clientRequestId="model")
        ident = daemon.send("step", runId=run_id, clientRequestId="act")
        assert daemon.result(ident)["step"]["status"] == "completed"
        assert daemon.stop() == 0
    calls, log = Trace(trace), str(store / "wal" / "0000000000000001.jsonl")
    started = calls.find("pwrite64", log, r"\"start\"")
    acknowledged = calls.find("write", r"\"id\":1,")
    intent = calls.find("pwrite64", log, r"\"tool_started\"")
    leaves = calls.find("connect", f"htons({service.port})")
    reply = calls.find("recvfrom", "HTTP/1.1 200")
    outcome = calls.find("pwrite64", log, r"\"tool_completed\"")
    answer = calls.find("write", rf"\"id\":{ident},")
    moments = [
        started.ended, calls.synced(log, after=started.ended), acknowledged.began,
        intent.ended, calls.synced(log, after=intent.ended), leaves.began, reply.ended,
        outcome.ended, calls.synced(log, after=outcome.ended), answer.began,
    ]  # fmt: skip
    assert moments == sorted(moments)
    assert seen(service, "in order") == Seen(1, 1)


@disks.needs_strace
def test_a_name_is_durable_before_anything_rests_on_it_s1_33(
    service: CountingService, nursery: Nursery, tmp_path: Path
):
    """Each file under its draft name first, then its own name, then its folder; then only what counts on it."""
    store, trace = tmp_path / "store", tmp_path / "trace"
    with nursery.daemon(store, rig=("--checkpoint-every", "4", "--trace", traced(trace))) as daemon:
        runs = several(daemon, service, "names")
        assert daemon.stop() == 0
    calls = Trace(trace)
    renames = [(call, *renamed(call.text)) for call in calls.calls if call.name == "rename"]
    places = {
        re.sub(r"\d{16}", "N", new.removeprefix(f"{store}/").replace(run_of(new), "run")) for _, _, new in renames
    }
    assert places == {"wal/N.jsonl", "runs/run/state.json", "checkpoint.json"}
    assert {run_of(new) for _, _, new in renames if "/runs/" in new} == set(runs.values())
    rests = {
        "wal": lambda new, after: calls.find("pwrite64", new, r"\"k\":\"commit\"", after=after),
        "runs": lambda _new, after: calls.find("rename", str(store / "checkpoint.json"), after=after),
        "checkpoint.json": lambda _new, after: calls.find("unlink", str(store / "wal"), after=after),
    }
    looked = set()
    for call, draft, new in renames:
        kind = Path(new).relative_to(store).parts[0]
        try:
            counted_on = rests[kind](new, call.ended).began
        except StopIteration:
            continue  # the end came before anything counted on it
        drafted = max(c.began for c in calls.calls if c.name == "pwrite64" and draft in c.text and c.began < call.began)
        named = calls.synced(str(Path(new).parent), after=call.ended)
        assert calls.synced(draft, after=drafted) < call.began < named < counted_on, new
        looked.add(kind)
    assert looked == set(rests)


def renamed(text: str) -> tuple[str, str]:
    found = _PLACE.search(text)
    assert found is not None
    return found[2], found[3]


def run_of(path: str) -> str:
    return next((part for part in Path(path).parts if part.startswith("run_")), "none")


def test_when_a_call_arrives_its_intent_is_in_the_log_and_when_it_is_told_its_outcome_is_s0_14_s2_09(
    service: CountingService, nursery: Nursery, tmp_path: Path
):
    store = tmp_path / "store"
    with nursery.daemon(store) as daemon:
        described = agent(service, "at_most_once", "seen arriving")
        run_id = daemon.call("start", clientRequestId="run", agent=described, input="", drive="manual")["runId"]
        daemon.call("step", runId=run_id, clientRequestId="model")
        service.park("before_effect")
        ident = daemon.send("step", runId=run_id, clientRequestId="act")
        service.wait_parked(20, point="before_effect")
        before = records(store)
        service.release()
        step = daemon.result(ident)["step"]
        after = records(store)
    assert [types(record) for record in after] == [
        ["run_started", "request_settled"],
        ["request_accepted", "model_call_started"],
        ["model_answered", "request_settled"],
        ["request_accepted", "tool_started"],
        ["tool_completed", "request_settled"],
    ]
    assert before == after[:4]
    assert {tuple(record) for record in after} == {("c", "q", "b", "p", "k", "r", "s", "n", "d")}
    assert {record["r"] for record in after} == {run_id}
    assert [(record["s"], record["n"]) for record in after] == [(1, 2), (3, 2), (5, 2), (7, 2), (9, 2)]
    assert [record["d"]["seq"] for record in after] == [1, 3, 5, 7, 9]
    accepted, intent = (after[2]["d"]["events"][0], after[3]["d"]["events"][1])
    [asked] = accepted["calls"]
    assert (asked["tool"], asked["arguments"]) == ("outside.act", {"operation": "seen arriving"})
    outcome = after[4]["d"]["events"][0]
    assert (intent["stepId"], outcome["stepId"]) == (step["stepId"], step["stepId"])
    assert {"key", "requestHash"} <= intent.keys()
    assert outcome["result"] == step["result"]


# What a kill may cost


@pytest.mark.timeout(600)
def test_over_many_kills_no_acknowledged_step_is_lost_and_at_most_one_is_done_again_for_each_s0_23_s1_14_s2_33_s2_58(
    service: CountingService, nursery: Nursery, tmp_path: Path
):
    """Every other time the daemon dies at a call of its own to the disk, else as soon as it has answered: within the moment
    that it takes to send a signal."""
    chance, store = random.Random(23), tmp_path / "store"
    described = agent(service, "idempotent", "", script=[act(f"loss {number}") for number in range(KILLS * 4)])
    described |= UNBOUNDED
    acknowledged, met = 0, []
    for kill in range(KILLS):
        at = ("--kill-before", str(chance.randrange(4, 40))) if kill % 2 else ()
        with nursery.daemon(store, rig=("--checkpoint-every", "40", *at)) as daemon:
            try:
                started = daemon.call("start", clientRequestId="run", agent=described, input="", drive="manual")
                done = completed(daemon, started["runId"])
                met.append((acknowledged, done))
                for _ in range(KILLS if at else chance.randrange(1, 6)):
                    step = daemon.call("step", runId=started["runId"], clientRequestId=f"k-{acknowledged}")["step"]
                    assert step["status"] == "completed"
                    acknowledged += 1
            except (AssertionError, OSError):
                if not at or daemon.exit_code() != -9:
                    raise
    assert {done - known for known, done in met} == {0, 1}  # the step in flight may have come to its end
    calls = [line["operation"] for line in read_truth(service.truth) if line["kind"] == "call"]
    mine = [operation for operation in calls if str(operation).startswith("loss ")]
    assert acknowledged > KILLS
    assert len(mine) - len(set(mine)) <= KILLS
    assert {seen(service, operation).effects for operation in set(mine)} == {1}


def completed(daemon: Daemon, run_id: str) -> int:
    """How many steps of the run have come to their end, by its events."""
    count, after, last = 0, 0, 1
    while after < last:
        page = daemon.call("events", runId=run_id, afterSeq=after, limit=1_000)
        count += sum(one["event"]["type"] in {"model_answered", "tool_completed"} for one in page["events"])
        after, last = page["events"][-1]["seq"], page["lastSeq"]
    return count


# The store is all there is


def test_all_that_a_run_knew_is_there_after_kill_9_s1_03(service: CountingService, nursery: Nursery, tmp_path: Path):
    store = tmp_path / "store"
    with nursery.daemon(store) as daemon:
        runs = several(daemon, service, "knew")
        before = told(daemon)
    after = looked_at(nursery, store)
    assert after == before
    half = next(one for one in after["status"] if one["run"]["runId"] == runs["half"])
    assert [(step["kind"], step["status"]) for step in half["steps"]] == [
        ("model_call", "completed"),
        ("tool_call", "completed"),
    ]
    assert half["steps"][1]["result"]["structuredContent"]["operation"] == "knew half"
    assert all(step["requestHash"].startswith("sha256:") for step in half["steps"])
    with nursery.daemon(store) as daemon:
        step = daemon.call("step", runId=runs["half"], clientRequestId="say")["step"]
        last = daemon.call("status", runId=runs["half"])
    assert (step["kind"], last["run"]["output"]) == ("model_call", "done")
    assert seen(service, "knew half") == Seen(1, 1)


def test_a_store_that_was_copied_elsewhere_after_a_kill_goes_on_there_s2_11(
    service: CountingService, nursery: Nursery, tmp_path: Path
):
    store, elsewhere = tmp_path / "store", tmp_path / "another" / "place"
    with nursery.daemon(store, rig=("--checkpoint-every", "12")) as daemon:
        runs = several(daemon, service, "moved")
        before = told(daemon)
        daemon.kill()
    elsewhere.parent.mkdir()
    shutil.copytree(store, elsewhere)
    shutil.rmtree(store)
    assert looked_at(nursery, elsewhere) == before
    with nursery.daemon(elsewhere) as daemon:
        daemon.call("step", runId=runs["half"], clientRequestId="say")
        [question] = daemon.call("status", runId=runs["asks"])["approvals"]
        named = {"runId": runs["asks"], "approvalId": question["approvalId"], "digest": question["digest"]}
        daemon.listen()
        daemon.call("approve", clientRequestId="yes", decision="allow", **named)
        daemon.until(runs["asks"], lambda shown: shown["run"]["status"] == "completed")
        assert daemon.stop() == 0
    assert [seen(service, f"moved {name}") for name in ("done", "half", "asks")] == [Seen(1, 1)] * 3


def test_the_log_alone_and_a_checkpoint_of_it_say_the_same_and_so_does_a_store_without_its_index_s1_04(
    service: CountingService, nursery: Nursery, tmp_path: Path
):
    log, moved = tmp_path / "log", tmp_path / "moved"
    with nursery.daemon(log) as daemon:
        several(daemon, service, "twice")
        before = told(daemon)
        daemon.kill()
    shutil.copytree(log, moved)
    with nursery.daemon(moved, rig=("--checkpoint-every", "1")) as daemon:
        daemon.call("status")
        assert daemon.stop() == 0
    assert not (log / "runs").exists()
    assert len(list((moved / "runs").iterdir())) == len(before["list"])
    assert records(moved) == []
    assert looked_at(nursery, log) == looked_at(nursery, moved) == before
    for derived in ("index.sqlite", "HEAD", "RESERVE"):
        (moved / derived).unlink()
    assert looked_at(nursery, moved) == before


def test_no_recovery_lowers_what_has_ended_whoever_died_and_whatever_is_asked_r_n8_2(
    service: CountingService, nursery: Nursery, tmp_path: Path
):
    store = tmp_path / "store"
    with nursery.daemon(store) as daemon:
        runs = several(daemon, service, "ended")
        before = {name: daemon.call("status", runId=runs[name]) for name in ENDED}
        daemon.kill()
    for number, rig in enumerate([(), ("--checkpoint-every", "1"), (), ("--kill-before", "12"), ()]):
        with nursery.daemon(store, rig=rig) as daemon:
            for name, ended in ENDED.items():
                for method in ("step", "resume"):
                    ident = daemon.send(method, runId=runs[name], clientRequestId=f"{method}-{number}")
                    assert daemon.refusal(ident) == "INVALID_STATE"
                shown = daemon.call("status", runId=runs[name])
                assert (shown, shown["run"]["status"]) == (before[name], ended)
            counts = daemon.call("status")["counts"]
            assert counts == {"completed": 1, "failed": 1, "cancelled": 1, "waiting": 1, "ready": 1}
            daemon.kill()
    assert seen(service, "ended done") == Seen(1, 1)


# How large it becomes, and what a start costs


def test_a_run_of_1000_steps_that_is_killed_half_way_goes_on_and_each_step_costs_as_much_as_the_tenth_s0_09_s0_42_s0_53_r_lg_8(
    nursery: Nursery, tmp_path: Path
):
    """Also that what is replayed is what no checkpoint covers, however long the run is; and what a finished run takes:
    S0-42, S0-53, in bytes."""
    store, every = tmp_path / "store", 200
    (tmp_path / "note").write_text("hello\n")
    calls = [{"tool": "files.read", "arguments": {"path": "note", "limit": 100 + number}} for number in range(500)]
    reads = [{"calls": [call]} for call in calls]
    described = {"tools": ["files"], "model": {"script": [*reads, {"text": "done"}]}, **UNBOUNDED}
    with nursery.daemon(store, rig=("--checkpoint-every", str(every))) as daemon:
        daemon.listen()
        run_id = daemon.call("start", clientRequestId="long", agent=described, input="")["runId"]
        while not any(note["params"].get("seq", 0) > 1_000 for note in daemon.notes):
            daemon.take(daemon.message())
        daemon.kill()
    with nursery.daemon(store, rig=("--checkpoint-every", str(every))) as daemon:
        assert daemon.call("status")["checkpoint"]["tailRecords"] < 2 * every
        daemon.listen()
        shown = daemon.until(run_id, lambda shown: shown["run"]["status"] == "completed", timeout=60)
        assert [step["stepId"] for step in shown["steps"]][-1] == f"stp_{run_id.removeprefix('run_')}_1001"
        assert daemon.stop() == 0
    assert len(records(store)) < every
    with nursery.daemon(store, rig=("--checkpoint-every", "1")) as daemon:
        daemon.call("status")
        assert daemon.stop() == 0
    assert records(store) == []
    files = {path.name: path.stat().st_size for path in (store / "runs" / run_id).iterdir()}
    lines = [len(line) for line in (store / "runs" / run_id / "history.jsonl").read_bytes().splitlines()]
    tenth, last = lines[10], lines[-2]
    assert abs(last - tenth) <= 30  # numbers have more digits
    assert sum(lines[1:]) / 1_001 < 800
    assert files["state.json"] < 4_000


def test_a_start_reads_no_file_of_a_run_that_has_ended_and_no_history_of_one_that_waits_s0_68_f043(
    service: CountingService, nursery: Nursery, tmp_path: Path
):
    store, many = tmp_path / "store", 300
    talker = {"model": {"script": [{"text": "done"}]}}
    with nursery.daemon(store, rig=("--checkpoint-every", "1")) as daemon:
        sent = [daemon.request("start", clientRequestId=f"r-{n}", agent=talker, input="") for n in range(many)]
        daemon.write(b"".join(line for _, line in sent))
        for ident, _ in sent:
            daemon.result(ident)
        asks = daemon.call(
            "start", clientRequestId="a", agent=agent(service, "at_most_once", "asks", rules=()), input=""
        )
        daemon.listen()
        question = daemon.until(asks["runId"], lambda shown: bool(shown["approvals"]))["approvals"]
        assert daemon.stop() == 0
    trace = tmp_path / "trace"
    arguments = json.dumps(["-o", str(trace), "-y", "-e", "trace=openat,open"])
    with nursery.daemon(store, rig=("--trace", arguments)) as daemon:
        health = daemon.call("status")
        assert health["counts"] == {"completed": many, "waiting": 1}
        assert [one["runId"] for one in health["needsAttention"]] == [asks["runId"]]
        opened = trace.read_text()
        assert daemon.call("status", runId=asks["runId"])["approvals"] == question
        opened_then = trace.read_text()
        assert daemon.stop() == 0
    assert set(re.findall(r"/runs/(\w+)/", opened_then)) == {asks["runId"]}
    assert f"{store}/checkpoint.json" in opened
    assert f"{store}/runs/" not in opened
    manifest = (store / "checkpoint.json").read_text().splitlines()
    assert [json.loads(line)["k"] for line in manifest] == ["checkpoint", "run"]


@pytest.mark.parametrize(("drive", "each"), [("auto", 1), ("manual", 2)])
def test_a_run_of_101_steps_costs_one_sync_for_each_and_by_hand_two_s0_20_s2_18(
    nursery: Nursery, tmp_path: Path, drive: str, each: int
):
    (tmp_path / "note").write_text("hello\n")
    calls = [{"tool": "files.read", "arguments": {"path": "note", "limit": 100 + number}} for number in range(50)]
    described = {"tools": ["files"], "model": {"script": [*({"calls": [call]} for call in calls), {"text": "done"}]}}
    with nursery.daemon(tmp_path / "store") as daemon:
        before = daemon.call("status")["journal"]
        params = {"clientRequestId": "run", "agent": described, "input": "", "drive": drive, "waitMs": 30_000}
        run = daemon.call("start", **params)["run"]
        for number in range(101 if drive == "manual" else 0):
            run = daemon.call("step", runId=run["runId"], clientRequestId=f"s-{number}")["run"]
        assert (run["status"], run["output"]) == ("completed", "done")
        after = daemon.call("status")["journal"]
    assert after["syncs"] - before["syncs"] == 101 * each + 1
    assert after["records"] - before["records"] == 101 * each + 1


def test_the_index_that_a_clean_stop_left_is_used_as_it_is_s0_68(nursery: Nursery, tmp_path: Path):
    store, talker = tmp_path / "store", {"model": {"script": [{"text": "done"}]}}
    with nursery.daemon(store, rig=("--checkpoint-every", "1")) as daemon:
        for number in range(3):
            daemon.call("start", clientRequestId=f"r-{number}", agent=talker, input="", waitMs=20_000)
        assert daemon.stop() == 0
    with nursery.daemon(store) as daemon:
        assert len(daemon.call("list")["runs"]) == 3
        assert daemon.stop() == 0
    assert (tmp_path / "store.log").read_text() == ""
