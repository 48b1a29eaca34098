"""Charts and page of a result: what they show is what its rows say, and the page stands by itself."""

from __future__ import annotations

import csv
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
from msgspec.structs import replace

from loadtest.judgements import Interval, LevelClass, Quantile
from loadtest.machine import Machine
from loadtest.page.render import FOLDER, contrast, ink
from loadtest.plots.catalogue import figures
from loadtest.plots.figure import Figure, Kind, Series
from loadtest.plots.palette import CLASSES, COLOURS, SHAPES
from loadtest.plots.throughput import rate_at
from loadtest.quantity import interval, moment, number, quantile, seconds, share, size
from loadtest.reading import Reading
from loadtest.records import Phase
from loadtest.report import page_of, write_report
from loadtest.result import Result, ResultError
from tests.loadtest import chromium, synthetic_kinds

VOID_TAGS = {"meta", "link", "br", "img", "hr", "input", "col"}
OF_A_MAP = {"01", "02", "03", "04", "05", "06", "07", "08", "09", "11", "13", "14", "15"}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return synthetic_kinds.plain_map(tmp_path_factory.mktemp("results") / "plain")


@pytest.fixture(scope="module")
def rich(plain: Result, tmp_path_factory: pytest.TempPathFactory) -> Result:
    return synthetic_kinds.rich_map(plain, tmp_path_factory.mktemp("results") / "rich")


