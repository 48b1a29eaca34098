"""With how many rows a decode step runs: a captured graph has a fixed number."""

from __future__ import annotations

from collections.abc import Callable

from engine.schedule.composition import is_of_prompt
from engine.schedule.plan import StepPlan


def decode_buckets(max_num_seqs: int) -> list[int]:
    """Batch sizes that get a graph: fine where a step is short, coarse above; the last is `max_num_seqs` itself."""
    sizes = {1, 2, 4, 8, max_num_seqs}
    sizes |= set(range(16, min(max_num_seqs, 64) + 1, 8))
    sizes |= set(range(80, min(max_num_seqs, 256) + 1, 16))
    sizes |= set(range(288, max_num_seqs + 1, 32))
    return sorted(size for size in sizes if size <= max_num_seqs)


class MixedBuckets:
    """For steps as they come. A step is padded to a bucket if a graph can run it: if every token of it is drawn
    from."""

    def __init__(self, sizes: list[int]) -> None:
        """sizes: ascending."""
        self.sizes = sizes

    def serving(self, plan: StepPlan) -> int | None:
        """The bucket that runs this step; None: it runs as it is."""
        if not all(entry.count == 1 and entry.samples for entry in plan.scheduled):
            return None
        return next((size for size in self.sizes if size >= len(plan.scheduled)), None)


class InvariantBuckets:
    """For SeparateSteps: every token behind a prompt runs in a bucket, and every bucket gives a row the same bits;
    prompts never do, even a chunk of one token."""

    def __init__(self, max_num_seqs: int, same_bits: Callable[[int, int], bool]) -> None:
        """same_bits(m, n): whether decode steps of m rows and of n rows give a row the same bits."""
        self.sizes = [size for size in decode_buckets(max_num_seqs) if same_bits(size, max_num_seqs)]

    def serving(self, plan: StepPlan) -> int | None:
        """The bucket that runs this step; None: it runs as it is."""
        if is_of_prompt(plan.scheduled[0]):
            return None
        return next(size for size in self.sizes if size >= len(plan.scheduled))
