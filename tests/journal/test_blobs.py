"""Blobs: durable before anyone refers to them, verified on every read, gone only when nobody refers to them."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import stat
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from rpcagent import errors
from rpcagent.journal import blobs as blobs_module
from rpcagent.journal.blobs import BYTES_MAX, GRACE_S, PIECE_BYTES, Blobs
from rpcagent.journal.disk import RealDisk
from rpcagent.journal.seal import MAGIC, AesGcm, KeyMissing, Plain
from rpcagent.keys import Key, KeyRing

from .faulty import FaultyDisk
from .simdisk import Crash, SimDisk

if TYPE_CHECKING:
    from collections.abc import Callable

ANY = b"a small content, with \0 and \xff in it\n"
NOW = time.time()
MISMATCH = "its content does not have the SHA-256 that it is named by"


def sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def kept(blobs: Blobs, content: bytes) -> str:
    writer = blobs.create()
    writer.write(content)
    return writer.keep()


def aged(path: Path, seconds: float) -> Path:
    os.utime(path, (NOW - seconds, NOW - seconds))
    return path


def sealing(byte: int = 7, *older: int) -> AesGcm:
    keys = [Key(hashlib.sha256(bytes([n])).digest()) for n in (byte, *older)]
    return AesGcm(KeyRing(*keys), "sto_a")


@pytest.fixture
def blobs(tmp_path: Path) -> Blobs:
    return Blobs(tmp_path / "blobs")


def raised(act: Callable[[], Any]) -> tuple[type, dict[str, Any]]:
    with pytest.raises(errors.RpcAgentError) as caught:
        act()
    return type(caught.value), caught.value.details


# Written and read


@pytest.mark.parametrize("content", [b"", b"x", ANY, bytes(PIECE_BYTES), os.urandom(3 * PIECE_BYTES + 1)])
def test_what_is_kept_has_a_file_named_by_its_sha256_and_reads_back(blobs: Blobs, content: bytes) -> None:
    writer = blobs.create()
    for at in range(0, len(content), 100_000):
        writer.write(content[at : at + 100_000])
    digest = writer.keep()
    assert digest == sha(content)
    assert os.listdir(blobs.folder) == [digest]
    file = blobs.folder / digest
    assert file.read_bytes() == blobs.read(digest) == content
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(blobs.folder.stat().st_mode) == 0o700
    assert blobs.size(digest) == len(content)


def test_a_content_is_read_in_pieces_of_bounded_size(blobs: Blobs) -> None:
    content = os.urandom(2 * PIECE_BYTES + 5)
    pieces = list(blobs.pieces(kept(blobs, content)))
    assert b"".join(pieces) == content
    assert [len(piece) for piece in pieces] == [PIECE_BYTES, PIECE_BYTES, 5]


def test_what_is_dropped_leaves_nothing_and_may_be_dropped_again(blobs: Blobs) -> None:
    writer = blobs.create()
    writer.write(ANY)
    assert [re.sub("[0-9a-f]{32}", "*", name) for name in os.listdir(blobs.folder)] == [".blob-*.tmp"]
    writer.drop()
    writer.drop()
    assert os.listdir(blobs.folder) == []


def test_a_dropped_writer_takes_nothing_away_that_was_kept(blobs: Blobs) -> None:
    writer = blobs.create()
    writer.write(ANY)
    digest = writer.keep()
    writer.drop()
    assert blobs.read(digest) == ANY


def test_no_descriptor_stays_open_but_that_of_the_folder(blobs: Blobs) -> None:
    kept(blobs, b"first")
    before = sorted(os.listdir("/proc/self/fd"))
    blobs.read(kept(blobs, ANY))
    blobs.create().drop()
    next(blobs.pieces(kept(blobs, bytes(2 * PIECE_BYTES))))
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_a_content_beyond_the_limit_is_refused(blobs: Blobs, monkeypatch: pytest.MonkeyPatch) -> None:
    assert BYTES_MAX == 64 * 1024 * 1024
    monkeypatch.setattr(blobs_module, "BYTES_MAX", 10)
    writer = blobs.create()
    writer.write(b"0123456789")
    with pytest.raises(OSError, match="does not get larger") as caught:
        writer.write(b"x")
    assert caught.value.errno == errno.EFBIG
    writer.drop()
    assert os.listdir(blobs.folder) == []


# Damage


def test_no_changed_bit_of_a_blob_is_ever_read_in_silence(blobs: Blobs) -> None:
    digest = kept(blobs, ANY)
    file = blobs.folder / digest
    expected = (errors.StoreDamaged, {"file": f"blobs/{digest}", "offset": 0, "reason": MISMATCH})
    for place in range(len(ANY)):
        for bit in range(8):
            changed = bytearray(ANY)
            changed[place] ^= 1 << bit
            file.write_bytes(changed)
            assert raised(lambda: blobs.read(digest)) == expected
    for changed in (b"", ANY[:-1], ANY[1:], ANY + b"\0"):
        file.write_bytes(changed)
        assert raised(lambda: blobs.read(digest)) == expected
    file.write_bytes(ANY)
    assert blobs.read(digest) == ANY


def test_a_damaged_blob_never_comes_to_its_end(blobs: Blobs) -> None:
    digest = kept(blobs, bytes(3 * PIECE_BYTES))
    with (blobs.folder / digest).open("r+b") as file:
        file.write(b"x")
    pieces: list[bytes] = []
    assert raised(lambda: pieces.extend(blobs.pieces(digest)))[0] is errors.StoreDamaged
    assert sum(map(len, pieces)) == 2 * PIECE_BYTES


def test_a_blob_longer_than_any_can_be_is_damaged_and_not_loaded(blobs: Blobs) -> None:
    digest = kept(blobs, ANY)
    os.truncate(blobs.folder / digest, 10**12)
    reason = "it has 1000000000000 bytes, more than any blob"
    assert raised(lambda: blobs.read(digest)) == (
        errors.StoreDamaged,
        {"file": f"blobs/{digest}", "offset": 0, "reason": reason},
    )


@pytest.mark.parametrize("ask", [Blobs.read, Blobs.size])
def test_what_is_not_there_is_not_found_whatever_it_is_called(
    blobs: Blobs, tmp_path: Path, ask: Callable[[Blobs, str], Any]
) -> None:
    (tmp_path / "HEAD").write_bytes(ANY)
    kept(blobs, b"another")
    for digest in (sha(b"?"), "../HEAD", "", ".", sha(ANY).upper(), sha(ANY) + "\n"):
        assert raised(lambda digest=digest: ask(blobs, digest)) == (errors.NotFound, {"digest": digest})


def test_what_cannot_be_read_now_is_no_damage_and_not_missing(blobs: Blobs) -> None:
    digest = sha(ANY)
    (blobs.folder / digest).mkdir(parents=True)
    assert raised(lambda: blobs.read(digest)) == (errors.StorageError, {"errno": "EISDIR"})


# Shared


def test_the_same_content_is_one_file_and_the_later_one_makes_it_young_and_whole(blobs: Blobs) -> None:
    digest = kept(blobs, ANY)
    file = aged(blobs.folder / digest, 2 * GRACE_S)
    file.write_bytes(b"damaged")
    aged(file, 2 * GRACE_S)
    assert kept(blobs, ANY) == digest
    assert os.listdir(blobs.folder) == [digest]
    assert blobs.read(digest) == ANY
    assert blobs.collect(set(), now=NOW) == []


def test_many_threads_with_the_same_content_agree(blobs: Blobs) -> None:
    content = os.urandom(500_000)
    together = threading.Barrier(8)
    digests: list[str] = []

    def write() -> None:
        for _ in range(10):
            together.wait()
            digests.append(kept(blobs, content))
            assert blobs.read(digests[-1]) == content

    threads = [threading.Thread(target=write) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert digests == [sha(content)] * 80
    assert os.listdir(blobs.folder) == [sha(content)]


# Collected


def test_only_what_nobody_refers_to_and_what_is_old_enough_goes(blobs: Blobs) -> None:
    old_named, old, young = kept(blobs, b"old and named"), kept(blobs, b"old"), kept(blobs, b"young")
    half, half_young = blobs.folder / f".blob-{'0' * 32}.tmp", blobs.folder / f".blob-{'1' * 32}.tmp"
    half.write_bytes(b"half")
    half_young.write_bytes(b"")
    for path in (blobs.folder / old_named, blobs.folder / old, half):
        aged(path, GRACE_S + 1)
    for path in (blobs.folder / young, half_young):
        aged(path, GRACE_S - 1)
    for name in ("notes.txt", "b" * 63, "c" * 65, ".blob-x.tmp"):  # nothing of ours
        (blobs.folder / name).write_bytes(b"")
        aged(blobs.folder / name, 9 * GRACE_S)
    (blobs.folder / ("a" * 64)).mkdir()
    aged(blobs.folder / ("a" * 64), 9 * GRACE_S)
    before = sorted(os.listdir(blobs.folder))
    going = sorted([(old, 3), (half.name, 4)])

    assert blobs.collect({old_named}, now=NOW, dry_run=True) == going
    assert sorted(os.listdir(blobs.folder)) == before
    assert blobs.collect(lambda: {old_named}, now=NOW) == going
    assert sorted(os.listdir(blobs.folder)) == sorted(set(before) - {old, half.name})
    assert blobs.collect({old_named}, now=NOW) == []
    assert blobs.collect((), now=NOW, grace_s=GRACE_S + 1) == [(old_named, 13)]


def test_where_nothing_was_ever_written_nothing_is_collected_and_nothing_is_made(blobs: Blobs) -> None:
    assert blobs.collect(set(), now=NOW) == []
    assert not blobs.folder.exists()


def test_what_came_after_the_caller_said_what_is_needed_is_not_looked_at(blobs: Blobs) -> None:
    kept(blobs, b"first")
    late: list[str] = []

    def referenced() -> list[str]:
        late.append(kept(blobs, ANY))
        aged(blobs.folder / late[0], 2 * GRACE_S)
        return []

    assert blobs.collect(referenced, now=NOW) == []
    assert blobs.collect([], now=NOW) == [(late[0], len(ANY))]


def test_a_folder_that_cannot_be_read_is_said_so(blobs: Blobs) -> None:
    blobs.folder.write_bytes(b"")
    assert raised(lambda: blobs.collect(set(), now=NOW)) == (errors.StorageError, {"errno": "ENOTDIR"})


def test_a_content_that_comes_again_while_it_is_being_collected_stays(blobs: Blobs) -> None:
    digest = kept(blobs, ANY)
    aged(blobs.folder / digest, 2 * GRACE_S)

    def referenced() -> set[str]:
        kept(blobs, ANY)  # after its file was listed; no commit names it yet
        return set()

    assert blobs.collect(referenced, now=NOW) == []
    assert blobs.read(digest) == ANY


def test_a_file_is_not_renewed_between_its_being_seen_as_old_and_its_deletion(
    blobs: Blobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, bool]] = []

    def watched(owner: type, call: str) -> None:
        real = getattr(owner, call)

        def watch(*args: Any) -> Any:
            seen.append((call, blobs._lock.locked()))
            return real(*args)

        monkeypatch.setattr(owner, call, watch)

    watched(RealDisk, "rename")
    digest = kept(blobs, ANY)
    aged(blobs.folder / digest, 2 * GRACE_S)
    watched(Path, "lstat")
    watched(Path, "unlink")
    blobs.collect(set(), now=NOW)
    assert seen == [("rename", True), ("lstat", True), ("unlink", True)]


def test_a_collection_that_a_crash_cuts_short_takes_only_what_may_go_and_the_next_one_takes_the_rest(
    blobs: Blobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = kept(blobs, b"named")
    unnamed = sorted(kept(blobs, b"%d" % number) for number in range(5))
    for name in (named, *unnamed):
        aged(blobs.folder / name, 2 * GRACE_S)
    for left in range(4, -1, -1):
        real, calls = Path.unlink, iter((False, True))

        def unlink(path: Path, real: Any = real, calls: Any = calls) -> None:
            if next(calls):
                raise Crash
            real(path)

        with monkeypatch.context() as patched:
            patched.setattr(Path, "unlink", unlink)
            if left:
                with pytest.raises(Crash):
                    blobs.collect({named}, now=NOW)
            else:
                assert blobs.collect({named}, now=NOW) == [(unnamed[-1], 1)]
        assert sorted(os.listdir(blobs.folder)) == sorted([named, *unnamed[5 - left :]])
    assert blobs.read(named) == b"named"


# Crashes and a disk that fails


def whole(image: dict[str, bytes]) -> bool:
    """Every file that is named by a digest has that content; what else is there is a leftover that a collection takes."""
    return all(name.startswith(".blob-") if name.startswith(".") else sha(image[name]) == name for name in image)


def write_on(disk: SimDisk, content: bytes, seal: AesGcm | None = None) -> str:
    writer = Blobs(Path("blobs"), seal, disk=disk).create()
    try:
        for at in range(0, len(content), 20):
            writer.write(content[at : at + 20])
    except OSError:
        writer.drop()
        raise
    return writer.keep()


@pytest.mark.parametrize("there", [False, True])
def test_a_crash_at_any_call_leaves_no_blob_but_a_whole_one(there: bool) -> None:
    content, other = ANY, b"another"
    image = {sha(other): other} | ({sha(content): content} if there else {})
    crash_at = 0
    while True:
        disk = SimDisk(image, crash_at=crash_at)
        try:
            digest = write_on(disk, content)
        except Crash:
            digest = None
        found = [disk.image(), *disk.after_cut()]
        assert all(whole(each) for each in found)
        assert all(each[name] == image[name] for each in found for name in image)
        if digest is not None:
            assert all(each[digest] == content for each in found)  # durable on return
            break
        crash_at += 1
    assert [re.sub(r"(?<=blob-)[0-9a-f]{32}", "*", line) for line in disk.log] == [
        "create .blob-*.tmp",
        "write .blob-*.tmp",
        "write .blob-*.tmp",
        "sync .blob-*.tmp",
        f"rename {digest}",
        "sync /",
    ]


@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize(
    ("call", "code"), [("write", errno.ENOSPC), ("sync", errno.EIO), ("rename", errno.EROFS), ("syncdir", errno.EIO)]
)
def test_a_failed_call_is_told_and_costs_nothing_that_was_there(call: str, code: int, there: bool) -> None:
    image = {sha(ANY): ANY} if there else {}
    disk = FaultyDisk(image)
    disk.plan[(call, "")] = code
    with pytest.raises(OSError, match="planned") as caught:
        write_on(disk, ANY)
    assert caught.value.errno == code
    after = [disk.image(), *disk.after_cut()]
    assert all(whole(each) for each in after)
    assert all(each.get(name) == content for each in after for name, content in image.items())
    if call != "syncdir":
        assert disk.image() == image
    disk.plan.clear()
    assert write_on(disk, ANY) == sha(ANY)
    assert all(each[sha(ANY)] == ANY for each in disk.after_cut())


def test_what_a_failed_sync_may_have_lost_never_gets_the_name() -> None:
    disk = SimDisk({}, fail_sync=frozenset({1}))
    with pytest.raises(OSError, match="sync failed"):
        write_on(disk, ANY)
    assert disk.image() == {}
    assert all(whole(image) and sha(ANY) not in image for image in disk.after_cut())


# Sealed


def test_a_sealed_content_is_not_on_disk_at_any_time_and_reads_back(tmp_path: Path) -> None:
    blobs = Blobs(tmp_path / "blobs", sealing())
    writer = blobs.create()
    writer.write(ANY[:10])
    writer.write(ANY[10:])
    assert [path.read_bytes() for path in blobs.folder.iterdir()] == [b""]
    digest = writer.keep()
    raw = (blobs.folder / digest).read_bytes()
    assert digest == sha(ANY)
    assert raw.startswith(MAGIC)
    assert ANY[:10] not in raw
    assert (blobs.read(digest), blobs.size(digest)) == (ANY, len(raw))
    assert kept(blobs, ANY) == digest
    assert os.listdir(blobs.folder) == [digest]
    assert (blobs.folder / digest).read_bytes() != raw
    assert blobs.read(digest) == ANY


def test_no_changed_bit_of_a_sealed_blob_is_ever_read_in_silence(tmp_path: Path) -> None:
    blobs = Blobs(tmp_path / "blobs", sealing())
    digest, other = kept(blobs, ANY), kept(blobs, b"other")
    file = blobs.folder / digest
    raw = file.read_bytes()
    found = set()
    for place in range(len(raw)):
        for bit in range(8):
            changed = bytearray(raw)
            changed[place] ^= 1 << bit
            file.write_bytes(changed)
            found.add(raised(lambda: blobs.read(digest))[0])
    assert found == {errors.StoreDamaged, KeyMissing}
    for changed in (b"", raw[:-1], raw[:20], raw + b"\0", (blobs.folder / other).read_bytes()):
        file.write_bytes(changed)
        kind, details = raised(lambda: blobs.read(digest))
        assert (kind, details["file"], details["offset"]) == (errors.StoreDamaged, f"blobs/{digest}", 0)


def test_what_was_written_without_a_key_is_read_with_one_and_is_sealed_when_it_comes_again(tmp_path: Path) -> None:
    looks_sealed = MAGIC + b"\x01" + bytes(80)
    for content in (ANY, looks_sealed, MAGIC, MAGIC + b"\x00" + ANY):
        plain, sealed = Blobs(tmp_path / "blobs"), Blobs(tmp_path / "blobs", sealing())
        digest = kept(plain, content)
        assert [each.read(digest) for each in (plain, sealed, Blobs(plain.folder, Plain()))] == [content] * 3
        assert kept(sealed, content) == digest
        assert (plain.folder / digest).read_bytes() not in {content, b""}
        assert sealed.read(digest) == content


def test_a_seal_without_a_key_seals_nothing(tmp_path: Path) -> None:
    blobs = Blobs(tmp_path / "blobs", Plain())
    writer = blobs.create()
    writer.write(MAGIC + ANY)
    assert [path.read_bytes() for path in blobs.folder.iterdir()] == [MAGIC + ANY]
    writer.drop()


def test_a_sealed_blob_needs_its_key(tmp_path: Path) -> None:
    folder = tmp_path / "blobs"
    digest = kept(Blobs(folder, sealing(7)), ANY)
    details = {"kid": sealing(7).kid, "context": f"blob/{digest}"}
    assert raised(lambda: Blobs(folder, sealing(8)).read(digest)) == (KeyMissing, details)
    assert raised(lambda: Blobs(folder, Plain()).read(digest)) == (KeyMissing, details)
    assert raised(lambda: Blobs(folder).read(digest)) == (
        errors.StoreDamaged,
        {"file": f"blobs/{digest}", "offset": 0, "reason": MISMATCH},
    )
    assert Blobs(folder, sealing(8, 7)).read(digest) == ANY


def test_a_crash_while_a_sealed_content_is_kept_leaves_the_old_one_or_the_new_one() -> None:
    seal = sealing()
    first = SimDisk({})
    digest = write_on(first, ANY, seal)
    image = first.image()
    for crash_at in range(5):
        disk = SimDisk(image, crash_at=crash_at)
        with pytest.raises(Crash):
            write_on(disk, ANY, seal)
        for found in (disk.image(), *disk.after_cut()):
            assert seal.open_bytes(f"blob/{digest}", found[digest]) == ANY
