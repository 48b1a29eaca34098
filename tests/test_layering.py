"""Who may include whom in the C++ code. Python's layers are import-linter's business (pyproject.toml)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

CUDA = Path(__file__).resolve().parents[1] / "cuda"
SUFFIXES = {".h", ".cpp", ".cu", ".cuh"}

# Folder -> includes that are not for it.
FORBIDDEN = {
    "include": r"cuda|nanobind|torch|Python\.h|cpu/|gpu/|host/|python/",
    "host": r"cuda|nanobind|torch|Python\.h|cpu/|gpu/|python/",
    "cpu": r"cuda|nanobind|torch|Python\.h|gpu/|python/",
    "gpu": r"nanobind|torch|Python\.h|cpu/|host/|python/",
    "python": r"cuda|torch|cpu/|gpu/|host/",
}


def includes(source: Path) -> list[str]:
    return re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', source.read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize("folder", FORBIDDEN)
def test_a_folder_includes_only_what_is_below_it(folder: str) -> None:
    sources = [path for path in sorted((CUDA / folder).rglob("*")) if path.suffix in SUFFIXES]
    assert sources
    wrong = [
        f"{path.relative_to(CUDA)}: {name}"
        for path in sources
        for name in includes(path)
        if re.match(FORBIDDEN[folder], name)
    ]
    assert not wrong


def test_no_folder_shadows_a_python_package() -> None:
    """`cuda` is NVIDIA's Python package too: ours must never look like one, nor like its parts."""
    assert not (CUDA / "__init__.py").exists()
    assert not {"bindings", "core", "pathfinder"} & {path.name for path in CUDA.iterdir()}
