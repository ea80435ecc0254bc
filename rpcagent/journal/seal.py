"""Encryption at rest, of payloads only: what is in a record, a summary or a blob, never what says which one it is.

Knows: the two forms of a sealed payload, where it belongs, and which key opens it. Does not know: where keys come from
(`keys`), files, or what a payload means.

Heads stay readable (run ids, numbers, kinds, status, labels) and checksums are over the sealed bytes, so the log is recovered
and a store is checked without a key.

**The forms.** A JSON payload becomes the JSON value `{"kid":"<8 hex>","n":"<40 base64>","x":"<base64>"}`, members in this
order and without white space; bytes become `MAGIC`, a byte 1, 4 bytes of kid, 30 bytes of `n`, and the rest. `n` is a
salt of 18 bytes and a nonce of 12, `x` the ciphertext with its tag of 16 bytes. What comes before the ciphertext, the store
and the context are its associated data: moved to another place or another store, or changed in any bit, it does not open.

**Recognised** by the first bytes alone, `{"kid":"` or `MAGIC`. Plain commit bodies are objects with `seq`, `at`, `events` and
plain summary bodies have `view`, `attention`: neither begins like that. A JSON payload that did is refused when it is
written; bytes that do are written with `MAGIC` and a byte 0 before them. So nothing written by this module is ambiguous. What is
changed in these first bytes comes back as a plain payload, and fails as one: it is no body, and not what a blob is named for.

**Nonces.** AES-GCM fails if one nonce is used twice with one key. Keys are therefore never used as they are: each process
draws a salt, and HKDF-SHA-256 makes a subkey of key and salt, which no other process has; two salts of 144 random bits do not
meet. That holds for copies of a store that go on in two places as well: nothing on disk takes part in it. Within a subkey
nonces are random (96 bits): the bound for that is 2^32 messages (NIST SP 800-38D), and a new salt is drawn after 2^30 (a
chance of 2^-37 that any two meet), which leaves room for a forked child that goes on with the subkey of its parent. There
is no counter that a resumed copy of a machine would repeat. The number of messages under one key as such has no bound
that matters.

**What this does not protect.** Heads, sizes and times are in the clear. The name of a blob is the SHA-256 of its plaintext:
who guesses a content can confirm it. A store as a whole can be rolled back, the tail beyond the watermark can be cut off,
and of two copies that went different ways records can be mixed, each at its own place. A plain payload is read as it is
although a key is named, for a store that was plain before: who can write to the store can put one there. And whoever reads
the memory or the key file of the daemon has all.
"""

from __future__ import annotations

import binascii
import os
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from rpcagent import errors
from rpcagent.keys import Key, KeyRing, KeyUnusable

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

MAGIC = b"\xffrpcseal"
"""Begins what `seal_bytes` has changed. Not UTF-8, so no text begins with it."""
_PLAIN, _SEALED = b"\x00", b"\x01"
_PREFIX = b'{"kid":"'
_SALT_BYTES, _NONCE_BYTES, _TAG_BYTES = 18, 12, 16
_HEAD = re.compile(rb'\{"kid":"([0-9a-f]{8})","n":"([A-Za-z0-9+/]{40})","x":"')
_BINARY_KID = len(MAGIC) + 1
_BINARY_N = _BINARY_KID + 4
_BINARY_HEAD = _BINARY_N + _SALT_BYTES + _NONCE_BYTES
_STORE = "the store"
_MESSAGES_MAX = 2**30
_CIPHERS_MAX = 1024


class KeyMissing(errors.Incompatible):
    """A payload is sealed with a key that was not given. details: kid, context."""

    retryable = False


class Seal(Protocol):
    """What stands between a payload and the disk. `context` says where a payload belongs, see `*_context`; what was
    sealed for one opens for that one alone. All methods may be called by several threads at once."""

    @property
    def kid(self) -> str | None:
        """The id of the key that is sealed with; None: nothing is sealed."""

    def seal(self, context: str, payload: bytes) -> bytes:
        """`payload`, one JSON value, as one JSON value without a newline. Raises ValueError if it looks sealed already."""

    def open(self, context: str, sealed: bytes) -> bytes:
        """The payload; one that was never sealed comes back as it is. Raises KeyMissing, and StoreDamaged (details: context,
        reason) for one that was changed or belongs elsewhere."""

    def seal_bytes(self, context: str, data: bytes) -> bytes:
        """As `seal`, for any bytes and into bytes."""

    def open_bytes(self, context: str, sealed: bytes) -> bytes:
        """The inverse of `seal_bytes`. Raises as `open`."""

    def require(self, kid: str) -> None:
        """Raises KeyMissing where nothing that is sealed with this key could be opened; empty: none is asked for."""


