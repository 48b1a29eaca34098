"""Draws a chart for paper: PNG by matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap, LogNorm, to_rgb
from matplotlib.figure import Figure as Canvas
from matplotlib.image import imsave
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

from loadtest.judgements import LevelClass
from loadtest.plots.figure import Axis, Band, Cell, Figure, Kind, Panel, Scale, Series
from loadtest.plots.palette import CLASSES, COLOURS, HEAT, SHAPES
from loadtest.quantity import by_format

INK, SOFT, GRID = "#1d2430", "#5b6575", "#e3e7ee"
WINDOW = "#e6ecf5"
STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 9.5,
    "axes.edgecolor": "#b8c0cc",
    "axes.labelcolor": SOFT,
    "axes.titlesize": 10,
    "axes.titlecolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "xtick.minor.size": 0,
    "ytick.minor.size": 0,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "legend.labelcolor": INK,
    "text.color": INK,
}
WIDTH, WIDE = 7.6, 10.6  # inches
PANEL = 3.3
DPI = 150


def draw(figure: Figure, path: Path) -> None:
    """Writes a PNG."""
    with mpl.rc_context(STYLE):
        size = (WIDE if figure.wide else WIDTH, _height(figure))
        canvas = Canvas(figsize=size, dpi=DPI, facecolor="white", layout="constrained")
        drawn: Any = FigureCanvasAgg(canvas)  # whose methods have no types
        canvas.suptitle(figure.title, x=0.012, ha="left", fontsize=13, fontweight="bold")
        for axes, panel in zip(_grid(canvas, figure), figure.panels, strict=True):
            (_matrix if panel.cells else _panel)(axes, panel)
        if len(figure.panels) > 2:  # they share their x axis
            for axes in canvas.axes[:-1]:
                axes.set_xlabel("")
        drawn.draw()
        imsave(path, drawn.buffer_rgba(), dpi=DPI)  # savefig would draw twice for the layout


def _grid(canvas: Canvas, figure: Figure) -> list[Axes]:
    """Two panels side by side, more one below the other."""
    if len(figure.panels) == 2:
        return list(canvas.subplots(1, 2))
    rows = canvas.subplots(len(figure.panels), 1, squeeze=False, height_ratios=[p.height for p in figure.panels])
    return list(rows[:, 0])


def _height(figure: Figure) -> float:
    if figure.panels[0].cells:
        return 1.6 + 0.42 * len(figure.panels[0].y.categories)
    if len(figure.panels) < 3:
        return 1.0 + PANEL * max(panel.height for panel in figure.panels)
    return 0.8 + sum(0.45 + 1.5 * panel.height for panel in figure.panels)


def _panel(axes: Axes, panel: Panel) -> None:
    _scales(axes, panel)
    for band in panel.bands:
        axes.axvspan(band.low, band.high, color=_ground(band), linewidth=0, zorder=0, alpha=0.85)
    stack: list[float] = []
    for series in panel.series:
        stack = _series(axes, series, stack)
    _limits(axes, panel)
    _rules(axes, panel)
    _strip(axes, panel)
    _legend(axes, panel)


def _ground(band: Band) -> str:
    return WINDOW if band.colour == "window" else COLOURS[band.colour].light


def _scales(axes: Axes, panel: Panel) -> None:
    for axis, side, setter in ((panel.x, axes.xaxis, axes.set_xscale), (panel.y, axes.yaxis, axes.set_yscale)):
        if axis.scale is Scale.LOG:
            setter("log")
            side.set_minor_formatter(NullFormatter())
        elif axis.scale is Scale.LINEAR:
            side.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
        if axis.scale is Scale.CATEGORY:
            side.set_ticks(range(len(axis.categories)), axis.categories)
        else:
            side.set_major_formatter(FuncFormatter(_tick(axis)))
    axes.set_xlabel(panel.x.title)
    axes.set_ylabel(panel.y.title)
    if panel.strip:
        axes.tick_params(axis="x", pad=14)


def _tick(axis: Axis) -> Any:
    return lambda value, _: by_format(round(value, 12), axis.format)


def _series(axes: Axes, series: Series, stack: list[float]) -> list[float]:
    """Returns the top of the stacked areas so far."""
    colour = COLOURS[series.colour].light
    y = [float("nan") if value is None else value for value in series.y]
    style = "--" if series.dashed else "-"
    if series.kind is Kind.AREA:
        base = stack or [0.0] * len(y)
        top = [low + value for low, value in zip(base, y, strict=True)]
        axes.fill_between(series.x, base, top, step="post", color=colour, alpha=0.75, linewidth=0)
        return top
    if series.kind is Kind.BARS:
        axes.fill_between(series.x, 0, y, step="post", color=colour, alpha=0.22, linewidth=0)
        axes.step(series.x, y, where="post", color=colour, linewidth=1.4)
    elif series.kind is Kind.STEP:
        axes.step(series.x, y, where="post", color=colour, linewidth=1.6)
    elif series.kind is Kind.LINE and series.joined:
        axes.plot(series.x, y, style, color=colour, linewidth=1.8, solid_capstyle="round", zorder=3)
    _interval(axes, series, colour)
    if series.kind is Kind.POINTS:
        axes.plot(series.x, y, "o", color=colour, markersize=2.4, alpha=0.55, markeredgewidth=0)
    elif series.marks and series.kind is Kind.LINE:
        _marks(axes, series, y, colour)
    return stack


def _marks(axes: Axes, series: Series, y: list[float], colour: str) -> None:
    """Open ones are lower bounds."""
    for index, value in enumerate(y):
        bound = bool(series.censored) and series.censored[index]
        found = series.classes[index] if series.classes else None
        edge = CLASSES[found].light if found else colour
        shape = SHAPES[found] if found else "o"
        face = "white" if bound else edge
        axes.plot(
            [series.x[index]],
            [value],
            shape,
            markersize=6.5 if found else 5,
            markerfacecolor=face,
            markeredgecolor=edge if bound or shape == "x" else "white",
            markeredgewidth=1.3 if bound or shape == "x" else 0.8,
            zorder=4,
        )


def _interval(axes: Axes, series: Series, colour: str) -> None:
    for x, low, high in zip(series.x, series.low, series.high, strict=False):
        if low is not None and high is not None:
            axes.plot([x, x], [low, high], color=colour, linewidth=2.2, alpha=0.6, solid_capstyle="round")


def _limits(axes: Axes, panel: Panel) -> None:
    """A rule is in sight, too."""
    for rule in panel.rules:
        if rule.y is not None:
            axes.update_datalim([(axes.dataLim.x0, rule.y)], updatex=False)
        if rule.x is not None:
            axes.update_datalim([(rule.x, axes.dataLim.y0)], updatey=False)
    axes.autoscale_view()
    low, high = axes.get_ylim()
    axes.set_ylim(panel.y.low if panel.y.low is not None else low, panel.y.high if panel.y.high is not None else high)
    low, high = axes.get_xlim()
    axes.set_xlim(panel.x.low if panel.x.low is not None else low, panel.x.high if panel.x.high is not None else high)

    for axis, side, (low, high) in ((panel.x, axes.xaxis, axes.get_xlim()), (panel.y, axes.yaxis, axes.get_ylim())):
        if axis.scale is Scale.LOG:
            side.set_major_locator(
                MaxNLocator(5) if high / low < 5 else LogLocator(10, _steps(high / low), numticks=12)
            )
            side.set_minor_locator(NullLocator())


def _steps(ratio: float) -> tuple[float, ...]:
    """Ticks within each decade."""
    return (1.0, 2.0, 5.0) if ratio < 80 else (1.0, 3.0) if ratio < 1000 else (1.0,)


def _rules(axes: Axes, panel: Panel) -> None:
    row = 0
    for rule in panel.rules:
        colour = COLOURS[rule.colour].light
        line: dict[str, Any] = {"color": colour, "linewidth": 1.2, "linestyle": (0, (4, 3)), "zorder": 2}
        if rule.diagonal:
            low, high = axes.get_xlim()
            least, most = axes.get_ylim()
            end = min(high, most)
            axes.plot([max(low, least), end], [max(low, least), end], **line)
            axes.annotate(rule.label, (end * 0.8, end * 0.8), ha="right", va="bottom", **_text(colour))
        elif rule.y is not None:
            axes.axhline(rule.y, **line)
            left = any(other.x is not None for other in panel.rules)
            place: dict[str, Any] = {"xytext": (3 if left else -3, -3), "textcoords": "offset points", "va": "top"}
            place |= {"ha": "left" if left else "right"}
            at = (0 if left else 1, rule.y)
            axes.annotate(rule.label, at, xycoords=axes.get_yaxis_transform(), **_text(colour), **place)
        elif rule.x is not None:
            axes.axvline(rule.x, **line)
            late = axes.transAxes.inverted().transform(axes.transData.transform((rule.x, 1.0)))[0] > 0.5
            place = {"xytext": (-4 if late else 4, -3 - 12 * row), "textcoords": "offset points", "va": "top"}
            place |= {"ha": "right" if late else "left"}
            axes.annotate(rule.label, (rule.x, 1), xycoords=axes.get_xaxis_transform(), **_text(colour), **place)
            row += 1


def _text(colour: str) -> dict[str, Any]:
    return {"color": colour, "fontsize": 8.5, "bbox": {"facecolor": "white", "alpha": 0.8, "linewidth": 0, "pad": 0.8}}


def _strip(axes: Axes, panel: Panel) -> None:
    """Classes along the lower edge."""
    for mark in panel.strip:
        colour = CLASSES[mark.level_class].light
        axes.plot(
            [mark.x],
            [-0.04],
            SHAPES[mark.level_class],
            transform=axes.get_xaxis_transform(),
            color=colour,
            markersize=5,
            clip_on=False,
            zorder=5,
        )


def _legend(axes: Axes, panel: Panel) -> None:
    """Series and bands, below them classes; above both the panel's title."""
    named = [_handle(series) for series in panel.series if len(panel.series) > 1]
    named += [
        Rectangle((0, 0), 1, 1, color=_ground(band), label=band.label) for band in panel.bands if band.label != "window"
    ]
    found = {*(mark.level_class for mark in panel.strip), *(c for series in panel.series for c in series.classes)}
    rows = [row for row in (named, [_dot(level_class) for level_class in LevelClass if level_class in found]) if row]
    for index, handles in enumerate(reversed(rows)):
        legend = axes.legend(
            handles=handles,
            loc="lower left",
            bbox_to_anchor=(0, 1),
            borderaxespad=0.2 + 1.6 * index,
            borderpad=0.1,
            ncols=len(handles),
            columnspacing=1.3,
            handlelength=1.3,
            handletextpad=0.5,
        )
        axes.add_artist(legend)
    if panel.title or rows:  # the title's place keeps the legend's free
        axes.set_title(panel.title or " ", loc="left", pad=6 + (15 if panel.title else 8) * len(rows))


