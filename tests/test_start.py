"""What an engine refuses to start with: from its configuration alone before anything is read, and damaged weights."""

from __future__ import annotations

import asyncio
import re
import struct
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch
import typer

from engine.config import EngineConfig, LoadFormat, PreemptionMode, check_config
from engine.engine import Engine
from engine.errors import ConfigurationError
from engine.model.buffers import buffer_bytes
from engine.types import GenerationRequest, StopCriteria
from service.__main__ import app
from service.__main__ import serve as octavo_serve
from service.config import ServiceConfig
from service.serve import flag_of, serve, with_flags
from tests.model.tiny import write_tiny_model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("start") / "m", "llama")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"kv_cache_tokens": 15}, "--kv-cache-tokens 15 is less than one block of 16"),
        (
            {"kv_cache_tokens": 2 * 10**9},
            r"a KV cache of 2000000000 tokens \(.* GiB\) cannot be allocated: lower --kv-cache-tokens",
        ),
        ({"swap_space_gib": 1e6}, r"--swap-space-gib 1e\+06 is more than this host can hold"),
        ({"swap_space_gib": float("nan")}, "--swap-space-gib must be a number of at least 0, not nan$"),
        ({"swap_space_gib": float("inf")}, "--swap-space-gib must be a number of at least 0, not inf$"),
        ({"swap_space_gib": 1e-6}, "--swap-space-gib 1e-06 is less than one block of 8192 bytes$"),
        ({"preemption_mode": PreemptionMode.SWAP}, "--preemption-mode swap needs host memory: set --swap-space-gib$"),
        ({"max_model_len": 100_000}, "--max-model-len 100000 is not in 1"),
        ({"block_size": 24}, "--block-size must be a power of two of at most 256, not 24"),
        ({"block_size": 100_000}, "--block-size must be a power of two of at most 256, not 100000"),
        ({"gpu_memory_utilization": 0.0}, r"--gpu-memory-utilization must be in \(0, 1\], not 0\.0"),
        ({"num_threads": 10**6}, "--num-threads 1000000: "),
        ({"seed": 2**64}, "--seed must be within 0 to 18446744073709551615, not 18446744073709551616$"),
        ({"seed": -1}, "--seed must be within 0 to 18446744073709551615, not -1$"),
        (
            {"load_format": LoadFormat.GGUF},
            r"--load-format gguf reads a \.gguf file, and .*/m is a directory: give auto",
        ),
        (
            {"model": "demo", "load_format": LoadFormat.SAFETENSORS},
            r"--load-format safetensors reads a directory, and .* is a \.gguf file: give auto or gguf$",
        ),
        ({"dtype": "float16"}, "not supported on cpu: --dtype float16"),
        ({"dtype": "int7"}, "--dtype 'int7' is unknown"),
        ({"max_queued_tokens": 10**20}, "--max-queued-tokens must be at most 2147483647, not 100000000000000000000"),
        (
            {"max_num_seqs": 10**9},
            r"steps of --max-num-batched-tokens 256 and --max-num-seqs 1000000000 need .* GiB of activations",
        ),
        (
            {"max_num_batched_tokens": 2 * 10**9},
            "steps of --max-num-batched-tokens 2000000000 and --max-num-seqs 64 need ",
        ),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_loaded(tiny: Path, options: dict[str, Any], problem: str) -> None:
    lines: list[str] = []
    with pytest.raises(ConfigurationError) as caught:
        Engine(EngineConfig(**{"model": str(tiny), "num_threads": 1, **options}), lines.append)
    assert re.match(problem, with_flags(caught.value))
    assert lines == []


