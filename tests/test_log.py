"""The daemon's own log: it takes whatever it is given, and no trouble of its own reaches who calls it."""

from __future__ import annotations

import builtins
import json
from collections.abc import Callable
from typing import Any

import pytest
from rpcagent.log import Log

Lines = Callable[[], list[dict[str, Any]]]


@pytest.fixture
def lines(capfd: pytest.CaptureFixture[str]) -> Lines:
    """What was written to descriptor 2."""
    return lambda: [json.loads(line) for line in capfd.readouterr().err.splitlines()]


def without_structlog(monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def refuse(name: str, *rest: Any) -> Any:
        if name == "structlog":
            raise OSError(24, "Too many open files")
        return original(name, *rest)

    monkeypatch.setattr(builtins, "__import__", refuse)


def test_a_line_is_written_where_structlog_cannot_be_loaded(lines: Lines, monkeypatch: pytest.MonkeyPatch):
    without_structlog(monkeypatch)
    log = Log()
    log.info("stopping", signal="SIGTERM")
    incident = log.incident(ValueError("why"), "list")
    first, second = lines()
    assert (first["level"], first["event"], first["signal"]) == ("info", "stopping", "'SIGTERM'")
    assert (second["incident"], "ValueError: why" in second["traceback"]) == (repr(incident), True)


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    "value", ["\ud800", float("nan"), object(), b"\xff", 10**5000], ids=lambda value: type(value).__name__
)
def test_a_value_that_json_cannot_hold_does_not_lose_the_line(lines: Lines, value: object):
    Log().warning("odd", value=value)
    assert [line["event"] for line in lines()] == ["odd"]


def test_an_exception_without_a_text_of_its_own_is_an_incident_all_the_same(lines: Lines):
    assert Log().incident(Mute(), "x").startswith("inc_")
    assert "Mute" in lines()[0]["traceback"]
