"""A model's files: fetched from a worker, checked against its card, kept in a directory named by
digest.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import shutil
import tempfile
from pathlib import Path

import grpc
from forebay.worker.v1 import worker_pb2 as pb
from forebay.worker.v1 import worker_pb2_grpc as pb_grpc

from services.common.blocks import block_hashes
from services.common.cards import ModelCard
from services.common.rpc.channel import open_channel
from services.common.rpc.errors import translate
from services.gateway.adapters.connect import Unreachable, connected
from services.gateway.adapters.tokenizer import Tokenizer

_FETCH_TIMEOUT_S = 60.0
_MAX_FILE_BYTES = 512 << 20
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")


class FilesUnavailable(Exception):
    """The files could not be had from this worker now."""


class CardRefused(Exception):
    """The card or its files can't be used, now or later; says why."""


def check_card(card: ModelCard) -> str:
    """Why a card can't be used; empty when it can.

    Above all: the worker's engine and we must hash blocks alike, or nothing would ever hit.
    """
    if not card.model:
        return "it names no model"
    if card.block_size <= 0 or card.max_model_len <= 0 or card.vocab_size <= 0:
        return "block size, context length and vocabulary size must be positive"
    for file in card.files:
        if not _PLAIN_NAME.fullmatch(file.name) or len(file.sha256) != 32:
            return f"file {file.name!r} needs a plain name and a SHA-256 of 32 bytes"
        if file.size_bytes > _MAX_FILE_BYTES:
            return f"file {file.name!r} is longer than {_MAX_FILE_BYTES} bytes"
    vector = card.hash_vector
    if vector is None or not vector.block_hashes:
        return "it has no hash vector"
    ours = block_hashes(vector.token_ids, card.block_size, cache_salt=vector.cache_salt)
    if tuple(ours) != vector.block_hashes:
        return "its engine hashes blocks in another way than this gateway"
    return ""


def files_digest(card: ModelCard) -> str:
    """Names the set of files, by names and contents."""
    digest = hashlib.sha256()
    for file in sorted(card.files, key=lambda f: f.name):
        digest.update(f"{len(file.name)}:{file.name}".encode() + file.sha256)
    return digest.hexdigest()


async def load_tokenizer(address: str, card: ModelCard, cache_dir: Path) -> Tokenizer:
    """The tokenizer of a card, its files taken from `cache_dir` or fetched from the worker at
    `address`.

    Raises FilesUnavailable (ask again, or another worker) or CardRefused (the files are no
    tokenizer).
    """
    directory = cache_dir / files_digest(card)
    if not await asyncio.to_thread(_verified, directory, card):
        await _fetch(address, card, directory)
    try:
        return await asyncio.to_thread(Tokenizer.load, directory)
    except ValueError as exc:
        raise CardRefused(str(exc)) from exc


def _verified(directory: Path, card: ModelCard) -> bool:
    try:
        return all(
            hashlib.sha256((directory / f.name).read_bytes()).digest() == f.sha256
            for f in card.files
        )
    except OSError:
        return False


async def _fetch(address: str, card: ModelCard, directory: Path) -> None:
    await asyncio.to_thread(directory.parent.mkdir, parents=True, exist_ok=True)
    scratch = Path(await asyncio.to_thread(tempfile.mkdtemp, dir=directory.parent))
    try:
        async with asyncio.timeout(_FETCH_TIMEOUT_S), open_channel(address) as channel:
            await connected(channel, address, 5.0)
            stub = pb_grpc.WorkerServiceStub(channel)
            for file in card.files:
                content = bytearray()
                request = pb.GetModelFileRequest(name=file.name)
                async for part in stub.GetModelFile(request, timeout=_FETCH_TIMEOUT_S):
                    content += part.chunk
                    if len(content) > file.size_bytes:
                        raise FilesUnavailable(f"{file.name} is longer than its card says")
                if hashlib.sha256(content).digest() != file.sha256:
                    raise FilesUnavailable(f"{file.name} is not what its card says (SHA-256)")
                await asyncio.to_thread((scratch / file.name).write_bytes, bytes(content))
        await asyncio.to_thread(_publish, scratch, directory)
    except grpc.RpcError as exc:
        raise FilesUnavailable(translate(exc).message) from exc
    except (Unreachable, TimeoutError, OSError) as exc:
        raise FilesUnavailable(f"{type(exc).__name__}: {exc}") from exc
    finally:
        await asyncio.to_thread(shutil.rmtree, scratch, ignore_errors=True)


def _publish(scratch: Path, directory: Path) -> None:
    try:
        os.rename(scratch, directory)
    except OSError:
        # Another gateway was faster, or a damaged copy lies there: replace file by file.
        directory.mkdir(exist_ok=True)
        for file in scratch.iterdir():
            os.replace(file, directory / file.name)
