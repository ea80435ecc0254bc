"""The typed methods, and the retry contract: which request is sent again, when, and when no more."""

from __future__ import annotations

import logging
import os
import random
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Literal, Self

from rpcagent_client.connection import Connection
from rpcagent_client.errors import ClientClosed, ClientError, ConnectionLost, DeadlineExceeded, ProtocolError, RpcError

Json = dict[str, Any]
Command = Sequence[str]
Events = Literal["own", "all"]
Input = str | Sequence[Mapping[str, Any]]

PROTOCOL_VERSION = 1
STEP_WAIT_S = 30.0
BACKOFF_FIRST_S = 0.05
BACKOFF_MOST_S = 2.0
POLL_FIRST_S = 0.01
POLL_MOST_S = 0.2

NEEDS_SOMEONE = frozenset({"APPROVAL_REQUIRED", "UNKNOWN_OUTCOME", "INCOMPATIBLE", "INVALID_STATE"})
"""Retryable, but not by waiting: a person or another request must act first. Raised at once; the key stays good."""

log = logging.getLogger("rpcagent_client")


class Client:
    """A daemon of one's own, restarted when it dies. Threads may share a client.

    Nothing is started before the first call. Use it as a context manager, or call `close`.

    - `command`, `store`, `workspace`: what is run, with `--store` and `--workspace` where given. Without a command it is
      `rpcagent serve` as it is installed beside this Python; else as PATH has it.
    - `env`: the daemon's whole environment (None: this process's), as in `subprocess`.
    - `on_event(params)`: each `run/event`; `on_delta(params)`: each `run/delta`; `on_notice(method, params)`: all others,
      `run/lag` among them. Called on the reading thread, in wire order; all events that an answer rests on have been
      delivered when the call returns. A callback that blocks holds up all answers, and it cannot call this client.
      Notifications are hints, and none is repeated after a restart: `events` has them all, by `afterSeq`.
    - `events`: of the runs that this client has named (`own`), or of `all`.
    - `stderr`: where the daemon's log goes: None is this process's own, a descriptor or an open file, `subprocess.DEVNULL`,
      or a path to append to. Never a pipe that nobody reads.
    - `timeout`: seconds for one method, all attempts included, where the method is not given its own.
    - `attempts`: how often one request is sent at most.
    """

    def __init__(
        self,
        command: Command | None = None,
        *,
        store: str | os.PathLike[str] | None = None,
        workspace: str | os.PathLike[str] | None = None,
        env: Mapping[str, str] | None = None,
        on_event: Callable[[Json], None] | None = None,
        on_delta: Callable[[Json], None] | None = None,
        on_notice: Callable[[str, Json], None] | None = None,
        events: Events = "own",
        stderr: int | IO[Any] | Path | None = None,
        timeout: float = 60.0,
        attempts: int = 10,
    ) -> None:
        if stderr in {subprocess.PIPE, subprocess.STDOUT}:
            raise ValueError(
                "stderr goes to a file, a descriptor or DEVNULL: nobody reads a pipe, and stdout is the wire"
            )
        self._command = list(_installed() if command is None else command)
        for name, place in (("--store", store), ("--workspace", workspace)):
            if place is not None:
                self._command += [name, os.fspath(place)]
        self._env = env
        self._stderr = stderr
        self._on_event, self._on_delta, self._on_notice = on_event, on_delta, on_notice
        self._events = events
        self._timeout = timeout
        self._attempts = attempts
        self._connecting = threading.Lock()
        self._connection: Connection | None = None
        self._closed = threading.Event()

    # The process

    @property
    def pid(self) -> int | None:
        """The daemon's process id; None where none is known to live."""
        connection = self._connection
        return connection.pid if connection is not None and connection.alive else None

    def close(self, grace: float = 10.0) -> None:
        """Closes the daemon's input and reaps it: it may end in order for `grace` seconds, then SIGTERM, then SIGKILL.

        Calls of other threads raise ClientClosed. What was accepted is durable, whatever becomes of the process.
        """
        self._closed.set()
        while True:
            if self._connection is not None:
                self._connection.end(grace, closed=True)
            # Once more for a daemon that another thread was in the middle of starting; it starts none after this.
            if self._connecting.acquire(timeout=POLL_MOST_S):
                break
        try:
            if self._connection is not None:
                self._connection.end(0, closed=True)
            self._connection = None
        finally:
            self._connecting.release()

    def kill(self) -> None:
        """SIGKILL, and reaped on return: what a crash, the kernel or a deploy does. The next call starts a new daemon."""
        connection = self._connection
        if connection is not None:
            connection.end(0)

    def strike(self) -> None:
        """SIGKILL alone: takes no lock and waits for nothing, so that a signal handler may call it while this very thread is
        anywhere in the client. `close` or `kill` must still reap."""
        connection = self._connection
        if connection is not None:
            connection.strike()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After an error nobody waits for what the daemon has in hand: it stays in doubt by design, and is told in status.
        self.close() if kind is None else self.close(grace=1.0)

    # Methods that act: keyed, durable when they return, and repeated with the same key until they are answered

    def start(
        self,
        agent: str | Mapping[str, Any],
        input: Input,  # noqa: A002  (the name on the wire)
        *,
        client_request_id: str | None = None,
        wait: float = 0.0,
        timeout: float | None = None,
        namespace: str | None = None,
        drive: Literal["auto", "manual"] | None = None,
        recovery: Literal["auto", "confirm", "manual"] | None = None,
        budget: Mapping[str, Any] | None = None,
        workspace: str | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> Json:
        """Starts a run: `{runId, run, replayed}`. Returns at once, or when the run is at rest, within `wait` seconds."""
        params = {
            "agent": agent,
            "input": input,
            "namespace": namespace,
            "drive": drive,
            "recovery": recovery,
            "budget": budget,
            "workspace": workspace,
            "labels": labels,
        }
        return self._keyed("start", params, client_request_id, wait, timeout)

    def step(
        self,
        run_id: str,
        *,
        client_request_id: str | None = None,
        wait: float = STEP_WAIT_S,
        timeout: float | None = None,
    ) -> Json:
        """Performs the next step of a run in manual drive: `{step, run, replayed}`. Where `wait` seconds did not suffice,
        `request.state` is `in_progress`: the same key joins it."""
        return self._keyed("step", {"runId": run_id}, client_request_id, wait, timeout)

    def resume(
        self,
        run_id: str,
        *,
        plan_digest: str | None = None,
        client_request_id: str | None = None,
        wait: float = 0.0,
        timeout: float | None = None,
    ) -> Json:
        """Lets a run go on that a restart holds (`resumeRequired`): `{recovery, run, replayed}`."""
        params = {"runId": run_id, "planDigest": plan_digest}
        return self._keyed("resume", params, client_request_id, wait, timeout)

    def approve(
        self,
        run_id: str,
        approval_id: str,
        digest: str,
        decision: str,
        *,
        client_request_id: str | None = None,
        timeout: float | None = None,
        result: str | Mapping[str, Any] | None = None,
        extend: Mapping[str, float] | None = None,
        comment: str | None = None,
        decided_by: str | None = None,
    ) -> Json:
        """Answers a question as it was shown: `{approval, run, replayed}`. `digest` is the question's own, from `status`."""
        params = {
            "runId": run_id,
            "approvalId": approval_id,
            "digest": digest,
            "decision": decision,
            "result": result,
            "extend": extend,
            "comment": comment,
            "decidedBy": decided_by,
        }
        return self._keyed("approve", params, client_request_id, 0.0, timeout)

    def cancel(
        self,
        run_id: str,
        *,
        reason: str | None = None,
        client_request_id: str | None = None,
        timeout: float | None = None,
    ) -> Json:
        """Cancels: durable on return, though an effect in flight may still be ending: `{cancel, run, replayed}`."""
        return self._keyed("cancel", {"runId": run_id, "reason": reason}, client_request_id, 0.0, timeout)

    # Methods that read: they have no key and need none, and are repeated in the same way

    def status(
        self,
        run_id: str | None = None,
        *,
        client_request_id: str | None = None,
        namespace: str | None = None,
        timeout: float | None = None,
    ) -> Json:
        """Of a run, by its id or by the key of its `start`; with both, `request` says what became of that key. With
        neither: the daemon's health, and which runs need someone."""
        params = {"runId": run_id, "clientRequestId": client_request_id, "namespace": namespace}
        return self._persistent("status", params, None, self._timeout if timeout is None else timeout)

    def list(
        self,
        *,
        status: Sequence[str] | None = None,
        namespace: str | None = None,
        agent: str | None = None,
        open_approvals: bool | None = None,
        cursor: str | None = None,
        limit: int | None = None,
        timeout: float | None = None,
    ) -> Json:
        """A page of runs, oldest first: `{runs, nextCursor?}`."""
        params = {
            "status": status,
            "namespace": namespace,
            "agent": agent,
            "openApprovals": open_approvals,
            "cursor": cursor,
            "limit": limit,
        }
        return self._persistent("list", params, None, self._timeout if timeout is None else timeout)

    def events(
        self, run_id: str, *, after_seq: int = 0, limit: int | None = None, timeout: float | None = None
    ) -> Json:
        """A page of a run's events, without a gap: `{events, lastSeq}`. Go on with the `seq` of the last one."""
        params = {"runId": run_id, "afterSeq": after_seq, "limit": limit}
        return self._persistent("events", params, None, self._timeout if timeout is None else timeout)

    def wait(self, run_id: str, timeout: float) -> Json:
        """The run's `status` as soon as it is at rest: it has ended, is `ready`, or waits for someone; what waits for the
        clock alone is not at rest. Survives restarts. Raises DeadlineExceeded after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        pause = POLL_FIRST_S
        while True:
            shown = self.status(run_id, timeout=max(deadline - time.monotonic(), POLL_FIRST_S))
            if _at_rest(shown["run"]):
                return shown
            if time.monotonic() + pause >= deadline:
                raise DeadlineExceeded(f"the run {run_id} is still {shown['run']['status']} after {timeout:g} seconds")
            self._pause(pause)
            pause = min(pause * 2, POLL_MOST_S)

    def shutdown(self, grace: float | None = None, *, timeout: float | None = None) -> int | None:
        """Asks the daemon to end after at most `grace` seconds for what is in flight, and reaps it.

        Returns its exit code; None where no daemon was running. A later call starts a new one.
        """
        connection = self._connection
        if connection is None or not connection.alive:
            return None
        limit = self._timeout if timeout is None else timeout
        deadline = time.monotonic() + limit
        try:
            connection.call("shutdown", {} if grace is None else {"graceMs": round(grace * 1000)}, deadline)
        except ConnectionLost:
            log.info("the daemon ended before it answered shutdown")
        return connection.end(max(deadline - time.monotonic(), 0.0))

    def call(self, method: str, params: Mapping[str, Any] | None = None, timeout: float | None = None) -> Any:
        """One request, sent once, and its result: for methods that have no function here. Starts the daemon if need be.

        Raises RpcError, ConnectionLost, DeadlineExceeded, DaemonNotStarted, ProtocolError, ClientClosed.
        """
        limit = self._timeout if timeout is None else timeout
        return self._once(method, params or {}, time.monotonic() + limit)

    # Retrying

    def _keyed(self, method: str, params: Json, key: str | None, wait: float, timeout: float | None) -> Json:
        key = key or str(uuid.uuid4())
        limit = (self._timeout if timeout is None else timeout) + wait
        sent = {**params, "clientRequestId": key}
        if method in {"start", "step", "resume"}:
            sent["waitMs"] = round(wait * 1000)
        return self._persistent(method, sent, key, limit)

    def _persistent(self, method: str, params: Json, key: str | None, seconds: float) -> Json:
        """Sends until it is answered, the error is one that asking again cannot change, or the bounds are reached."""
        deadline = time.monotonic() + seconds
        # Members that are None are left out, so that the daemon's defaults hold.
        given = {name: value for name, value in params.items() if value is not None}
        attempt = 1
        while True:
            try:
                result = self._once(method, given, deadline)
            except ClientError as error:
                error.client_request_id = key
                pause = _backoff(attempt)
                if not _passes(error) or attempt >= self._attempts or time.monotonic() + pause >= deadline:
                    if attempt > 1:
                        error.add_note(f"{method} was sent {attempt} times")
                    raise
                log.info("%s: %s; asking again%s", method, error, f" with the key {key}" if key else "")
            else:
                if not isinstance(result, dict):
                    raise ProtocolError(f"the result of {method} is no object")
                return result
            self._pause(pause)
            attempt += 1

    def _once(self, method: str, params: Mapping[str, Any], deadline: float) -> Any:
        return self._connected(deadline).call(method, params, deadline)

    def _pause(self, seconds: float) -> None:
        if self._closed.wait(seconds):
            raise ClientClosed("the client was closed")

    def _connected(self, deadline: float) -> Connection:
        """The living connection, or a new one to a new daemon, which has been told what notifications are wanted."""
        if not self._connecting.acquire(timeout=max(deadline - time.monotonic(), 0)):
            raise DeadlineExceeded("the daemon did not come up in time")
        try:
            if self._closed.is_set():
                raise ClientClosed("the client was closed")
            connection = self._connection
            if connection is None or not connection.alive:
                if connection is not None:
                    connection.end(min(1.0, max(deadline - time.monotonic(), 0)))
                connection = self._connection = self._spawn()
            wanted = (self._on_event, self._on_delta, self._on_notice)
            if not connection.greeted and any(callback is not None for callback in wanted):
                capabilities = {"events": self._events, "deltas": self._on_delta is not None}
                connection.call(
                    "initialize", {"protocolVersion": PROTOCOL_VERSION, "capabilities": capabilities}, deadline
                )
            connection.greeted = True
            return connection
        finally:
            self._connecting.release()

    def _spawn(self) -> Connection:
        if isinstance(self._stderr, Path):
            with self._stderr.open("ab") as log_file:
                return Connection(self._command, env=self._env, stderr=log_file, notify=self._notified)
        return Connection(self._command, env=self._env, stderr=self._stderr, notify=self._notified)

    def _notified(self, method: str, params: Json) -> None:
        if method == "run/event" and self._on_event is not None:
            self._on_event(params)
        elif method == "run/delta" and self._on_delta is not None:
            self._on_delta(params)
        elif method not in {"run/event", "run/delta"} and self._on_notice is not None:
            self._on_notice(method, params)


def _passes(error: ClientError) -> bool:
    """Whether the same request may succeed without anybody acting."""
    if isinstance(error, RpcError):
        return error.retryable and error.code not in NEEDS_SOMEONE
    return isinstance(error, ConnectionLost)


def _backoff(attempt: int) -> float:
    """Doubling, with jitter, so that many clients of one cause do not come back as one."""
    most: float = min(BACKOFF_MOST_S, BACKOFF_FIRST_S * 2 ** (attempt - 1))
    return random.uniform(most / 2, most)  # noqa: S311  (no secret)


def _at_rest(run: Json) -> bool:
    if run["status"] == "waiting":
        return bool(run["openApprovals"])
    return bool(run["status"] != "running")


def _installed() -> Command:
    """A virtual environment that is not activated has its script beside the interpreter, and not on PATH."""
    script = Path(sys.executable).with_name("rpcagent") if sys.executable else None
    if script is not None and os.access(script, os.X_OK):
        return (str(script), "serve")
    if script is not None and find_spec("rpcagent") is not None:
        return (sys.executable, "-m", "rpcagent", "serve")
    return ("rpcagent", "serve")
