/** Explorations side by side: the candidates that exports take, their curves and memory, and what differs. */

import { curvesChart, keyOf, letterOf, memoryBars } from "./compare_charts.js";
import { el } from "./dom.js";
import * as format from "./format.js";
import { compareExplorations, getExploration, Problem } from "./service.js";

export const MOST_COMPARED = 6;
const LETTERS = "ABCDEF";
const LEAST_LOAD = 0.1; // of a host, from which on two loads differ
const MEMORY_NOTE = "At the peak, of the candidates above. The reserve is for fragmentation, the runtime's context and a margin.";
const SUM_NOTE = " Of a candidate that is not the recommended one, the sum of the other parts is known.";

/** Show the explorations whose ids are in `given`, separated by commas. Those of two models are shown if asked for. */
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
  const first = explorations.find(({ recommendation }) => recommendation !== null) ?? explorations[0];
  const pairs = await Promise.all(explorations.map((one) => (one === first ? null : compared(first.id, one.id, signal))));
  shell.connection(true);
  const about = [...new Set(pairs.map((pair) => pair?.different_models).filter(Boolean))];
  const show = () => draw(root, title, contendersOf(explorations, first, pairs), pairs, signal);
  if (about.length === 0) return show();
  const anyway = el("button", { type: "button", class: "primary", onclick: () => (show(), title.focus({ preventScroll: true })) }, "Compare them all the same");
  root.append(el("section", { class: "card ask", "aria-label": "Different models" }, about.map((text) => el("p", {}, text)),
    el("div", { class: "actions" }, anyway, el("a", { href: "#/" }, "Choose others"))));
}

/** Return the comparison of two answers, or the reason why there is none, such as no recommendation. */
async function compared(first, id, signal) {
  try {
    return await compareExplorations(first, id, signal);
  } catch (error) {
    if (error instanceof Problem && error.status === 409) return { reason: error.message };
    throw error;
  }
}

/** What is shown of each exploration. All figures of a side are those of the candidate that its ratio is of. */
function contendersOf(explorations, first, pairs) {
  const a = pairs.find((pair) => pair?.a)?.a;
  return explorations.map((exploration, index) => {
    const pair = pairs[index];
    const side = exploration === first ? a : pair.b;
    return { index, letter: LETTERS[index], exploration, isFirst: exploration === first, pair, ...side };
  });
}

function draw(root, title, contenders, pairs, signal) {
  const sides = contenders.filter(({ candidate }) => candidate);
  const first = contenders.find(({ isFirst }) => isFirst);
  const curves = el("div");
  const memory = el("div");
  const figure = (name, note, body) => el("figure", { class: "card" }, el("figcaption", {}, el("h2", {}, name), el("p", { class: "quiet" }, note)), body);
  root.replaceChildren(
    el("header", { class: "page-head" }, title),
    el("div", { class: "compared" },
      el("ol", { class: "contenders", "aria-label": "Answers" }, contenders.map((one) => contender(one, first)))),
    sides.length > 0 && el("div", { class: "comparison" },
      figure("Throughput by micro-batch", "Per device, the fastest that ran at each size. A ring is the candidate above.", curves),
      figure("Memory by part", MEMORY_NOTE + (sides.every(({ is_recommended: isKnown }) => isKnown) ? "" : SUM_NOTE), memory)),
    differences(contenders, sides, pairs, first),
  );
  if (sides.length === 0) return;
  const size = () => {
    for (const [body, make] of [[curves, curvesChart], [memory, memoryBars]]) {
      body.replaceChildren(...make(sides, Math.max(260, Math.floor(body.clientWidth))));
    }
  };
  let width = null;
  const sizes = new ResizeObserver(() => {
    if (width === (width = root.clientWidth)) return; // a chart that grew changes the height alone
    size();
  });
  sizes.observe(root);
  signal.addEventListener("abort", () => sizes.disconnect());
}

/** A rate with as many digits as a ratio of two of them needs. */
const precise = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
const small = new Intl.NumberFormat("en-US", { minimumSignificantDigits: 5, maximumSignificantDigits: 5 });
const rateText = (value) => (value >= 10_000 ? precise : small).format(value);

