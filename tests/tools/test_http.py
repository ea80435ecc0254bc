"""HTTP tools against the counting service and against servers that misbehave byte by byte."""

from __future__ import annotations

import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio.abc import SocketAttribute, SocketStream
from rpcagent.runs.events import Trouble
from rpcagent.runs.outcomes import Failed, LookUp, Lost, NotDone, ToolReply
from rpcagent.tools.http import BODY_BYTES, Http
from rpcagent.tools.registry import Registry
from tests.service.driver import CountingService
from tests.tools.calls import KEY, inline, request_for

pytestmark = pytest.mark.anyio

CHARGE = {"type": "object", "properties": {"operation": {"type": "string"}, "amount": {"type": "number"}}}
LOST = Lost(reason="connection_lost")
NOW = datetime(2024, 5, 6, 7, 8, 9, tzinfo=UTC)


@pytest.fixture(scope="module")
def counting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CountingService]:
    with CountingService(tmp_path_factory.mktemp("service") / "truth") as running:
        yield running


@pytest.fixture
async def registry() -> AsyncIterator[Registry]:
    http = Http(environ={"TOKEN": "s3cret-token", "BAD": "a\nb"}, now=lambda: NOW)
    made = Registry(http=http)
    yield made
    await made.aclose()


def text(value: Any) -> dict[str, Any]:
    return {"type": "text", "text": value if isinstance(value, str) else json.dumps(value)}


@asynccontextmanager
async def raw_server(
    answer: bytes | Callable[[SocketStream], Awaitable[None]],
) -> AsyncIterator[tuple[str, list[bytes]]]:
    """Answers each connection with these bytes, and closes it. Gives the URL, and what each connection sent."""
    received: list[bytes] = []

    async def serve(stream: SocketStream) -> None:
        async with stream:
            request = await stream.receive()
            head, _, body = request.partition(b"\r\n\r\n")
            for line in head.split(b"\r\n"):
                name, _, value = line.partition(b":")
                if name.lower() == b"content-length":
                    while len(body) < int(value):
                        body += await stream.receive()
            received.append(head + b"\r\n\r\n" + body)
            if callable(answer):
                await answer(stream)
            else:
                await stream.send(answer)

    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, serve)
        yield f"http://127.0.0.1:{listener.extra(SocketAttribute.local_port)}", received
        tasks.cancel_scope.cancel()


def response(status: str, body: bytes = b"", content_type: str = "application/json", **headers: str) -> bytes:
    more = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
    head = f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n{more}\r\n"
    return head.encode() + body


# What is sent


async def test_s2_41_an_effect_carries_its_key_in_a_header_and_a_read_carries_none(registry: Registry) -> None:
    for effect in ("at_most_once", "idempotent", "read_only"):
        async with raw_server(response("200 OK", b"{}")) as (url, received):
            await registry.call(request_for(inline(http={"url": url}, effect=effect), {}))
        sent = [line for line in received[0].split(b"\r\n") if line.lower().startswith(b"idempotency-key")]
        assert sent == ([] if effect == "read_only" else [f"Idempotency-Key: {KEY}".encode()])


