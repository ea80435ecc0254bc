"""An endpoint that misbehaves on demand, and the provider that asks it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
from rpcagent.models.openai import OpenAiModel
from tests.models.asking import KEY, LATER, TURN
from tests.service.model_driver import ModelServer


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelServer]:
    with ModelServer(tmp_path_factory.mktemp("models") / "log", [TURN, LATER], key=KEY) as server:
        yield server


@pytest.fixture
def server(running: ModelServer) -> Iterator[ModelServer]:
    running.script([TURN, LATER])
    yield running
    running.clear()
    running.release()


@pytest.fixture
async def model() -> AsyncIterator[OpenAiModel]:
    made = OpenAiModel(environ={"KEY": KEY, "WRONG": "sk-wrong-0123456789"})
    yield made
    await made.aclose()
