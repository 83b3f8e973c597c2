"""Model and adapter files on disk: content digests, links by digest, and what a card shows."""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.common.cards import Adapter, GenerationDefaults, ModelFile
from services.common.telemetry.logging import get_logger
from services.worker.errors import EngineStartError

CARD_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
    "added_tokens.json",
    "generation_config.json",
    "config.json",
)
"""Files that gateways need, as far as the model has them."""
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".gguf")
_CHUNK = 1 << 20
_BLOB = re.compile(r"[0-9a-f]{64}")
log = get_logger(__name__)


class DigestCache:
    """SHA-256 of files, remembered by (path, size, modification time, inode) in one JSON file."""

    def __init__(self, file: Path | None = None) -> None:
        home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
        self._file = file or Path(home) / "forebay" / "digests.json"
        known = _read_object(self._file)
        self._known = {k: v for k, v in known.items() if isinstance(v, str) and len(v) == 64}

    def sha256(self, path: Path) -> str:
        """Hex digest of a file's content; read at most once for each state of the file."""
        real = path.resolve()
        if real.parent.name == "blobs" and _BLOB.fullmatch(real.name):
            return real.name  # the hub's cache names a large file by its digest
        stat = real.stat()
        key = f"{real}|{stat.st_size}|{stat.st_mtime_ns}|{stat.st_ino}"
        if key not in self._known:
            with real.open("rb") as file:
                self._known[key] = hashlib.file_digest(file, "sha256").hexdigest()
            self._save()
        return self._known[key]

    def _save(self) -> None:
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(
                "w", dir=self._file.parent, suffix=".json", delete=False
            ) as scratch:
                json.dump(self._known, scratch)
            Path(scratch.name).replace(self._file)
        except OSError as exc:
            log.warning("digests can't be remembered", file=str(self._file), error=str(exc))


def _read_object(file: Path) -> dict[str, Any]:
    """The JSON object in a file; an empty one when there is none."""
    try:
        read = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return read if isinstance(read, dict) else {}


def weights_digest(folder: Path, digests: DigestCache) -> bytes:
    """Digest of a model's weights and configuration: names and contents. 32 bytes.

    Raises EngineStartError when the folder holds no weights.
    """
    weights = sorted(p for p in folder.iterdir() if p.suffix in WEIGHT_SUFFIXES and p.is_file())
    if not weights:
        raise EngineStartError(f"there are no weights ({', '.join(WEIGHT_SUFFIXES)}) in {folder}")
    whole = hashlib.sha256()
    for path in (*weights, folder / "config.json"):
        if path.is_file():
            whole.update(f"{path.name}\0{digests.sha256(path)}\n".encode())
    return whole.digest()


def namespace(weights: bytes, identity: Mapping[str, str]) -> bytes:
    """Digest of weights and of all that gives KV bytes their meaning. 32 bytes."""
    text = json.dumps({"weights": weights.hex(), **identity}, sort_keys=True)
    return hashlib.sha256(text.encode()).digest()


@dataclass(frozen=True, slots=True)
class CardFile:
    """A file of the card with its content, as it was when the model was loaded."""

    entry: ModelFile
    content: bytes

    def chunks(self) -> Iterator[bytes]:
        """The content in pieces of at most 1 MiB; one empty piece for an empty file."""
        for start in range(0, max(1, len(self.content)), _CHUNK):
            yield self.content[start : start + _CHUNK]


def card_files(folder: Path) -> tuple[CardFile, ...]:
    """The card's files that the model has."""
    found = []
    for name in CARD_FILES:
        path = folder / name
        if path.is_file():
            content = path.read_bytes()
            entry = ModelFile(name, hashlib.sha256(content).digest(), len(content))
            found.append(CardFile(entry, content))
    return tuple(found)


def generation_defaults(folder: Path) -> GenerationDefaults:
    """Sampling defaults that the model's generation_config.json states."""
    stated = _read_object(folder / "generation_config.json")

    def number(name: str) -> float | None:
        value = stated.get(name)
        return float(value) if isinstance(value, int | float) else None

    top_k = number("top_k")
    return GenerationDefaults(
        temperature=number("temperature"),
        top_p=number("top_p"),
        top_k=None if top_k is None else max(0, int(top_k)),
        min_p=number("min_p"),
        repetition_penalty=number("repetition_penalty"),
    )


def link_adapters(adapters: Mapping[str, str], root: str, digests: DigestCache) -> list[Adapter]:
    """Adapters to be loaded from links named by content digest, so that paths agree on all nodes.

    Raises EngineStartError for a folder that is no adapter.
    """
    if not adapters:
        return []
    folder = Path(root or Path(tempfile.gettempdir()) / f"forebay-{os.getuid()}" / "adapters")
    if not root:
        # In a folder that all may write to, only one of our own is safe.
        folder.parent.mkdir(mode=0o700, exist_ok=True)
        state = folder.parent.lstat()
        if state.st_uid != os.getuid() or state.st_mode & 0o022:
            raise EngineStartError(f"others can write to {folder.parent}; set --adapter-root")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    linked = []
    for name, path in adapters.items():
        source = Path(path).resolve()
        weights = sorted(p for p in source.glob("adapter_model.*") if p.is_file())
        if not weights or not (source / "adapter_config.json").is_file():
            raise EngineStartError(
                f"--adapters {name}={path}: needs adapter_config.json and adapter_model.safetensors"
            )
        whole = hashlib.sha256()
        for file in (source / "adapter_config.json", *weights):
            whole.update(f"{file.name}\0{digests.sha256(file)}\n".encode())
        link = folder / whole.hexdigest()
        _link(link, source)
        linked.append(Adapter(name, str(link), whole.digest()))
    return linked


def _link(link: Path, source: Path) -> None:
    scratch = link.with_name(f"{link.name}.{os.getpid()}")
    scratch.symlink_to(source)
    scratch.replace(link)
