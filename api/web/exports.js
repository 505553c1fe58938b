/** Writes the answer of an exploration as a file for a training framework. */

import { el } from "./dom.js";
import { exportAnswer } from "./service.js";

export const FORMATS = [
  "transformers", "python", "accelerate", "deepspeed", "torchtitan", "torchtitan-main",
  "megatron", "lightning", "axolotl", "llamafactory", "cerebras",
];

/** Return a choice of formats with a button that saves the file; `shell` shows problems. */
export function exportControl(id, signal, shell) {
  const formats = el("select", {}, FORMATS.map((name) => el("option", {}, name)));
  const save = el("button", { type: "button" }, "Export");
  save.addEventListener("click", async () => {
    save.disabled = true;
    try {
      const { blob, name } = await exportAnswer(id, formats.value, signal);
      const address = URL.createObjectURL(blob);
      el("a", { href: address, download: name }).click();
      setTimeout(() => URL.revokeObjectURL(address), 10_000);
    } catch (error) {
      shell.report(error, signal);
    } finally {
      save.disabled = false;
    }
  });
  return el("span", { class: "export" }, el("label", {}, "For ", formats), save);
}
