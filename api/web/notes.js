/** The notes of people on an exploration, folded while there are none; written where `save` is given. */

import { el } from "./dom.js";

const MOST = 4000;

/** `save` takes a text and returns a promise; without it there is nothing to write with. */
export class Notes {
  constructor(save = null) {
    this.known = "";
    this.text = save === null ? el("p", { class: "written" })
      : el("textarea", { rows: 3, maxlength: MOST, "aria-labelledby": "notes-title", oninput: () => this.#offer() });
    this.button = el("button", { type: "button", disabled: true, onclick: () => this.#save(save) }, "Save the notes");
    this.said = el("span", { class: "quiet", role: "status" });
    this.root = el("details", { class: "card notes" }, el("summary", {}, el("h2", { id: "notes-title" }, "Notes")),
      this.text, save !== null && el("p", { class: "actions" }, this.button, this.said));
    this.isWritten = save !== null;
  }

  /** Show the stored notes; what somebody is writing here stays. */
  update(stored) {
    const text = stored ?? "";
    if (text !== this.known && this.known === "") this.root.open = true;
    if (!this.isWritten) {
      this.text.textContent = this.known = text;
      this.root.hidden = text === "";
    } else if (text !== this.known) {
      if (this.text.value === this.known) this.text.value = text;
      this.known = text;
      this.#offer();
    }
  }

  #offer() {
    this.button.disabled = this.text.value === this.known;
    this.said.textContent = "";
  }

  async #save(save) {
    const text = this.text.value;
    this.button.disabled = true;
    try {
      await save(text);
      this.known = text;
      this.#offer();
      this.said.textContent = "Saved";
    } catch {
      this.button.disabled = false; // the page says why
    }
  }
}
