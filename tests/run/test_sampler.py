"""Sampling: each row as if alone, filters as in transformers, noise from a counter."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import (
    LogitsProcessor,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from engine.run.sampler import SamplingTensors, logprobs_of, outcome_of, sample_into, sampling_arrays
from engine.schedule.plan import ScheduledSequence, StepOutcome
from engine.schedule.sequence import RequestGroup, Sequence
from engine.types import GenerationRequest, SamplingParameters
from tests.run.philox import gumbel, philox_words


def entry(parameters: SamplingParameters, seed: int = 0, length: int = 5, top: int | None = None) -> ScheduledSequence:
    request = GenerationRequest("r", list(range(1, length + 1)), parameters, top_logprobs=top)
    group = RequestGroup(request, 0, 0.0)
    sequence = Sequence(group, 0, seed, list(request.prompt_token_ids), 100)
    return ScheduledSequence(sequence, 0, 0, length, True)


def sample(logits: torch.Tensor, entries: list[ScheduledSequence], vocab_size: int) -> StepOutcome:
    """As the runners do it."""
    arrays = sampling_arrays(entries, len(entries))
    tokens = torch.empty(len(entries), dtype=torch.int32)
    view = logits[:, :vocab_size]
    sample_into(tokens, view, SamplingTensors(*(torch.from_numpy(array) for array in arrays.all())))
    return outcome_of(tokens.tolist(), logprobs_of(view, tokens, entries))


def draw(logits: torch.Tensor, parameters: SamplingParameters, seed: int = 0, length: int = 5) -> int:
    return sample(logits[None], [entry(parameters, seed, length)], logits.numel()).token_ids[0]


def draw_many(logits: torch.Tensor, parameters: SamplingParameters, count: int) -> np.ndarray:
    """How often each token comes, over `count` seeds."""
    entries = [entry(parameters, seed) for seed in range(count)]
    tokens = sample(logits.repeat(count, 1), entries, logits.numel()).token_ids
    return np.bincount(tokens, minlength=logits.numel())


def chi_squared(counts: np.ndarray, probabilities: np.ndarray) -> tuple[float, int]:
    """Statistic and degrees of freedom, classes of fewer than five expected draws put together."""
    expected = probabilities * counts.sum()
    rare = expected < 5
    observed = [*counts[~rare], counts[rare].sum()]
    wanted = [*expected[~rare], expected[rare].sum()]
    pairs = [(o, e) for o, e in zip(observed, wanted, strict=True) if e > 0]
    return sum((o - e) ** 2 / e for o, e in pairs), len(pairs) - 1


def test_philox_known_answers() -> None:
    """From the test vectors that the algorithm's authors publish with Random123 (philox4x32, 10 rounds)."""
    assert [hex(word) for word in philox_words(0, 0, 4)] == ["0x6627e8d5", "0xe169c58d", "0xbc57ac4c", "0x9b00dbd8"]


def test_noise_is_a_function_of_seed_position_and_token() -> None:
    assert np.array_equal(gumbel(7, 3, 1000)[:10], gumbel(7, 3, 10))
    assert not np.array_equal(gumbel(7, 3, 10), gumbel(7, 4, 10))
    assert not np.array_equal(gumbel(7, 3, 10), gumbel(8, 3, 10))
    assert not np.array_equal(gumbel(7, 3, 10), gumbel(7 + 2**32, 3, 10))
    noise = gumbel(1, 1, 200_000)
    assert np.isfinite(noise).all()
    assert abs(noise.mean() - 0.5772) < 0.02
    assert abs(noise.std() - math.pi / math.sqrt(6)) < 0.02


def test_greedy_takes_the_lowest_id_of_equal_logits() -> None:
    logits = torch.tensor([0.0, 3.0, 1.0, 3.0])
    for temperature in (0.0, 1e-9, 1e-6):
        assert draw(logits, SamplingParameters(temperature=temperature)) == 1


@pytest.mark.parametrize("temperature", [1e-4, 1.0, 1e4])
def test_extreme_temperatures_stay_in_range(temperature: float) -> None:
    logits = torch.randn(100, generator=torch.Generator().manual_seed(0)) * 10
    token = draw(logits, SamplingParameters(temperature=temperature))
    assert 0 <= token < 100
    if temperature < 1e-3:
        assert token == int(logits.argmax())


