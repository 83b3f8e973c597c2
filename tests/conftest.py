"""Fixtures and hooks for all tests. Each test has its own event loop; nothing here starts one."""

import os
from collections.abc import Callable, Generator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.models import default_cache_dir, tiny_model

# As the worker sets it for its own process, before any test imports torch: what vLLM compiles at
# its first use wants a C++ compiler, which a plain Debian lacks.
os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")

if not os.environ.get("CI"):  # there Hypothesis has a profile of its own, which says the same
    settings.register_profile("forebay", deadline=None)  # a busy machine is no fault
    settings.load_profile("forebay")

LOGS = pytest.StashKey[Callable[[], list[tuple[str, str]]]]()
"""On an item: gives (title, text) sections for its report when it fails."""


@pytest.fixture(scope="module", autouse=True)
def environment() -> Generator[None]:
    """What a module's tests do to the environment ends with them.

    vLLM preloads an OpenMP library into all processes that are started after it looked at a
    configuration: engines of later modules would compute with a thread for each core.
    """
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="session")
def tiny_model_path() -> Path:
    """Folder of the tiny random model."""
    return tiny_model(default_cache_dir())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed and (collect := item.stash.get(LOGS, None)):
        report.sections.extend(collect())
    return report
