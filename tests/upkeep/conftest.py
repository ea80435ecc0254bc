"""A store of every kind of run, made once and copied for each test."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from .stores import real_store


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return real_store(tmp_path_factory.mktemp("made") / "store")


@pytest.fixture
def store(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "store"))
