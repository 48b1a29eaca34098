"""Which tokens grammars let come: work of the host, while the device is at the forward pass."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
from numpy.typing import NDArray

from engine.schedule.plan import ScheduledSequence
from engine.schedule.sequence import Constraint

Mask = NDArray[np.int32]

_MASKS_A_THREAD = 8  # fewer are computed sooner than handed over
_MAX_THREADS = 8


def grammar_masks(entries: Sequence[ScheduledSequence]) -> list[Mask | None]:
    """A mask [words] for each entry, as `Constraint.mask` gives it; None for those without a grammar. The output of
    every entry must be known."""
    masks: list[Mask | None] = [None] * len(entries)
    bound: list[int] = []
    constraints: list[Constraint] = []
    for index, entry in enumerate(entries):
        if entry.sequence.constraint is not None:
            bound.append(index)
            constraints.append(entry.sequence.constraint)
    outputs = [entries[index].known_tokens()[entries[index].sequence.num_prompt :] for index in bound]
    for index, mask in zip(bound, _side_by_side(constraints, outputs), strict=True):
        masks[index] = mask
    return masks


def _side_by_side(constraints: Sequence[Constraint], outputs: Sequence[Sequence[int]]) -> list[Mask]:
    threads = min(_MAX_THREADS, os.cpu_count() or 1, len(constraints) // _MASKS_A_THREAD)
    if threads < 2:
        return _masks(constraints, outputs)
    parts = [slice(len(constraints) * i // threads, len(constraints) * (i + 1) // threads) for i in range(threads)]
    # A grammar's matcher lets go of the interpreter's lock while it works.
    done = _pool().map(_masks, (constraints[part] for part in parts), (outputs[part] for part in parts))
    return [mask for part in done for mask in part]


def _masks(constraints: Sequence[Constraint], outputs: Sequence[Sequence[int]]) -> list[Mask]:
    return [constraint.mask(output) for constraint, output in zip(constraints, outputs, strict=True)]


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_MAX_THREADS, thread_name_prefix="octavo-mask")
