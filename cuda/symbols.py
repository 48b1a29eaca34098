"""Checks that no code built for one instruction set can be linked into the path of another.

Kernels are compiled once for each instruction set. A weak symbol outside that set's own namespace (an inline function
or template instance that was not inlined) could be picked by the linker for everybody, and end in an illegal
instruction on an older CPU. Usage: python cuda/symbols.py BUILD_FOLDER...
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def foreign_symbols(built: Path, instruction_set: str) -> list[str]:
    """Weak and unique symbols of an object file that do not name the set's namespace."""
    listing = subprocess.run(["nm", "-C", "--defined-only", str(built)], capture_output=True, text=True, check=True)
    found = []
    for line in listing.stdout.splitlines():
        _, kind, name = line.split(" ", 2)
        if kind in "WVu" and f"octavo::cpu::{instruction_set}::" not in name:
            found.append(name)
    return found


def main(folders: list[str]) -> int:
    objects = [path for folder in folders for path in Path(folder).glob("CMakeFiles/octavo_kernels_*.dir/**/*.o")]
    if not objects:
        print("no kernel objects found: build first", file=sys.stderr)
        return 1
    faults = 0
    for built in sorted(objects):
        instruction_set = next(p for p in built.parts if p.startswith("octavo_kernels_"))[15:].removesuffix(".dir")
        for name in foreign_symbols(built, instruction_set):
            print(f"{instruction_set}/{built.name}: {name}", file=sys.stderr)
            faults += 1
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
