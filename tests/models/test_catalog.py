"""The catalog: one port over all providers, and nothing foreign crosses it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import anyio
import pytest
from msgspec.structs import replace
from rpcagent.errors import InvalidParams
from rpcagent.models.catalog import Catalog
from rpcagent.runs.definition import Definition, ModelSettings
from rpcagent.runs.effects import ToolSpec
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
    reason = "there is no model provider 'nobody'; there are: openai, other, scripted"
    outcome = await catalog.complete(asked(ModelSettings(provider="nobody")), str)
    assert outcome == Failed(error=Trouble(kind="unknown_provider", message=reason))
    with pytest.raises(InvalidParams) as refused:
        catalog.check(ModelSettings(provider="nobody"), "$.agent.model")
    assert refused.value.details == {"path": "$.agent.model.provider", "reason": reason}


@pytest.mark.parametrize(
    ("settings", "path"),
    [
        (ModelSettings(timeout_ms=0), "$.agent.model.timeoutMs"),
        (ModelSettings(timeout_ms=10**17), "$.agent.model.timeoutMs"),
        (ModelSettings(retry_for_ms=10**17), "$.agent.model.retryForMs"),
        (ModelSettings(provider="openai", idle_timeout_ms=10**17), "$.agent.model.idleTimeoutMs"),
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


@pytest.mark.parametrize(
    ("settings", "path"),
    [
        ({"base_url": "ftp://a"}, "baseUrl"),
        ({"base_url": "http://"}, "baseUrl"),
        ({"base_url": "http://a b"}, "baseUrl"),
        ({"base_url": "http://[a"}, "baseUrl"),
        ({"base_url": "http://a:b@c"}, "baseUrl"),
        ({"base_url": "http://a/#b"}, "baseUrl"),
        ({"base_url": "http://a/v1?version=1&api-key=something"}, "baseUrl"),
        ({"api_key_env": "sk-something-secret"}, "apiKeyEnv"),
        ({"headers": {"a b": "c"}}, "headers"),
        ({"headers": {"Host": "c"}}, "headers"),
        ({"headers": {"Authorization": "Bearer sk-something"}}, "headers"),
        ({"headers": {"api-key": "something"}}, "headers"),
        ({"options": {"messages": []}}, "options"),
        ({"options": {"stream": False}}, "options"),
        ({"connect_timeout_ms": 0}, "connectTimeoutMs"),
        ({"first_token_timeout_ms": 0}, "firstTokenTimeoutMs"),
        ({"idle_timeout_ms": 0}, "idleTimeoutMs"),
    ],
)
def test_f039_an_endpoint_that_could_not_be_asked_or_would_put_a_secret_into_the_log_is_refused_at_start(
    settings: dict[str, Any], path: str
) -> None:
    with pytest.raises(InvalidParams) as refused:
        Catalog().check(ModelSettings(provider="openai", **settings), "$.agent.model")
    assert refused.value.details["path"] == f"$.agent.model.{path}"
    assert "something" not in str(refused.value)


def test_an_endpoint_with_references_is_taken() -> None:
    headers = {"api-key": "${AZURE_KEY}", "X-Title": "a"}
    Catalog().check(ModelSettings(provider="openai", base_url="https://a.example/v1?api-version=1", headers=headers))
    Catalog().check(ModelSettings(provider="openai"))


@pytest.mark.anyio
async def test_every_providers_calls_are_checked_against_the_schemas_of_their_tools() -> None:
    tools = (ToolSpec(name="a.b", parameters={"type": "object", "properties": {"n": {"type": "integer"}}}),)
    script = ({"calls": [{"tool": "a.b", "arguments": {"n": 1}}, {"tool": "a.b", "arguments": {"n": "1"}}]},)
    definition = Definition(agent="a", model=ModelSettings(script=script), tools=tools)
    outcome = await Catalog().complete(replace(asked(ModelSettings()), definition=definition), str)
    assert isinstance(outcome, ModelReply)
    problem = 'The arguments do not fit a.b, and it was not run: `n` must be a whole number, not "1"'
    assert [call.problem for call in outcome.calls] == ["", problem]


def test_importing_the_daemon_imports_no_http_library_no_schema_library_and_no_jmespath() -> None:
    code = (
        "import sys, rpcagent.daemon, rpcagent.models.catalog as c, rpcagent.tools.registry as r\n"
        "c.Catalog(); r.Registry().resolve(['files'])\n"
        "print(sorted({'httpx', 'httpx_sse', 'httpcore', 'openai', 'jsonschema', 'referencing', 'jmespath', 'email.utils',"
        " 'rpcagent.models.scripted', 'rpcagent.models.openai'} & set(sys.modules)))\n"
        "import jsonschema, jsonrpcserver\n"
        "print(jsonschema.Draft202012Validator({'type': 'object'}).is_valid(1), jsonrpcserver.dispatch.__name__)"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert shown.stdout == "[]\nFalse dispatch_to_json\n"
