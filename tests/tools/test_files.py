"""`files.*`: what each answers, and what a repeat does."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
from rpcagent.runs.events import Trouble
from rpcagent.runs.outcomes import Failed, Lost, NotDone
from rpcagent.tools import files as files_module
from rpcagent.tools.files import PAGE_BYTES, WHOLE_BYTES
from tests.tools.calls import call, everything_below, failed, ok, sha

pytestmark = pytest.mark.anyio


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    (tmp_path / "ws").mkdir()
    return tmp_path / "ws"


# Reading


async def test_a_read_gives_the_text_and_what_an_edit_and_the_next_page_need(workspace: Path) -> None:
    (workspace / "a").mkdir()
    (workspace / "a/b.txt").write_text("grüße\n")
    digest = sha("grüße\n")
    assert await ok(workspace, "read", path="./a//b.txt") == {
        "content": [
            {"type": "text", "text": "grüße\n"},
            {"type": "text", "text": f"[bytes 0 to 8 of 8; sha256 {digest}]"},
        ],
        "structuredContent": {
            "path": "a/b.txt",
            "size": 8,
            "offset": 0,
            "nextOffset": None,
            "sha256": sha("grüße\n"),
        },
    }


@pytest.mark.parametrize("piece", ["a line of text\n", "é€𝄞", "x"])
@pytest.mark.parametrize("limit", [16, 17, 19, 1_000])
async def test_f043_the_pages_of_a_file_put_together_are_the_file_whatever_their_size(
    workspace: Path, piece: str, limit: int
) -> None:
    text = piece * 300
    (workspace / "f").write_text(text)
    pages, offset = [], 0
    while offset is not None:
        result = await ok(workspace, "read", path="f", offset=offset, limit=limit)
        pages.append(result["content"][0]["text"])
        assert len(pages[-1].encode()) <= limit
        offset = result["structuredContent"]["nextOffset"]
    assert "".join(pages) == text


async def test_f043_a_file_too_large_to_edit_is_read_by_the_page_at_any_offset(workspace: Path) -> None:
    with (workspace / "big").open("wb") as stream:
        stream.truncate(1 << 40)
        stream.seek((1 << 40) - 5)
        stream.write(b"\nend\n")
    end = await ok(workspace, "read", path="big", offset=(1 << 40) - 4)
    assert end["content"] == [
        {"type": "text", "text": "end\n"},
        {
            "type": "text",
            "text": "[bytes 1099511627772 to 1099511627776 of 1099511627776; sha256 not computed, too large to edit]",
        },
    ]
    (workspace / "text").write_bytes(b"0123456\n" * (WHOLE_BYTES // 8 + 1))
    first = (await ok(workspace, "read", path="text"))["structuredContent"]
    assert first == {
        "path": "text",
        "size": WHOLE_BYTES + 8,
        "offset": 0,
        "nextOffset": PAGE_BYTES,
        "sha256": None,
    }
    edit = await call(workspace, "edit", path="text", old="0", new="1", sha256="0" * 64)
    assert edit == failed("too_large", f"The file is larger than {WHOLE_BYTES} bytes.")


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"text\0more", "This is a binary file."), (b"caf\xe9 au lait", "This is not UTF-8 (at byte 3).")],
)
async def test_what_is_no_text_is_refused_with_the_reason_by_read_and_edit(
    workspace: Path, content: bytes, message: str
) -> None:
    (workspace / "f").write_bytes(content)
    assert await call(workspace, "read", path="f") == failed("not_text", message)
    edit = await call(workspace, "edit", path="f", old="a", new="b", sha256=sha(content))
    assert edit == failed("not_text", message)


async def test_a_list_shows_sizes_and_kinds_and_enters_neither_links_nor_git(workspace: Path) -> None:
    for name in ("src", ".git"):
        (workspace / name).mkdir()
        (workspace / name / "f").write_text("12345")
    (workspace / "out").symlink_to("/etc")
    os.mkfifo(workspace / "pipe")
    (workspace / ".rpcagent-0.tmp").write_text("half")
    assert await ok(workspace, "list", recursive=True) == {
        "content": [{"type": "text", "text": ".git/\nout\t(link)\npipe\t(special)\nsrc/\nsrc/f\t5"}],
        "structuredContent": {
            "entries": [
                {"path": ".git", "kind": "directory"},
                {"path": "out", "kind": "link"},
                {"path": "pipe", "kind": "special"},
                {"path": "src", "kind": "directory"},
                {"path": "src/f", "kind": "file", "size": 5},
            ],
            "truncated": False,
        },
    }
    flat = (await ok(workspace, "list", path="src"))["structuredContent"]
    assert flat == {"entries": [{"path": "src/f", "kind": "file", "size": 5}], "truncated": False}


async def test_f045_a_long_list_is_cut_and_says_so(workspace: Path) -> None:
    for number in range(1_001):
        (workspace / f"{number:04}").touch()
    result = await ok(workspace, "list")
    shown = result["content"][0]["text"].split("\n")
    assert (len(shown), shown[-2]) == (1_001, "0999\t0")
    assert shown[-1] == "[cut: more than 1000 entries were found or 20000 looked at; list a directory below]"


async def test_a_search_names_line_and_offset_and_skips_git_binaries_and_links(workspace: Path) -> None:
    (workspace / ".git").mkdir()
    (workspace / ".git/f").write_text("needle")
    (workspace / "bin").write_bytes(b"needle\0")
    (workspace / "link").symlink_to("a.py")
    (workspace / "a.py").write_text("hay\nsome needle\n")
    (workspace / "b.txt").write_text("needle")
    matches = [
        {"path": "a.py", "line": 2, "offset": 4, "text": "some needle"},
        {"path": "b.txt", "line": 1, "offset": 0, "text": "needle"},
    ]
    found = await ok(workspace, "search", pattern="ne+dle$")
    assert found == {
        "content": [
            {
                "type": "text",
                "text": "a.py:2: some needle\nb.txt:1: needle\n[3 files searched; 1 skipped (binary)]",
            }
        ],
        "structuredContent": {"matches": matches, "files": 3, "skipped": {"binary": 1}, "stopped": ""},
    }
    python = (await ok(workspace, "search", pattern="needle", glob="*.py"))["structuredContent"]
    assert python == {"matches": matches[:1], "files": 1, "skipped": {}, "stopped": ""}
    one_file = (await ok(workspace, "search", pattern="needle", path="b.txt"))["structuredContent"]
    assert one_file == {"matches": matches[1:], "files": 1, "skipped": {}, "stopped": ""}
    first = (await ok(workspace, "search", pattern="needle", limit=1))["structuredContent"]
    assert first == {"matches": matches[:1], "files": 2, "skipped": {}, "stopped": "matches (1)"}


@pytest.mark.parametrize("pattern", ["secret/*", "secret", "sec*", "*/k"])
@pytest.mark.parametrize("path", [".", "secret", "./secret//deep"])
async def test_what_policy_denies_is_neither_listed_nor_searched(workspace: Path, pattern: str, path: str) -> None:
    for name in ("secret/deep/k", "secret/k", "open"):
        (workspace / name).parent.mkdir(parents=True, exist_ok=True)
        (workspace / name).write_text("needle")
    hidden = ("other", pattern)
    listed = await ok(workspace, "list", path=path, recursive=True, hidden=hidden)
    found = await ok(workspace, "search", path=path, pattern="needle", hidden=hidden)
    shown = [match["path"] for match in found["structuredContent"]["matches"]]
    shown += [entry["path"] for entry in listed["structuredContent"]["entries"] if entry["kind"] == "file"]
    assert shown == (["open", "open"] if path == "." else [])
    for result in (listed, found):
        assert "/k" not in str(result)
        assert "what policy denies is left out" in result["content"][0]["text"]


async def test_a_search_of_one_hidden_file_finds_nothing(workspace: Path) -> None:
    (workspace / "k").write_text("needle")
    found = await ok(workspace, "search", path="k", pattern="needle", hidden=("k",))
    assert found["structuredContent"] == {"matches": [], "files": 0, "skipped": {}, "stopped": ""}


async def test_a_pattern_that_would_match_for_ever_is_stopped_and_named(workspace: Path) -> None:
    from rpcagent.tools.search import answer

    (workspace / "a").write_text("needle")
    (workspace / "b").write_text("a" * 60 + "!")
    request = {"root": str(workspace), "pattern": r"needle|(a|a)+$", "limit": 9, "seconds": 0.05}
    assert answer(request) == {
        "matches": [{"path": "a", "line": 1, "offset": 0, "text": "needle"}],
        "files": 2,
        "skipped": {},
        "stopped": "time (0.05 s), in 'b'",
    }


async def test_a_pattern_that_is_none_is_refused_with_the_reason(workspace: Path) -> None:
    message = "The pattern is no regular expression: missing ), unterminated subpattern at position 0."
    assert await call(workspace, "search", pattern="(") == failed("invalid_arguments", message)


# Writing


async def test_a_write_makes_directories_keeps_the_mode_and_leaves_no_other_file(workspace: Path) -> None:
    assert await ok(workspace, "write", path="a/b/run.sh", content="one") == {
        "content": [{"type": "text", "text": f"a/b/run.sh is written: 3 bytes, sha256 {sha('one')}."}],
        "structuredContent": {"path": "a/b/run.sh", "sha256": sha("one"), "size": 3, "alreadyApplied": False},
    }
    (workspace / "a/b/run.sh").chmod(0o751)
    await ok(workspace, "write", path="a/b/run.sh", content="two")
    assert (workspace / "a/b/run.sh").stat().st_mode & 0o7777 == 0o751
    assert everything_below(workspace) == {"a": None, "a/b": None, "a/b/run.sh": b"two"}


async def test_s0_33_a_write_that_is_already_in_place_is_left_alone(workspace: Path) -> None:
    await ok(workspace, "write", path="f", content="same")
    before = (workspace / "f").stat()
    again = await ok(workspace, "write", attempt=2, path="f", content="same")
    after = (workspace / "f").stat()
    assert again["structuredContent"]["alreadyApplied"] is True
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


async def test_s0_33_a_guarded_write_does_not_touch_a_file_that_another_program_changed(workspace: Path) -> None:
    (workspace / "f").write_text("theirs")
    conflict = failed("conflict", "The file is not the one that `sha256` names. Read it again.")
    assert await call(workspace, "write", path="f", content="ours", sha256=sha("before")) == conflict
    assert await call(workspace, "write", path="x/new", content="ours", sha256=sha("before")) == failed(
        "not_found", "There is no directory 'x'."
    )
    assert everything_below(workspace) == {"f": b"theirs"}
    await ok(workspace, "write", path="f", content="ours", sha256=sha("theirs")[:16])
    assert everything_below(workspace) == {"f": b"ours"}


def test_a_crash_before_the_rename_leaves_the_old_file_and_the_repeat_takes_the_rest_away(workspace: Path) -> None:
    (workspace / "f").write_text("old")
    code = (
        "import anyio, os, sys\n"
        "from rpcagent.tools.registry import Registry\n"
        "from tests.tools.calls import builtin, request_for\n"
        "os.replace = lambda *_, **__: os._exit(9)\n"
        "request = request_for(builtin('files.write'), {'path': 'f', 'content': 'new'}, workspace=sys.argv[1])\n"
        "anyio.run(Registry().call, request)\n"
    )
    died = subprocess.run([sys.executable, "-c", code, str(workspace)], check=False, timeout=60)
    assert died.returncode == 9
    left = everything_below(workspace)
    assert (len(left), left["f"], sorted(left.values(), key=str)) == (2, b"old", [b"new", b"old"])
    anyio.run(partial(ok, workspace, "write", attempt=2, path="f", content="new"))
    assert everything_below(workspace) == {"f": b"new"}


@pytest.mark.parametrize(
    ("number", "outcome"),
    [
        (28, NotDone(error=Trouble(kind="io_error", message="The system refused: No space left on device."))),
        (5, Failed(error=Trouble(kind="io_error", message="The system refused: Input/output error."))),
    ],
)
async def test_f025_a_write_that_the_disk_refuses_leaves_the_old_file_and_nothing_else(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, number: int, outcome: object
) -> None:
    (workspace / "f").write_text("old")

    def refuse(*_: object) -> int:
        raise OSError(number, "x")

    monkeypatch.setattr(files_module.os, "write", refuse)
    assert await call(workspace, "write", path="f", content="new") == outcome
    assert everything_below(workspace) == {"f": b"old"}


async def test_f029_a_write_in_place_that_the_disk_does_not_confirm_is_lost_and_settled_by_its_repeat(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = os.fsync, []

    def second_fails(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == 2:  # the first is of the file, the second of its directory
            raise OSError(5, "x")
        real(descriptor)

    monkeypatch.setattr(files_module.os, "fsync", second_fails)
    assert await call(workspace, "write", path="f", content="new") == Lost(reason="crashed")
    again = await ok(workspace, "write", attempt=2, path="f", content="new")
    assert (again["structuredContent"]["alreadyApplied"], len(calls)) == (True, 4)


# Editing


async def test_an_edit_replaces_the_one_place_and_gives_the_digest_for_the_next(workspace: Path) -> None:
    (workspace / "f").write_text("a b c")
    first = await ok(workspace, "edit", path="f", old="b", new="bb", sha256=sha("a b c"))
    assert first["structuredContent"] == {
        "path": "f",
        "sha256": sha("a bb c"),
        "size": 6,
        "alreadyApplied": False,
    }
    await ok(workspace, "edit", path="f", old="c", new="", sha256=first["structuredContent"]["sha256"][:16])
    assert everything_below(workspace) == {"f": b"a bb "}


EDITS = [
    ("one two three", "two", "2", False),
    ("one two three", "two", "two two", False),  # `new` contains `old`
    ("2 two 2", "two", "2", False),  # `new` was there before
    ("aXa", "X", "a", False),  # and runs together with what surrounds it
    ("one\ntwo\nthree\n", "two\n", "", False),  # taken out
    ("one two three", "two ", "", False),
    ("x" * 30_000 + "\ntwo\n" + "x" * 30_000, "two\n", "", False),
    ("one one one", "one", "uno", True),
    ("one one one", "one", "one!", True),
]


@pytest.mark.parametrize(("before", "old", "new", "replace_all"), EDITS)
async def test_an_edit_repeated_after_a_crash_is_never_applied_twice_and_says_that_it_was_applied(
    workspace: Path, before: str, old: str, new: str, replace_all: bool
) -> None:
    (workspace / "f").write_text(before)
    arguments = {"path": "f", "old": old, "new": new, "sha256": sha(before), "replaceAll": replace_all}
    await ok(workspace, "edit", **arguments)
    after = before.replace(old, new)
    stat = (workspace / "f").stat()
    for attempt in (2, 3):
        again = await ok(workspace, "edit", attempt=attempt, **arguments)
        shown = {"path": "f", "sha256": sha(after), "size": len(after), "alreadyApplied": True}
        assert again["structuredContent"] == shown
    assert everything_below(workspace) == {"f": after.encode()}
    assert ((workspace / "f").stat().st_ino, (workspace / "f").stat().st_mtime_ns) == (stat.st_ino, stat.st_mtime_ns)


async def test_s0_33_an_edit_of_a_file_that_changed_is_a_conflict_at_first_and_undecided_after_a_crash(
    workspace: Path,
) -> None:
    (workspace / "f").write_text("theirs two")
    arguments = {"path": "f", "old": "two", "new": "2", "sha256": sha("one two")}
    now = sha("theirs two")
    message = f"The file changed since it was read; its sha256 is now {now}. Read it again."
    assert await call(workspace, "edit", **arguments) == failed("conflict", message)
    text = (
        "Nothing was changed by this attempt. An earlier attempt may have made this edit, and the file changed since: "
        f"its sha256 is now {now}. Read it again."
    )
    assert await ok(workspace, "edit", attempt=2, **arguments) == {
        "content": [{"type": "text", "text": text}],
        "structuredContent": {"path": "f", "sha256": now, "alreadyApplied": None},
        "isError": True,
    }
    assert everything_below(workspace) == {"f": b"theirs two"}


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"old": "z", "new": "y"}, "no_match", "`old` does not occur in the file."),
        (
            {"old": "a", "new": "y"},
            "not_unique",
            "`old` occurs 2 times. Give more of its surroundings, or `replaceAll`.",
        ),
        ({"old": "a", "new": "a"}, "invalid_arguments", "`old` and `new` are the same."),
        ({"old": "", "new": "a"}, "invalid_arguments", "Expected `str` of length >= 1 - at `$.old`"),
        ({"old": "a", "new": "b", "sha256": "ab"}, "invalid_arguments", None),
        ({"old": "a"}, "invalid_arguments", "Object missing required field `new`"),
    ],
)
async def test_f061_an_edit_that_cannot_be_made_failed_with_what_to_change(
    workspace: Path, arguments: dict[str, Any], kind: str, message: str | None
) -> None:
    (workspace / "f").write_text("a a")
    outcome = await call(workspace, "edit", **{"path": "f", "sha256": sha("a a"), **arguments})
    assert isinstance(outcome, Failed)
    assert outcome.error.kind == kind
    assert message in {None, outcome.error.message}
    assert everything_below(workspace) == {"f": b"a a"}


async def test_a_file_that_another_program_changes_during_the_edit_is_not_overwritten(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (workspace / "f").write_text("one")
    real = os.write

    def write_and_meddle(descriptor: int, content: bytes) -> int:
        (workspace / "f").write_text("theirs")
        return real(descriptor, content)

    monkeypatch.setattr(files_module.os, "write", write_and_meddle)
    outcome = await call(workspace, "edit", path="f", old="one", new="1", sha256=sha("one"))
    assert outcome == failed("conflict", "Another program changed the file meanwhile.")
    assert everything_below(workspace) == {"f": b"theirs"}
