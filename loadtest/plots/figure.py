"""What a chart shows, without how it is drawn: one description for the PNG, the CSV and the page.

Values are in base units (seconds, bytes, requests a second, shares of 1); whoever draws formats them.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import msgspec

from loadtest.judgements import LevelClass


class Scale(StrEnum):
    LINEAR = "linear"
    LOG = "log"
    CATEGORY = "category"


class Format(StrEnum):
    NUMBER = "number"
    SECONDS = "seconds"
    SHARE = "share"
    BYTES = "bytes"


class Kind(StrEnum):
    """LINE: through the points. STEP: each value holds until the next x. AREA: steps, filled, stacked on the areas
    before it in its panel. BARS: steps, filled from the axis. POINTS: marks alone."""

    LINE = "line"
    STEP = "step"
    AREA = "area"
    BARS = "bars"
    POINTS = "points"


class Part(msgspec.Struct, frozen=True, omit_defaults=True):
    """Of a figure: immutable, by keyword; values that are their default are not written."""


class Axis(Part, frozen=True, kw_only=True):
    """`categories`: of a category axis, whose positions are 0, 1, ... `low`, `high`: limits; None follows the data."""

    label: str
    unit: str = ""
    scale: Scale = Scale.LINEAR
    format: Format = Format.NUMBER
    low: float | None = None
    high: float | None = None
    categories: list[str] = []

    @property
    def title(self) -> str:
        return f"{self.label} ({self.unit})" if self.unit else self.label


class Series(Part, frozen=True, kw_only=True):
    """`colour`: a name of the palette. `joined`: whether a LINE is drawn through its marks. `low`, `high`: ends of an
    interval around each y. `censored`: the true value is y or more. `classes`: colours each mark by its
    level's class. `labels`: what a reader is told of each point."""

    name: str
    x: list[float]
    y: list[float | None]
    kind: Kind = Kind.LINE
    colour: str = "blue"
    dashed: bool = False
    marks: bool = True
    joined: bool = True
    low: list[float | None] = []
    high: list[float | None] = []
    censored: list[bool] = []
    classes: list[LevelClass] = []
    labels: list[str] = []


class Band(Part, frozen=True, kw_only=True):
    """A stretch of the x axis, shaded."""

    low: float
    high: float
    label: str
    colour: str = "knee"


class Rule(Part, frozen=True, kw_only=True):
    """A line across the panel: at `x`, at `y`, or the diagonal y = x."""

    label: str
    x: float | None = None
    y: float | None = None
    diagonal: bool = False
    colour: str = "red"


class Cell(Part, frozen=True, kw_only=True):
    """Of a matrix, at positions of two category axes. It is coloured by its class, or by `value` on a scale."""

    x: int
    y: int
    text: str
    value: float | None = None
    level_class: LevelClass | None = None
    note: str = ""


class Mark(Part, frozen=True, kw_only=True):
    """Of the strip below a panel: the class found at x."""

    x: float
    level_class: LevelClass
    label: str = ""


class Panel(Part, frozen=True, kw_only=True):
    """`height`: relative to the other panels of its figure. `cells` make it a matrix."""

    x: Axis
    y: Axis
    title: str = ""
    series: list[Series] = []
    bands: list[Band] = []
    rules: list[Rule] = []
    cells: list[Cell] = []
    strip: list[Mark] = []
    height: float = 1.0


class Figure(Part, frozen=True, kw_only=True):
    """`id`: its file name and its address in the page. `title`: what it is. `caption`: how to read it. `finding`: what
    it shows here, in a sentence that also stands in for the picture."""

    id: str
    title: str
    caption: str
    finding: str
    panels: list[Panel]
    wide: bool = False


def drawn(series: Sequence[Series]) -> list[Series]:
    """Those with a value."""
    return [one for one in series if any(value is not None for value in one.y)]
