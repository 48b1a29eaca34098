"""Colours by name: for paper and light screens, and for dark screens. Told apart by lightness too, not by hue alone."""

from __future__ import annotations

from dataclasses import dataclass

from loadtest.judgements import LevelClass


@dataclass(frozen=True)
class Colour:
    light: str
    dark: str


COLOURS = {
    "blue": Colour("#2563c9", "#7fb0ff"),
    "sky": Colour("#2a9fc9", "#63cdf0"),
    "green": Colour("#117a4b", "#4fcf98"),
    "amber": Colour("#c98a00", "#f2bd45"),
    "orange": Colour("#d9601a", "#ff9d63"),
    "red": Colour("#c62f3b", "#ff7f87"),
    "purple": Colour("#7a4fc0", "#bb9dff"),
    "pink": Colour("#c2478f", "#f58fc8"),
    "grey": Colour("#7b8494", "#929dac"),
    # Quantiles: one hue, the rarer the stronger.
    "p50": Colour("#8db8ee", "#4a74b4"),
    "p95": Colour("#3f82d4", "#7fb0ff"),
    "p99": Colour("#143f85", "#d3e3ff"),
    "knee": Colour("#f1d9a4", "#5a4718"),
}

CLASSES = {
    LevelClass.KEEPS_UP: Colour("#117a4b", "#4fcf98"),
    LevelClass.SATURATED_STABLE: Colour("#d69a00", "#f2bd45"),
    LevelClass.SATURATED_GROWING: Colour("#df6a1d", "#ff9d63"),
    LevelClass.COLLAPSING: Colour("#c62f3b", "#ff6f7a"),
    LevelClass.HUNG: Colour("#7a4fc0", "#bb9dff"),
    LevelClass.CRASHED: Colour("#5e0f18", "#d0525e"),
    LevelClass.RECOVERED: Colour("#2563c9", "#7fb0ff"),
    LevelClass.NOT_RECOVERED: Colour("#8a5a2b", "#d3a06c"),
    LevelClass.CANNOT_TELL: Colour("#4c6d82", "#9dbccd"),
    LevelClass.VOID: Colour("#a3abb8", "#6d7684"),
}

# Shapes besides colours, by their matplotlib names.
SHAPES = {
    LevelClass.KEEPS_UP: "o",
    LevelClass.SATURATED_STABLE: "s",
    LevelClass.SATURATED_GROWING: "^",
    LevelClass.COLLAPSING: "v",
    LevelClass.HUNG: "D",
    LevelClass.CRASHED: "X",
    LevelClass.RECOVERED: "P",
    LevelClass.NOT_RECOVERED: "p",
    LevelClass.CANNOT_TELL: "h",
    LevelClass.VOID: "x",
}

# A scale from little to much, for matrices of values.
HEAT = ("#eef4fb", "#b9d4f1", "#6ea6e0", "#2f6fc0", "#123a7c")


def slug(level_class: LevelClass) -> str:
    """As part of a CSS name."""
    return str(level_class).replace(", ", "-").replace(" ", "-")
