"""The openai provider against a server that misbehaves: each fault has one outcome, and a connection never stays open."""

from __future__ import annotations

import ssl
from typing import Any

import anyio
import httpx
import pytest
from rpcagent.models.catalog import Catalog
from rpcagent.models.openai import BODY_BYTES, OpenAiModel, unreachable
from rpcagent.runs.events import Trouble
from rpcagent.runs.outcomes import AskedCall, Failed, ModelReply
from tests.models.asking import KEY, TURN, USAGE, WHOLE, ask, asked, calls, not_done
from tests.service.model_driver import ModelServer
from tests.service.model_faults import OVERFLOWS

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("stream", [True, False])
async def test_a_whole_answer_comes_back_with_its_calls_and_its_usage(
    model: OpenAiModel, server: ModelServer, stream: bool
) -> None:
    emitted: list[str] = []
    assert await ask(model, server, emitted, stream=stream) == WHOLE
    assert emitted == (["I ", "charge ", "two."] if stream else ["I charge two."])
    call = server.calls()[-1]
    assert (call.key, call.ended, call.body["stream"], "stream_options" in call.body) == (
        "right",
        "answered",
        stream,
        stream,
    )


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ({"name": "rate_limited"}, ("rate_limited", "HTTP 429: Rate limit reached for requests", None, False)),
        ({"name": "rate_limited", "seconds": 2}, ("rate_limited", "HTTP 429: Rate limit reached for requests", 2_000, False)),
        ({"name": "rate_limited", "ms": 1_500}, ("rate_limited", "HTTP 429: Rate limit reached for requests", 1_500, False)),
        ({"name": "overloaded", "seconds": 1}, ("overloaded", "HTTP 503: Loading model", 1_000, False)),
        ({"name": "overloaded_529"}, ("overloaded", "HTTP 529: Overloaded", None, False)),
        ({"name": "server_error"}, ("server_error", "HTTP 500: The server had an error.", None, False)),
        ({"name": "server_error", "status": 502}, ("server_error", "HTTP 502: The server had an error.", None, False)),
        ({"name": "server_error", "status": 504}, ("server_error", "HTTP 504: The server had an error.", None, False)),
        ({"name": "unauthorized"}, ("credentials", "HTTP 401: Invalid credentials.", None, True)),
        ({"name": "server_error", "status": 403}, ("credentials", "HTTP 403: The server had an error.", None, True)),
        ({"name": "quota"}, ("quota", "HTTP 429: You exceeded your current quota.", None, True)),
        ({"name": "payment"}, ("quota", "HTTP 402: Insufficient credits.", None, True)),
        ({"name": "not_found"}, ("model_not_found", "HTTP 404: The model `m` does not exist.", None, True)),
        ({"name": "wrong_place"}, ("not_found", "HTTP 404: 404 page not found", None, True)),
        ({"name": "bad_request"}, ("bad_request", "HTTP 400: Invalid schema for function 'a': type is not object", None, True)),
        ({"name": "bad_history"}, ("bad_request", "HTTP 400: tool_calls must be followed by tool messages", None, True)),
        (
            {"name": "redirect"},
            ("redirected", "HTTP 307 and names another place, to which nothing was sent. Correct the base URL.", None, True),
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [True, False])
async def test_f057_f059_a_refusal_is_asked_about_or_waited_for_by_its_kind(
    model: OpenAiModel, server: ModelServer, fault: dict[str, Any], expected: tuple[Any, ...], stream: bool
) -> None:
    server.fault(**fault)
    kind, said, after, person = expected
    message = f"127.0.0.1:{server.port} answered {said}"
    outcome = await ask(model, server, stream=stream)
    assert outcome == not_done(kind, message, retry_after_ms=after, ask=person)


async def test_f057_a_date_to_wait_for_is_counted_from_now(server: ModelServer) -> None:
    server.fault("rate_limited", date=30)
    model = OpenAiModel(environ={"KEY": KEY})
    outcome = await ask(model, server)
    await model.aclose()
    assert 27_000 <= outcome.retry_after_ms <= 30_000