def record_context(run: str, first: int) -> str:
    """Where the body of a commit belongs: the run, and the number of its first event."""
    return f"{run}/{first}"


def summary_context(run: str, last: int) -> str:
    """Where the body of a summary belongs: the run, and the number of the last event in it."""
    return f"{run}/summary/{last}"


def blob_context(digest: str) -> str:
    """Where a blob belongs: `digest` is the SHA-256 of its plaintext, 64 hex digits."""
    return f"blob/{digest}"


def kid_of(payload: bytes) -> str | None:
    """The id of the key that a JSON payload is sealed with, None for a plain one; needs no key. Raises ValueError for
    one that begins as a sealed payload and does not go on as one."""
    if not payload.startswith(_PREFIX):
        return None
    found = _HEAD.match(payload)
    if found is None or not payload.endswith(b'"}'):
        raise ValueError("it begins as a sealed payload and does not go on as one")
    return found[1].decode()


def kid_of_bytes(data: bytes) -> str | None:
    """As `kid_of`, for what `seal_bytes` gives."""
    if not data.startswith(MAGIC) or data[len(MAGIC) : _BINARY_KID] == _PLAIN:
        return None
    if data[len(MAGIC) : _BINARY_KID] != _SEALED or len(data) < _BINARY_HEAD + _TAG_BYTES:
        raise ValueError("it begins as sealed bytes and does not go on as such")
    return data[_BINARY_KID:_BINARY_N].hex()


def reseal(seal: Seal, context: str, payload: bytes) -> bytes | None:
    """`payload` under the current key of `seal`, whatever key it was under, or none. None: it is under that key already
    (as its head says; it is not opened for that). Raises as `Seal.open`."""
    if _named(kid_of, context, payload) == seal.kid:
        return None
    return seal.seal(context, seal.open(context, payload))


class Plain:
    """No encryption. Refuses what is sealed, and names the key that it takes."""

    kid = None

    def seal(self, context: str, payload: bytes) -> bytes:  # noqa: ARG002 - a Seal
        return _not_sealed(payload)

    def open(self, context: str, sealed: bytes) -> bytes:
        _refuse(_named(kid_of, context, sealed), context)
        return sealed

    def seal_bytes(self, context: str, data: bytes) -> bytes:  # noqa: ARG002 - a Seal
        return MAGIC + _PLAIN + data if data.startswith(MAGIC) else data

    def open_bytes(self, context: str, sealed: bytes) -> bytes:
        _refuse(_named(kid_of_bytes, context, sealed), context)
        return _bare(sealed)

    def require(self, kid: str) -> None:
        _refuse(kid or None, _STORE)


