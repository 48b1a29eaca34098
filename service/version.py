"""This product's version: the source tree's where it runs from one, else that of what is installed."""

from __future__ import annotations

import tomllib
from importlib import metadata
from pathlib import Path

PROJECT_FILE = Path(__file__).resolve().parent.parent / "pyproject.toml"


def version() -> str:
    if PROJECT_FILE.is_file():
        return str(tomllib.loads(PROJECT_FILE.read_text(encoding="utf-8"))["project"]["version"])
    return metadata.version("octavo")
