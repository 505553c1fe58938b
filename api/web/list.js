/** The list of explorations. */

import { stateBadge } from "./badge.js";
import { MOST_COMPARED } from "./compare.js";
import { el } from "./dom.js";
import * as format from "./format.js";
import { listExplorations, pause } from "./service.js";
import { waitingText } from "./waiting.js";

const AGAIN_MILLISECONDS = 5_000;
const TYPING_MILLISECONDS = 200; // without another letter, before a search begins
const MOST_WORDS = 8; // of a search
const STATES = ["queued", "running", "succeeded", "failed", "cancelled"];
const NOTHING = "–";

/**
 * Each column: its name, what of an exploration it shows, by what it is sorted, and whether that is a figure. A figure
 * is sorted from the highest first.
 */
const COLUMNS = [
  { name: "model", key: (one) => one.model.toLowerCase() },
  { name: "state", key: (one) => STATES.indexOf(one.state) + (one.queue ? 1 - 1 / one.queue.place : 0), show: (one) => [
    stateBadge(one, whyOf(one)),
    one.answered_from && el("span", { class: "quiet reused" }, " reused"),
  ] },
  { name: "device", key: (one) => one.device_name, show: (one, find) => one.device_name && finder(one.device_name, "find", find) },
  { name: "micro-batch", isFigure: true, key: (one) => one.micro_batch_size },
  { name: "rate", isFigure: true, key: (one) => one.tokens_per_second, show: (one) => one.tokens_per_second !== null &&
    [format.number(one.tokens_per_second), el("span", { class: "unit" }, `\u00a0${format.unit(one)}`)] },
  { name: "gain", isFigure: true, key: (one) => one.performance, show: (one) => one.performance && `${one.performance.toFixed(2)}x` },
  { name: "confidence", isFigure: true, key: (one) => one.confidence },
  { name: "duration", isTime: true, key: (one) => one.started_at && seconds(one), show: (one) =>
    one.started_at && format.duration(one.started_at, one.finished_at) },
  { name: "submitted", isTime: true, key: (one) => one.created_at, show: (one) =>
    el("time", { datetime: one.created_at, title: format.moment(one.created_at) }, format.day(one.created_at)) },
  { name: "owner", key: (one) => one.owner, show: (one, find) => finder(one.owner, "find", find) },
];
/** Why an exploration has no answer: its error, or what it waits for. */
const whyOf = (one) => one.error ?? (one.state === "queued" ? waitingText(one) : one.waiting_reason);
const NEWEST = { name: "submitted", isDown: true };

const seconds = ({ started_at: from, finished_at: to }) => (to === null ? Date.now() : Date.parse(to)) - Date.parse(from);

/** Return explorations by a column; those that have nothing there come last. Rates of two units are kept apart. */
function sorted(items, { name, isDown }) {
  const { key } = COLUMNS.find((column) => column.name === name);
  const order = (a, b) => {
    const [x, y] = [key(a), key(b)];
    if (x === null || y === null) return (x === null) - (y === null);
    if (name === "rate" && a.rate_unit !== b.rate_unit) return a.rate_unit === undefined ? -1 : 1;
    return (isDown ? -1 : 1) * (x < y ? -1 : x > y ? 1 : 0);
  };
  return items.toSorted(order);
}

/** A button that searches for its text. */
const finder = (text, kind, find) =>
  el("button", { type: "button", class: kind, title: "List those with this", onclick: () => find(text) }, text);