@pytest.fixture(scope="module")
def pages(rich: Result, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Reports of a map, a fault matrix and an overhead run."""
    folder = tmp_path_factory.mktemp("results")
    results = [rich, synthetic_kinds.faults(folder / "faults"), synthetic_kinds.overhead(folder / "overhead")]
    return [write_report(result.folder) for result in results]


@pytest.fixture(scope="module")
def reading(rich: Result) -> Reading:
    return Reading(rich)


@pytest.fixture(scope="module")
def charts(reading: Reading) -> dict[str, Figure]:
    return by_id(figures(reading))


def by_id(made: list[Figure]) -> dict[str, Figure]:
    return {figure.id: figure for figure in made}


def series_of(figure: Figure, name: str) -> Series:
    return next(one for panel in figure.panels for one in panel.series if one.name == name)


# --- charts say what the rows say ------------------------------------------------------------------------------------


def test_every_chart_of_a_map_is_made(charts: dict[str, Figure]) -> None:
    assert {name[:2] for name in charts} == OF_A_MAP


def test_latency_charts_show_the_verdicts_percentiles(reading: Reading, charts: dict[str, Figure]) -> None:
    chart = charts["01-ttft"]
    for name in ("p50", "p95", "p99"):
        expected = [getattr(v.measures.ttft, name).value for v in reading.sweep if v.measures.ttft is not None]
        assert series_of(chart, name).y == expected
    knee = reading.summary.knee
    assert knee is not None
    assert [(band.low, band.high) for band in chart.panels[0].bands] == [(knee.low, knee.high)]
    assert chart.panels[0].rules[0].y == reading.run.limits.ttft
    assert [mark.level_class for mark in chart.panels[0].strip] == [v.level_class for v in reading.sweep]


def test_the_machines_chart_has_every_speed_and_levels_beyond_the_knee(
    reading: Reading, charts: dict[str, Figure]
) -> None:
    chart = charts["15-machine"]
    machine = Machine(reading.levels)
    times = series_of(chart, "reference")
    assert times.y == [speed.value for speed in map(machine.of, reading.levels) if speed is not None]
    assert len(set(times.y)) == len(reading.levels)
    raw, over = series_of(chart, "completed, as measured"), series_of(chart, "over the speed")
    knee = reading.summary.knee
    assert knee is not None
    beyond = [level for level in reading.levels if (level.rate or 0.0) >= 1.1 * knee.low]
    assert len(raw.x) == len(over.x) == len(beyond) > 3

    def spread(values: list[float | None]) -> float:
        known = [value for value in values if value is not None]
        return max(known) - min(known)

    assert spread(over.y) < spread(raw.y)  # this server's reference speaks for it
    assert "as measured" in chart.finding


def test_curves_go_through_the_verdicts_percentiles(reading: Reading, charts: dict[str, Figure]) -> None:
    (first, *_) = charts["07-distributions"].panels
    for verdict, curve in zip(reading.around_knee, first.series, strict=True):
        for wanted, found in ((0.5, "p50"), (0.99, "p99")):
            assert verdict.measures.ttft is not None
            reached = next(x for x, y in zip(curve.x, curve.y, strict=True) if y is not None and y >= wanted)
            # Curves are thinned: the next point that was kept.
            assert reached == pytest.approx(getattr(verdict.measures.ttft, found).value, rel=0.05)
        assert curve.y == sorted(value for value in curve.y if value is not None)


def test_gaps_of_a_histogram_are_all_there(reading: Reading, charts: dict[str, Figure]) -> None:
    panel = charts["07-distributions"].panels[1]
    for series in panel.series:
        assert sum(value or 0.0 for value in series.y) == pytest.approx(1.0)


def test_a_timeline_counts_every_request_once(reading: Reading, charts: dict[str, Figure]) -> None:
    verdict = reading.around_knee[-1]
    part = reading.parts_of(verdict)[-1]
    panel = charts[f"06-timeline-{verdict.group.replace(':', '-')}"].panels[0]
    arrivals = next(series for series in panel.series if series.name == "arrivals")
    width = arrivals.x[1] - arrivals.x[0]
    assert sum(value or 0.0 for value in arrivals.y) * width == pytest.approx(len(part.rows))
    ended = [series for series in panel.series if series.kind is Kind.AREA]
    assert {series.name for series in ended} == {"completed", "QUEUE_FULL"}
    assert sum(value or 0.0 for series in ended for value in series.y) * width == pytest.approx(len(part.rows))


def test_a_heat_map_pools_to_the_groups_requests(reading: Reading, charts: dict[str, Figure]) -> None:
    panel = charts["08-prompt-length"].panels[0]
    for column, verdict in enumerate(reading.sweep):
        counts = [int(cell.note.removeprefix("n = ")) for cell in panel.cells if cell.x == column]
        assert verdict.measures.ttft is not None
        assert sum(counts) == verdict.measures.ttft.count


def test_the_fitted_curve_is_the_fit(reading: Reading) -> None:
    usl = reading.summary.usl
    assert usl is not None
    for verdict in reading.closed:
        fitted = rate_at(usl, float(verdict.concurrency or 0))
        assert verdict.measures.completion_rate == pytest.approx(fitted, rel=usl.residual * 1.001)


def test_a_lower_bound_is_marked_and_said(plain: Result, tmp_path: Path) -> None:
    result = Result.create(tmp_path / "cut", plain.run)
    level = next(level for level in plain.levels if level.phase is Phase.BEYOND)
    rows = [row for row in plain.requests if row.level == level.index]
    cut = [
        replace(row, outcome="censored", first=None, chunk_us=[], accepted=row.intended, finish=level.end)
        if row.index % 2
        else row
        for row in rows
    ]
    result.append_level(replace(level, schedule=""), cut)
    reading = Reading(result)
    made = figures(reading)
    assert series_of(by_id(made)["01-ttft"], "p99").censored == [True]
    assert "≥ " in page_of(reading, made)


def test_a_result_that_was_cut_off_has_its_page(plain: Result, tmp_path: Path) -> None:
    """No verdicts and no summary were written: they are made from the rows."""
    result = Result.create(tmp_path / "cut", plain.run)
    for level in plain.levels[:3]:
        result.append_level(replace(level, schedule=""), [row for row in plain.requests if row.level == level.index])
    text = write_report(result.folder).read_text(encoding="utf-8")
    assert "This run did not finish" in text


def test_an_empty_result_has_its_page(plain: Result, tmp_path: Path) -> None:
    result = Result.create(tmp_path / "empty", plain.run)
    assert "no open-loop level was measured" in write_report(result.folder).read_text(encoding="utf-8")


def test_a_folder_that_is_no_result_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ResultError):
        write_report(tmp_path)


# --- files -----------------------------------------------------------------------------------------------------------


def test_each_chart_lies_there_as_picture_and_as_data(pages: list[Path]) -> None:
    for page in pages:
        made = figures(Reading(Result.open(page.parent)))
        assert made
        for figure in made:
            picture = page.parent / "plots" / f"{figure.id}.png"
            assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
            lines = (page.parent / "plots" / f"{figure.id}.csv").read_text(encoding="utf-8").splitlines()
            rows = list(csv.DictReader(line for line in lines if not line.startswith("#")))
            points = sum(len(series.x) for panel in figure.panels for series in panel.series)
            assert len(rows) == points + sum(len(panel.cells) for panel in figure.panels)


def test_pictures_are_not_blank(pages: list[Path]) -> None:
    image = pytest.importorskip("matplotlib.image")
    for picture in sorted((pages[0].parent / "plots").glob("*.png")):
        pixels = image.imread(picture)[::3, ::3, :3]
        coloured = (pixels.max(axis=2) - pixels.min(axis=2) > 0.2).mean()
        assert coloured > 0.001, picture.name


# --- the page --------------------------------------------------------------------------------------------------------


class Structure(HTMLParser):
    """Ids, what refers to ids, what would be fetched, and whether tags match."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.references: list[str] = []
        self.fetched: list[str] = []
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.tables_without_caption = 0
        self.faults: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if len(found) != len(attrs):
            self.faults.append(f"an attribute twice in {tag}")
        if tag not in VOID_TAGS:
            self.open.append(tag)
        if found.get("id"):
            self.ids.append(str(found["id"]))
        for name in ("aria-controls", "aria-labelledby", "for"):
            self.references += str(found[name]).split() if name in found else []
        if str(found.get("href", "")).startswith("#"):
            self.references.append(str(found["href"])[1:])
        self.fetched += [str(found[name]) for name in ("src", "href", "action") if name in found]
        if tag == "script":
            self.scripts.append((found, ""))
        if tag == "table":
            self.tables_without_caption += 1
        if tag == "caption":
            self.tables_without_caption -= 1

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.faults.append(f"</{tag}> closes something else, line {self.getpos()[0]}")

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            attributes, text = self.scripts.pop()
            self.scripts.append((attributes, text + data))


def structure(page: Path) -> Structure:
    found = Structure()
    found.feed(page.read_text(encoding="utf-8"))
    found.close()
    return found


def test_the_page_is_whole_and_fetches_nothing(pages: list[Path]) -> None:
    for page in pages:
        found = structure(page)
        assert found.faults == []
        assert found.open == []
        assert len(set(found.ids)) == len(found.ids)
        assert set(found.references) <= set(found.ids)
        assert [url for url in found.fetched if not url.startswith(("#", "data:"))] == []
        assert "url(" not in page.read_text(encoding="utf-8").replace("url(#${", "")
        assert "@import" not in page.read_text(encoding="utf-8")
        assert found.tables_without_caption == 0
        assert page.stat().st_size < 2_000_000


def test_the_pages_data_is_that_of_its_charts(pages: list[Path]) -> None:
    for page in pages:
        found = structure(page)
        (data,) = [text for attributes, text in found.scripts if attributes.get("type") == "application/json"]
        known = {figure["id"] for figure in json.loads(data)}
        text = page.read_text(encoding="utf-8")
        assert set(re.findall(r'data-figure="([^"]+)"', text)) <= known
        assert set(re.findall(r'data-of="([^"]+)"', text)) == known
        assert [f"figure-{name}" in found.ids for name in known] == [True] * len(known)


def test_the_script_is_javascript(pages: list[Path], tmp_path: Path) -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed")
    (script,) = [text for attributes, text in structure(pages[0]).scripts if "type" not in attributes]
    assert script.strip() == (FOLDER / "chart.js").read_text(encoding="utf-8").strip()
    file = tmp_path / "chart.js"
    file.write_text(script, encoding="utf-8")
    assert subprocess.run([node, "--check", file], capture_output=True, check=False).returncode == 0


def test_text_of_a_result_is_no_html(pages: list[Path]) -> None:
    text = pages[0].read_text(encoding="utf-8")
    assert "<b>model</b>" not in text
    assert "&lt;b&gt;model&lt;/b&gt;" in text
    assert "A GPU &lt;x&gt;" in text


def test_the_page_says_what_limits_it(pages: list[Path], reading: Reading) -> None:
    text = pages[0].read_text(encoding="utf-8")
    (void,) = [verdict for verdict in reading.verdicts if verdict.level_class is LevelClass.VOID]
    assert "1 group of levels count nowhere" in text
    assert void.evidence in text
    assert "This run did not finish" in text
    assert "The machine was not idle" in text
    assert "the budget was spent &lt;early&gt;" in text
    assert "Clients and service shared the 2 cores" in text


def test_scores_and_knee_are_on_the_page(pages: list[Path], reading: Reading) -> None:
    text = pages[0].read_text(encoding="utf-8")
    assert f"Keeps up with {interval(reading.summary.knee)}" in text
    for hypothesis in reading.run.hypotheses:
        assert hypothesis.text in text
    assert text.count('<li class="holds">') == 1
    assert text.count('<li class="fails">') == 1


def test_every_level_is_in_the_table(pages: list[Path], reading: Reading) -> None:
    text = pages[0].read_text(encoding="utf-8")
    table = text[text.index("Every level with its class") :]
    assert table[: table.index("</table>")].count('class="chip"') == len(reading.verdicts)


# --- looks -----------------------------------------------------------------------------------------------------------


def test_every_class_has_a_colour_and_a_shape_of_its_own() -> None:
    script = (FOLDER / "chart.js").read_text(encoding="utf-8")
    for level_class in LevelClass:
        assert level_class in CLASSES
        assert level_class in SHAPES
        assert f'"{level_class}":' in script or f" {level_class}:" in script
    assert len({colour.light for colour in CLASSES.values()}) == len(CLASSES)


@pytest.mark.parametrize("name", [name for name in COLOURS if name not in ("knee", "p50")])
def test_lines_can_be_told_from_their_ground(name: str) -> None:
    """WCAG asks 3 of graphics. The faintest quantile and the knee's band are not the only carriers of what they say."""
    assert contrast(COLOURS[name].light, "#ffffff") >= 2.9
    assert contrast(COLOURS[name].dark, "#181e28") >= 3


def test_text_on_a_coloured_cell_can_be_read() -> None:
    for colour in CLASSES.values():
        assert contrast(ink(colour.light), colour.light) >= 4.5


# --- words -----------------------------------------------------------------------------------------------------------


def test_quantities_in_words() -> None:
    assert moment("2026-11-29T20:18:18+00:00") == moment("2026-11-29T20:18:18Z") == "2026-11-29 20:18:18 UTC"
    numbers = {0: "0", 1234567: "1,234,567", 12.34: "12.3", 0.001234: "0.00123", 99.96: "100"}
    assert [number(value) for value in numbers] == list(numbers.values())
    assert [seconds(value) for value in (None, 0.0, 1.5e-5, 0.01234, 0.99999, 75.0)] == [
        "–",
        "0 s",
        "15 µs",
        "12.3 ms",
        "1 s",
        "75 s",
    ]
    assert share(0.0466) == "4.66 %"
    assert size(3 << 30) == "3 GiB"
    assert quantile(Quantile(value=2.0, censored=True)) == "≥ 2 s"
    assert interval(Interval(low=9.871, high=9.912)) == "9.871 to 9.912 requests/s"


# --- in a browser ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser() -> Iterator[chromium.Page]:
    if chromium.found() is None:
        pytest.skip("no Chromium on the PATH and none named by OCTAVO_CHROMIUM")
    with chromium.browser() as page:
        yield page


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_charts_render_in_a_browser(browser: chromium.Page, pages: list[Path], width: int, dark: bool) -> None:
    for page in pages:
        browser.open(page, width, 900, dark=dark)
        assert browser.complaints == []
        counts = browser.value(
            """[...document.querySelectorAll("[data-figure]")].filter(root => root.offsetParent).map(root =>
            [root.dataset.figure, root.querySelectorAll("svg path, svg line").length, root.dataset.drawn ?? ""])"""
        )
        assert counts or browser.value("document.querySelectorAll('table.matrix').length")
        assert [name for name, shapes, drawn in counts if shapes < 10 or drawn != "yes"] == []
        assert browser.value("document.documentElement.scrollWidth") <= width
        assert "NaN" not in browser.value("document.body.innerHTML")


def test_a_chart_can_be_read_off_and_walked(browser: chromium.Page, pages: list[Path], reading: Reading) -> None:
    browser.open(pages[0], 1280, 900)
    told = browser.value(
        """(() => {
          const root = document.querySelector('[data-figure="01-ttft"]'), plot = root.querySelector(".plot");
          const press = (key) => plot.dispatchEvent(new KeyboardEvent("keydown", { key }));
          return [0, 1, 2].map(() => { press("ArrowRight"); return root.querySelector(".tip").innerText; });
        })()"""
    )
    for verdict, text in zip(reading.sweep, told, strict=False):
        assert verdict.measures.ttft is not None
        assert seconds(verdict.measures.ttft.p99.value) in text
    assert len(set(told)) == 3


def test_legends_tabs_and_data_work(browser: chromium.Page, pages: list[Path], reading: Reading) -> None:
    browser.open(pages[0], 1280, 900)
    lines = """document.querySelectorAll('[data-figure="01-ttft"] path.line').length"""
    assert browser.value(lines) == 3
    browser.value("""document.querySelector('[data-figure="01-ttft"] button.key').click()""")
    assert browser.value(lines) == 2
    shown = "[...document.querySelectorAll('.tabbed')].map(panel => panel.offsetHeight > 0)"
    tabs = len(reading.around_knee)
    assert browser.value(shown) == [True] + [False] * (tabs - 1)
    browser.value("document.querySelectorAll('[role=tab]')[1].click()")
    browser.value("new Promise(done => setTimeout(done, 200))")
    assert browser.value(shown) == [False, True] + [False] * (tabs - 2)
    assert browser.value("document.querySelectorAll('.tabbed')[1].querySelectorAll('svg').length") > 0
    browser.value("""document.querySelector('details[data-of="01-ttft"]').open = true""")
    browser.value("new Promise(done => setTimeout(done, 200))")
    rows = browser.value("""document.querySelectorAll('details[data-of="01-ttft"] tbody tr').length""")
    assert rows == 3 * len(reading.sweep)
    assert browser.complaints == []


def test_the_page_prints(browser: chromium.Page, pages: list[Path]) -> None:
    """From a telephone, too: charts are drawn anew for the sheet's width, and not blown up."""
    browser.open(pages[0], 390, 900)
    paper = browser.paper()
    assert paper.startswith(b"%PDF")
    assert 5 <= len(re.findall(rb"/Type\s*/Page\b(?!s)", paper)) <= 14
    assert browser.complaints == []
