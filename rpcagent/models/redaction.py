"""Secrets by reference: taken from the environment for one call, and taken out of everything that comes back.

Knows: `${NAME}`, and how a provider echoes a key (whole, or its ends with stars between). Does not know: what a key is
for, or who is asked. A value of fewer than 8 characters is not looked for; it would be found in any text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import msgspec

REFERENCE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

_LENGTH = 8
_LOOKS_SECRET = re.compile(
    r"\b(?:sk|pk|rk|gsk|xai|hf|key)[-_][A-Za-z0-9_*.\-]{6,}|\bBearer\s+[A-Za-z0-9_*.~+/=\-]{6,}"
    r"|[A-Za-z0-9_\-]{0,64}\*{3,}[A-Za-z0-9_\-]{0,64}"
)


class Secrets:
    """The secrets of one call, by name. Never logged, never kept longer than the call."""

    def __init__(self, values: Mapping[str, str]) -> None:
        self._values = dict(values)
        # The longest first: one that holds another is replaced whole.
        found = sorted(
            ((form, name) for name, value in values.items() if len(value) >= _LENGTH for form in _forms(value)),
            key=lambda pair: (-len(pair[0]), pair),
        )
        self._found = tuple(found)

    def filled(self, text: str) -> str:
        """`text` with its `${NAME}` replaced by the values. Raises KeyError for a name that is not there."""
        return REFERENCE.sub(lambda match: self._values[match.group(1)], text)

    def removed(self, text: str) -> str:
        """`text` with each value replaced by `${NAME}`."""
        for form, name in self._found:
            text = text.replace(form, f"${{{name}}}")
        return text

    def told(self, text: str, most: int) -> str:
        """The beginning of `text`, and whatever looks like a key is gone too: for what a server says about a request it
        refuses. It is cut after the values are out, so that no half of one is left."""
        return _LOOKS_SECRET.sub("[secret]", self.removed(text)[:most])

    def held_back(self, text: str) -> int:
        """How many characters at the end of `text` could be the beginning of a secret."""
        longest = 0
        for form, _ in self._found:
            for length in range(min(len(form) - 1, len(text)), longest, -1):
                if text.endswith(form[:length]):
                    longest = length
                    break
        return longest


class Sieve:
    """Takes secrets out of a text that comes in pieces, also where one is cut in two: what may be the beginning of a
    secret is held back until the next piece tells."""

    def __init__(self, secrets: Secrets) -> None:
        self._secrets = secrets
        self._rest = ""

    def feed(self, piece: str) -> str:
        text = self._secrets.removed(self._rest + piece)
        held = self._secrets.held_back(text)
        self._rest = text[len(text) - held :]
        return text[: len(text) - held]

    def end(self) -> str:
        rest, self._rest = self._rest, ""
        return rest


def names_in(texts: Iterable[str]) -> list[str]:
    """The names that are referred to, sorted."""
    return sorted({name for text in texts for name in REFERENCE.findall(text)})


def _forms(value: str) -> set[str]:
    """The value, and as it stands inside a JSON text."""
    return {value, msgspec.json.encode(value).decode()[1:-1]}
