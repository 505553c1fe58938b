/** The answer of an exploration, or the best so far: the rows that the service makes of it. */

import { el } from "./dom.js";
import * as format from "./format.js";

const SCROLLED = { class: "scroll", tabindex: "0", role: "region" };

/**
 * Return the elements of the answer; `exploration` is what the service shows of one. The main rows are those of a
 * terminal; the rest is folded, unless `isOpen`.
 */
export function renderAnswer({ text, answer, recommendation, state }, isOpen = false) {
  if (!text) return [el("p", { class: "quiet" }, NOTHING[state] ?? "There is nothing to recommend yet.")];
  const best = answer ? answer.variants[0].recommendation : recommendation;
  return [
    el("p", { class: best ? "said" : "trouble" }, coded(text.title)),
    best && headline(best),
    el("dl", { class: "rows" }, text.rows.filter(({ importance }) => IN_SHORT.has(importance)).map((one) => row(one))),
    rest(text.rows, isOpen),
    text.variants && table(text.variants),
  ].filter(Boolean);
}

const NOTHING = {
  cancelled: "It was cancelled before there was an answer.",
  failed: "It failed before there was an answer.",
};

/** Show what stands between backticks as code. */
const coded = (text) => text.split("`").map((part, index) => (index % 2 === 1 ? el("code", {}, part) : part));

function headline(best) {
  const figure = (label, value) =>
    el("div", { class: "figure" }, el("dt", {}, label), el("dd", {}, el("strong", {}, value)));
  return el(
    "dl",
    { class: "headline" },
    figure("micro_batch_size", best.candidate.micro_batch_size),
    figure("expect per device", format.rate(format.expected(best), best)),
    figure("against the base", `${best.performance.toFixed(2)}x`),
    figure("confidence out of 100", best.confidence),
  );
}

/** The rows that are not folded, in the page as in a terminal. */
const IN_SHORT = new Set(["main", "brief"]);

/** The rows with details, and the parts of all rows below the label of their row. */
function rest(rows, isOpen) {
  const groups = [];
  for (const one of rows) {
    if (one.importance === "part" && groups.length > 0) groups.at(-1).parts.push(one);
    else groups.push({ first: one, parts: [] });
  }
  const left = groups.filter(({ first, parts }) => !IN_SHORT.has(first.importance) || parts.length > 0);
  if (left.length === 0) return null;
  return el("details", { open: isOpen }, el("summary", {}, "Details"),
    el("dl", { class: "rows" }, left.map(({ first, parts }) => row(IN_SHORT.has(first.importance) ? { ...first, text: "", importance: "detail" } : first, parts))));
}

/** A text of several lines is a picture in characters. */
function row({ label, text, importance }, parts = []) {
  const shown = text.includes("\n") ? el("div", { ...SCROLLED, "aria-label": label }, el("pre", {}, text)) : coded(text);
  const below = parts.length > 0 && el("dl", { class: "rows" }, parts.map((one) => row(one)));
  return el("div", { class: importance }, el("dt", {}, label), el("dd", {}, shown, below));
}

function table({ title, head, rows, notes }) {
  const line = (cells, note) => el("tr", {}, cells.map((text) => el("td", {}, coded(text))), el("td", {}, coded(note)));
  return el(
    "div",
    { ...SCROLLED, "aria-label": "Variants" },
    el("table", { class: "data" },
      el("caption", {}, title),
      el("thead", {}, el("tr", {}, [...head, ""].map((name) => el("th", { scope: "col" }, name)))),
      el("tbody", {}, rows.map((cells, index) => line(cells, notes[index])))),
  );
}
