"use strict";
// The library of all pages: elements, number formats, cards, tables and drawings. A page's own script follows and draws the data that
// stand beside both. All text goes through textContent, so names cannot become markup.

const data = JSON.parse(document.getElementById("data").textContent);
const page = document.getElementById("page");
const cards = element("div", { class: "cards" });
const SVG = "http://www.w3.org/2000/svg";
const COLORS = ["--a", "--b", "--c", "--d", "--e", "--f", "--g", "--h"].map((name) => `var(${name})`);
const color = (index) => COLORS[index % COLORS.length];

function element(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

function shape(parent, name, attributes, text) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  parent.append(node);
  return node;
}

// Number formats.
const is_missing = (value) => value === null || value === undefined || !Number.isFinite(value);
function scaled(value, base, units, digits = 3) {
  if (is_missing(value)) return "–";
  let unit = 0;
  while (unit + 1 < units.length && Math.abs(value) >= base * 0.99995) { value /= base; unit += 1; }
  return Number(value.toPrecision(Math.max(digits, Math.ceil(Math.log10(Math.abs(value) + 1))))) + units[unit];
}
const count = (value) => scaled(value, 1000, ["", "k", "M", "G", "T", "P"]);
// "290 GFLOP/s": the prefix belongs to the unit.
const rate = (value, unit) => count(value).replace(/([kMGTP]?)$/, ` $1${unit}`);
const bytes = (value) => scaled(value, 1024, [" B", " KiB", " MiB", " GiB", " TiB", " PiB"]);
const plain = (value) => {
  if (is_missing(value)) return "–";
  const size = Math.abs(value);
  return size !== 0 && (size < 1e-3 || size >= 1e6) ? value.toExponential(2).replace(/\.?0*e\+?/, "e") : String(Number(value.toPrecision(5)));
};
const percent = (value, digits = value < 0.0995 ? 1 : 0) => (is_missing(value) ? "–" : `${(100 * value).toFixed(digits)} %`);
function ms(value) {
  if (is_missing(value)) return "–";
  if (value >= 1e5) return seconds(value / 1000);
  return value >= 1000 ? `${(value / 1000).toPrecision(3)} s` : `${Number(value.toPrecision(3))} ms`;
}
function seconds(value) {
  if (is_missing(value)) return "–";
  if (value < 1) return ms(value * 1000);
  if (value < 60) return `${Number(value.toPrecision(2))} s`;
  const total = Math.round(value), days = Math.floor(total / 86400), hours = Math.floor(total / 3600), minutes = Math.floor(total / 60);
  if (days > 0) return `${days} d ${hours % 24} h`;
  return hours > 0 ? `${hours} h ${minutes % 60} min` : `${minutes} min ${total % 60} s`;
}

const header = (title, ...lines) => element("header", {}, element("h1", {}, title), ...lines);

// Appends a card. `say(words)` writes into its head what is under the pointer, `say()` what stands there otherwise, and `rest(words)`
// changes the latter.
function card(title, { wide = false, note, rest = "" } = {}) {
  const readout = element("span", { class: "readout" }, rest);
  const body = element("section", { class: wide ? "card wide" : "card" }, element("div", { class: "head" }, element("h2", {}, title), readout));
  if (note) body.append(element("p", {}, note));
  cards.append(body);
  const say = (words = rest) => { readout.textContent = words; };
  return { body, say, rest: (words) => { rest = words; say(); } };
}

// Draws a card or another part of the page. A part whose data are damaged, or come from another version, costs only itself.
function part(draw) {
  try { draw(); } catch (error) { console.warn(`${draw.name}: ${error}`); }
}

const note = (body, text) => body.append(element("p", { class: "small" }, text));
const swatch = (color, name, opacity = 1) => element("span", { class: "swatch" }, element("i", { style: `background:${color};opacity:${opacity}` }), name);

function legend(body, entries) {
  body.append(element("div", { class: "legend" }, ...entries.map(([name, color, opacity]) => swatch(color, name, opacity))));
}

// Entries are [value, name, is bad].
function tiles(entries) {
  return element("div", { class: "tiles" }, ...entries.map(([value, name, is_bad]) =>
    element("div", { class: "tile" }, element("b", is_bad ? { class: "bad" } : {}, value), element("span", {}, name))));
}

// A stacked bar whose full width is `whole`. Parts are [size, color, title].
function stack(parts, { whole = parts.reduce((sum, [size]) => sum + size, 0), thin = false } = {}) {
  return element("div", { class: thin ? "stack thin" : "stack" }, ...parts.map(([size, color, title]) =>
    element("div", { style: `width:${(100 * size) / (whole || 1)}%;background:${color}`, title })));
}

// Appends a table. A column without a title (not even an empty one) is left out. A cell is text, an element, or a whole td. Columns named in `left` are
// aligned to the left, as the first is; rows after the first `shown` unfold.
function table(body, columns, rows, { left = [], named = false, shown = rows.length } = {}) {
  const used = columns.map((_, index) => index).filter((index) => typeof columns[index] === "string");
  const looks = (index) => (left.includes(columns[index]) ? { class: "left" } : {});
  const cell = (content, index) => (content instanceof HTMLTableCellElement ? content : element("td", looks(index), content));
  const of_rows = (rows) => element("div", { class: "scroll" }, element("table", named ? { class: "named" } : {},
    element("tr", {}, ...used.map((index) => element("th", looks(index), columns[index]))),
    ...rows.map((row) => element("tr", {}, ...used.map((index) => cell(row[index], index))))));
  body.append(of_rows(rows.slice(0, shown)));
  if (rows.length > shown) {
    body.append(element("details", {}, element("summary", {}, `${rows.length - shown} more`), of_rows(rows.slice(shown))));
  }
}

