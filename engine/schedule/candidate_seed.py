"""The seed of each candidate of a request."""

from __future__ import annotations

_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MASK = 2**64 - 1


def candidate_seed(seed: int, candidate: int) -> int:
    """64 bits: the request's own seed for candidate 0, for a later one the candidate-th output of SplitMix64 started
    from it. Requests whose seeds follow one another so have no candidate in common."""
    if candidate == 0:
        return seed
    mixed = (seed + candidate * _GOLDEN) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * _FIRST) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * _SECOND) & _MASK
    return mixed ^ (mixed >> 31)
