"""The index of ended runs: what it finds, how fast, and that no state of its file is an error."""

from __future__ import annotations

import resource
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import closing
from datetime import UTC, datetime
from itertools import product
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rpcagent import errors
from rpcagent.journal.index import Ended, Index, IndexUnusable, page_query

STORE = "sto_1"
MANY = 100_000


def row(place: int, **other: object) -> Ended:
    plain = Ended(
        run=f"run_{place:026d}",
        place=place,
        status="completed",
        namespace="",
        agent="fixer",
        labels={"kind": "demo"},
        started_at="2030-01-01T00:00:00Z",
        ended_at="2030-01-02T00:00:00Z",
        bytes=1_000,
        blobs=(),
        unresolved=False,
        summary=b'{"place":%d}' % place,
    )
    return msgspec.structs.replace(plain, **other)


def made(path: Path, rows: Iterable[Ended] = (), through: int = 5) -> Index:
    index = Index(path)
    index.update(rows, (), through, STORE)
    return index


def everything(index: Index) -> list[Ended]:
    return index.page(0, 1_000_000, namespace=None, agent=None, statuses=())


def never() -> Iterable[Ended]:
    raise AssertionError("the index is made anew")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "index.sqlite"


# What it holds


def test_a_new_index_is_empty_and_for_its_owner_alone(path: Path):
    with closing(Index(path)) as index:
        assert (index.through, index.store_id, index.counts(), everything(index)) == (0, "", {}, [])
        assert (index.find("run_x"), list(index.blobs())) == (None, [])
        index.update([row(1)], (), 1, STORE)
        assert {p.name: p.stat().st_mode & 0o777 for p in path.parent.iterdir()} == {
            "index.sqlite": 0o600,
            "index.sqlite-wal": 0o600,
            "index.sqlite-shm": 0o600,
        }


def test_what_was_put_in_comes_out_whole(path: Path):
    rows = [
        row(1, labels={}, blobs=("a" * 64, "b" * 64), summary=bytes(range(256)) * 100, unresolved=True),
        row(2, namespace="ci", agent="d\0é", labels={"": '"', "k=v": "\n"}, status="failed", summary=b"", bytes=2**50),
        row(3, status="cancelled", ended_at="never", started_at=""),
    ]
    with closing(made(path, rows)) as index:
        assert everything(index) == rows
        assert [index.find(each.run) for each in rows] == rows
        assert (index.through, index.store_id) == (5, STORE)
        assert index.counts() == {"cancelled": 1, "completed": 1, "failed": 1}
    with closing(Index(path)) as index:
        assert everything(index) == rows


def test_an_update_may_be_repeated_and_its_last_word_counts(path: Path):
    with closing(made(path, [row(1), row(2), row(3)])) as index:
        for _ in range(2):
            index.update([row(2, status="failed"), row(4), row(4, agent="other")], ["run_none", row(1).run], 9, STORE)
            assert everything(index) == [row(2, status="failed"), row(3), row(4, agent="other")]
            assert (index.through, index.counts()) == (9, {"completed": 2, "failed": 1})


def test_an_update_that_cannot_go_on_has_changed_nothing(path: Path):
    def cut() -> Iterator[Ended]:
        yield row(2)
        raise errors.StoreDamaged("cut", file="runs/x/state.json", offset=0, reason="cut")

    with closing(made(path, [row(1)])) as index:
        with pytest.raises(errors.StoreDamaged):
            index.update(cut(), [row(1).run], 9, STORE)
        assert (everything(index), index.through, index.counts()) == ([row(1)], 5, {"completed": 1})


def test_what_an_update_returned_for_is_there_after_a_kill(path: Path, tmp_path: Path):
    with closing(made(path)) as index:
        assert index._database.execute("PRAGMA synchronous").fetchone() == (2,)  # FULL: a commit is a sync
        for count in range(1, 30):
            index.update([row(count)], (), count, STORE)
            left = tmp_path / str(count)
            left.mkdir()
            for name in ("index.sqlite", "index.sqlite-wal"):
                shutil.copy(path.with_name(name), left / name)
            with closing(Index.open_or_rebuild(left / path.name, never, count, STORE, {"completed": count})) as found:
                assert everything(found) == [row(place) for place in range(1, count + 1)]


def test_a_full_disk_changes_nothing_and_is_no_damage(path: Path):
    with closing(made(path, [row(1)])) as index:
        pages = index._database.execute("PRAGMA page_count").fetchone()[0]
        index._database.execute(f"PRAGMA max_page_count = {pages}")
        with pytest.raises(errors.StorageError) as caught:
            index.update([row(place, summary=bytes(10_000)) for place in range(2, 50)], (), 9, STORE)
        assert (type(caught.value), caught.value.details) == (errors.StorageError, {"errno": "ENOSPC"})
        assert (everything(index), index.through) == ([row(1)], 5)
        index._database.execute("PRAGMA max_page_count = 100000")
        index.update([row(2)], (), 9, STORE)
        assert everything(index) == [row(1), row(2)]


