"""Real processes on a real disk: kill -9, two owners, a file size limit. P2, S0-36, F019, F024, F033, F035."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

WRITER = Path(__file__).with_name("writer.py")


@contextlib.contextmanager
def writer(store: Path, *more: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([sys.executable, WRITER, store, *more], stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait(30)
        assert process.stdout is not None
        process.stdout.close()


def lines(process: subprocess.Popen[str]) -> Iterator[dict[str, Any]]:
    assert process.stdout is not None
    for line in process.stdout:
        if line.endswith("\n"):  # the last one may be cut by the kill
            yield json.loads(line)


def test_what_a_process_acknowledged_is_there_after_kill_9_in_mid_append(tmp_path: Path) -> None:
    acknowledged, dropped = 0, 0
    for epoch in range(1, 9):
        with writer(tmp_path) as process:
            said = lines(process)
            ready = next(said)
            assert ready["epoch"] == epoch
            assert ready["ready"] >= acknowledged
            assert (ready["ready"] - acknowledged) <= 3 or epoch == 1
            dropped += ready["dropped"]
            for line in said:
                acknowledged = line["durable"]
                if acknowledged - ready["ready"] >= 40 * epoch:
                    break
            process.kill()
            for line in said:
                acknowledged = line["durable"]
    print(f"acknowledged {acknowledged} records over 8 kills, {dropped} torn bytes")
    assert len(list((tmp_path / "wal").iterdir())) > 3


def test_what_a_process_acknowledged_is_there_after_kill_9_in_mid_checkpoint(tmp_path: Path) -> None:
    acknowledged = checkpoints = 0
    seen = []
    for epoch in range(1, 13):
        with writer(tmp_path, "0", "5") as process:
            said = lines(process)
            ready = next(said)
            assert ready["epoch"] == epoch
            assert ready["ready"] >= acknowledged
            seen.append((ready["held"], ready["tail"]))
            begun = acknowledged = ready["ready"]
            for line in said:
                acknowledged = line.get("durable", acknowledged)
                assert line.get("left", 0) == 0
                checkpoints += "checkpoint" in line
                if acknowledged - begun >= 37 + 11 * epoch:
                    process.kill()
    print(f"acknowledged {acknowledged} records over 12 kills, {checkpoints} checkpoints; held and tail {seen}")
    assert checkpoints > 24
    assert acknowledged > 1000
    assert max(tail for _, tail in seen) < 300  # the log stays short, the history grows


def test_a_second_process_is_refused_and_takes_over_when_the_first_is_killed_s0_36_f033_f035(tmp_path: Path) -> None:
    with writer(tmp_path) as first:
        assert next(lines(first))["epoch"] == 1
        with writer(tmp_path) as second:
            answer = next(lines(second))
            assert second.wait(30) == 75
        assert (answer["code"], answer["pid"], answer["retryable"]) == ("STORE_LOCKED", first.pid, True)
        first.kill()
        first.wait(30)
        (tmp_path / "LOCK").write_bytes(b'{"pid":1,"host":"","since":"2015-01-01T00:00:00Z"}')
        with writer(tmp_path) as third:
            assert next(lines(third))["epoch"] == 2


def test_at_a_file_size_limit_the_batch_is_undone_and_the_log_goes_on_f024(tmp_path: Path) -> None:
    with writer(tmp_path, "9000") as process:
        said = lines(process)
        next(said)
        durable = 0
        for line in said:
            if "refused" in line:
                assert line == {"refused": "EFBIG", "at": durable}
                break
            durable = line["durable"]
        assert next(said) == {"durable": durable + 3}
    with writer(tmp_path) as process:
        assert next(lines(process))["ready"] >= durable + 3
