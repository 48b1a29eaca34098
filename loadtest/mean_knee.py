"""The knee of a machine that is never twice equally fast.

Cores of a virtual machine differ by some per cent from one window to the next, and the bracket of verdicts is of the
windows that happened to lie at its ends; what another run is to be compared with is the mean. Each window near the knee
is a look at it: one that falls behind tells what the service could serve just then, one that keeps up that it could
serve 98 % of what arrived, or more. That is a censored sample of a log-normal rate (Tobin, Econometrica 26, 1958). The
95 % interval of its mean is of the posterior with flat priors of both logarithms, which without censored values is
Student's interval.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from loadtest.classify import KEEPS_UP, edge_luck
from loadtest.judgements import MeanKnee, Window

Floats = NDArray[np.float64]

BELOW, ABOVE = 0.85, 1.25  # times what is served: windows farther away tell nothing, or of how an overload is borne
LOWEST = 3  # windows that fall behind, by whose median "near" is meant
TYPICAL = 60.0  # seconds of the window that `scatter` is of; shorter ones scatter more, as means of white noise do
SPAN, POINTS = 0.25, 1001  # of the mean's logarithm, around the median
SCATTERS = np.geomspace(0.003, 0.12, 40)
_Z = np.linspace(-9.0, 9.0, 3601)
_LOG_TAIL = np.log([0.5 * math.erfc(z / math.sqrt(2)) for z in _Z])  # of the normal distribution, above z


def mean_knee(windows: Sequence[Window]) -> MeanKnee | None:
    """windows: of open loops that count. None unless of those near the knee some keep up and some do not."""
    windows = [window for window in windows if window.arrivals and window.completed]
    behind = sorted((window for window in windows if window.share < KEEPS_UP), key=lambda window: window.rate)
    if not behind:
        return None
    about = statistics.median(window.served for window in behind[:LOWEST])
    near = [window for window in windows if BELOW * about <= window.rate <= ABOVE * about]
    behind = [window for window in near if window.share < KEEPS_UP]
    if not behind or len(behind) == len(near):
        return None
    mean = math.log(statistics.median(window.served for window in behind)) + np.linspace(-SPAN, SPAN, POINTS)
    likelihood = sum((_log_likelihood(window, mean) for window in near), np.zeros((POINTS, len(SCATTERS))))
    weights = np.exp(likelihood - likelihood.max())
    below = np.cumsum(weights.sum(axis=1)) / weights.sum()
    low, middle, high = (math.exp(np.interp(share, below, mean)) for share in (0.025, 0.5, 0.975))
    scatter = math.exp(float(weights.sum(axis=0) @ np.log(SCATTERS) / weights.sum()))
    # A short queue that a burst overflows costs a window near the knee up to what keeping up allows.
    return MeanKnee(low=low, high=high / KEEPS_UP, served=middle, scatter=scatter, windows=len(near))


def _log_likelihood(window: Window, mean: Floats) -> Floats:
    """Of every mean (rows) and scatter (columns)."""
    sigma = np.hypot(SCATTERS * math.sqrt(TYPICAL / window.seconds), edge_luck(window) / 2)
    keeps = window.share >= KEEPS_UP
    told = KEEPS_UP * window.arrivals / window.seconds if keeps else window.served
    z = (math.log(told) - mean[:, None]) / sigma
    return np.interp(z, _Z, _LOG_TAIL) if keeps else -z * z / 2 - np.log(sigma)
