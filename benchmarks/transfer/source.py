"""A process that shows memory to readers, and can be stopped."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

SHOWN = 64 << 20
"""Bytes."""
_PATIENCE_S = 20.0


class Source:
    """The process. A context manager; killed at the end."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._ours, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()
        if not self._ours.poll(_PATIENCE_S):
            self._process.kill()
            raise RuntimeError("the process that shows memory did not begin")
        self.metadata, self.address = self._ours.recv()

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()
        self._ours.close()

    def signal(self, number: signal.Signals) -> None:
        """Stops it, or lets it go on."""
        assert self._process.pid is not None
        os.kill(self._process.pid, number)
        if number == signal.SIGSTOP:
            # The signal takes effect when its threads are next scheduled.
            os.waitpid(self._process.pid, os.WUNTRACED)

    def answers_elsewhere(self, drive: Callable[[], object]) -> bool:
        """Whether it still works: a third process's read of all of it, begun now, is answered.

        What was asked of it before has been answered then too. `drive` is called meanwhile.
        """
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe(duplex=False)
        arguments = (theirs, self.metadata, self.address)
        reader = context.Process(target=_read_all, args=arguments, daemon=True)
        reader.start()
        theirs.close()
        until_s = time.monotonic() + _PATIENCE_S
        try:
            while not ours.poll(0.001):
                drive()
                if not self._process.is_alive() or time.monotonic() > until_s:
                    return False
            return bool(ours.recv())
        except EOFError:
            return False
        finally:
            reader.kill()
            reader.join()
            ours.close()


def _serve(pipe: Connection) -> None:
    from benchmarks.transfer.target import address_of, new_agent

    memory = mmap.mmap(-1, SHOWN)
    memory[:] = b"\xab" * SHOWN
    agent = new_agent()
    address = address_of(memory)
    agent.register_memory(agent.get_reg_descs([(address, SHOWN, 0, "")], "DRAM"))
    pipe.send((bytes(agent.get_agent_metadata()), address))
    while True:
        agent.get_new_notifs()
        time.sleep(0.0002)


def _read_all(pipe: Connection, metadata: bytes, address: int) -> None:
    from benchmarks.transfer.target import Target, new_agent

    target, agent = Target(), new_agent()
    agent.register_memory(agent.get_reg_descs([(*target.memory, "")], "DRAM"))
    name = agent.add_remote_agent(metadata)
    mine = agent.get_xfer_descs([target.memory], "DRAM")
    theirs = agent.get_xfer_descs([(address, SHOWN, 0)], "DRAM")
    handle = agent.initialize_xfer("READ", mine, theirs, name)
    state = str(agent.transfer(handle))
    while state == "PROC":
        time.sleep(0.0002)
        state = str(agent.check_xfer_state(handle))
    pipe.send(state == "DONE")
