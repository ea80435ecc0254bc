"""A client of rpcagent in the standard library alone: it spawns the daemon, and outlives it.

    from rpcagent_client import Client

    with Client(store="/var/lib/me/agents") as client:
        started = client.start("default", "Tidy up the notes.", client_request_id="tidy-2031-04-01")
        shown = client.wait(started["runId"], timeout=600)
        for question in shown["approvals"]:
            client.approve(started["runId"], question["approvalId"], question["digest"], "allow")

The retry contract
------------------

`start`, `step`, `resume`, `approve` and `cancel` carry a `clientRequestId`, the caller's durable idempotency key. When one
of them returns, it is durable: no crash takes it back. The daemon decides once for each key, and answers every repeat
from the record (`replayed: true`) with the same decision.

So this client sends a request again, with the same key and the same params, whenever the answer is missing or says that
asking again may help:

- the daemon died, or the answer was lost with it: the daemon is started again and asked again;
- the error says `data.retryable`, such as STORE_LOCKED, STORAGE or RUN_BUSY: asked again on the same connection.

Between attempts it waits (doubling, with jitter); it stops after `attempts`, or when `timeout` seconds are over in all.
It does not ask again what only someone can change: permanent errors, and APPROVAL_REQUIRED, UNKNOWN_OUTCOME, INCOMPATIBLE
or a run that waits for `resume`, whose key stays good for later. Nor does it kill a daemon that is silent: it may be in
the middle of an effect. `status`, `list` and `events` have no key and change nothing; they are repeated alike. `call` and
`shutdown` are sent once.

A key that is not given is a fresh UUID, which protects this one call. A caller that may itself die gives its own key,
stored or derived before the call (a ticket's number, a message's id), and after a restart simply makes the same call
again. Each error carries the key that it was about, as `client_request_id`.

Use one key for one intention: the same key with other params is IDEMPOTENCY_CONFLICT.
"""

from rpcagent_client.client import Client
from rpcagent_client.errors import (
    ClientClosed,
    ClientError,
    ConnectionLost,
    DaemonNotStarted,
    DeadlineExceeded,
    ProtocolError,
    RpcError,
)

__all__ = [
    "Client",
    "ClientClosed",
    "ClientError",
    "ConnectionLost",
    "DaemonNotStarted",
    "DeadlineExceeded",
    "ProtocolError",
    "RpcError",
]
