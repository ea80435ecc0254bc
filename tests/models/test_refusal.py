"""Headers and words of a refusal: how long to wait, and what is read out of odd bodies."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any

import pytest
from rpcagent.models.redaction import Secrets
from rpcagent.models.refusal import Said, read_said, refused, retry_after_ms
from rpcagent.runs.outcomes import NotDone

NOW = datetime(2024, 5, 6, 7, 8, 9, tzinfo=UTC)


@pytest.mark.parametrize(
    ("headers", "wait"),
    [
        ({}, None),
        ({"retry-after": "2"}, 2_000),
        ({"retry-after": "1.5"}, 1_500),
        ({"retry-after": " 3 "}, 3_000),
        ({"retry-after": "0"}, None),
        ({"retry-after": "-1"}, None),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "99999999999"}, 86_400_000),
        ({"retry-after": f"Mon, 06 May {'9' * 40} 07:08:19 GMT"}, None),
        ({"x-ratelimit-reset": f"{'9' * 400}s", "x-ratelimit-remaining": "0"}, 86_400_000),
        ({"retry-after": "Mon, 06 May 2024 07:08:19 GMT"}, 10_000),
        ({"retry-after": "Mon, 06 May 2024 07:08:19"}, 10_000),
        ({"retry-after": "Mon, 06 May 2024 07:00:00 GMT"}, None),
        ({"retry-after-ms": "250", "retry-after": "9"}, 250),
        ({"x-ratelimit-reset-tokens": "6m1.5s", "x-ratelimit-remaining-tokens": "0"}, 361_500),
        ({"x-ratelimit-reset-tokens": "120ms", "x-ratelimit-remaining-tokens": "0"}, 120),
        ({"x-ratelimit-reset-tokens": "6m0s", "x-ratelimit-remaining-tokens": "5"}, None),
        (
            {
                "x-ratelimit-reset-tokens": "1s", "x-ratelimit-remaining-tokens": "0",
                "x-ratelimit-reset-requests": "2s", "x-ratelimit-remaining-requests": "0",
            },
            2_000,
        ),
        ({"x-ratelimit-reset": "30", "x-ratelimit-remaining": "0"}, 30_000),
        ({"x-ratelimit-reset": str(int(NOW.timestamp()) + 5), "x-ratelimit-remaining": "0"}, 5_000),
        ({"x-ratelimit-reset": str(int(NOW.timestamp() + 5) * 1_000), "x-ratelimit-remaining": "0"}, 5_000),
        ({"x-ratelimit-reset": "later", "x-ratelimit-remaining": "0"}, None),
    ],
)  # fmt: skip
def test_f057_the_wait_that_is_asked_for_is_read_and_no_wait_is_left_to_our_own_backoff(
    headers: dict[str, str], wait: int | None
) -> None:
    assert retry_after_ms(headers, NOW) == wait


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", Said(message="(no words)")),
        (b"<html><body>x</body></html>", Said(message="(an HTML page)")),
        (b"upstream connect error", Said(message="upstream connect error")),
        (b'{"error":"no"}', Said(message="no")),
        (b'{"error":{"message":"no","code":"c","type":"t"}}', Said(message="no", codes=frozenset({"c", "t"}))),
        (b'{"message":"no","code":400}', Said(message="no", number=400)),
        (b'{"detail":"no"}', Said(message="no")),
        (b'{"detail":[{"loc":["body","x"],"msg":"bad"}]}', Said(message='[{"loc":["body","x"],"msg":"bad"}]')),
        (b'{"error":{}}', Said(message="{}")),
        (b"[1]", Said(message="[1]")),
        (b"\xff\xfe", Said(message="\ufffd\ufffd")),
    ],
)
def test_the_words_of_a_refusal_are_found_in_every_shape(body: bytes, said: Said) -> None:
    assert read_said(body) == said


@pytest.mark.parametrize("text", ["x" * 64_000, "*" * 64_000, "a*" * 32_000, "context " * 8_000, "exceeds " * 8_000])
def test_a_long_refusal_is_read_in_no_time(text: str) -> None:
    began = time.process_time()
    refused(400, {}, Said(message=text), host="h", secrets=Secrets({"K": "x" * 20}), now=NOW)
    assert time.process_time() - began < 1


@pytest.mark.parametrize(
    ("status", "said", "kind"),
    [
        (404, Said(message="model 'x' not found, try pulling it first"), "model_not_found"),
        (404, Said(message="nothing here"), "not_found"),
        (400, Said(message="your balance is too low"), "quota"),
        (403, Said(message="insufficient balance"), "quota"),
        (408, Said(message="too slow"), "server_error"),
        (520, Said(message="(an HTML page)"), "server_error"),
        (413, Said(message="too large"), "bad_request"),
        (429, Said(message="your messages exceed the context"), "rate_limited"),
    ],
)
def test_a_refusal_has_its_kind(status: int, said: Said, kind: str) -> None:
    outcome: Any = refused(status, {}, said, host="h", secrets=Secrets({}), now=NOW)
    assert isinstance(outcome, NotDone)
    assert outcome.error.kind == kind
