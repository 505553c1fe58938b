/** The list of explorations. */

import { stateBadge } from "./badge.js";
import { MOST_COMPARED } from "./compare.js";
import { el } from "./dom.js";
import * as format from "./format.js";
import { listExplorations, pause } from "./service.js";

const AGAIN_MILLISECONDS = 5_000;
const MOST_WORDS = 8; // of a search
const STATES = ["queued", "running", "succeeded", "failed", "cancelled"];
const or = (value, text = String) => (value === null || value === undefined ? "–" : text(value));

/** Each column: its name, whether it holds figures, and what it shows of an exploration. */
const COLUMNS = [
  ["state", false, (one) => [
    stateBadge(one, one.error ?? one.waiting_reason),
    one.answered_from && el("span", { class: "quiet reused" }, " reused"),
  ]],
  ["device", false, (one, find) => or(one.device_name, (name) => finder(name, "find", find))],
  ["micro-batch", true, (one) => or(one.micro_batch_size)],
  ["tokens/s", true, (one) => or(one.tokens_per_second, format.number)],
  ["gain", true, (one) => or(one.performance, (gain) => `${gain.toFixed(2)}x`)],
  ["confidence", true, (one) => or(one.confidence)],
  ["duration", true, (one) => (one.started_at === null ? "–" : format.duration(one.started_at, one.finished_at))],
  ["submitted", false, (one) => el("time", { datetime: one.created_at }, format.moment(one.created_at))],
  ["owner", false, (one, find) => finder(one.owner, "find", find)],
  ["id", false, (one) => el("code", {}, one.id)],
];

/** A button that searches for its text. */
const finder = (text, kind, find) =>
  el("button", { type: "button", class: kind, title: "List those with this", onclick: () => find(text) }, text);

/** Show the list and keep its first page current until `signal` is aborted. */
export async function showList(root, signal, shell) {
  document.title = "Explorations · bexp";
  const title = el("h1", { tabindex: "-1" }, "Explorations");
  const state = el("select", { id: "state" }, el("option", { value: "" }, "all"), STATES.map((name) => el("option", { value: name }, name)));
  const wanted = el("input", { id: "wanted", type: "search", placeholder: "model, device, owner, key=value", maxlength: 192 });
  const body = el("tbody");
  const older = el("button", { type: "button", hidden: true }, "Show older ones");
  const empty = el("p", { class: "quiet", hidden: true }, "There are none. ", el("a", { href: "#/submit" }, "Submit one"), ".");
  const compare = el("a", { class: "button", hidden: true });
  const chosen = new Set();
  const head = [["", false], ["model", false], ...COLUMNS].map(([name, isFigure]) =>
    el("th", { scope: "col", class: isFigure && "figure" }, name || el("span", { class: "hidden" }, "compare")));
  root.replaceChildren(
    el("header", { class: "page-head" }, title,
      el("div", { class: "actions" }, compare, el("label", {}, "Search ", wanted), el("label", {}, "State ", state))),
    el(
      "div",
      { class: "card scroll whole", tabindex: "0", role: "region", "aria-label": "Explorations" },
      el("table", { class: "data list" }, el("caption", { class: "hidden" }, "Explorations, the newest first"), el("thead", {}, el("tr", {}, head)), body),
      empty,
    ),
    older,
  );

  let pages = 1;
  let asked = 0;
  /** Read and show what is wanted, unless something else is wanted by the time that the service answers. */
  const read = async () => {
    const mine = (asked += 1);
    const items = [];
    let cursor = null;
    for (let page = 0; page < pages; page += 1) {
      const search = wanted.value.trim();
      const filter = { ...(state.value && { state: state.value }), ...(search && { search }) };
      const query = { limit: 50, ...filter, ...(cursor && { cursor }) };
      const listed = await listExplorations(query, signal).catch((error) => {
        if (mine === asked) throw error;
      });
      if (mine !== asked) return;
      items.push(...listed.items);
      cursor = listed.next_cursor;
      if (cursor === null) break;
    }
    const focused = document.activeElement;
    const line = focused?.closest("tr[data-id]");
    const place = line && usable(line).indexOf(focused);
    body.replaceChildren(...items.map((item) => row(item, find, chosen, offer)));
    if (line) usable(body.querySelector(`[data-id="${line.dataset.id}"]`))[place]?.focus({ preventScroll: true });
    empty.hidden = items.length > 0;
    older.hidden = cursor === null;
    shell.connection(true);
  };
  const offer = () => {
    compare.hidden = chosen.size < 2 || chosen.size > MOST_COMPARED;
    compare.textContent = `Compare ${chosen.size}`;
    compare.href = `#/compare/${[...chosen].join(",")}`;
    for (const box of body.querySelectorAll("input")) box.disabled = !box.checked && chosen.size >= MOST_COMPARED;
  };
  const readNow = () => (shell.clear(), read().then(offer).catch((error) => shell.report(error, signal)));
  const readFirst = () => ((pages = 1), readNow());
  const find = (text) => ((wanted.value = text.split(" ", MOST_WORDS).join(" ")), readFirst());
  state.addEventListener("change", readFirst);
  wanted.addEventListener("change", readFirst);
  older.addEventListener("click", () => ((pages += 1), readNow()));
  await read();
  if (!root.contains(document.activeElement)) title.focus({ preventScroll: true }); // a reader may be faster
  while (!signal.aborted) {
    await pause(AGAIN_MILLISECONDS, signal);
    if (signal.aborted || document.hidden) continue;
    try {
      await read();
      offer();
    } catch (error) {
      if (signal.aborted) return;
      if (shell.isPassing(error)) shell.connection(false, error);
      else shell.report(error, signal); // such as a search that the service refuses, until it is another one
    }
  }
}

/** What of a row can have the focus, in its order. */
const usable = (line) => [...(line?.querySelectorAll("a, button, input") ?? [])];

function row(exploration, find, chosen, offer) {
  const { id } = exploration;
  const choose = ({ target }) => (target.checked ? chosen.add(id) : chosen.delete(id), offer());
  const box = { type: "checkbox", "aria-label": `Compare ${exploration.model} ${id}`, onchange: choose };
  const labels = format.labels(exploration.labels).map((text) => finder(text, "label", find));
  return el(
    "tr",
    { "data-id": id },
    el("td", {}, el("input", { ...box, checked: chosen.has(id) })),
    el("th", { scope: "row" }, el("a", { href: `#/explorations/${id}` }, exploration.model), labels),
    COLUMNS.map(([, isFigure, show]) => el("td", { class: isFigure && "figure" }, show(exploration, find))),
  );
}