# Pages

NAMESPACES = ("", "ci", "rare")
AGENTS = ("fixer", "odd")
STATUSES = ("completed", "failed", "cancelled")
FILTERS = list(product((None, *NAMESPACES), (None, *AGENTS), ((), ("failed",), ("failed", "completed"), STATUSES)))


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(
        st.integers(0, 60),
        st.tuples(st.sampled_from(NAMESPACES), st.sampled_from(AGENTS), st.sampled_from(STATUSES)),
        min_size=12,
    ),
    st.sampled_from(FILTERS),
    st.integers(1, 7),
    st.integers(0, 30),
)
def test_pages_put_together_are_the_matching_runs_by_place(
    tmp_path_factory: pytest.TempPathFactory,
    runs: dict[int, tuple[str, str, str]],
    wanted: tuple[str | None, str | None, tuple[str, ...]],
    limit: int,
    first: int,
):
    namespace, agent, statuses = wanted
    rows = [row(place, run=f"run_{-place}", namespace=n, agent=a, status=s) for place, (n, a, s) in runs.items()]
    with closing(made(tmp_path_factory.mktemp("index") / "index.sqlite", rows)) as index:
        found: list[Ended] = []
        place = first
        while True:
            page = index.page(place, limit, namespace=namespace, agent=agent, statuses=statuses)
            assert len(page) <= limit
            if not page:
                break
            found += page
            place = page[-1].place + 1
    assert found == [
        each
        for each in sorted(rows, key=lambda each: each.place)
        if each.place >= first
        and namespace in {None, each.namespace}
        and agent in {None, each.agent}
        and (not statuses or each.status in statuses)
    ]


def test_a_status_that_no_run_has_matches_none(path: Path):
    with closing(made(path, [row(1)])) as index:
        assert index.page(0, 10, namespace=None, agent=None, statuses=("running",)) == []
        assert index.page(0, 10, namespace=None, agent=None, statuses=("running", "completed")) == [row(1)]


def test_two_runs_at_one_place_are_both_there(path: Path):
    both = [row(1, run="run_a"), row(1, run="run_b")]
    with closing(made(path, both)) as index:
        assert everything(index) == both


@pytest.mark.parametrize(("namespace", "agent", "statuses"), FILTERS)
def test_no_page_scans_the_table_or_sorts_more_than_its_hits(
    path: Path, namespace: str | None, agent: str | None, statuses: tuple[str, ...]
):
    no_filter = (namespace, agent, statuses) == (None, None, ())
    query, values = page_query(7, 10, namespace, agent, None if no_filter else statuses or STATUSES)
    with closing(made(path)) as index:
        plan = [
            line.replace(" TABLE ", " ") for *_, line in index._database.execute(f"EXPLAIN QUERY PLAN {query}", values)
        ]
    name = "_".join(n for n, given in (("namespace", namespace), ("agent", agent)) if given is not None)
    ranges = [line for line in plan if " ended" in line and "PRIMARY KEY" not in line]
    if no_filter:
        assert ranges == ["SEARCH ended USING COVERING INDEX by_place (place>?)"]
    else:
        columns = "".join(f"{each}=? AND " for each in name.split("_") if each)
        expected = f"SEARCH ended USING COVERING INDEX by_{name or 'status'} ({columns}status=? AND place>?)"
        assert ranges == [expected] * len(statuses or STATUSES)
    by_row = [line.removesuffix(" LEFT-JOIN") for line in plan if "PRIMARY KEY" in line]
    assert by_row == ["SEARCH ended USING INTEGER PRIMARY KEY (rowid=?)"]
    assert sum("TEMP B-TREE" in line for line in plan) <= 1  # of the hits of all ranges


def crowd() -> Iterator[Ended]:
    for place in range(MANY):
        yield row(
            place,
            namespace="rare" if place % 10_000 == 7 else "ci" if place % 2 else "",
            agent="odd" if place % 9_000 == 3 else "fixer",
            status="failed" if place % 20_000 == 5 else "cancelled" if place % 7 == 0 else "completed",
            ended_at=f"2030-{place // 10_000 + 1:02d}-01T00:00:00Z",
            blobs=(f"{place % 1_000:064x}",),
            summary=b"x" * 500,
        )


def quickest(call: Callable[[], object]) -> float:
    """In seconds, of several: what else the machine does counts less."""
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return min(times)


