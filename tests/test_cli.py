"""The command line: what it teaches, and the configuration that it writes to begin with."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rpcagent import cli, config, starter
from rpcagent.check import check
from rpcagent.examine import examine


def shown(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit) as ended:
        cli.main(argv)
    assert ended.value.code == 0
    return capsys.readouterr().out


def commands() -> list[str]:
    actions = [a for a in cli._parser()._actions if isinstance(a, argparse._SubParsersAction)]
    return [name for action in actions for name in action.choices]


def uncommented() -> str:
    """The starter with its examples taken out of comments, and the prose about them left in."""
    before, examples = starter.STARTER.split("# --- Examples")
    lines = examples.splitlines()[1:]
    code = re.compile(r"# (?=[a-z_]+ = |\[|\]|    )")
    return before + "\n" + "\n".join(code.sub("", line, count=1) if code.match(line) else line for line in lines)


# Help


def test_help_groups_the_commands_and_shows_where_to_begin(capsys: pytest.CaptureFixture[str]):
    text = shown(capsys, "--help")
    groups = re.findall(r"^([a-z ]+):$", text, re.MULTILINE)
    assert groups == ["run", "serve", "look", "keep", "configure", "demo", "begin here"]
    assert "rpcagent init && rpcagent check && rpcagent trust" in text


@pytest.mark.parametrize("command", commands())
def test_every_command_is_in_the_help_and_has_its_own(command: str, capsys: pytest.CaptureFixture[str]):
    assert re.search(rf"^  {command} +\S", shown(capsys, "--help"), re.MULTILINE)
    assert len(shown(capsys, command, "--help").splitlines()) > 5


def test_help_fits_a_terminal_of_usual_width(capsys: pytest.CaptureFixture[str]):
    assert max(len(line) for line in shown(capsys, "--help").splitlines()) <= 125


# The configuration to begin with


def test_init_writes_a_configuration_and_says_what_comes_next(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["init", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"wrote {tmp_path / config.FILE_NAME}\n")
    assert f"rpcagent trust --workspace {tmp_path}" in said
    assert (tmp_path / config.FILE_NAME).read_text() == starter.STARTER


def test_init_leaves_a_file_that_is_there_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / config.FILE_NAME
    path.write_text("mine")
    assert cli.main(["init", str(tmp_path)]) == 1
    assert path.read_text() == "mine"
    assert "is there already" in capsys.readouterr().err


def test_init_says_why_it_cannot_write(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["init", str(tmp_path / "none")]) == 1
    assert "cannot be written: No such file or directory" in capsys.readouterr().err


def test_the_configuration_to_begin_with_passes_without_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    cli.main(["init", str(tmp_path)])
    capsys.readouterr()
    assert check(tmp_path, None, tmp_path / "store", trusted=False, as_json=False) == 0
    assert "ok: 0 problems, 1 agent\n" in capsys.readouterr().out


def test_its_examples_are_right_once_the_comment_signs_are_gone(tmp_path: Path):
    path = tmp_path / config.FILE_NAME
    path.write_text(uncommented())
    report = examine(path, tmp_path, tmp_path / "store", trusted=False)
    assert report.problems == []
    assert [agent.name for agent in report.agents] == ["first", "closer"]
    assert list(report.starts) == ["tickets"]
    assert list(config.load(path).models) == ["main", "real"]
    assert len(config.load(path).agents["closer"].tools) == 3
    assert [(rule.after_ms, rule.keep) for rule in report.retention] == [
        (86_400_000, None),
        (90 * 86_400_000, None),
        (30 * 86_400_000, 100),
    ]


def test_check_says_which_ended_runs_are_deleted_and_nothing_where_there_are_no_rules(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / config.FILE_NAME
    path.write_text(
        """[retention]
rules = [
    { namespace = "ci", statuses = ["failed", "cancelled"], after = "7d", keep = 100 },
    { namespace = "", label = "kind=demo", after = "24h" },
    { keep = 5 },
]
"""
    )
    assert check(tmp_path, None, tmp_path / "store", trusted=False, as_json=False) == 0
    assert (
        """
retention: the first line that fits an ended run decides; all others stay
  runs                               are deleted
  failed or cancelled, namespace ci  7d after their end, but not the newest 100 of each namespace
  namespace none, label kind=demo    24h after their end
  any                                all but the newest 5 of each namespace
"""
        in capsys.readouterr().out
    )
    assert check(tmp_path, None, tmp_path / "store", trusted=False, as_json=True) == 0
    assert json.loads(capsys.readouterr().out)["retention"] == [
        {"namespace": "ci", "statuses": ["failed", "cancelled"], "afterMs": 604_800_000, "keep": 100},
        {"namespace": "", "label": "kind=demo", "afterMs": 86_400_000},
        {"keep": 5},
    ]
    path.write_text("")
    assert check(tmp_path, None, tmp_path / "store", trusted=False, as_json=False) == 0
    assert "retention" not in capsys.readouterr().out


# Mistakes


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit) as ended:
        cli.main(argv)
    assert ended.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("command", ["serve", "check", "trust", "runs"])
def test_an_empty_name_of_a_store_is_a_mistake(command: str, capsys: pytest.CaptureFixture[str]):
    assert "the name of a folder is empty" in refused(capsys, command, "--store", "")


@pytest.mark.parametrize("text", ["nan", "-nan", "soon", ""])
def test_a_wait_that_is_no_number_is_a_mistake(text: str, capsys: pytest.CaptureFixture[str]):
    assert "argument --lock-wait" in refused(capsys, "serve", f"--lock-wait={text}")


@pytest.mark.parametrize("command", ["serve", "check", "trust"])
def test_a_directory_that_is_gone_is_told_in_a_line(command: str, tmp_path: Path):
    gone = tmp_path / "gone"
    gone.mkdir()
    script = "import os, sys; os.rmdir(os.getcwd()); from rpcagent import cli; sys.exit(cli.main(sys.argv[1:]))"
    for more in ([], ["--workspace", str(tmp_path), "--store", "store"]):
        gone.mkdir(exist_ok=True)
        run = [sys.executable, "-P", "-c", script, command, *more]
        done = subprocess.run(
            run, cwd=gone, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False
        )
        told = "rpcagent: the directory that this was started in is gone; start it in one that exists\n"
        assert (done.returncode, done.stdout, done.stderr) == (2, "", told)


def test_a_directory_that_is_gone_is_not_missed_where_no_path_is_named_from_it(tmp_path: Path):
    gone = tmp_path / "gone"
    gone.mkdir()
    script = "import os, sys; os.rmdir(os.getcwd()); from rpcagent import cli; sys.exit(cli.main(sys.argv[1:]))"
    run = [sys.executable, "-P", "-c", script, "serve", "--workspace", str(tmp_path), "--store", str(tmp_path / "s")]
    done = subprocess.run(run, cwd=gone, stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
