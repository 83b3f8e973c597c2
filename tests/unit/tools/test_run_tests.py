"""Every test is in one lane, and the worst lane's exit status is everybody's."""

from collections import Counter
from pathlib import Path

import pytest

from tools.run_tests import main

TEST = """
import pytest
from pathlib import Path

{mark}
def test_it(request):
    with Path({ran!r}).open("a") as file:
        print({name!r}, file=file)
    assert {name!r} != {failing!r}
"""
PLACES = {
    "tests/contract/test_contract.py": False,
    "tests/contract/test_engine.py": True,
    "tests/e2e/test_e2e.py": True,
    "tests/integration/kvbm/test_engine_kvbm.py": True,
    "tests/integration/kvbm/test_kvbm.py": False,
    "tests/integration/worker/test_engine_worker.py": True,
    "tests/integration/worker/test_worker.py": False,
    "tests/unit/test_unit.py": False,
}


@pytest.fixture
def ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In a folder with tests at all `PLACES`: the file in which they note that they ran."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    engine: on an engine\n")
    return tmp_path / "ran"


def _write(ran: Path, failing: str = "") -> None:
    for name, engine in PLACES.items():
        file = ran.parent / name
        file.parent.mkdir(parents=True, exist_ok=True)
        mark = "@pytest.mark.engine" if engine else ""
        file.write_text(TEST.format(mark=mark, ran=str(ran), name=name, failing=failing))


def _noted(ran: Path) -> Counter[str]:
    return Counter(ran.read_text().split())


def test_each_is_run_once_and_engines_after_the_others(
    ran: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    _write(ran)
    assert main([]) == 0
    assert _noted(ran) == Counter(PLACES.keys())
    assert [PLACES[name] for name in ran.read_text().split()] == sorted(PLACES.values())
    assert capfd.readouterr().out.count(" deselected in ") == 4


def test_one_failure_fails_the_run_and_ends_no_lane(
    ran: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    failing = "tests/integration/worker/test_worker.py"  # neither the first lane nor the last
    _write(ran, failing)
    assert main([]) == 1
    assert _noted(ran) == Counter(PLACES.keys())
    out = capfd.readouterr().out
    assert f"FAILED {failing}::test_it" in out
    assert out.splitlines()[-1].count("passed") == 3


@pytest.mark.parametrize(
    ("chosen", "runs"),
    [
        (["-m", "engine"], {name for name, engine in PLACES.items() if engine}),
        (["tests/unit/test_unit.py::test_it"], {"tests/unit/test_unit.py"}),
    ],
)
def test_what_was_chosen_is_run_once(ran: Path, chosen: list[str], runs: set[str]) -> None:
    _write(ran)
    assert main(["--import-mode=importlib", *chosen]) == 0
    assert _noted(ran) == Counter(runs)


def test_nothing_chosen_is_no_success(ran: Path) -> None:
    _write(ran)
    assert main(["-k", "nowhere"]) == 5
