"""Digests, links and cards of files on disk."""

import hashlib
import json
import os
from pathlib import Path

import pytest

from services.common.cards import GenerationDefaults
from services.worker.adapters.files import (
    DigestCache,
    card_files,
    generation_defaults,
    link_adapters,
    namespace,
    weights_digest,
)
from services.worker.errors import EngineStartError


@pytest.fixture
def digests(tmp_path: Path) -> DigestCache:
    return DigestCache(tmp_path / "cache" / "digests.json")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def test_weights_are_known_by_content(model: Path, digests: DigestCache, tmp_path: Path) -> None:
    before = weights_digest(model, digests)
    assert len(before) == 32
    copy = tmp_path / "elsewhere"
    copy.mkdir()
    for file in model.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    assert weights_digest(copy, digests) == before
    # New weights of the same size under the same name are others.
    (model / "model.safetensors").write_bytes(b"WEIGHTS")
    assert weights_digest(model, digests) != before


def test_a_changed_configuration_is_another_model(model: Path, digests: DigestCache) -> None:
    before = weights_digest(model, digests)
    (model / "config.json").write_text('{"rope_theta": 1}')
    assert weights_digest(model, digests) != before


def test_digests_are_read_once(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "cache" / "digests.json"
    path = model / "model.safetensors"
    assert DigestCache(file).sha256(path) == hashlib.sha256(b"weights").hexdigest()
    # A second process finds it there: a tampered memory shows that the file is not read.
    known = json.loads(file.read_text())
    file.write_text(json.dumps(dict.fromkeys(known, "0" * 64)))
    assert DigestCache(file).sha256(path) == "0" * 64


def test_a_broken_memory_is_no_harm(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "digests.json"
    for broken in ("{", "[1]", '{"a": 1}'):
        file.write_text(broken)
        digest = DigestCache(file).sha256(model / "model.safetensors")
        assert digest == hashlib.sha256(b"weights").hexdigest()


def test_a_hub_blob_is_named_by_its_digest(tmp_path: Path, digests: DigestCache) -> None:
    name = hashlib.sha256(b"never read").hexdigest()
    blob = tmp_path / "blobs" / name
    blob.parent.mkdir()
    blob.write_bytes(b"something else")
    link = tmp_path / "model.safetensors"
    link.symlink_to(blob)
    assert digests.sha256(link) == name


def test_no_weights_stop_the_start(tmp_path: Path, digests: DigestCache) -> None:
    with pytest.raises(EngineStartError, match="no weights"):
        weights_digest(tmp_path, digests)


def test_namespaces_differ_in_every_word() -> None:
    words = {"version": "1", "dtype": "bf16"}
    base = namespace(b"w" * 32, words)
    assert len(base) == 32
    assert namespace(b"w" * 32, dict(reversed(words.items()))) == base
    assert namespace(b"v" * 32, words) != base
    assert namespace(b"w" * 32, {**words, "dtype": "fp8"}) != base


def test_card_files_hold_content_and_digest(model: Path) -> None:
    (model / "tokenizer.json").write_bytes(b"t" * 3_000_000)
    (model / "README.md").write_text("not for a card")
    files = {f.entry.name: f for f in card_files(model)}
    assert set(files) == {"tokenizer.json", "config.json"}
    tokenizer = files["tokenizer.json"]
    assert tokenizer.entry.sha256 == hashlib.sha256(b"t" * 3_000_000).digest()
    chunks = list(tokenizer.chunks())
    assert b"".join(chunks) == b"t" * 3_000_000
    assert max(len(c) for c in chunks) <= 1 << 20
    # What was announced is what is sent, whatever happens on disk.
    (model / "tokenizer.json").write_bytes(b"new")
    assert b"".join(tokenizer.chunks()) == b"t" * 3_000_000


def test_generation_defaults(model: Path) -> None:
    assert generation_defaults(model) == GenerationDefaults()
    (model / "generation_config.json").write_text(
        '{"temperature": 0.6, "top_k": 20, "top_p": null, "repetition_penalty": "x"}'
    )
    assert generation_defaults(model) == GenerationDefaults(temperature=0.6, top_k=20)
    (model / "generation_config.json").write_text("[]")
    assert generation_defaults(model) == GenerationDefaults()


def adapter(folder: Path, weights: bytes = b"a") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text('{"r": 8}')
    (folder / "adapter_model.safetensors").write_bytes(weights)
    return folder


def test_equal_adapters_have_equal_paths(tmp_path: Path, digests: DigestCache) -> None:
    root = str(tmp_path / "links")
    one = link_adapters({"x": str(adapter(tmp_path / "one"))}, root, digests)[0]
    two = link_adapters({"x": str(adapter(tmp_path / "two"))}, root, digests)[0]
    assert one == two
    assert Path(one.path).name == one.sha256.hex()
    assert (Path(two.path) / "adapter_model.safetensors").read_bytes() == b"a"
    other = link_adapters({"x": str(adapter(tmp_path / "two", b"b"))}, root, digests)[0]
    assert other.path != one.path


def test_what_is_no_adapter_stops_the_start(tmp_path: Path, digests: DigestCache) -> None:
    with pytest.raises(EngineStartError, match=r"adapter_config\.json"):
        link_adapters({"x": str(tmp_path)}, str(tmp_path / "links"), digests)


def test_the_usual_root_is_private(
    tmp_path: Path, digests: DigestCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    found = link_adapters({"x": str(adapter(tmp_path / "one"))}, "", digests)[0]
    root = tmp_path / f"forebay-{os.getuid()}" / "adapters"
    assert Path(found.path).parent == root
    assert root.stat().st_mode & 0o077 == 0
    assert root.parent.stat().st_mode & 0o077 == 0
