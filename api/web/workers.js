/** The workers: what each has and runs, how busy its GPUs are, and who has the devices that others wait for. */

import { el } from "./dom.js";
import * as format from "./format.js";
import { listWorkers, pause } from "./service.js";

const AGAIN_MILLISECONDS = 5_000;
const BADGES = { measuring: "running", waiting: "queued", lost: "failed" };

/** Each column: its name, and what it shows of a worker. */
const COLUMNS = [
  ["state", ({ state, reserved }) => {
    const shown = reserved && state === "idle" ? "reserved" : state;
    return el("span", { class: `badge ${BADGES[state] ?? ""}` }, shown);
  }],
  ["exploration", ({ exploration: id, exploration_model: model }) =>
    (id ? [el("a", { href: `#/explorations/${id}` }, model ?? id), model && el("code", { class: "about" }, id)] : "–")],
  ["for", ({ state, exploration_started_at: since }) => (since && state === "measuring" ? format.duration(since, null) : "–")],
  ["devices", ({ num_devices: count, device_name: name, devices }) => [count > 1 && `${count} x `, name || "–", " ", el("code", {}, devices)]],
  ["GPU use", ({ gpus }) => each(gpus, ({ busy_share: share }) => share !== undefined && format.percent(share, 0))],
  ["temperature", ({ gpus }) => each(gpus, ({ temperature_celsius: celsius }) => celsius !== undefined && `${celsius}\u00a0°C`)],
  ["torch", ({ versions }) => versions.torch ?? "–"],
  ["last heartbeat", ({ last_heartbeat_at: at }) => el("time", { datetime: at }, format.moment(at))],
  ["host", ({ host }) => host],
];

/** What each GPU shows, in the order of the devices. */
const each = (gpus, show) => gpus?.map((gpu) => show(gpu) || "–").join(", ") ?? "–";

function cell([name, show], worker) {
  const shown = show(worker);
  return el("td", { role: "cell", "data-name": name, class: shown === "–" && "nothing" }, [shown].flat(2));
}

/** Show the workers and keep them current until `signal` is aborted. */
export async function showWorkers(root, signal, shell) {
  document.title = "Workers · bexp";
  const title = el("h1", { tabindex: "-1" }, "Workers");
  const body = el("tbody", { role: "rowgroup" });
  const empty = el("p", { class: "quiet", hidden: true }, "No worker is running. ", el("code", {}, "bexp worker"), " starts one.");
  const held = el("ul");
  const waiting = el("section", { class: "card", "aria-labelledby": "held-title", hidden: true },
    el("h2", { id: "held-title" }, "Waiting for a device"), held);
  const head = ["worker", ...COLUMNS.map(([name]) => name)].map((name) => el("th", { scope: "col", role: "columnheader" }, name));
  root.replaceChildren(
    el("header", { class: "page-head" }, title, el("p", { class: "quiet" }, `All times are those of ${format.ZONE}.`)),
    el("div", { class: "card scroll whole", tabindex: "0", role: "region", "aria-label": "Workers" },
      el("table", { class: "data workers", role: "table" }, el("caption", { class: "hidden" }, "Workers"),
        el("thead", { role: "rowgroup" }, el("tr", { role: "row" }, head)), body), empty),
    waiting,
  );
  const read = async () => {
    const { items } = await listWorkers(signal);
    const focused = body.contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
    body.replaceChildren(...items.map((worker) => el("tr", { role: "row" },
      el("th", { scope: "row", role: "rowheader" }, el("code", {}, worker.id)), COLUMNS.map((column) => cell(column, worker)))));
    if (focused) body.querySelector(`[href="${focused}"]`)?.focus({ preventScroll: true });
    const those = items.filter(({ state }) => state === "waiting");
    held.replaceChildren(...those.map(({ id, held_by: by }) => el("li", {}, el("code", {}, id), `: ${by}`)));
    empty.hidden = items.length > 0;
    waiting.hidden = those.length === 0;
    shell.connection(true);
  };
  await read();
  if (!root.contains(document.activeElement)) title.focus({ preventScroll: true }); // a reader may be faster
  while (!signal.aborted) {
    await pause(AGAIN_MILLISECONDS, signal);
    if (signal.aborted || document.hidden) continue;
    try {
      await read();
    } catch (error) {
      if (!shell.isPassing(error)) throw error;
      if (!signal.aborted) shell.connection(false, error);
    }
  }
}
