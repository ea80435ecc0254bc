"""The figures can be taken, and the counted gates hold. No clock is judged here."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from tests.bench.peer import ROOT


@pytest.mark.process
def test_a_quick_run_prints_every_figure_and_the_counted_gates_hold():
    done = subprocess.run(
        [sys.executable, "-m", "tests.bench", "--quick", "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    gates = {row["figure"]: row["met"] for row in json.loads(done.stdout) if row["gate"]}
    assert len(gates) == 3
    assert all(gates.values())
