"""Where a key is found, what is refused, and that no message shows any of it."""

from __future__ import annotations

import base64
import copy
import hashlib
import os
import pickle
import sys
import types
from pathlib import Path

import msgspec
import pytest
from rpcagent import keys
from rpcagent.keys import Key, KeyRing, KeyUnusable

SECRET = hashlib.sha256(b"a key of the tests").digest()
KID = "60232b55"
HEX = SECRET.hex()
BASE64 = base64.b64encode(SECRET).decode()
REMEDY = "random bytes as 64 hex digits, as base64 or as they are (a passphrase is none); to make one: "


def written(folder: Path, content: bytes | str, mode: int = 0o600) -> Path:
    path = folder / "store.key"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    path.chmod(mode)
    return path


def refusal(reference: str, environ: dict[str, str] | None = None) -> str:
    """What a load says that fails, after a look at all that the error holds."""
    with pytest.raises(KeyUnusable) as caught:
        keys.load(reference, {} if environ is None else environ)
    told = str(caught.value) + repr(caught.value)
    behind: BaseException | None = caught.value
    while behind is not None:
        told += repr(behind) + repr(behind.args) + repr(vars(behind))
        behind = behind.__context__
    shows_nothing(told)
    return str(caught.value)


def shows_nothing(told: str) -> None:
    for form in (HEX, HEX[:12], BASE64, BASE64[:12], repr(SECRET)[2:20], SECRET[:6].hex()):
        assert form not in told


def backend(monkeypatch: pytest.MonkeyPatch, answers: dict[tuple[str, str], str | Exception]) -> None:
    def get_password(service: str, name: str) -> str | None:
        answer = answers.get((service, name))
        if isinstance(answer, Exception):
            raise answer
        return answer

    module = types.ModuleType("keyring")
    module.get_password = get_password  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "keyring", module)


@pytest.mark.parametrize(
    "content",
    [
        HEX, HEX + "\n", HEX + "\r\n", HEX.upper(), BASE64, BASE64 + "\n", BASE64.rstrip("=") + "\n",
        base64.urlsafe_b64encode(SECRET).decode(), SECRET, SECRET + b"\n",
    ],
)  # fmt: skip
def test_a_key_file_holds_hex_or_base64_or_the_bytes_and_perhaps_a_newline(tmp_path: Path, content: bytes | str):
    key = keys.load(f"file:{written(tmp_path, content)}")
    assert (key.secret, key.kid) == (SECRET, KID)


@pytest.mark.parametrize("last", [b"\n", b"\r"])
def test_a_raw_key_that_ends_like_a_line_is_taken_whole(tmp_path: Path, last: bytes):
    secret = SECRET[:31] + last
    assert keys.load(f"file:{written(tmp_path, secret)}").secret == secret
    line = secret + b"\n"
    assert keys.load(f"file:{written(tmp_path, line)}").secret == secret


@pytest.mark.parametrize(
    "content",
    [
        "", "\n", HEX[:-1], HEX + "0", HEX + "\n\n", HEX[:-1] + "g", BASE64[:-2], BASE64 + "=", SECRET[:31],
        SECRET + SECRET[:1], SECRET + b"\n\n", HEX[:32], "correct horse battery staple 1234",
        "correct horse battery staple 123\n", bytes(32), "0" * 64, HEX * 5,
    ],
)  # fmt: skip
def test_what_is_no_key_of_random_bytes_is_refused(tmp_path: Path, content: bytes | str):
    path = written(tmp_path, content)
    assert refusal(f"file:{path}") == f"file:{path}: this is no key: 32 {REMEDY}rpcagent key new FILE"


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o610, 0o601, 0o644])
def test_a_key_file_that_others_can_get_at_is_refused_with_the_command_that_helps(tmp_path: Path, mode: int):
    path = written(tmp_path, HEX, mode)
    told = refusal(f"file:{path}")
    assert told == (f"file:{path}: others than its owner have access to it (mode {mode:04o}); run: chmod 600 {path}")
    path.chmod(0o400)
    assert keys.load(f"file:{path}").kid == KID


def test_the_command_that_helps_is_fit_for_a_shell(tmp_path: Path):
    folder = tmp_path / "a folder"
    folder.mkdir()
    path = written(folder, HEX, 0o644)
    assert refusal(f"file:{path}").endswith(f"run: chmod 600 '{path}'")


