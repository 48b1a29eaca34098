"""From logits to tokens, bias to draw, against transformers' whole chain of processors and warpers."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from engine.run.logits import redraw
from engine.run.sampler import SamplingTensors, sample_into, sampling_arrays
from engine.schedule.plan import ScheduledSequence, StepPlan
from engine.schedule.sequence import Sequence
from engine.types import SamplingParameters, StopCriteria
from tests.cuda.test_sample import noise
from tests.run.test_logits import VOCABULARY, entry, processors
from tests.run.test_sampler import chi_squared

SEEDS = 24
TOKENS = st.integers(0, VOCABULARY - 1)


class PresenceAndFrequency(LogitsProcessor):
    """Transformers has none: the definition in OpenAI's reference, over the output."""

    def __init__(self, sampling: SamplingParameters, output: list[int]) -> None:
        self._sampling = sampling
        self._counts = Counter(output)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        for token, count in self._counts.items():
            scores[:, token] -= self._sampling.frequency_penalty * count + self._sampling.presence_penalty
        return scores


def transformers_chain(item: ScheduledSequence) -> LogitsProcessorList:
    """What `generate` would apply, in its order, with the one it lacks behind the repetition penalty."""
    sampling, output = item.sequence.group.request.sampling, item.sequence.token_ids[item.sequence.num_prompt :]
    chain = processors(item)
    place = bool(sampling.logit_bias) + (sampling.repetition_penalty != 1.0)
    chain.insert(place, PresenceAndFrequency(sampling, output))
    chain.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k:
        chain.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1.0:
        chain.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        chain.append(MinPLogitsWarper(sampling.min_p))
    return chain


def with_seeds(item: ScheduledSequence, count: int) -> list[ScheduledSequence]:
    """The same sequence so many times, each with a seed of its own."""
    old = item.sequence
    sequences = [Sequence(old.group, 0, seed, list(old.token_ids), 1000) for seed in range(count)]
    return [ScheduledSequence(sequence, slot, item.start, 1, True) for slot, sequence in enumerate(sequences)]


def draw(logits: torch.Tensor, items: list[ScheduledSequence]) -> list[int]:
    """As the runners do it."""
    tokens = torch.empty(len(items), dtype=torch.int32)
    arrays = sampling_arrays(items, len(items)).all()
    sample_into(tokens, logits, SamplingTensors(*(torch.from_numpy(array) for array in arrays)))
    edited = [row for row, item in enumerate(items) if item.sequence.group.edited_tokens]
    redraw(tokens, logits, StepPlan(1, items, items, edited=edited))
    return tokens.tolist()


def filtered(item: ScheduledSequence, logits: torch.Tensor) -> torch.Tensor:
    scores: torch.Tensor = transformers_chain(item)(torch.tensor([item.sequence.token_ids]), logits[None].clone())
    return scores[0]


def assert_draws_equal_transformers(item: ScheduledSequence, logits: torch.Tensor) -> None:
    """Of what transformers leaves, the token with the largest score plus noise; for many seeds, so that a token too
    many or too few is met."""
    scores = filtered(item, logits).numpy()
    items = with_seeds(item, SEEDS)
    position = len(item.sequence.token_ids)
    expected = [int(np.argmax(scores + noise(seed, position, VOCABULARY))) for seed in range(SEEDS)]
    assert draw(logits.repeat(SEEDS, 1), items) == expected


def random_logits(seed: int, scale: float = 4.0) -> torch.Tensor:
    return torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(seed)) * scale


ALONE: list[tuple[dict[str, Any], StopCriteria]] = [
    ({"temperature": 0.4}, StopCriteria()),
    ({"temperature": 2.5}, StopCriteria()),
    ({"top_k": 1}, StopCriteria()),
    ({"top_k": 12}, StopCriteria()),
    ({"top_k": 10**9}, StopCriteria()),
    ({"top_p": 0.05}, StopCriteria()),
    ({"top_p": 0.9}, StopCriteria()),
    ({"min_p": 0.02}, StopCriteria()),
    ({"min_p": 0.5}, StopCriteria()),
    ({"repetition_penalty": 1.7}, StopCriteria()),
    ({"presence_penalty": 1.9}, StopCriteria()),
    ({"frequency_penalty": 1.1}, StopCriteria()),
    ({"logit_bias": {4: 9.0, 80: -3.0}}, StopCriteria()),
    ({"allowed_token_ids": [4, 80, 81, 199]}, StopCriteria()),
    ({"logit_bias": {2: 12.0}}, StopCriteria(min_tokens=6)),
]


