"""A model's endpoint that misbehaves on demand: the other side of every test about models.

It runs as a process of its own and speaks chat-completions over real HTTP, streamed or whole. It answers from a script:
turn n for a request with n answers in its context, so that it goes on at the right place whoever was restarted. A turn is
`{text?, calls?: [{name, arguments, id?}], usage?, fault?: {name, ..., times?}}`; a fault holds for the first `times`
requests with the same prompt (default 1; 0: always). `POST /control` sets faults for the next calls, whatever their turn.

It refuses any history in which a call is not followed by exactly one result, in order. Its log holds every call with its
arrival and its whole prompt, and how it ended, synced line by line; a key is never in it.

Standard library only. The faults are in `model_faults`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import select
import socket
import sys
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from tests.service import model_faults

HOLD_MOST_S = 120.0
WAIT_MOST_S = 60.0
LOOK_S = 0.01
BODY_BYTES = 64 * 1024 * 1024
NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


class Log:
    """Lines `{kind: "call", number, at, turn, fault, key, body}` and `{kind: "end", number, how}`."""

    def __init__(self, file: Path) -> None:
        self.lines = read_log(file)
        if file.exists():
            os.truncate(file, file.read_bytes().rfind(b"\n") + 1)
        self._descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def add(self, line: dict[str, Any]) -> None:
        os.write(self._descriptor, json.dumps(line).encode() + b"\n")
        os.fdatasync(self._descriptor)
        self.lines.append(line)


def read_log(file: Path) -> list[dict[str, Any]]:
    """The whole lines, also while the file is being written; none where there is no file yet."""
    if not file.exists():
        return []
    whole, _, _ = file.read_bytes().rpartition(b"\n")
    return [json.loads(line) for line in whole.split(b"\n") if line]


class Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 512

    def __init__(self, port: int, log: Path, script: list[dict[str, Any]], key: str | None) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.log = Log(log)
        self.script = script
        self.key = key
        self.changed = threading.Condition()
        self.faults: list[dict[str, Any]] = []
        self.held: list[int] = []

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A caller that went away is what this server is for."""

    def enter(self, body: dict[str, Any], key: str) -> tuple[int, dict[str, Any], dict[str, Any]]:
        """Logs the call; gives its number, its turn and its fault."""
        messages = body.get("messages", [])
        place = sum(message.get("role") == "assistant" for message in messages)
        prompt = hashlib.sha256(json.dumps(messages).encode()).hexdigest()
        with self.changed:
            turn = self.script[place] if place < len(self.script) else {}
            before = sum(line["kind"] == "call" and line["prompt"] == prompt for line in self.log.lines)
            fault = self._fault(turn, before)
            number = sum(line["kind"] == "call" for line in self.log.lines)
            line = {"kind": "call", "number": number, "at": time.time(), "turn": place, "prompt": prompt}
            self.log.add({**line, "fault": fault.get("name", ""), "key": key, "body": body})
            self.changed.notify_all()
        return number, turn, fault

    def end(self, number: int, how: str) -> None:
        with self.changed:
            self.log.add({"kind": "end", "number": number, "how": how})
            self.changed.notify_all()

    def _fault(self, turn: dict[str, Any], before: int) -> dict[str, Any]:
        if self.faults:
            fault = self.faults[0]
            fault["times"] -= 1
            if not fault["times"]:
                self.faults.pop(0)
            return dict(fault)
        own: dict[str, Any] = turn.get("fault", {})
        times = own.get("times", 1)
        return own if not times or before < times else {}


