"""Lets a machine that lacks some packages run what it can (`make gpu-test`), and say what it left out. And after every
test, whatever it was about, engines without work hold nothing."""

from __future__ import annotations

import importlib.util
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

OURS = {"engine", "service", "loadtest", "octavo", "tests"}
left_out: dict[str, str] = {}
engines: weakref.WeakSet[Any] = weakref.WeakSet()  # of this thread; a client's own thread may be at work at any time


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


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Before any fixture makes an engine. A run of tests that need none loads no torch for this."""
    module = sys.modules.get("engine.engine")
    if module is not None and not hasattr(module.Engine.__init__, "follows"):
        module.Engine.__init__ = _following(module.Engine.__init__)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    yield
    for engine in list(engines):
        if not engine.has_work:
            engine.scheduler.check_idle()


def _following(init: Callable[..., None]) -> Callable[..., None]:
    def init_and_follow(engine: Any, *arguments: Any, **options: Any) -> None:
        init(engine, *arguments, **options)
        if threading.current_thread() is threading.main_thread():
            engines.add(engine)

    init_and_follow.follows = True  # type: ignore[attr-defined]
    return init_and_follow


def _missing_package(path: Path) -> str | None:
    spec = importlib.util.spec_from_file_location(f"_probe_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # where dataclasses look for themselves
    try:
        spec.loader.exec_module(module)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        return None if package in OURS else package
    finally:
        del sys.modules[spec.name]
    return None
