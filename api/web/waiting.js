/** A queued exploration: its place, and what it waits for. */

import { el } from "./dom.js";
import * as format from "./format.js";

const REPLAYED = "recorded tables that are replayed"; // one of them may take it

/** The place in the queue; nothing where no worker that is running would take it. */
const placeOf = ({ queue, waiting_reason: reason }) =>
  queue && (!reason?.startsWith("none ") || reason.includes(REPLAYED)) && `${queue.place} of ${queue.num_queued} in the queue`;

/** Why it waits, which the service says of workers: `none with 80 GiB of memory is running`. */
const whyOf = ({ waiting_reason: reason }) =>
  reason?.replace(/^none /, "no worker ").replace(/^each /, "each worker ") ?? "a worker may take it at once";

/** Both in one line, for a list. */
export const waitingText = (exploration) => [placeOf(exploration), whyOf(exploration)].filter(Boolean).join("; ");

/** Return the elements; `exploration` is what the service shows of one that is queued. */
export function renderWaiting(exploration) {
  const { queue } = exploration;
  const place = placeOf(exploration);
  const rows = [
    place && ["place", place],
    ["why it waits", whyOf(exploration)],
    queue?.busy_until && ["the first worker is free", `at about ${format.moment(queue.busy_until)}, or earlier` +
      (queue.place > 1 ? `, for the first in the queue` : "")],
  ];
  return [
    el("h2", { id: "waiting-title" }, "Waiting"),
    el("dl", { class: "rows" }, rows.filter(Boolean).map(([name, text]) => el("div", {}, el("dt", {}, name), el("dd", {}, text)))),
  ];
}
