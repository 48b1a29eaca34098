"""Lets a machine that lacks some packages run what it can (`make gpu-test`), and say what it left out."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

OURS = {"engine", "service", "loadtest", "octavo", "tests"}
left_out: dict[str, str] = {}


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With OCTAVO_TESTS_PARTIAL set, test files whose third-party imports are not installed are not collected."""
    if not os.environ.get("OCTAVO_TESTS_PARTIAL") or not collection_path.name.startswith("test_"):
        return None
    missing = _missing_package(collection_path)
    if missing is None:
        return None
    left_out[str(collection_path.relative_to(config.rootpath))] = missing
    return True


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for path, package in left_out.items():
        terminalreporter.write_line(f"LEFT OUT {path}: {package} is not installed")


def _missing_package(path: Path) -> str | None:
    spec = importlib.util.spec_from_file_location(f"_probe_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    try:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        return None if package in OURS else package
    return None
