"""Foreign text: nothing of it is obeyed by a terminal, and it is as short as it must be."""

from __future__ import annotations

import pytest
from rpcagent.batch.text import arguments, compact, one_line, result_summary, span, visible


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("plain", "plain"),
        ("gr\u00fcn \u4f60\u597d", "gr\u00fcn \u4f60\u597d"),
        ("rm -rf /\rls", "rm -rf /\\rls"),
        ("\x1b[2K\x07", "\\x1b[2K\\x07"),
        ("a\u202eb\u2066c", "a\\u202eb\\u2066c"),
        ("a\u2028b\x85c", "a\\u2028b\\x85c"),
        ("\ud800", "\\ud800"),
        ("\U000e0041", "\\U000e0041"),
        ("\u200b", "\\u200b"),
        ("\U0001f468\u200d\U0001f469", "\U0001f468\u200d\U0001f469"),
        ("no\u00a0break", "no\u00a0break"),
        ("a\nb\tc", "a\\nb\\tc"),
    ],
)
def test_what_a_terminal_would_obey_is_shown_as_its_number(text: str, seen: str) -> None:
    assert visible(text) == seen


def test_lines_and_tabs_stay_where_a_block_is_shown() -> None:
    assert visible("a\n\tb\x1b", lines=True) == "a\n\tb\\x1b"


@pytest.mark.parametrize(
    ("text", "width", "line"),
    [("a  b\n c", 9, "a b c"), ("abcdefghij", 10, "abcdefghij"), ("abcdefghijk", 10, "abcdefg..."), ("", 5, "")],
)
def test_one_line_is_never_wider_than_it_may_be(text: str, width: int, line: str) -> None:
    assert one_line(text, width) == line


def test_a_long_text_of_white_space_is_known_to_be_longer() -> None:
    assert one_line("a" + " " * 1_000_000 + "b", 10) == "a..."


@pytest.mark.parametrize(
    ("value", "seen"),
    [
        ("word", "word"),
        ("two words", '"two words"'),
        ("", '""'),
        ("a\nb", '"a\\nb"'),
        ("1", "1"),
        (1, "1"),
        (True, "true"),
        ({"a": [None]}, '{"a": [null]}'),
    ],
)
def test_a_value_is_shown_as_a_word_or_as_json(value: object, seen: str) -> None:
    assert compact(value, 40) == seen


def test_arguments_share_the_width() -> None:
    assert arguments({"path": "a.txt", "content": "x" * 500}, 40) == "path=a.txt content=" + "x" * 18 + "..."


@pytest.mark.parametrize(
    ("result", "seen"),
    [
        ({"content": [{"type": "text", "text": "one\ntwo\nthree\n"}]}, "one (+2 lines)"),
        ({"content": [{"type": "image", "data": "..."}]}, "[image]"),
        ({"structuredContent": {"a": 1}}, '{"structuredContent": {"a": 1}}'),
        (None, ""),
    ],
)
def test_a_result_is_its_first_line_and_how_much_more_there_is(result: object, seen: str) -> None:
    assert result_summary(result, 80) == seen


@pytest.mark.parametrize(
    ("seconds", "seen"), [(-3, "0s"), (59.9, "59s"), (60, "1m"), (3_599, "59m"), (7_200, "2h"), (86_400 * 9, "9d")]
)
def test_a_duration_is_told_in_its_largest_unit(seconds: float, seen: str) -> None:
    assert span(seconds) == seen
