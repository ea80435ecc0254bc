"""What a server's process runs first: it leaves a watcher behind, and becomes the server.

Knows: that the watcher reads a pipe of which only the daemon has the other end, so that however the daemon ends, the
watcher is told; the server has then GRACE_S to go by itself (its input has ended), and after it the whole process group
is killed. Does not know: what the server is.

A signal at the parent's death would be simpler, but it reaches the first process only, not what a launcher such as npx
started, and it is sent at the end of the thread that made the process. The watcher is detached, so that a server which
waits for its children meets none that it does not know, and it is a shell, because a sleeping shell takes 1 MB.

Run as a script by an interpreter without site packages; it imports nothing of ours.
"""

import os
import sys

GRACE_S = 2
_WATCH = f"trap '' TERM HUP INT; read -r _; sleep {GRACE_S}; kill -KILL 0"


def main(arguments: list[str]) -> None:
    """`arguments`: the descriptor of the pipe, and the server's command."""
    lifeline, command = int(arguments[0]), arguments[1:]
    child = os.fork()
    if child == 0:
        if os.fork() == 0:
            _watch(lifeline)
        os._exit(0)
    os.waitpid(child, 0)
    os.close(lifeline)
    try:
        os.execvp(command[0], command)  # noqa: S606  (becoming the command is what it is for)
    except OSError as error:
        os.write(2, f"{command[0]}: {error.strerror}\n".encode())
        os._exit(127)


def _watch(lifeline: int) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor, source in ((0, lifeline), (1, null), (2, null)):
        os.dup2(source, descriptor)
    for descriptor in {lifeline, null} - {0, 1, 2}:
        os.close(descriptor)
    os.execv("/bin/sh", ["sh", "-c", _WATCH])  # noqa: S606  (the text is ours)


if __name__ == "__main__":
    main(sys.argv[1:])
