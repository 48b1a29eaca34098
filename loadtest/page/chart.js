"use strict";
// Draws the figures of the page's JSON as SVG, at the width they have. Colours come from the style sheet, so that dark
// screens and paper get their own.
(() => {
  const SVG = "http://www.w3.org/2000/svg";
  const SHAPES = {
    "keeps up": "circle", "saturated, stable": "square", "saturated, growing": "up", collapsing: "down", hung: "diamond",
    crashed: "cross", recovered: "plus", "not recovered": "diamond", "cannot tell": "circle", void: "cross",
  };

  // --- words ----------------------------------------------------------------------------------------------------------

  function number(value, digits = 3) {
    if (value === null || value === undefined) return "–";
    if (value === 0 || !isFinite(value)) return String(value);
    const places = Math.min(20, Math.max(0, digits - 1 - Math.floor(Math.log10(Math.abs(value)))));
    const text = value.toLocaleString("en-US", { minimumFractionDigits: places, maximumFractionDigits: places });
    return text.includes(".") ? text.replace(/0+$/, "").replace(/\.$/, "") : text;
  }

  function seconds(value) {
    if (value === null || value === undefined) return "–";
    const size = Math.abs(value);
    if (size === 0) return "0 s";
    if (size < 0.9995e-3) return `${number(value * 1e6)} µs`;
    if (size < 0.9995) return `${number(value * 1e3)} ms`;
    return `${number(value)} s`;
  }

  function bytes(value) {
    for (const [power, unit] of [[4, "TiB"], [3, "GiB"], [2, "MiB"], [1, "KiB"]]) {
      if (Math.abs(value) >= 1024 ** power) return `${number(value / 1024 ** power)} ${unit}`;
    }
    return `${number(value)} B`;
  }

  function words(value, axis) {
    if (value === null || value === undefined) return "–";
    if (axis.scale === "category") return axis.categories[Math.round(value)] ?? "";
    const format = axis.format ?? "number";
    if (format === "seconds") return seconds(value);
    if (format === "share") return `${number(value * 100)} %`;
    if (format === "bytes") return bytes(value);
    return number(value);
  }

  const title = (axis) => (axis.unit ? `${axis.label} (${axis.unit})` : axis.label);
  const slug = (name) => name.replace(", ", "-").replace(" ", "-");

  // --- scales ---------------------------------------------------------------------------------------------------------

  function linearTicks(low, high, most) {
    const rough = (high - low) / Math.max(1, most) || 1;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((size) => size >= rough * 0.999);
    const ticks = [];
    for (let tick = Math.ceil(low / step - 1e-9); tick * step <= high + step * 1e-9; tick++) ticks.push(tick * step);
    return ticks;
  }

  function logTicks(low, high, most) {
    if (high / low < 5) return linearTicks(low, high, Math.min(most, 5));
    for (const steps of [[1, 2, 5], [1, 3], [1]]) {
      const ticks = [];
      for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) {
        for (const step of steps) {
          const tick = step * 10 ** power;
          if (tick >= low * 0.999 && tick <= high * 1.001) ticks.push(tick);
        }
      }
      if (ticks.length <= most || steps.length === 1) return ticks;
    }
    return [];
  }

  function scaleOf(axis, values, from, to, most) {
    if (axis.scale === "category") {
      const count = axis.categories.length;
      const at = (value) => from + ((value + 0.5) / count) * (to - from);
      return { at, ticks: axis.categories.map((_, index) => index), low: -0.5, high: count - 0.5 };
    }
    const log = axis.scale === "log";
    const known = values.filter((value) => Number.isFinite(value) && (!log || value > 0));
    let low = known.length ? Math.min(...known) : log ? 0.1 : 0;
    let high = known.length ? Math.max(...known) : 1;
    if (log) {
      const room = Math.max(1.08, (high / low) ** 0.05);
      [low, high] = [low / room, high * room];
    } else {
      const room = (high - low || Math.abs(high) || 1) * 0.05;
      [low, high] = [low - room, high + room];
    }
    low = axis.low ?? low;
    high = axis.high ?? high;
    if (high <= low) high = low + 1;
    const place = log ? Math.log : (value) => value;
    const at = (value) => from + ((place(value) - place(low)) / (place(high) - place(low))) * (to - from);
    return { at, low, high, ticks: log ? logTicks(low, high, most) : linearTicks(low, high, most) };
  }

  // --- drawing --------------------------------------------------------------------------------------------------------

  function make(parent, name, attributes = {}, text) {
    const element = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    if (text !== undefined) element.textContent = text;
    parent.append(element);
    return element;
  }

  function html(parent, name, className, text) {
    const element = document.createElement(name);
    if (className) element.className = className;
    if (text !== undefined) element.textContent = text;
    parent.append(element);
    return element;
  }

  function shape(kind, x, y, r) {
    const p = (dx, dy) => `${(x + dx * r).toFixed(1)},${(y + dy * r).toFixed(1)}`;
    switch (kind) {
      case "square": return `M${p(-0.9, -0.9)}L${p(0.9, -0.9)}L${p(0.9, 0.9)}L${p(-0.9, 0.9)}Z`;
      case "up": return `M${p(0, -1.15)}L${p(1.05, 0.8)}L${p(-1.05, 0.8)}Z`;
      case "down": return `M${p(0, 1.15)}L${p(1.05, -0.8)}L${p(-1.05, -0.8)}Z`;
      case "diamond": return `M${p(0, -1.25)}L${p(1.1, 0)}L${p(0, 1.25)}L${p(-1.1, 0)}Z`;
      case "cross": return `M${p(-1, -0.55)}L${p(-0.55, -1)}L${p(0, -0.45)}L${p(0.55, -1)}L${p(1, -0.55)}L${p(0.45, 0)}` +
        `L${p(1, 0.55)}L${p(0.55, 1)}L${p(0, 0.45)}L${p(-0.55, 1)}L${p(-1, 0.55)}L${p(-0.45, 0)}Z`;
      case "plus": return `M${p(-0.35, -1.1)}L${p(0.35, -1.1)}L${p(0.35, -0.35)}L${p(1.1, -0.35)}L${p(1.1, 0.35)}` +
        `L${p(0.35, 0.35)}L${p(0.35, 1.1)}L${p(-0.35, 1.1)}L${p(-0.35, 0.35)}L${p(-1.1, 0.35)}L${p(-1.1, -0.35)}` +
        `L${p(-0.35, -0.35)}Z`;
      default: return `M${p(-1, 0)}a${r},${r} 0 1,0 ${2 * r},0a${r},${r} 0 1,0 ${-2 * r},0Z`;
    }
  }

  const classColour = (name) => `var(--class-${slug(name)})`;
  const colourOf = (series) => `var(--${series.colour ?? "blue"})`;
  const marked = (series) => (series.marks ?? true) && (series.kind ?? "line") === "line";

  /** A series' tops and bottoms once those below it are stacked: [{x, y, base}] with nulls left in. */
  function stacked(panel, hidden) {
    let tops = null;
    const found = new Map();
    for (const series of panel.series ?? []) {
      if (hidden.has(series.name)) continue;
      if (series.kind === "area") {
        const bases = tops ?? series.y.map(() => 0);
        tops = series.y.map((value, index) => bases[index] + (value ?? 0));
        found.set(series, series.x.map((x, index) => ({ x, y: tops[index], base: bases[index] })));
      } else {
        found.set(series, series.x.map((x, index) => ({ x, y: series.y[index], base: 0 })));
      }
    }
    return found;
  }

  function line(points, x, y) {
    let path = "", pen = false;
    for (const point of points) {
      if (point.y === null) { pen = false; continue; }
      path += `${pen ? "L" : "M"}${x(point.x).toFixed(1)},${y(point.y).toFixed(1)}`;
      pen = true;
    }
    return path;
  }

  function steps(points, end) {
    const found = [];
    points.forEach((point, index) => {
      const next = points[index + 1]?.x ?? end(points);
      found.push(point, { ...point, x: next });
    });
    return found;
  }

  const afterLast = (points) => (points.length < 2 ? points[0].x : 2 * points.at(-1).x - points.at(-2).x);

  class Panel {
    constructor(chart, panel, index, count) {
      Object.assign(this, { chart, panel, index, count, hidden: new Set(), focus: -1 });
      this.root = html(chart.root, "div", "panel");
      if (panel.title) html(this.root, "div", "panel-title", panel.title);
      this.legend();
      this.plot = html(this.root, "div", "plot");
      this.plot.tabIndex = 0;
      this.plot.setAttribute("role", "group");
      this.plot.setAttribute("aria-roledescription", "chart");
      this.plot.setAttribute("aria-label", `${panel.title || chart.figure.title}. Arrow keys walk through its points.`);
      this.tip = html(this.root, "div", "tip");
      this.tip.setAttribute("aria-live", "polite");
      this.plot.addEventListener("pointermove", (event) => this.point(event));
      this.plot.addEventListener("pointerleave", () => this.leave());
      this.plot.addEventListener("blur", () => this.leave());
      this.plot.addEventListener("keydown", (event) => this.walk(event));
    }

    legend() {
      const { panel } = this;
      const series = panel.series ?? [];
      const classes = new Set([
        ...(panel.strip ?? []).map((mark) => mark.level_class),
        ...series.flatMap((one) => one.classes ?? []),
      ]);
      const bands = (panel.bands ?? []).filter((band) => band.label !== "window");
      if (series.length < 2 && !classes.size && !bands.length) return;
      const box = html(this.root, "div", "legend");
      if (series.length > 1) for (const one of series) this.key(box, one);
      for (const band of bands) {
        const item = html(box, "span", "key");
        html(item, "i", "swatch").style.background = `var(--${band.colour ?? "knee"})`;
        item.append(band.label);
      }
      for (const name of Object.keys(SHAPES)) {
        if (!classes.has(name)) continue;
        const item = html(box, "span", "key");
        const icon = make(item, "svg", { viewBox: "0 0 12 12", width: 12, height: 12, "aria-hidden": "true" });
        make(icon, "path", { d: shape(SHAPES[name], 6, 6, 4.6), style: `fill:${classColour(name)}` });
        item.append(name);
      }
    }

    key(box, series) {
      const button = html(box, "button", "key");
      button.type = "button";
      button.setAttribute("aria-pressed", "true");
      const filled = series.kind === "area" || series.kind === "bars" || series.kind === "points";
      const swatch = html(button, "i", filled ? "swatch" : series.dashed ? "stroke dashed" : "stroke");
      swatch.style.setProperty("--swatch", colourOf(series));
      button.append(series.name);
      button.addEventListener("click", () => {
        const shown = this.hidden.has(series.name);
        if (shown) this.hidden.delete(series.name); else this.hidden.add(series.name);
        button.setAttribute("aria-pressed", String(shown));
        this.draw(this.width);
      });
    }

    draw(width) {
      this.width = width;
      this.leave();
      this.plot.replaceChildren();
      const { panel } = this;
      const small = width < 480;
      const last = this.index === this.count - 1;
      const shared = this.count > 2;
      const base = shared ? 150 : Math.min(380, Math.max(220, width * (width > 800 ? 0.36 : 0.56)));
      const stripHeight = panel.strip?.length ? 16 : 0;
      const labelled = !shared || last;
      const longest = Math.max(0, ...(panel.x.categories ?? []).map((name) => name.length));
      this.turned = longest * 6.8 > (width - 90) / Math.max(1, panel.x.categories?.length ?? 1);
      this.sunk = this.turned ? longest * 4.4 : 0;
      const m = { left: 0, right: 14, top: 8, bottom: (labelled ? 42 : 20) + stripHeight + this.sunk };
      const height = Math.round(base * (panel.height ?? 1)) + m.top + m.bottom;
      const svg = make(this.plot, "svg", { viewBox: `0 0 ${width} ${height}`, width, height, "aria-hidden": "true" });
      const rows = stacked(panel, this.hidden);
      const points = [...rows.values()].flat();
      const ys = points.flatMap((point) => (point.y === null ? [] : [point.y]));
      for (const series of rows.keys()) {
        ys.push(...(series.low ?? []), ...(series.high ?? []));
        if (series.kind === "bars" || series.kind === "area") ys.push(0);
      }
      const xs = points.filter((point) => point.y !== null).map((point) => point.x);
      for (const rule of panel.rules ?? []) {
        if (rule.y !== undefined) ys.push(rule.y);
        if (rule.x !== undefined) xs.push(rule.x);
      }
      const right = width - m.right, bottom = height - m.bottom;
      const y = scaleOf(panel.y, ys.filter((v) => v !== null), bottom, m.top, Math.max(2, Math.floor((bottom - m.top) / 34)));
      m.left = Math.max(44, 30 + 6.6 * Math.max(...y.ticks.map((tick) => words(tick, panel.y).length)));
      if (shared) m.left = Math.max(m.left, 80);
      const x = scaleOf(panel.x, xs, m.left, right, Math.max(3, Math.floor((right - m.left) / (small ? 62 : 84))));
      Object.assign(this, { svg, x, y, m, right, bottom, rows });
      this.clip = `clip-${this.chart.figure.id}-${this.index}`;
      const clip = make(make(svg, "defs"), "clipPath", { id: this.clip });
      make(clip, "rect", { x: m.left, y: m.top - 6, width: right - m.left + 7, height: bottom - m.top + 12 });
      this.frame(labelled, stripHeight);
      const area = make(svg, "g", { "clip-path": `url(#${this.clip})` });
      for (const [series, found] of rows) this.series(area, series, found);
      this.rules();
      this.cursor = make(svg, "g", { class: "cursor" });
      this.stops = this.findStops();
    }

    frame(labelled, stripHeight) {
      const { svg, panel, x, y, m, right, bottom } = this;
      for (const band of panel.bands ?? []) {
        const low = Math.max(m.left, x.at(band.low)), high = Math.min(right, x.at(band.high));
        const colour = band.colour === "window" ? "window" : band.colour ?? "knee";
        make(svg, "rect", { x: low, y: m.top, width: Math.max(2, high - low), height: bottom - m.top, style: `fill:var(--${colour})` });
      }
      for (const tick of y.ticks) {
        const at = y.at(tick);
        make(svg, "line", { class: "grid", x1: m.left, x2: right, y1: at, y2: at });
        make(svg, "text", { class: "tick", x: m.left - 8, y: at + 4, "text-anchor": "end" }, words(tick, panel.y));
      }
      for (const tick of x.ticks) {
        const at = x.at(tick);
        make(svg, "line", { class: "grid", x1: at, x2: at, y1: m.top, y2: bottom });
        const y_ = bottom + stripHeight + 17;
        const place = this.turned
          ? { "text-anchor": "end", transform: `translate(${at + 4} ${y_ - 4}) rotate(-40)` }
          : { x: at, y: y_, "text-anchor": "middle" };
        make(svg, "text", { class: "tick", ...place }, words(tick, panel.x));
      }
      make(svg, "line", { class: "axis", x1: m.left, x2: right, y1: bottom, y2: bottom });
      const across = { class: "label", x: (m.left + right) / 2, y: bottom + stripHeight + 35 + this.sunk, "text-anchor": "middle" };
      if (labelled) make(svg, "text", across, title(panel.x));
      const middle = (m.top + bottom) / 2;
      const up = { class: "label", x: 0, y: 0, "text-anchor": "middle", transform: `translate(12 ${middle}) rotate(-90)` };
      make(svg, "text", up, title(panel.y));
      for (const mark of panel.strip ?? []) {
        const path = { d: shape(SHAPES[mark.level_class], x.at(mark.x), bottom + 10, 4.2) };
        make(svg, "path", { ...path, style: `fill:${classColour(mark.level_class)}` });
      }
    }

    series(area, series, points) {
      const { x, y, bottom } = this;
      const kind = series.kind ?? "line", colour = colourOf(series);
      if (!points.length) return;
      if (kind === "area" || kind === "bars") {
        const wide = steps(points.map((point) => ({ ...point, y: point.y ?? point.base })), afterLast);
        const back = [...wide].reverse().map((point) => `L${x.at(point.x).toFixed(1)},${y.at(point.base).toFixed(1)}`);
        const fill = `fill:${colour};fill-opacity:${kind === "area" ? 0.75 : 0.2}`;
        make(area, "path", { d: `${line(wide, x.at, y.at)}${back.join("")}Z`, style: fill });
        if (kind === "bars") make(area, "path", { class: "line thin", d: line(wide, x.at, y.at), style: `stroke:${colour}` });
        return;
      }
      if (kind === "points") {
        const dots = points.filter((point) => point.y !== null).map((point) => shape("circle", x.at(point.x), y.at(point.y), 1.9));
        make(area, "path", { d: dots.join(""), style: `fill:${colour};fill-opacity:.5` });
        return;
      }
      const path = kind === "step" ? steps(points, afterLast) : points;
      const dash = series.dashed ? ";stroke-dasharray:6 4" : "";
      if (series.joined ?? true) make(area, "path", { class: kind === "step" ? "line thin" : "line", d: line(path, x.at, y.at), style: `stroke:${colour}${dash}` });
      (series.low ?? []).forEach((low, index) => {
        const high = series.high[index], at = x.at(series.x[index]);
        if (low === null || high === null) return;
        make(area, "line", { class: "interval", x1: at, x2: at, y1: y.at(low), y2: Math.min(y.at(high), bottom), style: `stroke:${colour}` });
      });
      if (!marked(series)) return;
      points.forEach((point, index) => {
        if (point.y === null) return;
        const found = series.classes?.[index];
        const tone = found ? classColour(found) : colour;
        const bound = series.censored?.[index];
        const style = bound ? `fill:var(--surface);stroke:${tone};stroke-width:1.8` : `fill:${tone};stroke:var(--surface);stroke-width:1.2`;
        make(area, "path", { d: shape(found ? SHAPES[found] : "circle", x.at(point.x), y.at(point.y), found ? 5 : 4), style });
      });
    }

    rules() {
      const { svg, panel, x, y, m, right, bottom } = this;
      let row = 0;
      for (const rule of panel.rules ?? []) {
        const colour = `var(--${rule.colour ?? "red"})`;
        const text = { class: "rule-label", style: `fill:${colour}` };
        const stroke = { class: "rule", style: `stroke:${colour}` };
        if (rule.diagonal) {
          const low = Math.max(x.low, y.low), high = Math.min(x.high, y.high);
          make(svg, "line", { ...stroke, x1: x.at(low), y1: y.at(low), x2: x.at(high), y2: y.at(high) });
          const near = low + (high - low) * 0.8;
          make(svg, "text", { ...text, x: x.at(near) - 10, y: y.at(near) - 4, "text-anchor": "end" }, rule.label);
        } else if (rule.y !== undefined) {
          const at = y.at(rule.y);
          make(svg, "line", { ...stroke, x1: m.left, x2: right, y1: at, y2: at });
          const crossed = panel.rules.some((other) => other.x !== undefined);
          const place = crossed ? { x: m.left + 4, "text-anchor": "start" } : { x: right - 2, "text-anchor": "end" };
          make(svg, "text", { ...text, ...place, y: at < m.top + 16 ? at + 14 : at - 5 }, rule.label);
        } else {
          const at = x.at(rule.x), late = at > (m.left + right) / 2;
          make(svg, "line", { ...stroke, x1: at, x2: at, y1: m.top, y2: bottom });
          const place = { x: at + (late ? -5 : 5), y: m.top + 12 + 14 * row++, "text-anchor": late ? "end" : "start" };
          if (rule.label) make(svg, "text", { ...text, ...place }, rule.label);
        }
      }
    }

    // --- reading off --------------------------------------------------------------------------------------------------

    /** Where the cursor can stop: at each x with all that is there, or, where lines turn back, at single points. */
    findStops() {
      const turns = [...this.rows.entries()].some(([series, points]) =>
        (series.kind ?? "line") === "line" && marked(series) && points.some((point, index) => index && point.x < points[index - 1].x));
      const stops = new Map();
      for (const [series, points] of this.rows) {
        points.forEach((point, index) => {
          if (point.y === null || series.y[index] === null) return;
          const key = turns ? `${series.name}:${index}` : point.x;
          if (!stops.has(key)) stops.set(key, { x: point.x, y: turns ? point.y : null, hits: [] });
          stops.get(key).hits.push({ series, index, point });
        });
      }
      const found = [...stops.values()];
      return turns ? found : found.sort((a, b) => a.x - b.x);
    }

    point(event) {
      const box = this.svg.getBoundingClientRect();
      const zoom = this.width / box.width;
      const px = (event.clientX - box.left) * zoom, py = (event.clientY - box.top) * zoom;
      let best = -1, least = Infinity;
      this.stops.forEach((stop, index) => {
        const dx = this.x.at(stop.x) - px, dy = stop.y === null ? 0 : this.y.at(stop.y) - py;
        const far = dx * dx + dy * dy;
        if (far < least) [best, least] = [index, far];
      });
      this.show(best);
    }

    walk(event) {
      const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (event.key === "Escape") this.leave();
      if (!move || !this.stops.length) return;
      event.preventDefault();
      this.show(Math.min(this.stops.length - 1, Math.max(0, this.focus + move)));
    }

    show(index) {
      if (index < 0 || index === this.focus) return;
      this.focus = index;
      const stop = this.stops[index], { panel, x, y, m, bottom } = this;
      const at = x.at(stop.x);
      this.cursor.replaceChildren();
      make(this.cursor, "line", { class: "crosshair", x1: at, x2: at, y1: m.top, y2: bottom });
      this.tip.replaceChildren();
      const told = stop.hits.map((hit) => hit.series.labels?.[hit.index]).find((label) => label);
      html(this.tip, "div", "tip-title", told ?? `${panel.x.label}: ${words(stop.x, panel.x)}`);
      if (told) html(this.tip, "div", "tip-x", `${panel.x.label}: ${words(stop.x, panel.x)}`);
      for (const { series, index: at_, point } of stop.hits) {
        make(this.cursor, "circle", { cx: at, cy: y.at(point.y), r: 4.5, style: `fill:none;stroke:${colourOf(series)}`, "stroke-width": 2 });
        const row = html(this.tip, "div", "tip-row");
        html(row, "i", "swatch").style.background = series.classes?.[at_] ? classColour(series.classes[at_]) : colourOf(series);
        html(row, "span", "", series.name);
        const bound = series.censored?.[at_] ? "≥ " : "";
        const low = series.low?.[at_], high = series.high?.[at_];
        const range = low !== null && low !== undefined ? ` (${words(low, panel.y)} to ${words(high, panel.y)})` : "";
        html(row, "b", "", bound + words(series.y[at_], panel.y) + range);
        if (series.classes?.[at_]) html(this.tip, "div", "tip-x", series.classes[at_]);
      }
      this.tip.style.display = "block";
      const side = this.plot.offsetWidth / this.width, left = at * side;
      const room = this.root.offsetWidth - this.tip.offsetWidth - 4;
      const wanted = left + 14 + this.tip.offsetWidth > this.root.offsetWidth ? left - this.tip.offsetWidth - 14 : left + 14;
      this.tip.style.left = `${Math.max(0, Math.min(room, wanted))}px`;
      this.tip.style.top = `${this.plot.offsetTop + m.top + 4}px`;
    }

    leave() {
      this.focus = -1;
      this.tip.style.display = "none";
      this.cursor?.replaceChildren();
    }
  }

  class Chart {
    constructor(root, figure) {
      Object.assign(this, { root, figure, wide: figure.wide ?? false, width: 0 });
      const panels = figure.panels.filter((panel) => !panel.cells?.length);
      this.panels = panels.map((panel, index) => new Panel(this, panel, index, panels.length));
      new ResizeObserver(() => this.fit()).observe(root);
      this.fit();
    }

    fit() {
      const width = Math.floor(this.root.clientWidth);
      if (width < 40 || width === this.width) return;
      this.width = width;
      for (const panel of this.panels) panel.draw(Math.floor(panel.root.clientWidth));
      this.root.dataset.drawn = "yes";
    }

    /** For a sheet of paper, whatever the window's width is. */
    print() {
      this.width = 0;
      for (const panel of this.panels) panel.draw(this.wide && this.panels.length !== 2 ? 1000 : 500);
    }
  }

  // --- data -----------------------------------------------------------------------------------------------------------

  const COLUMNS = ["panel", "series", "x", "y", "low", "high", "lower bound", "class", "label"];

  function rowsOf(figure) {
    const rows = [];
    for (const panel of figure.panels) {
      for (const series of panel.series ?? []) {
        series.x.forEach((x, index) => rows.push([
          panel.title ?? "", series.name, panel.x.scale === "category" ? panel.x.categories[x] : x, series.y[index] ?? "",
          series.low?.[index] ?? "", series.high?.[index] ?? "", series.censored?.[index] ? "yes" : "",
          series.classes?.[index] ?? "", series.labels?.[index] ?? "",
        ]));
      }
      for (const cell of panel.cells ?? []) {
        rows.push([panel.title ?? "", panel.y.categories[cell.y], panel.x.categories[cell.x], cell.value ?? "", "", "", "",
          cell.level_class ?? "", cell.note ?? ""]);
      }
    }
    return rows;
  }

  function fillTable(details, figure) {
    if (details.querySelector("table")) return;
    const rows = rowsOf(figure);
    const used = COLUMNS.map((_, column) => rows.some((row) => row[column] !== ""));
    const table = html(html(details, "div", "scroll"), "table", "data");
    html(table, "caption", "hidden", `Data of: ${figure.title}`);
    const head = html(html(table, "thead"), "tr");
    COLUMNS.forEach((name, column) => { if (used[column]) html(head, "th", "", name).scope = "col"; });
    const body = html(table, "tbody");
    for (const row of rows) {
      const tr = html(body, "tr");
      row.forEach((value, column) => {
        if (used[column]) html(tr, "td", "", typeof value === "number" ? String(Number(value.toPrecision(6))) : value);
      });
    }
    const save = html(details, "button", "save", "Save as CSV");
    save.type = "button";
    save.addEventListener("click", () => {
      const quoted = (value) => (/[",\n]/.test(String(value)) ? `"${String(value).replaceAll('"', '""')}"` : String(value));
      const text = [COLUMNS, ...rows].map((row) => row.map(quoted).join(",")).join("\n") + "\n";
      const link = document.createElement("a");
      link.href = URL.createObjectURL(new Blob([text], { type: "text/csv" }));
      link.download = `${figure.id}.csv`;
      link.click();
      URL.revokeObjectURL(link.href);
    });
  }

  // --- the page -------------------------------------------------------------------------------------------------------

  function tabs(list) {
    const buttons = [...list.querySelectorAll("[role=tab]")];
    const choose = (chosen, focus) => {
      for (const button of buttons) {
        const on = button === chosen;
        button.setAttribute("aria-selected", String(on));
        button.tabIndex = on ? 0 : -1;
        document.getElementById(button.getAttribute("aria-controls")).hidden = !on;
      }
      if (focus) chosen.focus();
    };
    buttons.forEach((button, index) => {
      button.addEventListener("click", () => choose(button, false));
      button.addEventListener("keydown", (event) => {
        const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
        if (move) choose(buttons[(index + move + buttons.length) % buttons.length], true);
      });
    });
    choose(buttons[0], false);
  }

  const figures = new Map(JSON.parse(document.getElementById("figures").textContent).map((figure) => [figure.id, figure]));
  const roots = [...document.querySelectorAll("[data-figure]")];
  const charts = roots.map((root) => new Chart(root, figures.get(root.dataset.figure)));
  window.addEventListener("beforeprint", () => { for (const chart of charts) chart.print(); });
  window.addEventListener("afterprint", () => { for (const chart of charts) chart.fit(); });
  for (const details of document.querySelectorAll("details[data-of]")) {
    details.addEventListener("toggle", () => { if (details.open) fillTable(details, figures.get(details.dataset.of)); });
  }
  for (const list of document.querySelectorAll("[role=tablist]")) tabs(list);
})();
