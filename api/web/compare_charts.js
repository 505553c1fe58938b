/** The charts of a comparison. Each side has a letter, a colour and a shape, the same in every chart. */

import { el, svg } from "./dom.js";
import * as format from "./format.js";
import { CROSS, line, linear, logarithmic, mark, plot } from "./plot.js";

const HEIGHT = 320;
const LETTER_PIXELS = 14; // between two letters at the ends of curves
const ROW = { height: 44, bar: 18, text: 14 };

/** The mark of a side, for a text. */
export const keyOf = (index) =>
  svg("svg", { class: "key-mark", width: 16, height: 16, viewBox: "-8 -8 16 16", "aria-hidden": "true" },
    mark(index, 0, 0, { class: `mark whole p${index}` }));

/** The letter of a side with its mark. */
export const letterOf = ({ index, letter }) => el("span", { class: "letter" }, keyOf(index), letter);

const overOf = ({ fits }) => (fits ? "" : `, ${format.OVER}`);

/** The fastest throughput at each micro-batch size, a curve for each side; a ring is the candidate that is compared. */
export function curvesChart(sides, width) {
  const speeds = sides.flatMap(({ curve }) => curve.map((point) => point.tokens_per_second));
  const [low, high] = [Math.min(...speeds), Math.max(...speeds)];
  const beyond = 11 + 2 * sides.length; // the largest ring; the letter of a curve is outside of it
  const room = 0.08 * (high - low || high);
  const { image, marks, x, y } = plot({
    width,
    height: HEIGHT,
    makeX: ([from, to]) => logarithmic(sides.flatMap(({ curve }) => curve.map((point) => point.micro_batch_size)), [from, to - beyond]),
    makeY: (range) => linear([Math.max(0, low - room), high + room], range),
    xLabel: "micro_batch_size",
    yLabel: `${format.unit(sides[0])} per device`,
    yText: (value) => (value >= 10_000 ? `${format.number(value / 1000)}k` : format.number(value)),
    label: "Throughput over the micro-batch size. " + sides.map((side) => `${side.letter}: ` +
      side.curve.map((point) => `${format.number(point.tokens_per_second)} at ${point.micro_batch_size}${overOf(point)}`).join(", ")).join(". ") + ".",
  });
  const at = (point) => [x.at(point.micro_batch_size), y.at(point.tokens_per_second)];
  for (const { index, letter, curve, candidate } of sides) {
    marks.append(line(curve.map(at), { class: `series p${index}` }));
    for (const point of curve) {
      const title = `${letter}, micro_batch_size ${point.micro_batch_size}: ${format.rate(point.tokens_per_second, sides[0])}${overOf(point)}`;
      const kind = point.is_measured_whole ? "whole" : "composed";
      marks.append(mark(point.fits ? index : CROSS, ...at(point), { class: `mark p${index} ${kind}` }, title));
      if (point.micro_batch_size === candidate.micro_batch_size) {
        const [cx, cy] = at(point);
        marks.append(svg("circle", { class: `ring p${index}`, cx, cy, r: 8 + 2 * index }, svg("title", {}, `${letter} is compared with this one`)));
      }
    }
  }
  let above = -Infinity; // letters at the ends of curves that end close to each other stand below each other
  const ends = sides.map(({ letter, curve }) => [letter, ...at(curve.at(-1))]).sort((a, b) => a[2] - b[2]);
  for (const [letter, px, py] of ends) {
    above = Math.max(py + 4, above + LETTER_PIXELS);
    marks.append(svg("text", { class: "note", x: px + beyond, y: above }, letter));
  }
  const isAnyOver = sides.some(({ curve }) => curve.some(({ fits }) => !fits));
  const kinds = new Set(sides.flatMap(({ curve }) => curve.map((point) => point.is_measured_whole)));
  const key = (kind, shape = 0) => svg("svg", { class: "key-mark", viewBox: "-8 -8 16 16", "aria-hidden": "true" }, mark(shape, 0, 0, { class: `mark plain ${kind}` }));
  return [image, el("ul", { class: "legend" },
    kinds.has(false) && el("li", {}, key("composed"), "hollow: composed of measured blocks"),
    kinds.has(true) && el("li", {}, key("whole"), "filled: whole model"),
    isAnyOver && el("li", {}, key("", CROSS), `cross: ${format.OVER}`))];
}

const RESERVE = "reserve";

/** The parts of the memory that a side needs, and the reserve. */
function partsOf({ memory, required_bytes: required }) {
  const total = Object.values(memory).reduce((sum, size) => sum + size, 0);
  return { ...memory, ...(required > total && { [RESERVE]: required - total }) };
}

/** The memory that each side needs, by part: bars of one scale, and their figures as a table. */
export function memoryBars(sides, width) {
  const parts = sides.map(partsOf);
  const names = [...new Set(parts.flatMap(Object.keys))].sort((a, b) => (a === RESERVE) - (b === RESERVE));
  const most = Math.max(...sides.map((side) => side.required_bytes));
  const scale = linear([0, most], [0, width - 2]);
  const bars = sides.flatMap((side, row) => {
    const top = row * ROW.height;
    let start = 0;
    const name = `${side.letter}  ${format.bytes(side.required_bytes)} of ${format.bytes(side.memory_limit_bytes)}`;
    return [
      svg("text", { class: "note", x: 0, y: top + ROW.text }, name),
      ...names.filter((part) => part in parts[row]).map((part) => {
        const from = scale.at(start);
        start += parts[row][part];
        const place = { x: from, y: top + 20, width: Math.max(1, scale.at(start) - from), height: ROW.bar };
        return svg("rect", { class: `part part-${part}`, ...place },
          svg("title", {}, `${side.letter}, ${format.words(part)}: ${format.bytes(parts[row][part])}`));
      }),
    ];
  });
  const height = sides.length * ROW.height;
  const said = sides.map((side) => `${side.letter} needs ${format.bytes(side.required_bytes)} of ${format.bytes(side.memory_limit_bytes)}`);
  const digits = format.gib(most) < 10 ? 2 : 1;
  const figure = (size) => el("td", {}, size === undefined ? "–" : format.gib(size).toFixed(digits));
  return [
    svg("svg", { class: "plot", width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `Memory by part. ${said.join(". ")}.` }, bars),
    el(
      "table",
      { class: "parts" },
      el("caption", { class: "hidden" }, "GiB by part"),
      el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "GiB"), sides.map((side) => el("td", {}, letterOf(side))))),
      el("tbody", {},
        names.map((part) => el("tr", {},
          el("th", { scope: "row" }, el("span", { class: `key part-${part}` }), format.words(part)),
          parts.map((one) => figure(one[part])))),
        el("tr", { class: "sum" }, el("th", { scope: "row" }, "with reserve"), sides.map((side) => figure(side.required_bytes)))),
    ),
  ];
}
