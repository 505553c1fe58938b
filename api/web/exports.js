/** Writes the answer of an exploration as a file for a training framework. */

import { el } from "./dom.js";
import { exportAnswer } from "./service.js";

/** Return a choice of formats with a button that saves the file; `offer` sets the formats. `shell` shows problems. */
export function exportControl(id, signal, shell) {
  const formats = el("select");
  const save = el("button", { type: "button", class: "primary" }, "Export");
  save.addEventListener("click", async () => {
    save.disabled = true;
    said.textContent = "";
    shell.clear();
    try {
      const { blob, name, notes } = await exportAnswer(id, formats.value, signal);
      const address = URL.createObjectURL(blob);
      el("a", { href: address, download: name }).click();
      if (notes) said.textContent = `Not in ${name}, which takes no comments: ${notes}`;
      setTimeout(() => URL.revokeObjectURL(address), 10_000);
    } catch (error) {
      shell.report(error, signal);
    } finally {
      save.disabled = false;
    }
  });
  const said = el("span", { class: "quiet", role: "status" });
  const root = el("span", { class: "export" }, el("label", {}, "For ", formats), save, said);
  let offered = "";
  return {
    root,
    offer(names) {
      root.hidden = names.length === 0;
      if (offered !== names.join()) formats.replaceChildren(...names.map((name) => el("option", {}, name)));
      offered = names.join();
    },
  };
}
