"""The command lines for the files of a store. No logic: each command says what runs it."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from rpcagent.batch.options import add_keys, folder

_CODES = """\
exit codes:
  0    done; `verify`: no damage was found
  1    damage was found, or is left
  2    a mistake in the command line, or nothing that can be done as it was asked
  5    the store could not be used now (in use, unreadable, disk full, written by a later version)
  130  interrupted
"""

_VERIFY = f"""\
Reads every byte of a store and says what is damaged, what is missing, and what to do about it. Changes nothing, takes no lock:
a daemon may own the store and go on meanwhile. What that daemon has written and not yet confirmed is left out.

  rpcagent verify
  rpcagent verify --store /backup/notes --json
  rpcagent verify --replay --encryption-key file:~/.rpcagent.key

Checked are: HEAD and the manifest; each line of the log, its number and its link to the one before; state and history of each
run, and that the log goes on where they end; the tombstones of deleted runs; each kept large output, by its SHA-256; that what
runs refer to is there; the index of ended runs (it can be made anew at any time); owners and modes of all files. With --replay
also that the events of each run lead from one legal state to the next, which needs the key of an encrypted store.

With --json each finding is {{"finding": {{severity, what, file, offset, records, runs, remedy}}}}, and the last line is
{{"summary": {{store, storeId, owner, damage, warnings, notes, table, exitCode}}}}.

{_CODES}"""

_REPAIR = f"""\
Makes a damaged store one that opens again, from all that is still intact. No daemon may own it. Before anything is touched, a
copy of it is in `damaged/<time>/` inside the store. Look first:

  rpcagent repair --dry-run
  rpcagent repair --yes-lose

What needs no record to be given up is put right at once: the manifest, HEAD, the index, leftovers, files of a run whose records
stand elsewhere as well. Whatever would give up a record that was acknowledged is done only with --yes-lose, else nothing is.

A run that lost events, or may have lost its last ones, never goes on: what it did after the loss is not known, and to go on
could do it twice. It keeps the events up to the first one that is missing and is ended there, as `failed` with the error
`store_damaged`; where even its beginning is lost, or no key opens it, all of it is moved to `damaged/` and its key stays taken:
a `start` with it is answered KEY_EXPIRED. The one thing that cannot be made good: of a run whose only records are lost without
a readable trace nobody knows, and its key is free again; the plan says where that is possible.

Cut off anywhere, it can be run again.

{_CODES}"""

_LOG = f"""\
What is recorded, record by record, from the files: no daemon is started, none is disturbed, and nothing is changed. Without
--run the shared log, which holds what no checkpoint has moved to the files of the runs; with it all of one run, wherever it
stands. RUN is an id or the beginning of one.

  rpcagent log
  rpcagent log --run run_a4xa --bodies
  rpcagent log --follow --json | jq .event.type

--since N begins with record N, with --run with event N. --follow stays, and shows what a daemon records as it comes. Payloads
of an encrypted store show as `sealed (kid)` without its key.

With --json a line is an event, {{"record", "runId", "seq", "at", "event"}}, a sealed commit
{{"record", "runId", "seq", "count", "sealed"}}, or an opening {{"record", "opening"}}.

{_CODES}"""

_EXPORT = f"""\
Writes one run as one file that holds all of it: a header, its commits as in history.jsonl with checksums and chain, the large
outputs that it refers to, and at the end counts and a SHA-256 over everything before. Without FILE to standard output. Changes
nothing; a daemon may own the store. A file is made with mode 0600 and has its name only when it is whole.

The file is not encrypted. A run of an encrypted store needs --encryption-key, and what comes out can be read by whoever has the
file.

{_CODES}"""

_IMPORT = f"""\
Takes a run out of a file that `rpcagent export` wrote. Everything is checked before anything is written. No daemon may own
the store. A run that the store holds, or has deleted, is refused, and so is a file of a later format.

The run keeps its id, and with it the keys that it sends outside with its effects. So one that has ended can stand in as many
stores as you like. One that has not would be driven in two places at once, and could act twice. It is refused, unless you say
with --take-over that the original never goes on: its store is gone, or is never opened again. Nobody can check that for you.

`start` with the run's key finds it only in the store that it came from: an id is made of store and key. Elsewhere it is
addressed by its id.

{_CODES}"""

_BACKUP = f"""\
Copies the store to DEST, a new folder, while a daemon goes on with it: the manifest, the log after it up to the watermark, and
of each run exactly what that manifest counts. The copy is checked as `verify` does, and has its name only when it is whole.
Jobs of the shell, the ballast and the index are left out: the first two mean nothing elsewhere, the index is made anew.

Restore: with no daemon running, put the copy in the place of the store, and run `rpcagent verify`. An older copy does not know
what was done since. A client that sent `initialize {{"expect": {{"minEpoch": N}}}}` with the epoch that it saw last notices.

