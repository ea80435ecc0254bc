"""A daemon that has used up its descriptors: what it says stays its own, and it ends as always."""

from __future__ import annotations

import json
import resource
import signal
from pathlib import Path

import pytest
from tests.process.wire_driver import Daemon

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="needs prlimit to change another process's limits"),
]


def test_a_stop_without_a_descriptor_to_spare_is_an_ordinary_end(tmp_path: Path):
    with Daemon(tmp_path / "store") as daemon:
        daemon.call("status")
        resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (3, 3))  # all that is open stays, and nothing joins it
        daemon.signal(signal.SIGTERM)
        assert (daemon.exit_code(), daemon.rest()) == (0, b"")
        assert [json.loads(line)["event"] for line in daemon.log.read_text().splitlines()] == ["stopping"]
