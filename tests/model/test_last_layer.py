"""Of the last layer a prompt's step computes the rows that it scores, and of the others K and V alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine import ops
from engine.config import EngineConfig
from engine.model.batch import ForwardBatch, ScoredRows
from engine.model.decoder import Decoder
from engine.model.layers import Linear
from engine.model.loader import load_model
from engine.run.inputs import scored_arrays
from tests.model.tiny import write_tiny_model

LENGTHS = [5, 1, 9]
CACHED = [0, 3, 6]  # tokens before them, which an earlier step has run
TOKENS = sum(LENGTHS)
LAST_ROWS = [4, 5, 14]


@pytest.fixture(scope="module", params=["qwen2", "qwen3", "llama"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    biases = {"attention_bias": True, "mlp_bias": True} if request.param == "llama" else {}
    path = write_tiny_model(tmp_path_factory.mktemp(request.param), request.param, **biases)
    return load_model(EngineConfig(model=str(path)), torch.device("cpu")).decoder


def batch_of(model: Decoder, rows: list[int], **changed: object) -> ForwardBatch:
    """Chunks of three sequences in a block each."""
    return ForwardBatch(**(step_of(model, LENGTHS, CACHED) | {"logits_rows": torch.tensor(rows)} | changed))


def last_rows_of(model: Decoder, sequences: list[int], **changed: object) -> ForwardBatch:
    """The same, with the last rows of these sequences scored."""
    every = batch_of(model, [])
    arrays = scored_arrays(every.context_lens[sequences].numpy(), every.block_tables[sequences].numpy())
    scored = ScoredRows(*map(torch.from_numpy, arrays.all()))
    return batch_of(model, [LAST_ROWS[sequence] for sequence in sequences], scored=scored, **changed)


def step_of(model: Decoder, lengths: list[int], cached: list[int]) -> dict[str, object]:
    """A pool of NaN, but for what a step before has written."""
    spec, shape = model.spec, torch.tensor(lengths, dtype=torch.int32)
    positions = torch.cat([torch.arange(count) + start for count, start in zip(lengths, cached, strict=True)]).int()
    blocks = torch.arange(len(lengths)).repeat_interleave(shape.long())
    pool = torch.full((len(lengths), spec.num_layers, 2, spec.kv_heads, 16, spec.head_dim), float("nan"))
    if any(cached):
        model.forward(ForwardBatch(**(step_of(model, cached, [0] * len(cached)) | {"kv_pool": pool})))
    return {
        "token_ids": torch.arange(7, 7 + sum(lengths), dtype=torch.int32),
        "positions": positions,
        "slots": 16 * blocks + positions,
        "block_tables": torch.arange(len(lengths), dtype=torch.int32)[:, None],
        "query_start": torch.cat([torch.zeros(1), shape.cumsum(0)]).int(),
        "context_lens": shape + torch.tensor(cached, dtype=torch.int32),
        "max_query_len": max(lengths),
        "logits_rows": None,
        "kv_pool": pool,
    }


@pytest.mark.parametrize("sequences", [[0, 1, 2], [0, 2], [1], []], ids=str)
def test_the_same_bits_as_of_all_rows(model: Decoder, sequences: list[int]) -> None:
    every = batch_of(model, list(range(TOKENS)))
    expected = model.forward(every).clone()
    some = last_rows_of(model, sequences)
    assert torch.equal(model.forward(some), expected[[LAST_ROWS[sequence] for sequence in sequences]])
    assert some.kv_pool.nan_to_num().equal(every.kv_pool.nan_to_num())
    assert torch.equal(some.kv_pool.isnan(), every.kv_pool.isnan())


def test_rows_that_are_not_their_sequences_last_may_be_scored(model: Decoder) -> None:
    expected = model.forward(batch_of(model, list(range(TOKENS)))).clone()
    assert torch.equal(model.forward(batch_of(model, [14, 0])), expected[[14, 0]])


def test_only_scored_rows_are_multiplied_and_attend_there(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    multiplied: list[tuple[int, int]] = []
    attending: list[int] = []
    call, attention = Linear.__call__, ops.paged_attention

    def noted(
        self: Linear, x: torch.Tensor, out: torch.Tensor, *, own: bool = False, pdl: bool = False
    ) -> torch.Tensor:
        multiplied.append((x.shape[0], out.shape[1]))
        return call(self, x, out, own=own, pdl=pdl)

    def noted_attention(out: torch.Tensor, *args: Any, **options: Any) -> None:
        attending.append(out.shape[0])
        attention(out, *args, **options)

    monkeypatch.setattr(Linear, "__call__", noted)
    monkeypatch.setattr(ops, "paged_attention", noted_attention)
    spec = model.spec
    layer = [spec.qkv_size, spec.hidden_size, 2 * spec.intermediate_size, spec.hidden_size]
    before = [(TOKENS, width) for width in layer * (spec.num_layers - 1)] + [(TOKENS, spec.qkv_size - spec.q_size)]
    for sequences in ([0, 2], []):
        batch = last_rows_of(model, sequences)
        multiplied.clear()
        attending.clear()
        model.forward(batch)
        behind = [len(sequences)] if sequences else []
        assert multiplied == before + [(rows, width) for rows in behind for width in layer]
        assert attending == [TOKENS] * (spec.num_layers - 1) + behind
    batch = last_rows_of(model, [0, 2], keeps_hidden=True)
    multiplied.clear()
    model.forward(batch)
    assert multiplied == before + [(TOKENS, width) for width in layer]  # K and V by the same product as before


def test_hidden_states_of_other_rows_are_kept_on_request(model: Decoder) -> None:
    expected = model.forward(batch_of(model, list(range(TOKENS)))).clone()
    kept = model.forward(last_rows_of(model, [2], keeps_hidden=True))
    assert torch.equal(kept, expected[14:])
    assert torch.equal(model.hidden(0, TOKENS), expected)
    model.forward(last_rows_of(model, [2]))
    with pytest.raises(ValueError, match="scored rows"):
        model.hidden(0, TOKENS)
