"""Calls to an MCP server that does as told: each fault, and the one outcome that it may have."""

from __future__ import annotations

import resource
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from rpcagent.errors import Incompatible, InvalidParams
from rpcagent.runs.events import Trouble
from rpcagent.runs.outcomes import Failed, LookUp, Lost, NotDone, ToolReply
from rpcagent.tools.mcp_child import LINE_BYTES
from rpcagent.tools.mcp_config import Skipped
from tests.service.mcp_driver import World, said, structured
from tests.tools.calls import KEY, failed, request_for

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]

LOST = Lost(reason="connection_lost")
ENDED = "The MCP server t ended with {}."


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    made = World(tmp_path)
    yield made
    await made.registry.aclose()
    made.server.close()
    assert made.faults == []


def as_told(text: str = "as told", **more: Any) -> ToolReply:
    return ToolReply(result={"content": [{"type": "text", "text": text}], **more})


# Without faults


async def test_tools_come_from_all_pages_with_the_contract_that_the_configuration_gives_them(world: World) -> None:
    await world.resolve()
    assert {name: spec.effect for name, spec in world.specs.items()} == {
        "read": "read_only",
        "charge": "at_most_once",
        "charge_once": "idempotent",
        "charge_findable": "reconcilable",
        "wipe": "at_most_once",
        "a_name__with_blanks_69f0f288": "at_most_once",
    }
    assert "idempotency_key" not in world.specs["charge_once"].parameters["properties"]


async def test_s5_a_server_that_says_it_only_reads_is_not_believed_unless_it_is_trusted(world: World) -> None:
    await world.resolve(tools={})
    assert world.specs["wipe"].effect == "at_most_once"
    await world.resolve(tools={}, trustReadOnly=True)
    assert (world.specs["wipe"].effect, world.specs["charge"].effect) == ("read_only", "at_most_once")


async def test_every_call_that_may_act_carries_the_key_and_a_read_does_not(world: World) -> None:
    await world.resolve()
    assert structured(await world.call("read")) == said("read", 0)
    assert structured(await world.call("charge")) == said("charge", 1)
    assert structured(await world.call("charge_once", idempotency_key="forged")) == said("charge_once", 2)
    meta = {"rpcagent/idempotencyKey": KEY}
    assert [call["body"] for call in world.server.calls()] == [
        {"operation": "o1", "meta": None},
        {"operation": "o1", "meta": meta},
        {"operation": "o1", "idempotency_key": KEY, "meta": meta},
    ]


async def test_the_same_key_again_is_one_effect(world: World) -> None:
    await world.resolve()
    for _attempt in range(2):
        assert structured(await world.call("charge_once")) == said("charge_once", 1)
    assert structured(await world.call("charge_once", key="key_b")) == said("charge_once", 2)


async def test_a_name_that_was_made_to_fit_is_called_by_its_own(world: World) -> None:
    await world.resolve()
    assert isinstance(await world.call("a_name__with_blanks_69f0f288"), ToolReply)
    assert world.server.calls()[0]["path"] == "a name, with blanks"


async def test_a_pinned_tool_is_called_by_a_later_process_that_has_no_configuration(world: World) -> None:
    await world.resolve()
    await world.registry.aclose()
    world.registry = world.new_registry()
    assert structured(await world.call("charge")) == said("charge", 1)


async def test_one_process_serves_all_runs_of_a_workspace_and_many_calls_at_once(world: World) -> None:
    await world.resolve()
    async with anyio.create_task_group() as calls:
        for place in range(40):
            calls.start_soon(world.call, "charge", 20_000, f"key_{place}")
    assert world.server.effects() == {"charge": 40}
    assert len(world.server.events("start")) == 1


async def test_a_server_gets_a_small_environment_and_its_secrets_do_not_come_back(world: World) -> None:
    await world.resolve()
    world.server.fault("secret")
    outcome = await world.call("read")
    environment = structured(outcome)
    assert outcome.result["content"] == [{"type": "text", "text": "token ${T_TOKEN}"}]
    assert environment["TOKEN"] == "${T_TOKEN}"
    assert set(environment) - {"LC_CTYPE"} == {"PATH", "PYTHONPATH", "TOKEN"}


