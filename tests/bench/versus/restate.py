"""Restate as one of the systems: a server of its own, and a service in Python that it calls for every run."""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.bench.peer import Scratch
from tests.bench.versus.install import Packages
from tests.bench.versus.systems import PROGRAMS, WORK_S

UP_S = 60


class RestateRunning:
    """The server and the service, on free ports of this machine's own address, with the server's own defaults."""

    def __init__(self, scratch: Scratch, store: Path, environment: Path) -> None:
        self._ports = dict(zip(("ingress", "admin", "node", "service"), _free_ports(4), strict=True))
        self._log = store / "errors.txt"
        self._children: list[subprocess.Popen[bytes]] = []
        try:
            self._spawn(self._server(store, environment), {**scratch.environment, **self._settings()})
            python = str(environment / "bin" / "python")
            program = [python, str(PROGRAMS / "run_restate.py"), str(self._ports["service"])]
            self._spawn(program, scratch.environment)
            self._until_up()
        except BaseException:
            self._end()
            raise

    def _server(self, store: Path, environment: Path) -> list[str]:
        found = sorted(environment.glob("node_modules/@restatedev/restate-server-*/bin/restate-server"))
        assert found, "npm installed no server for this kind of machine"
        base = ["--base-dir", str(store / "restate"), "--node-name", "bench"]
        return [str(found[0]), "--no-logo", *base, "--listen-mode", "tcp", "--log-filter", "error"]

    def _settings(self) -> dict[str, str]:
        at = {name: f"127.0.0.1:{port}" for name, port in self._ports.items()}
        return {
            "DO_NOT_TRACK": "1",
            "RESTATE_DISABLE_TELEMETRY": "true",
            "RESTATE_INGRESS__BIND_ADDRESS": at["ingress"],
            "RESTATE_ADMIN__BIND_ADDRESS": at["admin"],
            "RESTATE_BIND_ADDRESS": at["node"],
            "RESTATE_ADVERTISED_ADDRESS": f"http://{at['node']}",
        }

    def _spawn(self, command: list[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as said:
            child = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=said, stderr=said)
        self._children.append(child)
        return child

    def _until_up(self) -> None:
        """Raises TimeoutError."""
        until = time.monotonic() + UP_S
        self._wait_for(until, lambda: self._ask("admin", "GET", "/health"))
        self._wait_for(until, lambda: self._ask("ingress", "GET", "/restate/health"))
        self._wait_for(until, lambda: socket.create_connection(("127.0.0.1", self._ports["service"]), 1).close())
        service = {"uri": f"http://127.0.0.1:{self._ports['service']}"}
        self._wait_for(until, lambda: self._ask("admin", "POST", "/deployments", service))

    def _wait_for(self, until: float, attempt: Any) -> None:
        while True:
            try:
                attempt()
            except (OSError, http.client.HTTPException) as error:
                if time.monotonic() > until:
                    raise TimeoutError(f"restate does not come up: {error}") from error
                time.sleep(0.05)
            else:
                return

    def _ask(self, port: str, method: str, path: str, body: Any = None) -> Any:
        """Raises OSError where it does not answer with success."""
        connection = http.client.HTTPConnection("127.0.0.1", self._ports[port], timeout=WORK_S)
        try:
            headers = {"content-type": "application/json"}
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            said = answer.read()
            if answer.status >= 300:
                raise OSError(f"{path}: {answer.status} {said[:200]!r}")
            return json.loads(said) if said else None
        finally:
            connection.close()

    @property
    def pids(self) -> list[int]:
        return [child.pid for child in self._children]

    def work(self, runs: int, steps: int) -> None:
        with ThreadPoolExecutor(runs) as pool:
            done = list(pool.map(lambda _: self._ask("ingress", "POST", "/bench/run", steps), range(runs)))
        assert done == [steps] * runs, done

    def close(self) -> None:
        """SIGTERM to the server, which ends in order."""
        server = self._children[0]
        server.terminate()
        server.wait(30)
        self._end()

    def _end(self) -> None:
        for child in self._children:
            child.kill()
            child.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()


def _free_ports(count: int) -> list[int]:
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in held]
    for each in held:
        each.close()
    return ports


@dataclass(frozen=True, kw_only=True)
class Restate:
    name: str = "Restate"
    about: str = "server 1.7.12, SDK 1.3.0, one node; a step: ctx.run of a function that returns 400 characters, its journal entry"
    packages: Packages = field(
        repr=False,
        default=Packages(
            name="restate",
            pip=("restate-sdk==1.3.0", "hypercorn==0.18.0"),
            npm=("@restatedev/restate-server@1.7.12",),
        ),
    )

    def start(self, scratch: Scratch, store: Path, environment: Path) -> RestateRunning:
        return RestateRunning(scratch, store, environment)
