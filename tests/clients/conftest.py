"""Fixtures of the client's tests, and the proof that a client leaves nothing behind."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.clients.fake import Fake


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[Fake]:
    """Fails the test that leaves a thread, a descriptor or a child process behind."""
    before = _held()
    fake = Fake(tmp_path)
    try:
        yield fake
    finally:
        fake.close()
    assert _held() == before


def _held() -> tuple[int, int, bool]:
    threads = sum(thread.name.startswith("rpcagent-") for thread in threading.enumerate())
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        children = True
    except ChildProcessError:
        children = False
    return threads, len(os.listdir("/proc/self/fd")), children


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Retries at once; the list has the attempts that would have been waited for."""
    asked: list[int] = []

    def backoff(attempt: int) -> float:
        asked.append(attempt)
        return 0.0

    monkeypatch.setattr("rpcagent_client.client._backoff", backoff)
    return asked
