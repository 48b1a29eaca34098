"""The committed code is what the .proto files generate, and the files pass their linter."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(part) for part in command], cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_generated_code_is_up_to_date() -> None:
    result = run(sys.executable, "proto/generate.py", "--check")
    assert result.returncode == 0, result.stderr


def test_check_notices_a_difference(tmp_path: Path) -> None:
    """In a copy with a changed .proto file and the old code."""
    import shutil

    copy = tmp_path / "proto"
    shutil.copytree(ROOT / "proto", copy)
    path = copy / "octavo/v1/capacity.proto"
    path.write_text(path.read_text().replace("message CacheCleared {}", "message CacheCleared {bool all = 1;}"))
    result = run(sys.executable, copy / "generate.py", "--check")
    assert result.returncode == 1
    assert "capacity_pb2.py " in result.stderr
    assert "tokenization_pb2.py " not in result.stderr


def test_buf_lint() -> None:
    result = run(Path(sys.executable).parent / "buf", "lint")
    assert result.returncode == 0, result.stdout


def test_package_is_found_from_the_root_without_a_path() -> None:
    code = "import service; from octavo.v1 import generation_pb2; print(generation_pb2.GenerateRequest.__name__)"
    result = run(sys.executable, "-c", code)
    assert result.stdout.strip() == "GenerateRequest", result.stderr
