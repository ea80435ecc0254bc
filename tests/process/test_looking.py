"""`runs`, `show`, `tail` and `serve --hold` look at a store without letting anything of it go on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.process.outside import Seen, agent, seen
from tests.process.wire_driver import Daemon
from tests.service.driver import CountingService

pytestmark = pytest.mark.process


def test_looking_at_a_run_that_was_killed_in_mid_effect_sends_nothing_again(tmp_path: Path):
    store = tmp_path / "store"
    with CountingService(tmp_path / "truth") as service:
        with Daemon(store) as daemon:
            service.park("after_effect")
            described = agent(service, "idempotent", "op")
            run_id = daemon.call("start", clientRequestId="run", agent=described, input="go")["runId"]
            service.wait_parked(20)
            daemon.kill()
        service.release()
        for words in (["runs"], ["show", run_id], ["tail", run_id]):
            command = [sys.executable, "-P", "-m", "rpcagent", *words, "--store", str(store), "--json"]
            done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
            assert (done.returncode, run_id in done.stdout) == (0, True), done.stderr
        assert seen(service, "op") == Seen(1, 1)
        with Daemon(store) as daemon:
            again = daemon.call("start", clientRequestId="run", agent=described, input="go", waitMs=20_000)
            assert (again["replayed"], again["run"]["status"]) == (True, "completed")
        assert seen(service, "op") == Seen(2, 1)


def test_where_nothing_goes_on_no_call_waits_for_it(tmp_path: Path):
    params = {"agent": {"model": {"script": [{"text": "done"}]}}, "input": "", "waitMs": 600_000}
    with Daemon(tmp_path / "store", "--hold") as daemon:
        run_id = daemon.call("start", clientRequestId="auto", **params)["runId"]
        assert daemon.call("resume", runId=run_id, clientRequestId="on", waitMs=600_000)["run"]["lastSeq"] > 0
        manual = daemon.call("start", clientRequestId="manual", **params, drive="manual")["runId"]
        answer = daemon.call("step", runId=manual, clientRequestId="step", waitMs=600_000)
        assert answer["request"] == {"method": "step", "state": "in_progress"}
    with Daemon(tmp_path / "store") as daemon:
        assert daemon.call("step", runId=manual, clientRequestId="step")["step"]["status"] == "completed"
