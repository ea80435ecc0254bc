"""The files of one run, runs/<id>/history.jsonl and state.json: their bytes, how they are judged, how they are read.

Knows: the two codecs, the table by which the files of a run are good, missing or damaged, and how a page of a history
is found without reading the rest. Does not know: who writes them (`checkpoint`), what a body or a summary says.

state.json says how much of the history counts; what stands behind that is left over from a checkpoint that was
interrupted, is still in the log, and is never read. Damage here is damage of that run alone.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec

from rpcagent import errors
from rpcagent.journal import record, tail

if TYPE_CHECKING:
    from rpcagent.journal.disk import Disk

FOLDER = "runs"
FORMAT = 1
"""The format of state.json, which is that of the store."""

_HISTORY = re.compile(rb'\{"c":"[0-9a-f]{8}","p":"([0-9a-f]{8})","s":(\d{1,19}),"n":(\d{1,19}),"d":')
_STATE = re.compile(rb'\{"c":"[0-9a-f]{8}","k":"state","r":"([A-Za-z0-9_.-]{1,128})","d":')
_ENVELOPE = 96  # bytes within which the members before the body of a line end
_PROBE = 4096
_PIECE = 1 << 20

Cell = bool | None  # True: must, False: must not, None: no matter


class Line(msgspec.Struct, frozen=True, gc=False):
    """A commit of a run: `count` events, the first of which has number `first`. `body` is a JSON value, as given."""

    first: int
    count: int
    body: bytes


class State(msgspec.Struct, frozen=True, kw_only=True):
    """How much of a run's history counts: `size` bytes in `lines` lines up to event `last_seq`, the last line having checksum
    `chain`; and the summary of the run there, one JSON value."""

    last_seq: int
    lines: int
    size: int
    chain: int
    summary: bytes


class _Wire(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    format: int
    last_seq: int
    lines: int
    bytes: int
    chain: str
    summary: msgspec.Raw


# Names


def folder_of(run: str) -> str:
    """Raises ValueError for a name that no folder may have."""
    if not record.is_run(run):
        raise ValueError(f"no folder may have the name of this run: {run!r}")
    return f"{FOLDER}/{run}"


def names_a_run(name: str) -> bool:
    """Whether what has this name in runs/ may be a run. Whatever else stands there is neither read nor touched."""
    return name.startswith("run_") and record.is_run(name)


def history_of(run: str) -> str:
    return f"{folder_of(run)}/history.jsonl"


def state_of(run: str) -> str:
    return f"{folder_of(run)}/state.json"


# Bytes


def empty(run: str, summary: bytes = b"null") -> State:
    """The state of a run that has no history yet."""
    return State(last_seq=0, lines=0, size=0, chain=zlib.crc32(run.encode()), summary=summary)


def history_line(previous: int, line: Line) -> tuple[bytes, int]:
    """The bytes of a line after one with checksum `previous`, and its own. The body goes in as it is."""
    return record.framed(b'"p":"%08x","s":%d,"n":%d,"d":%b}\n' % (previous, line.first, line.count, line.body))


def encode_state(run: str, state: State) -> bytes:
    """The file. Raises ValueError for a summary with a newline in it."""
    if b"\n" in state.summary:
        raise ValueError("a summary stands in one line")
    summary = msgspec.Raw(state.summary)
    wire = _Wire(FORMAT, state.last_seq, state.lines, state.size, f"{state.chain:08x}", summary)
    return record.framed(b'"k":"state","r":"%b","d":%b}\n' % (run.encode(), msgspec.json.encode(wire)))[0]


def decode_state(run: str, data: bytes) -> State:
    """Raises StoreDamaged with runs=[run] for any changed byte, StoreTooNew for a later format or an unknown shape."""
    name = state_of(run)
    end = data.find(b"\n") + 1
    if not end or end != len(data) or record.checked(data, 0, end) is None:
        later = record.later_version(data)
        if later:
            raise tail.too_new(later.format, name, 0, later.app)
        raise damaged(run, name, 0, classify(Facts(True, False, *[False] * 6)).reason)
    found = _STATE.match(data)
    if found is None:
        raise tail.unknown(name, data)
    if found[1] != run.encode():
        raise damaged(run, name, 0, "it is the state of another run")
    try:
        wire = msgspec.json.decode(data[found.end() : -2], type=_Wire)
        chain = int(wire.chain, 16)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise tail.unknown(name, data) from error
    if wire.format != FORMAT:
        raise tail.too_new(wire.format, name, 0)
    return State(last_seq=wire.last_seq, lines=wire.lines, size=wire.bytes, chain=chain, summary=bytes(wire.summary))


def damaged(run: str, name: str, offset: int, reason: str) -> errors.StoreDamaged:
    return errors.StoreDamaged(
        f"Run {run} is damaged: {name}, byte {offset}: {reason}. Nothing was changed.",
        file=name, offset=offset, reason=reason, runs=[run],
    )  # fmt: skip


# Judging


class Facts(NamedTuple):
    """What is known of the files of a run. Bytes behind what state.json says are no fact: they are not looked at."""

    state: bool  # state.json is there
    intact: bool  # its checksum is right, and it is that of this run
    named: bool  # the manifest or the index names the run
    history: bool  # history.jsonl is there
    enough: bool  # it is at least as long as state.json says
    lines: bool  # each line in what counts is intact
    chained: bool  # each follows the one before it
    ends: bool  # the last one ends where and as state.json says


Outcome = Literal["good", "none", "damaged"]


class Row(NamedTuple):
    label: str
    cells: tuple[Cell, Cell, Cell, Cell, Cell, Cell, Cell, Cell]  # in the order of Facts
    outcome: Outcome
    reason: str


M, N, X = True, False, None
TABLE: tuple[Row, ...] = (
    #                   state intact named history enough lines chained ends
    Row("no run yet", (N, X, N, X, X, X, X, X), "none", ""),
    Row("lost state", (N, X, M, X, X, X, X, X), "damaged", "state.json is missing"),
    Row("bad state", (M, N, X, X, X, X, X, X), "damaged", "state.json is bad"),
    Row("lost history", (M, M, X, N, X, X, X, X), "damaged", "history.jsonl is missing"),
    Row("cut history", (M, M, X, M, N, X, X, X), "damaged", "the history ends before what state.json counts"),
    Row("bad line", (M, M, X, M, M, N, X, X), "damaged", "a bad line in the history"),
    Row("stranger", (M, M, X, M, M, M, N, X), "damaged", "an intact line that does not follow the one before it"),
    Row("wrong end", (M, M, X, M, M, M, M, N), "damaged", "the history does not end as state.json says"),
    Row("good", (M, M, X, M, M, M, M, M), "good", ""),
)


def fitting(facts: Facts) -> list[Row]:
    """All rows that fit. It is always exactly one; the tests go through every combination."""
    return [row for row in TABLE if all(c is None or c is f for c, f in zip(row.cells, facts, strict=True))]


def classify(facts: Facts) -> Row:
    return fitting(facts)[0]


def _judge(
    run: str, offset: int, *, history: bool = True, enough: bool = True, lines: bool = True, chained: bool = True
) -> errors.StoreDamaged:
    """What to raise for a state.json that is good and a history that fails at `offset`. What follows the first fault in
    the order of the facts does not matter."""
    facts = Facts(True, True, True, history, enough, lines, chained, False)
    return damaged(run, history_of(run), offset, classify(facts).reason)


def lost(run: str) -> errors.StoreDamaged:
    """What to raise where a history that counts is missing."""
    return _judge(run, 0, history=False)


def cut(run: str, size: int) -> errors.StoreDamaged:
    """What to raise where a history ends at `size`, before what counts of it."""
    return _judge(run, size, enough=False)


# Reading


def read_state(disk: Disk, run: str) -> State | None:
    """None if the run has no state.json. Raises StoreDamaged, StoreTooNew, StorageError where it cannot be read."""
    name = state_of(run)
    try:
        data = _asked(name, lambda: disk.read(name))
    except FileNotFoundError:
        return None
    return decode_state(run, data)


def read_bodies(disk: Disk, run: str, named: bool) -> tuple[State, list[Line]] | None:
    """The whole history, each line checked; None if there is no such run. `named`: the manifest or the index names it.

    Raises StoreDamaged (file, offset, reason, runs), StoreTooNew, StorageError where something cannot be read."""
    state = read_state(disk, run)
    if state is None:
        row = classify(Facts(False, False, named, *[False] * 5))
        if row.outcome == "none":
            return None
        raise damaged(run, state_of(run), 0, row.reason)
    return state, list(_verified(disk, run, state))


def read_page(disk: Disk, run: str, state: State, after_event: int, most_bytes: int) -> list[Line]:
    """The lines from the one that holds event `after_event` + 1 on: as many as fit in `most_bytes` of the file, at least
    one. Empty at the end. Reads a few pieces of the file to find the place, and the page.

    Raises as `read_bodies`; what stands outside of the page is not checked."""
    if after_event >= state.last_seq:
        return []
    try:
        return _Reader(disk, run, state).page(max(0, after_event) + 1, most_bytes)
    except _Astray as cause:
        for _ in _verified(disk, run, state):  # finds the very line
            pass
        raise _judge(run, cause.offset, chained=False) from cause


def _verified(disk: Disk, run: str, state: State) -> Iterator[Line]:
    """All lines that count, in order; in memory is one piece of the file, or one line where that is longer."""
    previous, event, count, start = zlib.crc32(run.encode()), 0, 0, 0
    for found in _Reader(disk, run, state).lines(0):
        line, start = found.line, found.start
        if found.before != previous or line.first != event + 1 or line.count < 1:
            raise _judge(run, start, chained=False)
        previous, event, count = found.checksum, event + line.count, count + 1
        yield line
    if (previous, event, count) != (state.chain, state.last_seq, state.lines):
        raise _judge(run, start)


class _Found(NamedTuple):
    """A line of a history, where it stands, its checksum and the one that it names as that of the line before."""

    start: int
    end: int
    checksum: int
    before: int
    line: Line


class _Astray(Exception):
    """What stands at `offset` is not what the lines around it promise."""

    def __init__(self, offset: int) -> None:
        super().__init__(offset)
        self.offset = offset


class _Reader:
    """Reads what counts of one history. Raises StoreDamaged for a bad line and for a file that is missing or short."""

    def __init__(self, disk: Disk, run: str, state: State) -> None:
        self._disk, self._run, self._size = disk, run, state.size
        self._name = history_of(run)

    def lines(self, offset: int, piece: int = _PIECE) -> Iterator[_Found]:
        """From the start of a line at `offset` on."""
        held = self._read(offset, piece)  # of an empty history too: the file must be there
        while offset < self._size:
            start = 0
            while end := held.find(b"\n", start) + 1:
                yield self._line(held, start, end, offset)
                start = end
            held, offset = held[start:], offset + start
            more = self._read(offset + len(held), max(piece, len(held)))  # doubles over a long line
            if held and not more:
                raise _judge(self._run, offset, lines=False)
            held += more

    def _line(self, held: bytes, start: int, end: int, offset: int) -> _Found:
        checksum, found = record.checked(held, start, end), _HISTORY.match(held, start, end)
        if checksum is None:
            raise _judge(self._run, offset + start, lines=False)
        if found is None:
            raise tail.too_new(None, self._name, offset + start)
        line = Line(int(found[2]), int(found[3]), held[found.end() : end - 2])
        return _Found(offset + start, offset + end, checksum, int(found[1], 16), line)

    def page(self, event: int, most_bytes: int) -> list[Line]:
        page: list[Line] = []
        begin, previous = self._find(event), 0
        for found in self.lines(begin, min(_PIECE, most_bytes)):
            line = found.line
            # The first one may begin before the event that is asked for, the others begin where the last one ended.
            follows = found.before == previous and line.first == event if page else line.first <= event
            if not follows or line.first + line.count <= event:
                raise _Astray(found.start)
            if page and found.end - begin > most_bytes:
                break
            page.append(line)
            event, previous = line.first + line.count, found.checksum
        if not page:
            raise _Astray(begin)
        return page

    def _find(self, event: int) -> int:
        """Where the line begins that should hold `event`: by halving, on the numbers that lines say they begin with."""
        low, high = 0, self._size  # it begins in [low, high); at low begins a line
        while high - low > 1:
            middle = (low + high) // 2
            found = self._line_after(middle, high)
            if found is None or found[1] > event:
                high = middle
            else:
                low = found[0]
        return low

    def _line_after(self, place: int, high: int) -> tuple[int, int] | None:
        """The first line that begins at or after `place`, which is not 0, and before `high`: where, and its first event."""
        at, piece = place - 1, _PROBE
        while at < high - 1:
            data = self._read(at, piece)
            newline = data.find(b"\n", 0, high - 1 - at)
            if newline >= 0:
                begin = at + newline + 1
                found = _HISTORY.match(data, newline + 1) or _HISTORY.match(self._read(begin, _ENVELOPE))
                if found is None:
                    raise _Astray(begin)
                return begin, int(found[2])
            at, piece = at + len(data), min(2 * piece, _PIECE)
        return None

    def _read(self, offset: int, size: int) -> bytes:
        """The `size` bytes at `offset`, as far as they count."""
        size = min(size, self._size - offset)
        try:
            data = _asked(self._name, lambda: self._disk.read_at(self._name, offset, size))
        except FileNotFoundError:
            raise lost(self._run) from None
        if len(data) < size:
            raise cut(self._run, offset + len(data))
        return data


def _asked(name: str, read: Callable[[], bytes]) -> bytes:
    """FileNotFoundError goes through; every other OSError says nothing about what is there."""
    try:
        return read()
    except FileNotFoundError:
        raise
    except NotADirectoryError as error:
        raise FileNotFoundError(error.errno, error.strerror) from error
    except OSError as error:
        found = errors.name_of(error)
        raise errors.StorageError(f"{name} cannot be read ({found}).", errno=found) from error
