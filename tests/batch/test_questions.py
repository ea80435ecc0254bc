"""What a person sees before an answer: all of it, readable, and nothing that the terminal would obey."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rpcagent.batch.narrator import Narrator
from rpcagent.batch.questions import LINES_SHOWN, MEANINGS, described
from rpcagent.policy.approvals import CHOICES
from rpcagent.runs import events as ev
from tests.batch.stage import elements, question

NOW = datetime(2031, 4, 1, 12, 0, tzinfo=UTC)


def _call(tool: str, workspace: str = "/none", **arguments: Any) -> dict[str, Any]:
    subject = {"tool": tool, "effect": "at_most_once", "arguments": arguments, "workspace": workspace}
    return question("tool_call", subject, ["allow", "deny"], expiresAt="2031-04-01T13:30:00Z")


def _text(asked: dict[str, Any], *, whole: bool = False) -> str:
    return "\n".join(text for text, _ in described(asked, NOW, whole=whole))


def test_a_shell_command_is_shown_as_a_command_line_in_full() -> None:
    assert _text(_call("shell.run", command="ls -l |\n  wc -l\r", cwd="src")) == (
        "Question 1: may this tool call run?\n"
        "  tool       shell.run\n"
        "  effect     at_most_once: after a crash it is never sent again by itself: you would be asked whether it happened\n"
        "  $ ls -l |\n"
        "      wc -l\\r\n"
        "  cwd        src\n"
        "  workspace  /none\n"
        "  expires    2031-04-01 13:30:00Z (in 1h)"
    )


def test_a_write_is_shown_as_the_difference_to_the_file_as_it_is_now(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("one\ntwo\n")
    lines = _text(_call("files.write", str(tmp_path), path="a", content="one\nthree\n")).split("\n")
    assert lines[3:9] == [
        "  path       a",
        "  content    10 bytes; compared with the file as it is now",
        "    @@ -1,2 +1,2 @@",
        "     one",
        "    -two",
        "    +three",
    ]


def test_an_edit_is_shown_as_its_own_difference() -> None:
    text = _text(_call("files.edit", path="a", old="x = 1", new="x = 2", sha256="0" * 16))
    assert "  change\n    @@ -1 +1 @@\n    -x = 1\n    +x = 2\n" in text


@pytest.mark.parametrize("path", ["../secret", "/etc/hostname", "link", "folder", "bytes"])
def test_nothing_is_read_but_text_inside_the_workspace(tmp_path: Path, path: str) -> None:
    workspace = tmp_path / "w"
    (workspace / "folder").mkdir(parents=True)
    (workspace / "bytes").write_bytes(b"secret \xff")
    (tmp_path / "secret").write_text("secret")
    (workspace / "link").symlink_to("../secret")
    text = _text(_call("files.write", str(workspace), path=path, content="x"))
    assert "    -" not in text
    assert "outside the workspace" in text or "cannot be compared" in text


def test_a_long_block_loudly_lacks_its_middle_and_details_have_it() -> None:
    content = "\n".join(f"line {n}" for n in range(1_000))
    asked = _call("files.write", path="a", content=content)
    short, whole = _text(asked), _text(asked, whole=True)
    assert f"[{1_000 - LINES_SHOWN} lines are not shown here; `d` shows them all" in short
    assert "+line 999" in short
    assert all(f"    |line {n}\n" in whole for n in range(1_000))
    assert "  digest     sha256:d1" in whole


def test_nothing_in_a_question_is_obeyed_by_the_terminal() -> None:
    evil = "\x1b[2J\x1b[1;1Hls\r\u202e"
    for tool in ("shell.run", "files.write", "files.edit", "any.tool"):
        asked = _call(tool, command=evil, path=evil, content=evil, old=evil, new="b")
        asked["subject"]["arguments"][evil] = {evil: [evil]}
        for whole in (False, True):
            text = _text(asked, whole=whole)
            assert all(c.isprintable() or c == "\n" for c in text), tool


def test_every_choice_of_every_kind_has_a_meaning() -> None:
    assert set(MEANINGS) == {(kind, choice) for kind, choices in CHOICES.items() for choice in choices}


def test_every_type_of_event_is_told_in_words() -> None:
    """A type without words would be shown as JSON."""
    known = set(Narrator(100)._tellers)
    types = [msgspec.inspect.type_info(event) for event in ev.AnyEvent.__args__]
    assert known == {info.tag for info in types if isinstance(info, msgspec.inspect.StructType)}


@pytest.mark.parametrize(
    ("event", "line"),
    [
        ({"type": "attempt_failed", "attempt": 1, "error": {"kind": "rate_limit"}, "retryAt": "2031-04-01T12:01:30Z"},
         "waits      close: rate_limit; again in 1m, at 2031-04-01 12:01:30Z"),
        ({"type": "attempt_interrupted", "attempt": 2, "reason": "connection_lost"}, "cut off    close (attempt 2): connection lost"),
        ({"type": "looked_up", "attempt": 1, "answer": "absent"}, "looked up  close: absent"),
        ({"type": "step_unknown", "attempt": 1}, "unknown    close: nobody knows whether it happened"),
        ({"type": "step_denied", "reason": "policy"}, "denied     close: policy"),
        ({"type": "step_failed", "attempt": 1, "error": {"kind": "k", "message": "m\n\x07"}}, "failed     close: k: m \\x07"),
        ({"type": "tool_completed", "attempt": 1, "result": {"content": []}, "source": "look_up"},
         'result     close (it was looked up): {"content": []}'),
        ({"type": "tool_completed", "attempt": 1, "result": {"content": [{"type": "text", "text": "no"}], "isError": True}},
         "error      close: no"),
        ({"type": "late_outcome", "attempt": 1, "error": {"kind": "k"}}, "late       close: k (kept as evidence)"),
        ({"type": "tool_started", "attempt": 1}, "call       close id=17"),
    ],
)  # fmt: skip
def test_what_happens_to_a_call_is_told_with_its_name(event: dict[str, Any], line: str) -> None:
    call = {"stepId": "s", "tool": "close", "arguments": {"id": "17"}}
    asked = {"type": "model_answered", "stepId": "m", "attempt": 1, "calls": [call]}
    narrator = Narrator(100)
    first, second = elements(asked, event | {"stepId": "s"})
    narrator.told(first)
    assert narrator.told(second).laid_out() == line
