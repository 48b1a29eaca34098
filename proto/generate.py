"""Generates the Python code of the .proto files beside them; `--check` only says whether it is up to date.

Run from anywhere: `python proto/generate.py [--check]`. Needs grpcio-tools and mypy-protobuf. Exit code 1: out of date.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent
THIRD_PARTY = ROOT / "third_party"
OUTPUTS = ("python", "grpc_python", "mypy", "mypy_grpc")
PACKAGES = ("octavo", "xds")
GENERATED = ("*_pb2.py", "*_pb2.pyi", "*_pb2_grpc.py", "*_pb2_grpc.pyi")


def sources() -> list[Path]:
    """Ours, and ORCA's: the package that carries ORCA's messages carries OpenTelemetry's too, in a version that breaks
    the exporter's own."""
    return sorted([*(ROOT / "octavo").rglob("*.proto"), *(THIRD_PARTY / "xds").rglob("*.proto")])


def generate(target: Path) -> None:
    """Writes messages, service stubs and their types below `target`. Raises RuntimeError when protoc fails."""
    # protoc looks for its plugins on PATH; this interpreter's environment has them even when it is not activated.
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    well_known = Path(protoc.__file__).parent / "_proto"
    includes = [f"-I{path}" for path in (THIRD_PARTY, ROOT, well_known)]  # the first that holds a file names it
    outputs = [f"--{name}_out={target}" for name in OUTPUTS]
    code = protoc.main(["protoc", *includes, *outputs, *(str(path) for path in sources())])
    if code != 0:
        raise RuntimeError(f"protoc ended with {code}")


def generated_files(root: Path) -> dict[Path, bytes]:
    files = (path for pattern in GENERATED for package in PACKAGES for path in (root / package).rglob(pattern))
    return {path.relative_to(root): path.read_bytes() for path in files}


def differences() -> list[str]:
    """Names of committed files that a fresh run would change, add or drop."""
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        fresh = generated_files(Path(folder))
    committed = generated_files(ROOT)
    return sorted(str(p) for p in fresh.keys() | committed.keys() if fresh.get(p) != committed.get(p))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    if not parser.parse_args().check:
        generate(ROOT)
        return 0
    outdated = differences()
    for name in outdated:
        print(f"out of date: proto/{name} (run `make proto`)", file=sys.stderr)
    return 1 if outdated else 0


if __name__ == "__main__":
    sys.exit(main())
