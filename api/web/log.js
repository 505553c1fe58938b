/** The log of an exploration, and a summary of it that a screen reader announces. */

import { el } from "./dom.js";
import * as format from "./format.js";

const SPEAK_MILLISECONDS = 5_000;
const KINDS = { 1: "progress", 2: "result", 3: "trouble", 4: "end" };

const LEVELS = [["", "all"], ["1", "progress"], ["2", "results"], ["3", "trouble"], ["4", "ends"]];

/** A list of BEXP lines that grows, of which a filter shows some. It stays at its end while the reader is there. */
export class Log {
  constructor() {
    this.lines = el("ol", { oncopy: copyAsWritten });
    this.none = el("p", { class: "quiet", hidden: true }, "No line matches the filter.");
    this.list = el("div", { class: "log", tabindex: "0", role: "log", "aria-live": "off", "aria-labelledby": "log-title" }, this.lines, this.none);
    this.summary = el("p", { class: "quiet", role: "status", "aria-live": "polite" });
    this.text = el("input", { type: "search", placeholder: "text, or a code such as 203", oninput: () => this.#filter() });
    this.level = el("select", { onchange: () => this.#filter() }, LEVELS.map(([value, name]) => el("option", { value }, name)));
    this.matching = el("span", { class: "quiet", role: "status" });
    this.filters = el("p", { class: "filters" }, el("label", {}, "Filter ", this.text), el("label", {}, "Show ", this.level), this.matching);
    this.shown = 0;
    this.isFinal = false;
    this.spoken = -Infinity;
  }

  /** Append the events that are new, and say at most every few seconds where the exploration is. */
  update(events, best, isFinal) {
    const fresh = events.slice(this.shown);
    if (fresh.length === 0 && this.shown > 0 && isFinal === this.isFinal) return;
    this.isFinal = isFinal;
    const follows = this.list.scrollTop + this.list.clientHeight >= this.list.scrollHeight - 8;
    const rows = fresh.map(row);
    this.lines.append(...rows);
    if (this.#isFiltered) this.#hide(rows);
    this.shown = events.length;
    if (follows) this.list.scrollTop = this.list.scrollHeight;
    const summary = best ? ` Best micro_batch_size ${isFinal ? "" : "so far "}${best.candidate.micro_batch_size}, confidence ${best.confidence}.` : "";
    this.said = `${events.length} ${events.length === 1 ? "event" : "events"}.${summary}`;
    if (isFinal || this.shown > 0) this.#say(isFinal);
  }

  /** Say where the exploration is: at once, or as soon as nothing has been said for a few seconds. */
  #say(isFinal) {
    clearTimeout(this.later);
    const rest = isFinal ? 0 : this.spoken + SPEAK_MILLISECONDS - performance.now();
    if (rest > 0) return void (this.later = setTimeout(() => this.#say(false), rest));
    this.spoken = performance.now();
    this.summary.textContent = this.said;
  }

  get #isFiltered() {
    return this.text.value.trim() !== "" || this.level.value !== "";
  }

  #filter() {
    this.#hide(this.lines.children);
    this.list.scrollTop = this.list.scrollHeight;
  }

  /** Hide those of some lines that the filter leaves out, and say how many of all are left. */
  #hide(rows) {
    const words = this.text.value.toLowerCase().split(/\s+/);
    for (const line of rows) {
      const text = line.textContent.toLowerCase();
      line.hidden = !text.startsWith(`bexp${this.level.value}`) || !words.every((word) => text.includes(word));
    }
    const left = this.lines.querySelectorAll(":scope > :not([hidden])").length;
    this.matching.textContent = this.#isFiltered ? `${left} of ${this.lines.childElementCount} lines` : "";
    this.none.hidden = !this.#isFiltered || left > 0;
  }
}

/** Have lines that are copied say when they were written as the service does, so that they mean the same anywhere. */
function copyAsWritten(event) {
  const copied = getSelection().getRangeAt(0).cloneContents();
  if (copied.querySelector("time") === null) return;
  for (const time of copied.querySelectorAll("time")) time.textContent = format.gmt(time.dateTime);
  const lines = [...copied.querySelectorAll("li:not([hidden])")];
  event.clipboardData.setData("text/plain", (lines.length > 0 ? lines : [copied]).map((line) => line.textContent).join("\n"));
  event.preventDefault();
}

function row(event) {
  return el(
    "li",
    { class: KINDS[Math.floor(event.code / 100)] },
    el("span", { class: "code" }, `BEXP${event.code}`),
    " ",
    el("time", { datetime: event.at, title: format.moment(event.at) }, format.clock(event.at)),
    " ",
    el("span", {}, event.message.split(/\s+/).join(" ")),
  );
}
