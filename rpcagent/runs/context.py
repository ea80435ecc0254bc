"""The model's context: a pure function of events. No clock, no file, no server.

The bytes of the next request are the same in the process that lived and in the one that replayed. Each message extends a
chained hash, so that the request's hash costs the same however long the history is.
"""

from __future__ import annotations

import re
from typing import Any

from msgspec.structs import replace

from rpcagent.ids import digest_of
from rpcagent.runs.state import RECENT_STEPS, Message, RunState, Step

_DIGEST = re.compile("[0-9a-f]{64}")


def said(state: RunState, messages: tuple[Message, ...]) -> RunState:
    """The state with `messages` at the end of its context."""
    context_hash = state.context_hash
    for message in messages:
        context_hash = digest_of([context_hash, message])
    return replace(state, messages=state.messages + messages, context_hash=context_hash)


def keeping(state: RunState, blobs: tuple[str, ...], result: dict[str, Any] | None) -> RunState:
    """The state of a run that refers to large outputs from now on. An event of before `blobs` names its output in the result
    alone, and so does one that came too late."""
    content = (result or {}).get("structuredContent")
    if not blobs and isinstance(content, dict) and "outputFile" in content:
        digest = content.get("outputSha256")
        blobs = (digest,) if isinstance(digest, str) and _DIGEST.fullmatch(digest) else ()
    return replace(state, blobs=tuple(dict.fromkeys(state.blobs + blobs))) if blobs else state


def context_after_turn(state: RunState) -> RunState:
    """The state with the present turn's results moved into the context: exactly one for each call, in call order."""
    done = tuple(state.steps[i] for i in state.turn)
    model = (state.steps[state.model_step],) if state.model_step else ()
    if not done and not model:
        return state
    results = tuple(
        Message(role="tool", step_id=s.step_id, provider_id=s.provider_id, result=result_for_model(s)) for s in done
    )
    gone = {s.step_id for s in model + done}
    kept = {i: s for i, s in state.steps.items() if i not in gone}
    recent = (state.recent + model + done)[-RECENT_STEPS:]
    return said(replace(state, steps=kept, recent=recent, turn=(), model_step=None), results)


def result_for_model(step: Step) -> dict[str, Any]:
    """What the model is told about a settled call. It is always told something, and never a guess."""
    if step.status == "completed" and step.result is not None:
        return step.result
    if step.status == "completed":
        text = "A person confirmed that this happened. Its result is not known."
    elif step.status == "failed" and step.error:
        text = f"Failed ({step.error.kind}): {step.error.message}"
    elif step.status == "denied":
        text = "Not run: " + ((step.error.message or step.error.kind) if step.error else "denied")
    elif step.status == "unknown":
        text = "Unknown outcome: it may or may not have happened. It was not run again, and nobody could tell."
    else:
        text = "Not run: withdrawn."
    return {"content": [{"type": "text", "text": text}], "isError": step.status != "completed"}