class AesGcm:
    """AES-256-GCM under subkeys of the current key; opens with any key of the ring. `draw(n)` gives n random bytes. Raises
    KeyUnusable where the package `cryptography` is not installed."""

    def __init__(self, keyring: KeyRing, store_id: str, draw: Callable[[int], bytes] = os.urandom) -> None:
        if "\n" in store_id:  # it ends at the first newline in the associated data
            raise ValueError("store_id must not hold a newline")
        self.kid = keyring.current.kid
        self._keyring = keyring
        self._place = f"{store_id}\n"
        self._draw = draw
        self._derive = _derivation()
        self._ciphers: dict[tuple[str, bytes], AESGCM] = {}
        self._own = self._new_subkey()
        self._left = _MESSAGES_MAX

    def seal(self, context: str, payload: bytes) -> bytes:
        salt, cipher = self._subkey()
        nonce = self._draw(_NONCE_BYTES)
        head = b'{"kid":"%b","n":"%b","x":"' % (self.kid.encode(), _base64(salt + nonce))
        return b'%b%b"}' % (head, _base64(cipher.encrypt(nonce, _not_sealed(payload), self._bound(head, context))))

    def open(self, context: str, sealed: bytes) -> bytes:
        kid = _named(kid_of, context, sealed)
        if kid is None:
            return sealed
        found = _HEAD.match(sealed)
        assert found is not None  # kid_of has seen it
        try:
            content = binascii.a2b_base64(sealed[found.end() : -2])
        except binascii.Error:
            content = b""
        # Spelled in another way it would be the same ciphertext: not one changed bit may pass.
        if _base64(content) != sealed[found.end() : -2]:
            raise _damaged(context, "its base64 is wrong")
        return self._opened(context, kid, binascii.a2b_base64(found[2]), content, found[0])

    def seal_bytes(self, context: str, data: bytes) -> bytes:
        salt, cipher = self._subkey()
        nonce = self._draw(_NONCE_BYTES)
        head = b"".join((MAGIC, _SEALED, bytes.fromhex(self.kid), salt, nonce))
        return head + cipher.encrypt(nonce, data, self._bound(head, context))

    def open_bytes(self, context: str, sealed: bytes) -> bytes:
        kid = _named(kid_of_bytes, context, sealed)
        if kid is None:
            return _bare(sealed)
        head = sealed[:_BINARY_HEAD]
        return self._opened(context, kid, head[_BINARY_N:], sealed[_BINARY_HEAD:], head)

    def require(self, kid: str) -> None:
        if kid:
            self._key(kid, _STORE)

    def _opened(self, context: str, kid: str, n: bytes, content: bytes, head: bytes) -> bytes:
        from cryptography.exceptions import InvalidTag

        salt, nonce = n[:_SALT_BYTES], n[_SALT_BYTES:]
        try:
            return self._cipher(context, kid, salt).decrypt(nonce, content, self._bound(head, context))
        except InvalidTag:
            raise _damaged(context, "it was changed, or belongs to another place or another store") from None

    def _bound(self, head: bytes, context: str) -> bytes:
        # The head has a fixed length for each form, and the store ends at the newline: no two places give the same bytes.
        return head + (self._place + context).encode()

    def _subkey(self) -> tuple[bytes, AESGCM]:
        if self._left <= 0:
            self._own, self._left = self._new_subkey(), _MESSAGES_MAX
        self._left -= 1  # threads may lose a count: the limit is a quarter of the bound
        return self._own

    def _new_subkey(self) -> tuple[bytes, AESGCM]:
        salt = self._draw(_SALT_BYTES)
        return salt, self._derive(self._keyring.current.secret, salt)

    def _cipher(self, context: str, kid: str, salt: bytes) -> AESGCM:
        cipher = self._ciphers.get((kid, salt))
        if cipher is None:
            key = self._key(kid, context)
            if len(self._ciphers) >= _CIPHERS_MAX:
                self._ciphers.clear()
            cipher = self._ciphers[kid, salt] = self._derive(key.secret, salt)
        return cipher

    def _key(self, kid: str, context: str) -> Key:
        key = self._keyring.get(kid)
        if key is None:
            known = ", ".join(self._keyring.kids)
            raise KeyMissing(
                f"This payload is sealed with the key {kid}, and the keys given are {known}. Name it with --old-encryption-key.",
                kid=kid,
                context=context,
            )
        return key


def _derivation() -> Callable[[bytes, bytes], AESGCM]:
    """The cipher of a secret and a salt. Loads the library: nothing else here does."""
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF
    except ImportError:
        raise KeyUnusable(
            "Encryption needs the package `cryptography`, which is not installed; run: pip install 'rpcagent[encryption]'"
        ) from None

    def derive(secret: bytes, salt: bytes) -> AESGCM:
        return AESGCM(HKDF(algorithm=SHA256(), length=32, salt=salt, info=b"rpcagent seal 1").derive(secret))

    return derive


def _base64(data: bytes) -> bytes:
    return binascii.b2a_base64(data, newline=False)


def _not_sealed(payload: bytes) -> bytes:
    if payload.startswith(_PREFIX):
        raise ValueError("this payload is sealed already, or would be taken for one that is")
    return payload


def _bare(data: bytes) -> bytes:
    return data[_BINARY_KID:] if data.startswith(MAGIC + _PLAIN) else data


def _named(kid: Callable[[bytes], str | None], context: str, sealed: bytes) -> str | None:
    try:
        return kid(sealed)
    except ValueError as error:
        raise _damaged(context, str(error)) from None


def _refuse(kid: str | None, context: str) -> None:
    if kid is not None:
        raise KeyMissing(
            f"This store is encrypted, with the key {kid}. Name it with --encryption-key file:PATH, env:NAME or keyring:SERVICE/NAME.",
            kid=kid,
            context=context,
        )


def _damaged(context: str, reason: str) -> errors.StoreDamaged:
    return errors.StoreDamaged(
        f"A sealed payload cannot be opened ({context}): {reason}.", context=context, reason=reason
    )
