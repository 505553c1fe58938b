/** The list of explorations. */

import { el } from "./dom.js";
import * as format from "./format.js";
import { listExplorations, pause } from "./service.js";

const AGAIN_MILLISECONDS = 5_000;
const STATES = ["queued", "running", "succeeded", "failed", "cancelled"];

/** Show the list and keep its first page current until `signal` is aborted. */
export async function showList(root, signal, shell) {
  document.title = "Explorations · bexp";
  const title = el("h1", { tabindex: "-1" }, "Explorations");
  const state = el("select", { id: "state" }, el("option", { value: "" }, "all"), STATES.map((name) => el("option", { value: name }, name)));
  const wanted = el("input", { id: "wanted", type: "search", placeholder: "model or key=value", maxlength: 192 });
  const body = el("tbody");
  const older = el("button", { type: "button", hidden: true }, "Show older ones");
  const empty = el("p", { class: "quiet", hidden: true }, "There are none. ", el("a", { href: "#/submit" }, "Submit one"), ".");
  const head = ["model", "state", "micro-batch", "confidence", "submitted", "id"];
  const figures = new Set(["micro-batch", "confidence"]);
  root.replaceChildren(
    el("header", { class: "page-head" }, title, el("div", { class: "actions" }, el("label", {}, "Model or label ", wanted), el("label", {}, "State ", state))),
    el(
      "div",
      { class: "card scroll whole", tabindex: "0", role: "region", "aria-label": "Explorations" },
      el("table", { class: "data list" }, el("caption", { class: "hidden" }, "Explorations, the newest first"),
        el("thead", {}, el("tr", {}, head.map((name) => el("th", { scope: "col", class: figures.has(name) && "figure" }, name)))), body),
      empty,
    ),
    older,
  );

  let pages = 1;
  const read = async () => {
    const items = [];
    let cursor = null;
    for (let page = 0; page < pages; page += 1) {
      const text = wanted.value.trim();
      const filter = { ...(state.value && { state: state.value }), ...(text && { [text.includes("=") ? "label" : "model"]: text }) };
      const query = { limit: 50, ...filter, ...(cursor && { cursor }) };
      const listed = await listExplorations(query, signal);
      items.push(...listed.items);
      cursor = listed.next_cursor;
      if (cursor === null) break;
    }
    const focused = document.activeElement?.getAttribute("href");
    body.replaceChildren(...items.map((item) => row(item, find)));
    if (focused?.startsWith("#/explorations/")) body.querySelector(`a[href="${focused}"]`)?.focus();
    empty.hidden = items.length > 0;
    older.hidden = cursor === null;
    shell.connection(true);
  };
  const readNow = () => read().catch((error) => shell.report(error, signal));
  const readFirst = () => ((pages = 1), readNow());
  const find = (label) => ((wanted.value = label), readFirst());
  state.addEventListener("change", readFirst);
  wanted.addEventListener("change", readFirst);
  older.addEventListener("click", () => ((pages += 1), readNow()));
  await read();
  title.focus({ preventScroll: true });
  while (!signal.aborted) {
    await pause(AGAIN_MILLISECONDS, signal);
    if (signal.aborted || document.hidden) continue;
    try {
      await read();
    } catch (error) {
      if (!shell.isPassing(error)) throw error;
      shell.connection(false);
    }
  }
}

function row(exploration, find) {
  const labels = format.labels(exploration.labels).map((text) =>
    el("button", { type: "button", class: "label", title: "List those with this label", onclick: () => find(text) }, text));
  const trouble = exploration.error ?? exploration.waiting_reason;
  return el(
    "tr",
    {},
    el("th", { scope: "row" }, el("a", { href: `#/explorations/${exploration.id}` }, exploration.model), labels),
    el("td", {}, el("span", { class: `badge ${exploration.state}`, title: trouble }, exploration.state), exploration.answered_from && el("span", { class: "quiet reused" }, " reused")),
    el("td", { class: "figure" }, exploration.micro_batch_size ?? "–"),
    el("td", { class: "figure" }, exploration.confidence ?? "–"),
    el("td", {}, el("time", { datetime: exploration.created_at }, format.moment(exploration.created_at))),
    el("td", {}, el("code", {}, exploration.id)),
  );
}
