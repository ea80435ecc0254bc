"""Which commands can only read, by their text alone."""

from __future__ import annotations

import shlex

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rpcagent.runs.commands import COMMAND_CHARACTERS, READ_ONLY_COMMANDS, is_read_only, plain_words

METACHARACTERS = ";&|<>`$(){}*?[]~#\\\n\r\0!^"
OWN = ("make check", "tool")

READS = [
    "ls",
    " ls ",
    "ls\t-la   src",
    "git status",
    "git  status",
    "git\tstatus --short",
    "git diff HEAD -- src/a.py",
    "git diff --stat --output-indicator-new=+ main",
    "git log --format='%h %s' -n 5",
    "git log '--author=A (B) <c@d>; rm'",
    "git show HEAD:src/a.py",
    'git log --grep "a; b | c > d & e"',
    "git ls-files -o --exclude-standard",
    "rg -n 'a|b.*[c]' src",
    'grep -rn "x (y)" .',
    "grep 'it'\"'\"'s' f",
    "sort -u -k2,2 f",
    "uniq -c f",
    "uniq -- f",
    "cut -d, -f1 --output-delimiter=: f",
    "cat 'ein Häuschen.txt'",
    "stat -c '%n %s' f",
    "file -b f",
    "diff -u a b",
    "true",
]

DOES_MORE_OR_IS_NOT_PLAIN = [
    "",
    " ",
    "\t",
    "git",
    "git push",
    "rm -rf .",
    "gitstatus",
    "git statusx",
    "lsof",
    # Chained, redirected, substituted, expanded, in the background
    "git status;rm -rf .",
    "git status -- ; x",
    "git status ;",
    "git status&& x",
    "git status || x",
    "git status & x",
    "git status &",
    "git status | sh",
    "git status\nrm x",
    "git status\r\nrm x",
    "git status\rrm x",
    "git status \\\n; rm x",
    "git status\0rm",
    "git status > f",
    "git status 2>f",
    "git status >| f",
    "cat < f",
    "cat <(x)",
    "cat <<E\nE",
    "ls $(x)",
    "ls `x`",
    "ls $HOME",
    "ls ${IFS}x",
    'ls "$(x)"',
    'ls "`x`"',
    'ls "$X"',
    'ls "a\\" ; x"',
    'ls "a!b"',
    "ls $'a\\nb'",
    "ls *",
    "ls a?",
    "ls [ab]",
    "ls {a,b}",
    "ls ~",
    "ls ~root",
    "ls a\\ b",
    "ls # x",
    "ls #",
    "(ls)",
    "{ ls; }",
    "! ls",
    "ls ^x",
    # Prefixes, and the command under another spelling
    "A=1 ls",
    "PATH=. ls",
    "GIT_EXTERNAL_DIFF=x git diff",
    "GIT_EXTERNAL_DIFF='x' git diff",
    "env ls",
    "command ls",
    "exec ls",
    "sudo ls",
    "/bin/ls",
    "./ls",
    "../ls",
    "'git' status",
    '"git" status',
    "g''it status",
    "git 'status'",
    "git sta''tus",
    "LS",
    "-ls",
    # Open quotes
    "ls 'a",
    'ls "a',
    "ls 'a' 'b",
    "ls '",
    # Characters that only look like the right ones
    "git\u00a0status",
    "ls\u00a0x",
    "ls \u2003x",
    "git\u2028status",
    "ls\u2028rm",
    "ls \u0085x",
    "ls\x0brm",
    "ls\x0crm",
    "ls \x1b[31m",
    "ls '\x1b'",
    "ls '\u202e'",
    "ls '\ud800'",
    "\u217cs",
    "ls \uff1brm",
    "ls é",
    # Options of git before its own command
    "git -c core.fsmonitor=x status",
    "git --git-dir=x status",
    "git -C /x status",
    "git --exec-path=x status",
    "git --paginate log",
    # Options that write or execute
    "git diff --output=f",
    "git diff --output f",
    "git diff --outp=f",
    "git diff '--output=f'",
    "git diff --out''put=f",
    "git log --output=f",
    "git blame --output=f a",
    "git show --o=f",
    "git diff --ext-diff",
    "git log --ext",
    "git show --show-signature",
    "git log --format=%G?",
    "git log '--format=%-G?'",
    "git log '--format=% GS'",
    "sort -o f f",
    "sort -of f",
    "sort -uo f f",
    "sort --output=f f",
    "sort --ou f f",
    "sort f -o f",
    "sort -T d f",
    "sort --compress-program=x f",
    "sort --comp x f",
    "uniq a b",
    "uniq -c a b",
    "uniq -- -a b",
    "uniq - b",
    "rg --pre x y",
    "rg --pre=x y",
    "rg --hostname-bin=x y",
    "rg -z x",
    "rg -nz x",
    "file -C -m f",
    "file -bC",
    "file --compile",
    "diff -l a b",
    "diff -ul a b",
    "diff --paginate a b",
    # Not in the list, for they can be made to do anything
    "find . -delete",
    "find . -exec x",
    "sed -i s/a/b/ f",
    "awk 'BEGIN { system(\"x\") }'",
    "xargs ls",
    "tee f",
    "git branch x",
    "git stash",
    "git grep -O x",
]


