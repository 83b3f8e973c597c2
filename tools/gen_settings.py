"""Writes docs/SETTINGS.md from the settings classes; `--check` only says if it is current."""

import argparse
import sys
from pathlib import Path

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from services.common.settings import ServiceSettings
from services.gateway.config import GatewaySettings
from services.kvbm.config import KvbmSettings
from services.planner.config import PlannerSettings
from services.router.config import RouterSettings
from services.worker.config import WorkerSettings

OUT = Path(__file__).resolve().parent.parent / "docs" / "SETTINGS.md"

HEAD = """# Settings

Generated from the settings classes by `make settings`; not edited.

Each service is one process: `python -m services.<service> --flag value`. A setting comes from its
flag, else from its variable, else from the TOML file that `FOREBAY_CONFIG` names (a table for each
service and `[shared]` for all), else it has its default. A wrong value stops the start
with a message that names the setting. Lists are written with commas between.

`forebay up` has options of its own (`forebay up --help`) and hands on the variables and the file.
"""


def default(field: FieldInfo) -> str:
    """A default as a user would write it."""
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return "required"
    if value is None or value in ("", (), {}):
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{','.join(value) if isinstance(value, tuple) else value}`"


def table(title: str, prefix: str, fields: dict[str, FieldInfo]) -> str:
    """One service's settings."""
    lines = [f"\n## {title}\n", "| flag | variable | default | |", "|---|---|---|---|"]
    for name, field in fields.items():
        text = " ".join((field.description or "").split()).replace("|", "\\|")
        flag = "--" + name.replace("_", "-")
        lines.append(f"| `{flag}` | `{prefix}{name.upper()}` | {default(field)} | {text} |")
    return "\n".join(lines) + "\n"


def render() -> str:
    """The whole document."""
    shared = ServiceSettings.model_fields
    parts = [HEAD, table("Shared by all services", "FOREBAY_", shared)]
    for cls in (GatewaySettings, RouterSettings, WorkerSettings, KvbmSettings, PlannerSettings):
        own = {
            name: field
            for name, field in cls.model_fields.items()
            if name not in shared or field.default != shared[name].default
        }
        title = f"{cls.service.capitalize()} (table `[{cls.service}]`)"
        parts.append(table(title, str(cls.model_config["env_prefix"]), own))
    return "".join(parts)


def main() -> int:
    """Writes the document, or with `--check` compares it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail when stale")
    check: bool = parser.parse_args().check
    text = render()
    if check:
        current = OUT.exists() and OUT.read_text() == text
        if not current:
            print("docs/SETTINGS.md is not current; run `make settings`", file=sys.stderr)
        return 0 if current else 1
    OUT.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
