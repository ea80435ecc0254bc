"""What a caller may rely on when keys, answers, limits, clocks and configurations are not what they were: one request, one
meaning, one effect. P4-P8; F067, F081, F087, F089, F097, F103, F107.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.process.calls import TALKER, question_of, start, write_raw
from tests.process.nursery import Nursery
from tests.process.outside import Seen, act, agent, seen, step_of, tool
from tests.process.wire_driver import Daemon, refused
from tests.service.driver import CountingService

pytestmark = pytest.mark.process

COPIES = 50
DAY_S = 86_400


# Keys


def test_order_and_spacing_of_members_are_no_other_request_and_a_key_of_one_run_is_free_in_another_f087(
    nursery: Nursery, tmp_path: Path
):
    with nursery.daemon(tmp_path / "store") as daemon:
        first = write_raw(
            daemon,
            '{"jsonrpc":"2.0","id":901,"method":"start","params":{"clientRequestId":"R1","drive":"manual",'
            '"agent":{"model":{"script":[{"text":"done"}]},"name":"n"},"input":"A","labels":{"a":"1","b":"2"}}}',
        )["result"]
        again = write_raw(
            daemon,
            '{ "params" : {"labels":{ "b":"2" , "a":"1"}, "input":"A", "agent":{"name":"n","model":{"script":[{"text":"done"}]}},'
            '  "drive":"manual" , "clientRequestId":"R1"},"method":"start",  "id":902,"jsonrpc":"2.0"}',
        )["result"]
        assert (again["runId"], again["replayed"], again["run"]) == (first["runId"], True, first["run"])
        other = write_raw(
            daemon,
            '{"jsonrpc":"2.0","id":903,"method":"start","params":{"clientRequestId":"R1","drive":"manual",'
            '"agent":{"model":{"script":[{"text":"done"}]},"name":"n"},"input":"B","labels":{"a":"1","b":"2"}}}',
        )["error"]["data"]
        assert (other["code"], other["method"], other["retryable"]) == ("IDEMPOTENCY_CONFLICT", "start", False)
        with refused("IDEMPOTENCY_CONFLICT"):
            daemon.call("step", runId=first["runId"], clientRequestId="R1")  # the key stands for its start
        second = start(daemon, "R2", drive="manual")
        assert daemon.call("step", runId=second, clientRequestId="R1")["step"]["status"] == "completed"
        assert daemon.call("status", runId=first["runId"])["run"] == first["run"]


def test_fifty_copies_of_each_request_in_one_write_are_one_execution_and_fifty_equal_answers_f089(
    service: CountingService, nursery: Nursery, tmp_path: Path
):
    def copies(daemon: Daemon, method: str, **params: Any) -> list[dict[str, Any]]:
        sent = [daemon.request(method, **params) for _ in range(COPIES)]
        daemon.write(b"".join(line for _, line in sent))
        if method == "step":
            service.wait_parked(20)
            service.release()
        return [daemon.result(ident) for ident, _ in sent]

    described = agent(service, "at_most_once", "copied", rules=(), script=[act("copied"), {"text": "done"}])
    with nursery.daemon(tmp_path / "store") as daemon:
        started = copies(daemon, "start", clientRequestId="r", agent=described, input="", drive="manual")
        assert [one["replayed"] for one in started] == [False] + [True] * (COPIES - 1)
        [run_id] = {one["runId"] for one in started}
        daemon.call("step", runId=run_id, clientRequestId="model")
        asked = question_of(daemon, run_id)
        decided = copies(daemon, "approve", clientRequestId="yes", decision="allow", **asked)
        assert [one["replayed"] for one in decided] == [False] + [True] * (COPIES - 1)
        assert all(one["approval"] == decided[0]["approval"] for one in decided)
        service.park("after_effect")
        steps = copies(daemon, "step", runId=run_id, clientRequestId="act")
        assert all(one["step"] == steps[0]["step"] for one in steps)
        assert steps[0]["step"]["status"] == "completed"
        assert len(daemon.call("list")["runs"]) == 1
    assert seen(service, "copied") == Seen(1, 1)


def test_a_key_in_progress_becomes_unknown_when_its_process_dies_neither_done_again_nor_locked_for_ever_f107(
    service: CountingService, nursery: Nursery, tmp_path: Path
):
    """At once, after more than a day, and after the answer of a person."""
    store, wall = tmp_path / "store", tmp_path / "wall"
    wall.write_text("0")
    clocked = ("--wall-clock", str(wall))
    with nursery.daemon(store, rig=clocked) as daemon:
        run_id = start(daemon, "run", agent=agent(service, "at_most_once", "withdraw"), drive="manual")
        daemon.call("step", runId=run_id, clientRequestId="model")
        service.park("after_effect")
        daemon.send("step", runId=run_id, clientRequestId="act")
        service.wait_parked(20)
        daemon.kill()
    service.release()
    told = []
    for days in (0, 2):
        wall.write_text(str(days * DAY_S))
        with nursery.daemon(store, rig=clocked) as daemon:
            answer = daemon.call("step", runId=run_id, clientRequestId="act")
            told.append((answer["step"]["status"], answer["step"]["attempt"], answer["replayed"]))
            with refused("UNKNOWN_OUTCOME") as caught:
                daemon.call("step", runId=run_id, clientRequestId="another")
            assert caught[0].data["retryable"] is True
            daemon.kill()
    assert told == [("unknown", 1, True)] * 2
    with nursery.daemon(store, rig=clocked) as daemon:
        daemon.call("approve", clientRequestId="told", decision="happened", **question_of(daemon, run_id))
        assert daemon.call("step", runId=run_id, clientRequestId="another")["run"]["status"] == "completed"
        assert daemon.call("step", runId=run_id, clientRequestId="act")["step"]["status"] == "unknown"
    assert seen(service, "withdraw") == Seen(1, 1)


@pytest.mark.parametrize("durability", ["async", "exit"])
def test_a_weaker_durability_is_refused_by_name_and_starts_nothing_s0_21_s0_22_s1_15_r_lg_4(
    nursery: Nursery, tmp_path: Path, durability: str
):
    """There is one: all that is acknowledged is durable. It is the default, and to say so is no other request."""
    with nursery.daemon(tmp_path / "store") as daemon:
        with refused("INVALID_PARAMS") as caught:
            start(daemon, "run", durability=durability)
        assert (caught[0].data["path"], caught[0].data["retryable"]) == ("$.durability", False)
        assert daemon.call("list")["runs"] == []
        run_id = start(daemon, "run")
        again = daemon.call("start", clientRequestId="run", agent=TALKER, input="", durability="sync")
        assert (again["runId"], again["replayed"]) == (run_id, True)


# What a run is


def test_after_a_failure_in_the_middle_and_a_kill_what_was_done_is_not_done_again_and_the_model_sees_the_same_f081(
    nursery: Nursery, tmp_path: Path
):
    """Ten calls of which the seventh is refused: unbroken, and killed in the seventh. The stores have one id, and so the runs
    and the keys of their calls have the same names."""
    operations, rig = [f"number {number}" for number in range(1, 11)], ("--store-id", "0" * 24)
    seventh, told, port = operations[6], {}, 0
    for name in ("unbroken", "killed"):
        place = tmp_path / name
        place.mkdir()
        service = CountingService(place / "truth")
        service.port = port  # the address of a tool is pinned too
        with service:
            port = service.port
            params = {
                "clientRequestId": "run",
                "agent": agent(service, "reconcilable", "", script=[*map(act, operations), {"text": "done"}]),
                "input": "",
            }
            if name == "killed":
                with nursery.daemon(place / "store", rig=rig) as daemon:
                    service.fault("before_effect", "hang", operation=seventh)
                    daemon.call("start", **params)
                    service.wait_parked(20, point="before_effect")
                    daemon.kill()
                service.stop()  # and with it the call that hangs
                service.start()
            service.fault("before_effect", "error:422", operation=seventh)
            with nursery.daemon(place / "store", rig=rig) as daemon:
                run_id = daemon.call("start", **params, waitMs=20_000)["runId"]
                told[name] = daemon.call("status", runId=run_id)
            counts = {one: (seen(service, one).calls, seen(service, one).effects) for one in operations}
        refused_once = {"unbroken": (1, 0), "killed": (2, 0)}
        assert counts == dict.fromkeys(operations, (1, 1)) | {seventh: refused_once[name]}
    assert [told[name]["run"]["status"] for name in told] == ["completed", "completed"]
    unbroken, killed = (told[name]["steps"] for name in told)
    attempts = [step["attempt"] for step in killed]
    assert attempts == [2 if step.get("arguments") == {"operation": seventh} else 1 for step in killed]
    assert [step["requestHash"] for step in killed] == [step["requestHash"] for step in unbroken]
    assert [step.get("result") for step in killed] == [step.get("result") for step in unbroken]
    [failed] = [step for step in unbroken if step.get("result", {}).get("isError")]
    assert failed["arguments"] == {"operation": seventh}


def test_an_answer_to_one_question_never_lets_another_call_through_f067(
    service: CountingService, nursery: Nursery, tmp_path: Path
):
    """The digest covers run, step, tool and all arguments: of two calls that differ in their amount alone too."""
    described = {"model": {"script": [{"calls": [
        {"tool": "outside.act", "arguments": {"operation": "charge", "amount": 10}},
        {"tool": "outside.act", "arguments": {"operation": "charge", "amount": 1_000}}]}, {"text": "done"}]},
        "tools": [tool(service, "at_most_once")]}  # fmt: skip
    store = tmp_path / "store"
    with nursery.daemon(store) as daemon:
        run_id = start(daemon, "run", agent=described)
        other = start(daemon, "other", agent=described)
        small, large = daemon.call("status", runId=run_id)["approvals"]
        elsewhere = daemon.call("status", runId=other)["approvals"][0]
        assert len({small["digest"], large["digest"], elsewhere["digest"]}) == 3
        daemon.kill()
    with nursery.daemon(store) as daemon:
        for wrong in (small, elsewhere):
            with refused("STALE_DIGEST") as caught:
                daemon.call(
                    "approve",
                    runId=run_id,
                    clientRequestId="old",
                    approvalId=large["approvalId"],
                    digest=wrong["digest"],
                    decision="allow",
                )
            assert caught[0].data["digest"] == large["digest"]
        for question, decision in ((small, "allow"), (large, "deny")):
            named = {"runId": run_id, "approvalId": question["approvalId"], "digest": question["digest"]}
            daemon.call("approve", clientRequestId=decision, decision=decision, **named)
        daemon.listen()
        shown = daemon.until(run_id, lambda shown: shown["run"]["status"] == "completed")
        assert [step["status"] for step in shown["steps"]] == ["completed", "completed", "denied", "completed"]
        assert [step.get("arguments", {}).get("amount") for step in shown["steps"]] == [None, 10, 1_000, None]
    assert seen(service, "charge") == Seen(1, 1)


def test_a_run_keeps_the_tools_and_the_workspace_it_began_with_whatever_the_configuration_says_later_f097(
    nursery: Nursery, tmp_path: Path
):
    config, store = tmp_path / "agents.toml", tmp_path / "store"
    script = (
        'script = [ { calls = [{ tool = "files.read", arguments = { path = "note" } }] }, '
        '{ calls = [{ tool = "shell.run", arguments = { command = "touch made" } }] }, { text = "done" } ]'
    )
    allow = '[policy]\nrules = [{ tool = "*", do = "allow" }]\n'
    config.write_text(f'[agents.reader]\ntools = ["files.read"]\nmodel = "m"\n[models.m]\n{script}\n{allow}')
    (tmp_path / "note").write_text("the old place\n")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "note").write_text("another place\n")
    with Daemon(store, "--config", str(config)) as daemon:
        run_id = start(daemon, "run", agent="reader", drive="manual")
        daemon.call("step", runId=run_id, clientRequestId="model")
        pinned = daemon.call("status", runId=run_id)["definition"]
        assert (pinned["current"], pinned["differs"]) == (pinned["pinned"], False)
        daemon.kill()
    config.write_text(f'[agents.reader]\ntools = ["files", "shell"]\nmodel = "m"\n[models.m]\n{script}\n{allow}')
    with Daemon(store, "--config", str(config), workspace=elsewhere) as daemon:
        read = daemon.call("step", runId=run_id, clientRequestId="read")["step"]
        assert "the old place" in read["result"]["content"][0]["text"]
        daemon.call("step", runId=run_id, clientRequestId="ask")
        shown = daemon.call("status", runId=run_id)
        now = daemon.call("status", runId=start(daemon, "another", agent="reader", drive="manual"))["definition"]
        assert (now["current"], now["differs"]) == (now["pinned"], False)
        assert now["pinned"] != pinned["pinned"]
        assert shown["definition"] == pinned | {"current": now["pinned"], "differs": True}
        assert (step_of(shown, "shell.run")["status"], step_of(shown, "shell.run")["error"]["kind"]) == (
            "denied",
            "invalid",
        )
    assert [path for path in (tmp_path / "made", elsewhere / "made") if path.exists()] == []


def test_a_limit_that_a_method_does_not_take_is_refused_and_never_ignored_f103(nursery: Nursery, tmp_path: Path):
    looping = {"model": {"script": [{"calls": [{"tool": "files.list"}]}] * 9 + [{"text": "done"}]}, "tools": ["files"]}
    with nursery.daemon(tmp_path / "store") as daemon:
        run_id = start(daemon, "run", agent=looping, budget={"steps": 4})
        assert daemon.call("status", runId=run_id)["budget"]["limits"]["steps"] == 4
        asked = question_of(daemon, run_id)
        for method, params, path in (
            ("resume", {"budget": {"steps": 3}}, "$.budget"),
            ("approve", asked | {"decision": "extend", "extend": {"steps": -1}}, "$.extend.steps"),
            ("approve", asked | {"decision": "extend", "extend": {"steps": "20"}}, "$.extend.steps"),
            ("approve", asked | {"decision": "extend", "extend": {"step": 20}}, "$.extend.step"),
            (
                "start",
                {"clientRequestId": "bad", "agent": looping, "input": "", "budget": {"steps": "4"}},
                "$.budget.steps",
            ),
        ):
            with refused("INVALID_PARAMS") as caught:
                daemon.call(
                    method, **{"runId": run_id, "clientRequestId": "k"} | params if method != "start" else params
                )
            assert caught[0].data["path"] == path
        daemon.call("approve", clientRequestId="more", decision="extend", extend={"steps": 2}, **asked)
        daemon.listen()
        shown = daemon.until(run_id, lambda shown: len(shown["steps"]) == 6 and bool(shown["approvals"]))
        assert shown["budget"]["limits"]["steps"] == 6
        assert len(daemon.call("list")["runs"]) == 1


def test_a_namespace_is_a_room_of_its_own_and_what_is_no_name_of_one_is_refused_s0_66(nursery: Nursery, tmp_path: Path):
    """Not a wall: whoever may open the store may read all of it. The same key is another run in another namespace."""
    store = tmp_path / "store"
    with nursery.daemon(store) as daemon:
        runs = {name: start(daemon, "key", namespace=name) for name in ("", "team-a", "team-b")}
        assert len(set(runs.values())) == 3
        for name, run_id in runs.items():
            found = daemon.call("status", clientRequestId="key", namespace=name)["run"]
            assert (found["runId"], found["namespace"]) == (run_id, name)
            assert [run["runId"] for run in daemon.call("list", namespace=name)["runs"]] == [run_id]
        with refused("NOT_FOUND"):
            daemon.call("status", clientRequestId="key", namespace="team-c")
        before = sorted(str(path) for path in tmp_path.rglob("*"))
        for evil in ("../x", "a/b", "/etc", "a\0b", "x" * 300, "%2e/", "a b", "\u202e"):
            for method, params in (
                ("start", {"clientRequestId": "evil", "agent": TALKER, "input": ""}),
                ("status", {"clientRequestId": "key"}),
                ("list", {}),
            ):
                with refused("INVALID_PARAMS") as caught:
                    daemon.call(method, **params, namespace=evil)
                assert caught[0].data["path"] == "$.namespace"
        dots = start(daemon, "key", namespace="..")  # a name like any other: it is part of a hash, and of no path
        assert dots not in runs.values()
        assert len(daemon.call("list")["runs"]) == 4
        assert sorted(str(path) for path in tmp_path.rglob("*")) == before
        assert daemon.stop() == 0
