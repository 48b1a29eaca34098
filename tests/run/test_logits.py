"""Bias, penalties and masks: as Hugging Face's processors have them, row by row in one batch."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest
import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from engine.errors import EngineError
from engine.run.logits import edit_logits, redraw
from engine.run.sampler import NO_TOKEN, NOT_FINITE, logprobs_of, outcome_of
from engine.schedule.plan import ScheduledSequence, StepPlan
from engine.schedule.sequence import RequestGroup, Sequence, edited_tokens
from engine.types import GenerationRequest, SamplingParameters, StopCriteria

VOCABULARY = 200
EOS = frozenset({2, 5})


def entry(
    prompt: list[int],
    output: list[int],
    sampling: SamplingParameters | None = None,
    stop: StopCriteria | None = None,
    slot: int = 0,
) -> ScheduledSequence:
    request = GenerationRequest("r", prompt, sampling or SamplingParameters(), stop or StopCriteria(), top_logprobs=1)
    group = RequestGroup(request, 0, 0.0, eos_ids=frozenset() if request.stop.ignore_eos else EOS)
    group.stop_ids = frozenset(request.stop.token_ids)
    group.ending_ids = group.eos_ids | group.stop_ids
    group.edited_tokens = edited_tokens(request, group.ending_ids)
    tokens = prompt + output
    sequence = Sequence(group, 0, 3, tokens, 1000)
    return ScheduledSequence(sequence, slot, len(tokens) - 1, 1, True)


def processors(item: ScheduledSequence) -> LogitsProcessorList:
    """What transformers' `generate` would apply, in its order."""
    request = item.sequence.group.request
    sampling, chain = request.sampling, LogitsProcessorList()
    if sampling.logit_bias:
        chain.append(SequenceBiasLogitsProcessor({(token,): bias for token, bias in sampling.logit_bias.items()}))
    if sampling.repetition_penalty != 1.0:
        chain.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    if request.stop.min_tokens:
        ends = sorted(item.sequence.group.ending_ids)
        prompt = len(request.prompt_token_ids)
        chain.append(MinNewTokensLengthLogitsProcessor(prompt, request.stop.min_tokens, ends))
    if sampling.allowed_token_ids:
        chain.append(PrefixConstrainedLogitsProcessor(lambda batch, ids: sampling.allowed_token_ids, 1))
    return chain


def random_tokens(generator: random.Random, most: int) -> list[int]:
    return [generator.randrange(VOCABULARY) for _ in range(generator.randint(1, most))]


def expected(item: ScheduledSequence, logits: torch.Tensor) -> torch.Tensor:
    scores: torch.Tensor = processors(item)(torch.tensor([item.sequence.token_ids]), logits[None].clone())
    return scores[0]


def random_sampling(generator: random.Random) -> SamplingParameters:
    def maybe(value: float, neutral: float) -> float:
        return value if generator.random() < 0.5 else neutral

    biased = generator.sample(range(VOCABULARY), generator.choice([0, 1, 20]))
    return SamplingParameters(
        repetition_penalty=maybe(generator.uniform(0.3, 2.5), 1.0),
        logit_bias={token: generator.uniform(-100, 100) for token in biased},
        allowed_token_ids=generator.sample(range(VOCABULARY), generator.choice([0, 0, 30])),
    )


PARAMETERS = [
    (SamplingParameters(repetition_penalty=1.3), StopCriteria()),
    (SamplingParameters(repetition_penalty=0.6), StopCriteria()),
    (SamplingParameters(logit_bias={0: 100.0, 7: -100.0, 199: 0.5}), StopCriteria()),
    (SamplingParameters(allowed_token_ids=[0, 3, 150, 3]), StopCriteria()),
    (SamplingParameters(), StopCriteria(min_tokens=4)),
    (SamplingParameters(), StopCriteria(min_tokens=9, token_ids=[11, 12])),
    (SamplingParameters(), StopCriteria(min_tokens=9, token_ids=[11], ignore_eos=True)),
    (SamplingParameters(), StopCriteria(min_tokens=5)),
]


@pytest.mark.parametrize(("sampling", "stop"), PARAMETERS)
def test_each_parameter_equals_transformers(sampling: SamplingParameters, stop: StopCriteria) -> None:
    item = entry([1, 9, 9, 30, 77], [4, 4, 80, 9, 2], sampling, stop)
    logits = torch.randn(1, VOCABULARY, generator=torch.Generator().manual_seed(1)) * 5
    edited = logits.clone()
    edit_logits(edited, [item])
    assert torch.equal(edited[0], expected(item, logits[0]))


