"""Python's garbage collector in processes that serve."""

from __future__ import annotations

import gc


def keep_loaded() -> None:
    """What was loaded until now stays and is not looked at again: a full collection over all modules holds up every
    request for the better part of a tenth of a second."""
    gc.collect()
    gc.freeze()
