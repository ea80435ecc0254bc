"""`rpcagent demo`: proves what it says, and leaves nothing behind, however it ends."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from rpcagent.demo.agent import EXPECTED
from rpcagent.demo.story import verdict
from rpcagent.demo.transcript import Transcript

pytestmark = pytest.mark.process

WAIT_S = 60.0
DEMO = [sys.executable, "-P", "-m", "rpcagent", "demo"]


class Place:
    """Where the demo may put files, a directory it runs in and may not write to, and a mark on all its processes."""

    def __init__(self, folder: Path) -> None:
        self.temporary, self.home, self.cwd = (folder / name for name in ("tmp", "home", "cwd"))
        for directory in (self.temporary, self.home, self.cwd):
            directory.mkdir()
        self.cwd.chmod(0o500)
        self.mark = f"DEMO_OF_TEST={folder}"
        kept = {name: value for name, value in os.environ.items() if not name.startswith("RPCAGENT_")}
        name, _, value = self.mark.partition("=")
        self.env = kept | {"TMPDIR": str(self.temporary), "HOME": str(self.home), name: value}

    def start(self, *flags: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*DEMO, *flags],
            cwd=self.cwd,
            env=self.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def files(self) -> list[str]:
        return [entry.name for place in (self.temporary, self.home, self.cwd) for entry in place.iterdir()]

    def processes(self) -> list[str]:
        """The command lines of all living processes that the demo started, however far removed."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if self.mark.encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
            except OSError:
                continue  # gone meanwhile, or not ours
        return found


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path)
    yield place
    place.cwd.chmod(0o700)


def test_the_demo_shows_every_effect_once_and_leaves_nothing_behind(place: Place) -> None:
    with place.start() as demo:
        out, err = demo.communicate(timeout=WAIT_S)
    assert (demo.returncode, err) == (0, ""), out
    table = re.findall(r"^   (T-\d+)  (\S+) +(\S+) +(\d+) +(\d+)$", out, re.MULTILINE)
    assert table == [
        ("T-1001", "tickets.refund", "at_most_once", "1", "1"),
        ("T-1001", "tickets.assign", "idempotent", "1", "1"),
        ("T-1002", "tickets.assign", "idempotent", "2", "1"),
        ("T-1001", "tickets.close", "reconcilable", "1", "1"),
        ("T-1002", "tickets.close", "reconcilable", "1", "1"),
        ("T-1002", "tickets.notify", "at_most_once", "2", "1"),
    ]
    assert len(re.findall(r"^   kill -9 \d+$", out, re.MULTILINE)) == 6
    assert len(set(re.findall(r"run_[a-z2-7]{26}", out))) == 1
    asked, still_asked = re.findall(r"^   digest (sha256:[0-9a-f]{64})$", out, re.MULTILINE)
    assert asked == still_asked
    assert "\x1b" not in out
    assert place.files() == []
    assert place.processes() == []


def test_the_demo_keeps_its_store_where_it_is_asked_to(place: Place) -> None:
    with place.start("--keep") as demo:
        out, _ = demo.communicate(timeout=WAIT_S)
    kept = Path(out.splitlines()[-1].removeprefix("Kept: "))
    assert demo.returncode == 0
    assert kept.parent == place.temporary
    assert {entry.name for entry in kept.iterdir()} == {"daemon.log", "ledger.jsonl", "store", "workspace"}
    assert place.processes() == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("act", [1, 3, 6])
def test_an_interrupted_demo_leaves_nothing_behind(place: Place, number: signal.Signals, act: int) -> None:
    with place.start() as demo:
        assert demo.stdout is not None
        for line in demo.stdout:
            if line.startswith(f"{act}. "):
                break
        demo.send_signal(number)
        _, err = demo.communicate(timeout=WAIT_S)
    assert (demo.returncode, err) == (130, "\nrpcagent demo: interrupted\n")
    assert place.files() == []
    assert place.processes() == []


def test_a_demo_whose_daemon_fails_says_why_and_shows_its_log(place: Place) -> None:
    newer = """
from rpcagent import daemon, errors
def refuse(store):
    raise errors.StoreTooNew("the store was written by a later version")
daemon.make_store_folder = refuse
"""
    (place.home / "sitecustomize.py").write_text(newer)
    place.env["PYTHONPATH"] = str(place.home)
    with place.start() as demo:
        out, _ = demo.communicate(timeout=WAIT_S)
    assert demo.returncode == 1
    assert "\nThe demonstration failed: INCOMPATIBLE (-32061): the store was written by a later version\n" in out
    assert place.processes() == []
    assert list(place.temporary.iterdir()) == []


EVERY: Counter[tuple[str, str]] = Counter(EXPECTED)


@pytest.mark.parametrize(
    ("effects", "code"),
    [
        (EVERY, 0),
        (EVERY + Counter([EXPECTED[0]]), 1),
        (EVERY - Counter([EXPECTED[3]]), 1),
        (EVERY + Counter([("T-1002", "tickets.refund")]), 1),
        (Counter(), 1),
    ],
)
def test_the_verdict_is_1_unless_every_effect_is_there_once(effects: Counter[tuple[str, str]], code: int) -> None:
    class Books:
        def counts(self, kind: str) -> Counter[tuple[str, str]]:
            return effects

    out = io.StringIO()
    assert verdict(Books(), Transcript(out), 1.0) == code
    assert out.getvalue().endswith("Not every effect happened exactly once.\n") == (code == 1)
