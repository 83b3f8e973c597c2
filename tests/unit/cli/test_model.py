"""Which model is served, and the small one's preparation with a stub in the converter's place."""

import json
import threading
from pathlib import Path

import pytest

from services.cli.errors import ModelError
from services.cli.model import OnStage, check_folder, find_gguf, prepare_small, resolve

FILES = ("config.json", "model.safetensors", "tokenizer.json", "generation_config.json")


class StubConverter:
    """Writes tiny files instead of a model."""

    def __init__(self, leave_out: str = "") -> None:
        self.calls = 0
        self.leave_out = leave_out

    def __call__(self, source: Path, folder: Path, on_stage: OnStage) -> None:
        self.calls += 1
        on_stage("writing", 0.5)
        for name in FILES:
            if name != self.leave_out:
                (folder / name).write_text(name)


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF one")
    return path


def quiet(stage: str, share: float) -> None:
    pass


def test_prepared_once(tmp_path: Path, gguf: Path) -> None:
    stub, folder = StubConverter(), tmp_path / "cache" / "model"
    stages: list[str] = []
    prepare_small(folder, gguf, stub, lambda stage, share: stages.append(stage))
    assert stages == ["writing"]
    assert {f.name for f in folder.iterdir()} == {*FILES, "forebay-model.json"}
    prepare_small(folder, gguf, stub, quiet)
    assert stub.calls == 1
    # Nothing else stays in the cache but the lock.
    assert {f.name for f in folder.parent.iterdir()} == {"model", ".model.lock"}


def test_made_anew_when_source_or_files_change(tmp_path: Path, gguf: Path) -> None:
    stub, folder = StubConverter(), tmp_path / "model"
    prepare_small(folder, gguf, stub, quiet)
    (folder / "model.safetensors").write_text("cut")
    prepare_small(folder, gguf, stub, quiet)
    assert stub.calls == 2
    assert (folder / "model.safetensors").read_text() == "model.safetensors"
    gguf.write_bytes(b"GGUF two")
    prepare_small(folder, gguf, stub, quiet)
    assert stub.calls == 3


@pytest.mark.parametrize("left_out", FILES)
def test_a_conversion_that_fails_leaves_nothing(tmp_path: Path, gguf: Path, left_out: str) -> None:
    folder = tmp_path / "cache" / "model"
    with pytest.raises(ModelError, match=f"left out {left_out}"):
        prepare_small(folder, gguf, StubConverter(left_out), quiet)
    assert not folder.exists()
    assert {f.name for f in folder.parent.iterdir()} == {".model.lock"}


def test_somebody_elses_folder_stays(tmp_path: Path, gguf: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "notes.txt").write_text("keep")
    with pytest.raises(ModelError, match="was not made by"):
        prepare_small(folder, gguf, StubConverter(), quiet)
    assert (folder / "notes.txt").read_text() == "keep"


def test_two_at_once_convert_once(tmp_path: Path, gguf: Path) -> None:
    folder = tmp_path / "model"
    inside, go = threading.Event(), threading.Event()
    stub = StubConverter()

    def slow(source: Path, made: Path, on_stage: OnStage) -> None:
        inside.set()
        assert go.wait(10)
        stub(source, made, on_stage)

    waits = threading.Event()
    first = threading.Thread(target=prepare_small, args=(folder, gguf, slow, quiet))
    first.start()
    assert inside.wait(10)
    second = threading.Thread(
        target=prepare_small, args=(folder, gguf, stub, lambda stage, share: waits.set())
    )
    second.start()
    assert waits.wait(10)  # it says that it waits
    go.set()
    first.join(10)
    second.join(10)
    assert stub.calls == 1


def test_a_folder_is_served_by_its_name(tmp_path: Path) -> None:
    folder = tmp_path / "My-Model"
    folder.mkdir()
    for name in FILES:
        (folder / name).write_text(json.dumps({}))
    found = resolve(str(folder))
    assert (found.location, found.served_name) == (str(folder), "My-Model")


def test_a_folder_that_is_none_says_what_it_lacks(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"lacks tokenizer\.json, weights"):
        check_folder(tmp_path)
    with pytest.raises(ModelError, match="is a file"):
        check_folder(tmp_path / "config.json")


def test_hub_ids_pass_and_typos_do_not(tmp_path: Path) -> None:
    assert resolve("Some-Owner/Some.Model-1B").served_name == "Some-Owner/Some.Model-1B"
    for wrong in ("no-such-model", "./no/such", "/no/such", "a/b/c"):
        with pytest.raises(ModelError, match="no such folder"):
            resolve(wrong)


def test_the_wheel_is_found_without_importing_it() -> None:
    path = find_gguf()
    assert path.suffix == ".gguf" and path.stat().st_size > 50_000_000