function contender({ index, letter, exploration, candidate, is_recommended: isRecommended, pair, isFirst, ...side }, first) {
  const { id, model, device_name: device } = exploration;
  const head = [
    el("h2", {}, keyOf(index), `${letter} `, el("a", { href: `#/explorations/${id}` }, model)),
    el("p", { class: "quiet" }, device && `${device} · `, el("code", {}, id)),
  ];
  const why = pair?.reason ?? "There is nothing to compare it with.";
  return el("li", { class: `card contender p${index}` }, head, ...(candidate ? [
    el("p", { class: "rate" }, el("strong", {}, rateText(side.tokens_per_second)), ` ${format.unit(side)}`),
    el("p", {}, format.describe(candidate), !isRecommended && ", the best that divides the batch"),
    el("p", { class: "against" }, isFirst ? "Ratios are over its speed." : against(pair, first.letter)),
  ] : [el("p", { class: "against" }, why)]));
}

/** How much faster the second answer of a comparison is than the first, and how likely, in words. */
function against({ probability_b_faster: probability, speedup, speedup_90_percent: [least, most] }, letter) {
  return [el("b", {}, `${speedup.toFixed(3)}x`), ` the speed of ${letter}, ${least.toFixed(3)}x to ${most.toFixed(3)}x with 90%; ` +
    `${format.likely(probability)} likely to be faster`];
}

/** What differs in the candidates, the requests and the devices, as tables: of the models apart, because it may be much. */
function differences(contenders, sides, pairs, first) {
  const rows = new Map();
  const put = (name, values) => {
    const texts = values.map(text);
    if (texts.some((one) => one !== texts[0])) rows.set(name, texts);
  };
  put("model", sides.map(({ model }) => model));
  const settings = [...new Set(sides.flatMap(({ candidate }) => Object.keys(candidate)))];
  for (const name of settings) put(`answer: ${name}`, sides.map(({ candidate }) => candidate[name] ?? null));
  put("answer: confidence", sides.map(({ confidence }) => confidence));
  const fields = new Set(pairs.flatMap((pair) => pair?.differs ?? []).map(({ field }) => field));
  for (const field of fields) {
    const found = pairs.map((pair) => pair?.differs?.find((one) => one.field === field));
    const ofFirst = found.find(Boolean).a;
    put(field, sides.map(({ index }) => (found[index] ? found[index].b : ofFirst)));
  }
  const loads = sides.map(({ host_busy_share: load }) => load);
  const known = loads.filter((load) => load !== null);
  if (Math.max(...known) - Math.min(...known) >= LEAST_LOAD) {
    put("load of the host by other programs", loads.map((load) => (load === null ? null : format.percent(load, 0))));
  }
  const isOfModel = ([name]) => /^(model|hf_config)\./.test(name);
  const [ofModels, others] = [true, false].map((wanted) => [...rows].filter((row) => isOfModel(row) === wanted));
  return el("section", { class: "card", "aria-labelledby": "differs-title" },
    el("h2", { id: "differs-title" }, "What differs"),
    others.length > 0 ? table("Differences of answers, requests and devices", others, sides)
      : el("p", { class: "quiet" }, "Nothing that was asked or measured differs."),
    ofModels.length > 0 && el("details", {}, el("summary", {}, `${ofModels.length} fields of the models`), table("Differences of the models", ofModels, sides)));
}

function table(caption, rows, sides) {
  return el("table", { class: "data differ", role: "table" },
    el("caption", { class: "hidden" }, caption),
    el("thead", { role: "rowgroup" }, el("tr", { role: "row" }, el("td", { role: "cell" }),
      sides.map((side) => el("th", { scope: "col", role: "columnheader" }, letterOf(side))))),
    el("tbody", { role: "rowgroup" }, rows.map(([name, values]) => el("tr", { role: "row" },
      el("th", { scope: "row", role: "rowheader" }, name),
      values.map((value, index) => el("td", { role: "cell", "data-of": sides[index].letter }, value))))));
}

/** A value of a request as a person writes it. */
function text(value) {
  if (value === null || value === undefined) return "–";
  if (Array.isArray(value)) return value.map(text).join(", ");
  return typeof value === "string" ? value : JSON.stringify(value);
}
