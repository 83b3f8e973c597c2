"""Compiles requirements/lock-*.txt from pyproject.toml; unknown flags go to `uv pip compile`.

Present pins are kept unless `--upgrade` is given. The small sets are compiled under the CPU set's
versions, so that every process of a cluster runs the same ones.
"""

import os
import subprocess
import sys
from pathlib import Path

from tools.setup import REQUIREMENTS, ROOT, Environment, PipConfig, uv_environment

EXTRAS = {"lock-cpu.txt": ["cpu"], "lock-services.txt": [], "lock-dev.txt": ["dev"]}
"""Locked file and the extras of pyproject.toml that it holds beside the base."""


def main() -> int:
    """Compiles each file in turn; the exit status of the first that fails."""
    venv = Environment(ROOT / ".venv")
    env = uv_environment(PipConfig.read(venv.python), os.environ)
    cpu = REQUIREMENTS / "lock-cpu.txt"
    for name, extras in EXTRAS.items():
        out = REQUIREMENTS / name
        command: list[str | Path] = [venv.uv(), "pip", "compile", "pyproject.toml", "-q"]
        command += ["--python", venv.python, "--no-header", "--no-annotate", "-o", out]
        command += ["--override", REQUIREMENTS / "overrides-cpu.txt"]
        for extra in extras:
            command += ["--extra", extra]
        if out != cpu:
            command += ["--constraint", cpu]
        if code := subprocess.run([*command, *sys.argv[1:]], cwd=ROOT, env=env).returncode:
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
