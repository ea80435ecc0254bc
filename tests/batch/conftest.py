"""The stage, torn down with every process that it started."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.batch.stage import Stage
from tests.clients.fake import Fake


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    fake = Fake(tmp_path)
    yield Stage(fake)
    fake.close()
