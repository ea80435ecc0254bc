"""The soak in short: many lives of one store, killed at moments that nobody chose, and every answer held against all before.
P1-P6. The long form is `python -m tests.soak`.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.soak.chain import Chain, Tally

pytestmark = pytest.mark.process

LIVES, LIFE_S = 6, 0.6
PLAIN, WITH_A_KEY = 1, 3
MOST_LIVES = 60
PLANTED = {
    "tombstones are not kept": ("NOT_FOUND", "a deleted run came back"),
    "summaries lack live runs": (
        "not what is listed",
        "not listed",
        "is gone",
        "need no attention",
        "waits for nothing",
    ),
}
"""Bugs, and in which words they may come out: it depends on what is asked first."""


def soak(folder: Path, seed: int, *, lives: int, planted: tuple[str, ...] = ()) -> Tally:
    with Chain(folder, seed, planted=planted, life_s=LIFE_S) as chain:
        tally = chain.run(lives=lives)
    print(tally.text())
    return tally


def test_over_many_short_lives_nothing_acknowledged_is_lost_and_nothing_is_done_twice(tmp_path: Path):
    with ThreadPoolExecutor(2) as pool:
        tallies = list(pool.map(lambda seed: soak(tmp_path / str(seed), seed, lives=LIVES), (PLAIN, WITH_A_KEY)))
    assert [tally.finding for tally in tallies] == ["", ""]
    assert [(tally.encrypted, tally.lives) for tally in tallies] == [(False, LIVES + 1), (True, LIVES + 1)]
    for tally in tallies:  # there was something to get wrong
        assert tally.kills >= LIVES // 2
        assert min(tally.checkpoints, tally.deleted, tally.effects, tally.runs - tally.deleted) > 0
        assert min(tally.commands["verify"], tally.commands["backup"]) > 0


def test_planted_bugs_are_found_and_the_finding_says_where(tmp_path: Path):
    def plant(bug: str) -> Tally:
        return soak(tmp_path / bug, PLAIN, lives=MOST_LIVES, planted=(bug,))

    with ThreadPoolExecutor(len(PLANTED)) as pool:
        tallies = dict(zip(PLANTED, pool.map(plant, PLANTED), strict=True))
    for bug, tally in tallies.items():
        assert tally.finding.startswith(f"seed {PLAIN}, life {tally.lives}, operation {tally.operations} (")
        assert any(words in tally.finding for words in PLANTED[bug]), tally.finding
        assert (tmp_path / bug / "operations.jsonl").stat().st_size > 0
