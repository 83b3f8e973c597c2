"""Makes the virtual environment, every requirement at its pinned version; at once when current.

Needs Python 3.11 with venv and nothing else. Where packages come from is the business of pip's own
configuration (pip.conf, PIP_*): uv, which installs them, reads none of it and is handed it here.
Not a build tool: it makes one environment and knows three sets of requirements, each a locked file.
"""

import sys

if sys.version_info[:2] != (3, 11):
    sys.exit(
        "setup: Python 3.11 is needed (vLLM's CPU build of torch exists for no other), "
        f"and {sys.executable} is {sys.version.split()[0]}. "
        "Install python3.11 and python3.11-venv, or name one: make PYTHON=/path/to/python3.11"
    )

import argparse
import ast
import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "requirements"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
"""PyTorch's CPU builds, which PyPI lacks. Asked only when pip's configuration leads to none."""

LOCKS = {
    "services": ("lock-services.txt",),
    "cpu": ("lock-cpu.txt",),
    "dev": ("lock-cpu.txt", "lock-dev.txt"),
}
"""Sets of requirements: gateway and router alone; a whole cluster on CPUs; that and test tools."""

SYSTEM_LIBRARIES = {"libnuma.so.1": "libnuma1", "libstdc++.so.6": "libstdc++6"}
"""Shared libraries that vLLM's and torch's wheels don't bring, and Debian's packages of them."""


def say(text: str) -> None:
    """One line of progress."""
    print(f"setup: {text}", flush=True)


def fail(text: str) -> SystemExit:
    """The exception that ends the set-up with a message."""
    return SystemExit(f"setup: {text}")


