"""Summaries of runs, as `state.json`, the manifest and the index have them: decoded, and opened.

Knows: that heads are readable without a key, and the body is not. Does not know: which files there are, or what a body says.
"""

from __future__ import annotations

import msgspec
from msgspec import Raw
from msgspec.structs import replace

from rpcagent.journal import runfiles, seal, tail
from rpcagent.runs import summary
from rpcagent.runs.summary import Summary


def opened_summary(sealed: seal.Seal, run_id: str, raw: bytes) -> Summary:
    """The summary with its body as it was. Raises StoreDamaged, StoreTooNew, and KeyMissing where no key opens it."""
    heads = decoded(run_id, raw)
    body = sealed.open(seal.summary_context(run_id, heads.last_seq), bytes(heads.body))
    return replace(heads, body=Raw(body))


def decoded(run_id: str, raw: bytes) -> Summary:
    """The summary, its body as it was written. Raises StoreTooNew."""
    try:
        return summary.decode(raw)
    except msgspec.DecodeError as error:
        raise tail.too_new(None, runfiles.state_of(run_id), 0) from error
