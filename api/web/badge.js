/** The state of an exploration as a badge. An answer below the confidence that was asked for is no success yet. */

import { el } from "./dom.js";
import * as format from "./format.js";

/** Return the badge; `title` says more, such as why it waits, and `note` follows the state. */
export function stateBadge(exploration, title = null, note = "") {
  if (!format.isProvisional(exploration)) return el("span", { class: `badge ${exploration.state}`, title }, exploration.state + note);
  const { confidence, confidence_target: target } = exploration;
  return el("span", { class: "badge provisional", title: `Confidence ${confidence} is below ${target}, which was asked for` }, "provisional");
}
