"""A tool service that counts: the outside of every test about repeated and lost effects.

It runs as a process of its own, and its truth is an append-only file, synced before anything is answered, which survives
the daemon, the test and the service itself. Tests read that file, never the daemon's log.

Effects: `/read` has none; each call of `/charge` and `/charge-reconcilable` is one; `/charge-idempotent` is one for each
`Idempotency-Key`. `/lookup?key=` and `/lookup?operation=` say what became of a charge.

Faults, at the points `before_effect` and `after_effect`: `hang` (parked until released), `drop` (the connection is closed
without an answer), `delay:MS`, `error:STATUS` or `error:STATUS:RETRY_AFTER`. A call can bring its own in the header
`X-Fault: drop@after_effect`; `POST /control` sets one for the next `times` calls. `/wait` answers when a call is parked.

Standard library only.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

POINTS = ("before_effect", "after_effect")
PARK_MOST_S = 120.0
WAIT_MOST_S = 60.0
BODY_BYTES = 16 * 1024 * 1024

KEYED = "/charge-idempotent"
EFFECTS = ("/charge", "/charge-reconcilable", KEYED)


class Truth:
    """The file, and what it says. Lines: `{"kind": "call" | "effect", "path", "key", "operation", "body"}`."""

    def __init__(self, file: Path) -> None:
        self.lines = read_truth(file)
        if file.exists():  # a line that was cut off answered nobody
            os.truncate(file, file.read_bytes().rfind(b"\n") + 1)
        self._descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def add(self, line: dict[str, Any]) -> None:
        os.write(self._descriptor, json.dumps(line).encode() + b"\n")
        os.fdatasync(self._descriptor)
        self.lines.append(line)

    def effects(self, *, key: str | None, operation: str | None) -> list[dict[str, Any]]:
        return [
            line
            for line in self.lines
            if line["kind"] == "effect"
            and ((key is not None and line["key"] == key) or (operation is not None and line["operation"] == operation))
        ]


def read_truth(file: Path) -> list[dict[str, Any]]:
    """The lines of a truth file, also while it is being written; none where there is no file yet."""
    if not file.exists():
        return []
    whole, _, _ = file.read_bytes().rpartition(b"\n")
    return [json.loads(line) for line in whole.split(b"\n") if line]


class Service(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 512  # the usual 5 resets connections when many runs act at once

    def __init__(self, port: int, truth: Path) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.truth = Truth(truth)
        self.changed = threading.Condition()
        self.faults: list[dict[str, Any]] = []
        self.parked: list[dict[str, Any]] = []

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A caller that went away is what this service is for."""


class Dropped(Exception):
    """The connection is to be closed without an answer."""


