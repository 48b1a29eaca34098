"""The Universal Scalability Law, for the reader and never as the detector."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from loadtest.judgements import UslFit

LEAST_POINTS = 6


def fit(points: Sequence[tuple[int, float]]) -> UslFit | None:
    """points: (requests in flight, requests/s). None below 6 of them, and where no such curve goes through them.

    N / X(N) = (1 + a (N - 1) + b N (N - 1)) / g is linear in 1/g, a/g, b/g: least squares, relative to the values.
    """
    if len(points) < LEAST_POINTS or any(rate <= 0 for _, rate in points):
        return None
    n = np.array([float(count) for count, _ in points])
    y = n / np.array([rate for _, rate in points])
    terms = np.stack([np.ones_like(n), n - 1, n * (n - 1)], axis=1)
    inverse, contention, coherency = _non_negative(terms / y[:, None], np.ones_like(n))
    if inverse <= 0:
        return None
    residual = float(np.max(np.abs(terms @ np.array([inverse, contention, coherency]) / y - 1)))
    a, b = contention / inverse, coherency / inverse
    peak = math.sqrt((1 - a) / b) if b > 0 and a < 1 else None
    return UslFit(rate=1 / inverse, contention=a, coherency=b, residual=residual, points=len(points), peak=peak)


def _non_negative(terms: np.ndarray, target: np.ndarray) -> tuple[float, float, float]:
    """Least squares with no coefficient below 0: the best of all subsets of the columns whose solution is so."""
    best, error = (0.0, 0.0, 0.0), math.inf
    for subset in ((0, 1, 2), (0, 1), (0, 2), (0,)):
        solution, *_ = np.linalg.lstsq(terms[:, subset], target, rcond=None)
        rest = float(np.sum((terms[:, subset] @ solution - target) ** 2))
        if (solution >= 0).all() and rest < error:
            full = [0.0, 0.0, 0.0]
            for column, value in zip(subset, solution, strict=True):
                full[column] = float(value)
            best, error = (full[0], full[1], full[2]), rest
    return best