// About `wanted` round numbers between two values.
function ticks(low, high, wanted) {
  const rough = (high - low) / Math.max(1, wanted);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough) ?? power;
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9) * step; at <= high + step * 1e-9; at += step) found.push(Math.abs(at) < step * 1e-9 ? 0 : at);
  return found;
}
function powers(low, high) {
  if (!(low > 0 && high < Infinity)) return [];
  const found = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power += 1) found.push(10 ** power);
  const shown = found.filter((value) => value >= low * 0.999 && value <= high * 1.001);
  return shown.length > 1 ? shown : [low, high];
}

function scale(low, high, from, to, log) {
  const f = log ? Math.log10 : (value) => value;
  const span = f(high) - f(low) || 1;
  return (value) => from + ((f(value) - f(low)) / span) * (to - from);
}

// Draws with the width of the page, and again whenever that changes. `height` may be a function of the width.
function drawing(body, height, draw) {
  const svg = shape(body, "svg", { role: "img", "aria-label": body.closest("section")?.querySelector("h2").textContent ?? "" });
  let width = 0;
  const redraw = () => {
    const now = Math.round(body.clientWidth - parseFloat(getComputedStyle(body).paddingLeft) * 2);
    if (now === width || now < 40) return;
    width = now;
    const tall = typeof height === "function" ? height(width) : height;
    svg.replaceChildren();
    svg.setAttribute("height", tall);
    svg.setAttribute("viewBox", `0 0 ${width} ${tall}`);
    draw(svg, width, tall);
  };
  redraw();
  on_resize(body, redraw);
}

// A drawing may change the size of what is observed, so it waits for the next frame.
function on_resize(body, redraw) {
  new ResizeObserver(() => requestAnimationFrame(redraw)).observe(body);
}

// Acts when a pointer or a finger is on a part of a drawing.
function touch(part, act) {
  part.onpointerenter = act;
  part.onpointerdown = act;
}

// Vertical lines at round times of a step, with their names below.
function time_axis(svg, x, step_ms, top, width, height) {
  for (const at of ticks(0, step_ms, width / 110)) {
    shape(svg, "line", { class: "grid", x1: x(at), x2: x(at), y1: top, y2: height - 20 });
    shape(svg, "text", { x: x(at), y: height - 5, "text-anchor": x(at) > width - 30 ? "end" : "middle" }, ms(at));
  }
}

// Work per byte against work per second, below the limits of memory (`bandwidth`, bytes per second) and arithmetic (`roofs`: [name,
// FLOP/s]). Points are {flops, bytes, seconds, share, color, words}; `is_ring` draws the border alone.
function roofline({ body, say }, points, roofs, bandwidth) {
  const shown = points.filter(({ flops, bytes, seconds }) => flops > 0 && bytes > 0 && seconds > 0);
  if (shown.length === 0 || !(bandwidth > 0)) return;
  const work = (point) => point.flops / point.bytes, reached = (point) => point.flops / point.seconds;
  const top = Math.max(...roofs.map(([, peak]) => peak)) * 1.6;
  const low = Math.min(...shown.map(reached)) / 1.6;
  const from = Math.min(...shown.map(work)) / 1.6, to = Math.max(...shown.map(work), (2 * top) / bandwidth) * 1.6;
  drawing(body, 260, (svg, width, height) => {
    const left = 46, right = width - 10, bottom = height - 34;
    const x = scale(from, to, left, right, true), y = scale(low, top, bottom, 8, true);
    for (const at of powers(low, top)) {
      shape(svg, "line", { class: "grid", x1: left, x2: right, y1: y(at), y2: y(at) });
      shape(svg, "text", { x: left - 6, y: y(at) + 4, "text-anchor": "end" }, count(at));
    }
    for (const at of powers(from, to)) {
      shape(svg, "line", { class: "grid", x1: x(at), x2: x(at), y1: 8, y2: bottom });
      shape(svg, "text", { x: x(at), y: bottom + 15, "text-anchor": "middle" }, plain(Number(at.toPrecision(2))));
    }
    shape(svg, "text", { x: right, y: height - 4, "text-anchor": "end" }, "FLOPs per byte; vertical: FLOP/s");
    for (const [name, peak] of roofs) {
      const start = Math.max(from, low / bandwidth);
      const path = [[start, start * bandwidth], [peak / bandwidth, peak], [to, peak]];
      shape(svg, "polyline", { points: path.map(([a, b]) => `${x(a)},${y(b)}`).join(" "), fill: "none", stroke: "var(--soft)", "stroke-width": 1.4 });
      const corner = x(peak / bandwidth), is_near = corner < left + 150;
      shape(svg, "text", { x: is_near ? corner : corner - 8, y: y(peak) - 4, "text-anchor": is_near ? "start" : "end" }, `${name} ${rate(peak, "FLOP/s")}`);
    }
    const slope = Math.sqrt(Math.max(from, low / bandwidth) * (Math.min(...roofs.map(([, peak]) => peak)) / bandwidth));
    shape(svg, "text", { x: x(slope) - 8, y: y(slope * bandwidth) - 6, "text-anchor": "end" }, rate(bandwidth, "B/s"));
    // Small points are above large ones.
    const most = Math.max(...shown.map(({ share }) => share)) || 1;
    for (const point of [...shown].sort((a, b) => b.share - a.share)) {
      const dot = shape(svg, "circle", {
        cx: x(work(point)), cy: y(reached(point)), r: 3.5 + 8 * Math.sqrt(point.share / most), fill: point.color, stroke: point.color,
        "fill-opacity": point.is_ring ? 0.15 : 0.7,
      });
      touch(dot, () => say(point.words));
      dot.onpointerleave = () => say();
    }
  });
}
