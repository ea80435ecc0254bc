"""What a key is bound to, and what is no key, no id and no duration."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from rpcagent.errors import InvalidParams
from rpcagent.rpc.wire import RuleParams, StartParams, check_keyed, duration_ms, fingerprint

LEAST: dict[str, Any] = {"clientRequestId": "k", "agent": {}, "input": "go", "budget": {}}


def print_of(**more: Any) -> str:
    return fingerprint("start", msgspec.convert(LEAST | more, StartParams))


@pytest.mark.parametrize(
    "more",
    [
        {"clientRequestId": "another"},
        {"waitMs": 500},
        {"drive": "auto", "recovery": "auto", "durability": "sync", "namespace": "", "labels": {}},
        {"budget": {"steps": 500, "attempts": 2000, "repeats": 20}},
        {"agent": {"name": "inline", "tools": ["files"], "model": {"timeoutS": 600, "retryFor": "15m"}}},
        {"agent": {"policy": {"rules": []}}},
    ],
)
def test_a_member_that_equals_its_default_a_key_and_a_wait_do_not_count(more: dict[str, Any]):
    assert print_of(**more) == print_of()


@pytest.mark.parametrize(
    "more",
    [
        {"input": "go on"},
        {"drive": "manual"},
        {"budget": {"steps": 501}},
        {"budget": {"steps": None}},
        {"agent": {"model": {"timeoutS": 601}}},
        {"agent": {"tools": []}},
        {"agent": {"policy": {"rules": [{"do": "allow"}]}}},
        {"labels": {"a": "b"}},
    ],
)
def test_every_other_member_counts(more: dict[str, Any]):
    assert print_of(**more) != print_of()


def test_the_method_counts():
    params = msgspec.convert(LEAST, StartParams)
    assert fingerprint("start", params) != fingerprint("step", params)


@pytest.mark.parametrize("key", ["", "a b", "a\n", "é", "x" * 129, "a\0", "a;b"])
def test_text_that_is_no_key_is_refused_f041(key: str):
    with pytest.raises(InvalidParams) as refused:
        check_keyed(msgspec.convert(LEAST | {"clientRequestId": key}, StartParams))
    assert refused.value.details == {
        "path": "$.clientRequestId",
        "reason": "1 to 128 characters of A-Z a-z 0-9 . _ : / -",
    }


@pytest.mark.parametrize(
    ("text", "ms"), [("250ms", 250), ("90s", 90_000), ("15m", 900_000), ("24h", 86_400_000), ("3650d", 315_360_000_000)]
)
def test_a_duration_is_a_number_and_a_unit(text: str, ms: int):
    assert duration_ms(text, "$") == ms


@pytest.mark.parametrize("text", ["", "5", "s", "-1s", "1.5h", "1 h", "1h\n", "1w", "3651d", "3000000d", "999999999h"])
def test_what_is_no_duration_is_refused_with_its_path(text: str):
    with pytest.raises(InvalidParams) as refused:
        duration_ms(text, "$.rules[0].expires")
    assert refused.value.details["path"] == "$.rules[0].expires"


def test_a_rule_is_read_strictly():
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"do": "allow", "tools": "x"}, RuleParams)
