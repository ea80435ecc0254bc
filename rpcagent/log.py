"""The daemon's own log: one JSON object a line on standard error, never anything on standard output.

Knows: how to write without ever waiting: a line that a slow reader of standard error has no room for is dropped and
counted, so that logging can stop neither the wire nor a commit. structlog is loaded by the first line, not at start.
No method raises: faults are logged where nothing may go wrong any more. Where structlog cannot be loaded (no descriptor is
left, say), or a value cannot be written, the line is written without it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import time
import traceback
from collections.abc import MutableMapping
from typing import Any

import msgspec

LINE_BYTES_MAX = 4_096
"""No more than a pipe takes at once when it has room at all."""

_encode = msgspec.json.Encoder(enc_hook=repr).encode


class _Stderr:
    """Takes whole lines, or drops them."""

    def __init__(self) -> None:
        self.dropped = 0
        self._poll = select.poll()
        self._poll.register(2, select.POLLOUT)

    def msg(self, line: bytes) -> None:
        try:
            ready = self._poll.poll(0)
            if not ready or not ready[0][1] & select.POLLOUT:
                self.dropped += 1
                return
            os.write(2, line)
        except OSError:
            self.dropped += 1

    debug = info = warning = error = critical = msg


class Log:
    """`info("what happened", key=value)` and so on; `incident` keeps the whole story of a fault under an id."""

    def __init__(self) -> None:
        self._stderr = _Stderr()
        self._logger: Any = None

    @property
    def dropped(self) -> int:
        """Lines that nobody had room for."""
        return self._stderr.dropped

    def info(self, event: str, **details: Any) -> None:
        self._write("info", event, details)

    def warning(self, event: str, **details: Any) -> None:
        self._write("warning", event, details)

    def error(self, event: str, **details: Any) -> None:
        self._write("error", event, details)

    def incident(self, error: BaseException, what: str) -> str:
        """Logs the error with its traceback; the id is all that a peer is told."""
        incident = "inc_" + secrets.token_hex(6)
        try:
            text = "".join(traceback.format_exception(error))
        except Exception:  # noqa: BLE001 - an exception whose own text is a fault
            text = type(error).__name__
        self._write("error", "incident", {"incident": incident, "what": what, "traceback": text[-3_000:]})
        return incident

    def _write(self, level: str, event: str, details: dict[str, Any]) -> None:
        try:
            getattr(self._get(), level)(event, **details)
        except Exception:  # noqa: BLE001 - whatever it is, there is nobody left to tell
            plain = {key: _plain(value) for key, value in details.items()}
            line = {"at": round(time.time(), 3), "level": level, "event": event, **plain}
            with contextlib.suppress(Exception):
                self._stderr.msg(_render(None, level, line))

    def _get(self) -> Any:
        if self._logger is None:
            import structlog

            self._logger = structlog.wrap_logger(
                self._stderr,
                processors=[structlog.stdlib.add_log_level, _stamp, _render],
                wrapper_class=structlog.make_filtering_bound_logger(20),
                cache_logger_on_first_use=True,
            )
        return self._logger


def _plain(value: object) -> str:
    try:
        return ascii(value)[:1_000]
    except Exception:  # noqa: BLE001
        return type(value).__name__


def _stamp(_logger: Any, _name: str, event: MutableMapping[str, Any]) -> dict[str, Any]:
    return {"at": round(time.time(), 3), **event}


def _render(_logger: Any, _name: str, event: MutableMapping[str, Any]) -> bytes:
    line = _encode(event)
    if len(line) >= LINE_BYTES_MAX:
        cut = {key: value if not isinstance(value, str) else value[-1_000:] for key, value in event.items()}
        line = _encode({**cut, "cut": True})[: LINE_BYTES_MAX - 1]
    return line + b"\n"
