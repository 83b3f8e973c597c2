"""All tests, in half the time: those on real engines beside the others, which mostly wait.

`python -m tools.run_tests [pytest's arguments]`. The others run at a lower priority, since
end-to-end tests have deadlines, and are printed when all is done. With `-m` among the arguments
pytest's own choice counts, and one run does it all.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

NICE = 10
NO_TESTS = 5
"""pytest's exit status when none was chosen."""


def main(arguments: list[str]) -> int:
    """Runs pytest once or twice; its exit status, the worse of two."""
    pytest = [sys.executable, "-m", "pytest"]
    if any(a == "-m" or a.startswith("-m=") for a in arguments):
        return subprocess.run([*pytest, *arguments], check=False).returncode
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "others.log")
        with log.open("wb") as out:
            others = subprocess.Popen(
                [*pytest, "-m", "not engine", "-o", "cache_dir=.pytest_cache/others", *arguments],
                stdout=out,
                stderr=subprocess.STDOUT,
                preexec_fn=lambda: os.nice(NICE),
            )
        try:
            engines = subprocess.run([*pytest, "-m", "engine", *arguments], check=False).returncode
            status = others.wait()
        finally:
            if others.poll() is None:
                others.terminate()
                others.wait()
            print("\n== beside them, the tests without engines", flush=True)
            sys.stdout.buffer.write(log.read_bytes())
            sys.stdout.flush()
    statuses = {engines, status} - {NO_TESTS}
    return max(statuses, default=NO_TESTS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
