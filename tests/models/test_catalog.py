"""The catalog: one port over all providers, and nothing foreign crosses it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import anyio
import pytest
from rpcagent.errors import InvalidParams
from rpcagent.models.catalog import Catalog
from rpcagent.runs.definition import Definition, ModelSettings
from rpcagent.runs.events import Trouble
from rpcagent.runs.outcomes import Failed, ModelReply, NotDone
from rpcagent.runs.ports import Model, ModelRequest


def asked(settings: ModelSettings) -> ModelRequest:
    definition = Definition(agent="a", model=settings)
    return ModelRequest(
        run_id="run_a", step_id="stp_a_1", attempt=1, definition=definition, messages=(), request_hash="h"
    )


class Fake:
    """Counts how often it was made; raises or hangs as told."""

    made = 0

    def __init__(self, what: str) -> None:
        type(self).made += 1
        self.what = what

    async def complete(self, request: ModelRequest, emit: Callable[[str], None]) -> ModelReply:
        if self.what == "raise":
            raise RuntimeError("secret text")
        if self.what == "hang":
            await anyio.sleep_forever()
        return ModelReply(text=self.what)


def fake(what: str) -> Callable[[], Model]:
    return lambda: Fake(what)


@pytest.mark.anyio
async def test_the_scripted_provider_is_there_and_a_registered_one_is_made_once_at_its_first_use() -> None:
    Fake.made = 0
    catalog = Catalog()
    catalog.register("fake", fake("hello"))
    assert Fake.made == 0
    scripted = ModelSettings(script=({"text": "hi"},))
    assert await catalog.complete(asked(scripted), str) == ModelReply(text="hi")
    for _ in range(2):
        assert await catalog.complete(asked(ModelSettings(provider="fake")), str) == ModelReply(text="hello")
    assert Fake.made == 1
    with pytest.raises(ValueError, match="the provider 'fake' exists"):
        catalog.register("fake", fake("again"))


@pytest.mark.anyio
async def test_an_unknown_provider_failed_and_is_refused_at_start_with_those_that_exist() -> None:
    catalog = Catalog({"other": fake("x")})
    reason = "there is no model provider 'openai'; there are: other, scripted"
    outcome = await catalog.complete(asked(ModelSettings(provider="openai")), str)
    assert outcome == Failed(error=Trouble(kind="unknown_provider", message=reason))
    with pytest.raises(InvalidParams) as refused:
        catalog.check(ModelSettings(provider="openai"), "$.agent.model")
    assert refused.value.details == {"path": "$.agent.model.provider", "reason": reason}


@pytest.mark.parametrize(
    ("settings", "path"),
    [
        (ModelSettings(timeout_ms=0), "$.agent.model.timeoutMs"),
        (ModelSettings(script=({"text": "x"}, {"text": 1})), "$.agent.model.script[1].text"),
    ],
)
def test_settings_that_could_never_work_are_refused_at_start(settings: ModelSettings, path: str) -> None:
    with pytest.raises(InvalidParams) as refused:
        Catalog().check(settings, "$.agent.model")
    assert refused.value.details["path"] == path


@pytest.mark.anyio
async def test_f039_what_a_provider_raises_is_told_by_class_name_only_and_reported_whole() -> None:
    faults: list[tuple[str, str]] = []
    catalog = Catalog({"bad": fake("raise")}, lambda error, request: faults.append((str(error), request.step_id)))
    outcome = await catalog.complete(asked(ModelSettings(provider="bad")), str)
    assert outcome == Failed(error=Trouble(kind="crashed", message="The provider raised RuntimeError."))
    assert faults == [("secret text", "stp_a_1")]


@pytest.mark.anyio
async def test_a_provider_that_does_not_answer_in_time_did_nothing() -> None:
    outcome = await Catalog({"slow": fake("hang")}).complete(asked(ModelSettings(provider="slow", timeout_ms=1)), str)
    assert outcome == NotDone(error=Trouble(kind="timeout", message="No answer within 1 ms."))


@pytest.mark.anyio
async def test_a_cancellation_goes_through() -> None:
    with anyio.move_on_after(0) as scope:
        await Catalog({"slow": fake("hang")}).complete(asked(ModelSettings(provider="slow")), str)
    assert scope.cancelled_caught


def test_importing_the_adapters_imports_no_http_library_and_no_jmespath() -> None:
    code = (
        "import sys, rpcagent.models.catalog, rpcagent.tools.registry as r; r.Registry().resolve(['files'])\n"
        "print(sorted({'httpx', 'jmespath', 'rpcagent.models.scripted', 'email.utils'} & set(sys.modules)))"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert shown.stdout == "[]\n"
