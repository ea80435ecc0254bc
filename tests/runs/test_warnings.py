"""People are told before the disk is full, not only when it is."""

from __future__ import annotations

import anyio
import pytest
from rpcagent.runs import keeper

from .keeping import Store, virtual


@virtual
async def test_people_are_warned_before_the_disk_is_full_once_each_time_r_te_3(monkeypatch: pytest.MonkeyPatch):
    store = Store()
    async with store.life() as life, anyio.create_task_group() as group:
        left, warned = [keeper.LOW_BYTES], list[int]()

        async def free_bytes() -> int | None:
            return left[0] or None

        monkeypatch.setattr(life.archive, "free_bytes", free_bytes)
        assert life.keeper.room() == {}
        group.start_soon(life.keeper.keep, warned.append)
        shown = []
        for free in (
            keeper.LOW_BYTES,
            keeper.LOW_BYTES - 1,
            7,
            keeper.LOW_BYTES * 2 - 1,
            0,
            keeper.LOW_BYTES * 2,
            5,
            4,
        ):
            left[0] = free
            await anyio.sleep(keeper.IDLE_S * 2)
            shown.append((life.keeper.room().get("freeBytes"), life.keeper.room().get("low", False)))
        assert warned == [keeper.LOW_BYTES - 1, 5]
        assert shown == [
            (keeper.LOW_BYTES, False), (keeper.LOW_BYTES - 1, True), (7, True), (keeper.LOW_BYTES * 2 - 1, True), (None, False),
            (keeper.LOW_BYTES * 2, False), (5, True), (4, True),
        ]  # fmt: skip
        group.cancel_scope.cancel()
