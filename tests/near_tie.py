"""The only honest comparison of greedy tokens where rounding differs: equal, or first different at a proven
near-tie."""

from __future__ import annotations

from engine.generation_result import GenerationResult

# Two bf16 logits of size 8..16 are 2^-4 apart; a sum of roundings may move each by about one such step.
BF16_GAP = 0.15


def assert_same_or_near_tie(tokens: list[int], reference: GenerationResult, gap: float = BF16_GAP) -> int:
    """`reference` holds log probabilities with at least two alternatives a token. Returns how many tokens agree; raises
    if the first difference is not between two tokens that the reference holds within `gap` of each other."""
    expected = reference.token_ids
    for index, (ours, theirs) in enumerate(zip(tokens, expected, strict=False)):
        if ours == theirs:
            continue
        values = dict(reference.candidates[0].logprobs[index].top)
        if ours not in values:
            raise AssertionError(f"token {index}: {ours} is not among the reference's likeliest {sorted(values)}")
        if values[theirs] - values[ours] > gap:
            raise AssertionError(f"token {index}: {ours} is {values[theirs] - values[ours]:.3f} below {theirs}")
        return index
    assert len(tokens) == len(expected), f"{len(tokens)} tokens instead of {len(expected)}"
    return len(tokens)
