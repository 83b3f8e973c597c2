"""Becomes another program, tied to its parent's life: `launch.py PARENT_PID COMMAND...`.

The kernel kills this process when its parent dies, however that dies, so a killed supervisor leaves
no orphans. Done here and not in a fork hook of the parent: forked code in a process with threads
(gRPC has them) may hang. Run with -I -S; the command keeps our pid.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Sets the parent-death signal and executes the command."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # it died before we were tied to it
        os._exit(1)
    try:
        os.execvp(command[0], command)
    except OSError as exc:
        print(f"forebay: can't run {command[0]}: {exc.strerror}", file=sys.stderr)
        os._exit(127)


if __name__ == "__main__":
    main()
