"""Counter-based random numbers: a token's noise depends on (seed, position, token id) and on nothing else.

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011). key = the 64-bit seed, low word
first; counter = (token id // 4, position, 0, 0); word `token id % 4` of the output belongs to the token.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)


def philox_words(seed: int, position: int, count: int) -> NDArray[np.uint32]:
    """The first `count` 32-bit words of (seed, position), one a token id."""
    groups = -(-count // 4)
    c0 = np.arange(groups, dtype=np.uint64)
    c1 = np.full(groups, position, dtype=np.uint64)
    c2 = np.zeros(groups, dtype=np.uint64)
    c3 = np.zeros(groups, dtype=np.uint64)
    k0, k1 = seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF
    for _ in range(10):
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (p1 >> _SHIFT) ^ c1 ^ np.uint64(k0),
            p1 & _MASK,
            (p0 >> _SHIFT) ^ c3 ^ np.uint64(k1),
            p0 & _MASK,
        )
        k0, k1 = (k0 + _WEYL[0]) & 0xFFFFFFFF, (k1 + _WEYL[1]) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3], axis=1).reshape(-1)[:count].astype(np.uint32)


def gumbel(seed: int, position: int, count: int) -> NDArray[np.float32]:
    """Standard Gumbel noise, one a token id: -log(-log(u)) with u = (word // 256 + 0.5) / 2^24, in (0, 1)."""
    words = philox_words(seed, position, count)
    uniform = ((words >> np.uint32(8)).astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-24)
    noise: NDArray[np.float32] = -np.log(-np.log(uniform))
    return noise
