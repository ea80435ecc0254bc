"""Runs of the past in files, and what may happen to their files."""

from __future__ import annotations

from pathlib import Path

from tests.runs.on_disk import OnDisk


async def past(disk: OnDisk, count: int = 7) -> list[str]:
    """Runs that have ended, in files; and one that waits."""
    async with disk.life() as life:
        runs = [await life.start(f"k{number}") for number in range(count)]
        await life.start("waits", "bank.pay")
        await life.keeper.checkpoint()
        assert life.roster.actors == {}
    return runs


def folder(disk: OnDisk, run: str) -> Path:
    return disk.folder / "runs" / run


def remove(path: Path) -> None:
    for name in (path, Path(f"{path}-wal"), Path(f"{path}-shm")):
        name.unlink(missing_ok=True)