def test_a_key_file_must_be_there_and_be_a_file(tmp_path: Path):
    missing, fifo = tmp_path / "missing", tmp_path / "fifo"
    assert refusal(f"file:{missing}") == (
        f"file:{missing}: there is no such file; to make a new key there: rpcagent key new {missing}"
    )
    os.mkfifo(fifo, 0o600)
    assert refusal(f"file:{fifo}") == f"file:{fifo}: this is not a regular file"
    assert refusal(f"file:{tmp_path}") == f"file:{tmp_path}: this is not a regular file"
    assert refusal("file:a\0b") == "file:a\0b: this is no path"
    assert refusal("file:~nobody-of-this-name/key") == (
        "file:~nobody-of-this-name/key: there is no such file; to make a new key there: rpcagent key new "
        "'~nobody-of-this-name/key'"
    )
    below = written(tmp_path, HEX) / "key"
    assert refusal(f"file:{below}") == f"file:{below}: it cannot be read: Not a directory"


def test_a_path_of_a_key_may_begin_at_home_and_may_be_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "link").symlink_to(written(tmp_path, HEX))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert keys.load("file:~/link").kid == KID


def test_no_descriptor_is_left_by_a_load(tmp_path: Path):
    path = written(tmp_path, HEX)
    before = len(os.listdir("/proc/self/fd"))
    keys.load(f"file:{path}")
    refusal(f"file:{tmp_path}")
    refusal(f"file:{written(tmp_path, HEX, 0o644)}")
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_key_in_the_environment_is_taken_out_of_it():
    environ = {"STORE_KEY": HEX, "OTHER": "1"}
    assert keys.load("env:STORE_KEY", environ).kid == KID
    assert environ == {"OTHER": "1"}


