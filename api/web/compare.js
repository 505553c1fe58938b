/** Explorations side by side: the candidates that exports take, their curves and memory, and what differs. */

import { curvesChart, keyOf, letterOf, memoryBars } from "./compare_charts.js";
import { el } from "./dom.js";
import * as format from "./format.js";
import { compareExplorations, getExploration, Problem } from "./service.js";

export const MOST_COMPARED = 6;
const LETTERS = "ABCDEF";
const LEVEL = 0.99; // of the fastest, the tolerance of an answer
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
  const answered = explorations.filter(({ recommendation }) => recommendation !== null);
  const pairsWith = (first) => Promise.all(explorations.map((one) => {
    if (one.recommendation === null) return { reason: `It has no answer: ${one.error ?? `it is ${one.state}`}.` };
    if (one === first && answered.length > 1) return null;
    return compared(first.id, one.id, signal); // with itself if no other has an answer, for its figures
  }));
  let first = answered[0] ?? explorations[0];
  let pairs = await pairsWith(first);
  const faster = fasterOf(pairs);
  if (faster !== null) pairs = await pairsWith((first = explorations[faster])); // so that each ratio is over the fastest
  shell.connection(true);
  const about = [...new Set(pairs.map((pair) => pair?.different_models).filter(Boolean))];
  const ask = (...children) => el("section", { class: "card ask", "aria-label": "Different models" }, about.map((text) => el("p", {}, text)), children);
  const show = () => {
    draw(root, title, about.length > 0 && ask(), contendersOf(explorations, first, pairs), pairs, signal);
    title.focus({ preventScroll: true });
  };
  if (about.length === 0) return show();
  const anyway = el("button", { type: "button", class: "primary", onclick: show }, "Compare them all the same");
  root.append(ask(el("div", { class: "actions" }, anyway, el("a", { href: "#/" }, "Choose others"))));
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

