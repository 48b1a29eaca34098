"""Behind the last layer's K and V a prompt's step computes the rows that it scores, and no others."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from engine.config import EngineConfig
from engine.model.batch import ForwardBatch
from engine.model.decoder import Decoder
from engine.model.layers import Linear
from engine.model.loader import load_model
from tests.model.tiny import write_tiny_model

LENGTHS = [5, 1, 9]
TOKENS = sum(LENGTHS)


@pytest.fixture(scope="module", params=["qwen2", "llama"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    biases = {"attention_bias": True, "mlp_bias": True} if request.param == "llama" else {}
    path = write_tiny_model(tmp_path_factory.mktemp(request.param), request.param, **biases)
    return load_model(EngineConfig(model=str(path)), torch.device("cpu")).decoder


def batch_of(model: Decoder, rows: list[int], **changed: object) -> ForwardBatch:
    """Three new prompts in a block each, of a pool of NaN."""
    spec, shape = model.spec, torch.tensor(LENGTHS, dtype=torch.int32)
    positions = torch.cat([torch.arange(length) for length in LENGTHS]).int()
    blocks = torch.arange(len(LENGTHS)).repeat_interleave(shape.long())
    batch = ForwardBatch(
        token_ids=torch.arange(7, 7 + TOKENS, dtype=torch.int32),
        positions=positions,
        slots=16 * blocks + positions,
        block_tables=torch.arange(len(LENGTHS), dtype=torch.int32)[:, None],
        query_start=torch.cat([torch.zeros(1), shape.cumsum(0)]).int(),
        context_lens=shape,
        max_query_len=max(LENGTHS),
        logits_rows=torch.tensor(rows, dtype=torch.int64),
        kv_pool=torch.full((3, spec.num_layers, 2, spec.kv_heads, 16, spec.head_dim), float("nan")),
    )
    return dataclasses.replace(batch, **changed)  # type: ignore[arg-type]


@pytest.mark.parametrize("rows", [[4, 5, 14], [14, 0], []], ids=str)
def test_the_same_bits_as_of_all_rows(model: Decoder, rows: list[int]) -> None:
    every = batch_of(model, list(range(TOKENS)))
    expected = model.forward(every).clone()
    some = batch_of(model, rows)
    assert torch.equal(model.forward(some), expected[rows])
    assert some.kv_pool.nan_to_num().equal(every.kv_pool.nan_to_num())
    assert torch.equal(some.kv_pool.isnan(), every.kv_pool.isnan())


def test_only_scored_rows_are_multiplied_there(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    multiplied: list[int] = []
    call = Linear.__call__

    def noted(
        self: Linear, x: torch.Tensor, out: torch.Tensor, *, own: bool = False, pdl: bool = False
    ) -> torch.Tensor:
        multiplied.append(x.shape[0])
        return call(self, x, out, own=own, pdl=pdl)

    monkeypatch.setattr(Linear, "__call__", noted)
    for rows, behind in (([4, 14], [2, 2, 2]), ([], [])):
        multiplied.clear()
        model.forward(batch_of(model, rows))
        assert multiplied == [TOKENS] * (4 * (model.spec.num_layers - 1) + 1) + behind


def test_hidden_states_of_other_rows_are_kept_on_request(model: Decoder) -> None:
    expected = model.forward(batch_of(model, list(range(TOKENS)))).clone()
    kept = model.forward(batch_of(model, [14], keeps_hidden=True))
    assert torch.equal(kept, expected[14:])
    assert torch.equal(model.hidden(0, TOKENS), expected)
    model.forward(batch_of(model, [14]))
    with pytest.raises(ValueError, match="scored rows"):
        model.hidden(0, TOKENS)
