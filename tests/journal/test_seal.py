"""A sealed payload opens where it belongs, with its key, and in no other way."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import subprocess
import sys
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rpcagent import errors
from rpcagent.journal import seal
from rpcagent.journal.record import Item
from rpcagent.journal.seal import MAGIC, AesGcm, KeyMissing, Plain
from rpcagent.keys import Key, KeyRing, KeyUnusable

OLD, NEW = Key(hashlib.sha256(b"old").digest()), Key(hashlib.sha256(b"new").digest())
STORE = "sto_aaaaaaaaaaaaaaaaaaaaaaaaaa"
RUN = "run_bbbbbbbbbbbbbbbbbbbbbbbbbb"
PLACE = seal.record_context(RUN, 7)
BLOB = seal.blob_context(hashlib.sha256(b"blob").hexdigest())
BODY = b'{"seq":7,"at":"2030-01-01T00:00:00Z","events":[]}'
SEALED = (
    b'{"kid":"41ca6563","n":"AQEBAQEBAQEBAQEBAQEBAQEBAgICAgICAgICAgIC","x":"AIjHxGTPDl1Rdsn1U4sfoWm5ePctodhaxxB1GkmOIYtHLZBE'
    b'bZo/21/qFP+qt8Xd0ujvV5HTrMiGE8NGt/dH9KA="}'
)
SEALED_BYTES = (
    "ff7270637365616c0141ca6563010101010101010101010101010101010101030303030303030303030303ca0c78bcadc8cd3e4ee9c5a6c1cb4180"
    "2c840392"
)
CHANGED = "it was changed, or belongs to another place or another store"
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
CONTEXTS = st.builds(seal.record_context, st.from_regex(r"[A-Za-z0-9_.-]{1,128}", fullmatch=True), st.integers(1))


def gcm(*keys: Key, store: str = STORE) -> AesGcm:
    return AesGcm(KeyRing(*keys or (NEW,)), store)


def counting() -> Callable[[int], bytes]:
    """In place of random bytes: 1, 1, 1.. then 2, 2, 2.."""
    numbers = itertools.count(1)
    return lambda size: bytes([next(numbers) % 256]) * size


def damage(context: str, reason: str, call: Callable[[str, bytes], bytes], sealed: bytes) -> None:
    with pytest.raises(errors.StoreDamaged) as caught:
        call(context, sealed)
    assert caught.value.message == f"A sealed payload cannot be opened ({context}): {reason}."
    assert caught.value.details == {"context": context, "reason": reason}


@given(JSON, CONTEXTS)
@settings(max_examples=200, deadline=None)
def test_a_sealed_payload_is_one_json_value_that_a_record_takes_and_opens_as_it_was(value: object, context: str):
    payload = json.dumps(value, separators=(",", ":")).encode()
    sealed = gcm().seal(context, payload)
    assert Item(RUN, 7, 1, sealed).body == sealed
    members = json.loads(sealed)
    assert list(members) == ["kid", "n", "x"]
    assert json.dumps(members, separators=(",", ":")).encode() == sealed
    assert (members["kid"], len(base64.b64decode(members["n"]))) == (NEW.kid, 30)
    assert len(base64.b64decode(members["x"])) == len(payload) + 16
    assert gcm().open(context, sealed) == payload


@given(st.binary(max_size=200) | st.binary(max_size=20).map(MAGIC.__add__))
@settings(max_examples=200, deadline=None)
def test_sealed_bytes_open_as_they_were(data: bytes):
    sealed = gcm().seal_bytes(BLOB, data)
    assert (sealed[:9], sealed[9:13].hex(), len(sealed)) == (MAGIC + b"\x01", NEW.kid, 43 + len(data) + 16)
    assert gcm().open_bytes(BLOB, sealed) == data


@given(st.binary(max_size=50) | st.binary(max_size=20).map(MAGIC.__add__))
def test_plain_bytes_come_back_whatever_they_begin_with_and_with_a_key_as_well(data: bytes):
    kept = Plain().seal_bytes(BLOB, data)
    assert kept == (MAGIC + b"\x00" + data if data.startswith(MAGIC) else data)
    assert (Plain().open_bytes(BLOB, kept), gcm().open_bytes(BLOB, kept)) == (data, data)
    assert seal.kid_of_bytes(kept) is None


def test_the_forms_are_those_of_every_later_version():
    fixed = AesGcm(KeyRing(NEW), STORE, counting())
    assert fixed.seal(PLACE, BODY) == SEALED
    assert fixed.seal_bytes(BLOB, b"blob").hex() == SEALED_BYTES
    assert gcm().open(PLACE, SEALED) == BODY
    assert gcm().open_bytes(BLOB, bytes.fromhex(SEALED_BYTES)) == b"blob"


def test_the_forms_can_be_opened_with_nothing_but_their_description():
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    sealed = gcm().seal(PLACE, BODY)
    members = json.loads(sealed)
    n, content = base64.b64decode(members["n"]), base64.b64decode(members["x"])
    subkey = HKDF(algorithm=SHA256(), length=32, salt=n[:18], info=b"rpcagent seal 1").derive(NEW.secret)
    bound = sealed[: sealed.index(b'"x":"') + 5] + f"{STORE}\n{PLACE}".encode()
    assert AESGCM(subkey).decrypt(n[18:], content, bound) == BODY


def test_every_flipped_bit_of_a_sealed_payload_is_refused():
    opener = gcm(NEW, OLD)
    for payload in (BODY, BODY + b" ", BODY + b"  "):  # all three ways in which base64 can end
        sealed = opener.seal(PLACE, payload)
        for place, bit in itertools.product(range(len(sealed)), range(8)):
            flipped = bytearray(sealed)
            flipped[place] ^= 1 << bit
            if place < len(b'{"kid":"'):  # it comes back as a plain one, which no reader takes for a body
                assert opener.open(PLACE, bytes(flipped)) == flipped
                with pytest.raises((ValueError, KeyError)):
                    json.loads(flipped)["seq"]
                continue
            with pytest.raises((errors.StoreDamaged, KeyMissing)):
                opener.open(PLACE, bytes(flipped))


def test_every_flipped_bit_of_sealed_bytes_is_refused():
    opener = gcm(NEW, OLD)
    sealed = opener.seal_bytes(BLOB, b"blob")
    for place, bit in itertools.product(range(len(sealed)), range(8)):
        flipped = bytearray(sealed)
        flipped[place] ^= 1 << bit
        if place < len(MAGIC):
            assert (
                opener.open_bytes(BLOB, bytes(flipped)) == flipped
            )  # a plain one, which has not the name of its content
        elif flipped[8] == 0:
            assert opener.open_bytes(BLOB, bytes(flipped)) == flipped[9:]
        else:
            with pytest.raises((errors.StoreDamaged, KeyMissing)):
                opener.open_bytes(BLOB, bytes(flipped))


def test_a_key_of_the_ring_in_the_place_of_the_right_one_opens_nothing():
    sealed = gcm(NEW).seal(PLACE, BODY).replace(NEW.kid.encode(), OLD.kid.encode())
    damage(PLACE, CHANGED, gcm(NEW, OLD).open, sealed)


@pytest.mark.parametrize(
    "elsewhere",
    [
        seal.record_context(RUN, 8), seal.record_context(RUN[:-1], 7), seal.summary_context(RUN, 7), BLOB, "", PLACE + "\n",
    ],
)  # fmt: skip
def test_a_payload_opens_at_no_other_place(elsewhere: str):
    damage(elsewhere, CHANGED, gcm().open, gcm().seal(PLACE, BODY))
    damage(elsewhere + "x", CHANGED, gcm().open_bytes, gcm().seal_bytes(elsewhere, BODY))


@pytest.mark.parametrize("store", ["sto_cccccccccccccccccccccccccc", STORE + "x", STORE[:-1], ""])
def test_a_payload_opens_in_no_other_store(store: str):
    damage(PLACE, CHANGED, gcm(store=store).open, gcm().seal(PLACE, BODY))
    damage(PLACE, CHANGED, gcm(store=store).open_bytes, gcm().seal_bytes(PLACE, BODY))


def test_the_end_of_a_store_id_and_the_start_of_a_place_are_not_taken_for_each_other():
    damage("ab/1", CHANGED, gcm(store="sto_").open, gcm(store="sto_a").seal("b/1", BODY))
    with pytest.raises(ValueError, match=r"^store_id must not hold a newline$"):
        gcm(store="sto_\na")


def test_the_two_forms_are_not_taken_for_each_other():
    data = gcm().seal_bytes(PLACE, BODY)
    n, content = base64.b64encode(data[13:43]), base64.b64encode(data[43:])
    damage(PLACE, CHANGED, gcm().open, b'{"kid":"%b","n":"%b","x":"%b"}' % (NEW.kid.encode(), n, content))


def test_contexts_say_what_a_payload_is():
    assert (seal.record_context("run_a", 7), seal.summary_context("run_a", 7)) == ("run_a/7", "run_a/summary/7")
    assert seal.blob_context("ab") == "blob/ab"


@pytest.mark.parametrize(
    ("sealed", "reason"),
    [
        (b'{"kid":"', "it begins as a sealed payload and does not go on as one"),
        (b'{"kid":"0123456g","n":"%b","x":"AAAA"}' % (b"A" * 40), "it begins as a sealed payload and does not go on as one"),
        (b'{"kid":"%b","n":"%b","x":"AAAA"}' % (NEW.kid.encode(), b"A" * 39), "it begins as a sealed payload and does not go on as one"),
        (b'{"kid":"%b","n":"%b","x":"AAAA"' % (NEW.kid.encode(), b"A" * 40), "it begins as a sealed payload and does not go on as one"),
        (b'{"kid":"%b","n":"%b","x":"A"}' % (NEW.kid.encode(), b"A" * 40), "its base64 is wrong"),
        (b'{"kid":"%b","n":"%b","x":"AA\nAA"}' % (NEW.kid.encode(), b"A" * 40), "its base64 is wrong"),
        (b'{"kid":"%b","n":"%b","x":"\xff"}' % (NEW.kid.encode(), b"A" * 40), "its base64 is wrong"),
        (b'{"kid":"%b","n":"%b","x":""}' % (NEW.kid.encode(), b"A" * 40), CHANGED),
        (b'{"kid":"%b","n":"%b","x":"AAAA"}' % (NEW.kid.encode(), b"A" * 40), CHANGED),
    ],
)  # fmt: skip
def test_what_only_begins_as_a_sealed_payload_is_damage(sealed: bytes, reason: str):
    damage(PLACE, reason, gcm().open, sealed)
    if "begins" in reason:
        damage(PLACE, reason, Plain().open, sealed)
        with pytest.raises(ValueError, match=r"^it begins as a sealed payload and does not go on as one$"):
            seal.kid_of(sealed)


@pytest.mark.parametrize("tail", [b"", b"\x01", b"\x02" + bytes(60), b"\x01" + bytes(49)])
def test_what_only_begins_as_sealed_bytes_is_damage(tail: bytes):
    reason = "it begins as sealed bytes and does not go on as such"
    for call in (gcm().open_bytes, Plain().open_bytes):
        damage(BLOB, reason, call, MAGIC + tail)
    with pytest.raises(ValueError, match=f"^{reason}$"):
        seal.kid_of_bytes(MAGIC + tail)


def test_a_key_that_was_not_given_is_named():
    for call, sealed in (
        (gcm(NEW).open, gcm(OLD).seal(PLACE, BODY)),
        (gcm(NEW).open_bytes, gcm(OLD).seal_bytes(PLACE, b"")),
    ):
        with pytest.raises(KeyMissing) as caught:
            call(PLACE, sealed)
        assert caught.value.message == (
            f"This payload is sealed with the key {OLD.kid}, and the keys given are {NEW.kid}. Name it with --old-encryption-key."
        )
        assert caught.value.data == {"code": "INCOMPATIBLE", "retryable": False, "kid": OLD.kid, "context": PLACE}


def test_without_any_key_a_sealed_payload_is_refused_and_its_key_named():
    for call, sealed in ((Plain().open, gcm().seal(PLACE, BODY)), (Plain().open_bytes, gcm().seal_bytes(PLACE, b""))):
        with pytest.raises(KeyMissing) as caught:
            call(PLACE, sealed)
        assert caught.value.message == (
            f"This store is encrypted, with the key {NEW.kid}. Name it with --encryption-key file:PATH, env:NAME or "
            "keyring:SERVICE/NAME."
        )
        assert caught.value.details == {"kid": NEW.kid, "context": PLACE}


@pytest.mark.parametrize("body", [BODY, b"null", b'""', b'{"kid":1}', b'{ "kid":"0"}', b"[]", b""])
def test_a_plain_payload_stays_as_it_is_and_is_read_with_a_key_as_well(body: bytes):
    assert Plain().seal(PLACE, body) == body
    assert (Plain().open(PLACE, body), gcm().open(PLACE, body), seal.kid_of(body)) == (body, body, None)


@pytest.mark.parametrize("seal_with", [Plain(), gcm()])
def test_a_payload_that_would_be_taken_for_a_sealed_one_is_refused(seal_with: Plain | AesGcm):
    for payload in (gcm().seal(PLACE, BODY), b'{"kid":"me","n":1,"x":2}'):
        with pytest.raises(ValueError, match=r"^this payload is sealed already, or would be taken for one that is$"):
            seal_with.seal(PLACE, payload)


def test_keys_rotate_and_what_is_under_an_older_one_is_sealed_again():
    before, after = gcm(OLD), gcm(NEW, OLD)
    was = before.seal(PLACE, BODY)
    assert after.open(PLACE, was) == BODY
    for found in (was, BODY):
        again = seal.reseal(after, PLACE, found)
        assert again is not None
        assert (seal.kid_of(again), gcm(NEW).open(PLACE, again)) == (NEW.kid, BODY)
        assert seal.reseal(after, PLACE, again) is None
    assert (seal.kid_of(was), after.kid) == (OLD.kid, NEW.kid)
    with pytest.raises(KeyMissing):
        seal.reseal(gcm(NEW), PLACE, was)
    damage(PLACE + "1", CHANGED, lambda context, found: seal.reseal(after, context, found) or b"", was)


def test_a_plain_store_has_nothing_to_seal_again_and_cannot_unseal():
    assert seal.reseal(Plain(), PLACE, BODY) is None
    with pytest.raises(KeyMissing):
        seal.reseal(Plain(), PLACE, gcm().seal(PLACE, BODY))


def test_no_two_payloads_have_the_same_subkey_and_nonce_in_any_process_not_even_in_a_forked_one():
    script = f"""
