"""What loading a model takes: no second copy of it, on the way or afterwards."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from engine.model.families import spec_from_config
from engine.model.mapped_file import MappedFile
from engine.model.weight_plan import HUGGING_FACE, head_piece, plan_weights
from tests.model.tiny import tiny_config

# Writes {"peak": bytes, "kept": bytes}: how far the resident memory of a process, pages of the mapped file among it,
# rises while it loads and stays up afterwards. The loader and its libraries are warm; there is no KV pool.
MEASURE = """
import json, sys
import torch
from engine.config import EngineConfig
from engine.model.loader import load_model

def memory(key):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith(key))

def load(path):
    options = dict(model=path, dtype=sys.argv[3], max_num_batched_tokens=16, max_num_seqs=2, max_model_len=32)
    return load_model(EngineConfig(**options), torch.device("cpu"))

load(sys.argv[1])
with open("/proc/self/clear_refs", "w") as reset:
    reset.write("5")
before = memory("VmRSS")
model = load(sys.argv[2])
print(json.dumps({"peak": memory("VmHWM") - before, "kept": memory("VmRSS") - before}))
"""


def write_checkpoint(path: Path, dtype: torch.dtype, layers: int) -> int:
    """A sharded one of large matrices; returns its bytes."""
    shape = {"hidden_size": 768, "intermediate_size": 2048, "num_attention_heads": 12, "num_key_value_heads": 4}
    config = tiny_config("qwen2", **shape, vocab_size=8192, num_hidden_layers=layers).to_dict()
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    spec = spec_from_config(config)
    pieces = [piece for item in plan_weights(spec, HUGGING_FACE) for piece in item.pieces]
    pieces.append(head_piece(spec, HUGGING_FACE))
    weight_map: dict[str, str] = {}
    for shard in range(3):
        tensors = {piece.name: torch.full(piece.shape, 0.01, dtype=dtype) for piece in pieces[shard::3]}
        save_file(tensors, path / f"{shard}.safetensors")
        weight_map |= dict.fromkeys(tensors, f"{shard}.safetensors")
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return sum(file.stat().st_size for file in path.glob("*.safetensors"))


def measure(small: str, model: str, dtype: str) -> dict[str, int]:
    # Left to itself, glibc keeps freed tensors for later ones, half a model and more, or not, as its threads ran.
    given_back = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, "-c", MEASURE, small, model, dtype]
    result = subprocess.run(command, capture_output=True, text=True, check=True, env=given_back)
    figures: dict[str, int] = json.loads(result.stdout.splitlines()[-1])
    return figures


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(("stored", "served"), [(torch.float32, "float32"), (torch.bfloat16, "bfloat16")])
def test_loading_never_holds_a_model_twice(stored: torch.dtype, served: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "small", stored, 1)
    size = write_checkpoint(tmp_path / "model", stored, 5)
    weights = size * (4 if served == "float32" else 2) // stored.itemsize
    figures = measure(str(tmp_path / "small"), str(tmp_path / "model"), served)
    assert 0.9 * weights < figures["kept"] < 1.2 * weights
    assert figures["peak"] < 1.5 * weights


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_demo_model_is_not_held_twice() -> None:
    figures = measure("demo", "demo", "float32")
    assert figures["peak"] < 1.25 * figures["kept"]


def test_what_was_given_back_is_read_again(tmp_path: Path) -> None:
    content = bytes(range(256)) * 64
    (tmp_path / "f").write_bytes(content)
    mapped = MappedFile(tmp_path / "f")
    for start, end in ((0, len(content)), (1, 5000), (4096, 8192), (100, 200), (7, 7)):
        mapped.release(mapped.data[start:end])
        assert mapped.data.tobytes() == content
    (tmp_path / "empty").write_bytes(b"")
    empty = MappedFile(tmp_path / "empty")
    empty.release(empty.data)
    assert len(empty.data) == 0