/** Show the list and keep its first page current until `signal` is aborted. */
export async function showList(root, signal, shell) {
  document.title = "Explorations · bexp";
  const title = el("h1", { tabindex: "-1" }, "Explorations");
  const state = el("select", { id: "state" }, el("option", { value: "" }, "all"), STATES.map((name) => el("option", { value: name }, name)));
  const wanted = el("input", { id: "wanted", type: "search", placeholder: "model, id, device, owner, key=value", maxlength: 192 });
  const body = el("tbody", { role: "rowgroup" });
  const older = el("button", { type: "button", hidden: true }, "Show older ones");
  const none = el("span", {}, "There are none. ", el("a", { href: "#/submit" }, "Submit one"), ".");
  const noMatch = el("span", {}, "Nothing matches. ", el("a", { href: "#/" }, "Show all"), ".");
  const empty = el("p", { class: "quiet", hidden: true });
  const compare = el("a", { class: "button primary compare-chosen", hidden: true });
  const hint = el("span", { class: "quiet", role: "status" });
  const chosen = new Set();
  const from = new URLSearchParams(location.hash.split("?")[1]);
  wanted.value = from.get("search") ?? "";
  state.value = STATES.includes(from.get("state")) ? from.get("state") : "";
  const isColumn = COLUMNS.some(({ name }) => name === from.get("sort"));
  let order = isColumn ? { name: from.get("sort"), isDown: !from.has("up") } : NEWEST;
  let items = [];
  const heads = COLUMNS.map(({ name, isFigure, isTime }) => {
    const sort = () => {
      order = { name, isDown: order.name === name ? !order.isDown : Boolean(isFigure || isTime) };
      keep();
      draw();
    };
    return el("th", { scope: "col", role: "columnheader", class: (isFigure || name === "duration") && "figure" },
      el("button", { type: "button", "data-column": name, onclick: sort }, name));
  });
  const choose = el("th", { scope: "col", role: "columnheader" }, el("span", { class: "hidden" }, "compare"));
  const among = el("span", { class: "quiet", role: "status" });
  root.replaceChildren(
    el("header", { class: "page-head" }, title,
      el("div", { class: "actions" }, hint, compare, el("label", {}, "Search ", wanted), el("label", {}, "State ", state))),
    el(
      "div",
      { class: "card scroll whole listed", tabindex: "0", role: "region", "aria-label": "Explorations" },
      el("table", { class: "data list", role: "table" }, el("caption", { class: "hidden" }, "Explorations"),
        el("thead", { role: "rowgroup" }, el("tr", { role: "row" }, choose, heads)), body),
      empty,
    ),
    el("p", { class: "more" }, older, among),
  );
  /** Show what was read in the order that is wanted; what has the focus keeps it. */
  const draw = () => {
    const focused = document.activeElement;
    const line = focused?.closest("tr[data-id]");
    const place = line && usable(line).indexOf(focused);
    body.replaceChildren(...sorted(items, order).map((item) => row(item, find, chosen, offer)));
    if (line) usable(body.querySelector(`[data-id="${line.dataset.id}"]`))[place]?.focus({ preventScroll: true });
    heads.forEach((head, index) => {
      if (COLUMNS[index].name === order.name) head.setAttribute("aria-sort", order.isDown ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
    });
    empty.hidden = items.length > 0;
    if (!empty.hidden) empty.replaceChildren(isFiltered ? noMatch : none);
    const isPart = !older.hidden && !isNewest();
    const said = isPart ? `Sorted among the ${items.length} newest.` : "";
    if (among.textContent !== said) among.textContent = said;
    offer();
  };

  const isNewest = () => order.name === NEWEST.name && order.isDown === NEWEST.isDown;
  const filter = () => {
    const search = wanted.value.trim();
    return { ...(state.value && { state: state.value }), ...(search && { search }) };
  };
  /** Write what is shown into the address, where Back and a reload find it. */
  const keep = () => {
    const sort = isNewest() ? {} : { sort: order.name, ...(!order.isDown && { up: "" }) };
    const query = String(new URLSearchParams({ ...filter(), ...sort }));
    history.replaceState(null, "", query ? `#/?${query}` : "#/");
  };
  let pages = 1;
  let asked = 0;
  let isFiltered = false; // what is shown
  /** Read and show what is wanted, unless something else is wanted by the time that the service answers. */
  const read = async () => {
    const mine = (asked += 1);
    const listing = [];
    let cursor = null;
    for (let page = 0; page < pages; page += 1) {
      const query = { limit: 50, ...filter(), ...(cursor && { cursor }) };
      const listed = await listExplorations(query, signal).catch((error) => {
        if (mine === asked) throw error;
      });
      if (mine !== asked) return;
      listing.push(...listed.items);
      cursor = listed.next_cursor;
      if (cursor === null) break;
    }
    items = listing;
    isFiltered = Object.keys(filter()).length > 0;
    older.hidden = cursor === null;
    draw();
    shell.connection(true);
  };
  const offer = () => {
    compare.hidden = chosen.size < 2 || chosen.size > MOST_COMPARED;
    compare.textContent = `Compare ${chosen.size}`;
    compare.href = `#/compare/${[...chosen].join(",")}`;
    const isFull = chosen.size >= MOST_COMPARED;
    const full = `${MOST_COMPARED} at most are compared: untick one to tick another`;
    const said = isFull ? full : chosen.size === 1 ? "Tick another to compare" : "";
    if (hint.textContent !== said) hint.textContent = said;
    for (const box of body.querySelectorAll("input")) {
      box.disabled = !box.checked && isFull;
      box.parentElement.title = box.disabled ? full : "";
    }
  };
  const readNow = () => (shell.clear(), read().catch((error) => shell.report(error, signal)));
  const readFirst = () => (clearTimeout(typing), signal.aborted || ((pages = 1), keep(), readNow()));
  let typing = null;
  const find = (text) => ((wanted.value = text.split(" ", MOST_WORDS).join(" ")), readFirst());
  state.addEventListener("change", readFirst);
  wanted.addEventListener("change", readFirst); // also Enter
  wanted.addEventListener("input", () => {
    clearTimeout(typing);
    typing = setTimeout(readFirst, TYPING_MILLISECONDS);
  });
  older.addEventListener("click", () => ((pages += 1), readNow()));
  await read();
  if (!root.contains(document.activeElement)) title.focus({ preventScroll: true }); // a reader may be faster
  while (!signal.aborted) {
    await pause(AGAIN_MILLISECONDS, signal);
    if (signal.aborted || document.hidden) continue;
    try {
      await read();
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
  const why = exploration.micro_batch_size === null && whyOf(exploration);
  const cell = ({ name, isFigure, key, show = key }) => {
    const shown = show(exploration, find);
    const isNothing = shown === null || shown === false;
    const classes = [`is-${name}`, (isFigure || name === "duration") && "figure", isNothing && "nothing"];
    const attributes = { role: "cell", class: classes.filter(Boolean).join(" "), "data-name": isFigure && name };
    return el("td", attributes, isNothing ? NOTHING : shown);
  };
  return el(
    "tr",
    { "data-id": id, role: "row" },
    el("td", { role: "cell", class: "choose" }, el("label", {}, el("input", { ...box, checked: chosen.has(id) }))),
    el("th", { scope: "row", role: "rowheader" }, el("a", { href: `#/explorations/${id}` }, exploration.model), labels,
      el("code", { class: "about" }, id), why && el("span", { class: `about why${exploration.error ? " is-wrong" : ""}`, title: why }, why)),
    COLUMNS.slice(1).map(cell),
  );
}