def test_the_service_says_so_in_one_line(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = EngineConfig(model=str(tiny), num_threads=1, kv_cache_tokens=15)
    assert asyncio.run(serve(config, ServiceConfig(port=0), in_process_engine=True)) == 2
    assert capsys.readouterr().err == "octavo: --kv-cache-tokens 15 is less than one block of 16\n"


def test_a_model_without_weights_is_told_how_to_be_served(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "m", "llama")
    (path / "model.safetensors").unlink()
    with pytest.raises(ConfigurationError) as caught:
        Engine(EngineConfig(model=str(path), num_threads=1))
    problem = "no model.safetensors and no model.safetensors.index.json; --load-format dummy needs no weights"
    assert with_flags(caught.value) == f"--model {path}: {problem}"


def test_weights_that_are_no_numbers_are_not_served(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "broken", "llama")
    [weights] = path.glob("*.safetensors")
    content = weights.read_bytes()
    begin = 8 + struct.unpack("<Q", content[:8])[0]
    weights.write_bytes(content[:begin] + b"\xff" * (len(content) - begin))
    with pytest.raises(
        ConfigurationError, match=r"^broken: the model gave non-finite logits: its weights are damaged$"
    ):
        Engine(EngineConfig(model=str(path), num_threads=1))


@pytest.mark.parametrize("options", [{}, {"batch_invariant": True}, {"swap_space_gib": 0.001, "block_size": 1}])
def test_the_check_of_the_outputs_leaves_no_trace(tiny: Path, options: dict[str, Any]) -> None:
    engine = Engine(EngineConfig(model=str(tiny), num_threads=1, kv_cache_tokens=64, **options))
    engine.scheduler.check_idle()
    stats = engine.stats
    assert (stats.step, stats.prompt_tokens, stats.generated_tokens, stats.finished_requests) == (0, 0, 0, 0)
    assert (stats.free_blocks, stats.cached_blocks) == (engine.info.num_blocks, 0)
    [result] = engine.generate([GenerationRequest("a", [0, 5], stop=StopCriteria(max_tokens=3, ignore_eos=True))])
    assert len(result.token_ids) == 3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_steps_memory_is_what_was_foreseen(tiny: Path, dtype: str) -> None:
    decoder = Engine(EngineConfig(model=str(tiny), num_threads=1, kv_cache_tokens=64, dtype=dtype)).model.decoder
    claimed = {value.data_ptr(): value.nbytes for value in vars(decoder._buffers).values() if torch.is_tensor(value)}
    assert sum(claimed.values()) == buffer_bytes(decoder.spec, decoder.max_tokens, decoder.max_logits, decoder.dtype)


def test_flags_and_checks_have_the_same_bounds() -> None:
    seen = set()
    for name, hint in get_type_hints(octavo_serve, include_extras=True).items():
        least = next((option.min for option in getattr(hint, "__metadata__", ())), None)
        if name not in EngineConfig.__struct_fields__ or not isinstance(least, int) or least < 1:
            continue
        seen.add(name)
        check_config(EngineConfig(**{"block_size": 1, name: least}))
        with pytest.raises(ConfigurationError, match=f"^{name} must be at least {least}, not {least - 1}$"):
            check_config(EngineConfig(**{"block_size": 1, name: least - 1}))
    assert {"max_queued_requests", "max_queued_tokens", "max_model_len", "block_size", "kv_cache_tokens"} <= seen


def test_errors_name_the_flags_of_the_settings_that_they_speak_of() -> None:
    spoken = ConfigurationError("block_size 8: lower max_model_len", "block_size", "max_model_len")
    assert with_flags(spoken) == "--block-size 8: lower --max-model-len"
    again = ConfigurationError("model /a/model: no model in it", "model")
    assert with_flags(again) == "--model /a/model: no model in it"
    other = ConfigurationError("/models/max_num_seqs/m: no such model directory")
    assert with_flags(other) == "/models/max_num_seqs/m: no such model directory"


def test_every_setting_of_the_engine_has_its_flag() -> None:
    parameters = typer.main.get_command(app).commands["serve"].params  # type: ignore[attr-defined]
    flags = {parameter.name: parameter.opts[0] for parameter in parameters}
    for setting in EngineConfig.__struct_fields__:
        assert flags[setting] == flag_of(setting)