def _handle(series: Series) -> Any:
    colour = COLOURS[series.colour].light
    if series.kind in (Kind.AREA, Kind.BARS):
        return Rectangle((0, 0), 1, 1, color=colour, alpha=0.75, label=series.name)
    return Line2D([], [], color=colour, linestyle="--" if series.dashed else "-", linewidth=2, label=series.name)


def _dot(level_class: LevelClass) -> Line2D:
    colour = CLASSES[level_class].light
    return Line2D([], [], color=colour, marker=SHAPES[level_class], linestyle="", markersize=6, label=str(level_class))


def _matrix(axes: Axes, panel: Panel) -> None:
    _scales(axes, panel)
    axes.grid(visible=False)
    for spine in axes.spines.values():
        spine.set_visible(False)
    values = [cell.value for cell in panel.cells if cell.value]
    norm = LogNorm(min(values), max(max(values), min(values) * 1.001)) if values else None
    shades = LinearSegmentedColormap.from_list("heat", list(HEAT))
    for cell in panel.cells:
        face = _face(cell, norm, shades)
        axes.add_patch(Rectangle((cell.x - 0.48, cell.y - 0.45), 0.96, 0.9, facecolor=face, linewidth=0))
        ink = "white" if _dark(face) else INK
        axes.text(cell.x, cell.y, cell.text, ha="center", va="center", color=ink, fontsize=8)
    axes.set_xlim(-0.5, len(panel.x.categories) - 0.5)
    axes.set_ylim(len(panel.y.categories) - 0.5, -0.5)
    if max(len(name) for name in panel.x.categories) * len(panel.x.categories) > 110:
        axes.tick_params(axis="x", labelrotation=40)


def _face(cell: Cell, norm: LogNorm | None, shades: LinearSegmentedColormap) -> Any:
    if cell.level_class is not None:
        return CLASSES[cell.level_class].light
    return shades(norm(cell.value)) if norm and cell.value else HEAT[0]


def _dark(face: Any) -> bool:
    red, green, blue = to_rgb(face)
    return 0.299 * red + 0.587 * green + 0.114 * blue < 0.6