class Failure(Exception):
    """The answer is this status."""

    def __init__(self, status: int, retry_after: str | None) -> None:
        super().__init__(status)
        self.status = status
        self.retry_after = retry_after


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Service

    def setup(self) -> None:
        super().setup()
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Nothing: its standard error is the test's."""

    def do_GET(self) -> None:
        self._serve()

    def do_POST(self) -> None:
        self._serve()

    def _serve(self) -> None:
        url = urlsplit(self.path)
        query = dict(parse_qsl(url.query))
        length = min(int(self.headers.get("Content-Length") or 0), BODY_BYTES)
        raw = self.rfile.read(length)
        if len(raw) < length:  # the caller died in the middle of its request: nothing was asked for
            self.close_connection = True
            return
        body = json.loads(raw) if raw else {}
        own = {"/control": self._control, "/release": self._release, "/wait": self._wait, "/lookup": self._look_up}
        try:
            if url.path in own:
                self._answer(200, own[url.path](query, body))
            elif url.path in ("/read", *EFFECTS):
                self._answer(200, self._call(url.path, query, body))
            else:
                self._answer(404, {"error": f"no {url.path}"})
        except Failure as failure:
            headers = {} if failure.retry_after is None else {"Retry-After": failure.retry_after}
            self._answer(failure.status, {"error": f"as told: {failure.status}"}, headers)
        except Dropped:
            self.close_connection = True
            with suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)

    def _call(self, path: str, query: dict[str, str], body: dict[str, Any]) -> dict[str, Any]:
        key = self.headers.get("Idempotency-Key")
        if path == KEYED and key is None:
            raise Failure(400, None)
        operation = body.get("operation", query.get("operation"))
        line = {"path": path, "key": key, "operation": operation, "body": body or query}
        with self.server.changed:
            self.server.truth.add({"kind": "call", **line})
        self._fault("before_effect", line)
        effects = 0
        with self.server.changed:
            if path in EFFECTS:
                known = self.server.truth.effects(key=key, operation=None)
                replayed = path == KEYED and any(effect["path"] == KEYED for effect in known)
                if not replayed:
                    self.server.truth.add({"kind": "effect", **line})
                effects = len(self.server.truth.effects(key=key, operation=operation))
        self._fault("after_effect", line)
        return {"path": path, "key": key, "operation": operation, "effects": effects, "ok": True}

    def _fault(self, point: str, line: dict[str, Any]) -> None:
        action = self._action_at(point, line)
        if action == "hang":
            self._park({"point": point, **line})
        elif action == "drop":
            raise Dropped
        elif action.startswith("delay:"):
            time.sleep(min(float(action.removeprefix("delay:")) / 1_000, PARK_MOST_S))
        elif action.startswith("error:"):
            status, _, retry_after = action.removeprefix("error:").partition(":")
            raise Failure(int(status), retry_after or None)

    def _action_at(self, point: str, line: dict[str, Any]) -> str:
        action, _, at = self.headers.get("X-Fault", "").partition("@")
        if at == point:
            return action
        with self.server.changed:
            for fault in self.server.faults:
                wanted = {name: fault[name] for name in ("path", "operation", "key") if fault.get(name) is not None}
                if fault["point"] == point and all(line[name] == value for name, value in wanted.items()):
                    fault["times"] -= 1
                    self.server.faults = [one for one in self.server.faults if one["times"] > 0]
                    return str(fault["action"])
        return ""

    def _park(self, parked: dict[str, Any]) -> None:
        with self.server.changed:
            self.server.parked.append(parked)
            self.server.changed.notify_all()
            self.server.changed.wait_for(lambda: all(one is not parked for one in self.server.parked), PARK_MOST_S)
            self.server.parked = [one for one in self.server.parked if one is not parked]

    def _control(self, _query: dict[str, str], body: dict[str, Any]) -> dict[str, Any]:
        """`{point, action, times?, path?, operation?, key?}` adds a fault; `{"clear": true}` takes all away."""
        with self.server.changed:
            if body.get("clear"):
                self.server.faults = []
            else:
                if body["point"] not in POINTS:
                    raise Failure(400, None)
                self.server.faults.append({"times": 1, **body})
            return {"faults": len(self.server.faults)}

    def _release(self, _query: dict[str, str], body: dict[str, Any]) -> dict[str, Any]:
        """Lets all parked calls go on, or those at `point`."""
        point = body.get("point")
        with self.server.changed:
            kept = [one for one in self.server.parked if point is not None and one["point"] != point]
            released = len(self.server.parked) - len(kept)
            self.server.parked = kept
            self.server.changed.notify_all()
        return {"released": released}

    def _wait(self, query: dict[str, str], _body: dict[str, Any]) -> dict[str, Any]:
        """Answers when `count` calls are parked at `point`, or after `timeoutMs`."""
        limit = min(float(query.get("timeoutMs", 10_000)) / 1_000, WAIT_MOST_S)
        count = int(query.get("count", 1))

        def there() -> list[dict[str, Any]]:
            return [one for one in self.server.parked if one["point"] == query["point"]]

        with self.server.changed:
            self.server.changed.wait_for(lambda: len(there()) >= count, limit)
            return {"parked": there()}

    def _look_up(self, query: dict[str, str], _body: dict[str, Any]) -> dict[str, Any]:
        """`{status: done | pending | absent, effects}`; pending while its call is parked. `as404`: absent is a 404."""
        key, operation = query.get("key"), query.get("operation")
        with self.server.changed:
            effects = self.server.truth.effects(key=key, operation=operation)
            waiting = [
                one
                for one in self.server.parked
                if (key is not None and one["key"] == key) or (operation is not None and one["operation"] == operation)
            ]
        status = "done" if effects else "pending" if waiting else "absent"
        if status == "absent" and "as404" in query:
            raise Failure(404, None)
        return {"status": status, "effects": len(effects), "key": key, "operation": operation}

    def _answer(self, status: int, value: dict[str, Any], headers: dict[str, str] | None = None) -> None:
        raw = json.dumps(value).encode()
        with suppress(OSError):
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(raw)))
            for name, text in (headers or {}).items():
                self.send_header(name, text)
            self.end_headers()
            self.wfile.write(raw)


def _end_with_parent() -> None:
    """The test holds the other end of standard input: when it is gone, however it went, this process is too."""
    sys.stdin.buffer.read()
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--truth", type=Path, required=True)
    options = parser.parse_args()
    service = Service(options.port, options.truth)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    print(json.dumps({"port": service.server_address[1]}), flush=True)
    service.serve_forever()


if __name__ == "__main__":
    main()
