"""Allow, ask or deny: deny beats ask beats allow, and what no rule names is asked unless it only reads."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest
from rpcagent.policy.rules import hidden_paths, stricter, verdict
from rpcagent.runs.definition import Definition, Rule, Verdict
from rpcagent.runs.effects import EffectClass, ToolSpec

ORDER: dict[Verdict, int] = {"allow": 0, "ask": 1, "deny": 2}


def spec(name: str = "files.write", effect: EffectClass = "idempotent") -> ToolSpec:
    return ToolSpec(name=name, effect=effect)


@pytest.mark.parametrize(
    ("effect", "expected"),
    [("read_only", "allow"), ("idempotent", "ask"), ("reconcilable", "ask"), ("at_most_once", "ask")],
)
def test_what_no_rule_names_is_asked_unless_it_only_reads(effect: EffectClass, expected: Verdict):
    assert verdict((), spec(effect=effect), {}) == (expected, None)
    assert verdict((Rule(do="allow", tool="other.*"),), spec(effect=effect), {}) == (expected, None)


@pytest.mark.parametrize("rules", list(permutations([Rule(do="allow"), Rule(do="ask"), Rule(do="deny")])))
def test_the_strictest_rule_wins_in_any_order(rules: tuple[Rule, ...]):
    for count in (1, 2, 3):
        some = rules[:count]
        strictest = max(some, key=lambda rule: ORDER[rule.do])
        assert verdict(some, spec(), {}) == (strictest.do, strictest)


@pytest.mark.parametrize(
    ("rule", "arguments", "holds"),
    [
        (Rule(do="allow", tool="files.write"), {}, True),
        (Rule(do="allow", tool="files.*"), {}, True),
        (Rule(do="allow", tool="*.write"), {}, True),
        (Rule(do="allow", tool="Files.*"), {}, False),
        (Rule(do="allow", tool="files"), {}, False),
        (Rule(do="allow", effect="idempotent"), {}, True),
        (Rule(do="allow", effect="at_most_once"), {}, False),
        (Rule(do="allow", arguments={"branch": "feature/*"}), {"branch": "feature/a"}, True),
        (Rule(do="allow", arguments={"branch": "feature/*"}), {"branch": "main"}, False),
        (Rule(do="allow", arguments={"branch": "*"}), {}, False),
        (Rule(do="allow", arguments={"force": "false"}), {"force": False}, True),
        (Rule(do="allow", arguments={"force": "false"}), {"force": True}, False),
        (Rule(do="allow", arguments={"count": "1"}), {"count": 1}, True),
        (Rule(do="allow", arguments={"count": "1"}), {"count": 10}, False),
        (Rule(do="allow", paths=("src/*", "docs/*")), {"path": "docs/a"}, True),
        (Rule(do="allow", paths=("src/*",)), {"path": "lib/a"}, False),
        (Rule(do="allow", paths=("src/*",)), {}, False),
        (Rule(do="allow", paths=("src/*",)), {"path": ["src/a"]}, False),
        (Rule(do="allow", paths=("src/*",)), {"path": "src/../secret"}, False),
        (Rule(do="allow", paths=("src/*",)), {"path": "./src//a"}, True),
        (Rule(do="allow", paths=("src/*",)), {"path": "/w/src/a"}, True),
        (Rule(do="allow", paths=("src/*",)), {"path": "/etc/passwd"}, False),
        (Rule(do="allow", tool="files.*", effect="at_most_once"), {}, False),
    ],
)
def test_every_condition_that_is_given_must_hold(rule: Rule, arguments: dict[str, Any], holds: bool):
    assert verdict((rule,), spec(), arguments, "/w") == (("allow", rule) if holds else ("ask", None))


@pytest.mark.parametrize("pinned", ORDER)
@pytest.mark.parametrize("present", [None, *ORDER])
def test_the_stricter_of_pinned_and_present_policy_holds(pinned: Verdict, present: Verdict | None):
    now = None if present is None else (Rule(do=present),)
    told, rule = stricter((Rule(do=pinned),), now, spec(), {})
    assert told == (pinned if present is None else max(pinned, present, key=lambda v: ORDER[v]))
    assert rule is not None
    assert rule.do == told


def test_of_two_rules_that_say_the_same_the_first_one_bounds_the_question():
    first, second = Rule(do="ask", expires_ms=1), Rule(do="ask", expires_ms=2)
    assert verdict((first, second), spec(), {}) == ("ask", first)
    assert verdict((Rule(do="allow"), second, first), spec(), {}) == ("ask", second)


@pytest.mark.parametrize(
    ("rule", "hides"),
    [
        (Rule(do="deny", paths=("a/*", "b")), True),
        (Rule(do="deny", tool="files.*", paths=("a/*", "b")), True),
        (Rule(do="deny", tool="[f]*", paths=("a/*", "b")), True),
        (Rule(do="deny", tool="files.read", paths=("a/*", "b")), True),
        (Rule(do="deny", tool="files.search", paths=("a/*", "b")), True),
        (Rule(do="deny", effect="read_only", paths=("a/*", "b")), True),
        (Rule(do="deny", tool="files.write", paths=("a/*", "b")), False),
        (Rule(do="deny", effect="idempotent", paths=("a/*", "b")), False),
        (Rule(do="deny", tool="notes.*", paths=("a/*", "b")), False),
        (Rule(do="deny", arguments={"limit": "5"}, paths=("a/*", "b")), False),
        (Rule(do="ask", paths=("a/*", "b")), False),
        (Rule(do="deny"), False),
    ],
)
def test_paths_that_may_not_be_looked_at_are_hidden_and_those_that_may_not_be_written_are_not(rule: Rule, hides: bool):
    hidden = ("a/*", "b") if hides else ()
    assert hidden_paths(Definition(agent="x", rules=(rule,)), {}) == hidden
    assert hidden_paths(Definition(agent="x"), {"x": (rule,), "y": (Rule(do="deny", paths=("c",)),)}) == hidden