async def test_a_secret_is_known_in_a_text_that_is_json_too(world: World) -> None:
    await world.resolve()
    world.server.fault("secret", arg="json")
    outcome = await world.call("read")
    assert outcome.result["content"] == [{"type": "text", "text": '"${T_TOKEN}"'}]
    world.server.fault("secret", "start", arg="die")
    await world.registry.aclose()
    world.registry = world.new_registry()
    outcome = await world.call("read")
    assert outcome.error.message.endswith("The last it said: bad token ${T_TOKEN}")


async def test_what_is_left_out_is_told_and_a_built_in_name_is_refused(world: World) -> None:
    skipped: list[Skipped] = []
    config = (world.server.config(), str(world.workspace))
    await world.registry.resolve_mcp("t", *config, "$.agent.mcp.t", skipped)
    assert skipped == [Skipped(tool="t.odd", reason="providers refuse oneOf at the root of a schema")]
    for name in ("files", "shell"):
        with pytest.raises(InvalidParams) as refused:
            await world.registry.resolve_mcp(name, *config, "$.agent.mcp.x")
        assert refused.value.details["reason"] == f"{name!r} is the name of a built-in server"


async def test_arguments_that_are_no_unicode_are_not_sent(world: World) -> None:
    await world.resolve()
    assert await world.call("charge", operation="\ud800") == failed(
        "invalid_arguments", "An argument is not valid Unicode."
    )
    assert world.server.calls() == []


# One fault, one outcome

A_WHILE = 500
FAULTS: list[tuple[str, Any, Any, Any]] = [
    # fault, its argument, the outcome of an effect, the outcome of a read
    ("die", None, LOST, NotDone),
    ("close_output", None, LOST, NotDone),
    ("hang", None, Lost(reason="timeout"), failed("timeout", "No answer within 0.5 s.")),
    ("wrong_id", None, Lost(reason="timeout"), failed("timeout", "No answer within 0.5 s.")),
    ("bad_json", None, Lost(reason="timeout"), failed("timeout", "No answer within 0.5 s.")),
    ("bad_utf8", None, Lost(reason="timeout"), failed("timeout", "No answer within 0.5 s.")),
    ("endless_notifications", None, Lost(reason="timeout"), failed("timeout", "No answer within 0.5 s.")),
    ("endless_requests", None, Lost(reason="timeout"), failed("timeout", "No answer within 0.5 s.")),
    ("bad_result", None, LOST, failed("bad_answer", "The server's answer is no tool result.")),
    ("huge_result", LINE_BYTES, LOST, failed("server_error", "The server answered with the error -32098.")),
    ("error", -32603, LOST, failed("server_error", "The server answered with the error -32603.")),
    ("error", -32000, LOST, failed("server_error", "The server answered with the error -32000.")),
    ("error", -32602, as_told("MCP error -32602: as told", isError=True), None),
    ("tool_error", None, as_told(isError=True), None),
    ("double_answer", None, as_told(), None),
    ("answer_and_die", None, as_told(), None),
    ("noise_on_stdout", None, "done", None),
    ("sampling_request", None, "done", None),
    ("stderr_flood", None, "done", None),
]


@pytest.mark.parametrize(("fault", "arg", "outcome", "_read"), FAULTS)
@pytest.mark.parametrize("at", ["before_effect", "after_effect"])
async def test_an_effect_is_answered_or_lost_and_never_failed(
    world: World, fault: str, arg: Any, outcome: Any, _read: Any, at: str
) -> None:
    await world.resolve()
    world.server.fault(fault, at, arg)
    slow = isinstance(outcome, Lost) and outcome.reason == "timeout"
    got = await world.call("charge", A_WHILE if slow else 20_000)
    if outcome == "done":
        assert structured(got) == said("charge", 1)
    else:
        assert got == outcome
    acted = at == "after_effect" or outcome == "done"
    assert world.server.effects() == ({"charge": 1} if acted else {})


@pytest.mark.parametrize(("fault", "arg", "effect", "outcome"), [f for f in FAULTS if f[3] is not None])
async def test_a_read_that_got_no_answer_may_be_made_again(
    world: World, fault: str, arg: Any, effect: Any, outcome: Any
) -> None:
    await world.resolve()
    world.server.fault(fault, arg=arg)
    got = await world.call("read", A_WHILE if isinstance(outcome, Failed) and fault != "huge_result" else 20_000)
    assert isinstance(got, NotDone) if outcome is NotDone else got == outcome


