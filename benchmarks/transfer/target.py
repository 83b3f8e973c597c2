"""Memory that is read into, and agents as the engine's connector makes them."""

from __future__ import annotations

import ctypes
import mmap
import uuid
from typing import Any

from benchmarks.transfer.source import SHOWN

_REUSED = 0xCD


def new_agent() -> Any:
    """One without a thread of its own, as services/worker/connector/transfer has them."""
    from nixl._api import nixl_agent, nixl_agent_config, nixl_thread_sync_t

    config = nixl_agent_config(
        enable_prog_thread=False,
        sync_mode=nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,
        backends=["UCX"],
        capture_telemetry=True,
    )
    return nixl_agent(str(uuid.uuid4()), config)


class Target:
    """SHOWN bytes. A context manager."""

    def __init__(self) -> None:
        self._bytes = mmap.mmap(-1, SHOWN)
        self.memory = (address_of(self._bytes), SHOWN, 0)
        """Address, length, device."""

    def __enter__(self) -> Target:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing: an agent that was not destroyed may still write here."""

    def reuse(self) -> None:
        """Fills it anew."""
        self._bytes[:] = bytes([_REUSED]) * SHOWN

    def changed(self) -> int:
        """Bytes that are other than those it was filled with."""
        return SHOWN - self._bytes[:].count(_REUSED)


def address_of(memory: mmap.mmap) -> int:
    """Where it lies."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
