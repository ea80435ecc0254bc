"""Every vector of protocol/conformance.jsonl against the framing and the dispatch, as one piece and byte by byte."""

from __future__ import annotations

import asyncio
import base64
import json
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rpcagent.rpc.dispatch import Dispatcher, Method, Session
from rpcagent.transport.framing import FRAME_BYTES_MAX, Framer

VECTORS = Path(__file__).parents[2] / "protocol" / "conformance.jsonl"
CASES = [json.loads(line) for line in VECTORS.read_text(encoding="utf-8").splitlines()]
BYTE_BY_BYTE_MAX = 20_000


class NoParams(msgspec.Struct, forbid_unknown_fields=True):
    pass


class Value(msgspec.Struct, forbid_unknown_fields=True):
    value: Any = None


class X(msgspec.Struct, forbid_unknown_fields=True):
    x: Any = None


class Sum(msgspec.Struct, forbid_unknown_fields=True):
    a: int
    b: int


class Kind(msgspec.Struct, forbid_unknown_fields=True):
    kind: str


class Counter:
    def __init__(self) -> None:
        self.count = 0


async def echo(_: Counter, params: Value) -> Any:
    return params.value


async def add(_: Counter, params: Sum) -> Any:
    return params.a + params.b


async def count(counter: Counter, _: NoParams) -> Any:
    return counter.count


async def set_(counter: Counter, _: X) -> Any:
    counter.count += 1
    return counter.count


async def boom(_: Counter, __: NoParams) -> Any:
    raise RuntimeError("secret")


async def unserialisable(_: Counter, params: Kind) -> Any:
    deep: list[Any] = []
    for _level in range(100_000):
        deep = [deep]
    return {
        "object": object(),
        "nan": math.nan,
        "infinity": -math.inf,
        "nested infinity": {"a": [None, (1, {"b": math.inf})]},
        "surrogate": "\ud800",
        "deep": deep,
    }[params.kind]


METHODS = {
    "echo": Method(Value, echo, mutating=False, inline=True),
    "add": Method(Sum, add, mutating=False, inline=False),
    "count": Method(NoParams, count, mutating=False, inline=True),
    "set": Method(X, set_, mutating=True, inline=False),
    "boom": Method(NoParams, boom, mutating=False, inline=True),
    "unserialisable": Method(Kind, unserialisable, mutating=False, inline=True),
}


async def answers(chunks: list[bytes], limit: int) -> list[bytes]:
    framer, out, tasks = Framer(limit), [], []
    session = Session(
        Dispatcher(METHODS, on_incident=lambda _error, _method: "incident"),
        Counter(),
        lambda message: out.append(framer.encode(message)),
        lambda work: tasks.append(asyncio.create_task(work)),
    )
    for chunk in chunks:
        await session.feed(framer.feed(chunk))
    await session.feed(framer.finish())
    await session.settled()
    await asyncio.gather(*tasks)
    back = Framer()
    read = [frame for message in out for frame in back.feed(message)]
    assert back.framing is framer.framing or not out
    assert back.finish() == []
    return read


def strict(answer: bytes, **kinds: Any) -> Any:
    def refuse(word: str) -> Any:
        raise ValueError(word)

    return json.loads(answer.decode("utf-8"), parse_constant=refuse, **kinds)


def typed(value: Any) -> str:
    """So that 1, 1.0 and true differ."""
    return json.dumps(value, sort_keys=True)


def check_one(answer: Any, text: Any, expected: dict[str, Any]) -> None:
    assert answer["jsonrpc"] == "2.0"
    if "idText" in expected:
        assert text["id"] == expected["idText"]
    else:
        assert typed(answer["id"]) == typed(expected["id"])
    if "error" not in expected:
        assert set(answer) == {"jsonrpc", "id", "result"}
        assert typed(answer["result"]) == typed(expected["result"])
        return
    assert set(answer) == {"jsonrpc", "id", "error"}
    error, wanted = answer["error"], expected["error"]
    assert set(error) == {"code", "message", "data"}
    assert type(error["message"]) is str
    assert error["code"] == wanted["code"]
    assert {name: error["data"].get(name) for name in wanted["data"]} == wanted["data"]


@pytest.mark.anyio
@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
async def test_a_vector_gives_the_answers_it_expects_f003_f013_f015_f016(case: dict[str, Any]) -> None:
    data = b"".join(base64.b64decode(part) * times for part, times in case["input"])
    limit = case.get("maxFrameBytes", FRAME_BYTES_MAX)
    async with asyncio.timeout(60):
        got = await answers([data], limit)
        if len(data) <= BYTE_BY_BYTE_MAX:
            assert await answers([data[i : i + 1] for i in range(len(data))], limit) == got
    assert len(got) == len(case["expect"]), got
    for answer, expected in zip(got, case["expect"], strict=True):
        assert b"secret" not in answer
        assert b"\n" not in answer
        value, text = strict(answer), strict(answer, parse_float=str, parse_int=str)
        if isinstance(expected, list):
            assert len(value) == len(expected)
            for item, item_text, item_expected in zip(value, text, expected, strict=True):
                check_one(item, item_text, item_expected)
        else:
            check_one(value, text, expected)


def test_the_vectors_are_well_formed() -> None:
    assert len(CASES) >= 93
    assert len({case["name"] for case in CASES}) == len(CASES)
    for case in CASES:
        assert set(case) <= {"name", "input", "maxFrameBytes", "expect"}
