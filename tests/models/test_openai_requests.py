"""What the openai provider sends to a server that is strict about it, and what it keeps to itself."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from rpcagent.models.openai import OpenAiModel
from rpcagent.models.refusal import SAID_MOST
from rpcagent.runs.events import Trouble
from rpcagent.runs.outcomes import AskedCall, Failed, ModelReply
from tests.models.asking import KEY, USAGE, WHOLE, ask, asked, assistant, calls, not_done, result, user
from tests.service.model_driver import ModelServer

pytestmark = pytest.mark.anyio


# What is sent


async def test_f047_f049_f051_a_history_goes_out_under_our_ids_with_one_result_for_each_call(
    model: OpenAiModel, server: ModelServer
) -> None:
    history = (
        user(),
        assistant(("shop.charge", {"order": "A1"}), ("shop.charge", {"order": "B2"})),
        result(2, "paid"),
        result(3, "Failed (denied): no", is_error=True),
    )
    request = asked(history, base_url=server.base_url, api_key_env="KEY")
    assert await model.complete(request, str) == ModelReply(text="Done.", usage=USAGE)
    sent = server.calls()[-1].messages
    ids = [call["id"] for call in sent[2]["tool_calls"]]
    assert len(set(ids)) == 2
    assert sent[3:] == [
        {"role": "tool", "tool_call_id": ids[0], "content": "paid"},
        {"role": "tool", "tool_call_id": ids[1], "content": "Error: Failed (denied): no"},
    ]


@pytest.mark.parametrize(
    "history",
    [
        (user(), assistant(("shop.charge", {}))),
        (user(), assistant(("shop.charge", {})), user("And?")),
        (user(), assistant(("shop.charge", {})), assistant(text="Hm.")),
        (user(), assistant(("shop.charge", {}), ("shop.charge", {})), result(3), result(2)),
        (user(), assistant(("shop.charge", {})), result(2), result(2)),
    ],
)
async def test_f047_a_call_without_its_result_is_never_sent(
    model: OpenAiModel, server: ModelServer, history: Any
) -> None:
    before = len(server.calls())
    outcome = await model.complete(asked(history, base_url=server.base_url, api_key_env="KEY"), str)
    message = "The context has a call without its result; it was not sent."
    assert outcome == Failed(error=Trouble(kind="bad_history", message=message))
    assert len(server.calls()) == before


@pytest.mark.parametrize("status", [400, 422])
async def test_a_server_that_does_not_count_tokens_in_streams_is_asked_without_and_remembered(
    server: ModelServer, status: int
) -> None:
    model = OpenAiModel(environ={"KEY": KEY})
    server.fault("refuses_stream_options", times=4, status=status)
    before = len(server.calls())
    for _ in range(2):
        assert await ask(model, server) == ModelReply(text="I charge two.", calls=calls(), stop="tool_calls")
    assert ["stream_options" in call.body for call in server.calls()[before:]] == [True, False, False]
    await model.aclose()


async def test_nothing_is_tried_again_in_one_attempt(model: OpenAiModel, server: ModelServer) -> None:
    for name in ("server_error", "rate_limited", "reset", "bad_request"):
        server.fault(name, times=3)
        before = len(server.calls())
        await ask(model, server)
        assert len(server.calls()) == before + 1
        server.clear()


# Secrets


@pytest.mark.parametrize("status", [401, 400, 429, 500])
async def test_f039_a_key_that_the_server_echoes_is_in_no_outcome_and_in_no_log_line(
    model: OpenAiModel, server: ModelServer, caplog: pytest.LogCaptureFixture, status: int
) -> None:
    caplog.set_level(logging.DEBUG)
    server.fault("echo_key", status=status)
    outcome = await ask(model, server)
    said = f"127.0.0.1:{server.port} answered HTTP {status}: Incorrect API key provided: ${{KEY}}, also [secret]"
    assert outcome.error.message == said
    for fragment in (KEY, KEY[-8:]):
        assert fragment not in repr(outcome) + caplog.text


async def test_f039_a_key_in_a_good_answer_is_taken_out_of_text_pieces_and_arguments(
    model: OpenAiModel, server: ModelServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    server.script([{"calls": [{"name": "shop__charge"}]}])
    server.fault("echo_key", status=200)
    emitted: list[str] = []
    outcome = await ask(model, server, emitted)
    call = AskedCall(tool="shop.charge", arguments={"key": "${KEY}"}, provider_id="call_0")
    assert outcome == ModelReply(text="Your key is ${KEY}, is it not?", calls=(call,), usage=USAGE, stop="tool_calls")
    assert "".join(emitted) == "Your key is ${KEY}, is it not?"
    assert KEY not in caplog.text


async def test_a_missing_or_a_wrong_key_is_asked_about(model: OpenAiModel, server: ModelServer) -> None:
    before = len(server.calls())
    missing = await ask(model, server, api_key_env="NONE")
    assert missing == not_done("credentials", "The environment of the daemon has no NONE.", ask=True)
    assert len(server.calls()) == before
    wrong = await ask(model, server, api_key_env="WRONG")
    said = f"127.0.0.1:{server.port} answered HTTP 401: Invalid credentials."
    assert wrong == not_done("credentials", said, ask=True)
    assert server.calls()[-1].key == "wrong"


async def test_a_proxy_of_the_environment_is_not_used(server: ModelServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    model = OpenAiModel(environ={"KEY": KEY})
    assert await ask(model, server) == WHOLE
    await model.aclose()


async def test_what_a_server_says_is_shown_in_part(model: OpenAiModel, server: ModelServer) -> None:
    server.fault("error_body_200", error="x" * 100_000)
    outcome = await ask(model, server)
    assert len(outcome.error.message) < SAID_MOST + 100
