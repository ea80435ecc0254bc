"""Retention as a configuration says it: what is read, what is refused and at which line, and whose word it needs."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from rpcagent import config, errors
from rpcagent.config import ConfigError, FileConfig, RetentionParams, RetentionRuleParams, retention_of
from rpcagent.policy.retention import Retention, RetentionRule

DAY_MS = 86_400_000

TEXT = """\
[retention]
rules = [
    { namespace = "ci", after = "7d", keep = 100 },
    { label = "kind=demo", after = "1d" },
    { namespace = "", statuses = ["failed", "cancelled"], keep = 5 },
    { after = "90d" },
]
"""

BAD: dict[str, tuple[str, str]] = {
    "a rule that deletes nothing": (
        '[retention]\nrules = [\n  { after = "1d", namespace = "ci" },\n  { label = "kind" },\n]\n',
        '4: $.retention.rules[1]: this deletes nothing; say when a run may go: after = "30d", keep = 100, or both',
    ),
    "a duration that is none": (
        '[retention]\nrules = [\n  { after = "a week" },\n]\n',
        "3: $.retention.rules[0].after: a duration is a whole number and ms, s, m, h or d, such as `24h`",
    ),
    "a duration of nothing": (
        '[[retention.rules]]\nlabel = "x"\n\nafter = "0d"\n',
        "4: $.retention.rules[0].after: a duration here is more than 0, such as `7d`",
    ),
    "a duration beyond all use": (
        '[[retention.rules]]\nafter = "3651d"\n',
        "2: $.retention.rules[0].after: a duration is at most 3650d",
    ),
    "a number for a duration": (
        "[[retention.rules]]\nafter = 7\n",
        "2: $.retention.rules[0].after: a text is wanted, and this is a whole number",
    ),
    "none to keep": (
        '[[retention.rules]]\nafter = "1d"\nkeep = 0\n',
        "3: $.retention.rules[0].keep: at least 1 run is kept; to delete by age alone, leave this out",
    ),
    "a text for a number": (
        '[[retention.rules]]\nkeep = "100"\n',
        "2: $.retention.rules[0].keep: a whole number is wanted, and this is a text",
    ),
    "a namespace that is none": (
        '[[retention.rules]]\nkeep = 1\nnamespace = "c i"\n',
        "3: $.retention.rules[0].namespace: at most 64 characters of A-Z a-z 0-9 . _ -",
    ),
    "a label without a name": (
        '[[retention.rules]]\nkeep = 1\nlabel = "=demo"\n',
        "3: $.retention.rules[0].label: a label is a name, or name=value",
    ),
    "a status of a run that goes on": (
        '[[retention.rules]]\nkeep = 1\nstatuses = ["waiting"]\n',
        "3: $.retention.rules[0].statuses[0]: 'waiting' is not one of completed, failed, cancelled",
    ),
    "a status that is no list": (
        '[[retention.rules]]\nkeep = 1\nstatuses = "failed"\n',
        "3: $.retention.rules[0].statuses: a list is wanted, and this is a text; put it in square brackets",
    ),
    "a key with another name": (
        '[[retention.rules]]\nstatus = ["failed"]\n',
        "2: $.retention.rules[0].status: there is no such key; did you mean `statuses`?",
    ),
    "a rule without its list": (
        '[retention]\nafter = "7d"\n',
        "2: $.retention.after: there is no such key; there are: rules",
    ),
    "a rule after one that decides about all": (
        '[retention]\nrules = [\n  { after = "90d" },\n  { label = "hold", after = "3650d" },\n]\n',
        "4: $.retention.rules[1]: no run comes this far, rules[0] decides about all of these; put this rule before it",
    ),
}


def written(folder: Path, text: str = TEXT) -> Path:
    path = folder / config.FILE_NAME
    path.write_text(text)
    return path


def refusal(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        config.load(path)
    return str(caught.value)


def test_the_rules_of_a_file_are_read_in_their_order(tmp_path: Path):
    read = config.load(written(tmp_path))
    assert retention_of(read.retention) == Retention(
        (
            RetentionRule(namespace="ci", after_ms=7 * DAY_MS, keep=100),
            RetentionRule(label="kind=demo", after_ms=DAY_MS),
            RetentionRule(namespace="", statuses=("failed", "cancelled"), keep=5),
            RetentionRule(after_ms=90 * DAY_MS),
        )
    )
    assert msgspec.json.decode(msgspec.json.encode(read), type=FileConfig) == read


@pytest.mark.parametrize("text", ["", "[retention]\n", "[retention]\nrules = []\n"])
def test_a_file_that_says_nothing_of_it_keeps_everything(tmp_path: Path, text: str):
    assert retention_of(config.load(written(tmp_path, text)).retention) == Retention()
    assert retention_of(config.EMPTY.retention) == Retention()


@pytest.mark.parametrize("case", BAD)
def test_what_is_wrong_is_told_with_its_line_and_the_way_out(case: str, tmp_path: Path):
    text, complaint = BAD[case]
    path = written(tmp_path, text)
    assert refusal(path) == f"{path}:{complaint}"


def test_each_rule_that_is_wrong_is_told_and_a_wrong_one_stands_in_no_other_ones_way(tmp_path: Path):
    path = written(
        tmp_path, '[retention]\nrules = [\n{ after = "x" },\n{ keep = 0 },\n{ keep = 1 },\n{ keep = 2 },\n]\n'
    )
    assert refusal(path).splitlines() == [
        f"{path}:3: $.retention.rules[0].after: a duration is a whole number and ms, s, m, h or d, such as `24h`",
        f"{path}:4: $.retention.rules[1].keep: at least 1 run is kept; to delete by age alone, leave this out",
        f"{path}:6: $.retention.rules[3]: no run comes this far, rules[2] decides about all of these; put this rule before it",
    ]


def test_rules_that_do_not_come_from_a_file_are_checked_as_well():
    with pytest.raises(errors.InvalidParams) as caught:
        retention_of(RetentionParams(rules=(RetentionRuleParams(keep=1), RetentionRuleParams(after="1d"))))
    assert caught.value.details["path"] == "$.retention.rules[1]"


def test_a_file_that_came_with_the_workspace_deletes_nothing_until_it_is_trusted(tmp_path: Path):
    store = tmp_path / "store"
    path = written(tmp_path)
    found = config.find(tmp_path, None, False, store)
    assert (found.trusted, found.config, retention_of(found.config.retention)) == (False, config.EMPTY, Retention())
    config.trust(path, found.digest, store)
    found = config.find(tmp_path, None, False, store)
    assert (found.trusted, len(found.config.retention.rules)) == (True, 4)
    path.write_text(TEXT.replace("90d", "1s"))
    found = config.find(tmp_path, None, False, store)
    assert (found.trusted, found.config) == (False, config.EMPTY)