@pytest.mark.parametrize(("given_", "stop"), ALONE)
def test_each_parameter_alone(given_: dict[str, Any], stop: StopCriteria) -> None:
    for seed in range(10):
        item = entry([1, 9, 9, 30, 77], [4, 4, 80, 9, 199], SamplingParameters(**given_), stop)
        assert_draws_equal_transformers(item, random_logits(seed))


@settings(deadline=None, max_examples=250)
@given(
    seed=st.integers(0, 10**6),
    scale=st.floats(0.1, 12.0),
    prompt=st.lists(TOKENS, min_size=1, max_size=40),
    output=st.lists(TOKENS, max_size=30),
    temperature=st.floats(0.05, 4.0),
    top_k=st.sampled_from([0, 0, 1, 3, 40, VOCABULARY, 10**9]),
    top_p=st.sampled_from([1.0, 1.0, 0.999, 0.937, 0.613, 0.111, 1e-6]),
    min_p=st.sampled_from([0.0, 0.0, 0.0113, 0.317, 0.9]),
    repetition=st.sampled_from([1.0, 1.0, 0.5, 1.3, 2.2]),
    presence=st.sampled_from([0.0, 0.0, -1.5, 0.7]),
    frequency=st.sampled_from([0.0, 0.0, -0.4, 1.2]),
    bias=st.dictionaries(TOKENS, st.floats(-30.0, 30.0, width=32), max_size=8),
    allowed=st.one_of(st.just([]), st.lists(TOKENS, min_size=8, max_size=60)),
    least=st.sampled_from([0, 0, 50]),
)
def test_any_mixture(
    seed: int,
    scale: float,
    prompt: list[int],
    output: list[int],
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    repetition: float,
    presence: float,
    frequency: float,
    bias: dict[int, float],
    allowed: list[int],
    least: int,
) -> None:
    sampling = SamplingParameters(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
        logit_bias=bias,
        allowed_token_ids=allowed,
    )
    item = entry(prompt, output, sampling, StopCriteria(min_tokens=least, token_ids=[11]))
    if least and allowed and not set(allowed) - item.sequence.group.ending_ids:
        return  # refused before it comes here
    assert_draws_equal_transformers(item, random_logits(seed, scale))


@pytest.mark.parametrize("vocabulary", [2, 5, 17])
def test_frequencies_on_a_small_vocabulary(vocabulary: int) -> None:
    """8,000 draws of a mixture follow what transformers leaves, by a chi-squared test at 0.1 %."""
    draws = 8_000
    sampling = SamplingParameters(
        temperature=1.3,
        top_p=0.97,
        min_p=0.01,
        repetition_penalty=1.2,
        frequency_penalty=0.3,
        logit_bias={1: 0.8},
    )
    item = entry([0, 1], [1, 0, 1], sampling, StopCriteria(ignore_eos=True))
    items = with_seeds(item, draws)
    for seed in range(3):
        logits = torch.randn(vocabulary, generator=torch.Generator().manual_seed(seed)) * 1.5
        probabilities = torch.softmax(filtered(item, logits).double(), dim=0).numpy()
        tokens = draw(logits.repeat(draws, 1), items)
        counts = np.bincount(tokens, minlength=vocabulary)
        assert not counts[probabilities == 0].any()
        statistic, freedom = chi_squared(counts, probabilities)
        # Wilson and Hilferty's approximation of the 99.9 % quantile.
        limit = freedom * (1 - 2 / (9 * freedom) + 3.09 * math.sqrt(2 / (9 * freedom))) ** 3
        assert statistic <= limit