@pytest.mark.parametrize("flavour", sorted(OVERFLOWS))
async def test_a_context_that_is_too_long_failed_in_every_servers_words(
    model: OpenAiModel, server: ModelServer, flavour: str
) -> None:
    server.fault("context_overflow", flavour=flavour)
    status, body = OVERFLOWS[flavour]
    error = body.get("error", body)
    said = error if isinstance(error, str) else error["message"]
    message = f"The context is too long for this model. 127.0.0.1:{server.port} answered HTTP {status}: {said}"
    assert await ask(model, server) == Failed(error=Trouble(kind="context_overflow", message=message))


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"name": "html"}, "The answer of {host} is an HTML page."),
        ({"name": "empty_body"}, "The answer of {host} is empty."),
        ({"name": "no_json"}, "The answer of {host} is no JSON object."),
        ({"name": "empty_choices"}, "The answer has no choices."),
        ({"name": "null_choices"}, "The answer has no choices."),
        ({"name": "null_content"}, "The answer has neither text nor a tool call."),
        ({"name": "error_body_200"}, "{host} answered with an error: upstream provider failed"),
        ({"name": "error_body_200", "after": 2}, "{host} answered with an error: upstream provider failed"),
        ({"name": "error_body_200", "error": "no"}, "{host} answered with an error: no"),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
async def test_f055_an_answer_that_is_none_is_trouble_and_neither_a_crash_nor_success(
    model: OpenAiModel, server: ModelServer, fault: dict[str, Any], message: str, stream: bool
) -> None:
    server.fault(**fault)
    outcome = await ask(model, server, stream=stream)
    assert outcome == not_done("bad_answer", message.format(host=f"127.0.0.1:{server.port}"))


async def test_an_error_inside_a_good_answer_counts_by_its_own_number(model: OpenAiModel, server: ModelServer) -> None:
    for error, kind, person in [
        ({"code": 429, "message": "slow down"}, "rate_limited", False),
        ({"code": 502, "message": "provider down"}, "server_error", False),
        ({"code": "401", "message": "who?"}, "credentials", True),
    ]:
        server.fault("error_body_200", error=error, after=2)
        message = f"127.0.0.1:{server.port} answered HTTP {error['code']}: {error['message']}"
        assert await ask(model, server) == not_done(kind, message, ask=person)
    server.fault("error_body_200", error={"code": "context_length_exceeded", "message": "no"}, after=1)
    assert (await ask(model, server)).error.kind == "context_overflow"
    server.fault("error_body_200", error={"type": "insufficient_quota", "message": "no"})
    assert await ask(model, server) == not_done(
        "quota", f"127.0.0.1:{server.port} answered with an error: no", ask=True
    )


CUT_OFF = "The connection to {host} ended in the middle of the answer."


@pytest.mark.parametrize(
    ("fault", "limits", "kind", "message", "text"),
    [
        ({"name": "cut_stream"}, {}, "stream_cut", CUT_OFF, "I "),
        ({"name": "cut_stream", "clean": True}, {}, "stream_cut", CUT_OFF, "I "),
        ({"name": "cut_stream", "after": 0}, {}, "stream_cut", CUT_OFF, ""),
        ({"name": "reset"}, {}, "connection_lost", "The connection to {host} ended before an answer came.", ""),
        *(
            (fault, {"first": 150}, "first_token_timeout", "{host} did not begin to answer for 150 ms.", "")
            for fault in ({"name": "stall_before_first"}, {"name": "stall_before_first", "comments": True})
        ),
        (
            {"name": "stall_in_stream", "after": 2},
            {"idle": 300},
            "idle_timeout",
            "{host} went silent for 300 ms.",
            "I ",
        ),
    ],
)
async def test_an_answer_that_breaks_off_was_not_done_and_the_connection_is_closed(
    model: OpenAiModel,
    server: ModelServer,
    fault: dict[str, Any],
    limits: dict[str, int],
    kind: str,
    message: str,
    text: str,
) -> None:
    server.fault(**fault)
    emitted: list[str] = []
    before = len(server.calls())
    first, idle = limits.get("first", 20_000), limits.get("idle", 20_000)
    with anyio.fail_after(15):
        outcome = await ask(model, server, emitted, first_token_timeout_ms=first, idle_timeout_ms=idle)
    assert outcome == not_done(kind, message.format(host=f"127.0.0.1:{server.port}"))
    assert "".join(emitted) == text
    server.wait("ended", before + 1)


