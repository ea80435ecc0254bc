"""Keys by reference: where a key is kept, and what it is called.

Knows: the three places a key can be in, the forms it can have there, and its id. Does not know: what is encrypted with
it, or how (`journal.seal`).

A key is 32 random bytes. It never stands on a command line, where every process of the machine could read it: there
stands a reference, `file:PATH`, `env:NAME` or `keyring:SERVICE/NAME`. No message and no repr holds any part of a key, and
what is no known reference is not repeated either: it may be the key itself, in the wrong place.

A key keeps what is in a store from whoever gets hold of the files: of a backup, of a disk. It keeps nothing from
programs of the same user, which can read the key where the daemon reads it. `env:` is the weakest of the three for
that: the kernel shows what the environment was at the start, to every program of this user.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import importlib
import os
import re
import secrets
import shlex
import stat
from collections.abc import Iterable, MutableMapping
from pathlib import Path

BYTES = 32
_FILE_BYTES_MAX = 256
_DISTINCT_MIN = 8  # a file of zeros is what a crash leaves; random bytes fail this with a chance of 10^-37
_HEX = re.compile(rb"[0-9a-fA-F]{64}")
_BASE64 = re.compile(rb"[A-Za-z0-9+/_-]{43}=?")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_URL_SAFE = bytes.maketrans(b"-_", b"+/")
_PRINTABLE = frozenset(range(0x20, 0x7F))


class KeyUnusable(ValueError):
    """No key can be had this way, or nothing can be done with it here. The message says which reference, and the remedy."""


class Key:
    """32 secret bytes and their `kid`, 8 hex digits that reveal nothing about them.

    A plain class on purpose: an encoder that meets it by accident fails, or takes its repr, and never its members."""

    __slots__ = ("kid", "secret")

    def __init__(self, secret: bytes) -> None:
        if len(secret) != BYTES:
            raise ValueError(f"a key is {BYTES} bytes")
        self.secret = secret
        self.kid = hashlib.sha256(b"rpcagent key id" + secret).hexdigest()[:8]

    def __repr__(self) -> str:
        return f"Key({self.kid})"

    def __reduce__(self) -> str | tuple[object, ...]:
        raise TypeError("a key is not copied or pickled")


class KeyRing:
    """The key to seal with, and all that can be opened with: that one and older ones. Raises ValueError if two different
    keys have one id (1 in 2^32 for two random keys: make another one)."""

    __slots__ = ("_keys", "current")

    def __init__(self, current: Key, *older: Key) -> None:
        self.current = current
        self._keys: dict[str, Key] = {}
        for key in (current, *older):
            if self._keys.setdefault(key.kid, key).secret != key.secret:
                raise ValueError(f"two different keys have the id {key.kid}; replace one of them")

    @property
    def kids(self) -> tuple[str, ...]:
        """The ids of all keys, the current one first."""
        return tuple(self._keys)

    def get(self, kid: str) -> Key | None:
        return self._keys.get(kid)

    def __repr__(self) -> str:
        return f"KeyRing({', '.join(self._keys)})"


def load(reference: str, environ: MutableMapping[str, str] = os.environ) -> Key:
    """The key that `reference` names. Raises KeyUnusable.

    A variable is taken out of `environ`, so that nothing that comes later, a program or a header that refers to variables,
    can have it. A second load of it therefore fails: use `load_ring` for several references."""
    kind, _, rest = reference.partition(":")
    if kind == "file" and rest:
        raw, remedy = _from_file(reference, rest), "rpcagent key new FILE"
    elif kind == "env" and _NAME.fullmatch(rest):
        raw, remedy = _from_environ(reference, rest, environ), "rpcagent key new FILE"
    elif kind == "keyring" and rest.rpartition("/")[0]:
        service, _, name = rest.rpartition("/")
        remedy = f"keyring set {shlex.quote(service)} {shlex.quote(name)}"
        raw = _from_keyring(reference, service, name, remedy)
    else:
        raise KeyUnusable(
            "a key is named by file:PATH, env:NAME or keyring:SERVICE/NAME, and this is none of them (it is not repeated "
            "here: the key itself never belongs on a command line)"
        )
    secret = _secret(raw)
    if secret is None:
        raise KeyUnusable(
            f"{reference}: this is no key: {BYTES} random bytes as 64 hex digits, as base64 or as they are (a passphrase is "
            f"none); to make one: {remedy}"
        )
    return Key(secret)


def load_ring(reference: str, older: Iterable[str] = (), environ: MutableMapping[str, str] = os.environ) -> KeyRing:
    """The keys that the references name, each of which is asked once. Raises KeyUnusable."""
    current, *rest = (load(each, environ) for each in dict.fromkeys((reference, *older)))
    try:
        return KeyRing(current, *rest)
    except ValueError as error:
        raise KeyUnusable(str(error)) from None


def new_key_text() -> str:
    """A new random key as the line that a key file holds: 64 hex digits and a newline."""
    return secrets.token_hex(BYTES) + "\n"


def new_key_file(path: Path) -> Key:
    """Makes a key file that only its owner can read; the file and its name are durable on return. Raises KeyUnusable, and
    leaves no file then; one that is there is never touched."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, 0o600)
    except FileExistsError:
        raise KeyUnusable(f"{path} is there already, and a key is never overwritten; name another file") from None
    except OSError as error:
        raise KeyUnusable(f"{path} cannot be made: {error.strerror}") from None
    text = new_key_text()
    try:
        with os.fdopen(descriptor, "w") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(descriptor)
        _sync_folder(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            path.unlink()
        raise KeyUnusable(f"{path} cannot be written: {error.strerror}") from None
    return Key(bytes.fromhex(text))


def _sync_folder(path: Path) -> None:
    # What was sealed with a key that a power cut then took is lost.
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _from_file(reference: str, name: str) -> bytes:
    """A pipe or a device is refused, not waited for."""
    path = os.path.expanduser(name)  # noqa: PTH111 - Path's own raises for a home of nobody
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            mode = os.fstat(descriptor).st_mode
            raw = os.read(descriptor, _FILE_BYTES_MAX) if stat.S_ISREG(mode) else b""
        finally:
            os.close(descriptor)
    except FileNotFoundError:
        remedy = f"to make a new key there: rpcagent key new {shlex.quote(path)}"
        raise KeyUnusable(f"{reference}: there is no such file; {remedy}") from None
    except OSError as error:
        raise KeyUnusable(f"{reference}: it cannot be read: {error.strerror}") from None
    except ValueError:  # it holds a zero byte
        raise KeyUnusable(f"{reference}: this is no path") from None
    if not stat.S_ISREG(mode):
        raise KeyUnusable(f"{reference}: this is not a regular file")
    if mode & 0o077:
        raise KeyUnusable(
            f"{reference}: others than its owner have access to it (mode {stat.S_IMODE(mode):04o}); run: "
            f"chmod 600 {shlex.quote(path)}"
        )
    return raw


def _from_environ(reference: str, name: str, environ: MutableMapping[str, str]) -> bytes:
    text = environ.pop(name, "")
    if not text:
        raise KeyUnusable(
            f"{reference}: the environment has no such variable, or it is empty; set it to the key's text"
        )
    return text.encode("utf-8", "replace")


def _from_keyring(reference: str, service: str, name: str, remedy: str) -> bytes:
    try:
        keyring = importlib.import_module("keyring")
    except ImportError:
        raise KeyUnusable(
            f"{reference}: the package `keyring` is not installed; run: pip install 'rpcagent[keyring]'"
        ) from None
    try:
        text = keyring.get_password(service, name)
    except Exception as error:  # noqa: BLE001 - what a backend raises is its own affair
        raise KeyUnusable(
            f"{reference}: the keyring does not answer ({type(error).__name__}); unlock it, or name the key by file:PATH"
        ) from None
    if text is None:
        raise KeyUnusable(f"{reference}: the keyring has no such entry; to store a key there: {remedy}")
    return str(text).encode("utf-8", "replace")


def _secret(raw: bytes) -> bytes | None:
    """None: this is no key. Nothing here raises: an error of a decoder holds what it was given."""
    line = raw.removesuffix(b"\n")
    text = line.removesuffix(b"\r")
    if _HEX.fullmatch(text):
        secret = bytes.fromhex(text.decode())
    elif _BASE64.fullmatch(text):
        secret = base64.b64decode(text[:43].translate(_URL_SAFE) + b"=")
    else:
        secret = raw if len(raw) == BYTES else line
        if _PRINTABLE.issuperset(secret):  # words, or half a key in hex
            return None
    return secret if len(secret) == BYTES and len(set(secret)) >= _DISTINCT_MIN else None
