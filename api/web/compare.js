/** Explorations side by side: their answers, and the differences of their requests and hardware. */

import { stateBadge } from "./badge.js";
import { copyable } from "./copy.js";
import { el } from "./dom.js";
import * as format from "./format.js";
import { compareExplorations, getExploration, Problem } from "./service.js";

export const MOST_COMPARED = 6;

/** Fields of a request that change the search, and not its question. */
const NOT_COMPARED = new Set(["budget", "fresh", "labels", "notices", "sampler", "seed", "verify"]);

const bestOf = (text) => ({ recommendation: best }) => (best ? text(best) : null);

const FOUND = [
  ["state", (one) => stateBadge(one)],
  ["device", (one) => one.device_name],
  ["micro_batch_size", (one) => one.micro_batch_size],
  ["tokens/s per device", (one) => one.tokens_per_second && format.number(one.tokens_per_second)],
  ["gain over its base", bestOf((best) => format.ratio(best.performance, best))],
  ["base", bestOf((best) => format.describe(best.base))],
  ["confidence", (one) => one.confidence],
  ["step", bestOf((best) => format.seconds((best.whole_model ?? best).step_seconds))],
  ["measured as", bestOf((best) => (best.whole_model ? "a whole model" : "blocks that compose it"))],
  ["peak memory", bestOf((best) => format.bytes(format.expectedPeak(best)))],
  ["memory limit", bestOf((best) => format.bytes(best.memory_limit_bytes))],
  ["duration", (one) => one.started_at && format.duration(one.started_at, one.finished_at)],
  ["owner", (one) => one.owner],
];

/** Show the explorations whose ids are in `given`, separated by commas. */
export async function showComparison(given, root, signal, shell) {
  document.title = "Comparison · bexp";
  const ids = [...new Set(given.split(",").filter(Boolean))];
  const title = el("h1", { tabindex: "-1" }, "Comparison");
  root.replaceChildren(el("header", { class: "page-head" }, title));
  title.focus({ preventScroll: true });
  if (ids.length < 2 || ids.length > MOST_COMPARED) {
    root.append(el("p", { class: "trouble" }, `Choose two to ${MOST_COMPARED} explorations in the `, el("a", { href: "#/" }, "list"), "."));
    return;
  }
  const explorations = await Promise.all(ids.map((id) => getExploration(id, signal)));
  shell.connection(true);
  const all = el("input", { type: "checkbox" });
  const later = (name) => el("tr", {}, el("th", { scope: "row" }, name), ids.map(() => el("td", {}, "…")));
  const speeds = { candidate: later("candidate for the batch"), rate: later("its tokens/s"), faster: later("faster than the first") };
  const isSame = (line) => line.matches(".field:not(.differs)");
  const section = (name, rows) => {
    const head = el("th", { scope: "rowgroup", colspan: ids.length + 1 }, name);
    return [el("tr", { class: `section${rows.every(isSame) ? " field" : ""}` }, head), ...rows];
  };
  const flat = explorations.map(({ request, report }) =>
    ({ request: flatten(request, NOT_COMPARED), device: flatten(measuredOn(report)) }));
  const fields = (part) => {
    const names = [...new Set(flat.flatMap((one) => Object.keys(one[part])))];
    return names.map((name) => row(name, flat.map((one) => one[part][name] ?? null), true));
  };
  const candidates = explorations.map(({ recommendation }) => (recommendation ? flatten(recommendation.candidate) : {}));
  const isChosen = (name) => name !== "micro_batch_size" && candidates.some((one) => (one[name] ?? "null") !== "null");
  const names = [...new Set(candidates.flatMap(Object.keys))].filter(isChosen);
  const body = el(
    "tbody",
    {},
    section("Found", FOUND.map(([name, show]) => row(name, explorations.map(show)))),
    section("Which is faster", Object.values(speeds)), // of the candidates that exports take
    section("The recommended candidate", names.map((name) => row(name, candidates.map((one) => one[name] ?? null)))),
    section("Measured on", fields("device")),
    section("Asked", fields("request")),
  );
  all.addEventListener("change", () => body.classList.toggle("all", all.checked));
  const heads = explorations.map(({ id, model }) =>
    el("th", { scope: "col" }, el("a", { href: `#/explorations/${id}` }, model), el("code", {}, id)));
  root.append(
    el("p", {}, el("label", {}, all, " Show what is the same in the request and the device, too")),
    el(
      "div",
      { class: "card scroll whole", tabindex: "0", role: "region", "aria-label": "Comparison" },
      el("table", { class: "data compared" }, el("caption", {}, "≠ marks what differs"),
        el("thead", {}, el("tr", {}, el("td"), heads)), body),
    ),
    el("section", { class: "card", "aria-labelledby": "next-title" }, el("h2", { id: "next-title" }, "Next"),
      ids.slice(1).map((id) => copyable(`bexp compare ${ids[0]} ${id}`))),
  );
  const fill = (index, texts) => Object.entries(texts).forEach(([name, text]) => (speeds[name].cells[index + 1].textContent = text));
  const known = await Promise.all(ids.slice(1).map(async (id, index) => {
    const pair = await compared(ids[0], id, signal);
    fill(index + 1, pair === null ? { ...NOTHING, faster: "unknown: no recommendation" } : { ...side(pair.b), faster: chance(pair) });
    return pair;
  })).catch((error) => shell.report(error, signal));
  const first = known?.find((pair) => pair !== null)?.a;
  fill(0, { ...(first ? side(first) : NOTHING), faster: "–" });
}

