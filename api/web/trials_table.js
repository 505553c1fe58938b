/** The trials as a table that sorts by any column. */

import { el } from "./dom.js";
import * as format from "./format.js";

const dash = (value, text = String) => (value === null || value === undefined ? "–" : text(value));

const COLUMNS = [
  { name: "trial", value: (t) => t.number },
  { name: "micro-batch", value: (t) => t.measurement.candidate.micro_batch_size },
  { name: "rate", value: (t) => t.tokens_per_second, text: (v, t) => dash(v, (rate) => format.rate(rate, t)) },
  { name: "outcome", value: outcomeOf, isText: true },
  { name: "peak", value: format.peak, text: (v) => dash(v, format.bytes) },
  { name: "mesh", value: (t) => t.mesh ?? null, isText: true, isOptional: true },
  { name: "tile", value: (t) => t.measurement.candidate.bta_tile, text: (v) => v ?? "off" },
  { name: "recompute", value: (t) => t.measurement.candidate.recompute, text: format.words, isText: true },
  { name: "attention", value: (t) => t.measurement.candidate.attention_backend, isText: true },
  { name: "experts", value: (t) => t.measurement.candidate.expert_backend, isText: true, isOptional: true },
  { name: "settings", value: (t) => rest(t.measurement.candidate) || null, isText: true, isOptional: true },
  { name: "kind", value: (t) => t.kind, text: format.words, isText: true },
  { name: "figures", value: (t) => (format.isPredicted(t) ? format.PREDICTED : "measured"), isText: true },
  { name: "took", value: (t) => t.seconds, text: format.seconds },
];

/** What a candidate chooses that has no column of its own. */
const rest = (candidate) =>
  format.settings({ ...candidate, attention_backend: "own", expert_backend: null });

function outcomeOf({ measurement: { outcome }, isOver }) {
  return isOver ? `✕ ${format.OVER}` : format.words(outcome);
}

/** The trials with the mesh of each, which the event of the trial names. */
export function withMeshes(trials, events) {
  const meshes = new Map(events.filter(({ data }) => data?.mesh).map(({ data }) => [data.trial, data.mesh]));
  return trials.map((trial) => {
    const mesh = trial.shared_run?.mesh ?? meshes.get(trial.number);
    return mesh ? { ...trial, mesh: format.mesh(mesh) } : trial;
  });
}

/** A table of trials; a click on a column's name sorts by it, and a second click turns the order around. */
export class TrialsTable {
  constructor() {
    this.trials = [];
    this.sorting = { column: COLUMNS[0], descending: false };
    this.head = el("thead");
    this.body = el("tbody");
    this.root = el(
      "div",
      { class: "scroll", tabindex: "0", role: "region", "aria-label": "All trials" },
      el("table", { class: "data" }, el("caption", { class: "hidden" }, "Trials; each column's button sorts by it"), this.head, this.body),
    );
  }

  /** Show `trials`, sorted as the reader chose. */
  update(trials) {
    this.trials = trials;
    this.columns = COLUMNS.filter((column) => !column.isOptional || trials.some((trial) => column.value(trial) !== null));
    this.#renderHead();
    this.#renderBody();
  }

  #renderHead() {
    const focused = document.activeElement?.dataset?.column;
    const { column: by, descending } = this.sorting;
    const direction = descending ? "descending" : "ascending";
    this.head.replaceChildren(
      el(
        "tr",
        {},
        this.columns.map((column) =>
          el(
            "th",
            { scope: "col", class: column.isText ? null : "figure", "aria-sort": column === by ? direction : "none" },
            el("button", { type: "button", "data-column": column.name, onclick: () => this.#sortBy(column) }, column.name),
          ),
        ),
      ),
    );
    if (focused) this.head.querySelector(`[data-column="${focused}"]`)?.focus({ preventScroll: true });
  }

  #sortBy(column) {
    const descending = this.sorting.column === column ? !this.sorting.descending : !column.isText && column !== COLUMNS[0];
    this.sorting = { column, descending };
    this.#renderHead();
    this.#renderBody();
  }

  #renderBody() {
    const { column, descending } = this.sorting;
    const sign = descending ? -1 : 1;
    const order = (a, b) => {
      const [left, right] = [column.value(a), column.value(b)];
      if (left === null || right === null) return (left === null) - (right === null); // those without come last
      return sign * (column.isText ? left.localeCompare(right) : left - right) || a.number - b.number;
    };
    this.body.replaceChildren(
      ...[...this.trials].sort(order).map((trial) =>
        el(
          "tr",
          { title: trial.measurement.reason },
          this.columns.map((column) => {
            const value = column.value(trial);
            return el("td", { class: column.isText ? `is-${column.name}` : "figure" }, column.text ? column.text(value, trial) : dash(value));
          }),
        ),
      ),
    );
  }
}
