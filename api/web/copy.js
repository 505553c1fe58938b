/** Commands that a person may want next, each with a button that copies it. */

import { el } from "./dom.js";

const SAID_MILLISECONDS = 2_000;

/** Return a command with its button; `why` says what the command does. */
export function copyable(command, why = null) {
  const text = el("code", {}, command);
  const said = el("span", { class: "quiet", role: "status" });
  const copy = async () => {
    said.textContent = (await copied(command, text)) ? "Copied" : "Select it and copy it yourself";
    setTimeout(() => (said.textContent = ""), SAID_MILLISECONDS);
  };
  const button = el("button", { type: "button", "aria-label": `Copy ${command}`, onclick: copy }, "Copy");
  return el("p", { class: "command" }, why && el("span", { class: "why" }, why), text, button, said);
}

/** Copy a text and return whether that worked. Without HTTPS there is no clipboard, so what shows the text is selected. */
async function copied(text, shown) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    getSelection().selectAllChildren(shown);
    return document.execCommand("copy");
  }
}

/** Whether an exploration has ended before its search: one that failed with an answer would fail again. */
export const canGoOn = ({ state, answer }) => state === "cancelled" || (state === "failed" && !answer);

/** The commands that follow on an exploration, as pairs of what they do and how they are written. */
export function nextCommands({ id, state, recommendation, answer, own_formats: [format] = [] }) {
  const isOver = !["queued", "running"].includes(state);
  return [
    !isOver && ["Follow it in a terminal", `bexp watch ${id}`],
    recommendation && ["The answer as text", `bexp best ${id}`],
    recommendation && format && ["A file for a trainer", `bexp best ${id} --format ${format}`],
    recommendation && ["A page to send", `bexp report ${id} --out report.html`],
    canGoOn({ state, answer }) && ["Go on with it", `bexp resume ${id}`],
    !isOver && ["End it", `bexp cancel ${id}`],
  ].filter(Boolean);
}
