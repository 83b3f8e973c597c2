"""What vLLM and torch must find in the environment before they are imported."""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
import sys
from pathlib import Path
from typing import Literal

from services.common.telemetry.logging import get_logger
from services.worker.config import WorkerSettings

log = get_logger(__name__)


Mode = Literal["inprocess", "async"]


def restart_for_threads(settings: WorkerSettings) -> None:
    """Executes this process anew where an OpenMP library was preloaded, as vLLM advises, and has
    another number of threads: it was read before anybody could set it. Its threads wait for each
    other busily, so one too many takes a whole core from other engines.
    """
    threads = str(settings.threads)
    if "omp" in os.environ.get("LD_PRELOAD", "") and os.environ.get("OMP_NUM_THREADS") != threads:
        os.environ["OMP_NUM_THREADS"] = threads
        os.execv(sys.executable, sys.orig_argv)


def prepare(settings: WorkerSettings) -> Mode:
    """Sets the environment, imports torch, decides the engine's mode. Before vLLM is imported."""
    if os.environ.pop("PYTHONHASHSEED", None) is not None:
        # It replaces the root of the block hash chain: nobody else would compute our hashes.
        log.warning("PYTHONHASHSEED is set; the engine runs without it")
    if os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None) is not None:
        log.warning("VLLM_CPU_KVCACHE_SPACE is set and would override --kv-cache-gb; left out")
    os.environ.update(
        OMP_NUM_THREADS=str(settings.threads),  # torch reads it when it is imported
        VLLM_LOGGING_LEVEL=settings.engine_log_level.upper(),
    )
    if settings.transfers:
        _prepare_transfers(settings)
    tame_logging(settings.engine_log_level, starting=True)
    mode = mode_of(settings)
    os.environ.update(at_import(settings, mode))
    return mode


def mode_of(settings: WorkerSettings) -> Mode:
    """Where the engine runs. Imports torch."""
    import torch

    if settings.engine_mode == "auto":
        return "async" if torch.cuda.is_available() else "inprocess"
    return settings.engine_mode


def at_import(settings: WorkerSettings, mode: Mode) -> dict[str, str]:
    """Variables that torch, vLLM and what they import read when they are imported. Imports torch.

    Where these are the same, what one process has imported serves another.
    """
    import torch

    inprocess = mode == "inprocess"
    eager = not torch.cuda.is_available() and settings.engine_args.get("enforce_eager", True)
    return {
        "OMP_NUM_THREADS": str(settings.threads),
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        **({"HF_HUB_OFFLINE": "1"} if Path(settings.model).exists() else {}),
        # Some helpers of vLLM (ranks of log probabilities) are compiled at first use all the same:
        # half a minute inside somebody's request, and a crash where there is no C++ compiler.
        **({"TORCH_COMPILE_DISABLE": "1"} if eager else {}),
        # In the process itself our logging does it; child processes have vLLM's own, at our level.
        "VLLM_CONFIGURE_LOGGING": "0" if inprocess else "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if inprocess else "1",
    }


def _prepare_transfers(settings: WorkerSettings) -> None:
    """Where vLLM's NIXL connector listens, and by which devices UCX talks."""
    family, _, _, _, address = socket.getaddrinfo(
        settings.host.strip("[]") or "0.0.0.0", settings.transfer_port, type=socket.SOCK_STREAM
    )[0]
    port = settings.transfer_port
    if not port:
        # vLLM tells peers the number it was given, so it can't be left to choose.
        with socket.socket(family) as probe:
            probe.bind((address[0], 0))
            port = probe.getsockname()[1]
    os.environ["VLLM_NIXL_SIDE_CHANNEL_HOST"] = str(address[0])
    os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(port)
    if ipaddress.ip_address(address[0]).is_loopback:
        # By itself UCX listens on all of the machine's networks.
        os.environ.setdefault("UCX_NET_DEVICES", "lo")


def tame_logging(level: str, *, starting: bool = False) -> None:
    """Sends the log lines of vLLM in this process through our logging, from `level` up.

    While it starts, vLLM warns of a dozen choices that are ours (eager mode, no Triton): at the
    level "warning" they are left out. What really is wrong then raises.
    """
    if starting and level == "warning":
        level = "error"
    for name in ("vllm", "transformers", "torch", "huggingface_hub", "py.warnings"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
        logger.setLevel(level.upper())
