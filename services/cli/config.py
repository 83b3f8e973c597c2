"""Where the command line keeps things, and all that it takes from the environment."""

import os
from collections.abc import Mapping
from pathlib import Path

DEFAULT_STATE_DIR = Path(".forebay")
"""State of a cluster (addresses, logs, etcd's data), relative to the working directory."""


def home(environ: Mapping[str, str] | None = None) -> Path:
    """Forebay's cache: $FOREBAY_HOME, else $XDG_CACHE_HOME/forebay, else ~/.cache/forebay."""
    env = os.environ if environ is None else environ
    if chosen := env.get("FOREBAY_HOME"):
        return Path(chosen).expanduser().absolute()
    base = env.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache").absolute() / "forebay"


def child_environment(
    extra: Mapping[str, str], environ: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The environment of a child: ours and `extra`; `extra` wins.

    Variables that only steer this command line (FOREBAY_UP_*) are not handed on, nor etcd's own,
    which would turn into settings of the etcd that we start.
    """
    env = os.environ if environ is None else environ
    kept = {k: v for k, v in env.items() if not k.startswith(("FOREBAY_UP_", "ETCD_"))}
    return {**kept, **extra}


def is_set(name: str) -> bool:
    """Whether the user has set an environment variable (for defaults that must not override it)."""
    return name in os.environ


def api_key() -> str:
    """The key that our own requests to a gateway carry: $FOREBAY_API_KEY; empty for none."""
    return os.environ.get("FOREBAY_API_KEY", "")
