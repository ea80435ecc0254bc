"""The registry: what a run may name, who performs it, for how long, and what comes out of it."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import anyio
import pytest
from rpcagent.errors import InvalidParams
from rpcagent.runs.effects import ToolSpec
from rpcagent.runs.events import Trouble
from rpcagent.runs.outcomes import Failed, LookUp, Lost, ToolReply
from rpcagent.runs.ports import ToolRequest
from rpcagent.tools.registry import Registry
from rpcagent.tools.results import TEXT_BYTES, NotPlain, cut, normalised
from tests.tools.calls import request_for

HTTP = {"url": "http://127.0.0.1:1/tickets/{id}", "method": "PUT"}
PARAMETERS = {"type": "object", "properties": {"id": {"type": "string"}}}
LOOKUP = {"url": "http://127.0.0.1:1/tickets/{id}?key={key}", "found": "closed"}
TOOL: dict[str, Any] = {"name": "tickets.close", "parameters": PARAMETERS, "http": HTTP}
FULL: dict[str, Any] = {**TOOL, "effect": "reconcilable", "lookup": LOOKUP}


class Fake:
    """An adapter that does as told."""

    def __init__(self, does: Any) -> None:
        self.does = does

    async def call(self, request: ToolRequest) -> Any:
        if isinstance(self.does, Exception):
            raise self.does
        if self.does == "hang":
            await anyio.sleep_forever()
        return ToolReply(result=self.does)


async def called(does: Any, effect: Any, timeout_ms: int = 60_000) -> tuple[Any, list[str]]:
    faults: list[str] = []
    registry = Registry(servers={"fake": Fake(does)}, on_fault=lambda error, _request: faults.append(repr(error)))
    spec = ToolSpec(name="fake.do", effect=effect, timeout_ms=timeout_ms)
    return await registry.call(request_for(spec, {})), faults


# What a run may name


def test_a_name_stands_for_a_server_or_for_one_tool_and_the_order_is_kept() -> None:
    names = [spec.name for spec in Registry().resolve(["files.write", "files.read"])]
    assert names == ["files.write", "files.read"]
    effects = {spec.name: spec.effect for spec in Registry().resolve(["files"])}
    assert effects == {
        "files.read": "read_only",
        "files.list": "read_only",
        "files.search": "read_only",
        "files.write": "idempotent",
        "files.edit": "idempotent",
    }


def test_an_inline_tool_becomes_a_spec_with_its_whole_contract() -> None:
    (full,) = Registry().resolve([{**FULL, "description": "d", "settleMs": 5, "timeoutMs": 7}])
    assert full == ToolSpec(
        name="tickets.close",
        description="d",
        parameters=PARAMETERS,
        effect="reconcilable",
        settle_ms=5,
        timeout_ms=7,
        binding={"http": HTTP, "lookup": LOOKUP},
    )


def test_s0_05_an_inline_tool_that_declares_nothing_is_at_most_once() -> None:
    (bare,) = Registry().resolve([{"name": "t.do", "http": {"url": "http://h/"}}])
    assert (bare.effect, bare.key_ttl_ms, bare.settle_ms, bare.timeout_ms) == ("at_most_once", None, 0, 60_000)
    assert bare.parameters == {"type": "object", "properties": {}}


def changed(**members: Any) -> dict[str, Any]:
    return {**FULL, **members}


REFUSED: list[tuple[Any, str, str]] = [
    ("browser", "", "there is no built-in tool or server 'browser'; there are: files, files.edit, files.list, files.read, files.search, files.write, shell, shell.run"),
    (7, "", "a tool is a name or an object"),
    ({"http": HTTP}, "", "Object missing required field `name`"),
    (changed(extra=1), "", "Object contains unknown field `extra`"),
    (changed(name="close"), ".name", "a name is `server.tool`, both of letters, digits, `_` and `-`"),
    (changed(name="t." + "x" * 60 + "_" * 2), ".name", "a name is `server.tool`, both of letters, digits, `_` and `-`"),
    (changed(name="serv." + "x" * 59), ".name", "a tool's name has less than 64 characters"),
    (changed(name="files.delete"), ".name", "'files' is the name of a built-in server"),
    (changed(name="shell.run"), ".name", "'shell' is the name of a built-in server"),
    (changed(effect="safe"), ".effect", "Invalid enum value 'safe'"),
    (changed(lookup=None), ".lookup", "a reconcilable tool has a look-up"),
    (changed(effect="idempotent"), ".lookup", "only a reconcilable tool is looked up"),
    (changed(keyTtlMs=5), ".keyTtlMs", "only an idempotent tool has keyTtlMs"),
    ({**TOOL, "effect": "idempotent", "keyTtlMs": 0}, ".keyTtlMs", "1 to 315360000000"),
    ({**TOOL, "effect": "idempotent", "keyTtlMs": 10**17}, ".keyTtlMs", "1 to 315360000000"),
    (changed(settleMs=-1), ".settleMs", "0 to 315360000000"),
    (changed(settleMs=10**17), ".settleMs", "0 to 315360000000"),
    (changed(timeoutMs=10**17), ".timeoutMs", "1 to 3600000"),
    (changed(timeoutMs=0), ".timeoutMs", "1 to 3600000"),
    (changed(parameters={"type": "string"}), ".parameters.type", "parameters are a JSON schema of type object"),
    (changed(parameters={**PARAMETERS, "oneOf": []}), ".parameters.oneOf", "providers refuse this at the root of a schema"),
    (changed(parameters={"type": "object", "properties": []}), ".parameters.properties", "properties are an object"),
    (changed(http={**HTTP, "method": "BREW"}), ".http.method", "Invalid enum value 'BREW'"),
    (changed(http={**HTTP, "url": "file:///etc/passwd"}), ".http.url", "the scheme is http or https"),
    (changed(http={**HTTP, "url": "http:///x"}), ".http.url", "this is no URL"),
    (changed(http={**HTTP, "url": "http://h:x/"}), ".http.url", "this is no URL"),
    (changed(http={**HTTP, "url": "http://h/a b"}), ".http.url", "this is no URL"),
    (changed(http={**HTTP, "url": "http://me:pw@h/"}), ".http.url", "credentials go into a header, as ${NAME}"),
    (changed(http={**HTTP, "url": "http://h/#x"}), ".http.url", "a fragment is never sent"),
    (changed(http={**HTTP, "url": "http://{id}/"}), ".http.url", "the host cannot come from an argument"),
    (changed(http={**HTTP, "url": "http://h/{id"}), ".http.url", "a brace that is no {name}"),
    (changed(http={**HTTP, "url": "http://h/{no}"}), ".http.url", "{no} is none of the tool's parameters"),
    (changed(http={**HTTP, "headers": {"a b": "x"}}), ".http.headers", "'a b' is no header"),
    (changed(http={**HTTP, "headers": {"A": "x\r\nB: y"}}), ".http.headers", "'A' is no header"),
    (changed(http={**HTTP, "headers": {"idempotency-Key": "x"}}), ".http.headers", "idempotency-Key is set by the daemon"),
    (changed(lookup={"url": LOOKUP["url"]}), ".lookup", "Object missing required field `found`"),
    (changed(lookup={**LOOKUP, "found": "a =="}), ".lookup.found", "this is no JMESPath expression"),
    (changed(lookup={**LOOKUP, "absent": "a =="}), ".lookup.absent", "this is no JMESPath expression"),
    (changed(lookup={**LOOKUP, "pending": "a =="}), ".lookup.pending", "this is no JMESPath expression"),
    (changed(lookup={**LOOKUP, "url": "ftp://h/"}), ".lookup.url", "the scheme is http or https"),
    (changed(lookup={**LOOKUP, "headers": {"A": "\u00e9"}}), ".lookup.headers", "'A' is no header"),
]  # fmt: skip


@pytest.mark.parametrize(("tool", "where", "reason"), REFUSED)
def test_f059_a_tool_that_could_never_work_is_refused_with_the_member_at_fault(
    tool: Any, where: str, reason: str
) -> None:
    with pytest.raises(InvalidParams) as refused:
        Registry().resolve(["files.read", tool])
    assert refused.value.details == {"path": f"$.agent.tools[1]{where}", "reason": reason}


@pytest.mark.parametrize("tools", [["files.read", "files"], ["files", "files.read"], [TOOL, FULL]])
def test_a_name_that_is_there_twice_is_refused(tools: list[Any]) -> None:
    with pytest.raises(InvalidParams) as refused:
        Registry().resolve(tools, "$.tools")
    name = "tickets.close" if tools[0] is TOOL else "files.read"
    assert refused.value.details == {"path": "$.tools[1]", "reason": f"the tool '{name}' is there twice"}


# What comes out of a call


@pytest.mark.anyio
@pytest.mark.parametrize("effect", ["idempotent", "reconcilable", "at_most_once"])
async def test_f039_what_an_adapter_raises_is_lost_for_an_effect_and_told_to_the_operator_only(effect: Any) -> None:
    assert await called(RuntimeError("secret"), effect) == (Lost(reason="crashed"), ["RuntimeError('secret')"])


@pytest.mark.anyio
async def test_f039_what_an_adapter_raises_is_a_failure_of_a_read_told_by_class_name_only() -> None:
    error = Trouble(kind="crashed", message="The tool raised RuntimeError.")
    assert await called(RuntimeError("secret"), "read_only") == (Failed(error=error), ["RuntimeError('secret')"])


@pytest.mark.anyio
async def test_a_time_out_is_lost_for_an_effect_and_a_failure_of_a_read() -> None:
    assert await called("hang", "at_most_once", timeout_ms=1) == (Lost(reason="timeout"), [])
    error = Trouble(kind="timeout", message="No answer within 1 ms.")
    assert await called("hang", "read_only", timeout_ms=1) == (Failed(error=error), [])


@pytest.mark.anyio
async def test_a_cancellation_goes_through() -> None:
    with anyio.move_on_after(0) as scope:
        await called("hang", "at_most_once")
    assert scope.cancelled_caught


@pytest.mark.anyio
async def test_a_tool_that_this_daemon_cannot_reach_failed_as_incompatible_and_is_unsure() -> None:
    request = request_for(ToolSpec(name="gone.do"), {})
    error = Trouble(kind="incompatible", message="This daemon cannot reach gone.do any more.")
    assert await Registry().call(request) == Failed(error=error)
    assert await Registry().look_up(request) == LookUp(answer="unsure")
    renamed = request_for(ToolSpec(name="files.rename"), {}, workspace="/")
    error = Trouble(kind="incompatible", message="This version has no tool files.rename.")
    assert await Registry().call(renamed) == Failed(error=error)


NOT_PLAIN = [
    (float("nan"), "a number is not finite"),
    (float("inf"), "a number is not finite"),
    (b"x", "a value is of type bytes"),
    ({1}, "a value is of type set"),
    (Path("x"), "a value is of type PosixPath"),
    ({1: 2}, "a key is no text"),
    ("\ud800", "a text has an unpaired surrogate"),
]


@pytest.mark.anyio
@pytest.mark.parametrize(("value", "reason"), NOT_PLAIN)
async def test_f015_a_result_that_json_cannot_hold_never_reaches_the_log(value: Any, reason: str) -> None:
    result = {"content": [], "structuredContent": {"deep": [{"in": value}]}}
    error = Trouble(kind="crashed", message=f"The tool's result cannot be recorded: {reason}.")
    fault = [repr(NotPlain(reason))]
    assert await called(result, "read_only") == (Failed(error=error), fault)
    assert await called(result, "idempotent") == (Lost(reason="crashed"), fault)


def test_f015_a_result_that_is_nested_too_deeply_is_refused() -> None:
    value: Any = 0
    for _ in range(200):
        value = [value]
    with pytest.raises(NotPlain, match="nested too deeply"):
        normalised({"content": [], "structuredContent": {"v": value}})


@pytest.mark.parametrize(
    ("result", "same"),
    [
        ("text", {"content": [{"type": "text", "text": "text"}]}),
        ([1, None], {"content": [{"type": "text", "text": "[1,null]"}]}),
        ({"a": 1}, {"content": [{"type": "text", "text": '{"a":1}'}], "structuredContent": {"a": 1}}),
        (
            {"content": [{"type": "image", "data": "eA=="}], "isError": True, "other": 1},
            {"content": [{"type": "image", "data": "eA=="}], "isError": True},
        ),
    ],
)
def test_every_result_becomes_an_mcp_tool_result(result: Any, same: dict[str, Any]) -> None:
    assert normalised(result) == same


def test_f045_a_giant_text_keeps_head_and_tail_around_a_marker_with_size_and_digest() -> None:
    text = "h" * 40_000 + "é" * 40_000 + "t" * 40_000
    digest = hashlib.sha256(text.encode()).hexdigest()
    marker = f"\n[cut: {160_000 - TEXT_BYTES} bytes left out here; the whole has 160000 bytes, sha256 {digest}]\n"
    head, tail = "h" * 40_000 + "é" * 4_576, "t" * 16_384
    assert cut(text) == head + marker + tail
    assert normalised({"content": [{"type": "text", "text": text}]}) == {
        "content": [{"type": "text", "text": head + marker + tail}]
    }
    assert cut("é" * 40_000, 99).startswith("é" * 37 + "\n[cut")


def test_f045_many_parts_and_large_structures_are_bounded_together_too() -> None:
    part = {"type": "text", "text": "x" * 40_000}
    result = normalised({"content": [part] * 70, "structuredContent": {"v": "y" * 70_000}})
    assert [len(p["text"]) for p in result["content"][:1]] == [40_000]
    assert len(result["content"]) == 66
    assert result["content"][64] == {"type": "text", "text": "[cut: 6 more parts]"}
    raw = b'{"v":"' + b"y" * 70_000 + b'"}'
    note = f"[cut: structured content of 70008 bytes, sha256 {hashlib.sha256(raw).hexdigest()}]"
    assert result["content"][65] == {"type": "text", "text": note}
    assert "structuredContent" not in result
    assert sum(len(p["text"]) for p in result["content"]) < TEXT_BYTES + 66 * 200
