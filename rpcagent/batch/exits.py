"""The exit codes of all batch commands, and their words for `--help`."""

from __future__ import annotations

DONE = 0
FAILED = 1
USAGE = 2
PERSON = 3
CLOCK = 4
TROUBLE = 5
INTERRUPTED = 130
PIPE_CLOSED = 141

ABOUT = """\
exit codes:
  0    done: the run is completed (other commands: what was asked for was done)
  1    the run failed or was cancelled
  2    a mistake in the command line, or nothing that can be done as it was asked
  3    the run waits for a person; how to answer was printed
  4    the run waits for the clock, or --timeout ran out first
  5    the daemon or its store could not be used (in use, full, damaged); the message says which
  130  interrupted (143 by SIGTERM); the run is safe, and how to go on was printed
"""
