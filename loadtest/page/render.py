"""A page as one file: style, script and data inline, nothing fetched."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from loadtest.plots.figure import Cell, Figure, Panel
from loadtest.plots.palette import CLASSES, COLOURS, HEAT, slug
from loadtest.quantity import number, seconds, size

FOLDER = Path(__file__).parent
DARKEST_INK, LIGHTEST_INK = "#1b2330", "#ffffff"


def render(template: str, figures: Sequence[Figure], **context: Any) -> str:
    """figures: all that the page shows; their data becomes its JSON."""
    environment = Environment(
        loader=FileSystemLoader(FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals |= {
        "number": number,
        "seconds": seconds,
        "size": size,
        "slug": slug,
        "grid": grid,
        "palette": palette(),
        "style": (FOLDER / "style.css").read_text(encoding="utf-8"),
        "script": (FOLDER / "chart.js").read_text(encoding="utf-8"),
        "figures": payload(figures),
    }
    return environment.get_template(template).render(**context)


def payload(figures: Sequence[Figure]) -> str:
    """JSON that can stand inside a script element. Six digits are more than any screen shows."""
    text = msgspec.json.encode(_short(msgspec.to_builtins(list(figures)))).decode()
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _short(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, list):
        return [_short(one) for one in value]
    if isinstance(value, dict):
        return {key: _short(one) for key, one in value.items()}
    return value


def palette() -> str:
    """The palette as CSS variables, for light and for dark screens; paper is light."""
    names = [(name, colour) for name, colour in COLOURS.items()]
    names += [(f"class-{slug(level_class)}", colour) for level_class, colour in CLASSES.items()]
    light = " ".join(f"--{name}: {colour.light};" for name, colour in names)
    dark = " ".join(f"--{name}: {colour.dark};" for name, colour in names)
    return f":root {{ {light} }}\n@media screen and (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}"


def grid(panel: Panel) -> list[dict[str, Any]]:
    """Rows of a matrix, with the colours of their cells."""
    cells = {(cell.x, cell.y): cell for cell in panel.cells}
    most = max((cell.value for cell in panel.cells if cell.value), default=1.0)
    least = min((cell.value for cell in panel.cells if cell.value), default=1.0)
    return [
        {
            "name": name,
            "cells": [_cell(cells.get((x, y)), least, most) for x in range(len(panel.x.categories))],
        }
        for y, name in enumerate(panel.y.categories)
    ]


def _cell(cell: Cell | None, least: float, most: float) -> dict[str, str] | None:
    if cell is None:
        return None
    colour = CLASSES[cell.level_class].light if cell.level_class is not None else shade(cell.value, least, most)
    style = f"--cell: {colour}; --cell-ink: {ink(colour)}"
    return {"text": cell.text, "note": cell.note, "style": style}


def shade(value: float | None, least: float, most: float) -> str:
    """A step of the heat scale, by the logarithm of the value."""
    if not value or most <= least:
        return HEAT[0]
    place = math.log(value / least) / math.log(most / least)
    return HEAT[min(len(HEAT) - 1, int(place * len(HEAT)))]


def ink(colour: str) -> str:
    """Text that can be read on it: whichever contrasts more (WCAG)."""
    return max((DARKEST_INK, LIGHTEST_INK), key=lambda text: contrast(text, colour))


def contrast(one: str, other: str) -> float:
    """WCAG's ratio, 1 to 21."""
    low, high = sorted((_luminance(one), _luminance(other)))
    return (high + 0.05) / (low + 0.05)


def _luminance(colour: str) -> float:
    parts = [int(colour[index : index + 2], 16) / 255 for index in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
