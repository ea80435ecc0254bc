"""What a store must bear that others wrote: a time that no clock reaches, numbers without room, summaries of another shape; and
a process that may open few files, or write only short ones. S0-34, F025."""

from __future__ import annotations

import resource
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from rpcagent import errors
from rpcagent.journal import disk as disks
from rpcagent.journal import manifest, record
from rpcagent.store import LATEST, SystemClock
from tests.process.wire_driver import Daemon, Refused
from tests.runs.on_disk import OnDisk

TALKER: dict[str, Any] = {"model": {"script": [{"text": "done"}]}}


@pytest.mark.parametrize("told", [datetime.max.replace(tzinfo=UTC), datetime(9999, 12, 31, tzinfo=UTC), LATEST])
def test_no_instant_of_a_log_takes_the_clock_to_where_it_cannot_go_on(told: datetime):
    clock = SystemClock()
    clock.not_before(told)
    assert LATEST <= clock.now() < LATEST + timedelta(minutes=1)
    assert clock.now() + timedelta(days=365_000) > clock.now()


@pytest.mark.parametrize(
    "head", [record.Head(epoch=10**16, seq=1, checksum=2), record.Head(epoch=1, seq=10**16, checksum=2)]
)
def test_a_slot_of_the_watermark_that_nobody_could_read_is_not_written(head: record.Head):
    with pytest.raises(ValueError, match="16 digits"):
        record.head_slot(head)


def test_the_longest_slot_of_the_watermark_is_read_back():
    longest = record.Head(epoch=10**16 - 1, seq=10**16 - 1, checksum=0xFFFFFFFF)
    assert record.read_head(record.head_slot(longest) * 2)[0] == longest


def of_status(store: manifest.Manifest) -> manifest.Manifest:
    return _live(store, b'"status":"waiting"', b'"status":{"is":"waiting"}')


def of_place(store: manifest.Manifest) -> manifest.Manifest:
    return _live(store, b'"place":', b'"places":')


def _live(store: manifest.Manifest, old: bytes, new: bytes) -> manifest.Manifest:
    live = {run: raw.replace(old, new) for run, raw in store.live.items()}
    assert live != store.live
    return manifest.Manifest(**_members(store) | {"live": live})


def _members(store: manifest.Manifest) -> dict[str, Any]:
    return {name: getattr(store, name) for name in store.__struct_fields__}


def at(text: str) -> Callable[[manifest.Manifest], manifest.Manifest]:
    return lambda store: manifest.Manifest(**_members(store) | {"at": text})


SHAPES: dict[str, Callable[[manifest.Manifest], manifest.Manifest]] = {
    "status is no word": of_status, "no place": of_place, "no time": at("soon"), "before all time": at("0001-01-01T00:00:00+23:00"),
}  # fmt: skip


@pytest.mark.anyio
@pytest.mark.parametrize("shape", SHAPES)
async def test_a_manifest_of_another_shape_is_told_as_that_of_a_later_version_and_nothing_is_changed(
    tmp_path: Path, shape: str
):
    disk = OnDisk(tmp_path)
    async with disk.life() as life:
        await life.start("waits", "bank.pay")
        await life.keeper.checkpoint()
    path = disk.folder / manifest.FILE
    known = manifest.decode(path.read_bytes())
    changed = SHAPES[shape](known)
    path.write_bytes(manifest.encode(changed, changed.live.items()))
    with pytest.RaisesGroup(errors.StoreTooNew, flatten_subgroups=True):
        async with disk.life():
            raise AssertionError("it was opened")


@pytest.mark.anyio
async def test_no_descriptor_for_a_sync_is_told_and_the_next_checkpoint_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    disk = OnDisk(tmp_path)
    async with disk.life() as life:
        await life.start("a")
        with monkeypatch.context() as patch:

            def none_left(self: disks.RealDisk, files: Any, folders: Any) -> None:
                for name in files:
                    self.release(name)
                limit = resource.getrlimit(resource.RLIMIT_NOFILE)
                resource.setrlimit(resource.RLIMIT_NOFILE, (3, limit[1]))
                try:
                    real(self, files, folders)
                finally:
                    resource.setrlimit(resource.RLIMIT_NOFILE, limit)

            real = disks.RealDisk.sync_many
            patch.setattr(disks.RealDisk, "sync_many", none_left)
            with pytest.raises(errors.StorageError) as caught:
                await life.keeper.checkpoint()
        assert (caught.value.details["errno"], type(caught.value)) == ("EMFILE", errors.StorageError)
        await life.start("b")
        await life.keeper.checkpoint()
        assert (life.supervisor.tail_records, life.counts) == (0, {"completed": 2})


@pytest.mark.process
def test_a_daemon_with_64_descriptors_makes_its_checkpoints(tmp_path: Path):
    def few() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))

    with Daemon(tmp_path / "store", rig=("--checkpoint-every", "60", "--retry", "20"), before_exec=few) as daemon:
        daemon.listen()
        sent = [daemon.request("start", clientRequestId=f"k{n}", agent=TALKER, input="") for n in range(120)]
        daemon.write(b"".join(line for _, line in sent))
        for ident, _ in sent:
            daemon.result(ident)
        shown = daemon.once(lambda health: health["checkpoint"]["made"] > 0)
        assert (shown["journal"]["state"], "trouble" in shown["checkpoint"]) == ("ok", False)
        assert daemon.stop() == 0


@pytest.mark.process
def test_a_file_size_limit_below_the_thresholds_of_a_checkpoint_is_met_by_one_and_stops_nobody_for_good(tmp_path: Path):
    def short() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))

    met = 0
    with Daemon(tmp_path / "store", before_exec=short) as daemon:
        daemon.listen()
        for number in range(20):
            params = {"clientRequestId": f"k{number}", "agent": TALKER, "input": "y" * 60_000}
            try:
                daemon.call("start", **params)
            except Refused as refusal:
                assert refusal.data == {"code": "STORAGE", "retryable": True, "errno": "EFBIG"}
                met += 1
                daemon.once_not("STORAGE", "start", **params)
        assert daemon.call("status")["journal"]["state"] == "ok"
        assert met == 1
        assert daemon.stop() == 0
