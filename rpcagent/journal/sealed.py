"""The commit port of an encrypted store: payloads are sealed on their way to the log.

Knows: where a payload belongs. Does not know: keys (`seal`), or the log (`commit`).
"""

from __future__ import annotations

from typing import Any

from rpcagent.journal import seal
from rpcagent.journal.wal import Mark


class SealedCommit:
    """The commit port, with payloads sealed on their way to the log."""

    def __init__(self, journal: Any, sealed: seal.Seal) -> None:
        self._journal, self._seal = journal, sealed
        self.store_id: str = journal.store_id
        self.epoch: int = journal.epoch

    async def append(
        self, run_id: str, epoch: int, expected_seq: int, count: int, body: bytes, *, outcome: bool = False
    ) -> Any:
        sealed = self._seal.seal(seal.record_context(run_id, expected_seq + 1), body)
        return await self._journal.append(run_id, epoch, expected_seq, count, sealed, outcome=outcome)

    async def mark(self) -> Mark:
        found: Mark = await self._journal.mark()
        return found

    def health(self) -> dict[str, Any]:
        found: dict[str, Any] = self._journal.health()
        return found

    async def close(self) -> None:
        await self._journal.close()
