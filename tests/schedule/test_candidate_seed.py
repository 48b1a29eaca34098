"""Candidates' seeds: the request's own first, the others apart from those of any request with a seed nearby."""

from __future__ import annotations

from engine.schedule.candidate_seed import candidate_seed


def test_the_first_candidate_has_the_requests_seed() -> None:
    assert [candidate_seed(seed, 0) for seed in (0, 7, 2**64 - 1)] == [0, 7, 2**64 - 1]


def test_later_ones_are_the_published_splitmix64_sequence() -> None:
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert [candidate_seed(1234567, candidate) for candidate in range(1, 5)] == expected


def test_no_two_candidates_of_seeds_in_a_row_are_the_same() -> None:
    seeds = [*range(500), *range(2**64 - 500, 2**64)]
    assert len({candidate_seed(seed, candidate) for seed in seeds for candidate in range(16)}) == 16 * len(seeds)