import os
from rpcagent.journal.seal import AesGcm
from rpcagent.keys import Key, KeyRing
cipher = AesGcm(KeyRing(Key({NEW.secret!r})), "{STORE}")
child = os.fork()
out = b"".join(cipher.seal("{PLACE}", b"null") + b"\\n" for _ in range(200))
if child:
    os.waitpid(child, 0)
os.write(1, out)
"""
    started = [
        subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=60, check=True) for _ in range(2)
    ]
    drawn = [[base64.b64decode(json.loads(line)["n"]) for line in done.stdout.splitlines()] for done in started]
    assert [len(each) for each in drawn] == [400, 400]
    salts = [{n[:18] for n in each} for each in drawn]
    assert [len(each) for each in salts] == [1, 1]
    assert salts[0] != salts[1]
    assert len({n for each in drawn for n in each}) == 800


def test_two_ciphers_of_one_process_have_subkeys_of_their_own():
    first, second = gcm().seal_bytes(PLACE, b""), gcm().seal_bytes(PLACE, b"")
    assert first[13:31] != second[13:31]


def test_a_subkey_is_given_up_long_before_nonces_may_meet(monkeypatch: pytest.MonkeyPatch):
    assert seal._MESSAGES_MAX == 2**30
    monkeypatch.setattr(seal, "_MESSAGES_MAX", 3)
    one = AesGcm(KeyRing(NEW), STORE, counting())
    sealed = [one.seal_bytes(PLACE, b"null") if n % 2 else one.seal(PLACE, b"null") for n in range(7)]
    salts = [s[13:31] if n % 2 else base64.b64decode(json.loads(s)["n"])[:18] for n, s in enumerate(sealed)]
    assert [salt[0] for salt in salts] == [1, 1, 1, 5, 5, 5, 9]
    opened = [one.open_bytes(PLACE, s) if n % 2 else one.open(PLACE, s) for n, s in enumerate(sealed)]
    assert opened == [b"null"] * 7


def test_the_subkey_of_another_process_is_derived_once_and_kept_up_to_a_limit(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(seal, "_CIPHERS_MAX", 3)
    one = gcm()
    derived = []
    derive = one._derive
    monkeypatch.setattr(one, "_derive", lambda secret, salt: derived.append(salt) or derive(secret, salt))
    others = [gcm() for _ in range(5)]
    for other in others:
        assert [one.open(PLACE, other.seal(PLACE, BODY)) for _ in range(4)] == [BODY] * 4
        assert len(one._ciphers) <= 3
    assert derived == [other._own[0] for other in others]


def test_without_the_package_the_command_that_installs_it_is_told(monkeypatch: pytest.MonkeyPatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "cryptography"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(KeyUnusable) as caught:
        gcm()
    assert str(caught.value) == (
        "Encryption needs the package `cryptography`, which is not installed; run: pip install 'rpcagent[encryption]'"
    )


def test_the_package_is_loaded_by_the_first_cipher_and_by_nothing_before():
    script = f"""
