/** The charts of an exploration. Each returns elements for a figure, or null while there is nothing to show. */

import { el, svg } from "./dom.js";
import * as format from "./format.js";
import { CROSS, line, linear, logarithmic, mark, plot } from "./plot.js";
import {
  fastestByPolicy, fitting, heatCells, latestByCandidate, paretoFront, peakLimit, PHASES, pointsOf, policiesOf, policyIndex,
  timelineOf,
} from "./trial_figures.js";

const HEIGHT = 300;

const speedText = (value) => (value >= 10_000 ? `${format.number(value / 1000)}k` : format.number(value));

function speedScale(values) {
  const low = Math.min(...values);
  const high = Math.max(...values);
  const room = 0.08 * (high - low || high);
  return (range) => linear([Math.max(0, low - room), high + room], range);
}

const titleOf = (point) =>
  `${point.isWholeModel ? "Whole model" : "Composed"}, trial ${point.number}: ${format.describe(point.candidate)}: ` +
  format.rate(point.tokensPerSecond, point) + (point.peakBytes === null ? "" : `, peak ${format.bytes(point.peakBytes)}`) +
  format.predicted(point.isPredicted) + (point.isOver ? `, ${format.OVER}` : "");

function markOf(point, x, y) {
  const kind = `mark p${point.index} ${point.isWholeModel ? "whole" : "composed"}${point.isPredicted ? " predicted" : ""}`;
  return mark(point.isOver ? CROSS : point.index, x, y, { class: kind }, titleOf(point));
}

function policyLegend(points) {
  const policies = policiesOf(points.map((point) => point.policy));
  const key = (index, kind) =>
    svg("svg", { width: 16, height: 16, viewBox: "-8 -8 16 16", "aria-hidden": "true" }, mark(index, 0, 0, { class: kind }));
  return el(
    "ul",
    { class: "legend" },
    policies.map((policy) => {
      const index = policyIndex(policy);
      return el("li", {}, key(index, `mark p${index} whole`), `recompute ${format.words(policy)}`);
    }),
    points.some((point) => !point.isWholeModel) &&
      el("li", {}, key(0, "mark composed plain"), "hollow: composed of measured parts, not run whole"),
    points.some((point) => point.isPredicted) && el("li", {}, key(0, "mark composed plain predicted"), `dotted: ${format.PREDICTED}`),
    points.some((point) => point.isWholeModel) && el("li", {}, key(0, "mark whole plain"), "filled: whole model"),
    points.some((point) => point.isOver) && el("li", {}, key(CROSS, "mark plain"), `cross: ${format.OVER}`),
  );
}

function recommendedRing(points, best) {
  const chosen = best && points.find((point) => JSON.stringify(point.candidate) === JSON.stringify(best.candidate));
  return (x, y) =>
    chosen ? svg("circle", { class: "ring", cx: x(chosen), cy: y(chosen), r: 10 }, svg("title", {}, "Recommended")) : "";
}

/** Throughput over the micro-batch, by policy, with a band of what the timing leaves open; a bar for one off the lines. */
export function throughputChart({ trials, best, width }) {
  const points = latestByCandidate(pointsOf(trials));
  if (points.length === 0) return null;
  const ends = points.flatMap((point) => [1 - point.interval, 1 + point.interval].map((k) => k * point.tokensPerSecond));
  const fits = fitting(points);
  const fastest = (fits.length > 0 ? fits : points).reduce((a, b) => (b.tokensPerSecond > a.tokensPerSecond ? b : a));
  const { image, marks, x, y } = plot({
    width,
    height: HEIGHT,
    makeX: (range) => logarithmic(points.map((point) => point.microBatch), range),
    makeY: speedScale(ends),
    xLabel: "micro_batch_size",
    yLabel: `${format.unit(points[0])} per device`,
    yText: speedText,
    label: `Throughput over the micro-batch size. ${points.length} candidates were tried. The fastest has ` +
      `${format.describe(fastest.candidate)}, with ${format.rate(fastest.tokensPerSecond, fastest)}${format.predicted(fastest.isPredicted)}.`,
  });
  const end = (point, sign) => [x.at(point.microBatch), y.at(point.tokensPerSecond * (1 + sign * point.interval))];
  const banded = new Set();
  for (const [policy, series] of fastestByPolicy(fits)) {
    const kind = `p${policyIndex(policy)}`;
    if (series.length > 1) {
      const corners = [...series.map((point) => end(point, 1)), ...series.toReversed().map((point) => end(point, -1))];
      marks.append(svg("polygon", { class: `band ${kind}`, points: corners.map((corner) => corner.join(",")).join(" ") }));
      for (const point of series) banded.add(point);
    }
    marks.append(line(series.map((point) => end(point, 0)), { class: `series ${kind}` }));
  }
  for (const point of points) {
    const px = x.at(point.microBatch);
    const [[, low], [, high]] = [end(point, -1), end(point, 1)];
    if (!banded.has(point) && low - high > 3) {
      marks.append(svg("line", { class: `interval p${point.index}`, x1: px, x2: px, y1: low, y2: high }));
    }
    marks.append(markOf(point, px, y.at(point.tokensPerSecond)));
  }
  marks.append(recommendedRing(points, best)((p) => x.at(p.microBatch), (p) => y.at(p.tokensPerSecond)));
  return [image, policyLegend(points)];
}

