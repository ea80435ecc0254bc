"""Calls that only wait take nothing away from those that do not."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.process.outside import agent
from tests.process.wire_driver import Daemon
from tests.service.driver import CountingService

pytestmark = pytest.mark.process


def test_calls_beyond_those_that_may_wait_are_answered_at_once_and_a_cancel_is_taken(tmp_path: Path):
    with CountingService(tmp_path / "truth") as service, Daemon(tmp_path / "store") as daemon:
        most = daemon.call("initialize", protocolVersion=1)["limits"]["maxWaiting"]
        service.park("before_effect")
        params = {"clientRequestId": "run", "agent": agent(service, "at_most_once", "slow"), "input": ""}
        run_id = daemon.call("start", **params)["runId"]
        service.wait_parked(20, point="before_effect")
        sent = [daemon.request("start", **params, waitMs=600_000) for _ in range(1_200)]
        daemon.write(b"".join(line for _, line in sent))
        for ident, _ in sent[most:]:
            assert daemon.result(ident)["run"]["status"] == "running"
        assert daemon.call("cancel", runId=run_id, clientRequestId="stop")["run"]["cancelling"] is True
        service.release()
        assert {daemon.result(ident)["run"]["status"] for ident, _ in sent[:most]} == {"cancelled"}
        assert daemon.stop() == 0
