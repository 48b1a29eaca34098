"""Folders of engines whose processes were killed do not pile up."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from engine.socket_folder import SocketFolder, remove_abandoned
from tests.service.process import ROOT

HOLDS_ONE = """
import sys
from pathlib import Path
from engine.socket_folder import SocketFolder
folder = SocketFolder(Path(sys.argv[1]))
print(folder.path, flush=True)
sys.stdin.read()
"""


def test_what_a_killed_process_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    stranger = tmp_path / "octavo-notes"  # no lock of ours in it
    stranger.mkdir()
    own = SocketFolder(tmp_path)
    command = (sys.executable, "-c", HOLDS_ONE, str(tmp_path))
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        left = Path(process.stdout.readline().strip())
        remove_abandoned(tmp_path)
        assert left.is_dir()
        process.kill()
    assert left.is_dir()
    following = SocketFolder(tmp_path)
    assert not left.exists()
    assert {path.name for path in tmp_path.iterdir()} == {stranger.name, own.path.name, following.path.name}
    own.remove()
    own.remove()
    assert not own.path.exists()
    following.remove()
