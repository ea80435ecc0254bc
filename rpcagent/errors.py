"""Every error the product can answer with: one class a row, in one table.

Knows: the string code that clients switch on, the JSON-RPC number, whether the same `clientRequestId` may be sent
again, and the members that `error.data` carries. Does not know: who raises it, or how it is put on the wire.

A message is for a person and says what to do. It never carries the text of a foreign exception: an adapter maps what it
catches to one of these, and only the log on standard error sees the original.
"""

from __future__ import annotations

import errno
from typing import Any, ClassVar


def name_of(error: OSError) -> str:
    """The name of its errno, as `data.errno` has it; EIO for one without."""
    return errno.errorcode.get(error.errno or 0, "EIO")


class RpcAgentError(Exception):
    """An answer that is an error. `details` are JSON values that join `code` and `retryable` in `error.data`."""

    number: ClassVar[int]
    code: ClassVar[str]
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, retryable: bool | None = None, **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.details = details
        self._retryable = retryable

    @property
    def data(self) -> dict[str, Any]:
        retryable = self.retryable if self._retryable is None else self._retryable
        return {"code": self.code, "retryable": retryable, **self.details}


class ParseError(RpcAgentError):
    """The bytes are no JSON. details: reason."""

    number, code = -32700, "PARSE"


class InvalidRequest(RpcAgentError):
    """JSON, but no JSON-RPC 2.0 request. details: reason."""

    number, code = -32600, "INVALID_REQUEST"


class MethodNotFound(RpcAgentError):
    """There is no such method. details: method, and methods (all that exist)."""

    number, code = -32601, "METHOD_NOT_FOUND"


class InvalidParams(RpcAgentError):
    """details: path (`$.a.b`, of the member at fault) and reason."""

    number, code = -32602, "INVALID_PARAMS"

    def __init__(self, reason: str, *, path: str = "$", **details: Any) -> None:
        super().__init__(f"{path}: {reason}", path=path, reason=reason, **details)


class InternalError(RpcAgentError):
    """A fault of ours. details: incident (the id under which standard error has the whole story)."""

    number, code = -32603, "INTERNAL"


class Cancelled(RpcAgentError):
    """Reserved: no request is answered with it in this version."""

    number, code = -32800, "CANCELLED"


class Overloaded(RpcAgentError):
    """Too much at once. details: limit (the name of the limit in `initialize`)."""

    number, code, retryable = -32001, "OVERLOADED", True


class NotFound(RpcAgentError):
    """This store has no such run, approval or output. details: of a run runId and storeId, the store that was asked (and
    deleted, if it was there once); else approvalId, stepId or digest."""

    number, code = -32002, "NOT_FOUND"


class UnsupportedVersion(RpcAgentError):
    """The protocol version is not one of ours. details: supported (a list)."""

    number, code = -32022, "UNSUPPORTED_VERSION"


class IdempotencyConflict(RpcAgentError):
    """The key was used with another method or other params. details: method, fingerprints."""

    number, code = -32050, "IDEMPOTENCY_CONFLICT"


class RunBusy(RpcAgentError):
    """A step of the run is being performed. Wait for it, or send its own key to join."""

    number, code, retryable = -32051, "RUN_BUSY", True


class ApprovalRequired(RpcAgentError):
    """The run waits for an answer to a question. details: approvals (the open ones)."""

    number, code, retryable = -32052, "APPROVAL_REQUIRED", True


class UnknownOutcome(RpcAgentError):
    """Whether a step happened is not known, and only a person can tell. details: approvals (the open ones)."""

    number, code, retryable = -32053, "UNKNOWN_OUTCOME", True


class AlreadyDecided(RpcAgentError):
    """The first answer stands. details: approvalId, decision, decidedAt, source (`person`), decidedBy (if it said so) and
    clientRequestId of the request that gave it."""

    number, code = -32054, "ALREADY_DECIDED"


class StaleDigest(RpcAgentError):
    """What was shown is not what would run now. details: digest (the present one)."""

    number, code = -32055, "STALE_DIGEST"


class InvalidState(RpcAgentError):
    """The run is in a state in which this cannot be done. details: status of the run. Of a question that was closed without
    an answer: approval (expired, voided or withdrawn), approvalId, closedAt, source (`expiry`, `cancel`, `end` of the run,
    `daemon` with a reason), and clientRequestId of the `cancel`."""

    number, code = -32056, "INVALID_STATE"


class StoreLocked(RpcAgentError):
    """Another process owns the store. details: pid, host, since (as far as the lock file tells)."""

    number, code, retryable = -32057, "STORE_LOCKED", True


class StorageError(RpcAgentError):
    """Nothing was recorded; the write was undone. details: errno (its name, `ENOSPC`)."""

    number, code, retryable = -32058, "STORAGE", True


class StoragePoisoned(StorageError):
    """A sync or an undo failed: what was written may or may not last. The process ends with exit code 70."""

    retryable = False


class CursorInvalid(RpcAgentError):
    """The cursor is beyond the end, or of another store. details: lastSeq, where it is one of a run."""

    number, code = -32059, "CURSOR_INVALID"


class KeyExpired(RpcAgentError):
    """The run was deleted by the rules of retention: its keys stay taken, so that no retry begins it anew. details: runId."""

    number, code = -32060, "KEY_EXPIRED"


class Incompatible(RpcAgentError):
    """What the run depends on cannot be had, or a later version wrote the store. details: format, supported."""

    number, code, retryable = -32061, "INCOMPATIBLE", True


class StoreDamaged(RpcAgentError):
    """What was acknowledged cannot be read. details: file, offset (bytes), reason; runs where known."""

    number, code = -32062, "STORE_DAMAGED"


class StoreTooNew(Incompatible):
    """The store was written by a later version. details: format (found), supported."""

    retryable = False


ALL: tuple[type[RpcAgentError], ...] = (
    ParseError, InvalidRequest, MethodNotFound, InvalidParams, InternalError, Cancelled, Overloaded, NotFound,
    UnsupportedVersion, IdempotencyConflict, RunBusy, ApprovalRequired, UnknownOutcome, AlreadyDecided, StaleDigest,
    InvalidState, StoreLocked, StorageError, CursorInvalid, KeyExpired, Incompatible, StoreDamaged,
)  # fmt: skip
"""One class for each code, in the order of the specification. `protocol/errors.md` is generated from it."""
