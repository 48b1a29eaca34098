"""The gRPC service. Importing it makes the generated code of `proto/` importable in a source tree."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

if find_spec("octavo") is None:
    sys.path.append(str(Path(__file__).resolve().parent.parent / "proto"))
