"""How the model server answers, by the name of the fault; "" is the answer as the script has it.

`play(out, fault, turn, body)`: `out` is the handler, with its means to answer whole, piece by piece, to cut and to hold.
Members of a fault beside its name are said with each.
"""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

Fault = dict[str, Any]
Play = Callable[[Any, Fault, dict[str, Any], dict[str, Any]], None]

OVERFLOWS: dict[str, tuple[int, dict[str, Any]]] = {
    "openai": (400, {"error": {
        "message": "This model's maximum context length is 8192 tokens. However, your messages resulted in 9000 tokens.",
        "type": "invalid_request_error", "param": "messages", "code": "context_length_exceeded"}}),
    "vllm": (400, {"object": "error", "message":
        "The prompt (total length 9000) is too long to fit into the model (context length 8192).",
        "type": "BadRequestError", "param": None, "code": 400}),
    "vllm_tokens": (400, {"error": {"message":
        "'max_tokens' is too large: 4000. This model's maximum context length is 8192 tokens and your request has 5000.",
        "type": "BadRequestError", "param": None, "code": 400}}),
    "llama_cpp": (400, {"error": {
        "code": 400, "message": "the request exceeds the available context size, try increasing it",
        "type": "exceed_context_size_error", "n_prompt_tokens": 9000, "n_ctx": 8192}}),
    "llama_cpp_500": (500, {"error": {
        "code": 500, "message": "the request exceeds the available context size. try increasing the context size",
        "type": "server_error"}}),
    "ollama": (400, {"error": "input length exceeds maximum context length"}),
    "ollama_500": (500, {"error": {"message": "prompt too long; exceeded max context length by 808 tokens",
        "type": "api_error", "param": None, "code": None}}),
    "litellm": (400, {"error": {
        "message": "litellm.ContextWindowExceededError: litellm.BadRequestError: input is too long for the model",
        "type": None, "param": None, "code": "400"}}),
    "anthropic": (400, {"error": {"message": "prompt is too long: 209000 tokens > 200000 maximum",
        "type": "invalid_request_error"}}),
    "limit": (400, {"error": {"message": "Input tokens exceed the configured limit of 272000 tokens.",
        "type": "invalid_request_error", "code": "string_too_long"}}),
}  # fmt: skip


def play(out: Any, fault: Fault, turn: dict[str, Any], body: dict[str, Any]) -> None:
    PLAYS[fault.get("name", "")](out, fault, turn, body)


def _plain(out: Any, _fault: Fault, turn: dict[str, Any], body: dict[str, Any]) -> None:
    if body.get("stream"):
        _stream(out, list(_chunks(turn, body)))
    else:
        out.answer(200, _whole(turn))


def _stream(out: Any, chunks: list[Any]) -> None:
    out.begin()
    for chunk in chunks:
        out.send(chunk)
    out.send(b"data: [DONE]\n\n")
    out.finish()


def _whole(turn: dict[str, Any], **more: Any) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": turn.get("text") or None}
    calls = turn.get("calls", [])
    if calls:
        message["tool_calls"] = [_call(call, place) for place, call in enumerate(calls)]
    finish = turn.get("finish") or ("tool_calls" if calls else "stop")
    choice = {"index": 0, "message": message, "finish_reason": finish}
    return {"object": "chat.completion", "choices": [choice], "usage": turn.get("usage", USAGE), **more}


USAGE = {"prompt_tokens": 11, "completion_tokens": 7, "total_tokens": 18}


def _call(call: dict[str, Any], place: int) -> dict[str, Any]:
    arguments = call.get("arguments", {})
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {
        "id": call.get("id", f"call_{place}"),
        "type": "function",
        "function": {"name": call["name"], "arguments": text},
    }


