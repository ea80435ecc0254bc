"""What the one version of jsonrpcserver must look like for the way it is entered and imported."""

from __future__ import annotations

import importlib.metadata
import inspect
import json
import subprocess
import sys
from typing import Any

import msgspec
import pytest
from rpcagent.rpc import dispatch
from rpcagent.rpc.dispatch import Error, Request, Success, dispatch_request


def in_a_fresh_process(code: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, timeout=60, check=False, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_version_is_the_one_that_was_examined() -> None:
    assert importlib.metadata.version("jsonrpcserver") == "5.0.9"


def test_the_entry_takes_methods_context_and_one_request() -> None:
    assert list(inspect.signature(dispatch_request).parameters) == ["methods", "context", "request"]
    assert inspect.iscoroutinefunction(dispatch_request)
    assert Request._fields == ("method", "params", "id")


@pytest.mark.anyio
async def test_a_call_gives_what_the_handler_gave_and_nothing_is_added() -> None:
    async def good(context: Any, params: Any) -> Any:
        return Success((context, params))

    async def bad(context: Any, params: Any) -> Any:
        return Error(-32050, "message", {"data": 1})

    methods = {"good": good, "bad": bad}
    request, result = await dispatch_request(methods, "context", Request("good", [msgspec.UNSET], 7))
    assert (request.id, type(result), result._value.result) == (7, dispatch._Right, ("context", msgspec.UNSET))
    _, result = await dispatch_request(methods, "context", Request("bad", [None], 7))
    assert tuple(result._error) == (-32050, "message", {"data": 1})
    assert not isinstance(result, dispatch._Right)
    _, result = await dispatch_request(methods, "context", Request("none", [None], 7))
    assert result._error.code == -32601


def test_the_signature_of_an_entry_is_computed_once() -> None:
    async def handler(context: Any, params: Any) -> Any:
        return None

    class Nothing(msgspec.Struct):
        pass

    method = dispatch.Method(Nothing, handler, mutating=False, inline=True)
    entry = dispatch.Dispatcher({"m": method}, on_incident=lambda _e, _m: "")._entries["m"]
    assert inspect.signature(entry) is entry.__signature__  # type: ignore[attr-defined]


def test_the_import_loads_no_schema_library_and_no_http_server_and_leaves_no_stand_in() -> None:
    code = """
import json, sys
import rpcagent.rpc.dispatch
unwanted = ("jsonrpcserver", "jsonrpcserver.main", "jsonschema", "referencing", "attrs", "http.server", "oslash", "logging.config")
print(json.dumps([name for name in unwanted if name in sys.modules]))
"""
    assert in_a_fresh_process(code) == []


def test_the_real_libraries_can_be_imported_afterwards() -> None:
    code = """
import json
import warnings
import rpcagent.rpc.dispatch
warnings.simplefilter("ignore")
import http.server, jsonrpcserver, jsonschema, oslash
jsonschema.validate(1, {"type": "integer"})
same = jsonrpcserver.Success is rpcagent.rpc.dispatch.Success
print(json.dumps([http.server.HTTPServer.__name__, oslash.Right(1).__class__.__name__, same]))
"""
    assert in_a_fresh_process(code) == ["HTTPServer", "Right", True]


def test_libraries_that_were_imported_before_stay_as_they_are() -> None:
    code = """
import json, sys
import http.server
before = sys.modules["http.server"]
import rpcagent.rpc.dispatch
print(json.dumps(sys.modules["http.server"] is before))
"""
    assert in_a_fresh_process(code) is True
