"""A batch-invariant decoder asks every op for what depends on a row alone. The ops of a GPU are stood in for here, the
rest is the CPU's; tests/gpu compares the bits."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import ops
from engine.config import EngineConfig
from engine.errors import ConfigurationError
from engine.model import decode_chain, decoder
from engine.model.batch import ForwardBatch
from engine.model.decode_chain import DecodeChain
from engine.model.decoder import Decoder, LayerWeights
from engine.model.layers import Linear
from engine.model.loader import check_fixed_splits, load_model
from tests.model.tiny import write_tiny_model

CPU = torch.device("cpu")
Calls = list[tuple[str, bool]]  # op, and what `fixed` or `own` said


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("qwen2"), "qwen2")


class RecordingOps:
    """The CPU's ops, with those that only a GPU has written down and left out."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def __getattr__(self, name: str) -> Any:
        if name not in ("plan_attention", "plan_prefill", "decode_attention", "paged_attention"):
            return getattr(ops, name)
        return lambda *_, fixed=False, **__: self._calls.append((name, fixed))


class RecordingLinear:
    def __init__(self, name: str, linear: Linear, calls: Calls) -> None:
        self._name, self._linear, self._calls, self.bias = name, linear, calls, linear.bias

    def __call__(self, x: torch.Tensor, out: torch.Tensor, *, own: bool = False, pdl: bool = False) -> torch.Tensor:
        self._calls.append((self._name, own))
        return self._linear(x, out, pdl=pdl)

    def add(self, x: torch.Tensor, total: torch.Tensor, *, own: bool = False, pdl: bool = False) -> bool:
        self._calls.append((f"{self._name}.add", own))
        return False

    def gate_up(self, x: torch.Tensor, out: torch.Tensor, *, own: bool = False, pdl: bool = False) -> bool:
        self._calls.append((f"{self._name}.gate_up", own))
        return False

    def makes_query_and_kv(self, rows: int, head_dim: int) -> bool:
        return False


def recorded(layer: LayerWeights, calls: Calls) -> LayerWeights:
    names = ("qkv", "o", "gate_up", "down")
    linears: dict[str, Any] = {name: RecordingLinear(name, getattr(layer, name), calls) for name in names}
    return dataclasses.replace(layer, **linears)


def as_on_a_gpu(path: Path, calls: Calls, monkeypatch: pytest.MonkeyPatch, *, batch_invariant: bool) -> Decoder:
    """A decoder of the CPU that takes the paths of a GPU without fused matmuls."""
    made = load_model(EngineConfig(model=str(path), batch_invariant=batch_invariant), CPU).decoder
    monkeypatch.setattr(decoder, "ops", RecordingOps(calls))
    made.device, made._fuses_attention = torch.device("cuda"), True
    weights: Any = made.weights
    layers = [recorded(layer, calls) for layer in weights.layers]
    made.weights = dataclasses.replace(weights, layers=layers, head=RecordingLinear("head", weights.head, calls))
    return made


def batch_of(model: Decoder, lengths: list[int]) -> ForwardBatch:
    """Whole queries of new sequences, all in one block."""
    spec, tokens = model.spec, sum(lengths)
    ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).int()
    return ForwardBatch(
        token_ids=torch.ones(tokens, dtype=torch.int32),
        positions=torch.zeros(tokens, dtype=torch.int32),
        slots=torch.arange(tokens),
        block_tables=torch.zeros(len(lengths), 1, dtype=torch.int32),
        query_start=ends,
        context_lens=torch.tensor(lengths, dtype=torch.int32),
        max_query_len=max(lengths),
        logits_rows=ends[1:].long() - 1,
        kv_pool=torch.zeros(1, spec.num_layers, 2, spec.kv_heads, 16, spec.head_dim),
        workspace=torch.zeros(1, dtype=torch.uint8),
        num_decodes=len(lengths) if max(lengths) == 1 else 0,
    )


PLANS, ATTENTION = {"plan_attention", "plan_prefill"}, {"decode_attention", "paged_attention"}


@pytest.mark.parametrize("batch_invariant", [True, False])
def test_decodes_are_split_by_their_own_lengths_and_multiplied_row_by_row(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, batch_invariant: bool
) -> None:
    calls: Calls = []
    model = as_on_a_gpu(tiny, calls, monkeypatch, batch_invariant=batch_invariant)
    model.scores(batch_of(model, [1, 1, 1]))
    linears = {"qkv", "o", "o.add", "gate_up", "gate_up.gate_up", "down", "down.add", "head"}
    assert {name for name, _ in calls} == {"plan_attention", "decode_attention"} | linears
    assert {said for _, said in calls} == {batch_invariant}


def test_prompts_use_what_is_fastest(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of their chunks is a step of its own, so nothing is left to depend on."""
    calls: Calls = []
    model = as_on_a_gpu(tiny, calls, monkeypatch, batch_invariant=True)
    model.scores(batch_of(model, [5]))
    assert ("plan_prefill", False) in calls
    assert {said for name, said in calls if name not in PLANS | ATTENTION} == {False}


class RecordingDecodeOps:
    """Of the fused decode step, what plans its attention."""

    MAX_BATCH = 64

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def __getattr__(self, name: str) -> Any:
        def call(*_: object, fixed: bool | None = None, **__: object) -> None:
            if fixed is not None:
                self._calls.append((name, fixed))

        return call

    def head_finds_best(self, *_: object) -> bool:
        return False

    class ResidualStream:
        @classmethod
        def allocate(cls, *_: object) -> None:
            return None


class Weightless:
    """What the fused matmuls read of a layer's weights."""

    nbytes = 0

    def __getattr__(self, name: str) -> Any:
        return Weightless()


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> Calls:
    calls: Calls = []
    monkeypatch.setattr(decode_chain, "ops_decode", RecordingDecodeOps(calls))
    return calls


@pytest.mark.parametrize("batch_invariant", [True, False])
def test_the_fused_step_plans_its_attention_likewise(tiny: Path, begun: Calls, batch_invariant: bool) -> None:
    made = load_model(EngineConfig(model=str(tiny), batch_invariant=batch_invariant), CPU).decoder
    layers: Any = [Weightless() for _ in made.weights.layers]
    weights: Any = dataclasses.replace(made.weights, layers=layers, head=Weightless())  # type: ignore[arg-type]
    chain = DecodeChain(made.spec, weights, CPU, torch.bfloat16, fixed=batch_invariant)
    scratch = torch.zeros(3, 1)
    chain.run(batch_of(made, [1, 1, 1]), lambda _, qkv, ahead: qkv, scratch, scratch, scratch)
    assert begun == [("begin", batch_invariant)]


def test_steps_of_different_sizes_agree_only_where_all_of_them_are_fused(tiny: Path) -> None:
    model = load_model(EngineConfig(model=str(tiny), batch_invariant=True), CPU).decoder
    assert model.same_bits(5, 5)
    assert not model.same_bits(5, 8)

    class Chain:
        max_batch = 64

    model._chain = Chain()  # type: ignore[assignment]
    assert model.same_bits(1, 64)
    assert not model.same_bits(64, 65)
    assert model.same_bits(80, 80)


def test_more_sequences_than_attention_keeps_parts_of_are_refused(tiny: Path) -> None:
    spec = load_model(EngineConfig(model=str(tiny)), CPU).spec
    most = ops.MAX_FIXED_PAIRS // spec.kv_heads
    check_fixed_splits(spec, most)
    with pytest.raises(ConfigurationError, match=f"at most {most} sequences of {spec.kv_heads} KV heads"):
        check_fixed_splits(spec, most + 1)
