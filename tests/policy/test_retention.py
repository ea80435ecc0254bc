"""Retention: by default all is kept, the first rule that fits decides, and what is not certain keeps."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, timezone

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rpcagent.policy.retention import Due, Retention, RetentionRule, due
from rpcagent.runs.instants import LONGEST_MS

NOW = datetime(2030, 6, 1, tzinfo=UTC)
DAY_MS = 86_400_000


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    place: int
    ended_at: str | None
    status: str = "completed"
    namespace: str = ""
    labels: dict[str, str] = {}
    unresolved: bool = False

    @property
    def run(self) -> str:
        return f"run_{self.place}"


def text(instant: datetime) -> str:
    """As a run says it: without a fraction where there is none, so that the order of texts is not that of times."""
    return str(msgspec.to_builtins(instant))


def ended(place: int, days_ago: float = 10.0, **other: object) -> Ended:
    return msgspec.structs.replace(Ended(place=place, ended_at=text(NOW - timedelta(days=days_ago))), **other)


def gone(rows: list[Ended], *rules: RetentionRule, now: datetime = NOW) -> list[str]:
    return [one.run for one in due(rows, now, Retention(rules))]


ANY = RetentionRule(after_ms=DAY_MS)


# What is kept


def test_without_rules_nothing_is_ever_deleted():
    rows = [ended(place, days_ago=3_000) for place in range(5)]
    assert due(rows, NOW, Retention()) == []
    assert Retention().horizon(NOW) is None


@pytest.mark.parametrize("status", ["ready", "running", "waiting", "damaged", "new_in_a_later_version"])
def test_a_run_that_has_not_ended_is_kept_and_counts_for_nothing(status: str):
    rows = [ended(1, status=status), ended(2)]
    assert gone(rows, ANY) == ["run_2"]
    assert gone([ended(1), ended(2, days_ago=5, status=status)], RetentionRule(keep=1)) == []


def test_an_unknown_outcome_keeps_its_run_for_as_long_as_it_is_unknown():
    rows = [ended(1, unresolved=True, status="cancelled"), ended(2, status="cancelled")]
    assert gone(rows, ANY) == ["run_2"]
    assert gone([*rows, ended(3, days_ago=1)], RetentionRule(keep=1)) == ["run_2"]
    assert gone([msgspec.structs.replace(rows[0], unresolved=False)], ANY) == ["run_1"]


@pytest.mark.parametrize("end", [None, "", "soon", "2030-01-01T00:00:00", "2030-13-01T00:00:00Z"])
def test_a_run_whose_end_cannot_be_read_is_kept_and_counts_for_nothing(end: str | None):
    assert gone([Ended(place=1, ended_at=end)], ANY) == []
    assert gone([Ended(place=9, ended_at=end), ended(1)], RetentionRule(keep=1)) == []


def test_an_end_ahead_of_the_clock_keeps_and_pushes_no_other_run_out():
    ahead = [ended(8, days_ago=-0.001), ended(9, days_ago=-30_000)]
    assert gone([*ahead, ended(1)], RetentionRule(keep=1)) == []
    assert gone([*ahead, ended(1), ended(2, days_ago=5)], RetentionRule(keep=1)) == ["run_1"]
    assert gone(ahead, RetentionRule(after_ms=0)) == []


def test_a_clock_that_runs_backwards_deletes_nothing_more():
    rows = [ended(place, days_ago=place) for place in range(1, 30)]
    for rule in (ANY, RetentionRule(keep=3), RetentionRule(after_ms=9 * DAY_MS, keep=2)):
        now = set(gone(rows, rule))
        for days in (1, 5, 40, 20_000):
            assert set(gone(rows, rule, now=NOW - timedelta(days=days))) <= now


# After


@pytest.mark.parametrize(
    ("early", "expected"),
    [(timedelta(microseconds=1), []), (timedelta(0), ["run_1"]), (timedelta(microseconds=-1), ["run_1"])],
)
def test_a_run_goes_exactly_so_long_after_its_end(early: timedelta, expected: list[str]):
    end = NOW - timedelta(days=7) + early
    rule = RetentionRule(after_ms=7 * DAY_MS)
    assert gone([Ended(place=1, ended_at=text(end))], rule) == expected
    elsewhere = end.astimezone(timezone(timedelta(hours=-8))).isoformat()
    assert gone([Ended(place=1, ended_at=elsewhere)], rule) == expected


def test_the_longest_duration_is_longer_than_any_run_is_old():
    assert gone([ended(1, days_ago=3_649)], RetentionRule(after_ms=LONGEST_MS)) == []
    assert gone([Ended(place=1, ended_at="9999-12-31T23:59:59Z")], RetentionRule(after_ms=LONGEST_MS)) == []
    assert gone([Ended(place=1, ended_at="0001-01-01T00:00:00Z")], RetentionRule(after_ms=LONGEST_MS)) == ["run_1"]


def test_the_run_that_ended_first_goes_first():
    rows = [ended(1, 5), ended(2, 20), ended(3, 5), ended(4, 10.5), ended(5, 10)]
    assert gone(rows, ANY) == ["run_2", "run_4", "run_5", "run_1", "run_3"]


# Keep


def test_the_newest_of_each_namespace_stay():
    rows = [ended(place, days_ago=place, namespace="ci" if place % 2 else "") for place in range(1, 9)]
    assert gone(rows, RetentionRule(keep=3)) == ["run_8", "run_7"]
    assert gone(rows, RetentionRule(namespace="ci", keep=1)) == ["run_7", "run_5", "run_3"]
    assert gone(rows, RetentionRule(keep=4)) == []


def test_of_runs_that_ended_together_the_later_place_is_the_newer():
    rows = [ended(3), ended(1), ended(2)]
    assert gone(rows, RetentionRule(keep=1)) == ["run_1", "run_2"]


def test_with_both_a_run_goes_only_if_neither_keeps_it():
    rows = [ended(place, days_ago=place) for place in range(1, 9)]
    assert gone(rows, RetentionRule(after_ms=6 * DAY_MS, keep=3)) == ["run_8", "run_7", "run_6"]
    assert gone(rows, RetentionRule(after_ms=DAY_MS, keep=6)) == ["run_8", "run_7"]


def test_a_rule_counts_only_the_runs_that_it_decides():
    rows = [ended(1, 3, labels={"kind": "demo"}), ended(2, 2), ended(3, 1, labels={"kind": "demo"})]
    assert gone(rows, RetentionRule(label="kind", keep=1), RetentionRule(keep=1)) == ["run_1"]


# Which rule

ROW = ended(1, namespace="ci", status="failed", labels={"kind": "demo", "hold": "", "a": "b=c"})


@pytest.mark.parametrize(
    ("rule", "fits"),
    [
        (RetentionRule(), True),
        (RetentionRule(namespace="ci"), True),
        (RetentionRule(namespace="c"), False),
        (RetentionRule(namespace=""), False),
        (RetentionRule(label="kind"), True),
        (RetentionRule(label="Kind"), False),
        (RetentionRule(label="demo"), False),
        (RetentionRule(label="kind=demo"), True),
        (RetentionRule(label="kind="), False),
        (RetentionRule(label="kind=dem"), False),
        (RetentionRule(label="hold"), True),
        (RetentionRule(label="hold="), True),
        (RetentionRule(label="a=b=c"), True),
        (RetentionRule(label="none="), False),
        (RetentionRule(statuses=("completed", "failed")), True),
        (RetentionRule(statuses=("completed",)), False),
        (RetentionRule(namespace="ci", label="kind", statuses=("failed",)), True),
        (RetentionRule(namespace="ci", label="kind", statuses=("completed",)), False),
    ],
)
def test_a_rule_is_about_the_runs_that_fit_all_its_conditions(rule: RetentionRule, fits: bool):
    assert rule.fits(ROW) is fits
    assert gone([ROW], msgspec.structs.replace(rule, after_ms=DAY_MS)) == (["run_1"] if fits else [])


def test_the_first_rule_that_fits_decides_alone():
    soon, late = RetentionRule(after_ms=DAY_MS), RetentionRule(after_ms=100 * DAY_MS)
    held = RetentionRule(label="hold")
    assert gone([ROW], soon, late) == ["run_1"]
    assert gone([ROW], late, soon) == []
    assert gone([ROW], held, soon) == []
    assert gone([ROW], RetentionRule(namespace="other"), soon) == ["run_1"]


def test_a_reason_names_the_rule_and_what_it_says():
    rules = (
        RetentionRule(namespace="a", after_ms=7 * DAY_MS, keep=1),
        RetentionRule(namespace="b", keep=1),
        RetentionRule(after_ms=90_000),
    )
    rows = [ended(place, days_ago=20 - place, namespace=name) for place, name in enumerate("aabbc")]
    assert due(rows, NOW, Retention(rules)) == [
        Due("run_0", "rules[0]: it ended 7d ago or earlier and it is not among the newest 1"),
        Due("run_2", "rules[1]: it is not among the newest 1"),
        Due("run_4", "rules[2]: it ended 90s ago or earlier"),
    ]


# All of it

labels = st.dictionaries(st.sampled_from(["kind", "hold"]), st.sampled_from(["", "demo"]))
rows_of_all_kinds = st.lists(
    st.builds(
        Ended,
        place=st.integers(0, 1_000),
        ended_at=st.one_of(
            st.integers(-3, 12).map(lambda days: text(NOW - timedelta(days=days))), st.just("soon"), st.none()
        ),
        status=st.sampled_from(["completed", "failed", "cancelled", "running"]),
        namespace=st.sampled_from(["", "ci"]),
        labels=labels,
        unresolved=st.booleans(),
    ),
    unique_by=lambda row: row.place,
    max_size=25,
)
rules_of_all_kinds = st.builds(
    RetentionRule,
    namespace=st.sampled_from([None, "", "ci"]),
    label=st.sampled_from([None, "kind", "kind=demo", "hold"]),
    statuses=st.sampled_from([(), ("completed",), ("failed", "cancelled")]),
    after_ms=st.one_of(st.none(), st.integers(0, 10).map(lambda days: days * DAY_MS)),
    keep=st.one_of(st.none(), st.integers(1, 4)),
)
many_rules = st.lists(rules_of_all_kinds, max_size=4).map(tuple)


def plainly_gone(rows: list[Ended], rules: tuple[RetentionRule, ...]) -> Iterator[str]:
    """The same by definition: each run beside all others."""

    def end(row: Ended) -> datetime:
        return datetime.fromisoformat(row.ended_at or "")

    def counts(row: Ended) -> bool:
        return row.status != "running" and row.ended_at not in {None, "soon"} and end(row) <= NOW

    def first(row: Ended) -> RetentionRule | None:
        return next((rule for rule in rules if rule.fits(row)), None)

    counting = sorted((row for row in rows if counts(row)), key=lambda row: (end(row), row.place))
    for row in counting:
        rule = first(row)
        if rule is None or row.unresolved or (rule.after_ms is None and rule.keep is None):
            continue
        newer = [
            other
            for other in counting
            if first(other) is rule
            and other.namespace == row.namespace
            and (end(other), other.place) > (end(row), row.place)
        ]
        young = rule.after_ms is not None and NOW - end(row) < timedelta(milliseconds=rule.after_ms)
        if not young and (rule.keep is None or len(newer) >= rule.keep):
            yield row.run


@settings(max_examples=400, deadline=None)
@given(rows_of_all_kinds, many_rules, st.randoms(use_true_random=False))
def test_what_goes_is_what_each_run_beside_all_others_says_in_any_order_of_rows(
    rows: list[Ended], rules: tuple[RetentionRule, ...], random: object
):
    rules = tuple(msgspec.structs.replace(rule) for rule in rules)  # each its own, to be told apart
    expected = list(plainly_gone(rows, rules))
    random.shuffle(rows)  # type: ignore[attr-defined]
    assert gone(rows, *rules) == expected


@settings(max_examples=200, deadline=None)
@given(rows_of_all_kinds, st.integers(1, 5))
def test_exactly_the_newest_stay(rows: list[Ended], keep: int):
    rows = [
        msgspec.structs.replace(row, namespace="", status="failed", unresolved=False)
        for row in rows
        if row.ended_at not in {None, "soon"} and datetime.fromisoformat(row.ended_at or "") <= NOW
    ]
    by_age = sorted(rows, key=lambda row: (datetime.fromisoformat(row.ended_at or ""), row.place))
    assert gone(rows, RetentionRule(keep=keep)) == [row.run for row in by_age[:-keep]]


@settings(max_examples=200, deadline=None)
@given(rows_of_all_kinds, many_rules, rows_of_all_kinds)
def test_another_run_never_saves_one_that_was_due(
    rows: list[Ended], rules: tuple[RetentionRule, ...], more: list[Ended]
):
    more = [msgspec.structs.replace(row, place=row.place + 2_000) for row in more]
    assert set(gone(rows, *rules)) <= set(gone(rows + more, *rules))


@settings(max_examples=200, deadline=None)
@given(rows_of_all_kinds, many_rules)
def test_once_the_due_runs_are_gone_no_more_are_due(rows: list[Ended], rules: tuple[RetentionRule, ...]):
    went = set(gone(rows, *rules))
    assert gone([row for row in rows if row.run not in went], *rules) == []


@settings(max_examples=200, deadline=None)
@given(rows_of_all_kinds, many_rules)
def test_runs_that_ended_after_the_horizon_change_nothing(rows: list[Ended], rules: tuple[RetentionRule, ...]):
    horizon = Retention(rules).horizon(NOW)
    near = [
        row
        for row in rows
        if horizon is not None
        and row.ended_at not in {None, "soon"}
        and datetime.fromisoformat(row.ended_at or "") <= horizon
    ]
    assert gone(near, *rules) == gone(rows, *rules)


def test_the_horizon_is_as_far_back_as_the_rules_allow():
    assert Retention((RetentionRule(after_ms=7 * DAY_MS), RetentionRule(after_ms=3 * DAY_MS))).horizon(
        NOW
    ) == NOW - timedelta(days=3)
    assert Retention((RetentionRule(after_ms=DAY_MS), RetentionRule(keep=1))).horizon(NOW) == NOW
    assert Retention((RetentionRule(after_ms=7 * DAY_MS, keep=1),)).horizon(NOW) == NOW
    assert Retention((RetentionRule(),)).horizon(NOW) is None
    start = datetime(1, 1, 2, tzinfo=UTC)
    assert Retention((RetentionRule(after_ms=DAY_MS * 30),)).horizon(start) == datetime.min.replace(tzinfo=UTC)


@settings(max_examples=300, deadline=None)
@given(rules_of_all_kinds, rules_of_all_kinds, st.lists(rows_of_all_kinds, max_size=3))
def test_a_rule_covers_another_if_it_fits_all_that_the_other_fits(
    rule: RetentionRule, other: RetentionRule, rows: list[list[Ended]]
):
    if rule.covers(other):
        assert all(rule.fits(row) for some in rows for row in some if other.fits(row))


@pytest.mark.parametrize(
    ("rule", "other", "covers"),
    [
        (RetentionRule(), RetentionRule(namespace="ci", label="kind", statuses=("failed",)), True),
        (RetentionRule(namespace="ci"), RetentionRule(), False),
        (RetentionRule(namespace="ci"), RetentionRule(namespace="ci", label="kind"), True),
        (RetentionRule(label="kind"), RetentionRule(label="kind=demo"), True),
        (RetentionRule(label="kind=demo"), RetentionRule(label="kind"), False),
        (RetentionRule(label="kind"), RetentionRule(label="hold"), False),
        (RetentionRule(label="kind"), RetentionRule(), False),
        (RetentionRule(statuses=("failed", "completed")), RetentionRule(statuses=("failed",)), True),
        (RetentionRule(statuses=("failed",)), RetentionRule(statuses=("failed", "completed")), False),
        (RetentionRule(statuses=("failed",)), RetentionRule(), False),
    ],
)
def test_which_rule_leaves_nothing_for_another(rule: RetentionRule, other: RetentionRule, covers: bool):
    assert rule.covers(other) is covers