def test_the_environment_of_the_process_is_the_default(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RPCAGENT_TEST_KEY", BASE64)
    assert keys.load("env:RPCAGENT_TEST_KEY").kid == KID
    assert "RPCAGENT_TEST_KEY" not in os.environ


def test_a_variable_that_is_missing_or_empty_or_no_key_is_refused():
    absent = "env:KEY: the environment has no such variable, or it is empty; set it to the key's text"
    assert refusal("env:KEY") == absent
    assert refusal("env:KEY", {"KEY": ""}) == absent
    told = f"env:KEY: this is no key: 32 {REMEDY}rpcagent key new FILE"
    assert refusal("env:KEY", {"KEY": HEX[:-2]}) == told
    assert refusal("env:KEY", {"KEY": HEX[:-1] + "\udcff"}) == told


def test_a_key_in_the_keyring_is_asked_by_service_and_name(monkeypatch: pytest.MonkeyPatch):
    backend(monkeypatch, {("rpcagent", "ada"): HEX, ("https://host/store", "ada"): BASE64})
    assert keys.load("keyring:rpcagent/ada").kid == KID
    assert keys.load("keyring:https://host/store/ada").kid == KID


def test_a_keyring_that_has_no_key_is_told_apart_from_one_that_does_not_answer(monkeypatch: pytest.MonkeyPatch):
    backend(monkeypatch, {("rpcagent", "bad"): HEX[1:], ("rpcagent", "shut"): OSError(f"tried {HEX[-4:]}")})
    assert refusal("keyring:rpcagent/my key") == (
        "keyring:rpcagent/my key: the keyring has no such entry; to store a key there: keyring set rpcagent 'my key'"
    )
    assert refusal("keyring:rpcagent/bad") == (
        f"keyring:rpcagent/bad: this is no key: 32 {REMEDY}keyring set rpcagent bad"
    )
    assert refusal("keyring:rpcagent/shut") == (
        "keyring:rpcagent/shut: the keyring does not answer (OSError); unlock it, or name the key by file:PATH"
    )


def test_without_the_keyring_package_the_command_that_installs_it_is_told(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "keyring", None)
    assert refusal("keyring:rpcagent/ada") == (
        "keyring:rpcagent/ada: the package `keyring` is not installed; run: pip install 'rpcagent[keyring]'"
    )


@pytest.mark.parametrize(
    "reference",
    [
        HEX,
        BASE64,
        "",
        "file:",
        f"hex:{HEX}",
        "env:",
        f"env:{HEX[:12]}+",
        f"env:1{HEX}",
        "keyring:",
        "keyring:ada",
        "/key",
        "keyring:/ada",
    ],
)
def test_what_is_no_reference_may_be_the_key_itself_and_is_not_repeated(reference: str):
    assert refusal(reference) == (
        "a key is named by file:PATH, env:NAME or keyring:SERVICE/NAME, and this is none of them (it is not repeated "
        "here: the key itself never belongs on a command line)"
    )


def test_a_key_shows_its_id_and_never_its_bytes():
    key = Key(SECRET)
    ring = KeyRing(key)
    assert hashlib.sha256(b"rpcagent key id" + SECRET).hexdigest()[:8] == KID
    assert (repr(key), str(key), f"{key}", repr(ring)) == (
        f"Key({KID})",
        f"Key({KID})",
        f"Key({KID})",
        f"KeyRing({KID})",
    )
    assert msgspec.json.Encoder(enc_hook=repr).encode([key, ring]) == f'["Key({KID})","KeyRing({KID})"]'.encode()
    with pytest.raises(TypeError):
        msgspec.json.encode(key)
    for spread in (pickle.dumps, copy.copy):
        with pytest.raises(TypeError):
            spread(key)
    with pytest.raises(TypeError):
        pickle.dumps(ring)


def test_a_key_has_32_bytes():
    with pytest.raises(ValueError, match=r"^a key is 32 bytes$"):
        Key(SECRET[:31])


def test_a_ring_has_the_current_key_and_older_ones_by_id():
    current, older = Key(SECRET), Key(SECRET[::-1])
    ring = KeyRing(current, older, Key(SECRET))
    assert ring.kids == (KID, older.kid)
    assert (ring.current, ring.get(KID), ring.get(older.kid), ring.get("00000000")) == (current, current, older, None)


def test_two_keys_with_one_id_are_refused():
    other = Key(SECRET[::-1])
    other.kid = KID
    with pytest.raises(ValueError, match=rf"^two different keys have the id {KID}; replace one of them$"):
        KeyRing(Key(SECRET), other)


def test_a_ring_is_loaded_from_references_each_of_which_is_asked_once(tmp_path: Path):
    older = f"file:{written(tmp_path, SECRET[::-1])}"
    ring = keys.load_ring("env:A", [older, "env:A"], {"A": HEX})
    assert ring.kids == (KID, Key(SECRET[::-1]).kid)
    with pytest.raises(KeyUnusable, match=r"^env:A: the environment has no such variable"):
        keys.load_ring(older, ["env:A"], {})


def test_a_new_key_file_is_its_owners_alone_and_loads(tmp_path: Path):
    path = tmp_path / "new.key"
    key = keys.new_key_file(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.read_text() == key.secret.hex() + "\n"
    assert keys.load(f"file:{path}").kid == key.kid
    assert keys.new_key_file(tmp_path / "other.key").secret != key.secret


def test_a_new_key_never_replaces_a_file(tmp_path: Path):
    path = written(tmp_path, HEX)
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for there in (path, tmp_path / "link"):
        with pytest.raises(KeyUnusable) as caught:
            keys.new_key_file(there)
        assert str(caught.value) == f"{there} is there already, and a key is never overwritten; name another file"
    assert path.read_text() == HEX
    assert not (tmp_path / "elsewhere").exists()


def test_a_new_key_that_cannot_be_made_durable_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "new.key"
    synced: list[str] = []

    def fail(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        if len(synced) == fails_at:
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    for fails_at in (1, 2):
        synced.clear()
        with pytest.raises(KeyUnusable) as caught:
            keys.new_key_file(path)
        assert str(caught.value) == f"{path} cannot be written: Input/output error"
        assert synced == [str(path), str(tmp_path)][:fails_at]
        assert not path.exists()
    gone = tmp_path / "gone" / "new.key"
    with pytest.raises(KeyUnusable, match=r"new\.key cannot be made: No such file or directory$"):
        keys.new_key_file(gone)


def test_the_text_of_a_new_key_is_a_line_of_64_hex_digits():
    first, second = keys.new_key_text(), keys.new_key_text()
    assert (len(first), first[-1], bytes.fromhex(first).hex()) == (65, "\n", first[:-1])
    assert first != second
