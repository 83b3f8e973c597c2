"""Engine processes die with the worker, however it dies.

vLLM's engine core outlives a SIGKILL of its parent and goes on computing. A shell that waits for
the end of a pipe, which the kernel closes with our process, kills it then.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import psutil  # type: ignore[import-untyped]

_SCRIPT = 'read -r _ || kill -9 "$@"'


@contextmanager
def lifeline(roots: Sequence[int]) -> Iterator[None]:
    """While it lasts, the death of this process kills the processes `roots` and their children."""
    pids = [str(p.pid) for root in roots for p in _family(root)]
    guard = subprocess.Popen(
        ["/bin/sh", "-c", _SCRIPT, "forebay-lifeline", *pids],
        stdin=subprocess.PIPE,
        start_new_session=True,  # not to be hit by what hits our process group
    )
    try:
        yield
    finally:
        guard.kill()
        guard.wait()
        if guard.stdin is not None:
            guard.stdin.close()


def _family(root: int) -> list[psutil.Process]:
    try:
        process = psutil.Process(root)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []
