"""The data of a chart as CSV: a line for each point."""

from __future__ import annotations

import csv
import io

from loadtest.plots.figure import Figure, Panel, Scale, Series

COLUMNS = ("panel", "series", "x", "y", "low", "high", "lower_bound", "class", "label")


def csv_of(figure: Figure) -> str:
    """Header lines name the axes of each panel, after `#`."""
    file = io.StringIO()
    file.write(f"# {figure.title}\n")
    for panel in figure.panels:
        file.write(f"# {panel.title or 'panel'}: x is {panel.x.title}, y is {panel.y.title}; base units\n")
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(COLUMNS)
    for panel in figure.panels:
        for series in panel.series:
            writer.writerows(_points(panel, series))
        for cell in panel.cells:
            x, y = panel.x.categories[cell.x], panel.y.categories[cell.y]
            value = "" if cell.value is None else repr(cell.value)
            writer.writerow((panel.title, y, x, value, "", "", "", cell.level_class or "", cell.note))
    return file.getvalue()


def _points(panel: Panel, series: Series) -> list[tuple[str, ...]]:
    return [
        (
            panel.title,
            series.name,
            panel.x.categories[int(series.x[index])] if panel.x.scale is Scale.CATEGORY else repr(series.x[index]),
            "" if value is None else repr(value),
            _at(series.low, index),
            _at(series.high, index),
            "yes" if series.censored and series.censored[index] else "",
            str(series.classes[index]) if series.classes else "",
            series.labels[index] if series.labels else "",
        )
        for index, value in enumerate(series.y)
    ]


def _at(values: list[float | None], index: int) -> str:
    return "" if not values or values[index] is None else repr(values[index])
