"""The rules of the house, as tests: style, types, import contracts, sizes, names and leftovers."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILE_LINES_MAX = 500
FUNCTION_LINES_MAX = 70
BANNED_NAMES = {"utils", "helpers", "common", "misc", "shared", "manager", "base"}
PYTHON_FILES = sorted(
    p
    for folder in ("rpcagent", "clients", "tests", "protocol")
    for p in (ROOT / folder).rglob("*.py")
    if "__pycache__" not in p.parts
)
CODE = [p for p in PYTHON_FILES if p.relative_to(ROOT).parts[0] in {"rpcagent", "clients", "protocol"}]


def _run(*command: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_linter_finds_nothing():
    _run("ruff", "check", ".")


def test_the_formatter_would_change_nothing():
    _run("ruff", "format", "--check", ".")


@pytest.mark.timeout(300)
def test_types_are_strict_and_right():
    _run("mypy")


def test_imports_point_down_and_the_core_is_pure():
    done = subprocess.run(
        [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_files_are_short_enough_to_read():
    long = {
        str(p.relative_to(ROOT)): n for p in PYTHON_FILES if (n := len(p.read_text().splitlines())) > FILE_LINES_MAX
    }
    assert long == {}


def test_functions_are_short_enough_to_hold_in_the_head():
    long = {
        f"{path.relative_to(ROOT)}:{node.name}": length
        for path in CODE
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (length := (node.end_lineno or node.lineno) - node.lineno + 1) > FUNCTION_LINES_MAX
    }
    assert long == {}


def test_no_file_is_named_for_nothing_in_particular():
    assert [str(p.relative_to(ROOT)) for p in PYTHON_FILES if p.stem in BANNED_NAMES] == []


def test_every_file_of_the_package_says_what_it_knows():
    silent = [
        str(p.relative_to(ROOT))
        for p in CODE
        if p.name not in {"__init__.py", "__main__.py"} and not ast.get_docstring(ast.parse(p.read_text()))
    ]
    assert silent == []


def test_nothing_is_left_over():
    marks = re.compile("|".join(["TO" + "DO", "FIX" + "ME", "XX" + "X", "HA" + "CK"]))
    found = [
        f"{p.relative_to(ROOT)}:{number}"
        for p in PYTHON_FILES
        for number, line in enumerate(p.read_text().splitlines(), 1)
        if marks.search(line)
    ]
    assert found == []


def test_every_suppression_says_which_rule_it_breaks():
    bare = re.compile(r"#\s*(noqa|type:\s*ignore)(?![:\[])")
    found = [
        f"{p.relative_to(ROOT)}:{number}"
        for p in PYTHON_FILES
        if p != Path(__file__)
        for number, line in enumerate(p.read_text().splitlines(), 1)
        if bare.search(line)
    ]
    assert found == []