def test_a_random_batch_of_mixtures_equals_transformers_row_by_row() -> None:
    generator = random.Random(7)
    for trial in range(20):
        items = []
        for _ in range(8):
            stop = StopCriteria(min_tokens=generator.choice([0, 0, 6]), token_ids=random_tokens(generator, 3))
            sampling = random_sampling(generator)
            items.append(entry(random_tokens(generator, 40), random_tokens(generator, 30)[1:], sampling, stop))
        logits = torch.randn(8, VOCABULARY, generator=torch.Generator().manual_seed(trial)) * 5
        edited = logits.clone()
        edit_logits(edited, items)
        for row, item in enumerate(items):
            assert torch.equal(edited[row], expected(item, logits[row]))


def test_presence_and_frequency_count_the_output_alone() -> None:
    sampling = SamplingParameters(presence_penalty=0.7, frequency_penalty=-0.25)
    output = [9, 9, 9, 30, 4]
    logits = torch.randn(1, VOCABULARY, generator=torch.Generator().manual_seed(2))
    edited = logits.clone()
    edit_logits(edited, [entry([1, 4, 4, 50], output, sampling)])
    counts = Counter(output)
    for token in range(VOCABULARY):
        penalty = -0.25 * counts[token] + 0.7 * (counts[token] > 0)
        assert float(edited[0, token]) == pytest.approx(float(logits[0, token]) - penalty, abs=1e-6)


def test_counts_follow_a_growing_sequence() -> None:
    """They are kept between steps; as many steps later they are what a fresh count gives."""
    generator = random.Random(3)
    sampling = SamplingParameters(repetition_penalty=1.5, frequency_penalty=0.5)
    item = entry([4, 5, 6], [], sampling)
    for step in range(30):
        logits = torch.randn(1, VOCABULARY, generator=torch.Generator().manual_seed(step))
        followed, fresh = logits.clone(), logits.clone()
        tokens = item.sequence.token_ids
        now = ScheduledSequence(item.sequence, 0, len(tokens) - 1, 1, True)
        edit_logits(followed, [now])
        edit_logits(fresh, [entry([4, 5, 6], tokens[3:], sampling)])
        assert torch.equal(followed, fresh)
        tokens.append(generator.randrange(20))


def test_a_penalty_never_guesses_at_a_token_that_is_not_known() -> None:
    item = entry([4, 5], [6], SamplingParameters(repetition_penalty=2.0))
    ahead = ScheduledSequence(item.sequence, 0, 3, 1, True)
    with pytest.raises(EngineError, match="still on the device"):
        edit_logits(torch.zeros(1, VOCABULARY), [ahead])


def plan_of(items: list[ScheduledSequence]) -> StepPlan:
    return StepPlan(1, items, items, edited=[i for i, e in enumerate(items) if e.sequence.group.edited_tokens])


def test_only_edited_rows_are_drawn_again() -> None:
    items = [
        entry([1], [3], SamplingParameters(temperature=0.0), slot=4),
        entry([1], [3], SamplingParameters(temperature=0.0, logit_bias={8: 50.0}), slot=2),
        entry([1], [3], SamplingParameters(temperature=0.0, allowed_token_ids=[2]), StopCriteria(min_tokens=5), slot=0),
        entry([1], [3], SamplingParameters(temperature=0.0, logit_bias={8: 50.0}), slot=1),
    ]
    logits = torch.zeros(4, VOCABULARY)
    logits[3, 9] = math.nan
    before = logits.clone()
    tokens = torch.tensor([17, 0, 0, NOT_FINITE], dtype=torch.int32)
    newest = torch.full((6,), 99, dtype=torch.int32)
    redraw(tokens, logits, plan_of(items), newest=newest)
    assert tokens.tolist() == [17, 8, NO_TOKEN, NOT_FINITE]
    assert newest.tolist() == [0, 0, 8, 99, 99, 99]
    assert torch.equal(logits.nan_to_num(5.0), before.nan_to_num(5.0))
    outcome = outcome_of(tokens.tolist(), None)
    assert (set(outcome.failures), outcome.refused) == ({2, 3}, frozenset({2}))


def test_redraw_takes_more_rows_than_it_copies_at_a_time() -> None:
    items = [entry([1], [3], SamplingParameters(temperature=0.0, logit_bias={i: 50.0})) for i in range(70)]
    tokens = torch.zeros(70, dtype=torch.int32)
    redraw(tokens, torch.zeros(70, VOCABULARY), plan_of(items))
    assert tokens.tolist() == list(range(70))


def test_log_probabilities_stay_the_models_own() -> None:
    item = entry([1], [3], SamplingParameters(temperature=0.0, logit_bias={8: 50.0}))
    logits = torch.randn(1, VOCABULARY, generator=torch.Generator().manual_seed(5))
    tokens = torch.zeros(1, dtype=torch.int32)
    redraw(tokens, logits, plan_of([item]))
    found = logprobs_of(logits, tokens, [item])
    assert found is not None
    [logprob] = found.read(tokens.tolist())
    assert logprob is not None
    assert logprob.token_id == 8
    assert logprob.logprob == pytest.approx(float(torch.log_softmax(logits[0], 0)[8]), abs=1e-6)