/** The front of throughput against memory, with the limit of peaks. */
export function frontChart({ trials, best, width }) {
  const points = latestByCandidate(pointsOf(trials)).filter((point) => point.peakBytes !== null);
  if (points.length === 0) return null;
  const limit = peakLimit(best);
  const peaks = points.map((point) => format.gib(point.peakBytes));
  const highest = Math.max(...peaks, limit === null ? 0 : format.gib(limit));
  const lowest = Math.min(...peaks);
  const front = paretoFront(points);
  const digits = highest < 2 ? 2 : highest < 10 ? 1 : 0;
  const { image, marks, x, y, top, bottom } = plot({
    width,
    height: HEIGHT,
    makeX: (range) => linear([lowest > 0.4 * highest ? 0.95 * lowest : 0, highest * 1.03], range, width < 420 ? 4 : 6),
    makeY: speedScale(points.map((point) => point.tokensPerSecond)),
    xLabel: "peak memory, GiB",
    yLabel: `${format.unit(points[0])} per device`,
    xText: (value) => value.toFixed(digits),
    yText: speedText,
    label: `Throughput against peak memory. No other candidate that was tried is both faster and smaller than these: ` +
      front.map((p) => `${format.bytes(p.peakBytes)} at ${format.rate(p.tokensPerSecond, p)}${format.predicted(p.isPredicted)}`)
        .join("; ") + ".",
  });
  const corners = front.flatMap((point, index) => {
    const px = x.at(format.gib(point.peakBytes));
    const before = index === 0 ? [] : [[px, y.at(front[index - 1].tokensPerSecond)]];
    return [...before, [px, y.at(point.tokensPerSecond)]];
  });
  marks.append(line(corners, { class: "front" }));
  for (const point of points) {
    const at = [x.at(format.gib(point.peakBytes)), y.at(point.tokensPerSecond)];
    marks.append(markOf(point, ...at));
  }
  if (limit !== null) {
    const px = x.at(format.gib(limit));
    marks.append(svg("line", { class: "limit", x1: px, x2: px, y1: top, y2: bottom }));
    marks.append(svg("text", { class: "limit-label", x: px, y: top - 2, "text-anchor": "end" }, `limit less the reserve: ${format.bytes(limit)}`));
  }
  marks.append(
    recommendedRing(points, best)((p) => x.at(format.gib(p.peakBytes)), (p) => y.at(p.tokensPerSecond)),
  );
  return [image, policyLegend(points)];
}

/** The memory of the recommended candidate by part, against the limit. */
export function memoryChart({ best, width }) {
  if (!best) return null;
  const parts = Object.entries(best.memory).filter(([, size]) => size > 0);
  const total = parts.reduce((sum, [, size]) => sum + size, 0);
  const reserve = Math.max(0, best.required_bytes - total);
  const all = [...parts, ...(reserve > 0 ? [["reserve", reserve]] : [])];
  const limit = best.memory_limit_bytes;
  const scale = linear([0, Math.max(limit, best.required_bytes)], [2, width - 2]);
  let start = 0;
  const bars = all.map(([name, size]) => {
    const from = scale.at(start);
    start += size;
    const title = `${format.words(name)}: ${format.bytes(size)}`;
    const size_ = { x: from, y: 22, width: Math.max(1, scale.at(start) - from), height: 36 };
    return svg("rect", { class: `part part-${name}`, ...size_ }, svg("title", {}, title));
  });
  const at = scale.at(limit);
  const text = all.map(([name, size]) => `${format.words(name)} ${format.bytes(size)}`).join(", ");
  const label = `Memory of the recommended candidate: ${text}; ${format.bytes(start)} of a limit of ${format.bytes(limit)}.`;
  return [
    svg(
      "svg",
      { class: "plot", width, height: 66, viewBox: `0 0 ${width} 66`, role: "img", "aria-label": label },
      svg("rect", { class: "room", x: scale.at(0), y: 22, width: at - scale.at(0), height: 36 }),
      bars,
      svg("line", { class: "limit", x1: at, x2: at, y1: 14, y2: 64 }),
      svg("text", { class: "limit-label", x: at, y: 12, "text-anchor": "end" }, `limit ${format.bytes(limit)}`),
    ),
    el(
      "table",
      { class: "parts" },
      el("caption", { class: "hidden" }, "Memory by part"),
      el(
        "tbody",
        {},
        all.map(([name, size]) =>
          el(
            "tr",
            {},
            el("th", { scope: "row" }, el("span", { class: `key part-${name}` }), format.words(name)),
            el("td", {}, format.bytes(size)),
            el("td", {}, format.percent(size / limit, 0)),
          ),
        ),
        el("tr", { class: "sum" }, el("th", { scope: "row" }, "with reserve"), el("td", {}, format.bytes(start)),
          el("td", {}, format.percent(start / limit, 0))),
      ),
    ),
  ];
}

