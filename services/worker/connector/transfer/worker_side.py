"""The half of vLLM's NixlConnector that reads blocks: with a deadline, and a check of them."""

from __future__ import annotations

import os
import time
import uuid
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq
from nixl._api import nixl_agent, nixl_agent_config, nixl_thread_sync_t
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import (
    GET_META_MSG,
    NixlConnectorMetadata,
    ReqMeta,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker
from vllm.utils.network_utils import make_zmq_path

from services.common.telemetry.logging import get_logger
from services.worker.connector.transfer import sums as block_sums
from services.worker.connector.transfer.agents import PeerAgents
from services.worker.connector.transfer.params import Sums

DEFAULT_TIMEOUT_S = 2.0
_SILENT_S = 3.0
_MOST_SILENT = 1024
log = get_logger(__name__)


class Orders(NixlConnectorMetadata):  # type: ignore[misc]
    """A step's orders: vLLM's, the sums of what is to be read, and whose blocks to let go of."""

    def __init__(self) -> None:
        super().__init__()
        self.sums: dict[str, Sums | None] = {}
        self.releases: set[str] = set()


@dataclass(frozen=True, slots=True)
class Ended:
    """How a read went. `seconds` runs from its first order, a handshake included, to its check."""

    request: str
    blocks: int
    """That arrived and are right; 0: it failed."""
    bytes: int
    seconds: float
    why: str = ""
    """Of a failure: "transport", "sums"."""


@dataclass(frozen=True, slots=True)
class _Expected:
    blocks: tuple[int, ...]
    sums: tuple[int, ...] | None
    began_s: float


class TransferWorker(NixlPullConnectorWorker):  # type: ignore[misc]
    """Reads from peers, and is read from. The engine's thread."""

    def __init__(self, vllm_config: Any, engine_id: str, kv_cache_config: Any) -> None:
        cores = os.sched_getaffinity(0)
        super().__init__(vllm_config, engine_id, kv_cache_config)
        # vLLM's binds this thread, which computes here, to one core of the machine.
        os.sched_setaffinity(0, cores)
        transfer = vllm_config.kv_transfer_config
        self._timeout_s = float(transfer.get_from_extra_config("timeout_s", DEFAULT_TIMEOUT_S))
        threads = int(transfer.get_from_extra_config("num_threads", 0))
        backends = list(self.nixl_backends)

        def make() -> Any:
            config = nixl_agent_config(
                enable_prog_thread=False,
                sync_mode=nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,
                backends=backends,
                num_threads=threads,
                capture_telemetry=True,
            )
            return nixl_agent(str(uuid.uuid4()), config)

        # vLLM's own agent has a thread that spins; it goes before it is of any use.
        vars(self)["nixl_wrapper"].agent = None
        self.agents = PeerAgents(make(), make, self._timeout_s)
        self.nixl_wrapper = self.agents
        self._sums: block_sums.BlockSums | None = None
        self._expected: dict[str, _Expected] = {}
        self._ended: list[Ended] = []
        self._silent: dict[tuple[str, int], float] = {}
        """Until when peers are not asked that did not answer."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Registers the cache with NIXL, and for checks."""
        super().register_kv_caches(kv_caches)
        self._sums = block_sums.publish(self.engine_id, kv_caches, self.num_blocks)

    def start_load_kv(self, metadata: NixlConnectorMetadata) -> None:
        """Starts the step's reads."""
        now = time.monotonic()
        for request, meta in metadata.reqs_to_recv.items():
            blocks = tuple(meta.local_block_ids[0]) if meta.local_block_ids else ()
            if not blocks:
                continue
            sums = metadata.sums.get(request) if isinstance(metadata, Orders) else None
            self._expected[request] = _Expected(blocks, self._tail(sums, blocks, meta), now)
        super().start_load_kv(metadata)
        for request in metadata.releases if isinstance(metadata, Orders) else ():
            if self._reqs_to_send.pop(request, None) is not None:
                self._reqs_to_process.discard(request)
                # Told with the next results as sent.
                self._replicated_pcp_done_sending.add(request)

    @staticmethod
    def _tail(sums: Sums | None, blocks: tuple[int, ...], meta: ReqMeta) -> tuple[int, ...] | None:
        """Of the prompt's sums, those of the blocks that are read: our cache had those before."""
        if sums is None:
            return None
        remote = len(meta.remote.block_ids[0]) if meta.remote is not None else 0
        # As many as don't belong together fail the comparison.
        return sums.of_blocks[-len(blocks) :] if len(sums.of_blocks) == remote else ()

    def get_transfer_results(self) -> KVConnectorTransferResults:
        """Reads and hand-overs that are over. A read is good when its sums are."""
        results = super().get_transfer_results()
        # vLLM's own figures grow until they are taken; ours stand in their place.
        self.xfer_stats.reset()
        self.agents.eager = bool(self._reqs_to_send)
        for request in sorted(results.finished_recving):
            expected = self._expected.pop(request, None)
            if expected is None:
                continue
            why = "transport" if request in results.failed_recving else self._check(expected)
            if why:
                if self._sums is not None:
                    self._sums.clear(expected.blocks)
                results.failed_recving.add(request)
                log.warning("blocks are computed that did not come", request=request, why=why)
            seconds = time.monotonic() - expected.began_s
            good = 0 if why else len(expected.blocks)
            size = self._sums.block_bytes if self._sums is not None else 0
            self._ended.append(Ended(request, good, good * size, seconds, why))
        return results

    def _check(self, expected: _Expected) -> str:
        """Empty, or why what arrived is not to be used."""
        if self._sums is None or expected.sums is None:
            return ""
        return "" if tuple(self._sums.of(expected.blocks)) == expected.sums else "sums"

    def take_ended(self) -> list[Ended]:
        """What has ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def _nixl_handshake(self, host: str, port: int, *rest: Any, **more: Any) -> Any:
        """vLLM's, if the peer answers in time: it would wait longer than a request may.

        One that did not is not asked again for a moment: handshakes wait for each other.
        """
        silent_until_s = self._silent.get((host, port), 0.0)
        if time.monotonic() < silent_until_s:
            raise TimeoutError(f"{host}:{port} did not answer a moment ago")
        try:
            _probe(host, port, self._timeout_s)
        except TimeoutError:
            if len(self._silent) >= _MOST_SILENT:
                self._silent.clear()
            self._silent[host, port] = time.monotonic() + _SILENT_S
            raise
        return super()._nixl_handshake(host, port, *rest, **more)

    def _log_failure(
        self,
        failure_type: str,
        req_id: str | None,
        msg: str = "",
        error: BaseException | None = None,
        meta: ReqMeta | None = None,
        **_: Any,
    ) -> None:
        """A line. vLLM's is an error with a traceback, for each request that is computed then."""
        peer = meta.remote.host if meta is not None and meta.remote is not None else ""
        why = msg or (str(error) or repr(error) if error is not None else "")
        log.warning("a transfer failed", request=req_id, what=failure_type, peer=peer, why=why)

    def shutdown(self) -> None:
        """Ends it."""
        block_sums.forget(self.engine_id)
        try:
            super().shutdown()
        finally:
            self.agents.close()


def _probe(host: str, port: int, timeout_s: float) -> None:
    """Asks a peer for its metadata, as a handshake does. Raises TimeoutError when none comes."""
    context = zmq.Context()
    socket = context.socket(zmq.REQ)
    try:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, 1)
        socket.setsockopt(zmq.RCVTIMEO, max(1, int(timeout_s * 1000)))
        socket.connect(make_zmq_path("tcp", host, port))
        socket.send(msgspec.msgpack.encode((GET_META_MSG, 0, 0)))
        socket.recv_multipart()
    except zmq.Again as exc:
        raise TimeoutError(f"{host}:{port} did not answer in {timeout_s:g} s") from exc
    finally:
        socket.close()
        context.term()
