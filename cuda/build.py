"""Builds the extension into engine/ with plain cmake and ninja, from what this Python has: no package registry."""

from __future__ import annotations

import argparse
import fcntl
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def tool(name: str) -> str:
    """The tool beside this Python (as pip installs it), else the one on PATH."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise SystemExit(f"{name} is not installed: pip install {name}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build", default=f"build/editable-{sys.implementation.cache_tag}", help="build folder")
    parser.add_argument("--cuda", choices=["AUTO", "ON", "OFF"], default="AUTO")
    parser.add_argument("--architectures", default="", help='e.g. "90a;120"; empty: the GPU present')
    parser.add_argument("--sanitize", default="", help="e.g. address,undefined")
    parser.add_argument("--quiet", action="store_true", help="say nothing if all goes well")
    parser.add_argument("--jobs", type=int, default=0, help="0: all cores")
    arguments = parser.parse_args()
    build = ROOT / arguments.build
    configured = (build / "CMakeCache.txt").exists()
    configure = [
        *[tool("cmake"), "-S", str(ROOT), "-B", str(build), "-G", "Ninja"],
        f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}",
        f"-DPython_EXECUTABLE={sys.executable}",
        "-DOCTAVO_IN_PLACE=ON",
        f"-DOCTAVO_CUDA={arguments.cuda}",
        f"-DOCTAVO_CUDA_ARCHITECTURES={arguments.architectures}",
        f"-DOCTAVO_SANITIZE={arguments.sanitize}",
    ]
    compile_ = [tool("cmake"), "--build", str(build), *([f"-j{arguments.jobs}"] if arguments.jobs else [])]
    build.mkdir(parents=True, exist_ok=True)
    with open(build / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two builds in one folder would tear each other's files
        run(configure, quiet=configured or arguments.quiet)
        run(compile_, quiet=arguments.quiet)


def run(command: list[str], *, quiet: bool) -> None:
    """Runs to the end; on failure shows what was said and ends this program."""
    result = subprocess.run(command, stdout=subprocess.PIPE if quiet else None, stderr=subprocess.STDOUT, text=True)
    if result.returncode != 0:
        raise SystemExit((result.stdout or "") + "the build failed")


if __name__ == "__main__":
    main()