const FAILED = { out_of_memory: "no room", timed_out: "timed out", crashed: "crashed", unsupported: "unsupported" };

/** The fastest tokens/s of each recomputation policy and micro-batch, as a table whose colours follow its figures. */
export function heatMap({ trials, best }) {
  const cells = heatCells(trials);
  if (cells.size === 0) return null;
  const tried = [...cells.keys()].map((key) => key.split(" "));
  const policies = policiesOf(tried.map(([policy]) => policy));
  const sizes = [...new Set(tried.map(([, size]) => Number(size)))].sort((a, b) => a - b);
  const speeds = [...cells.values()].flatMap(({ point }) => (point && !point.isOver ? [point.tokensPerSecond] : []));
  const [low, high] = [Math.min(...speeds), Math.max(...speeds)];
  const cell = (policy, size) => {
    const known = cells.get(`${policy} ${size}`);
    if (known === undefined) return el("td", { class: "unknown" }, el("span", { class: "hidden" }, "not tried"));
    if (known.outcome !== undefined) return el("td", { class: "failed" }, FAILED[known.outcome] ?? known.outcome);
    const { point } = known;
    const chosen = best?.candidate.recompute === policy && best.candidate.micro_batch_size === size;
    const share = high > low ? (point.tokensPerSecond - low) / (high - low) : 1;
    const made = el(
      "td",
      { class: `${point.isOver ? "over" : "heat"}${chosen ? " chosen" : ""}`, title: titleOf(point) },
      speedText(point.tokensPerSecond),
      point.isPredicted && [el("span", { "aria-hidden": "true" }, "*"), el("span", { class: "hidden" }, format.predicted(true))],
      point.isOver && [el("span", { "aria-hidden": "true" }, "\u00a0✕"), el("span", { class: "hidden" }, ` ${format.OVER}`)],
      chosen && el("span", { class: "hidden" }, " recommended"),
    );
    made.style.setProperty("--share", `${Math.round(100 * share)}%`);
    return made;
  };
  return el(
    "div",
    { class: "scroll", tabindex: "0", role: "region", "aria-label": "Tokens/s by recomputation and micro-batch size" },
    el(
      "table",
      { class: "heatmap" },
      el("caption", { class: "hidden" }, "The fastest tokens/s by recomputation policy (rows) and micro-batch size (columns)"),
      el("thead", {}, el("tr", {}, el("td"), sizes.map((size) => el("th", { scope: "col" }, size)))),
      el(
        "tbody",
        {},
        policies.map((policy) =>
          el("tr", {}, el("th", { scope: "row" }, format.words(policy)), sizes.map((size) => cell(policy, size))),
        ),
      ),
    ),
  );
}