@pytest.mark.parametrize("stream", [True, False])
async def test_f045_an_answer_without_an_end_is_given_up_at_a_bound(
    model: OpenAiModel, server: ModelServer, stream: bool
) -> None:
    server.fault("endless")
    with anyio.fail_after(60):
        outcome = await ask(model, server, stream=stream)
    assert outcome == not_done("bad_answer", f"The answer has more than {BODY_BYTES} bytes.")


async def test_a_stream_that_could_grow_when_it_is_unpacked_is_not_read(
    model: OpenAiModel, server: ModelServer
) -> None:
    server.fault("compressed")
    message = f"The answer of 127.0.0.1:{server.port} is compressed, which was not asked for."
    assert await ask(model, server) == not_done("bad_answer", message)


async def test_nobody_there_is_told_apart_from_a_lost_connection(model: OpenAiModel) -> None:
    outcome = await model.complete(asked(base_url="http://127.0.0.1:1/v1"), str)
    assert outcome == not_done("unreachable", "127.0.0.1:1 could not be reached; nothing was sent.")


async def test_a_slow_answer_is_no_silent_one(model: OpenAiModel, server: ModelServer) -> None:
    server.fault("slow_chunks", ms=20)
    assert await ask(model, server, idle_timeout_ms=5_000) == WHOLE


async def test_an_answer_that_said_why_it_ended_is_whole_though_its_end_never_comes(
    model: OpenAiModel, server: ModelServer
) -> None:
    all_but_the_usage = 1 + len(["I ", "charge ", "two."]) + 2 * len(calls()) + 1
    for name in ("stall_in_stream", "cut_stream"):
        server.fault(name, after=all_but_the_usage)
        reply = await ask(model, server, idle_timeout_ms=300)
        assert reply == ModelReply(text="I charge two.", calls=calls(), stop="tool_calls")


@pytest.mark.parametrize("how", ["cancelled", "total"])
async def test_a_call_that_is_given_up_closes_the_connection_at_once(server: ModelServer, how: str) -> None:
    server.fault("park", after=2)
    model = OpenAiModel(environ={"KEY": KEY})
    catalog = Catalog({"openai": lambda: model})
    gone = sum(call.ended == "gone" for call in server.calls())
    settings = {"base_url": server.base_url, "api_key_env": "KEY"}
    if how == "total":
        outcome = await catalog.complete(asked(**settings, timeout_ms=1_000), str)
        assert outcome == not_done("timeout", "No answer within 1000 ms.")
    else:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(catalog.complete, asked(**settings), str)
            await anyio.to_thread.run_sync(server.wait, "held")
            tasks.cancel_scope.cancel()
    server.wait("gone", gone + 1)
    await catalog.aclose()


# Calls