/** The number of the pair whose second answer is the fastest; null if the first is, or if some have no ratio to it. */
function fasterOf(pairs) {
  const others = pairs.filter((pair) => pair?.b);
  const most = Math.max(1, ...others.map(({ speedup }) => speedup));
  return most === 1 || others.some(({ speedup }) => speedup === null) ? null : pairs.findIndex((pair) => pair?.speedup === most);
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

function draw(root, title, about, contenders, pairs, signal) {
  const sides = contenders.filter(({ candidate }) => candidate);
  const first = contenders.find(({ isFirst }) => isFirst);
  const hasRatios = contenders.some(({ isFirst, pair }) => !isFirst && pair?.speedup);
  const most = Math.max(...sides.map((side) => side.tokens_per_second));
  const fastest = sides.filter((side) => side.tokens_per_second >= LEVEL * most).map(({ letter }) => letter);
  const curves = el("div");
  const memory = el("div");
  const figure = (name, note, body) => el("figure", { class: "card" }, el("figcaption", {}, el("h2", {}, name), el("p", { class: "quiet" }, note)), body);
  const views = [
    el("header", { class: "page-head" }, title),
    about,
    el("div", { class: "compared" },
      !about && sides.length > 1 && el("p", { class: "fastest" }, verdict(fastest, first, sides)),
      el("ol", { class: "contenders", "aria-label": "Answers" }, contenders.map((one) => contender(one, first, hasRatios)))),
    sides.length > 0 && el("div", { class: "comparison" },
      figure("Throughput by micro-batch", "Per device, the fastest that ran at each size. A ring is the candidate above.", curves),
      figure("Memory by part", MEMORY_NOTE + (sides.every(({ is_recommended: isKnown }) => isKnown) ? "" : SUM_NOTE), memory)),
    differences(contenders, sides, pairs),
  ];
  root.replaceChildren(...views.filter(Boolean)); // it would show `false` as a word
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

/** Which is the fastest, by how much, and how sure that is, in words. */
function verdict(fastest, first, sides) {
  if (fastest.length > 1) return `${fastest.join(" and ")} are level: within 1% of each other.`;
  const lead = `${fastest[0]} is the fastest`;
  const others = sides.filter(({ pair }) => pair?.speedup);
  if (fastest[0] !== first.letter || others.length === 0) return `${lead}.`;
  const over = others.map(({ letter, pair: { speedup, probability_b_faster: theirs } }) =>
    `${(1 / speedup).toFixed(3)}x the speed of ${letter} (${format.likely(1 - theirs)} likely to be faster)`);
  return `${lead}: ${over.join(", ")}.`;
}

/** A rate with as many digits as a ratio of two of them needs. */
const precise = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
const small = new Intl.NumberFormat("en-US", { minimumSignificantDigits: 5, maximumSignificantDigits: 5 });
const rateText = (value) => (value >= 10_000 ? precise : small).format(value);

function contender({ index, letter, exploration, candidate, is_recommended: isRecommended, pair, isFirst, ...side }, first, hasRatios) {
  const { id, model, device_name: device } = exploration;
  const head = [
    el("h2", {}, keyOf(index), `${letter} `, el("a", { href: `#/explorations/${id}` }, model)),
    el("p", { class: "quiet" }, device && `${device} · `, el("code", {}, id)),
  ];
  const why = pair?.reason ?? "There is nothing to compare it with.";
  return el("li", { class: `card contender p${index}` }, head, ...(candidate ? [
    el("p", { class: "rate" }, el("strong", {}, rateText(side.tokens_per_second)), ` ${format.unit(side)}`),
    el("p", {}, "micro-batch ", el("b", {}, candidate.micro_batch_size), !isRecommended &&
      `, which divides the batch of ${exploration.request?.batch_size}; the answer is ${exploration.micro_batch_size} for any batch`),
    el("p", {}, "confidence ", el("b", {}, side.confidence)),
    el("p", { class: "quiet" }, format.describe(candidate)),
    (hasRatios || !isFirst) && el("p", { class: "against" }, isFirst ? "Ratios are over its speed." : against(pair, first.letter)),
  ] : [el("p", { class: "against" }, why)]));
}

/** How much faster the second answer of a comparison is than the first, and how likely, in words. */
function against({ probability_b_faster: probability, speedup, speedup_90_percent: range }, letter) {
  if (speedup === null) return `It has no ratio to ${letter}, which is another model.`;
  const [least, most] = range;
  return [el("b", {}, `${speedup.toFixed(3)}x`), ` the speed of ${letter}, ${least.toFixed(3)}x to ${most.toFixed(3)}x with 90%; ` +
    `${format.likely(probability)} likely to be faster`];
}

/** What differs in the candidates, the requests and the devices, as tables: of the models apart, because it may be much. */
function differences(contenders, sides, pairs) {
  const rows = new Map();
  const put = (name, read, among = contenders) => {
    const texts = among.map((one) => text(read(one)));
    if (texts.some((one) => one !== texts[0])) rows.set(name, contenders.map((one) => texts[among.indexOf(one)] ?? text(null)));
  };
  put("model", ({ exploration }) => exploration.model);
  const settings = [...new Set(sides.flatMap(({ candidate }) => Object.keys(candidate)))];
  for (const name of settings) put(`answer: ${name}`, ({ candidate }) => candidate[name], sides);
  put("answer: confidence", ({ confidence }) => confidence, sides);
  if (sides.length === contenders.length) {
    const fields = new Set(pairs.flatMap((pair) => pair?.differs ?? []).map(({ field }) => field));
    for (const field of fields) {
      const found = pairs.map((pair) => pair?.differs?.find((one) => one.field === field));
      const ofFirst = found.find(Boolean).a;
      put(field, ({ index }) => (found[index] ? found[index].b : ofFirst));
    }
  } else { // the service compares answers; what was asked may explain why there is none
    put("device", ({ exploration }) => exploration.device_name);
    const asked = contenders.map(({ exploration: { request } }) => flat({ ...request, labels: null, notices: null }));
    for (const field of new Set(asked.flatMap(Object.keys))) put(field, ({ index }) => asked[index][field]);
  }
  const loads = sides.map(({ host_busy_share: load }) => load).filter((load) => load !== null);
  if (Math.max(...loads) - Math.min(...loads) >= LEAST_LOAD) {
    put("load of the host by other programs", ({ host_busy_share: load }) => (load === null ? null : format.percent(load, 0)), sides);
  }
  const isOfModel = ([name]) => /^(model|hf_config)\./.test(name);
  const [ofModels, others] = [true, false].map((wanted) => [...rows].filter((row) => isOfModel(row) === wanted));
  return el("section", { class: "card", "aria-labelledby": "differs-title" },
    el("h2", { id: "differs-title" }, "What differs"),
    others.length > 0 ? table("Differences of answers, requests and devices", others, contenders)
      : el("p", { class: "quiet" }, "Nothing that was asked or measured differs."),
    ofModels.length > 0 && el("details", {}, el("summary", {}, `${ofModels.length} fields of the models`), table("Differences of the models", ofModels, contenders)));
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

/** The fields of a document by their dotted names. */
const flat = (document, prefix = "") => Object.fromEntries(Object.entries(document).flatMap(([name, value]) =>
  (value && typeof value === "object" && !Array.isArray(value) ? Object.entries(flat(value, `${prefix}${name}.`)) : [[prefix + name, value]])));

/** A value of a request as a person writes it. */
function text(value) {
  if (value === null || value === undefined) return "–";
  if (Array.isArray(value)) return value.map(text).join(", ");
  return typeof value === "string" ? value : JSON.stringify(value);
}
