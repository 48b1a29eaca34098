"""The gRPC service. Importing it makes the generated code of `proto/` importable in a source tree, and keeps the core
of gRPC from writing raw lines to standard error: what goes wrong is told by statuses and by our own log. GRPC_VERBOSITY
and GRPC_ENABLE_FORK_SUPPORT overrule that, as always."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

os.environ.setdefault("GRPC_VERBOSITY", "NONE")
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")  # engines are spawned, never forked

if find_spec("octavo") is None:
    sys.path.append(str(Path(__file__).resolve().parent.parent / "proto"))
