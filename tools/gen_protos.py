"""Generates services/gen from protos/; `--check` only says whether it is current."""

import argparse
import filecmp
import shutil
import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"
GEN = ROOT / "services" / "gen"


def generate(out: Path) -> None:
    """Writes all modules and stubs below `out`, each package with an `__init__.py`."""
    sources = sorted(str(p.relative_to(PROTOS)) for p in PROTOS.rglob("*.proto"))
    include = Path(protoc.__file__).parent / "_proto"
    bin = Path(sys.executable).parent
    code = protoc.main(
        [
            "protoc",
            f"-I{PROTOS}",
            f"-I{include}",
            f"--plugin=protoc-gen-mypy={bin / 'protoc-gen-mypy'}",
            f"--plugin=protoc-gen-mypy_grpc={bin / 'protoc-gen-mypy_grpc'}",
            f"--python_out={out}",
            f"--mypy_out=quiet:{out}",
            f"--grpc_python_out={out}",
            f"--mypy_grpc_out=quiet:{out}",
            *sources,
        ]
    )
    if code:
        raise SystemExit(code)
    for directory in {p.parent for p in out.rglob("*.py")}:
        while directory != out:
            (directory / "__init__.py").touch()
            directory = directory.parent


def files(root: Path) -> dict[str, Path]:
    """Generated files below `root` by relative name, caches left out."""
    return {
        str(p.relative_to(root)): p
        for p in root.rglob("*")
        if p.is_file() and "__pycache__" not in p.parts
    }


def main() -> int:
    """Writes the code, or with `--check` compares it and lists what differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="change nothing; fail when the committed code is stale"
    )
    check: bool = parser.parse_args().check
    with tempfile.TemporaryDirectory() as scratch:
        fresh = Path(scratch)
        generate(fresh)
        if check:
            new, old = files(fresh), files(GEN)
            stale = sorted(
                n
                for n in new.keys() | old.keys()
                if not (n in new and n in old and filecmp.cmp(new[n], old[n], False))
            )
            for name in stale:
                print(
                    f"services/gen/{name} is not what protos/ gives; run `make protos`",
                    file=sys.stderr,
                )
            return 1 if stale else 0
        shutil.rmtree(GEN, ignore_errors=True)
        shutil.copytree(fresh, GEN)
        GEN.chmod(0o755)  # the scratch folder was for us alone
    return 0


if __name__ == "__main__":
    sys.exit(main())