def _chunk(delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return {"object": "chat.completion.chunk", "choices": [choice], "usage": None}


def _chunks(turn: dict[str, Any], body: dict[str, Any], size: int = 1_000_000) -> Iterator[dict[str, Any]]:
    """As OpenAI streams it: text by words, calls by index with their arguments in pieces, the usage last."""
    yield _chunk({"role": "assistant", "content": ""})
    words = turn.get("text", "").split(" ")
    for place, word in enumerate(words):
        if turn.get("text"):
            yield _chunk({"content": word if place == len(words) - 1 else word + " "})
    for place, call in enumerate(turn.get("calls", [])):
        whole = _call(call, place)
        text = whole["function"]["arguments"]
        yield _chunk({"tool_calls": [{"index": place, **whole, "function": {"name": call["name"], "arguments": ""}}]})
        for start in range(0, len(text), size):
            yield _chunk({"tool_calls": [{"index": place, "function": {"arguments": text[start : start + size]}}]})
    yield _chunk({}, turn.get("finish") or ("tool_calls" if turn.get("calls") else "stop"))
    if (body.get("stream_options") or {}).get("include_usage"):
        yield {"object": "chat.completion.chunk", "choices": [], "usage": turn.get("usage", USAGE)}


def _refusal(status: int, message: str, kind: str, **more: Any) -> Play:
    return lambda out, _fault, _turn, _body: out.refuse(status, message, kind, **more)


def _waiting(status: int, message: str, kind: str) -> Play:
    """`seconds`, `date` (seconds from now) or `ms`: the header that says when; none: no header."""

    def play_waiting(out: Any, fault: Fault, _turn: dict[str, Any], _body: dict[str, Any]) -> None:
        headers = {str(name): str(value) for name, value in fault.get("headers", {}).items()}
        if "seconds" in fault:
            headers["Retry-After"] = str(fault["seconds"])
        if "ms" in fault:
            headers["Retry-After-Ms"] = str(fault["ms"])
        if "date" in fault:
            headers["Retry-After"] = format_datetime(datetime.now(UTC) + timedelta(seconds=fault["date"]), usegmt=True)
        out.refuse(status, message, kind, headers)

    return play_waiting


def _server_error(out: Any, fault: Fault, _turn: dict[str, Any], _body: dict[str, Any]) -> None:
    """`status`, default 500."""
    out.refuse(fault.get("status", 500), "The server had an error.", "server_error")


def _body(raw: Any, content_type: str = "application/json") -> Play:
    return lambda out, _fault, _turn, _body: out.answer(200, raw, {"Content-Type": content_type})


def _error_body(out: Any, fault: Fault, _turn: dict[str, Any], body: dict[str, Any]) -> None:
    """`error`: what stands in the body. A streamed request gets it as an event, after `after` chunks."""
    error = {"error": fault.get("error", {"message": "upstream provider failed", "type": "upstream"})}
    if not body.get("stream") or "after" not in fault:
        out.answer(200, error)
        return
    _stream(out, [*list(_chunks(_turn, body))[: fault["after"]], error])


def _choices(choices: Any) -> Play:
    def play_choices(out: Any, _fault: Fault, _turn: dict[str, Any], body: dict[str, Any]) -> None:
        answer = {"choices": choices, "usage": USAGE}
        if body.get("stream"):
            _stream(out, [answer])
        else:
            out.answer(200, answer)

    return play_choices


def _null_content(out: Any, _fault: Fault, _turn: dict[str, Any], body: dict[str, Any]) -> None:
    if body.get("stream"):
        _stream(out, [_chunk({"role": "assistant", "content": None}), _chunk({}, "stop")])
    else:
        out.answer(200, _whole({"text": None}))


def _cut_stream(out: Any, fault: Fault, turn: dict[str, Any], body: dict[str, Any]) -> None:
    """`after` chunks, default 2; `clean`: the stream ends as if it were whole, without saying why."""
    out.begin()
    for chunk in list(_chunks(turn, body))[: fault.get("after", 2)]:
        out.send(chunk)
    if fault.get("clean"):
        out.finish()
    else:
        out.cut()


def _reset(out: Any, _fault: Fault, _turn: dict[str, Any], _body: dict[str, Any]) -> None:
    out.cut()


def _stall(out: Any, fault: Fault, turn: dict[str, Any], body: dict[str, Any]) -> None:
    """Holds after `after` chunks (default 1), until it is released, and then goes on."""
    chunks = list(_chunks(turn, body))
    after = fault.get("after", 1)
    out.begin()
    for chunk in chunks[:after]:
        out.send(chunk)
    out.hold()
    for chunk in chunks[after:]:
        out.send(chunk)
    out.send(b"data: [DONE]\n\n")
    out.finish()


def _stall_first(out: Any, fault: Fault, turn: dict[str, Any], body: dict[str, Any]) -> None:
    """`comments`: keeps the line open with comments first, as gateways do."""
    if fault.get("comments"):
        out.begin()
        out.send(b": processing\n\n")
    out.hold()


def _endless(out: Any, _fault: Fault, _turn: dict[str, Any], body: dict[str, Any]) -> None:
    """One line, or one text, without an end."""
    if body.get("stream"):
        out.begin()
        out.send(b"data: ")
    else:
        out.begin("application/json")
    while True:
        out.send(b"x" * 65_536)


def _compressed(out: Any, _fault: Fault, turn: dict[str, Any], body: dict[str, Any]) -> None:
    events = b"".join(b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in _chunks(turn, body))
    headers = {"Content-Type": "text/event-stream", "Content-Encoding": "gzip"}
    out.answer(200, gzip.compress(events), headers)


def _slow(out: Any, fault: Fault, turn: dict[str, Any], body: dict[str, Any]) -> None:
    """`ms` between chunks, default 50."""
    out.begin()
    for chunk in _chunks(turn, body):
        out.send(chunk)
        time.sleep(fault.get("ms", 50) / 1_000)
    out.send(b"data: [DONE]\n\n")
    out.finish()


def _fragmented(out: Any, fault: Fault, turn: dict[str, Any], body: dict[str, Any]) -> None:
    """Arguments in pieces of `size` characters, default 1; the pieces of all calls interleaved."""
    chunks = list(_chunks(turn, body, fault.get("size", 1)))
    calls = [chunk for chunk in chunks if chunk["choices"] and chunk["choices"][0]["delta"].get("tool_calls")]
    rest = [chunk for chunk in chunks if chunk not in calls]
    by_index: dict[int, list[Any]] = {}
    for chunk in calls:
        by_index.setdefault(chunk["choices"][0]["delta"]["tool_calls"][0]["index"], []).append(chunk)
    queues = list(by_index.values())
    mixed = [queue.pop(0) for _ in range(len(calls)) for queue in queues if queue]
    last = next(place for place, chunk in enumerate(rest) if chunk["choices"] and chunk["choices"][0]["finish_reason"])
    _stream(out, [*rest[:last], *mixed, *rest[last:]])


def _with(change: Callable[[dict[str, Any], Fault], dict[str, Any]]) -> Play:
    return lambda out, fault, turn, body: _plain(out, fault, change(turn, fault), body)


def _malformed(turn: dict[str, Any], fault: Fault) -> dict[str, Any]:
    """`text`: the arguments of every call, default one with a missing brace."""
    text = fault.get("text", '{"order": "A1", "amount": 10')
    return {**turn, "calls": [{**call, "arguments": text} for call in turn.get("calls", [])]}


def _cut_arguments(turn: dict[str, Any], fault: Fault) -> dict[str, Any]:
    """The last call's arguments end early; `finish` says why, default length."""
    *before, last = turn["calls"]
    text = json.dumps(last.get("arguments", {}))
    cut = {**last, "arguments": text[: len(text) // 2]}
    return {**turn, "calls": [*before, cut], "finish": fault.get("finish", "length")}


def _rewritten(change: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]) -> Play:
    """Each call whole in a piece of its own, changed."""

    def play_rewritten(out: Any, _fault: Fault, turn: dict[str, Any], body: dict[str, Any]) -> None:
        calls = [{"index": place, **_call(call, place)} for place, call in enumerate(turn.get("calls", []))]
        if not body.get("stream"):
            out.answer(
                200,
                _whole(
                    {**turn, "calls": [{**call, **was} for call, was in zip(turn["calls"], change(calls), strict=True)]}
                ),
            )
            return
        head = list(_chunks({**turn, "calls": []}, body))
        last = next(p for p, chunk in enumerate(head) if chunk["choices"] and chunk["choices"][0]["finish_reason"])
        pieces = [_chunk({"tool_calls": [call]}) for call in change(calls)]
        _stream(out, [*head[:last], *pieces, *head[last:]])

    return play_rewritten


def _one_delta(out: Any, _fault: Fault, turn: dict[str, Any], body: dict[str, Any]) -> None:
    """All calls whole in one piece, with the reason why it ends, and no index."""
    calls = [_call(call, place) for place, call in enumerate(turn.get("calls", []))]
    _stream(out, [_chunk({"role": "assistant", "content": turn.get("text"), "tool_calls": calls}, "tool_calls")])


def _overflow(out: Any, fault: Fault, _turn: dict[str, Any], _body: dict[str, Any]) -> None:
    """`flavour`: one of OVERFLOWS, default openai."""
    out.answer(*OVERFLOWS[fault.get("flavour", "openai")])


def _stream_options(out: Any, fault: Fault, turn: dict[str, Any], body: dict[str, Any]) -> None:
    """Refuses the option, and answers a request without it. `status`, default 400."""
    if "stream_options" in body:
        message = "Unrecognized request argument supplied: stream_options"
        out.refuse(fault.get("status", 400), message, "invalid_request_error")
    else:
        _plain(out, fault, turn, body)


def _echo_key(out: Any, fault: Fault, turn: dict[str, Any], body: dict[str, Any]) -> None:
    """Says the key it was given: with `status` (default 401) in an error; with 200 in the answer, cut in pieces."""
    key = out.headers.get("Authorization", "").removeprefix("Bearer ")
    status = fault.get("status", 401)
    if status != 200:
        message = f"Incorrect API key provided: {key}, also {key[:4]}****{key[-4:]}."
        out.refuse(status, message, "invalid_request_error", {"X-Echo": key})
        return
    text = f"Your key is {key}, is it not?"
    calls = [{**call, "arguments": {"key": key}} for call in turn.get("calls", [])]
    chunks = list(_chunks({**turn, "text": "", "calls": calls}, body, 3))
    pieces = [_chunk({"content": text[start : start + 5]}) for start in range(0, len(text), 5)]
    _stream(out, [chunks[0], *pieces, *chunks[1:]])


PLAYS: dict[str, Play] = {
    "": _plain,
    "rate_limited": _waiting(429, "Rate limit reached for requests", "requests"),
    "overloaded": _waiting(503, "Loading model", "unavailable_error"),
    "overloaded_529": _waiting(529, "Overloaded", "overloaded_error"),
    "server_error": _server_error,
    "unauthorized": _refusal(401, "Invalid credentials.", "invalid_request_error", code="invalid_api_key"),
    "not_found": _refusal(404, "The model `m` does not exist.", "NotFoundError", code="model_not_found"),
    "wrong_place": _refusal(404, "404 page not found", "not_found"),
    "quota": _refusal(429, "You exceeded your current quota.", "insufficient_quota", code="insufficient_quota"),
    "payment": _refusal(402, "Insufficient credits.", "payment_required"),
    "redirect": lambda out, _fault, _turn, _body: out.answer(307, {}, {"Location": "http://127.0.0.1:1/elsewhere"}),
    "html": _body(b"<!DOCTYPE html><html><body>Sign in</body></html>", "text/html"),
    "empty_body": _body(b""),
    "no_json": _body(b'{"choices": ['),
    "empty_choices": _choices([]),
    "null_choices": _choices(None),
    "null_content": _null_content,
    "error_body_200": _error_body,
    "cut_stream": _cut_stream,
    "reset": _reset,
    "stall_before_first": _stall_first,
    "stall_in_stream": _stall,
    "park": _stall,
    "slow_chunks": _slow,
    "endless": _endless,
    "compressed": _compressed,
    "fragmented_arguments": _fragmented,
    "malformed_arguments": _with(_malformed),
    "cut_arguments": _with(_cut_arguments),
    "cut_text": _with(lambda turn, _fault: {**turn, "calls": [], "finish": "length"}),
    "content_filter": _with(lambda turn, _fault: {**turn, "calls": [], "finish": "content_filter"}),
    "no_index": _rewritten(lambda calls: [{k: v for k, v in call.items() if k != "index"} for call in calls]),
    "same_index": _rewritten(lambda calls: [{**call, "index": 0} for call in calls]),
    "same_index_and_id": _rewritten(lambda calls: [{**call, "index": 0, "id": "call"} for call in calls]),
    "duplicate_ids": _rewritten(lambda calls: [{**call, "id": "call"} for call in calls]),
    "empty_ids": _rewritten(lambda calls: [{**call, "id": ""} for call in calls]),
    "nothing_but_names": _rewritten(lambda calls: [{"function": call["function"]} for call in calls]),
    "whole_call_in_one_delta": _one_delta,
    "parallel_calls": _plain,
    "context_overflow": _overflow,
    "bad_history": _refusal(400, "tool_calls must be followed by tool messages", "invalid_request_error"),
    "bad_request": _refusal(400, "Invalid schema for function 'a': type is not object", "invalid_request_error"),
    "refuses_stream_options": _stream_options,
    "echo_key": _echo_key,
}  # fmt: skip
