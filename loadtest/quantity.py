"""Quantities in words: three significant digits, with a unit."""

from __future__ import annotations

import math

from loadtest.judgements import Distribution, Interval, Quantile
from loadtest.plots.figure import Format

NONE = "–"


def number(value: float | None, digits: int = 3) -> str:
    if value is None:
        return NONE
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    places = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{places}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def seconds(value: float | None) -> str:
    if value is None:
        return NONE
    if value == 0:
        return "0 s"
    for limit, factor, unit in ((1e-3, 1e6, "µs"), (1.0, 1e3, "ms")):
        if abs(value) < limit * 0.9995:
            return f"{number(value * factor)} {unit}"
    return f"{number(value)} s"


def share(value: float | None) -> str:
    return NONE if value is None else f"{number(value * 100)} %"


def size(value: float | None) -> str:
    """Bytes, in powers of 1024."""
    if value is None:
        return NONE
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if abs(value) >= 1024**power:
            return f"{number(value / 1024**power)} {unit}"
    return f"{number(value)} B"


def quantile(found: Quantile | None) -> str:
    """Seconds; a censored one says that it is a lower bound."""
    if found is None:
        return NONE
    return ("≥ " if found.censored else "") + seconds(found.value)


def quantile_of(found: Distribution | None, name: str) -> str:
    """`name`: p50, p90, p95, p99 or mean."""
    return NONE if found is None else quantile(getattr(found, name))


def interval(found: Interval | None, unit: str = "requests/s") -> str:
    """Both ends to the digits that tell them apart."""
    if found is None:
        return NONE
    digits = 3 if found.width >= 0.01 else 4
    return f"{number(found.low, digits)} to {number(found.high, digits)} {unit}".rstrip()


def moment(iso: str) -> str:
    """A UTC time of ISO 8601."""
    return iso.replace("T", " ").replace("+00:00", " UTC").replace("Z", " UTC")


def by_format(value: float | None, kind: Format) -> str:
    formats = {Format.SECONDS: seconds, Format.SHARE: share, Format.BYTES: size, Format.NUMBER: number}
    return formats[kind](value)
