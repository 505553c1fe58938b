/** The form that submits an exploration. */

import { el } from "./dom.js";
import { Problem, submitExploration } from "./service.js";

/** Show the form. */
export function showSubmit(root, signal, shell) {
  document.title = "Submit · bexp";
  const title = el("h1", { tabindex: "-1" }, "Submit an exploration");
  const text = el("textarea", {
    id: "document", rows: "18", required: true, spellcheck: "false", autocapitalize: "off", "aria-describedby": "document-help errors",
  });
  const file = el("input", { id: "file", type: "file", accept: ".json,.yaml,.yml" });
  const errors = el("div", { id: "errors", class: "trouble", role: "alert" });
  const button = el("button", { type: "submit", class: "primary" }, "Submit");
  file.addEventListener("change", async () => {
    if (file.files.length > 0) text.value = await file.files[0].text();
  });
  const form = el(
    "form",
    { class: "card", onsubmit: submit },
    el("label", { for: "document" }, "A request, or a config.json"),
    el("p", { id: "document-help", class: "quiet" },
      "JSON or YAML: a request of bexp, a Hugging Face config.json, or a Cerebras configuration. Fields of a request, ",
      "such as \"batch_size\": 256, may stand beside those of a config.json."),
    text,
    el("label", { for: "file" }, "or choose a file"),
    file,
    errors,
    el("p", {}, button),
  );
  root.replaceChildren(el("header", { class: "page-head" }, title), form);
  title.focus({ preventScroll: true });

  async function submit(event) {
    event.preventDefault();
    button.disabled = true;
    errors.replaceChildren();
    try {
      const exploration = await submitExploration(text.value);
      if (!signal.aborted) location.hash = `#/explorations/${exploration.id}`;
    } catch (error) {
      if (!(error instanceof Problem) || error.isUnauthorized) shell.report(error, signal);
      else errors.replaceChildren(...problemText(error));
    } finally {
      button.disabled = false;
    }
  }
}

function problemText(error) {
  const fieldErrors = error.problem.errors ?? [];
  const items = fieldErrors.map(({ field, message }) => el("li", {}, field && el("code", {}, field), field && ": ", message));
  return [el("p", {}, error.message), items.length > 0 && el("ul", {}, items)].filter(Boolean);
}
