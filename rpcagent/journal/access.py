"""Who else may read a store: its modes, its owner, and links in the place of its parts.

Knows: folders are 0700 and files 0600, all of this user, none a link; what is done about each way in which that can be
otherwise. Does not know: what the files hold.

A store holds all that agents have read and written. Its own folder decides who gets at it: with that closed, nobody else
reaches what lies within, whatever the modes there. So a start looks at the folder and the names in it, and only a check
of the whole store at every file. An opened mode is closed again, since the store is this user's. What is another user's
is refused, and so is a link: behind it other bytes may stand, or another user's folder.
"""

from __future__ import annotations

import errno
import os
import shlex
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from rpcagent import errors

PARTS = (
    "LOCK", "HEAD", "wal", "checkpoint.json", "checkpoint.json.tmp", "runs", "tombstones", "blobs",
    "index.sqlite", "index.sqlite-wal", "index.sqlite-shm", "index.sqlite-journal", "jobs", "trusted", "RESERVE",
    "damaged",
)  # fmt: skip
"""All names in a store's folder that are its own. Others are neither read nor touched, nor judged."""

OTHERS = stat.S_IRWXG | stat.S_IRWXO

Verdict = Literal["good", "open", "foreign", "link"]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """A name that is not as the store makes it. `name` is relative to the store, `""` the store itself; `mode` has the
    permission bits."""

    name: str
    verdict: Verdict
    mode: int
    uid: int


def judge(name: str, mode: int, uid: int, is_link: bool, me: int) -> Verdict:
    """What is to be said of one name. Pure. `mode`: of which only the bits of group and others count. The store itself
    (`""`) may be reached by a link, since whoever names it can see that."""
    if is_link and name:
        return "link"
    if uid != me:
        return "foreign"
    return "open" if mode & OTHERS else "good"


def check_modes(store: Path, *, whole: bool = False) -> list[Finding]:
    """Everything that is not as it should be, the store itself first. Not `whole`: the folder and the names in it, at most
    16 looks; `whole`: every file. Changes nothing. Raises OSError for what cannot be looked at."""
    me = os.geteuid()
    found = [(name, Path(store / name)) for name in _names(store, whole=whole)]
    return [finding for name, path in found if (finding := _look(name, path, me)) is not None]


def secure(store: Path) -> list[Finding]:
    """Closes the store's folder, and the names in it, to everybody else; returns what was open, to be noted. For the start,
    before the lock is taken.

    Raises StorageError, not retryable, where that is not this user's to do: EPERM for what is another user's or does not
    take the mode, ELOOP for a link. The message has the command that helps. Other OSErrors go up as they came."""
    found = check_modes(store)
    for finding in found:
        if finding.verdict in {"foreign", "link"}:
            raise _refused(store, finding)
    for finding in found:
        _close(store, finding)
    return found


def why_read_only(store: Path) -> str:
    """The name of the errno that whoever would write a name into the folder gets; empty where one can be written."""
    if os.access(store, os.W_OK, effective_ids=os.access in os.supports_effective_ids):
        return ""
    try:
        return "EROFS" if os.statvfs(store).f_flag & os.ST_RDONLY else "EACCES"
    except OSError as error:
        return errors.name_of(error)


def advice(store: Path, finding: Finding) -> str:
    """What is wrong, in a sentence, and the command that helps."""
    path = shlex.quote(str(store / finding.name))
    if finding.verdict == "link":
        return f"{path} is a symbolic link, and a part of a store never is: put what it points to in its place"
    if finding.verdict == "foreign":
        me = os.geteuid()
        return (
            f"{path} belongs to another user (uid {finding.uid}, and this is uid {me}): run as that user, or make it "
            f"yours: chown -R {me} {shlex.quote(str(store))}"
        )
    return f"{path} is open to other users (mode {finding.mode:04o}): chmod -R go= {shlex.quote(str(store))}"


def _names(store: Path, *, whole: bool) -> Iterator[str]:
    yield ""
    folders = []
    for part in PARTS:
        yield part
        folders.append(part)
    while whole and folders:
        folder = folders.pop()
        if (store / folder).is_symlink():
            continue  # told as such, and not followed
        try:
            entries = sorted(os.scandir(store / folder), key=lambda entry: entry.name)
        except (NotADirectoryError, FileNotFoundError):
            continue
        for entry in entries:
            yield f"{folder}/{entry.name}"
            if entry.is_dir(follow_symlinks=False):
                folders.append(f"{folder}/{entry.name}")


def _look(name: str, path: Path, me: int) -> Finding | None:
    """None: it is good, or not there, or nothing that a store has: to open that could do whatever it is for."""
    try:
        entry = path.lstat() if name else path.stat()
    except FileNotFoundError:
        return None
    if not (stat.S_ISREG(entry.st_mode) or stat.S_ISDIR(entry.st_mode) or stat.S_ISLNK(entry.st_mode)):
        return None
    verdict = judge(name, entry.st_mode, entry.st_uid, stat.S_ISLNK(entry.st_mode), me)
    if verdict == "good":
        return None
    return Finding(name=name, verdict=verdict, mode=stat.S_IMODE(entry.st_mode), uid=entry.st_uid)


def _close(store: Path, finding: Finding) -> None:
    """By descriptor: a name that someone exchanges meanwhile is not followed."""
    try:
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (os.O_NOFOLLOW if finding.name else 0)
        descriptor = os.open(store / finding.name, flags)
        try:
            os.fchmod(descriptor, stat.S_IMODE(os.fstat(descriptor).st_mode) & ~OTHERS)
            still = stat.S_IMODE(os.fstat(descriptor).st_mode) & OTHERS
        finally:
            os.close(descriptor)
    except FileNotFoundError:
        return  # gone meanwhile: another process is starting, or just ended
    except OSError as error:
        if error.errno == errno.ELOOP:
            finding = msgspec.structs.replace(finding, verdict="link")
        elif not isinstance(error, PermissionError):
            raise
        raise _refused(store, finding) from error
    if still:  # a file system without modes
        raise _refused(store, finding)


def _refused(store: Path, finding: Finding) -> errors.StorageError:
    number = errno.ELOOP if finding.verdict == "link" else errno.EPERM
    return errors.StorageError(advice(store, finding), retryable=False, errno=errno.errorcode[number])
