"""The outside world of the demonstration: tickets, in a process of their own, with a count of effects in a file of its own.

    GET  /tickets/T-1                      the ticket
    POST /tickets/T-1/assign               once for each Idempotency-Key
    POST /tickets/T-1/{close,refund,notify}    every call is one more effect

and, for whoever wants to see a client die at a chosen moment:

    POST /holds {operation, ticket, point}  holds the next such call `before` or `after` its effect
    GET  /held                              answers when a call is held
    POST /drop                              drops what is held, without an answer

Prints its port, and ends when its standard input does: it cannot outlive the demonstration.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socket import SHUT_RDWR
from typing import Any

HOLD_MOST_S = 60.0
HELD_WAIT_S = 30.0

_TICKET = re.compile(r"/tickets/([A-Za-z0-9-]+)(?:/(assign|close|refund|notify))?")


class Ledger:
    """What was asked for and what happened: a line each, on disk before the caller can know."""

    def __init__(self, file: Path) -> None:
        self.lines: list[dict[str, Any]] = []
        self._descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def add(self, kind: str, call: dict[str, Any]) -> None:
        line = {"kind": kind, **call}
        os.write(self._descriptor, json.dumps(line).encode() + b"\n")
        os.fdatasync(self._descriptor)
        self.lines.append(line)

    def has(self, operation: str, ticket: str, key: str | None = None) -> bool:
        wanted = {"kind": "effect", "operation": operation, "ticket": ticket} | ({"key": key} if key else {})
        return any(wanted.items() <= line.items() for line in self.lines)


class Service(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.ledger = ledger
        self.changed = threading.Condition()
        self.armed: dict[str, Any] | None = None
        self.held: dict[str, Any] | None = None

    def handle_error(self, _request: Any, _address: Any) -> None:
        """A caller that was killed is what this service is for."""


class Handler(BaseHTTPRequestHandler):
    server: Service

    def log_message(self, *_: Any) -> None:
        """Nothing: the transcript is the demonstration's."""

    def do_GET(self) -> None:
        if self.path == "/held":
            with self.server.changed:
                self.server.changed.wait_for(lambda: self.server.held is not None, HELD_WAIT_S)
                held = self.server.held
            self._answer(200 if held else 504, held or {"error": "no call is held"})
            return
        self._ticket()

    def do_POST(self) -> None:
        if self.path == "/holds":
            with self.server.changed:
                self.server.armed = self._body()
            self._answer(200, {})
        elif self.path == "/drop":
            with self.server.changed:
                self.server.held = None
                self.server.changed.notify_all()
            self._answer(200, {})
        else:
            self._ticket()

    def _ticket(self) -> None:
        found = _TICKET.fullmatch(self.path)
        if found is None or (self.command == "POST") != bool(found[2]):
            self._answer(404, {"error": "no such place"})
            return
        operation = found[2] or "read"
        call = {"operation": operation, "ticket": found[1], "key": self.headers.get("Idempotency-Key")}
        arguments = self._body()
        ledger, changed = self.server.ledger, self.server.changed
        with changed:
            ledger.add("call", call)
        if self._held("before", call):
            return
        with changed:
            known = operation == "assign" and ledger.has("assign", found[1], call["key"])
            if operation != "read" and not known:
                ledger.add("effect", call | {"arguments": arguments})
            closed = ledger.has("close", found[1])
        if not self._held("after", call):
            self._answer(200, {"ticket": found[1], "status": "closed" if closed else "open", "done": operation})

    def _held(self, point: str, call: dict[str, Any]) -> bool:
        """Whether this call was held at this point, and then dropped."""
        server = self.server
        with server.changed:
            armed = server.armed
            if armed is None or armed["point"] != point or not armed.items() <= (call | {"point": point}).items():
                return False
            server.armed, server.held = None, call
            server.changed.notify_all()
            server.changed.wait_for(lambda: server.held is not call, HOLD_MOST_S)
        self.close_connection = True
        with suppress(OSError):
            self.connection.shutdown(SHUT_RDWR)
        return True

    def _body(self) -> dict[str, Any]:
        length = int(self.headers.get("Content-Length") or 0)
        raw = self.rfile.read(length)
        if len(raw) < length:  # the caller died in the middle of its request: nothing was asked for
            raise ConnectionAbortedError
        body = json.loads(raw or b"{}")
        return body if isinstance(body, dict) else {}

    def _answer(self, status: int, value: dict[str, Any]) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def main() -> None:
    """`python -m rpcagent.demo.ticket_service FILE`"""
    service = Service(Ledger(Path(sys.argv[1])))
    threading.Thread(target=service.serve_forever, daemon=True).start()
    sys.stdout.write(f"{service.server_port}\n")
    sys.stdout.flush()
    sys.stdin.buffer.read()


if __name__ == "__main__":
    main()
