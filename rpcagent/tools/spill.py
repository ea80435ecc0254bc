"""What a command has printed, of any length: its two ends to show, and the whole in the store.

Knows: how to take it in bounded memory, how to cut it so that a reader sees that it was cut and where the whole is, and that
a full disk costs the whole output and never the command. Does not know: where contents are kept and how they become
durable, which is `Blobs`; nor what the command was.
"""

from __future__ import annotations

import codecs
import hashlib
from typing import Protocol

import anyio.to_thread
import msgspec

from rpcagent import errors

OUTPUT_BYTES = 64 * 1024 * 1024
HEAD_BYTES = 24 * 1024
TAIL_BYTES = 24 * 1024
SHOWN_BYTES = 56 * 1024
"""As JSON, in which a control character takes six bytes. With the notes, less than what a result may have."""


class Writer(Protocol):
    """One content on its way; ended by `keep` or `drop`."""

    def write(self, data: bytes) -> None:
        """Raises OSError; then it can only be dropped."""

    def keep(self) -> str:
        """Its SHA-256, under which it is durable on return. Waits for the disk: not for the event loop. Raises OSError: it
        is dropped."""
        ...

    def drop(self) -> None:
        """Does nothing after `keep`, and nothing twice. Raises nothing."""


class Blobs(Protocol):
    """Where large contents are kept, each under its SHA-256, for as long as a run refers to it."""

    def create(self) -> Writer:
        """Raises OSError."""
        ...


class Output:
    """What a command has printed: head and tail in memory, the whole in a blob once it is longer than those. To be closed.

    `blobs` None: of what is longer, only head and tail remain."""

    def __init__(self, blobs: Blobs | None) -> None:
        self.size = 0
        self.full = False
        self.trouble = ""
        """Why the whole was not kept: the name of an errno."""
        self.kept: str | None = None
        """The digest of the blob that has the whole output, durable."""
        self._blobs = blobs
        self._writer: Writer | None = None
        self._hash = hashlib.sha256()
        self._head = bytearray()
        self._tail = bytearray()

    @property
    def sha256(self) -> str:
        return self._hash.hexdigest()

    def add(self, piece: bytes) -> bool:
        """False: this was the last that is wanted."""
        if self.size + len(piece) > OUTPUT_BYTES:
            self.full = True
            piece = piece[: OUTPUT_BYTES - self.size]
        if self._writer is None and self.size + len(piece) > HEAD_BYTES + TAIL_BYTES:
            self._open()
        self._write(piece)
        self._hash.update(piece)
        self.size += len(piece)
        room = HEAD_BYTES - len(self._head)
        self._head += piece[:room]
        self._tail += piece[room:] if room else piece
        if len(self._tail) > 4 * TAIL_BYTES:
            del self._tail[:-TAIL_BYTES]
        return not self.full

    async def keep(self) -> None:
        """Makes the whole durable where not all of it can be shown. Then `kept` names it, or `trouble` says why not."""
        if self._whole() is not None:
            return
        if self._writer is None:
            self._open()
        if self._writer is None:
            return
        try:
            self.kept = await anyio.to_thread.run_sync(self._writer.keep)
        except OSError as error:
            self._give_up(error)

    def shown(self) -> tuple[str, bool]:
        """The text, and whether it is only a part of the output. To be asked after `keep`."""
        if (whole := self._whole()) is not None:
            return whole, False
        head = codecs.getincrementaldecoder("utf-8")("replace").decode(
            bytes(self._head)
        )  # leaves a character cut in two
        tail = bytes(self._tail[-TAIL_BYTES:])
        for _ in range(3):
            tail = tail[1:] if tail and tail[0] & 0xC0 == 0x80 else tail
        ending = tail.decode("utf-8", "replace")
        half = SHOWN_BYTES // 2
        head, ending = _fitting(head, half), _fitting(ending[::-1], half)[::-1]
        where = f"and is kept as {named(self.kept)}" if self.kept is not None else f"sha256 {self.sha256}"
        marker = f"[cut: this is the head and the tail; the whole output has {self.size} bytes, {where}]"
        return f"{head}\n{marker}\n{ending}", True

    def close(self) -> None:
        """Drops what is not kept."""
        if self._writer is not None:
            self._writer.drop()
            self._writer = None

    def _whole(self) -> str | None:
        """All of it as text, where that is short enough to be shown."""
        if self.size > HEAD_BYTES + TAIL_BYTES:
            return None
        text = (self._head + self._tail).decode("utf-8", "replace")
        return text if _json_bytes(text) <= SHOWN_BYTES else None

    def _open(self) -> None:
        """Everything so far is still in memory: the blob begins with it."""
        if self._blobs is None or self.trouble:
            return
        try:
            self._writer = self._blobs.create()
        except OSError as error:
            self._give_up(error)
        self._write(bytes(self._head + self._tail))

    def _write(self, piece: bytes) -> None:
        if self._writer is None:
            return
        try:
            self._writer.write(piece)
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        """The command goes on: what it does matters more than what it says."""
        self.trouble = errors.name_of(error)
        self.close()


def named(digest: str) -> str:
    """What a result calls a blob: its file, as seen from the store, wherever the store is."""
    return f"blobs/{digest}"


def _json_bytes(text: str) -> int:
    return len(msgspec.json.encode(text))


def _fitting(text: str, most: int) -> str:
    """The longest start of `text`, or nearly so, that has at most `most` bytes as JSON."""
    while (size := _json_bytes(text)) > most:
        text = text[: len(text) * most // size]
    return text
