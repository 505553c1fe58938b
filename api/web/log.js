/** The log of an exploration, and a summary of it that a screen reader announces. */

import { el } from "./dom.js";
import * as format from "./format.js";

const SPEAK_MILLISECONDS = 5_000;
const KINDS = { 1: "progress", 2: "result", 3: "trouble", 4: "end" };

/** A list of BEXP lines that grows. It stays at its end while the reader is there. */
export class Log {
  constructor() {
    this.lines = el("ol");
    this.list = el("div", { class: "log", tabindex: "0", role: "log", "aria-live": "off", "aria-labelledby": "log-title" }, this.lines);
    this.summary = el("p", { class: "quiet", role: "status", "aria-live": "polite" });
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
    this.lines.append(...fresh.map(row));
    this.shown = events.length;
    if (follows) this.list.scrollTop = this.list.scrollHeight;
    const now = performance.now();
    if (isFinal || (this.shown > 0 && now - this.spoken > SPEAK_MILLISECONDS)) {
      this.spoken = now;
      const summary = best ? ` Best micro_batch_size ${isFinal ? "" : "so far "}${best.candidate.micro_batch_size}, confidence ${best.confidence}.` : "";
      this.summary.textContent = `${events.length} events.${summary}`;
    }
  }
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