@pytest.mark.parametrize(
    ("http", "arguments", "line", "body"),
    [
        (
            {"url": "/t/{id}/{n}?key={key}"},
            {"id": "a/b?c#d e%é", "n": 7, "x": [1]},
            "POST /t/a%2Fb%3Fc%23d%20e%25%C3%A9/7?key=key_a HTTP/1.1",
            '{"x":[1]}',
        ),
        ({"url": "/t"}, {}, "POST /t HTTP/1.1", "{}"),
        ({"url": "/t", "body": "none"}, {"x": 1}, "POST /t HTTP/1.1", ""),
        ({"url": "/t", "method": "DELETE"}, {}, "DELETE /t HTTP/1.1", ""),
        ({"url": "/t", "method": "DELETE"}, {"x": 1}, "DELETE /t HTTP/1.1", '{"x":1}'),
        (
            {"url": "/t?a=b", "method": "GET"},
            {"x": "1&2", "y": [True, "é"], "z": None, "o": {"p": 1.5}},
            "GET /t?a=b&x=1%262&y=true&y=%C3%A9&o=%7B%22p%22%3A1.5%7D HTTP/1.1",
            "",
        ),
        ({"url": "/t/{key}", "method": "PUT"}, {"key": "mine"}, "PUT /t/key_a HTTP/1.1", '{"key":"mine"}'),
    ],
)
async def test_arguments_fill_the_url_percent_encoded_and_the_rest_goes_as_body_or_query(
    registry: Registry, http: dict[str, Any], arguments: dict[str, Any], line: str, body: str
) -> None:
    properties: dict[str, Any] = {name: {} for name in arguments}
    async with raw_server(response("200 OK", b"{}")) as (url, received):
        spec = inline(http={**http, "url": url + http["url"]}, parameters={"type": "object", "properties": properties})
        assert isinstance(await registry.call(request_for(spec, arguments)), ToolReply)
    head, _, sent = received[0].partition(b"\r\n\r\n")
    assert (head.split(b"\r\n")[0].decode(), sent.decode()) == (line, body)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "The argument 'id' must be a text or a number."),
        ("", "The argument 'id' must be a text or a number."),
        ({"a": 1}, "The argument 'id' must be a text or a number."),
        ("..", "An argument may not be `.` or `..`."),
        (".", "An argument may not be `.` or `..`."),
        ("\ud800", "The argument 'id' is not valid Unicode."),
    ],
)
async def test_f041_an_argument_that_would_change_the_shape_of_the_url_is_refused_and_nothing_is_sent(
    registry: Registry, value: Any, message: str
) -> None:
    async with raw_server(response("200 OK")) as (url, received):
        spec = inline(http={"url": url + "/t/{id}/close"}, parameters={"type": "object", "properties": {"id": {}}})
        outcome = await registry.call(request_for(spec, {"id": value}))
    assert (outcome, received) == (Failed(error=Trouble(kind="invalid_arguments", message=message)), [])


async def test_f039_a_secret_comes_from_the_environment_and_its_echo_is_replaced_by_its_name(
    registry: Registry,
) -> None:
    headers = {"Authorization": "Bearer ${TOKEN}", "content-type": "application/merge-patch+json"}
    async with raw_server(response("401 No", b'{"bad": "s3cret-token"}')) as (url, received):
        outcome = await registry.call(request_for(inline(http={"url": url, "headers": headers}), {}))
    assert b"Authorization: Bearer s3cret-token\r\n" in received[0]
    assert received[0].lower().count(b"content-type:") == 1
    assert outcome == ToolReply(
        result={
            "content": [text('HTTP 401\n{"bad": "${TOKEN}"}')],
            "structuredContent": {"bad": "${TOKEN}"},
            "isError": True,
        }
    )
    for name, message in [
        ("NONE", "The environment has no NONE."),
        ("BAD", "BAD holds something that no header can carry."),
    ]:
        outcome = await registry.call(request_for(inline(http={"url": url, "headers": {"A": f"${{{name}}}"}}), {}))
        assert outcome == Failed(error=Trouble(kind="missing_secret", message=message))


