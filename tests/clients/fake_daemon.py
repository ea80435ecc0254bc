"""A daemon that does as it is told, for tests of the client: `fake_daemon.py DIRECTORY`.

Each start takes the next file `0.json`, `1.json` ... of DIRECTORY, the last one for ever: a list of what to do with each
request in turn. It appends what it receives to `received.jsonl`, a line each: `{"start": n, "request": {...}}`.

- `{"result": ...}` or `{"error": {...}}`: answers.
- `{"raw": text}`: writes this instead of an answer. `{"before": [..., ...]}` with any: writes these messages first.
- `{"die": code}`: ends, unanswered. `"silent": true`: reads, and never answers. `"deaf": true`: reads no more.

The list at its end, it answers each request with `{"result": {"n": how many requests this process has had}}`.
"""

import json
import os
import signal
import sys
from pathlib import Path

folder = Path(sys.argv[1])
starts = folder / "starts"
start = len(starts.read_text()) if starts.exists() else 0
with starts.open("a") as mark:
    mark.write(".")
scripts = sorted(folder.glob("[0-9]*.json"), key=lambda file: int(file.stem))
script = json.loads(scripts[min(start, len(scripts) - 1)].read_text()) if scripts else []
if "ignore-signals" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)

if script and script[0].get("deaf"):
    signal.pause()
for count, line in enumerate(sys.stdin):
    request = json.loads(line)
    with (folder / "received.jsonl").open("a") as received:
        received.write(json.dumps({"start": start, "request": request}) + "\n")
    todo = script[count] if count < len(script) else {"result": {"n": count + 1}}
    for message in todo.get("before", ()):
        print(json.dumps(message), flush=True)
    if "die" in todo:
        os._exit(todo["die"])
    if "raw" in todo:
        print(todo["raw"], end="", flush=True)
    elif not todo.get("silent"):
        answer = {name: todo[name] for name in ("result", "error") if name in todo}
        print(json.dumps({"jsonrpc": "2.0", "id": request["id"], **answer}), flush=True)
if "ignore-signals" in sys.argv:
    while True:
        signal.pause()