@pytest.mark.parametrize("fault", [f[0] for f in FAULTS])
async def test_whatever_a_call_met_the_next_one_is_answered(world: World, fault: str) -> None:
    await world.resolve()
    world.server.fault(fault, arg=-32603 if fault == "error" else LINE_BYTES)
    await world.call("charge", A_WHILE)
    outcome = await world.call("read")
    if fault == "answer_and_die" and isinstance(outcome, NotDone):  # it was about to end, and that was not known yet
        outcome = await world.call("read")
    assert structured(outcome) == said("read", 1)


async def test_f045_a_flood_without_an_end_of_line_ends_that_server_in_bounded_memory(world: World) -> None:
    await world.resolve()
    world.server.fault("flood")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert await world.call("charge") == LOST
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024
    assert structured(await world.call("read")) == said("read", 1)


async def test_f045_a_large_result_is_cut_like_any_other(world: World) -> None:
    await world.resolve()
    world.server.fault("huge_result", arg=2_000_000)
    outcome = await world.call("read")
    assert isinstance(outcome, ToolReply)
    assert "[cut: " in outcome.result["content"][0]["text"]
    assert len(outcome.result["content"][0]["text"]) < 70_000


async def test_f007_noise_before_and_between_the_messages_harms_nothing_and_is_told(world: World) -> None:
    world.server.fault("noise_on_stdout", "start")
    await world.resolve()
    world.server.fault("noise_on_stdout")
    assert structured(await world.call("charge")) == said("charge", 1)
    assert world.notes[:3] == ["Welcome!", "{not json}", "[1, 2]"]
    assert world.notes.count("DEBUG calling") < 60


async def test_f009_a_flood_on_standard_error_never_holds_the_server_up(world: World) -> None:
    world.server.fault("stderr_flood", "start")
    await world.resolve()
    assert structured(await world.call("charge")) == said("charge", 1)
    assert world.notes.count("debug: nothing") <= 50


async def test_what_a_server_asks_of_us_is_declined_and_a_ping_is_answered(world: World) -> None:
    await world.resolve()
    world.server.fault("sampling_request")
    assert isinstance(await world.call("charge"), ToolReply)
    heard = {}
    for _ in range(4):
        answer = (await world.server.event("heard"))["answer"]
        heard[answer["id"]] = answer.get("error", {}).get("code", answer.get("result"))
    assert heard == {"s0": -32601, "s1": -32601, "s2": -32601, "s3": {}}


async def test_a_server_that_talks_without_end_leaves_the_others_alone(world: World, tmp_path: Path) -> None:
    await world.resolve()
    (tmp_path / "other").mkdir()
    other = World(tmp_path / "other")
    other.registry = world.registry
    await other.resolve()
    world.server.fault("endless_requests")
    async with anyio.create_task_group() as calls:
        calls.start_soon(world.call, "charge", 2_000)
        for _ in range(5):
            assert isinstance(await other.call("read", A_WHILE), ToolReply)
    other.server.close()


async def test_f077_a_cancelled_call_tells_the_server_and_leaves_it_running(world: World) -> None:
    await world.resolve()
    world.server.fault("hang", "before_effect")
    async with anyio.create_task_group() as calls:
        calls.start_soon(world.call, "charge")
        await world.server.event("parked")
        calls.cancel_scope.cancel()
    await world.server.event("cancelled")
    world.server.release()
    assert isinstance(await world.call("read"), ToolReply)
    assert len(world.server.events("start")) == 1


async def test_an_answer_that_comes_after_the_limit_is_nobody_elses(world: World) -> None:
    await world.resolve()
    world.server.fault("hang", "after_effect")
    assert await world.call("charge", 300) == Lost(reason="timeout")
    await world.server.event("cancelled")
    world.server.release()
    assert structured(await world.call("read")) == said("read", 1)


async def test_a_request_of_which_no_byte_left_did_nothing_and_never_will(world: World) -> None:
    await world.resolve()
    world.server.fault("deaf", "deaf")
    outcomes: dict[str, Any] = {}

    async def call(key: str, size: int, limit_ms: int) -> None:
        outcomes[key] = await world.call("charge", limit_ms, key, operation="x" * size)

    async with anyio.create_task_group() as calls:
        calls.start_soon(call, "first", 1, 20_000)
        await world.server.event("parked")
        async with anyio.create_task_group() as more:
            for key, size in (("begun", 5_000_000), ("behind", 1), ("without_room", 1)):
                more.start_soon(call, key, size, A_WHILE)
        world.server.release()
    message = "The server does not read what it is told; nothing was sent."
    nothing = NotDone(error=Trouble(kind="timeout", message=message))
    assert isinstance(outcomes.pop("first"), ToolReply)
    assert outcomes == {"begun": Lost(reason="timeout"), "behind": nothing, "without_room": nothing}
    assert isinstance(await world.call("read"), ToolReply)
    assert {call["key"] for call in world.server.calls()} == {"first", "begun", None}


