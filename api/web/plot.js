/** Scales, axes and marks of small SVG charts. Colours come from the style sheet, by class. */

import { svg } from "./dom.js";

const MARGIN = { top: 12, right: 16, bottom: 46, left: 62 };

/** A scale maps values of `domain` to pixels of `range`, and knows where its ticks are. */
export function linear(domain, range, count = 5) {
  const [low, high] = domain;
  const at = (value) => range[0] + ((value - low) / (high - low || 1)) * (range[1] - range[0]);
  return { at, ticks: niceTicks(low, high, count) };
}

/** A scale for positive values that double, with a tick at each of `values`, as far as labels have room. */
export function logarithmic(values, range, room = 26) {
  const sorted = [...new Set(values)].sort((a, b) => a - b);
  const low = Math.log(sorted[0] / 1.15);
  const high = Math.log(sorted.at(-1) * 1.15);
  const at = (value) => range[0] + ((Math.log(value) - low) / (high - low)) * (range[1] - range[0]);
  const ticks = [];
  for (const value of sorted) {
    if (ticks.length === 0 || at(value) - at(ticks.at(-1)) >= room) ticks.push(value);
  }
  return { at, ticks };
}

/** Round values from `low` to `high`, about `count` of them. */
function niceTicks(low, high, count) {
  const raw = (high - low || 1) / count;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = power * ([1, 2, 5].find((factor) => factor * power >= raw) ?? 10);
  const ticks = [];
  for (let value = (Math.ceil(low / step - 1e-9) + 0) * step; // -0 + 0 is 0
    value <= high + step * 1e-9; value += step) ticks.push(value);
  return ticks;
}

/**
 * Return an SVG image with axes, and its layer for marks.
 *
 * `makeX` and `makeY` get a range in pixels and return a scale. `label` says in words what the image shows.
 */
export function plot({ width, height, makeX, makeY, xLabel, yLabel, xText = String, yText = String, label }) {
  const x = makeX([MARGIN.left, width - MARGIN.right]);
  const y = makeY([height - MARGIN.bottom, MARGIN.top]);
  const left = MARGIN.left;
  const right = width - MARGIN.right;
  const bottom = height - MARGIN.bottom;
  const marks = svg("g");
  const image = svg(
    "svg",
    { class: "plot", width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label },
    y.ticks.map((value) => svg("line", { class: "grid", x1: left, x2: right, y1: y.at(value), y2: y.at(value) })),
    y.ticks.map((value) => svg("text", { x: left - 8, y: y.at(value) + 4, "text-anchor": "end" }, yText(value))),
    x.ticks.map((value) => svg("text", { x: x.at(value), y: bottom + 18, "text-anchor": "middle" }, xText(value))),
    svg("line", { class: "axis", x1: left, x2: right, y1: bottom, y2: bottom }),
    svg("text", { class: "axis-label", x: (left + right) / 2, y: height - 6, "text-anchor": "middle" }, xLabel),
    svg(
      "text",
      { class: "axis-label", "text-anchor": "middle", transform: `translate(14 ${(MARGIN.top + bottom) / 2}) rotate(-90)` },
      yLabel,
    ),
    marks,
  );
  return { image, marks, x, y, left, right, top: MARGIN.top, bottom };
}

/** A line through points, `[x, y]` in pixels. */
export const line = (points, attributes) =>
  svg("polyline", { fill: "none", ...attributes, points: points.map((point) => point.join(",")).join(" ") });

const cross = (r) => `M${-r},${-r}L${r},${r}M${r},${-r}L${-r},${r}`;
const SHAPES = [
  (r) => `M${-r},0a${r},${r} 0 1,0 ${2 * r},0a${r},${r} 0 1,0 ${-2 * r},0Z`,
  (r) => `M${-r},${-r}H${r}V${r}H${-r}Z`,
  (r) => `M0,${-1.3 * r}L${1.2 * r},${r}H${-1.2 * r}Z`,
  (r) => `M0,${-1.4 * r}L${1.4 * r},0L0,${1.4 * r}L${-1.4 * r},0Z`,
  (r) => `M0,${1.3 * r}L${1.2 * r},${-r}H${-1.2 * r}Z`,
];

export const CROSS = -1;

/** A mark whose shape depends on `kind`, so that colour is not the only difference. */
export function mark(kind, x, y, attributes, title = null, radius = 4.5) {
  return svg(
    "path",
    { d: kind === CROSS ? cross(radius) : SHAPES[kind % SHAPES.length](radius), transform: `translate(${x.toFixed(1)} ${y.toFixed(1)})`, ...attributes },
    title === null ? null : svg("title", {}, title),
  );
}
