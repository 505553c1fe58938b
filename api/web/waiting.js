/** A queued exploration: its place, and what it waits for. */

import { el } from "./dom.js";
import * as format from "./format.js";

const OF_A_WORKER = /^(none|each) /;
const REPLAYED = "; recorded tables are replayed"; // one of them may take it

/** Return the elements; `exploration` is what the service shows of one that is queued. */
export function renderWaiting({ queue, waiting_reason: reason }) {
  const rows = [
    queue && (!reason?.startsWith("none ") || reason.includes(REPLAYED)) && ["place", `${queue.place} of ${queue.num_queued} in the queue`],
    reason === null ? ["waits for", "a worker, which may take it at once"]
      : OF_A_WORKER.test(reason) ? ["waits for", `a worker: ${reason}`] : ["waits because", reason],
    queue?.busy_until && ["the first worker is free", `at about ${format.moment(queue.busy_until)}, or earlier` +
      (queue.place > 1 ? `, for the first in the queue` : "")],
  ];
  return [
    el("h2", { id: "waiting-title" }, "Waiting"),
    el("dl", { class: "rows" }, rows.filter(Boolean).map(([name, text]) => el("div", {}, el("dt", {}, name), el("dd", {}, text)))),
  ];
}
