"""Whether a shell command can only read, by its text alone. Pure.

Knows: how a POSIX shell splits the plainest of commands into words, and which options of common reading commands write a
file or start a program. Does not know: any host, any file, or who asks. What it cannot see:

- what a name stands for on the host (PATH), or what a repository's own configuration makes git start (fsmonitor, textconv,
  external diff drivers): who may write there may do so unasked;
- what is read: these commands read whatever the daemon's user may read, inside the workspace or not.

It errs on one side. A command that is refused here is not forbidden; somebody is asked about it.
"""

from __future__ import annotations

import string

COMMAND_CHARACTERS = 10_000

_PLAIN = frozenset(string.ascii_letters + string.digits + "_./:=@%+,-")
"""Characters that a shell takes as they are, wherever they stand in a word. All others have to be quoted."""
_BLANK = frozenset(" \t")
_NOT_IN_DOUBLE = frozenset("$`\\!")

_GIT = ("--output", "--ext-diff", "--textconv", "--show-signature", "--remerge-diff")
_OPTIONS: dict[str, tuple[str, ...]] = {
    "git status": _GIT,
    "git diff": _GIT,
    "git log": _GIT,
    "git show": _GIT,
    "git blame": _GIT,
    "git ls-files": _GIT,
    "git rev-parse": _GIT,
    "ls": (),
    "cat": (),
    "head": (),
    "tail": (),
    "wc": (),
    "pwd": (),
    "stat": (),
    "file": ("-C", "--compile", "-p", "--preserve-date", "-z", "-Z", "--uncompress", "--uncompress-noreport"),
    "rg": ("--pre", "--hostname-bin", "-z", "--search-zip"),
    "grep": (),
    "diff": ("-l", "--paginate"),
    "sort": ("-o", "--output", "-T", "--temporary-directory", "--compress-program"),
    "uniq": (),
    "cut": (),
    "basename": (),
    "dirname": (),
    "true": (),
}
"""Each command of the default list, and its options that write or execute. A long one is refused in every shortened form
too, and a short one in every cluster of letters that has it."""

_OPERANDS_MOST = {"uniq": 1}
"""The second operand of uniq is a file that it writes."""
_SIGNATURE = ("%G", "%+G", "%-G", "% G")
"""In a format, these make git start the program that checks signatures."""

READ_ONLY_COMMANDS: tuple[str, ...] = tuple(_OPTIONS)


def is_read_only(command: str, allowed: tuple[str, ...] = READ_ONLY_COMMANDS) -> bool:
    """Whether `command` is one plain command that begins with the words of one of `allowed`, and does nothing but read.

    The words that count must stand there unquoted and in full: `/bin/ls`, `'git' status` and `git -c k=v status` are not
    in the list. What follows is held against the table of the command, also where an entry of the caller's goes on from
    it (`sort -u`); a command without a table is the caller's word, for all that may follow it.
    """
    words = plain_words(command)
    if not words:
        return False
    return any(_begins(words, entry.split()) and _harmless(words, entry.split()) for entry in allowed)


def plain_words(command: str) -> list[tuple[str, bool]]:
    """The words of a command, and whether any of each was quoted. Empty where it is not one plain simple command: where
    a shell would chain, redirect, substitute, expand, assign or continue anything."""
    if len(command) > COMMAND_CHARACTERS or any(not c.isprintable() and c != "\t" for c in command):
        return []
    words: list[tuple[str, bool]] = []
    place = 0
    while place < len(command):
        if command[place] in _BLANK:
            place += 1
            continue
        found = _word(command, place)
        if found is None:
            return []
        word, quoted, place = found
        words.append((word, quoted))
    return [] if not words or "=" in words[0][0] else words


def _word(command: str, place: int) -> tuple[str, bool, int] | None:
    """The word that begins at `place`, whether any of it is quoted, and where it ends. None: it is not plain."""
    word, quoted = "", False
    while place < len(command) and (character := command[place]) not in _BLANK:
        if character in _PLAIN:
            word += character
            place += 1
            continue
        if character not in {"'", '"'}:
            return None
        end = command.find(character, place + 1)
        inside = command[place + 1 : end]
        if end < 0 or (character == '"' and not _NOT_IN_DOUBLE.isdisjoint(inside)):
            return None
        word += inside
        quoted = True
        place = end + 1
    return word, quoted, place


def _begins(words: list[tuple[str, bool]], entry: list[str]) -> bool:
    return bool(entry) and words[: len(entry)] == [(word, False) for word in entry]


def _harmless(words: list[tuple[str, bool]], entry: list[str]) -> bool:
    name = next((name for count in (2, 1) if (name := " ".join(entry[:count])) in _OPTIONS), None)
    if name is None:
        return True
    rest = [word for word, _ in words[len(entry) :]]
    if any(_is_option(word, option) for word in rest for option in _OPTIONS[name]):
        return False
    if name.startswith("git ") and any(mark in word for word in rest for mark in _SIGNATURE):
        return False
    most = _OPERANDS_MOST.get(name)
    return most is None or _operands([word for word, _ in words[len(name.split()) :]]) <= most


def _operands(words: list[str]) -> int:
    """At least as many as there are: the value of an option may be counted as one."""
    before = words[: words.index("--")] if "--" in words else words
    after = words[len(before) + 1 :]
    return len(after) + sum(1 for word in before if word == "-" or not word.startswith("-"))


def _is_option(word: str, option: str) -> bool:
    if option.startswith("--"):
        given = word.partition("=")[0]
        return len(given) > 2 and option.startswith(given)
    return word.startswith("-") and not word.startswith("--") and option[1] in word
