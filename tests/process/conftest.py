"""Fixtures for tests of the real daemon through the Python client: every process is reaped, whatever the test does."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.process.nursery import Nursery
from tests.service.driver import CountingService

from rpcagent_client import Client


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CountingService]:
    """The other side: it counts what is done, in a process of its own."""
    with CountingService(tmp_path_factory.mktemp("service") / "truth") as service:
        yield service
        service.release()


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    """Starts rigged daemons quickly."""
    with Nursery() as nursery:
        yield nursery


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def connect(tmp_path: Path, store: Path) -> Iterator[Callable[..., Client]]:
    """Makes clients of daemons on `store`, or on one of their own; the daemon's log is in `daemon.log`."""
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    with ExitStack() as clients:

        def make(*flags: str, **settings: Any) -> Client:
            command = [sys.executable, "-P", "-m", "rpcagent", "serve", *flags]
            defaults = {"store": store, "workspace": workspace, "stderr": tmp_path / "daemon.log"}
            return clients.enter_context(Client(command, **defaults | settings))

        yield make