def test_each_page_of_a_hundred_thousand_runs_takes_less_than_20_ms(path: Path):
    with closing(Index.rebuild(path, crowd, 5, STORE)) as index:
        assert index.counts() == {"cancelled": 14_285, "completed": 85_710, "failed": 5}

        def page(place: int, wanted: tuple[str | None, str | None, Collection[str]]) -> list[Ended]:
            return index.page(place, 100, namespace=wanted[0], agent=wanted[1], statuses=wanted[2])

        slow = {}
        for wanted, place in product(FILTERS, (0, MANY // 2, MANY - 50)):
            taken = quickest(lambda wanted=wanted, place=place: page(place, wanted))
            if taken > 0.020:
                slow[wanted, place] = taken
        assert slow == {}
        assert [each.place for each in page(0, (None, None, ("failed",)))] == [5, 20_005, 40_005, 60_005, 80_005]

        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        assert sum(1 for _ in index.expired(datetime(2031, 1, 1, tzinfo=UTC))) == MANY
        assert len(list(index.blobs())) == 1_000
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 16 * 1024  # KiB; all rows have 50 MiB
    assert quickest(lambda: Index.open_or_rebuild(path, never, 5, STORE, index_counts).close()) < 0.020


index_counts = {"cancelled": 14_285, "completed": 85_710, "failed": 5}


# For retention


def test_expired_runs_come_by_their_end_without_summaries(path: Path):
    rows = [
        row(1, ended_at="2030-01-03T00:00:00Z"),
        row(2, ended_at="2030-01-01T00:00:00.5Z", summary=b"x" * 10_000),
        row(3, ended_at="2030-01-01T02:00:00+02:00"),
        row(4, ended_at="2030-01-01T00:00:00Z"),
        row(5, ended_at="soon"),
        row(6, ended_at="2030-01-01T00:00:00"),
    ]
    with closing(made(path, rows)) as index:
        found = list(index.expired(datetime(2030, 1, 1, 0, 0, 0, 500_000, tzinfo=UTC)))
        assert found == [msgspec.structs.replace(rows[at], summary=b"") for at in (2, 3, 1)]
        assert list(index.expired(datetime(2029, 12, 31, tzinfo=UTC))) == []
        assert len(list(index.expired(datetime.max.replace(tzinfo=UTC)))) == 4


def test_each_blob_that_is_referred_to_comes_once(path: Path):
    with closing(made(path, [row(1, blobs=("b", "a")), row(2, blobs=("b",)), row(3, blobs=("c",))])) as index:
        assert list(index.blobs()) == ["a", "b", "c"]
        index.update((), [row(3).run], 6, STORE)
        assert list(index.blobs()) == ["a", "b"]


def test_blobs_of_rows_that_cannot_be_seen_are_not_taken_for_unused(path: Path):
    with closing(made(path, [row(1, blobs=("a",)), row(2, blobs=("b",))])) as index:
        index._database.execute("UPDATE totals SET n = 3")
        with pytest.raises(IndexUnusable, match="2 of 3 rows can be read"):
            index.blobs()
        assert everything(index) == [row(1, blobs=("a",)), row(2, blobs=("b",))]  # and it can be asked on


# Threads and processes


def test_a_writer_and_a_reader_go_on_beside_each_other(path: Path):
    made(path).close()
    over = threading.Event()
    seen: list[int] = []
    faults: list[BaseException] = []

    def read() -> None:
        try:
            with closing(Index(path)) as index:
                while not over.is_set() or not seen:
                    found = everything(index)
                    assert found == [row(place) for place in range(len(found))]
                    assert len(found) % 5 == 0
                    seen.append(len(found))
        except BaseException as error:  # noqa: BLE001 - told by the test
            faults.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        with closing(Index(path)) as index:
            for batch in range(30):
                index.update([row(batch * 5 + one) for one in range(5)], (), 6 + batch, STORE)
    finally:
        over.set()
        reader.join(timeout=30)
    assert faults == []
    assert seen == sorted(seen)


def test_an_index_goes_from_thread_to_thread(path: Path):
    with closing(made(path, [row(1)])) as index:
        found: list[Ended] = []
        other = threading.Thread(target=lambda: found.extend(everything(index)))
        other.start()
        other.join(30)
        assert found == [row(1)]


def test_a_reader_in_the_middle_of_many_rows_keeps_no_writer_out(path: Path):
    with closing(made(path, [row(place) for place in range(1_000)])) as index, closing(Index(path)) as reader:
        old = reader.expired(datetime(2040, 1, 1, tzinfo=UTC))
        assert next(old).place == 0
        index.update([row(2_000)], [row(999).run], 6, STORE)
        assert [each.place for each in old] == list(range(1, 1_000))  # as it was when it began


def test_a_process_that_opens_no_index_does_not_load_sqlite():
    code = "import sys, rpcagent.journal.index; print('sqlite3' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "False\n"