class Gone(Exception):
    """The caller closed the connection."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def setup(self) -> None:
        super().setup()
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Nothing: its standard error is the test's."""

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        own = {"/wait": self._wait}
        if url.path in own:
            self.answer(200, own[url.path](dict(parse_qsl(url.query))))
        else:
            self.answer(404, {"error": {"message": f"no {url.path}"}})

    def do_POST(self) -> None:
        length = min(int(self.headers.get("Content-Length") or 0), BODY_BYTES)
        raw = self.rfile.read(length)
        if len(raw) < length:
            self.close_connection = True
            return
        body = json.loads(raw) if raw else {}
        path = urlsplit(self.path).path
        if path == "/control":
            self.answer(200, self._control(body))
        elif path == "/release":
            self.answer(200, self._release())
        elif path.endswith("/chat/completions"):
            self._complete(body)
        else:
            self.answer(404, {"error": {"message": f"Invalid URL (POST {path})", "type": "invalid_request_error"}})

    def _complete(self, body: dict[str, Any]) -> None:
        self.close_connection = True
        given = self.headers.get("Authorization")
        key = "right" if given == f"Bearer {self.server.key}" else "none" if given is None else "wrong"
        number, turn, fault = self.server.enter(body, key)
        try:
            if self.server.key is not None and key != "right":
                model_faults.play(self, {"name": "unauthorized"}, turn, body)
            elif problem := history_problem(body):
                self.refuse(400, problem, "invalid_request_error")
            elif not turn and not fault:
                self.refuse(400, "the script has no such turn", "script_exhausted")
            else:
                model_faults.play(self, fault, turn, body)
            how = "answered"
        except (Gone, OSError):
            how = "gone"
        self.server.end(number, how)

    # What faults are made of

    def answer(self, status: int, value: Any, headers: dict[str, str] | None = None) -> None:
        """A whole answer: JSON, or bytes as they are."""
        raw = value if isinstance(value, bytes) else json.dumps(value).encode()
        headers = {"Content-Type": "application/json", "Content-Length": str(len(raw)), **(headers or {})}
        self.send_response(status)
        for name, text in headers.items():
            self.send_header(name, text)
        self.end_headers()
        self.wfile.write(raw)

    def refuse(self, status: int, message: str, kind: str, headers: dict[str, str] | None = None, **more: Any) -> None:
        self.answer(status, {"error": {"message": message, "type": kind, "param": None, "code": None, **more}}, headers)

    def begin(self, content_type: str = "text/event-stream; charset=utf-8") -> None:
        self.send_response(200)
        self.send_header("Content-Type", content_type)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def send(self, value: Any) -> None:
        """One event; text goes as it is."""
        raw = value if isinstance(value, bytes) else b"data: " + json.dumps(value).encode() + b"\n\n"
        self.wfile.write(b"%x\r\n%b\r\n" % (len(raw), raw))
        self.wfile.flush()

    def finish(self) -> None:
        self.wfile.write(b"0\r\n\r\n")

    def cut(self) -> None:
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def hold(self) -> None:
        """Returns when it is released; raises Gone when the caller closes the connection first."""
        me = id(self)
        with self.server.changed:
            self.server.held.append(me)
            self.server.changed.notify_all()
        until = time.monotonic() + HOLD_MOST_S
        try:
            while me in self.server.held and time.monotonic() < until:
                readable, _, _ = select.select([self.connection], [], [], LOOK_S)
                if readable and not self.connection.recv(1, socket.MSG_PEEK):
                    raise Gone
        finally:
            with self.server.changed:
                self.server.held = [one for one in self.server.held if one != me]
                self.server.changed.notify_all()

    # Control

    def _control(self, body: dict[str, Any]) -> dict[str, Any]:
        """`{fault: {name, ...}, times?}` adds one; `{script}` sets the script; `{"clear": true}` takes all faults away."""
        with self.server.changed:
            if body.get("clear"):
                self.server.faults = []
            if "script" in body:
                self.server.script = body["script"]
            if "fault" in body:
                self.server.faults.append({**body["fault"], "times": body.get("times", 1)})
            return {"faults": len(self.server.faults)}

    def _release(self) -> dict[str, Any]:
        with self.server.changed:
            released, self.server.held = len(self.server.held), []
            return {"released": released}

    def _wait(self, query: dict[str, str]) -> dict[str, Any]:
        """Answers when there are `count` of `what` (held, calls, gone, ended), or after `timeoutMs`."""
        limit = min(float(query.get("timeoutMs", 10_000)) / 1_000, WAIT_MOST_S)
        what, count = query["what"], int(query.get("count", 1))

        def there() -> int:
            lines = self.server.log.lines
            if what == "held":
                return len(self.server.held)
            if what == "calls":
                return sum(line["kind"] == "call" for line in lines)
            return sum(line["kind"] == "end" and what in {"ended", line["how"]} for line in lines)

        with self.server.changed:
            self.server.changed.wait_for(lambda: there() >= count, limit)
            return {"count": there()}


def history_problem(body: dict[str, Any]) -> str:
    """What a strict provider would refuse: a call without exactly one result in order, arguments that are no object, or a
    name that is none."""
    owed: list[str] = []
    for place, message in enumerate(body.get("messages", [])):
        role = message.get("role")
        if role == "tool":
            if not owed or message.get("tool_call_id") != owed.pop(0):
                return f"messages[{place}]: a tool message must answer the calls before it, in order"
            continue
        if owed:
            return f"messages[{place}]: an assistant message with tool_calls must be followed by a result for each of {owed}"
        for call in message.get("tool_calls") or []:
            function = call["function"]
            try:
                value = json.loads(function["arguments"])
            except ValueError:
                value = None
            if not isinstance(value, dict):
                return f"messages[{place}]: the arguments of {call['id']} are no JSON object"
            if not NAME.fullmatch(function["name"]) or not call["id"] or len(call["id"]) > 40 or call["id"] in owed:
                return f"messages[{place}]: {call['id']!r} or {function['name']!r} is not taken"
            owed.append(call["id"])
        if role == "assistant" and message.get("content") is None and not owed:
            return f"messages[{place}]: content is missing"
    if owed:
        return f"an assistant message with tool_calls must be followed by a result for each of {owed}"
    names = [tool["function"]["name"] for tool in body.get("tools", [])]
    bad = [name for name in names if not NAME.fullmatch(name) or names.count(name) > 1]
    return f"tools: {bad[0]!r} is not taken" if bad else ""


def _end_with_parent() -> None:
    """The test holds the other end of standard input: when it is gone, however it went, this process is too."""
    sys.stdin.buffer.read()
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--script", type=Path)
    options = parser.parse_args()
    script = json.loads(options.script.read_text()) if options.script else []
    server = Server(options.port, options.log, script, os.environ.get("MODEL_SERVER_KEY"))
    threading.Thread(target=_end_with_parent, daemon=True).start()
    print(json.dumps({"port": server.server_address[1]}), flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