@pytest.mark.parametrize("command", READS)
def test_one_plain_command_of_the_list_only_reads(command: str) -> None:
    assert is_read_only(command)


@pytest.mark.parametrize("command", DOES_MORE_OR_IS_NOT_PLAIN)
def test_whatever_might_do_more_than_read_is_not_taken_for_reading(command: str) -> None:
    assert not is_read_only(command)


@pytest.mark.parametrize("command", [*READS, *DOES_MORE_OR_IS_NOT_PLAIN])
def test_nothing_is_read_only_where_nothing_is_allowed(command: str) -> None:
    assert not is_read_only(command, ())
    assert not is_read_only(command, ("", " "))


def test_a_very_long_command_is_not_read_through() -> None:
    assert is_read_only("ls " + "a" * (COMMAND_CHARACTERS - 3))
    assert not is_read_only("ls " + "a" * (COMMAND_CHARACTERS - 2))
    assert not is_read_only("ls " + "a" * 10_000_000)


@pytest.mark.parametrize(
    ("allowed", "command", "expected"),
    [
        ("make check", "make check", True),
        ("make check", "make check VERBOSE=1", True),
        ("make check", "make", False),
        ("make check", "make checks", False),
        ("make check", "make -C x check", False),
        ("make  check", "make check", True),
        ("make check", "make check; x", False),
        ("make check", "make check $(x)", False),
        ("make check", "A=1 make check", False),
        ("/bin/ls", "/bin/ls -l", True),
        ("/bin/ls", "ls", False),
        ("find", "find . -delete", True),
        ("git", "git push", True),
        ("A=1", "A=1", False),
        ("ls;", "ls;", False),
    ],
)
def test_a_command_of_the_callers_own_list_is_taken_at_the_callers_word_but_has_to_be_plain(
    allowed: str, command: str, expected: bool
) -> None:
    assert is_read_only(command, (allowed,)) is expected


@pytest.mark.parametrize(
    ("allowed", "command", "expected"),
    [
        ("sort -u", "sort -u f", True),
        ("sort -u", "sort -u -o f f", False),
        ("sort -o", "sort -o f f", True),
        ("git diff --stat", "git diff --stat --output=f", False),
        ("uniq -c", "uniq -c a b", False),
    ],
)
def test_the_table_of_a_command_holds_also_where_the_callers_entry_goes_on_from_it(
    allowed: str, command: str, expected: bool
) -> None:
    assert is_read_only(command, (allowed,)) is expected


def test_every_command_of_the_default_list_is_allowed_by_itself() -> None:
    assert all(is_read_only(name) for name in READ_ONLY_COMMANDS)


def _unquoted(command: str) -> str:
    """What stands outside of quotes, and inside of double ones where a shell still looks: found in another way."""
    outside, open_quote = "", ""
    for character in command:
        if open_quote:
            if character == open_quote:
                open_quote = ""
            elif open_quote == '"' and character in "$`\\":
                outside += character
        elif character in "'\"":
            open_quote = character
        else:
            outside += character
    return outside + ("\n" if open_quote else "")


PIECES = st.sampled_from(
    [*METACHARACTERS, *" \t'\"=-aé", "--output", "-o", "ls", "git", "status", "&&", "<(", "$(", "A=1 ", "\u00a0", "''"]
)
COMMANDS = st.builds(
    lambda start, pieces: start + "".join(pieces),
    st.sampled_from(["", *(f"{name} " for name in (*READ_ONLY_COMMANDS, *OWN))]),
    st.lists(st.one_of(PIECES, st.text(max_size=3)), max_size=12),
)


@given(COMMANDS)
@example("ls 'a;b'")
@example('tool "a|b" ')
def test_no_allowed_command_ever_has_an_unquoted_metacharacter(command: str) -> None:
    if is_read_only(command, (*READ_ONLY_COMMANDS, *OWN)):
        assert set(_unquoted(command)).isdisjoint(METACHARACTERS)
        assert _unquoted(command).isascii()
        assert "=" not in command.split(maxsplit=1)[0]


@given(COMMANDS)
@example("ls 'a b'\"c\"d ''")
def test_an_allowed_command_has_the_words_that_a_shell_would_find(command: str) -> None:
    if words := plain_words(command):
        assert [word for word, _ in words] == shlex.split(command)


@given(COMMANDS, st.sampled_from(list(";&|<>`$\n")), st.integers(min_value=0))
def test_a_metacharacter_put_anywhere_outside_of_quotes_takes_the_permission_away(
    command: str, character: str, place: int
) -> None:
    allowed = (*READ_ONLY_COMMANDS, *OWN)
    if is_read_only(command, allowed):
        place %= len(command) + 1
        changed = command[:place] + character + command[place:]
        inside = _unquoted(command[:place]).endswith("\n")
        assert inside or not is_read_only(changed, allowed)
