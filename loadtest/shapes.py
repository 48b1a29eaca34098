"""Courses of the number of users over a test."""

from __future__ import annotations

import math

SHAPES = ("ramp", "steps", "spike", "soak")
STEPS = 5
SPIKE_HEIGHT = 10
SPIKE_SECONDS = 2.0
SOAK_RISE = 0.05  # of the time


def shape_users(shape: str, at: float, seconds: float, most: int) -> int | None:
    """Users `at` seconds into a shape of so many; None when it is over. ramp: from 1 to `most`. steps: five equal ones.
    spike: `most`, and ten times that for two seconds in the middle. soak: `most` after a short rise."""
    if at >= seconds:
        return None
    if shape == "ramp":
        return max(1, math.ceil(most * at / seconds))
    if shape == "steps":
        return math.ceil(most * (int(at / seconds * STEPS) + 1) / STEPS)
    if shape == "spike":
        return most * SPIKE_HEIGHT if abs(at - seconds / 2) <= SPIKE_SECONDS / 2 else most
    if shape == "soak":
        return max(1, min(most, math.ceil(most * at / seconds / SOAK_RISE)))
    raise ValueError(f"no shape {shape!r}; there are {', '.join(SHAPES)}")