@dataclass(frozen=True, slots=True)
class PipConfig:
    """What pip's configuration says about where packages come from. Empty: nothing said."""

    values: Mapping[str, tuple[str, ...]]

    @classmethod
    def read(cls, python: Path) -> "PipConfig":
        """Asks the environment's pip. A variable wins over `[install]`, that over `[global]`."""
        out = subprocess.run(
            [python, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
        ).stdout
        levels: dict[str, dict[str, tuple[str, ...]]] = {"global": {}, "install": {}, ":env:": {}}
        for line in out.splitlines():
            name, _, value = line.partition("=")
            section, _, key = name.rpartition(".")
            if section in levels and value:
                levels[section][key] = tuple(str(ast.literal_eval(value)).split())
        return cls({**levels["global"], **levels["install"], **levels[":env:"]})

    def all(self, key: str) -> tuple[str, ...]:
        """All words of a setting."""
        return self.values.get(key, ())

    def one(self, key: str) -> str:
        """A setting of one word, or an empty string."""
        return " ".join(self.all(key))


def reachable(place: str) -> bool:
    """Whether a folder, file:// or http(s) address answers: to uv one that doesn't is fatal."""
    path = place.removeprefix("file://")
    if path.startswith("/"):
        return Path(path).exists()
    if "://" not in place:
        return Path(place).exists()
    try:
        urllib.request.urlopen(urllib.request.Request(place, method="HEAD"), timeout=10).close()
    except urllib.error.HTTPError:
        return True  # it answers; what it offers is for uv to find out
    except (OSError, ValueError):
        return False
    return True


def uv_environment(pip: PipConfig, environ: Mapping[str, str]) -> dict[str, str]:
    """Environment for uv that makes it look where pip would. What UV_* says already stands."""
    env = dict(environ)
    env.setdefault("UV_COMPILE_BYTECODE", "1")  # without it the first `import vllm` takes a minute
    if cert := pip.one("cert"):
        env.setdefault("SSL_CERT_FILE", cert)
    if timeout := pip.one("default-timeout") or pip.one("timeout"):
        env.setdefault("UV_HTTP_TIMEOUT", timeout)
    if proxy := pip.one("proxy"):
        env.setdefault("HTTPS_PROXY", proxy)
    if hosts := pip.all("trusted-host"):
        env.setdefault("UV_INSECURE_HOST", " ".join(hosts))
    if index := pip.one("index-url"):
        env.setdefault("UV_DEFAULT_INDEX", index)
    links = [p for p in pip.all("find-links") if reachable(p)]
    if links:
        env.setdefault("UV_FIND_LINKS", ",".join(links))
    if extra := [u for u in pip.all("extra-index-url") if reachable(u)]:
        env.setdefault("UV_INDEX", " ".join(extra))
        env.setdefault("UV_INDEX_STRATEGY", "unsafe-best-match")  # as pip looks: in all of them
    for place in {*pip.all("find-links"), *pip.all("extra-index-url")} - {*links, *extra}:
        say(f"left out, since it does not answer: {place} (from pip's configuration)")
    return env


Command = list[str | Path]


def run(command: Command, env: Mapping[str, str]) -> bool:
    """Runs a command with its output shown; whether it succeeded."""
    return subprocess.run(command, env=dict(env), check=False, cwd=ROOT).returncode == 0


@dataclass(frozen=True, slots=True)
class Environment:
    """A virtual environment and the stamps in it that say what was installed."""

    path: Path

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.path / "bin" / "python"

    def has(self, file: Path) -> bool:
        """Whether what `file` asks for was installed, in its present wording and in this place."""
        stamp = self.path / "forebay-setup" / file.name
        return stamp.exists() and stamp.read_text() == self._stamp(file)

    def stamp(self, file: Path) -> None:
        """Marks what `file` asks for as installed."""
        stamp = self.path / "forebay-setup" / file.name
        stamp.parent.mkdir(exist_ok=True)
        stamp.write_text(self._stamp(file))

    def _stamp(self, file: Path) -> str:
        return f"{hashlib.sha256(file.read_bytes()).hexdigest()} {self.path}"

    def create(self) -> None:
        """Makes the environment, also in place of one whose interpreter is gone or another's."""
        if self.python.exists():
            probe = "import sys; print(*sys.version_info[:2], sys.prefix)"
            found = subprocess.run([self.python, "-c", probe], capture_output=True, text=True)
            if found.returncode == 0 and found.stdout.split() == ["3", "11", str(self.path)]:
                return
        say(f"making {self.path}")
        made = subprocess.run([sys.executable, "-m", "venv", "--clear", self.path])
        if made.returncode:
            raise fail(
                "python has no venv. On Debian: apt-get install python3.11-venv (or python3-venv)"
            )

    def uv(self) -> Path:
        """The pinned uv, installed by pip when it is not there."""
        pinned = REQUIREMENTS / "uv.txt"
        if not self.has(pinned):
            pip: Command = [
                self.python,
                "-m",
                "pip",
                "install",
                "-q",
                "--disable-pip-version-check",
            ]
            if not run([*pip, "-r", pinned], os.environ):
                raise fail("pip can't install uv (see above): is a package index within reach?")
            self.stamp(pinned)
        return self.path / "bin" / "uv"


def install(venv: Environment, chosen: str, project: bool) -> None:
    """Installs the chosen set of requirements, and this project as an editable package."""
    stale = [p for name in LOCKS[chosen] if not venv.has(p := REQUIREMENTS / name)]
    pyproject = ROOT / "pyproject.toml"
    project = project and not venv.has(pyproject)
    if not stale and not project:
        return
    started = time.monotonic()
    venv.create()
    uv = venv.uv()
    env = uv_environment(PipConfig.read(venv.python), os.environ)
    into: Command = [uv, "pip", "install", "--python", venv.python, "--no-deps"]
    for lock in stale:
        say(f"installing requirements/{lock.name}")
        for line in lock.read_text().splitlines():
            if line.startswith("torch==") and not run([*into, line], env):
                say(f"not found by pip's configuration, so from {TORCH_INDEX}: {line}")
                if not run([*into, "--default-index", TORCH_INDEX, line], env):
                    raise fail(f"{line} can't be had: it is neither where pip looks nor there")
        if not run([*into, "-r", lock], env):
            raise fail(f"uv can't install requirements/{lock.name} (see above)")
        venv.stamp(lock)
    if project:
        if not run([*into, "--no-build-isolation", "-e", ROOT], env):
            raise fail("uv can't install the project itself (see above)")
        venv.stamp(pyproject)
    say(f"done in {time.monotonic() - started:.0f} s")


def system_libraries() -> None:
    """Installs the shared libraries that the wheels need, or names the packages that hold them."""
    missing = []
    for library, package in SYSTEM_LIBRARIES.items():
        try:
            ctypes.CDLL(library)
        except OSError:
            missing.append(package)
    if not missing:
        return
    names = " ".join(missing)
    apt = shutil.which("apt-get")
    if apt and os.geteuid() == 0:
        say(f"installing Debian packages: {names}")
        quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        install = ["install", "-y", "-qq", "--no-install-recommends", *missing]
        if all(
            subprocess.run([apt, *what], env=quiet, stdout=subprocess.DEVNULL).returncode == 0
            for what in (["update", "-qq"], install)
        ):
            return
    raise fail(f"this system lacks shared libraries. On Debian: sudo apt-get install {names}")


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--set", choices=LOCKS, default="dev", help="what to install (default dev)")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="where (default .venv)")
    parser.add_argument("--no-project", action="store_true", help="the requirements alone")
    args = parser.parse_args()
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        raise fail("the locked requirements are for Linux on x86-64")
    if args.set != "services":
        system_libraries()
    install(Environment(args.venv.absolute()), args.set, not args.no_project)
    return 0


if __name__ == "__main__":
    sys.exit(main())