import sys
from rpcagent.journal.seal import AesGcm, Plain
from rpcagent.keys import Key, KeyRing
Plain().open("{PLACE}", b"null")
assert "cryptography" not in sys.modules
AesGcm(KeyRing(Key({NEW.secret!r})), "{STORE}")
assert "cryptography" in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], timeout=60, check=True)


def test_no_error_and_no_repr_shows_a_key():
    one = gcm(NEW, OLD)
    told = repr(one) + repr(Plain())
    other = gcm(Key(hashlib.sha256(b"other").digest()))
    for call, sealed in (
        (one.open, one.seal("elsewhere", BODY)),
        (one.open_bytes, one.seal_bytes("elsewhere", BODY)),
        (one.open, other.seal(PLACE, BODY)),
        (Plain().open, one.seal(PLACE, BODY)),
        (one.seal, one.seal(PLACE, BODY)),
    ):
        with pytest.raises((errors.RpcAgentError, ValueError)) as caught:
            call(PLACE, sealed)
        behind: BaseException | None = caught.value
        while behind is not None:
            told += str(behind) + repr(behind) + repr(vars(behind))
            behind = behind.__context__
    assert NEW.kid in told
    for key in (NEW, OLD):
        for form in (key.secret.hex(), base64.b64encode(key.secret).decode(), repr(key.secret)[2:-1]):
            assert form[:12] not in told


def test_a_key_that_a_store_asks_for_is_there_or_is_named():
    for seal_with in (Plain(), gcm(NEW), gcm(NEW, OLD)):
        seal_with.require("")
    gcm(NEW, OLD).require(OLD.kid)
    for seal_with in (Plain(), gcm(NEW)):
        with pytest.raises(KeyMissing) as caught:
            seal_with.require(OLD.kid)
        assert caught.value.details == {"kid": OLD.kid, "context": "the store"}