@pytest.mark.parametrize(
    ("parameters", "warpers"),
    [
        (SamplingParameters(), []),
        (SamplingParameters(temperature=0.7), [TemperatureLogitsWarper(0.7)]),
        (SamplingParameters(top_k=7), [TopKLogitsWarper(7)]),
        (SamplingParameters(top_k=1), [TopKLogitsWarper(1)]),
        (SamplingParameters(top_p=0.6), [TopPLogitsWarper(0.6)]),
        (SamplingParameters(top_p=1e-12), [TopPLogitsWarper(1e-12)]),
        (SamplingParameters(top_p=0.9999999), [TopPLogitsWarper(0.9999999)]),
        (SamplingParameters(min_p=0.05), [MinPLogitsWarper(0.05)]),
        (
            SamplingParameters(temperature=1.4, top_k=30, top_p=0.9, min_p=0.02),
            [TemperatureLogitsWarper(1.4), TopKLogitsWarper(30), TopPLogitsWarper(0.9), MinPLogitsWarper(0.02)],
        ),
    ],
)
def test_draws_follow_what_transformers_would_sample_from(
    parameters: SamplingParameters, warpers: list[LogitsProcessor]
) -> None:
    """Nothing outside the kept set, and inside it the renormalised softmax, by a chi-squared test at 0.1 %."""
    for seed in range(3):
        logits = torch.randn(60, generator=torch.Generator().manual_seed(seed)) * 2
        scores = logits[None].clone()
        for warper in warpers:
            scores = warper(torch.zeros(1, 1, dtype=torch.long), scores)
        probabilities = torch.softmax(scores[0].double(), dim=0).numpy()
        counts = draw_many(logits, parameters, 1500)
        assert not counts[probabilities == 0].any()
        statistic, freedom = chi_squared(counts, probabilities)
        # Wilson and Hilferty's approximation of the 99.9 % quantile.
        limit = freedom * (1 - 2 / (9 * max(freedom, 1)) + 3.09 * math.sqrt(2 / (9 * max(freedom, 1)))) ** 3
        assert statistic <= max(limit, 1e-9)


@pytest.mark.parametrize("top_p", [0.0, 1e-12, 0.5, 0.9999999, 1.0])
def test_top_p_over_a_large_uniform_vocabulary(top_p: float) -> None:
    """Equals stay together, so all are kept; of one that is a little likelier the smallest keep nothing else."""
    logits = torch.zeros(151_936)
    for seed in range(3):
        assert draw(logits, SamplingParameters(top_p=top_p), seed) == draw(logits, SamplingParameters(), seed)
    logits[7] = 0.5
    for seed in range(3):
        free = draw(logits, SamplingParameters(), seed)
        assert free != 7
        assert draw(logits, SamplingParameters(top_p=top_p), seed) == (free if top_p >= 0.5 else 7)


def test_a_batch_of_mixed_rows_equals_each_row_alone() -> None:
    generator = torch.Generator().manual_seed(1)
    rows = [
        SamplingParameters(temperature=0.0),
        SamplingParameters(temperature=1.0, top_k=5),
        SamplingParameters(temperature=0.7, top_p=0.8),
        SamplingParameters(temperature=1.3, min_p=0.1),
        SamplingParameters(temperature=1.0, top_k=10**9),
        SamplingParameters(temperature=1.0),
    ]
    logits = torch.randn(len(rows), 300, generator=generator) * 4
    entries = [entry(parameters, seed=index, length=index + 1) for index, parameters in enumerate(rows)]
    together = sample(logits, entries, 300).token_ids
    alone = [sample(logits[i : i + 1], [entries[i]], 300).token_ids[0] for i in range(len(rows))]
    back = sample(logits.flip(0), entries[::-1], 300).token_ids[::-1]
    assert together == alone == back


def test_non_finite_logits_fail_their_row_alone() -> None:
    logits = torch.zeros(3, 10)
    logits[1, 4] = float("nan")
    logits[0, 2] = 5.0
    outcome = sample(logits, [entry(SamplingParameters(temperature=0.0))] * 3, 10)
    assert list(outcome.failures) == [1]
    assert outcome.token_ids[0] == 2


def test_ids_of_a_padded_vocabulary_are_never_drawn() -> None:
    logits = torch.zeros(1, 20)
    logits[0, 12:] = 1000.0
    for temperature in (0.0, 1.0):
        token = sample(logits, [entry(SamplingParameters(temperature=temperature))], 12).token_ids[0]
        assert token < 12


def test_log_probabilities_are_of_the_models_own_distribution() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 0.0]])
    parameters = SamplingParameters(temperature=0.0)
    logprob = sample(logits, [entry(parameters, top=2)], 4).logprobs[0]
    assert logprob is not None
    values = torch.log_softmax(logits[0], dim=0)
    assert (logprob.token_id, logprob.rank) == (1, 1)
    assert logprob.logprob == pytest.approx(float(values[1]), abs=1e-6)
    assert [token for token, _ in logprob.top] == [1, 2]
    assert sample(logits, [entry(parameters, top=0)], 4).logprobs[0] == logprob.__class__(1, logprob.logprob, 1, [])
    assert sample(logits, [entry(parameters)], 4).logprobs == []


def test_row_by_row_a_rows_scores_are_those_of_the_row_alone() -> None:
    """To the bit, with as many alternatives as the row asked for; rows that asked for none stay without."""
    logits = 3 * torch.randn(5, 1003, generator=torch.Generator().manual_seed(1))
    tokens = torch.tensor([4, 700, 1002, 0, 31], dtype=torch.int32)
    entries = [entry(SamplingParameters(), top=top) for top in (2, None, 0, 5, 2)]
    together = logprobs_of(logits, tokens, entries, row_by_row=True)
    assert together is not None
    found, plain = together.read(tokens.tolist()), logprobs_of(logits, tokens, entries)
    assert plain is not None
    assert found == plain.read(tokens.tolist())
    assert found[1] is None
    for row in (0, 2, 3, 4):
        one = logprobs_of(logits[row : row + 1], tokens[row : row + 1], [entries[row]], row_by_row=True)
        assert one is not None
        assert one.read([int(tokens[row])]) == [found[row]]
    assert logprobs_of(logits, tokens, [entry(SamplingParameters())] * 5, row_by_row=True) is None