/** The confidence over time, with the target. */
export function confidenceChart({ steps, target, width }) {
  if (steps.length === 0) return null;
  const last = steps.at(-1);
  const end = Math.max(1.03 * last.seconds, 0.01);
  const { image, marks, x, y, left, right } = plot({
    width,
    height: HEIGHT,
    makeX: (range) => linear([0, end], range, width < 420 ? 4 : 6),
    makeY: (range) => linear([0, 100], range),
    xLabel: "seconds since the start",
    yLabel: "confidence, out of 100",
    xText: (value) => (end < 5 ? value.toFixed(2) : format.number(value)),
    label: `Confidence over time: ${steps[0].confidence} at first, ${last.confidence} after ${format.seconds(last.seconds)}.`,
  });
  if (target !== null) {
    marks.append(svg("line", { class: "limit", x1: left, x2: right, y1: y.at(target), y2: y.at(target) }));
    marks.append(svg("text", { class: "limit-label", x: left + 4, y: y.at(target) - 5 }, `target ${target}`));
  }
  const corners = steps.flatMap((step, index) => {
    const px = x.at(step.seconds);
    return [...(index === 0 ? [] : [[px, y.at(steps[index - 1].confidence)]]), [px, y.at(step.confidence)]];
  });
  marks.append(line(corners, { class: "confidence" }));
  steps.forEach((step, index) => {
    const changed = index === 0 || steps[index - 1].microBatch !== step.microBatch;
    const title = `After ${format.seconds(step.seconds)}: micro_batch_size ${step.microBatch}, confidence ${step.confidence}`;
    marks.append(mark(0, x.at(step.seconds), y.at(step.confidence), { class: "dot" }, title, changed ? 4.5 : 2.5));
    if (changed) {
      marks.append(svg("text", { class: "note", x: x.at(step.seconds) + 6, y: y.at(step.confidence) - 6 }, step.microBatch));
    }
  });
  return [image];
}

/** What every second went to: a row for each trial, and the sums. */
export function timelineChart({ all, events, startedAt, finishedAt, width }) {
  const { spans, sums, end, isReplayed } = timelineOf(all, events, startedAt, finishedAt);
  if (spans.length === 0) return null;
  const row = Math.max(5, Math.min(16, 260 / spans.length));
  const height = Math.round(row * spans.length) + 60;
  const every = Math.ceil(16 / row);
  const { image, marks, x, y } = plot({
    width,
    height,
    makeX: (range) => linear([0, end], range, width < 420 ? 4 : 8),
    makeY: ([bottom, top]) => ({
      at: (index) => top + ((index + 0.5) / spans.length) * (bottom - top),
      ticks: spans.map((_, index) => index).filter((index) => index % every === 0),
    }),
    xLabel: isReplayed ? "seconds of trials, end to end" : "seconds since the start",
    yLabel: "trial",
    xText: (value) => (end < 5 ? value.toFixed(1) : format.number(value)),
    yText: (index) => spans[index].trial.number,
    label: `${spans.length} trials over time, ${format.seconds(end)}: ${sums.map(([name, seconds]) => `${name} ${format.seconds(seconds)}`).join(", ")}.`,
  });
  spans.forEach(({ trial, start, seconds, phases }, index) => {
    let from = start;
    const parts = phases.map((size, phase) => {
      const part = { x: x.at(from), width: Math.max(0, x.at(from + size) - x.at(from)), y: y.at(index) - row / 2 + 0.5, height: row - 1 };
      from += size;
      return size > 0 && svg("rect", { class: `phase ${phaseClass(PHASES[phase])}`, ...part });
    });
    const spent = phases.map((size, phase) => size > 0 && `${PHASES[phase]} ${format.seconds(size)}`).filter(Boolean).join(", ");
    const title = `Trial ${trial.number}: ${format.describe(trial.measurement.candidate)}: ${format.seconds(seconds)}: ${spent}`;
    marks.append(svg("g", {}, svg("title", {}, title), parts));
  });
  const total = sums.reduce((sum, [, seconds]) => sum + seconds, 0);
  return [
    image,
    el("table", { class: "parts" }, el("caption", { class: "hidden" }, "Seconds by phase"),
      el("tbody", {}, sums.map(([name, seconds]) =>
        el("tr", {}, el("th", { scope: "row" }, el("span", { class: `key ${phaseClass(name)}` }), name),
          el("td", {}, format.seconds(seconds)), el("td", {}, format.percent(seconds / total, 0)))))),
    el("p", { class: "quiet" }, isReplayed
      ? "A recording was replayed: the seconds are those of its measurement, and no idle time is known."
      : "Idle is the time in which no trial ran."),
  ];
}

const phaseClass = (name) => `phase-${name.replace(/\W/g, "-")}`;

/** How much of the differences in speed each dimension explains by itself. */
export function importanceChart({ importance }) {
  const shares = Object.entries(importance ?? {});
  if (shares.length === 0) return null;
  return el(
    "dl",
    { class: "bars" },
    shares.map(([name, share]) => {
      const bar = el("span", { class: "bar-of", "aria-hidden": "true" });
      bar.style.setProperty("--share", format.percent(share));
      return el("div", {}, el("dt", {}, format.words(name)), el("dd", {}, bar, el("span", {}, format.percent(share, 0))));
    }),
  );
}
