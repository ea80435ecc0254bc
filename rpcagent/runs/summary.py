"""What is kept in memory, and in one line of a checkpoint, of a run that is not being driven. Pure.

Knows: which facts of a run must be at hand without its history: enough for `list`, for the counts and questions in
`status`, for timers, and for the choice of the runs that a start has to read. Does not know: files, or how a body is sealed.

The heads stay readable where payloads are encrypted; `body` holds what was said and done.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

import msgspec

from rpcagent.runs.state import RunState
from rpcagent.runs.view import needs_attention, run_status, run_view

NEXT_OPENING = -1
"""An epoch that no run was released in: a summary shows a run as the next opening of the store finds it."""


class Body(msgspec.Struct, frozen=True):
    """JSON values, as `status` and `list` show them."""

    view: msgspec.Raw
    attention: msgspec.Raw


class Summary(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True, gc=False):
    """One run, at its event `last_seq`. `place`: where it stands in `list`, for ever. `wake`: when the clock changes it.
    `started_at` and `ended_at`: of a run that has ended. `hot`: it goes on by itself, so a start reads it at once. `policy`: a digest of the present policy that it was decided
    under. `blobs`: what it refers to. `unresolved`: a person may still tell how a step of it ended."""

    place: int
    status: str
    last_seq: int
    body: msgspec.Raw
    namespace: str = ""
    agent: str = ""
    labels: dict[str, str] = {}
    started_at: datetime | None = None
    ended_at: datetime | None = None
    wake: datetime | None = None
    hot: bool = False
    policy: str = ""
    unresolved: bool = False
    asks: bool = False
    blobs: tuple[str, ...] = ()

    @property
    def live(self) -> bool:
        """It stays in memory and in the manifest: it has not ended, or a person is still asked how a step of it ended."""
        return self.ended_at is None or self.asks


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Summary).decode
_decode_body = msgspec.json.Decoder(Body).decode


def summarise(state: RunState, place: int, policy: str) -> tuple[Summary, bytes]:
    """The heads, with an empty body, and the body's bytes."""
    lines = needs_attention(state, NEXT_OPENING)
    body = _encode({"view": run_view(state, NEXT_OPENING, busy=False), "attention": lines})
    heads = Summary(
        place=place,
        status=run_status(state, NEXT_OPENING, busy=False),
        last_seq=state.last_seq,
        body=msgspec.Raw(b"{}"),
        namespace=state.namespace,
        agent=state.definition.agent,
        labels=state.labels,
        started_at=state.started_at if state.ended else None,
        ended_at=state.last_at if state.ended else None,
        wake=None if state.ended else wakes_at(state),
        hot=is_hot(state),
        policy="" if state.ended and not lines else policy,
        unresolved=bool(state.unresolved),
        asks=bool(lines),
        blobs=state.blobs,
    )
    return heads, body


def damaged(run_id: str, place: int, why: str) -> tuple[Summary, bytes]:
    """Of a run whose records cannot be replayed: it is read again at each start, and asked about until then."""
    view = {"runId": run_id, "status": "damaged", "damaged": why}
    body = _encode({"view": view, "attention": [{"runId": run_id, "kind": "damaged"}]})
    heads = Summary(place=place, status="damaged", last_seq=0, body=msgspec.Raw(b"{}"), hot=True, asks=True)
    return heads, body


def is_hot(state: RunState) -> bool:
    """Whether it goes on by itself, or has something in doubt: whatever a start must look at without being asked."""
    if state.ended:
        return False
    if state.phase == "cancelling" or state.step_request is not None or state.stopping is not None:
        return True
    if any(step.status == "started" for step in state.steps.values()):
        return True
    return run_status(state, NEXT_OPENING, busy=False) == "running"


def wakes_at(state: RunState) -> datetime | None:
    """The earliest instant at which time alone changes it. While a person is asked about one call, others go on."""
    due = [a.expires_at for a in state.approvals.values() if a.expires_at is not None]
    if all(a.kind == "tool_call" for a in state.open_approvals()):
        going = (s for s in state.open_steps() if s.status in {"not_started", "started"})
        due += [s.retry_at for s in going if s.retry_at is not None]
    return min(due, default=None)


def encode(heads: Summary, body: bytes) -> bytes:
    return _encode(msgspec.structs.replace(heads, body=msgspec.Raw(body)))


def decode(raw: bytes | msgspec.Raw) -> Summary:
    """Raises msgspec.ValidationError. The body is a copy: it does not keep the whole of `raw` in memory."""
    found = _decode(raw)
    return msgspec.structs.replace(found, body=msgspec.Raw(bytes(found.body)))


def view_of(body: bytes) -> dict[str, Any]:
    """The run as `list` shows it."""
    view: dict[str, Any] = msgspec.json.decode(_decode_body(body).view)
    return view


def attention_of(body: bytes) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = msgspec.json.decode(_decode_body(body).attention)
    return lines
