"""Ids and keys: derived, never drawn.

The only drawn id is the store's, by the journal, when a store is made. All others follow from it, from what the caller
named and from ordinals, so that a replay, a retry and a lost answer all arrive at the same id.
"""

from __future__ import annotations

import base64
import hashlib
import re
from typing import Any

import msgspec

_KEY = re.compile(r"[A-Za-z0-9._:/-]{1,128}")
_RUN = re.compile(r"run_[a-z2-7]{26}")
_canonical = msgspec.json.Encoder(order="deterministic")


def hash26(*parts: str) -> str:
    """26 characters of base32 (130 bits) over the parts. The separator cannot occur in a part that passed its check."""
    digest = hashlib.sha256("\x1f".join(parts).encode()).digest()
    return base64.b32encode(digest[:20]).decode().lower()[:26]


def canonical_json(value: Any) -> bytes:
    """The bytes that digests are made of: keys sorted, no white space."""
    return _canonical.encode(value)


def digest_of(value: Any) -> str:
    """`sha256:` + 64 hex digits over the canonical JSON of `value`."""
    return "sha256:" + hashlib.sha256(canonical_json(value)).hexdigest()


def is_request_key(text: str) -> bool:
    """A `clientRequestId`: 1 to 128 of `A-Z a-z 0-9 . _ : / -`."""
    return _KEY.fullmatch(text) is not None


def is_run_id(text: str) -> bool:
    return _RUN.fullmatch(text) is not None


def run_id(store_id: str, namespace: str, client_request_id: str) -> str:
    """The store is in it: a test store and a production store never send the same effect key to one service."""
    return "run_" + hash26(store_id, namespace, client_request_id)


def step_id(run: str, ordinal: int) -> str:
    """`ordinal` counts the steps of a run from 1."""
    return f"stp_{run.removeprefix('run_')}_{ordinal}"


def approval_id(run: str, ordinal: int) -> str:
    """`ordinal` counts the approvals of a run from 1."""
    return f"apr_{run.removeprefix('run_')}_{ordinal}"


def effect_key(step: str, request_hash: str) -> str:
    """The idempotency key sent outside: of the step, not of the attempt, and bound to exactly these arguments."""
    return "key_" + hash26(step, request_hash)