@pytest.mark.parametrize(
    ("fault", "reply"),
    [
        ({"name": "parallel_calls"}, WHOLE),
        ({"name": "fragmented_arguments"}, WHOLE),
        ({"name": "whole_call_in_one_delta"}, ModelReply(text="I charge two.", calls=calls(), stop="tool_calls")),
        ({"name": "no_index"}, calls()),
        ({"name": "same_index"}, calls()),
        ({"name": "same_index_and_id"}, calls("call", "call", "call")),
        ({"name": "duplicate_ids"}, calls("call", "call", "call")),
        ({"name": "empty_ids"}, calls("", "", "")),
        ({"name": "nothing_but_names"}, calls("", "", "")),
    ],
)
async def test_f051_no_call_is_lost_or_merged_whatever_stands_in_ids_and_indexes(
    model: OpenAiModel, server: ModelServer, fault: dict[str, Any], reply: ModelReply | tuple[AskedCall, ...]
) -> None:
    server.fault(**fault)
    expected = reply if isinstance(reply, ModelReply) else ModelReply(text="I charge two.", calls=reply, usage=USAGE)
    assert await ask(model, server) == expected


CUT = (
    "The call was cut off by the limit on the answer's length and was not run. Call again with shorter arguments, or in "
    "smaller parts."
)
BROKEN = "The arguments are not valid JSON (Input data was truncated), and the call was not run. Send them whole, as one object."


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("finish", "problem"), [("length", CUT), ("tool_calls", BROKEN)])
async def test_f053_a_cut_call_gets_a_problem_and_its_fragment_is_kept_nowhere(
    model: OpenAiModel, server: ModelServer, stream: bool, finish: str, problem: str
) -> None:
    server.script([{"calls": [*TURN["calls"][:2], {"name": "shop__charge", "arguments": {"order": "C3"}}]}])  # type: ignore[index]
    server.fault("cut_arguments", finish=finish)
    outcome = await ask(model, server, stream=stream)
    cut = AskedCall(tool="shop.charge", arguments={}, provider_id="call_2", problem=problem)
    assert outcome == ModelReply(calls=(*calls()[:2], cut), usage=USAGE, stop=finish)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"order": "A1", "amount": 10', BROKEN),
        (
            "{'order': 1}",
            BROKEN.replace("Input data was truncated", "JSON is malformed: object keys must be strings (byte 1)"),
        ),
        ("[1]", "The arguments must be a JSON object, not a list; the call was not run."),
        ('"{}"', "The arguments must be a JSON object, not a text; the call was not run."),
        ("null", "The arguments must be a JSON object, not null; the call was not run."),
        ("7", "The arguments must be a JSON object, not a number; the call was not run."),
        ("true", "The arguments must be a JSON object, not a boolean; the call was not run."),
        ('{"a":' * 200 + "1" + "}" * 200, "The arguments are nested more than 100 deep, and the call was not run."),
    ],
)
async def test_f053_arguments_that_are_no_object_are_told_and_never_run(
    model: OpenAiModel, server: ModelServer, text: str, problem: str
) -> None:
    server.fault("malformed_arguments", text=text)
    ids = ("call_0", "call_1", "call_2")
    expected = calls(*ids, **dict.fromkeys(ids, problem))
    assert await ask(model, server) == ModelReply(text="I charge two.", calls=expected, usage=USAGE, stop="tool_calls")


@pytest.mark.parametrize(
    ("fault", "stop", "problem"),
    [
        ("cut_text", "length", "The answer was cut off by the limit on its length. Answer again, more briefly."),
        (
            "content_filter",
            "content_filter",
            "The provider's content filter stopped the answer. Answer in another way.",
        ),
    ],
)
async def test_an_answer_that_cannot_be_used_is_paid_for_and_the_model_is_told(
    model: OpenAiModel, server: ModelServer, fault: str, stop: str, problem: str
) -> None:
    server.fault(fault)
    expected = ModelReply(text="I charge two.", usage=USAGE, stop=stop, problem=problem)
    assert await ask(model, server) == expected


def test_a_certificate_that_is_not_trusted_is_asked_about() -> None:
    error = httpx.ConnectError("no")
    error.__cause__ = OSError()
    error.__cause__.__context__ = ssl.SSLCertVerificationError()
    message = "The certificate of a.example is not trusted; nothing was sent."
    assert unreachable("a.example", error) == not_done("untrusted", message, ask=True)
