"""The comparison with other systems: how it installs, counts and judges. Nothing is fetched here, and no clock is judged."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.bench.peer import Scratch
from tests.bench.row import table
from tests.bench.versus import install
from tests.bench.versus.compare import Contender, Work, comparison, timed_rows
from tests.bench.versus.install import CannotInstall, Packages, installed
from tests.bench.versus.syncs import CALLS, syncs_in
from tests.bench.versus.systems import InPython, ProgramRunning

WORKS = [Work(runs=1, steps=7, target=3), Work(runs=2, steps=5, target=5)]

PROGRAM = """
import json, os, pathlib, sys
store = pathlib.Path(sys.argv[1])
for line in sys.stdin:
    work = json.loads(line)
    with open(store / "steps", "ab") as file:
        for step in range(work["runs"] * work["steps"]):
            file.write(b"x" * 700)
            file.flush()
            os.fsync(file.fileno())
    print(json.dumps({"kept": work["runs"] * work["steps"] - LOST}), flush=True)
"""


@dataclass(frozen=True, kw_only=True)
class Local:
    """A system of this interpreter, that loses `lost` steps of each work."""

    name: str
    lost: int = 0
    about: str = "a file"
    packages: None = None

    def start(self, scratch: Scratch, store: Path, environment: Path) -> ProgramRunning:
        program = PROGRAM.replace("LOST", str(self.lost))
        return ProgramRunning(scratch, [sys.executable, "-c", program, str(store)], store.with_suffix(".errors"))


@pytest.mark.process
def test_one_that_cannot_be_had_and_one_that_loses_a_step_have_a_row_that_says_so_and_the_others_go_on(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(install.venv, "create", lambda folder, *, with_pip: (folder / "bin").mkdir(parents=True))
    absent = InPython(
        name="absent", about="", program="", packages=Packages(name="absent", pip=("no-such-package==1",))
    )
    others = [Local(name="there"), absent, Local(name="forgets", lost=1)]
    rows = comparison(Scratch(tmp_path), others, tmp_path / "cache", WORKS, 2)
    seen = {row.figure: row for row in rows}
    assert seen["absent"].value is None
    assert seen["absent"].note == "cannot be installed: there is no python here"
    assert seen["forgets"].note == "failed: 2 records of 3 steps"
    for work in WORKS:
        best = seen[f"{work}, ours beside the best of them"]
        assert best.ratio == seen[f"{work}, ours beside there"].ratio
        assert str(best.target) == f">= {work.target} x"
        assert f"{work}, ours beside forgets" not in seen
    assert "absent cannot be installed: there is no python here" in capsys.readouterr().err
    assert "cannot be installed" in table(rows)


def test_ours_is_set_beside_whichever_was_best_in_each_round():
    work = WORKS[0]
    ours, one, other, gone = (
        Contender(system=Local(name=name), rates={work: rates}, cpu={work: [1.0, 1.0]}, failed=failed)
        for name, rates, failed in (
            ("ours", [10.0, 10.0], ""),
            ("one", [1.0, 4.0], ""),
            ("other", [2.0, 2.0], ""),
            ("gone", [5.0], "failed: it hangs"),
        )
    )
    rows = {row.figure: row for row in timed_rows(work, ours, [one, other, gone], [20.0, 20.0], [5.0, 5.0])}
    best = rows[f"{work}, ours beside the best of them"]
    assert (best.value, best.floor, best.ratio, best.met) == (10.0, 3.0, 3.75, True)
    assert rows[f"{work}, ours, beside raw"].ratio == 0.5
    assert rows[f"{work}, ours beside SQLite WAL FULL"].ratio == 2.0
    assert rows[f"{work}, ours beside one"].ratio == 6.25
    assert f"{work}, ours beside gone" not in rows


@pytest.mark.process
def test_one_that_ends_is_known_by_the_last_thing_it_said(tmp_path):
    program = 'import sys; input(); sys.exit("a line\\nno such table")'
    running = ProgramRunning(Scratch(tmp_path), [sys.executable, "-c", program], tmp_path / "errors")
    with running, pytest.raises(EOFError, match=r"^no such table$"):
        running.work(1, 1)


@pytest.mark.process
def test_syncs_and_bytes_are_counted_from_outside(tmp_path):
    rows = comparison(Scratch(tmp_path), [Local(name="there")], tmp_path, WORKS, 1)
    seen = {row.figure: row for row in rows}
    assert seen["bytes on disk per step, 7 steps, there"].value == 700
    syncs = seen["syncs per step, there"]
    if "not counted" in syncs.note:
        pytest.skip("strace is not here, or may not look")
    assert syncs.value == 1
    assert seen["syncs per step, rpcagent"].value >= 1


def test_what_was_installed_is_used_again_and_what_was_cut_off_is_made_anew(tmp_path, monkeypatch):
    done: list[list[str]] = []
    monkeypatch.setattr(install.venv, "create", lambda folder, *, with_pip: folder.mkdir(parents=True))

    def run(command, **options):
        done.append(command)
        fails = len(done) == 1
        return subprocess.CompletedProcess(command, int(fails), "", "a line\nno room\n" if fails else "")

    monkeypatch.setattr(install.subprocess, "run", run)
    packages = Packages(name="some", pip=("some==1",), npm=("other@2",))
    with pytest.raises(CannotInstall, match=r"^python ended with 1: no room$"):
        installed(packages, tmp_path)
    folder = installed(packages, tmp_path)
    assert [command[-1] for command in done] == ["some==1", "some==1", "other@2"]
    assert installed(packages, tmp_path) == folder
    assert len(done) == 3
    assert installed(Packages(name="some", pip=("some==2",)), tmp_path) != folder


def test_the_calls_in_a_report_of_strace_are_summed():
    report = """% time     seconds  usecs/call     calls    errors syscall
------ ----------- ----------- --------- --------- ----------------
 97.55    0.011904         118       101           fdatasync
  2.45    0.000299          99         3         1 fsync
------ ----------- ----------- --------- --------- ----------------
100.00    0.012203         117       104         1 total
"""
    assert syncs_in(report) == 104
    assert "fdatasync" in CALLS
    assert syncs_in("") == 0
