"""How the process ends."""

import subprocess
import sys

SCRIPT = """
import atexit, sys, threading
from services.common import lifecycle
from services.worker import __main__ as worker

def run(main):
    if sys.argv.pop() == "busy":
        forever = threading.Event()
        threading.Thread(target=forever.wait, name="engine", daemon=True).start()
    return 3

lifecycle.run = run
atexit.register(print, "taken down")
sys.argv = ["worker", "--model", "m", sys.argv[-1]]
sys.exit(worker.main())
"""


def end(engine: str) -> tuple[int, str]:
    script = SCRIPT.replace("sys.argv.pop()", repr(engine))
    ran = subprocess.run(
        [sys.executable, "-c", script, "--log-format=json"],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    return ran.returncode, ran.stdout


def test_python_is_not_taken_down_under_an_engine_that_goes_on() -> None:
    assert end("busy") == (3, "")
    assert end("stopped") == (3, "taken down\n")