# Before a call


@pytest.mark.parametrize(
    ("fault", "tool", "message"),
    [
        ("tool_gone", "charge", "The MCP server t has no tool 'charge' any more."),
        ("schema_change", "charge", "The MCP server t has another schema for 'charge' now than when the run began."),
        ("not_read_only", "wipe", "The MCP server t does not say any more that 'wipe' only reads."),
    ],
)
async def test_p8_what_a_run_pinned_and_cannot_have_any_more_is_named_and_not_called(
    world: World, fault: str, tool: str, message: str
) -> None:
    await world.resolve(tools={}, trustReadOnly=True)
    await world.registry.aclose()
    world.registry = world.new_registry()
    world.server.fault(fault, "list")
    assert await world.call(tool) == failed("incompatible", message)
    assert isinstance(await world.call("charge_once"), ToolReply) is (fault != "schema_change")
    assert world.server.effects() == ({} if fault == "schema_change" else {"charge_once": 1})


async def test_p8_a_change_that_the_server_tells_is_seen_by_the_next_call(world: World) -> None:
    await world.resolve()
    world.server.fault("list_changed")
    assert isinstance(await world.call("charge"), ToolReply)
    outcome = await world.call("charge")
    assert isinstance(outcome, Failed)
    assert outcome.error.kind == "incompatible"


# Look-ups


async def test_a_look_up_finds_what_happened_and_what_did_not(world: World) -> None:
    await world.resolve()
    assert await world.look_up("charge_findable") == LookUp(answer="absent")
    await world.call("charge_findable")
    found = await world.look_up("charge_findable")
    assert (found.answer, (found.result or {})["structuredContent"]) == ("found", said("find", 1))
    assert await world.look_up("charge") == LookUp(answer="unsure")


@pytest.mark.parametrize("fault", ["die", "tool_error", "error", "bad_result"])
async def test_a_look_up_that_failed_is_unsure(world: World, fault: str) -> None:
    await world.resolve()
    world.server.fault(fault, arg=-32602)
    assert await world.look_up("charge_findable") == LookUp(answer="unsure")


async def test_a_look_up_without_the_argument_it_needs_is_unsure(world: World) -> None:
    await world.resolve()
    request = request_for(world.specs["charge_findable"], {}, workspace=str(world.workspace))
    assert await world.registry.look_up(request) == LookUp(answer="unsure")


# A server that cannot be had


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"command": ["no-such-program"]}, "there is no program 'no-such-program' that can be run."),
        ({"command": ["./missing"]}, "there is no program './missing' that can be run."),
        ({"env": {"A": "${NOT_SET}"}}, "the daemon's environment has no NOT_SET."),
    ],
)
async def test_a_server_that_cannot_be_started_is_said_so_at_once(
    world: World, members: dict[str, Any], message: str
) -> None:
    config = {**world.server.config(), **members}
    with pytest.raises(Incompatible) as refused:
        await world.registry.resolve_mcp("t", config, str(world.workspace), "$.agent.mcp.t")
    assert refused.value.message == f"The MCP server t cannot be started: {message}"
    assert refused.value.data == {"code": "INCOMPATIBLE", "retryable": True, "server": "t"}


async def test_what_a_dying_server_said_last_is_what_the_caller_is_told(world: World) -> None:
    world.server.fault("die", "start")
    with pytest.raises(Incompatible) as refused:
        await world.resolve()
    assert refused.value.message == f"{ENDED.format('exit code 3')} The last it said: no licence"


@pytest.mark.parametrize("fault", ["die", "endless_pages"])
async def test_a_server_that_does_not_list_its_tools_is_refused(world: World, fault: str) -> None:
    world.server.fault(fault, "list")
    with pytest.raises(Incompatible) as refused:
        await world.resolve()
    known = {"die": ENDED.format("exit code 4"), "endless_pages": "The MCP server t lists tools without end."}
    assert refused.value.message == known[fault]


async def test_a_server_of_another_protocol_is_refused(world: World) -> None:
    world.server.fault("old_protocol", "start")
    with pytest.raises(Incompatible) as refused:
        await world.resolve()
    assert refused.value.message == "The MCP server t speaks no protocol that is known."