With --reseal all that runs hold (records, summaries, large outputs) is under the key that --encryption-key names, whatever it was
under before; with --unseal nothing is encrypted. Every payload of the copy is opened once more before it has its name. Ids, numbers
and the epoch stay, so clients go on with it as with the original. So a key is changed for good, or a plain store encrypted, with no
daemon running (what one does after the backup is not in DEST):

  rpcagent key new new.key
  rpcagent backup DEST --reseal --encryption-key file:new.key --old-encryption-key file:old.key
  rpcagent verify --store DEST --replay --encryption-key file:new.key

Then put DEST in the place of the store, and serve with the new key alone. Destroy the old store, its backups and the old key: whoever
has both can read what was recorded up to now. What stays readable in any store are ids, status, labels, sizes and times, and the name
of each large output, which is the SHA-256 of its content. A store that is damaged is repaired first; what is under a key that is lost
cannot be taken along.

{_CODES}"""

_BLOB = f"""\
Prints a large output that is kept beside the records, verified, and opened with --encryption-key where it is sealed. With a run:
lists the digests that it refers to. A digest may be shortened to a beginning that is no other's.

  rpcagent blob run_a4xa
  rpcagent blob f6351f5e > output.txt

{_CODES}"""

_GC = f"""\
Deletes what the rules under [retention] of the configuration let go, and large outputs that no run refers to any more. A daemon
does the same by itself once an hour; this is for a look beforehand, and for stores that no daemon serves. No daemon may own
the store; with --dry-run one may, and nothing is changed.

  rpcagent gc --dry-run

{_CODES}"""

AddCommand = Callable[[str, str, str], argparse.ArgumentParser]
"""(name, purpose, description) -> its parser."""


def add_upkeep(command: AddCommand) -> None:
    """Adds `verify` and its kin; the options of each carry `perform`, which runs it."""
    verify = _command(command, "verify", "check every byte of a store", _VERIFY)
    verify.add_argument("--replay", action="store_true", help="also fold the events of every run")
    verify.add_argument("--progress", action="store_true", help="show how far it is, also where nobody sits")
    repair = _command(command, "repair", "make a damaged store open again", _REPAIR)
    repair.add_argument("--dry-run", action="store_true", help="print the plan and change nothing")
    repair.add_argument("--yes-lose", action="store_true", help="give up what the plan says is lost")
    log = _command(command, "log", "what is recorded, from the files", _LOG)
    log.add_argument("--run", metavar="RUN", help="all of this run")
    log.add_argument("--follow", "-f", action="store_true", help="stay, and show what is recorded as it comes")
    log.add_argument("--since", type=int, default=0, metavar="N", help="only from this record (with --run: event) on")
    log.add_argument("--bodies", action="store_true", help="what the events say, not only their types")
    export = _command(command, "export", "write a run as one file", _EXPORT)
    export.add_argument("run", metavar="RUN")
    export.add_argument("file", nargs="?", type=Path, metavar="FILE", help="default: standard output")
    take = _command(command, "import", "take a run out of such a file", _IMPORT)
    take.add_argument("file", type=Path, metavar="FILE")
    take.add_argument("--take-over", action="store_true", help="a run that has not ended: its original never goes on")
    backup = _command(command, "backup", "copy the store while a daemon goes on", _BACKUP)
    backup.add_argument("dest", type=folder, metavar="DEST", help="a folder that is not there yet")
    sealed = backup.add_mutually_exclusive_group()
    sealed.add_argument("--reseal", action="store_true", help="all of the copy under the key of --encryption-key")
    sealed.add_argument("--unseal", action="store_true", help="nothing of the copy encrypted; needs the keys")
    blob = _command(command, "blob", "print a large output that is kept", _BLOB)
    blob.add_argument("name", metavar="RUN|DIGEST")
    collect = _command(command, "gc", "delete what retention lets go", _GC)
    collect.add_argument("--dry-run", action="store_true", help="say what would be deleted, and change nothing")
    collect.add_argument("--config", type=Path, metavar="FILE", help="the configuration, trusted by naming it")
    collect.add_argument("--trust-workspace", action="store_true", help="use the workspace's rpcagent.toml as it is")


def _command(command: AddCommand, name: str, purpose: str, about: str) -> argparse.ArgumentParser:
    parser = command(name, purpose, about)
    parser.set_defaults(perform=perform)
    parser.add_argument("--json", action="store_true", help="one JSON object a line, on standard output")
    place = parser.add_argument_group("which store")
    place.add_argument("--store", type=folder, metavar="DIR", help="default: $RPCAGENT_STORE, else the workspace's own")
    place.add_argument("--workspace", type=Path, metavar="DIR", help="whose store it is (default: here)")
    add_keys(place)
    return parser


def perform(options: argparse.Namespace) -> int:
    """Runs a command that `add_upkeep` has parsed."""
    from rpcagent.upkeep.conduct import conducted

    return conducted(options)
