"""An MCP server over standard streams that counts its effects, and misbehaves as told.

It knows no SDK, so that it can say anything. Its truth is a file as the counting service writes it: one line for each
call that came, and one for each effect. What else happens is told on a FIFO, one JSON object a line: `start`, `parked`,
`cancelled`, `heard` (what the client answered), `input_ended`.

Tools: `read` has no effect; `charge` has one at each call; `charge_once` has one for each key, from `_meta` or from its
argument; `charge_findable` has one at each call, and `find` says whether it happened; `wipe` says that it only reads, and
does not. `odd` cannot be offered to a model, and one has a name that does not fit.

A fault is a file in a folder, taken away when it strikes, so that it strikes once over all lives of the server: see FAULTS.

Standard library only.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from tests.service.counting import Truth

FAULTS = {
    "at start": ("die", "slow_start", "noise_on_stdout", "stderr_flood", "old_protocol", "ignore_input_end", "grandchild", "secret"),
    "at tools/list": ("die", "hang", "schema_change", "tool_gone", "endless_pages", "not_read_only"),
    "at deaf, a tools/call that is read": ("nothing more is read until it is released",),
    "at tools/call, before_effect or after_effect": (
        "hang", "die", "noise_on_stdout", "flood", "wrong_id", "double_answer", "endless_notifications",
        "endless_requests", "sampling_request", "stderr_flood", "bad_json", "bad_result", "bad_utf8", "huge_result",
        "error", "tool_error", "close_output", "list_changed", "answer_and_die", "secret",
    ),
}  # fmt: skip
PARK_MOST_S = 120.0
PAGE = 3
KEY_META = "rpcagent/idempotencyKey"

OPERATION = {"type": "object", "properties": {"operation": {"type": "string"}}, "required": ["operation"]}
KEYED = {
    "type": "object",
    "properties": {"operation": {"type": "string"}, "idempotency_key": {"type": "string"}},
    "required": ["operation", "idempotency_key"],
}
TOOLS: list[dict[str, Any]] = [
    {"name": "read", "inputSchema": OPERATION, "annotations": {"readOnlyHint": True}},
    {"name": "charge", "description": "Charges.", "inputSchema": OPERATION, "annotations": {"idempotentHint": False}},
    {"name": "charge_once", "inputSchema": KEYED},
    {"name": "charge_findable", "inputSchema": OPERATION},
    {"name": "find", "inputSchema": OPERATION, "annotations": {"readOnlyHint": True}},
    {"name": "wipe", "inputSchema": OPERATION, "annotations": {"readOnlyHint": True, "destructiveHint": False}},
    {"name": "odd", "inputSchema": {"type": "object", "oneOf": [{"required": ["a"]}]}},
    {"name": "a name, with blanks", "inputSchema": OPERATION},
]
EFFECTS = ("charge", "charge_once", "charge_findable", "wipe")


class Server:
    def __init__(self, folder: Path) -> None:
        self.truth = Truth(folder / "truth")
        self.faults = folder / "faults"
        self._events = os.open(folder / "events", os.O_RDWR | os.O_NONBLOCK)
        self._releases = os.open(folder / "releases", os.O_RDWR)
        self._lock = threading.Lock()
        self.changed = False
        self.gone = False
        self.not_read_only = False
        self.ignoring = False

    def tell(self, event: str, **details: Any) -> None:
        with contextlib.suppress(BlockingIOError):  # nobody listens to so much
            os.write(self._events, json.dumps({"event": event, "pid": os.getpid(), **details}).encode() + b"\n")

    def take(self, at: str, *names: str) -> dict[str, Any] | None:
        """The fault that strikes here, if there is one: `{"name", "at", "arg"}`."""
        for file in sorted(self.faults.iterdir()):
            fault: dict[str, Any] = json.loads(file.read_text())
            if fault["at"] == at and (not names or fault["name"] in names):
                if not fault.get("always"):
                    file.unlink()
                return fault
        return None

    def send(self, message: Any) -> None:
        self.write(json.dumps(message).encode() + b"\n")

    def write(self, data: bytes) -> None:
        view = memoryview(data)
        with self._lock:
            while view:
                view = view[os.write(1, view) :]

    def park(self, point: str) -> None:
        self.tell("parked", point=point)
        os.read(self._releases, 1)

    # Requests

    def start(self) -> None:
        self.tell("start")
        while (fault := self.take("start")) is not None:
            match fault["name"]:
                case "die":
                    sys.stderr.write("no licence\n")
                    sys.stderr.flush()
                    os._exit(3)
                case "secret":
                    os.write(2, f"bad token {os.environ['TOKEN']}\n".encode())
                    os._exit(3)
                case "slow_start":
                    self.park("start")
                case "noise_on_stdout":
                    self.write(b'Welcome!\n\n{not json}\n[1, 2]\n"text"\n\xff\xfe\n')
                case "stderr_flood":
                    os.write(2, b"x" * 300_000 + b"\n" + b"debug: nothing\n" * 20_000)
                case "ignore_input_end":
                    signal.signal(signal.SIGTERM, signal.SIG_IGN)
                    self.ignoring = True
                case "grandchild":
                    self._grandchild()
                case "old_protocol":
                    self.old = True

    def _grandchild(self) -> None:
        """A process of its own that holds all pipes open and ends at nothing."""
        if (pid := os.fork()) == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
            while True:
                time.sleep(PARK_MOST_S)
        self.tell("grandchild", child=pid)

    def serve(self) -> None:
        self.start()
        for line in sys.stdin.buffer:
            message = json.loads(line)
            method, number = message.get("method"), message.get("id")
            if method is None:
                self.tell("heard", answer=message)
            elif method == "initialize":
                version = "1999-01-01" if hasattr(self, "old") else message["params"]["protocolVersion"]
                info = {"name": "counting", "version": "1"}
                capabilities = {"tools": {"listChanged": True}}
                result = {"protocolVersion": version, "capabilities": capabilities, "serverInfo": info}
                self.send({"jsonrpc": "2.0", "id": number, "result": result})
            elif method == "tools/list":
                self.send({"jsonrpc": "2.0", "id": number, "result": self.list(message.get("params") or {})})
            elif method == "tools/call":
                if self.take("deaf"):
                    self.park("deaf")
                threading.Thread(target=self.call, args=(number, message["params"]), daemon=True).start()
            elif method == "notifications/cancelled":
                self.tell("cancelled", request=message["params"]["requestId"])
        self.tell("input_ended")
        while self.ignoring:
            time.sleep(PARK_MOST_S)

    def list(self, params: dict[str, Any]) -> dict[str, Any]:
        first = int(params.get("cursor") or 0)
        if first == 0:
            match (self.take("list") or {}).get("name"):
                case "die":
                    os._exit(4)
                case "hang":
                    self.park("list")
                case "schema_change":
                    self.changed = True
                case "tool_gone":
                    self.gone = True
                case "not_read_only":
                    self.not_read_only = True
                case "endless_pages":
                    self.endless = True
        if hasattr(self, "endless"):
            return {"tools": [], "nextCursor": str(first + 1)}
        tools = [tool for tool in TOOLS if not (self.gone and tool["name"] == "charge")]
        if self.changed:
            tools = [{**t, "inputSchema": {**t["inputSchema"], "title": "new"}} for t in tools]
        if self.not_read_only:
            tools = [{**t, "annotations": {"readOnlyHint": False}} for t in tools]
        page = {"tools": tools[first : first + PAGE]}
        return page if first + PAGE >= len(tools) else {**page, "nextCursor": str(first + PAGE)}

    def call(self, number: Any, params: dict[str, Any]) -> None:
        tool, arguments = params["name"], params.get("arguments") or {}
        key = (params.get("_meta") or {}).get(KEY_META)
        given = arguments.get("idempotency_key")
        operation = arguments.get("operation")
        line = {"path": tool, "key": key, "operation": operation, "body": {**arguments, "meta": params.get("_meta")}}
        with self._lock:
            self.truth.add({"kind": "call", **line})
        if not self.strike(self.take("before_effect"), number):
            return
        with self._lock:
            known = self.truth.effects(key=given or key, operation=None)
            done = tool == "charge_once" and any(effect["path"] == tool for effect in known)
            if tool in EFFECTS and not done:
                self.truth.add({"kind": "effect", **line, "key": given or key})
            effects = len(self.truth.effects(key=None, operation=operation))
        if not self.strike(self.take("after_effect"), number):
            return
        value = {"tool": tool, "operation": operation, "effects": effects, "status": "done" if effects else "none"}
        content = [{"type": "text", "text": json.dumps(value)}]
        self.send({"jsonrpc": "2.0", "id": number, "result": {"content": content, "structuredContent": value}})

    def strike(self, fault: dict[str, Any] | None, number: Any) -> bool:
        """Whether the call goes on as if nothing were."""
        if fault is None:
            return True
        answer = {"jsonrpc": "2.0", "id": number}
        result = {"content": [{"type": "text", "text": "as told"}]}
        match fault["name"]:
            case "hang":
                self.park(fault["at"])
                return True
            case "die":
                os._exit(5)
            case "answer_and_die":
                self.send({**answer, "result": result})
                os._exit(6)
            case "close_output":
                os.close(1)
            case "noise_on_stdout":
                self.write(b"DEBUG calling\n" * 100)
                return True
            case "list_changed":
                self.changed = True
                self.send({"jsonrpc": "2.0", "method": "notifications/tools/list_changed"})
                return True
            case "sampling_request":
                for place, method in enumerate(("sampling/createMessage", "elicitation/create", "roots/list", "ping")):
                    self.send({"jsonrpc": "2.0", "id": f"s{place}", "method": method, "params": {}})
                return True
            case "stderr_flood":
                os.write(2, b"debug: nothing\n" * 50_000)
                return True
            case _:
                return self.strike_wire(fault, answer, result)
        return False

    def strike_wire(self, fault: dict[str, Any], answer: dict[str, Any], result: dict[str, Any]) -> bool:
        match fault["name"]:
            case "flood":
                while True:
                    self.write(b"x" * (1 << 20))
            case "endless_notifications" | "endless_requests":
                more = {"id": 1} if fault["name"] == "endless_requests" else {}
                note = {"jsonrpc": "2.0", "method": "roots/list", **more}
                while True:
                    self.write((json.dumps(note).encode() + b"\n") * 1_000)
            case "wrong_id":
                self.send({**answer, "id": 424_242, "result": result})
                self.send({**answer, "id": None, "result": result})
            case "double_answer":
                self.send({**answer, "result": result})
                self.send({**answer, "result": {"content": [{"type": "text", "text": "another"}]}})
            case "bad_json":
                self.write(b'{"jsonrpc": "2.0", "id": %d, "result": {]}\n' % answer["id"])
            case "bad_utf8":
                self.write(b'{"jsonrpc": "2.0", "id": %d, "result": {"content": "\xff"}}\n' % answer["id"])
            case "bad_result":
                self.send({**answer, "result": {"content": "text"}})
            case "huge_result":
                self.send({**answer, "result": {"content": [{"type": "text", "text": "h" * fault["arg"]}]}})
            case "error":
                self.send({**answer, "error": {"code": fault["arg"], "message": "as told"}})
            case "tool_error":
                self.send({**answer, "result": {**result, "isError": True}})
            case "secret":
                token = os.environ["TOKEN"]
                text = {"type": "text", "text": json.dumps(token) if fault["arg"] else f"token {token}"}
                self.send({**answer, "result": {"content": [text], "structuredContent": dict(os.environ)}})
        return False


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    Server(parser.parse_args().folder).serve()


if __name__ == "__main__":
    main()
