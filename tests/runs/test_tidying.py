"""Retention where the log takes only some deletions: the files of those make room for the others, and nothing else goes. F025."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from rpcagent import errors
from rpcagent.runs import events as ev
from rpcagent.runs import roster

from .keeping import Life, Shelf, Store, virtual

RUNS = 12


class Narrow(Store):
    """`room`: so many deletions its log still takes. The files of a run have room for `each` more."""

    room, each = RUNS, 0
    state = "ok"

    async def append(self, run: str, epoch: int, expected_seq: int, count: int, body: bytes, **named: Any) -> Any:
        if any(isinstance(event, ev.RunDeleted) for event in ev.decode(body).events):
            if self.room == 0:
                self.state = "full"
                raise errors.StorageError("no space", errno="ENOSPC")
            self.room -= 1
        return await super().append(run, epoch, expected_seq, count, body, **named)

    def health(self) -> dict[str, Any]:
        return {"state": self.state}


class NarrowShelf(Shelf):
    """Its mark regains what the log holds in reserve, where that has nothing to move."""

    store: Narrow

    async def remove(self, run_ids: Sequence[str]) -> None:
        self.store.room += self.store.each * sum(run in self.histories for run in run_ids)
        await super().remove(run_ids)

    async def mark(self) -> Any:
        mark = await super().mark()
        if not mark.ends and self.store.room:
            self.store.state = "ok"
        return mark


async def filed(life: Life, store: Narrow) -> list[str]:
    runs = [await life.start(f"k{number}") for number in range(RUNS)]
    await life.start("kept")
    await life.keeper.checkpoint()
    store.let_go |= set(runs)
    return runs


@pytest.fixture(autouse=True)
def no_resident_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roster, "RESIDENT", 0)


@virtual
async def test_deletions_that_the_log_has_no_room_for_wait_for_the_files_of_those_before_f025():
    store = Narrow()
    async with store.life(NarrowShelf) as life:
        runs = await filed(life, store)
        store.room, store.each = 2, 2
        assert {due.run_id for due in await life.keeper.tidy()} == set(runs)
        assert life.overview() == ({"completed": 1}, [])
        assert (store.graves, len(store.histories), store.state) == (set(runs), 1, "ok")
        for run in runs:
            assert [type(event) for event in store.events(run)].count(ev.RunDeleted) == 1


@virtual
async def test_where_the_files_make_no_room_either_what_was_deleted_is_gone_and_the_rest_stays_f025():
    store = Narrow()
    async with store.life(NarrowShelf) as life:
        runs = await filed(life, store)
        store.room = 2
        with pytest.raises(errors.StorageError):
            await life.keeper.tidy()
        gone = [run for run in runs if run not in store.histories]
        assert len(gone) == 2
        assert life.overview() == ({"completed": RUNS - 1}, [])
        assert all(isinstance(store.events(run)[-1], ev.RunDeleted) for run in gone)
        assert not any(isinstance(event, ev.RunDeleted) for run in store.histories for event in store.events(run))
        store.room = RUNS
        assert len(await life.keeper.tidy()) == RUNS - 2
        assert (store.graves, len(store.histories)) == (set(runs), 1)