const NOTHING = { candidate: "–", rate: "–" };

/** Return the comparison of two answers; null if one of them has no recommendation. */
async function compared(first, id, signal) {
  try {
    return await compareExplorations(first, id, signal);
  } catch (error) {
    if (error instanceof Problem && error.status === 409) return null;
    throw error;
  }
}

/** The candidate of which a comparison speaks, and its speed there. */
const side = ({ candidate, tokens_per_second }) =>
  ({ candidate: format.describe(candidate), rate: format.number(tokens_per_second) });

/** How likely the second answer of a comparison is the faster one, in words. */
function chance({ probability_b_faster, speedup, speedup_90_percent: [least, most] }) {
  return `${format.likely(probability_b_faster)} likely; ${speedup.toFixed(3)}x its speed, ` +
    `${least.toFixed(3)}x to ${most.toFixed(3)}x with 90%`;
}

function row(name, values, isField = false) {
  const texts = values.map((value) => (value instanceof Node ? value.textContent : String(value ?? "–")));
  const differs = texts.some((text) => text !== texts[0]);
  const mark = differs && [el("span", { class: "mark-differs", "aria-hidden": "true" }, "≠"), el("span", { class: "hidden" }, " differs")];
  return el(
    "tr",
    { class: [differs && "differs", isField && "field"].filter(Boolean).join(" ") || null },
    el("th", { scope: "row" }, name, " ", mark),
    values.map((value, index) => el("td", {}, value instanceof Node ? value : texts[index])),
  );
}

function measuredOn(report) {
  const { device_name, num_devices, versions } = report?.hardware ?? {};
  return report ? { device_name, num_devices, versions } : null;
}

/** A document as texts by dotted names. */
function flatten(document, without = new Set(), prefix = "") {
  const flat = {};
  for (const [name, value] of Object.entries(document ?? {})) {
    if (without.has(name)) continue;
    const isMapping = value !== null && typeof value === "object" && !Array.isArray(value);
    if (isMapping && Object.keys(value).length > 0) Object.assign(flat, flatten(value, new Set(), `${prefix}${name}.`));
    else flat[prefix + name] = typeof value === "string" ? value : JSON.stringify(value);
  }
  return flat;
}
