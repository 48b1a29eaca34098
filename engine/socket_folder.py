"""The folder in which an engine's socket lies, and those that killed processes left behind."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

PREFIX = "octavo-"
LOCK = "owner"


class SocketFolder:
    """A new folder, locked for as long as this process lives: whoever finds its lock free knows that nobody uses it. (A
    process id would say so only among processes that see each other.)"""

    def __init__(self, parent: Path | None = None) -> None:
        """parent: the system's folder for temporary files. What was left there is removed first."""
        parent = parent or Path(tempfile.gettempdir())
        remove_abandoned(parent)
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        # Locked before it has its name: nobody ever sees a lock here that is free while this process lives.
        unnamed = self.path / f"{LOCK}.new"
        self._lock = os.open(unnamed, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        unnamed.rename(self.path / LOCK)

    def remove(self) -> None:
        """Idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def remove_abandoned(parent: Path) -> None:
    """Removes the folders of this user's processes that are gone."""
    for lock in parent.glob(f"{PREFIX}*/{LOCK}"):
        with suppress(OSError):  # somebody else's, or somebody else removes it
            descriptor = os.open(lock, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent, ignore_errors=True)
            finally:
                os.close(descriptor)
