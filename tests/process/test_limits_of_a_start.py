"""What a start may say: a number that leads out of the calendar is refused, and what policy denies is seen by no way round."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rpcagent_client import Client, RpcError

pytestmark = pytest.mark.process

FAR = 10**17
HTTP = {"name": "t.do", "http": {"url": "http://127.0.0.1:1/"}}
TOO_LONG: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{**HTTP, "effect": "idempotent", "keyTtlMs": FAR}]}, "$.agent.tools[0].keyTtlMs"),
    ({"tools": [{**HTTP, "settleMs": FAR}]}, "$.agent.tools[0].settleMs"),
    ({"tools": [{**HTTP, "timeoutMs": FAR}]}, "$.agent.tools[0].timeoutMs"),
    (
        {"model": {"script": [{"fail": {"kind": "busy", "retryAfterMs": FAR}}]}},
        "$.agent.model.script[0].fail.retryAfterMs",
    ),
    ({"model": {"script": [{"text": "x", "usage": {"costUsd": 1e300}}]}}, "$.agent.model.script[0].usage.costUsd"),
    ({"model": {"retryFor": "999999999d"}}, "$.agent.model.retryFor"),
    ({"policy": {"rules": [{"do": "ask", "expires": "3000000d"}]}}, "$.agent.policy.rules[0].expires"),
]


@pytest.mark.parametrize(("agent", "path"), TOO_LONG)
def test_a_number_beyond_its_bound_is_refused_by_path_and_starts_nothing(
    connect: Callable[..., Client], agent: dict[str, Any], path: str
) -> None:
    client = connect()
    with pytest.raises(RpcError) as refused:
        client.start(agent, "Go.", client_request_id="a")
    assert (refused.value.code, refused.value.data["path"]) == ("INVALID_PARAMS", path)
    assert client.list()["runs"] == []


def test_what_a_rule_denies_to_read_is_neither_listed_nor_found_by_a_run(
    connect: Callable[..., Client], tmp_path: Path
) -> None:
    for name in ("secret/k", "open"):
        (tmp_path / "workspace" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "workspace" / name).write_text("needle")
    asked = [
        ("files.list", {"recursive": True}),
        ("files.list", {"path": "secret"}),
        ("files.search", {"pattern": "needle"}),
        ("files.search", {"pattern": "needle", "path": "./secret"}),
        ("files.read", {"path": "secret/k"}),
    ]
    script = [{"calls": [{"tool": tool, "arguments": arguments} for tool, arguments in asked]}, {"text": "Done."}]
    agent = {"model": {"script": script}, "policy": {"rules": [{"do": "deny", "paths": ["secret/*"]}]}}
    client = connect()
    shown = client.wait(client.start(agent, "Look.", client_request_id="a")["runId"], timeout=60)
    results = [str(step.get("result")) for step in shown["steps"] if step["kind"] == "tool_call"]
    assert [step["status"] for step in shown["steps"] if step["kind"] == "tool_call"] == ["completed"] * 4 + ["denied"]
    assert ["open" in result for result in results] == [True, False, True, False, False]
    assert not any("secret/k" in result for result in results)
