"""From the pieces of a chat-completions answer to one ModelReply. Pure.

Knows: what OpenAI-compatible servers send, streamed or whole, and where they differ: calls in fragments or in one piece,
indexes that are missing or always 0, ids that are missing or all the same. Does not know: bytes, sockets, status codes.

Two calls are never made one, and a call that was cut or is no JSON object runs never: it gets a problem and no arguments.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from rpcagent.models.chat import Names
from rpcagent.models.redaction import Secrets, Sieve
from rpcagent.runs.events import Trouble, Usage
from rpcagent.runs.outcomes import AskedCall, ModelReply, NotDone

CALLS_MOST = 128
DEPTH_MOST = 100
TOKENS_MOST = 10**12
"""More than that, nobody has counted."""
_ID_SHOWN = 200
_NAME_SHOWN = 120
_STOP_SHOWN = 40

CUT_ANSWER = "The answer was cut off by the limit on its length. Answer again, more briefly."
CUT_CALL = (
    "The call was cut off by the limit on the answer's length and was not run. Call again with shorter arguments, or in "
    "smaller parts."
)
TOO_DEEP = f"The arguments are nested more than {DEPTH_MOST} deep, and the call was not run."
FILTERED = "The provider's content filter stopped the answer. Answer in another way."


class _Partial:
    """One call while its pieces come in. They are joined when they are looked at, not one by one."""

    def __init__(self, index: int | None) -> None:
        self.index = index
        self.id = ""
        self.name = ""
        self.begun = False
        self._pieces: list[str] = []

    @property
    def arguments(self) -> str:
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    def add(self, arguments: str) -> None:
        if arguments.strip():
            self.begun = True
        if arguments:
            self._pieces.append(arguments)

    def complete(self) -> bool:
        """Whether the arguments are a whole object. Most pieces tell by their end that they are not."""
        if self._pieces[-1].rstrip()[-1:] not in {"}", ""}:
            return False
        try:
            return isinstance(msgspec.json.decode(self.arguments), dict)
        except (msgspec.MsgspecError, RecursionError, UnicodeError):
            return False


class Assembly:
    """Feed it every object of the answer, in order; `reply` is what they come to."""

    def __init__(self, names: Names, secrets: Secrets) -> None:
        self._names = names
        self._secrets = secrets
        self._sieve = Sieve(secrets)
        self._text: list[str] = []
        self._calls: list[_Partial] = []
        self._usage = Usage()
        self._chose = False
        self.stop = ""
        """Why the answer ended; empty while it has not."""

    def feed(self, piece: Mapping[str, Any]) -> str:
        """Takes one chunk, or a whole answer; gives the text that it adds."""
        self._usage = _usage(piece.get("usage")) or self._usage
        choices = piece.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            # More than one choice is never asked for.
            if isinstance(choice, dict) and not choice.get("index"):
                return self._choice(choice)
        return ""

    def end(self) -> str:
        """The text that was held back, when nothing more comes."""
        text = self._sieve.end()
        self._text.append(text)
        return text

    def reply(self) -> ModelReply | NotDone:
        """The whole answer. `end` comes before it."""
        text = "".join(self._text)
        stop = (self.stop or "stop")[:_STOP_SHOWN]
        if not self._chose:
            return bad_answer("The answer has no choices.")
        if self.stop == "content_filter":
            return ModelReply(text=text, usage=self._usage, stop=stop, problem=FILTERED)
        if len(self._calls) > CALLS_MOST:
            problem = f"The answer asks for {len(self._calls)} calls; at most {CALLS_MOST} are taken at once."
            return ModelReply(text=text, usage=self._usage, stop=stop, problem=problem)
        cut = self.stop == "length"
        calls = tuple(self._asked(call, cut=cut and call is self._calls[-1]) for call in self._calls)
        if calls or (text.strip() and not cut):
            return ModelReply(text=text, calls=calls, usage=self._usage, stop=stop)
        if cut:
            return ModelReply(text=text, usage=self._usage, stop=stop, problem=CUT_ANSWER)
        if self.stop == "error":
            return bad_answer("The provider ended the answer with an error and did not say which.")
        return bad_answer("The answer has neither text nor a tool call.")

    def _choice(self, choice: dict[str, Any]) -> str:
        self._chose = True
        if isinstance(choice.get("finish_reason"), str):
            self.stop = choice["finish_reason"]
        said = choice.get("delta")
        if not isinstance(said, dict):
            said = choice.get("message")
            # A last chunk that repeats the whole answer adds nothing to a stream that gave it already.
            if not isinstance(said, dict) or self._text or self._calls:
                return ""
        entries = said.get("tool_calls")
        if not isinstance(entries, list):
            entries = [{"function": said["function_call"]}] if isinstance(said.get("function_call"), dict) else []
        touched: set[int] = set()
        for entry in entries:
            if isinstance(entry, dict):
                self._fragment(entry, touched)
        text = self._sieve.feed(_text_of(said.get("content")) or _text_of(said.get("refusal")))
        if text:
            self._text.append(text)
        return text

    def _fragment(self, entry: dict[str, Any], touched: set[int]) -> None:
        function = entry.get("function")
        function = function if isinstance(function, dict) else {}
        given_id, name = _text_of(entry.get("id")), _text_of(function.get("name"))
        arguments = function.get("arguments")
        if arguments is not None and not isinstance(arguments, str):
            arguments = msgspec.json.encode(arguments).decode()
        index = entry.get("index")
        index = index if type(index) is int else None
        call = self._belongs_to(index, given_id)
        if call is None or self._begins_another(call, given_id, name, arguments or "", again=id(call) in touched):
            call = _Partial(index)
            self._calls.append(call)
        touched.add(id(call))
        call.id = call.id or given_id
        if name and name != call.name:
            call.name += name
        call.add(arguments or "")

    def _belongs_to(self, index: int | None, given_id: str) -> _Partial | None:
        """The call that a fragment would go on: by its index; without one by its id; with neither, the last."""
        for call in reversed(self._calls):
            if index is not None and call.index is not None:
                if call.index == index:
                    return call
            elif not given_id or not call.id or call.id == given_id:
                return call
        return None

    def _begins_another(self, call: _Partial, given_id: str, name: str, arguments: str, *, again: bool) -> bool:
        """Whether the fragment is not of `call` after all, though it comes under the same index or id."""
        if given_id and call.id and given_id != call.id:
            return True
        if not name:
            return False  # nothing begins without a name
        if again:
            return True  # two entries with a name in one piece are two calls
        if call.begun:
            # Nothing can follow a complete object.
            return call.complete() and (bool(arguments.strip()) or name != call.name)
        # A name may come in fragments, and may be repeated; after a tool's whole name another name is another call.
        return name != call.name and self._names.known(call.name)

    def _asked(self, call: _Partial, *, cut: bool) -> AskedCall:
        tool = self._names.ours(call.name)[:_NAME_SHOWN] or "(no name)"
        arguments, problem = read_arguments(self._secrets.removed(call.arguments))
        if cut and (problem or not call.begun):
            problem = CUT_CALL
        return AskedCall(
            tool=self._secrets.removed(tool),
            arguments=arguments,
            provider_id=self._secrets.removed(call.id)[:_ID_SHOWN],
            problem=problem,
        )


def bad_answer(message: str) -> NotDone:
    """An answer came and is none. Nothing happened outside, and another try may give a better one."""
    return NotDone(error=Trouble(kind="bad_answer", message=message))


def read_arguments(text: str) -> tuple[dict[str, Any], str]:
    """The arguments, and what is wrong with them. Never both: of what is wrong, nothing goes back to the model."""
    if not text.strip():
        return {}, ""
    try:
        value = msgspec.json.decode(text)
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
        reason = str(error) if isinstance(error, msgspec.MsgspecError) else "it is nested too deep"
        return (
            {},
            f"The arguments are not valid JSON ({reason}), and the call was not run. Send them whole, as one object.",
        )
    if not isinstance(value, dict):
        return {}, f"The arguments must be a JSON object, not {_kind(value)}; the call was not run."
    return ({}, TOO_DEEP) if too_deep(value) else (value, "")


def too_deep(value: Any) -> bool:
    """Whether objects and lists stand in one another more than DEPTH_MOST deep."""
    layer = [value]
    for _ in range(DEPTH_MOST):
        layer = [
            inner
            for outer in layer
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not layer:
            return False
    return True


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, str):
        return "a text"
    return "a list" if isinstance(value, list) else "a number"


def _text_of(value: Any) -> str:
    """A text, or the texts of a list of parts."""
    if isinstance(value, list):
        return "".join(_text_of(part.get("text")) for part in value if isinstance(part, dict))
    return value if isinstance(value, str) else ""


def _usage(value: Any) -> Usage | None:
    if not isinstance(value, dict):
        return None
    counts = [value.get("prompt_tokens"), value.get("completion_tokens")]
    tokens = [min(count, TOKENS_MOST) if type(count) is int and count > 0 else 0 for count in counts]
    return Usage(input_tokens=tokens[0], output_tokens=tokens[1]) if any(tokens) else None
