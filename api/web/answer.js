/** The answer of an exploration, or the best so far: the rows that the service makes of it. */

import { el } from "./dom.js";
import * as format from "./format.js";

const SCROLLED = { class: "scroll", tabindex: "0", role: "region" };

/** Return the elements of the answer; `exploration` is what the service shows of one. */
export function renderAnswer({ text, answer, recommendation }) {
  if (!text) return [el("p", { class: "quiet" }, "There is nothing to recommend yet.")];
  const best = answer ? answer.variants[0].recommendation : recommendation;
  return [
    el("p", { class: best ? "said" : "trouble" }, text.title),
    best && headline(best),
    el("dl", { class: "rows" }, text.rows.filter(({ importance }) => importance !== "brief").map(row)),
    text.variants && table(text.variants),
  ].filter(Boolean);
}

function headline(best) {
  const figure = (label, value) =>
    el("div", { class: "figure" }, el("dt", {}, label), el("dd", {}, el("strong", {}, value)));
  return el(
    "dl",
    { class: "headline" },
    figure("micro_batch_size", best.candidate.micro_batch_size),
    figure("expect per device", format.rate(format.expected(best), best)),
    figure("against the base", format.ratio(best.performance, best)),
    figure("confidence out of 100", best.confidence),
  );
}

/** A text of several lines is a picture in characters. */
function row({ label, text, importance }) {
  const shown = text.includes("\n") ? el("div", { ...SCROLLED, "aria-label": label }, el("pre", {}, text)) : text;
  return el("div", { class: importance }, el("dt", {}, label), el("dd", {}, shown));
}

function table({ title, head, rows, notes }) {
  const line = (cells, note) => el("tr", {}, cells.map((text) => el("td", {}, text)), el("td", {}, note));
  return el(
    "div",
    { ...SCROLLED, "aria-label": "Variants" },
    el("table", { class: "data" },
      el("caption", {}, title),
      el("thead", {}, el("tr", {}, [...head, ""].map((name) => el("th", { scope: "col" }, name)))),
      el("tbody", {}, rows.map((cells, index) => line(cells, notes[index])))),
  );
}
