/** Candidates as lines across their choices, which end at their speed. A choice of a value leaves the others out. */

import { el, svg } from "./dom.js";
import * as format from "./format.js";
import { line, linear } from "./plot.js";
import { fitting, latestByCandidate, pointsOf, varyingOf } from "./trial_figures.js";

const [TOP, BOTTOM, SIDE, HEIGHT] = [40, 16, 60, 320];
const AXIS_WIDTH = 105; // of the narrowest, so that names and values can be read
const SPREAD = 14; // lines of one value lie this far apart at most, the faster ones higher

const textOf = (value) => (value === null ? "off" : format.words(String(value)));

/** Folded until it is asked for, and drawn only while it is open. */
export class ParallelView {
  constructor() {
    this.chosen = new Map();
    this.selects = el("div", { class: "filters" });
    this.said = el("p", { class: "quiet", role: "status" });
    this.body = el("div", { class: "scroll whole", tabindex: "0", role: "region", "aria-label": "Candidates by their choices" });
    this.root = el("details", { class: "card", ontoggle: () => this.#draw() },
      el("summary", {}, el("h2", {}, "Candidates by their choices")),
      el("p", { class: "quiet" }, "Each line is a candidate that was tried. It ends at its tokens/s, from slow (orange) to fast (blue). A grey one is " + format.OVER + "."),
      this.selects, this.said, this.body);
  }

  /** Show the candidates of `trials` that ran. */
  update(trials, best) {
    this.points = latestByCandidate(pointsOf(trials));
    this.best = best && JSON.stringify(best.candidate);
    this.varying = varyingOf(this.points);
    this.root.hidden = this.varying.length === 0;
    this.#draw();
  }

  #draw() {
    if (!this.root.open || this.root.hidden) return;
    this.#offer();
    const shown = this.points.filter(({ candidate }) => [...this.chosen].every(([name, value]) => textOf(candidate[name] ?? null) === value));
    const fastest = fitting(shown).reduce((a, b) => (b.tokensPerSecond > (a?.tokensPerSecond ?? 0) ? b : a), null);
    const said = `${shown.length} of ${this.points.length} candidates.` +
      (fastest ? ` The fastest: ${format.describe(fastest.candidate)}, ${format.rate(fastest.tokensPerSecond, fastest)}${format.predicted(fastest.isPredicted)}.` : "");
    if (this.said.textContent !== said) this.said.textContent = said;
    this.body.replaceChildren(this.#image(shown, said));
  }

  /** Offer the values of each axis, anew only if there are others, so that an open list stays open. */
  #offer() {
    const text = JSON.stringify(this.varying);
    if (this.offered === text) return;
    this.offered = text;
    const focused = document.activeElement?.dataset?.axis;
    this.selects.replaceChildren(...this.varying.map(([name, values]) => {
      const choose = ({ target }) => {
        if (target.value === "") this.chosen.delete(name);
        else this.chosen.set(name, target.value);
        this.#draw();
      };
      const option = (value) => el("option", { selected: this.chosen.get(name) === value }, value);
      return el("label", {}, `${format.words(name)} `,
        el("select", { "data-axis": name, onchange: choose }, el("option", { value: "" }, "all"), values.map(textOf).map(option)));
    }));
    if (focused) this.selects.querySelector(`[data-axis="${focused}"]`)?.focus({ preventScroll: true });
  }

  #image(shown, label) {
    const rates = this.points.map((point) => point.tokensPerSecond);
    const [low, high] = [Math.min(...rates), Math.max(...rates)];
    const room = 0.05 * (high - low || high);
    const width = Math.max(this.body.clientWidth - 4, this.varying.length * AXIS_WIDTH + 2 * SIDE);
    const x = (index) => SIDE + (index * (width - 2 * SIDE)) / this.varying.length;
    const rate = linear([low - room, high + room], [HEIGHT - BOTTOM, TOP]);
    const share = (point) => (high > low ? (point.tokensPerSecond - low) / (high - low) : 1);
    const at = (values, value) => HEIGHT - BOTTOM - SPREAD - (values.indexOf(value) * (HEIGHT - BOTTOM - TOP - 2 * SPREAD)) / (values.length - 1);
    const strand = (point) => {
      const corners = this.varying.map(([name, values], index) =>
        [x(index), at(values, point.candidate[name] ?? null) - SPREAD * (share(point) - 0.5)]);
      corners.push([x(this.varying.length), rate.at(point.tokensPerSecond)]);
      const isBest = JSON.stringify(point.candidate) === this.best;
      const made = line(corners, { class: `strand${isBest ? " best" : ""}${point.isPredicted ? " predicted" : ""}${point.isOver ? " over" : ""}` });
      made.append(svg("title", {}, `${isBest ? "Recommended: " : ""}${format.describe(point.candidate)}: ` +
        format.rate(point.tokensPerSecond, point) + format.predicted(point.isPredicted) + (point.isOver ? `, ${format.OVER}` : "")));
      made.style.setProperty("--share", `${Math.round(100 * share(point))}%`);
      return made;
    };
    const axis = (index, name, ticks) => [
      svg("line", { class: "axis", x1: x(index), x2: x(index), y1: TOP, y2: HEIGHT - BOTTOM }),
      svg("text", { class: "note", x: x(index), y: 16, "text-anchor": "middle" }, name),
      ...ticks.map(([text, y]) => svg("text", { class: "value", x: x(index) + 6, y: y + 4 }, text)),
    ];
    const speed = (value) => (high >= 10_000 ? `${format.number(value / 1000)}k` : format.number(value));
    return svg(
      "svg",
      { class: "plot parallel", width, height: HEIGHT, viewBox: `0 0 ${width} ${HEIGHT}`, role: "img", "aria-label": label },
      [...shown].sort((a, b) => a.tokensPerSecond - b.tokensPerSecond).map(strand),
      this.varying.flatMap(([name, values], index) => axis(index, format.words(name), values.map((value) => [textOf(value), at(values, value)]))),
      axis(this.varying.length, format.unit(this.points[0]), rate.ticks.map((value) => [speed(value), rate.at(value)])),
    );
  }
}
