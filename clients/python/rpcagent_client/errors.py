"""What can go wrong between a caller and the daemon. Each error says whether asking again can help, and with which key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class ClientError(Exception):
    """Base of all errors of this package.

    `client_request_id` is the key that the request was sent with, where it had one. What became of the request may be
    unknown; sending the same request with the same key is always safe, now or after any number of restarts.
    """

    client_request_id: str | None = None


class RpcError(ClientError):
    """The daemon's answer is an error. Switch on `code` (`RUN_BUSY`, `STALE_DIGEST`); `number` is JSON-RPC's.

    `data` has what the code promises, such as `approvals` or `path`; `retryable`: the same key may be sent again.
    """

    def __init__(self, number: int, code: str, message: str, data: Mapping[str, Any]) -> None:
        super().__init__(f"{code} ({number}): {message}")
        self.number = number
        self.code = code
        self.message = message
        self.data = dict(data)

    @property
    def retryable(self) -> bool:
        return self.data.get("retryable") is True


class ConnectionLost(ClientError):
    """The daemon ended, or the wire to it broke, before it answered. The request may or may not have been accepted.

    `exit_code` is as in `subprocess` (-9: killed by signal 9); None where the process had not ended yet.
    """

    def __init__(self, what: str, exit_code: int | None, pid: int) -> None:
        super().__init__(f"{what} (pid {pid})")
        self.exit_code = exit_code
        self.pid = pid


class DaemonNotStarted(ClientError):
    """The command cannot be executed. Nothing was sent."""


class ProtocolError(ClientError):
    """What came from the daemon's standard output is no JSON-RPC 2.0: most likely the command is not the daemon."""


class DeadlineExceeded(ClientError, TimeoutError):
    """The time that the caller gave ran out. The daemon is left alone, and may still do what was asked."""


class ClientClosed(ClientError):
    """`close` was called. A request that was under way may or may not have been accepted."""
