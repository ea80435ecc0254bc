"""What is generated is what stands in the repository."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

PROTOCOL = Path(__file__).parents[2] / "protocol"


def _generated() -> dict[str, str]:
    spec = importlib.util.spec_from_file_location("protocol_generate", PROTOCOL / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    files: dict[str, str] = module.files()
    return files


@pytest.mark.parametrize("name", ["openrpc.json", "errors.md"])
def test_the_generated_file_is_current_else_run_protocol_generate(name: str):
    assert (PROTOCOL / name).read_text(encoding="utf-8") == _generated()[name]
