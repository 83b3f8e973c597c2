"""NVIDIA Dynamo's index and selection service beside ours: a venv of its own, a process of its own.

It comes from PyPI (ai-dynamo, ai-dynamo-runtime). Where it can't be had the benchmark fails:
numbers without those of the rival say little.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import zmq

VERSION = "1.6.1"
PACKAGES = (f"ai-dynamo=={VERSION}", f"ai-dynamo-runtime=={VERSION}")
DRIVER = Path(__file__).with_name("rival_driver.py")
_HOME = Path(os.environ.get("FOREBAY_RIVAL_VENV", ".forebay/rival-venv"))


class RivalMissing(Exception):
    """The rival can't be installed or does not run; says why."""


def interpreter() -> Path:
    """Python of the rival's venv, made if it isn't there. Raises RivalMissing."""
    python = _HOME / "bin" / "python"
    try:
        if not python.exists():
            subprocess.run([sys.executable, "-m", "venv", str(_HOME)], check=True, timeout=300)
        check = "import dynamo._core as c; c.RadixTree, c.SelectionService"
        if subprocess.run([python, "-c", check], capture_output=True, timeout=120).returncode:
            install = [str(python), "-m", "pip", "install", "-q", "--no-deps", *PACKAGES]
            subprocess.run(install, check=True, timeout=600)
            subprocess.run([python, "-c", check], check=True, timeout=120)
    except (OSError, subprocess.SubprocessError) as exc:
        raise RivalMissing(f"{' '.join(PACKAGES)} can't be had: {exc}") from exc
    return python


class Rival:
    """A process that runs it. Use as a context manager."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [interpreter(), DRIVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> Rival:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, at: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)
        self._process.stdout.close()

    def ask(self, op: str, **arguments: Any) -> dict[str, Any]:
        """One command. Raises RivalMissing with what the rival says when that goes wrong."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({"op": op, **arguments}) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("@"):
                answer: dict[str, Any] = json.loads(line[1:])
                if "error" in answer:
                    raise RivalMissing(f"{op}: {answer['error']}")
                return answer
        raise RivalMissing(f"{op}: the process ended")


class Feed:
    """Event streams as vLLM's engines publish them, one for each worker. A context manager."""

    def __init__(self, workers: int) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sockets: list[zmq.Socket[bytes]] = []
        self.addresses: list[str] = []
        for _ in range(workers):
            socket: zmq.Socket[bytes] = self._context.socket(zmq.PUB)
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.setsockopt(zmq.LINGER, 0)
            self.addresses.append(
                f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}"
            )
            self._sockets.append(socket)
        self._sequences = [0] * workers
        self._next_hash = 1

    def __enter__(self) -> Feed:
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy(linger=0)

    def stored(self, worker: int, tokens: Sequence[int], block_size: int, batch: int = 128) -> None:
        """A worker has computed a prompt: its full blocks are stored, `batch` in an event."""
        blocks = len(tokens) // block_size
        parent: int | None = None
        for start in range(0, blocks, batch):
            count = min(batch, blocks - start)
            hashes = list(range(self._next_hash, self._next_hash + count))
            self._next_hash += count
            event = {
                "type": "BlockStored",
                "block_hashes": hashes,
                "parent_block_hash": parent,
                "token_ids": tokens[start * block_size : (start + count) * block_size],
                "block_size": block_size,
                "lora_id": None,
            }
            parent = hashes[-1]
            sequence = self._sequences[worker]
            self._sequences[worker] += 1
            payload = msgspec.msgpack.encode([time.time(), [event], 0])
            self._sockets[worker].send_multipart([b"", sequence.to_bytes(8, "big"), payload])
