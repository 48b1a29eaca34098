"""Load tests: maps a running service through its public proto. Importing it makes the generated code of `proto/`
importable in a source tree. It shares no code with the engine or the service."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

os.environ.setdefault("GRPC_VERBOSITY", "NONE")
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")  # nothing here forks with a channel open

if find_spec("octavo") is None:
    sys.path.append(str(Path(__file__).resolve().parent.parent / "proto"))