async def test_no_proxy_of_the_environment_is_used(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:1")
    async with raw_server(response("200 OK", b"{}")) as (url, received):
        assert isinstance(await registry.call(request_for(inline(http={"url": url}), {})), ToolReply)
    assert len(received) == 1


# What an end says


async def both(registry: Registry, answer: Any) -> list[Any]:
    """The outcomes of an effect and of a read, each asked exactly once."""
    return [await answered(registry, answer, effect) for effect in ("at_most_once", "read_only")]


async def answered(registry: Registry, answer: Any, effect: str) -> Any:
    more = {"lookup": {"url": "http://127.0.0.1:1/", "found": "done"}} if effect == "reconcilable" else {}
    async with raw_server(answer) as (url, received):
        outcome = await registry.call(request_for(inline(http={"url": url}, effect=effect, **more), {}))
    assert len(received) == 1
    return outcome


def failed(kind: str, message: str) -> Failed:
    return Failed(error=Trouble(kind=kind, message=message))


def reply(*content: Any, **more: Any) -> ToolReply:
    return ToolReply(result={"content": [text(part) for part in content], **more})


CUT_SHORT = failed("connection_lost", "The connection ended before the whole answer came.")
NO_TEXT = failed("not_text", "The answer is no text.")
REPLIES: list[tuple[bytes, Any, Any]] = [
    (b"", LOST, CUT_SHORT),
    (b"garbage\r\n\r\n", LOST, CUT_SHORT),
    (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{}", LOST, CUT_SHORT),
    (b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 2\r\n\r\n{}", LOST, CUT_SHORT),
    (response("500 No", b"{}"), LOST, failed("server_error", "HTTP 500.")),
    (response("503 No", b"{}"), LOST, failed("server_error", "HTTP 503.")),
    (response("200 OK", b"<html>", "text/html"), LOST, reply("<html>")),
    (response("200 OK", b'{"cut', "application/json"), LOST, reply('{"cut')),
    (response("200 OK", b"\xff\xfe"), LOST, NO_TEXT),
    (response("200 OK", b'{"n": 1e999}'), LOST, reply('{"n": 1e999}')),
    (response("200 OK", b"fine", "text/plain; charset=utf-8"), reply("fine"), reply("fine")),
    (response("200 OK", b'{"a": 1}'), *[reply('{"a": 1}', structuredContent={"a": 1})] * 2),
    (response("200 OK", b"[1]", "text/html"), *[reply("[1]")] * 2),
    (response("204 No Content"), *[reply("")] * 2),
    (response("404 Not Found", b"<html>", "text/html"), *[reply("HTTP 404\n<html>", isError=True)] * 2),
    (response("422 No", b'{"e": 1}'), *[reply('HTTP 422\n{"e": 1}', structuredContent={"e": 1}, isError=True)] * 2),
    (response("303 See", Location="/done"), *[reply("HTTP 303, location /done")] * 2),
    (response("307 Moved", Location="/new"), *[reply("HTTP 307, location /new", isError=True)] * 2),
]


@pytest.mark.parametrize(("answer", "effect", "read"), REPLIES)
async def test_only_a_definite_answer_ends_an_effect_and_everything_else_after_the_first_byte_is_lost(
    registry: Registry, answer: bytes, effect: Any, read: Any
) -> None:
    assert await both(registry, answer) == [effect, read]


@pytest.mark.parametrize(
    ("status", "retry_after", "wait_ms"),
    [
        ("429 Slow", "2", 2_000),
        ("429 Slow", "Mon, 06 May 2024 07:09:09 GMT", 60_000),
        ("429 Slow", "Mon, 06 May 2024 07:00:00 GMT", 0),
        ("429 Slow", "99999999999999999999", 86_400_000),
        ("429 Slow", f"Mon, 06 May {'9' * 40} 07:09:09 GMT", None),
        ("429 Slow", "soon", None),
        ("429 Slow", None, None),
    ],
)
async def test_f057_not_now_is_not_done_and_waits_as_long_as_the_server_asks(
    registry: Registry, status: str, retry_after: str | None, wait_ms: int | None
) -> None:
    headers = {} if retry_after is None else {"Retry_After": retry_after}
    error = Trouble(kind="busy", message=f"HTTP {status[:3]}: not now.")
    outcome = NotDone(error=error, retry_after_ms=wait_ms)
    assert await both(registry, response(status, b"{}", **headers)) == [outcome, outcome]


@pytest.mark.parametrize(
    ("effect", "lost"), [("read_only", False), ("idempotent", False), ("reconcilable", False), ("at_most_once", True)]
)
async def test_a_503_that_asks_to_wait_is_no_proof_that_an_at_most_once_effect_did_not_happen(
    registry: Registry, effect: str, lost: bool
) -> None:
    busy = NotDone(error=Trouble(kind="busy", message="HTTP 503: not now."), retry_after_ms=2_000)
    answer = response("503 Busy", b"{}", Retry_After="2")
    assert await answered(registry, answer, effect) == (LOST if lost else busy)


async def test_what_fails_before_a_connection_stands_did_nothing(registry: Registry) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound and not listening: refused
        host = f"127.0.0.1:{closed.getsockname()[1]}"
        for effect in ("at_most_once", "read_only"):
            outcome = await registry.call(request_for(inline(http={"url": f"http://{host}/"}, effect=effect), {}))
            error = Trouble(kind="unreachable", message=f"{host} could not be reached; nothing was sent.")
            assert outcome == NotDone(error=error)
    outcome = await registry.call(request_for(inline(http={"url": "http://nowhere.invalid/"}), {}))
    error = Trouble(kind="unreachable", message="nowhere.invalid could not be reached; nothing was sent.")
    assert outcome == NotDone(error=error)


async def test_a_connection_that_does_not_come_to_stand_in_time_did_nothing(registry: Registry) -> None:
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        host = f"127.0.0.1:{full.getsockname()[1]}"
        with socket.socket() as first, socket.socket() as second:
            for waiting in (first, second):  # they fill the backlog, and nobody accepts
                waiting.setblocking(False)
                waiting.connect_ex(full.getsockname())
            outcome = await registry.call(request_for(inline(http={"url": f"http://{host}/"}, timeoutMs=300), {}))
    error = Trouble(kind="unreachable", message=f"{host} could not be reached; nothing was sent.")
    assert outcome == NotDone(error=error)


async def test_f045_an_answer_without_end_is_read_up_to_the_limit(registry: Registry) -> None:
    async def flood(stream: SocketStream) -> None:
        await stream.send(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\n")
        try:
            while True:
                await stream.send(b"x" * 65_536)
        except anyio.BrokenResourceError:
            return

    for outcome in await both(registry, flood):
        assert isinstance(outcome, ToolReply)
        shown = outcome.result["content"][0]["text"]
        assert len(shown) < 70_000
        assert shown.endswith(f"x\n[the answer has more than {BODY_BYTES} bytes; the rest was not read]")


# Against the counting service


async def test_s2_28_an_effect_whose_reply_is_lost_is_lost_and_was_asked_for_once(
    registry: Registry, counting: CountingService
) -> None:
    before = counting.counts().calls.get("/charge", 0)
    for action, outcome in [("drop", LOST), ("hang", Lost(reason="timeout")), ("error:500", LOST)]:
        headers = {"X-Fault": f"{action}@after_effect"}
        http = {"url": counting.url + "/charge", "headers": headers}
        spec = inline(http=http, parameters=CHARGE, timeoutMs=1_000 if action == "hang" else 60_000)
        key = f"key_{action}"
        assert await registry.call(request_for(spec, {"operation": action}, key=key)) == outcome
        assert counting.counts().effects_by_key[key] == 1
    assert counting.counts().calls["/charge"] == before + 3
    counting.release()


async def test_the_same_key_again_is_one_effect_of_a_server_that_honours_it(
    registry: Registry, counting: CountingService
) -> None:
    spec = inline(http={"url": counting.url + "/charge-idempotent"}, parameters=CHARGE, effect="idempotent")
    for attempt in (1, 2):
        outcome = await registry.call(request_for(spec, {"operation": "o1"}, attempt=attempt, key="key_same"))
        body = {"path": "/charge-idempotent", "key": "key_same", "operation": "o1", "effects": 1, "ok": True}
        assert outcome == reply(body, structuredContent=body)
    counts = counting.counts()
    assert (counts.calls_by_key["key_same"], counts.effects_by_key["key_same"]) == (2, 1)


async def test_s4_28_a_look_up_finds_what_happened_and_what_did_not(
    registry: Registry, counting: CountingService
) -> None:
    look_up = {"found": "status == 'done'", "pending": "status == 'pending'", "absent": "status == 'absent'"}
    by = {
        "key": {"url": counting.url + "/lookup?key={key}", **look_up},
        "operation": {"url": counting.url + "/lookup?operation={operation}", **look_up},
        "404": {"url": counting.url + "/lookup?key={key}&as404=1", "found": "status == 'done'"},
    }
    for name, lookup in by.items():
        http = {"url": counting.url + "/charge-reconcilable", "headers": {"X-Fault": "drop@after_effect"}}
        spec = inline(http=http, parameters=CHARGE, effect="reconcilable", lookup={**lookup, "headers": {}})
        operation, key = f"op_{name}", f"key_{name}"
        request = request_for(spec, {"operation": operation}, key=key)
        assert await registry.look_up(request) == LookUp(answer="absent")
        assert await registry.call(request) == LOST
        shown = {"key": key, "operation": None} if name != "operation" else {"key": None, "operation": operation}
        body = {"status": "done", "effects": 1, **shown}
        assert await registry.look_up(request) == LookUp(
            answer="found", result=reply(body, structuredContent=body).result
        )
        assert counting.counts().effects_by_operation[operation] == 1


async def test_s4_28_a_look_up_is_pending_while_its_call_is_still_at_the_service(
    registry: Registry, counting: CountingService
) -> None:
    lookup = {"url": counting.url + "/lookup?key={key}", "found": "status == 'done'", "pending": "status == 'pending'"}
    http = {"url": counting.url + "/charge-reconcilable", "headers": {"X-Fault": "hang@before_effect"}}
    spec = inline(http=http, parameters=CHARGE, effect="reconcilable", lookup={**lookup, "headers": {}})
    request = request_for(spec, {}, key="key_pending")
    outcomes: list[Any] = []

    async def charge() -> None:
        outcomes.append(await registry.call(request))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(charge)
        await anyio.to_thread.run_sync(lambda: counting.wait_parked(point="before_effect"))
        assert await registry.look_up(request) == LookUp(answer="pending")
        counting.release()
    assert (await registry.look_up(request)).answer == "found"
    assert [type(outcome) for outcome in outcomes] == [ToolReply]


@pytest.mark.parametrize(
    "answer", [b"", response("500 No", b'{"x": 1}'), response("403 No", b'{"x": 1}'), response("200 OK", b"<html>")]
)
async def test_a_look_up_that_fails_is_unsure_and_carries_no_key_in_its_header(
    registry: Registry, answer: bytes
) -> None:
    async with raw_server(answer) as (url, received):
        spec = inline(http={"url": url}, effect="reconcilable", lookup={"url": url + "/l?k={key}", "found": "x"})
        assert await registry.look_up(request_for(spec, {})) == LookUp(answer="unsure")
    assert received[0].startswith(b"GET /l?k=key_a HTTP/1.1\r\n")
    assert b"idempotency-key" not in received[0].lower()


async def test_a_look_up_that_takes_too_long_is_unsure(registry: Registry) -> None:
    async def hang(_stream: SocketStream) -> None:
        await anyio.sleep_forever()

    async with raw_server(hang) as (url, _):
        lookup = {"url": url, "found": "x"}
        spec = inline(http={"url": url}, effect="reconcilable", timeoutMs=100, lookup=lookup)
        assert await registry.look_up(request_for(spec, {})) == LookUp(answer="unsure")


async def test_a_closed_adapter_opens_again_at_the_next_call(registry: Registry, tmp_path: Path) -> None:
    async with raw_server(response("200 OK", b"{}")) as (url, received):
        request = request_for(inline(http={"url": url}), {})
        for _ in range(2):
            assert await registry.call(request) == reply("{}", structuredContent={})
            await registry.aclose()
    assert len(received) == 2
