"""Which steps run in a bucket, and in which."""

from __future__ import annotations

from engine.run.buckets import InvariantBuckets, MixedBuckets, decode_buckets
from engine.schedule.plan import ScheduledSequence, StepPlan
from engine.schedule.sequence import RequestGroup, Sequence
from tests.schedule.fake_model import request


def plan_of(*pieces: tuple[int, int, bool]) -> StepPlan:
    """Pieces (start, count, samples) of sequences with a prompt of four tokens."""
    scheduled = [
        ScheduledSequence(Sequence(RequestGroup(request(str(row), [1] * 4), row, 0.0), 0, 0, [1] * 8, 20), row, *piece)
        for row, piece in enumerate(pieces)
    ]
    return StepPlan(1, scheduled, [entry for entry in scheduled if entry.samples])


def test_mixed_steps_are_padded_where_all_is_drawn_from() -> None:
    buckets = MixedBuckets([1, 4])
    assert buckets.serving(plan_of((7, 1, True))) == 1
    assert buckets.serving(plan_of(*[(7, 1, True)] * 3)) == 4
    assert buckets.serving(plan_of((7, 1, True), (3, 1, True))) == 4  # the last piece of a prompt
    assert buckets.serving(plan_of(*[(7, 1, True)] * 5)) is None
    assert buckets.serving(plan_of((7, 1, True), (2, 1, False))) is None
    assert buckets.serving(plan_of((7, 1, True), (0, 3, False))) is None
    assert MixedBuckets([]).serving(plan_of((7, 1, True))) is None


def test_invariant_steps_are_padded_behind_prompts_only() -> None:
    """To the largest size, but for those that give the same bits."""
    buckets = InvariantBuckets(80, lambda rows, most: rows == most)
    assert buckets.sizes == [80]
    assert buckets.serving(plan_of((7, 1, True))) == 80
    assert buckets.serving(plan_of((7, 1, True), (4, 1, False), (5, 1, False))) == 80
    assert buckets.serving(plan_of((3, 1, True))) is None
    assert buckets.serving(plan_of((2, 1, False))) is None
    assert buckets.serving(plan_of((0, 4, True))) is None
    agreeing = InvariantBuckets(64, lambda rows, most: max(rows, most) <= 64)
    assert agreeing.sizes == decode_buckets(64)
    assert agreeing.serving(plan_of(*[(7, 1, True)] * 3)) == 4
