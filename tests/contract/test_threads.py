"""A preloaded OpenMP library computes with as many threads as the settings of the worker say."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.engine  # torch brings the library

WORKER = """
import ctypes, sys
from services.common import lifecycle
from services.worker import __main__ as worker

lifecycle.run = lambda _: ctypes.CDLL("libgomp.so.1").omp_get_max_threads()
sys.exit(worker.main())
"""


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("told", [{}, {"OMP_NUM_THREADS": "2"}])
def test_preloaded_openmp_has_the_threads_of_the_settings(
    threads: int, told: dict[str, str]
) -> None:
    torch = find_spec("torch")
    assert torch is not None and torch.origin
    library = str(Path(torch.origin).parent / "lib" / "libgomp.so.1")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("OMP_")}
    ran = subprocess.run(
        [sys.executable, "-c", WORKER, "--model=m", f"--threads={threads}"],
        env=environment | told | {"LD_PRELOAD": library},
        timeout=50,
        check=False,
    )
    assert ran.returncode == threads
